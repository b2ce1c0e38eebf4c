"""A module imports only from rows above its own; backends do not know each other; some things have one place."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import xattn

ROOT = Path(xattn.__file__).parent

# From the ground up. A package counts as one module, and what happens inside it is its own affair.
ROWS = (
    {
        "errors",
        "settings",
        "concurrency",
        "problem",
        "places",
        "device_amd",
        "device_nvidia",
        "masks",
        "rng",
        "shards",
        "agreement",
        "launch_params",
        "nvrtc12",
        "options",
        "show",
        "step_mirror",
        "transfers",
    },
    {"device", "inputs", "status", "images"},
    {"capability", "rotary", "segments", "validate", "jit", "kernel_call", "fusion", "user_functions"},
    {"ranks", "keywords", "tensor_maps"},
    {"launch_bindings", "launch_library"},
    {"launch"},
    {"forward_call"},
    {"decode_call", "append_call", "backward_call"},
    {"wgmma_backward"},
    {"chunks", "paging", "page_pool", "page_moves", "probe"},
    {"reference"},
    {"backends"},
    {"dispatch"},
    {"appends"},
    {"repeats", "autograd", "ops"},
    {"paged", "kv_layout", "support", "shipped", "calls"},
    {"api"},
    {"questions"},
    {"partials"},
    {"distributed"},
    {"xattn"},  # the names that users import
    {"compat", "selftest"},
    {"cli", "__main__", "bench", "build", "check", "demo"},
)
ROW = {name: n for n, row in enumerate(ROWS) for name in row}
# A pair: an op's autograd kernel applies the Function, whose forward calls the op. And what only starts and shows.
TOGETHER = ({"ops", "autograd", "repeats"}, {"cli", "__main__", "bench", "build", "check", "demo"})


def imports(path: Path) -> set[tuple[str, ...]]:
    """The modules of xattn that a file imports, anywhere in it, as dotted parts below xattn; () is xattn itself."""
    package = ("xattn", *path.relative_to(ROOT).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            found |= {(*base, name.name) for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {tuple(name.name.split(".")) for name in node.names}
    return {_existing(parts[1:]) for parts in found if parts[0] == "xattn"}


def _existing(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The module among dotted parts whose last may be a name in it."""
    file = ROOT.joinpath(*parts)
    return parts if not parts or file.is_dir() or file.with_suffix(".py").exists() else parts[:-1]


def module_of(path: Path) -> str:
    top = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "xattn" if top == "__init__" else top


# An installed package also holds the kernel sources, and hipify.py among them: a program, not a module.
FILES = sorted(p for p in ROOT.rglob("*.py") if not p.relative_to(ROOT).parts[0].startswith("csrc_"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rows(path):
    name = module_of(path)
    assert name in ROW, f"{name} has no row: add it to ROWS where it belongs"
    for parts in imports(path):
        other = parts[0] if parts else "xattn"
        if other == name or {name, other} in TOGETHER or any({name, other} <= group for group in TOGETHER):
            continue
        assert ROW[other] < ROW[name], f"{path.name} imports {other}, which is not above it"


@pytest.mark.parametrize("path", sorted((ROOT / "backends").glob("*.py")), ids=lambda p: p.stem)
def test_backends_do_not_import_each_other(path):
    if path.stem == "__init__":
        return
    within = {parts[1] for parts in imports(path) if parts[0] == "backends" and len(parts) > 1}
    assert within <= {"base"}


@pytest.mark.parametrize(
    "pattern, allowed",
    [
        (r"getenv|environ\.get| in os\.environ|os\.environ\[[^]]+\](?! = )", {"settings.py"}),
        (r"torch\.version\.(hip|cuda)|get_device_capability|gcnArchName", {"device.py"}),
        (r"\bnvml\w*\(|\bcuInit\b", {"device_nvidia.py", "device.py", "launch.py"}),
        (r"(?<!\.)\b(exec|eval)\(", set()),
    ],
    ids=["environment", "architecture", "drivers", "eval"],
)
def test_done_in_one_place(pattern, allowed):
    found = {p.name for p in FILES if re.search(pattern, _code(p))}
    assert found <= allowed


def _code(path: Path) -> str:
    """The file without docstrings and comments."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.unparse(tree)


@pytest.mark.parametrize("name", ["flash_attn", "sdpa", "transformers"])
def test_drop_ins_are_there_and_imported_when_used(name):
    code = f"""
import sys
import xattn
assert "transformers" not in sys.modules and "xattn.compat" not in sys.modules
assert xattn.compat.{name}.__name__ == "xattn.compat.{name}"
assert ("transformers" in sys.modules) == ({name!r} == "transformers")
for place in (xattn, xattn.compat):
    assert not hasattr(place, "nosuch")
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_table_is_complete():
    assert len(ROW) == sum(map(len, ROWS)), "a module in two rows"
