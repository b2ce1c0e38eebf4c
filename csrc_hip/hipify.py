"""Turns the shared kernel tree (csrc_cuda/kernels) into HIP, and checks that nothing of CUDA is left in it.

    python csrc_hip/hipify.py              # writes csrc_hip/hipified, for reading and for hipcc
    python csrc_hip/hipify.py --check      # writes nothing; fails where something of CUDA is left

``hipify(text)`` is a pure function. The image compilers call it on every header of the tree, so that what is compiled
never depends on a folder written earlier. The names are torch's (torch.utils.hipify), with a map of our own for what
torch leaves. The tree is meant to be neutral: most files come out as they are, and then torch is not even imported.

The map goes to HIP's own language (hipcc and HIPRTC know it). Plain clang knows only what arch/cdna/language.h gives
it; where a kernel begins to use more, the check says so, and the name belongs into an arch or into that header.

Standard library only, besides torch.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent / "csrc_cuda" / "kernels"
HIPIFIED = HERE / "hipified"

# A name of CUDA. Only such names are looked up in torch's tables, and none may be left over; cu_seqlens is none.
_CUDA_NAME = re.compile(
    r"""(?<!\w)(?:
    \w*(?:cuda|CUDA)\w*
  | cu[A-Z]\w* | CU(?:[a-z]|_)\w* | cu(?:blas|rand|fft|sparse|solver|dnn|tensor|tlass)\w* | cu(?:b|te)(?=::|/)
  | (?:__)?(?:nv|NV)_\w+ | (?:nv|NV)[A-Z]\w* | nv(?:rtc|ml|tx|toolsext|cuda|shmem)\w* | nccl\w*
  )(?!\w)""",
    re.VERBOSE,
)

# What torch leaves. e4m3 and e5m2 are the OCP formats on both sides; AMD's older ones are called *_fnuz.
_INCLUDES = {"cuda_fp8.h": "hip/hip_fp8.h"}
_NAMES = {
    "nv_bfloat16": "__hip_bfloat16",
    "nv_bfloat162": "__hip_bfloat162",
    "__nv_bfloat16_raw": "__hip_bfloat16_raw",
    "__nv_bfloat162_raw": "__hip_bfloat162_raw",
    **{
        f"__nv_{name}": f"__hip_{name}"
        for name in (
            *(f"fp8{lanes}_{kind}" for lanes in ("", "x2", "x4") for kind in ("e4m3", "e5m2", "storage_t")),
            *("fp8_interpretation_t", "saturation_t"),
            *("cvt_float_to_fp8", "cvt_float2_to_fp8x2", "cvt_fp8_to_halfraw", "cvt_fp8x2_to_halfraw2"),
        )
    },
    **{f"__NV_{name}": f"__HIP_{name}" for name in ("E4M3", "E5M2", "SATFINITE", "NOSAT")},
}
_FULL_MASK = r"(?:0[xX][fF]{8}[uU]?|~0[uU]?|-1)"
_WAVE_BARRIER = (
    '(__builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront"), __builtin_amdgcn_wave_barrier(), '
    '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront"))'
)
# Not mapped, since the number they give would be cut to 32 bits in silence: __ballot_sync, __activemask.
_PATTERNS = (
    (re.compile(rf"\b__(shfl(?:_xor|_up|_down)?|any|all)_sync\(\s*{_FULL_MASK}\s*,\s*"), r"__\1("),
    (re.compile(rf"\b__syncwarp\(\s*(?:{_FULL_MASK})?\s*\)"), _WAVE_BARRIER),
    (re.compile(r"\b((?:kWarpSize|warp_size|WARP_SIZE)(?:\s*=\s*|[ \t]+))32\b"), r"\g<1>64"),
    (re.compile(r"\b__grid_constant__\s*"), ""),
)

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<include>^[ \t]*\#[ \t]*include[ \t]*[<"](?P<path>[^>"\n]*)[>"])
  | (?P<string>"(?:\\.|[^"\\\n])*")
  | (?P<name>[A-Za-z_]\w*)""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)


def hipify(text: str) -> str:
    """The text in HIP's names. Comments, and whatever is in no table, stay."""
    done, end = [], 0
    for token in _TOKEN.finditer(text):
        if token["comment"]:
            done += [_hipify_code(text[end : token.start()]), token[0]]
            end = token.end()
    return "".join(done) + _hipify_code(text[end:])


