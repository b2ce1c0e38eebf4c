"""Prints what the images of tests/compile/gates.py use, as a table in Markdown: registers / spilled, by configuration
and architecture. To be run from the checkout: python tests/compile/measure.py [--nvrtc 12] [ARCH ...]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (1, 2)]

from compile import gates, nvrtc, resources  # noqa: E402

from xattn.images import Image  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvrtc", type=int, default=13, choices=nvrtc.PACKAGES, help="major version (default: 13)")
    parser.add_argument("archs", nargs="*", metavar="ARCH", help="default: all that give machine code")
    options = parser.parse_args()
    archs = options.archs or [a for a in gates.ARCHS if not a.startswith("compute_")]
    print("| | " + " | ".join(archs) + " |\n|" + "---|" * (len(archs) + 1))
    for name in dict.fromkeys(name for name, arch in gates.GATES if arch in archs):
        cells = []
        for arch in archs:
            if (name, arch) not in gates.GATES:
                cells.append("")
                continue
            spec = gates.spec(name, arch)
            if arch.startswith("gfx"):
                code, kind, _ = resources.amd_compiler().compile(spec)
                used = resources.of_amd(Image(spec.key(), arch, kind, spec.name(), "", code))
            else:
                used = resources.of_nvidia(nvrtc.library(options.nvrtc).build(spec))
            cells.append(f"{used.registers} / {used.spilled}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