def _hipify_code(code: str) -> str:
    for pattern, replacement in _PATTERNS:
        code = pattern.sub(replacement, code)
    return _TOKEN.sub(_renamed, code) if _CUDA_NAME.search(code) else code


def _renamed(token: re.Match[str]) -> str:
    includes, names = _tables()
    if token["include"] and token["path"] in includes:
        return token["include"].replace(token["path"], includes[token["path"]])
    if token["name"]:
        return names.get(token["name"], token["name"])
    return token[0]


@lru_cache(maxsize=1)
def _tables() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """(headers, names) of torch and our own. torch's tables for its own C++ code are left out."""
    from torch.utils.hipify import cuda_to_hip_mappings as torch_maps

    headers = {k.removeprefix("include ").strip('<>"'): v for k, v in torch_maps.CUDA_INCLUDE_MAP.items()}
    headers = {k: v.removeprefix("include ").strip('<>"') for k, v in headers.items()}
    names: dict[str, str] = {}
    for table in (torch_maps.CUDA_SPECIAL_MAP, torch_maps.CUDA_IDENTIFIER_MAP, torch_maps.CUDA_TYPE_NAME_MAP):
        names |= {k: v for k, v in table.items() if _CUDA_NAME.fullmatch(k)}
    return {**headers, **_INCLUDES}, {**names, **_NAMES}


def without_comments(text: str) -> str:
    """The code alone; lines keep their numbers."""
    return _TOKEN.sub(lambda t: re.sub(r"[^\n]", " ", t[0]) if t["comment"] else t[0], text)


# ---------------------------------------------------------------- the gate
class Leftover(NamedTuple):
    """``kind`` says what is wrong with ``word``."""

    file: str
    line: int
    word: str
    kind: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word!r} {self.kind}"


_THREAD = r"(?:\w*(?:lane|warp|thread)\w*|tid|threadIdx)(?:\.x)?(?:\(\))?"
_RULES = (
    (_CUDA_NAME, "is a name of CUDA"),
    (
        re.compile(r"\#[ \t]*include[ \t]*<(?:mma|cooperative_groups|cuda|cu|nv)[^>\n]*>"),
        "includes a header of CUDA",
    ),
    (re.compile(r"\b(?:asm|__asm|__asm__)\b"), "is inline assembly: instructions belong into an arch"),
    (
        re.compile(r"\b__\w+_sync\b|\b__(?:syncwarp|activemask)\b"),
        "works on a warp of 32 lanes: ask the Arch",
    ),
    (
        re.compile(r"\b__(?:cvta_\w+|nanosleep|cluster_dims__|grid_constant__|maxnreg__)(?!\w)"),
        "is known to CUDA alone",
    ),
    (re.compile(r"\b0[xX][fF]{8}[uU]?(?!\w)"), "is a mask of 32 lanes: a wave has 64"),
    (re.compile(r"\b1[uU]?\s*<<\s*\(?\s*\w*lane\w*"), "shifts 32 bits by one of 64 lanes"),
    (re.compile(r"\bwarpSize\b"), "is no constant, and 64 on CDNA: Arch::kWarpSize"),
    (
        re.compile(
            rf"(?i)\b{_THREAD}\s*(?:(?:[%/*<>=!]=?|[-+])\s*32|&\s*(?:31|0x1f)|(?:>>|<<)\s*5)(?!\w)"
            rf"|(?<!\w)32\s*(?:\*|[<>]=?)\s*{_THREAD}|\#[ \t]*define[ \t]+\w*warp\w*[ \t]+32(?!\w)"
        ),
        "takes a warp to have 32 lanes: Arch::kWarpSize",
    ),
)


def leftovers(file: str, text: str) -> list[Leftover]:
    """What of CUDA is left in a generated file, in the order of lines."""
    found = []
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        for pattern, kind in _RULES:
            found += [Leftover(file, number, match[0].strip(), kind) for match in pattern.finditer(line)]
    return found


def generate(folder: Path = KERNELS) -> dict[str, str]:
    """The generated tree: name ("kernels/params.h") -> text."""
    paths = sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cuh", ".cu", ".inl"))
    return {f"kernels/{p.relative_to(folder).as_posix()}": hipify(p.read_text()) for p in paths}


def missing_headers(tree: Mapping[str, str]) -> Iterator[Leftover]:
    """Includes that the tree does not hold; config.h is made for each image."""
    for file, text in tree.items():
        for number, line in enumerate(without_comments(text).splitlines(), 1):
            match = _TOKEN.match(line)
            if match and match["include"] and match["path"] not in (*tree, "config.h"):
                yield Leftover(file, number, match["path"], "is not in the tree: device code includes only it")


COMPILERS = ("clang++-23", "clang++-22", "amdclang++")


def compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def compile_errors(tree: Mapping[str, str], program: str) -> str:
    """What clang says of the generated headers as device code of gfx90a, without HIP's headers; "" where they compile.
    Their templates are instantiated by tests/compile."""
    with tempfile.TemporaryDirectory(prefix="xattn-hipify-") as folder:
        _write(tree, Path(folder))
        headers = [name for name in tree if name.endswith((".h", ".cuh"))]
        lines = [f'#include "{name}"\n' for name in ("arch/cdna/language.h", *headers)]
        main = Path(folder, "all.hip")
        main.write_text("".join(lines))
        flags = ["-x", "hip", "--offload-arch=gfx90a", "--cuda-device-only", "-nogpuinc", "-nogpulib", "-std=c++17"]
        command = [program, *flags, "-fsyntax-only", f"-I{folder}", f"-I{HERE}", str(main)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stderr.replace(f"{folder}/", "") if done.returncode else ""


def problems(tree: Mapping[str, str], written: Path | None = None) -> list[str]:
    """What is wrong with a generated tree, one line each; ``written``: a folder that should hold the same."""
    found = [str(x) for file, text in tree.items() for x in leftovers(file, text)]
    found += map(str, missing_headers(tree))
    if written is not None and written.is_dir():
        have = {p.relative_to(written).as_posix(): p.read_text() for p in written.rglob("*") if p.is_file()}
        stale = sorted(name for name in {*have, *tree} if have.get(name) != tree.get(name))
        found += [f"{written / name}: out of date, run hipify.py again" for name in stale]
    program = compiler()
    if program:
        found += compile_errors(tree, program).splitlines()
    return found


def _write(tree: Mapping[str, str], folder: Path) -> None:
    for name, text in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="hipify.py",
        description="Turns csrc_cuda/kernels into HIP, and checks that nothing of CUDA is left.",
        epilog="Exit status of --check: 0 where nothing is left, 1 otherwise; each finding is file:line: word and why.",
    )
    parser.add_argument("--out", type=Path, default=HIPIFIED, metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; report what of CUDA is left in the generated tree, what would not compile (where there is "
        f"one of {', '.join(COMPILERS)}), and whether DIR, if there is one, is out of date",
    )
    options = parser.parse_args(None if arguments is None else list(arguments))
    if (options.out / "kernels").resolve() == KERNELS.resolve():
        parser.error(f"--out {options.out} holds the sources: choose another folder")
    tree = generate()
    changed = sum(text != (KERNELS.parent / name).read_text() for name, text in tree.items())
    if not options.check:
        shutil.rmtree(options.out / "kernels", ignore_errors=True)
        _write(tree, options.out)
        print(f"{len(tree)} files in {options.out}, {changed} of them changed")
        return 0
    found = problems(tree, options.out)
    for line in found:
        print(line, file=sys.stderr)
    compiled = "" if compiler() else f"; not compiled, since none of {', '.join(COMPILERS)} is there"
    print(f"{len(tree)} files, {changed} of them changed, {len(found)} findings{compiled}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
