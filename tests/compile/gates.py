"""What images may use: bounds by configuration and architecture, as data. Measured by tests/compile/measure.py.

A bound is what the image uses today, so that it can only fall. The wanted number of spills is 0.
"""

from __future__ import annotations

from typing import NamedTuple

from xattn.backends import sm80
from xattn.images import ConfigValue, ImageSpec

Config = tuple[tuple[str, ConfigValue], ...]


class Gate(NamedTuple):
    """At most so many registers a lane, and bytes (NVIDIA: stored and loaded) or registers (AMD) spilled."""

    registers: int
    spilled: int = 0


class Arch(NamedTuple):
    """``shared``: bytes of shared memory that a thread block may use."""

    entry: str
    shared: int


_SM80, _CDNA, _KB = "arch/sm80/forward.cu", "arch/cdna/forward.hip", 1024
ARCHS = {
    "sm_80": Arch(_SM80, 163 * _KB),
    "sm_86": Arch(_SM80, 99 * _KB),
    "sm_89": Arch(_SM80, 99 * _KB),
    "sm_90": Arch(_SM80, 227 * _KB),
    "sm_100": Arch(_SM80, 227 * _KB),
    "sm_103": Arch(_SM80, 227 * _KB),
    "sm_120": Arch(_SM80, 99 * _KB),
    "sm_121": Arch(_SM80, 99 * _KB),
    "compute_80": Arch(_SM80, 99 * _KB),
    "gfx90a": Arch(_CDNA, 64 * _KB),
    "gfx942": Arch(_CDNA, 64 * _KB),
    "gfx950": Arch(_CDNA, 160 * _KB),
}

# The cdna backend has no tile table yet: tiles that fit the smallest LDS, with the names of sm80's columns.
_CDNA_TILES = ((64, 64, 64, 4, 1), (128, 64, 64, 4, 1), (256, 64, 32, 4, 1))

# What a configuration adds to plain bf16 (causal is a run-time parameter: the plain image has it).
VARIANTS: dict[str, dict[str, ConfigValue]] = {
    "": {},
    "fp16": {"element": "fp16"},
    "softcap alibi": {"softcap": True, "alibi": True},
    "boolean": {"attn_mask": "boolean"},
    "added16": {"attn_mask": "added16"},
    "added32": {"attn_mask": "added32"},
}


def spec(name: str, arch: str) -> ImageSpec:
    """The image of a cell of GATES: "d128 softcap alibi" is the tile of head_dim 128 with that variant."""
    dim, _, variant = name.partition(" ")
    entry = ARCHS[arch].entry
    tiles = sm80._TILES if entry == _SM80 else _CDNA_TILES
    row = next(row for row in tiles if row[0] == int(dim[1:]))
    config: dict[str, ConfigValue] = {
        "element": "bf16",
        "head_dim": row[0],
        "head_dim_v": row[0],
        **dict(zip(sm80._TILE_NAMES, row[1:], strict=True)),
        "keep_q": False,
        "softcap": False,
        "alibi": False,
        "attn_mask": "none",
    }
    return ImageSpec(entry, tuple({**config, **VARIANTS[variant]}.items()), arch)


# Rows: configurations. Columns: architectures; each cell (registers, spilled).
#
# Shipped images: every variant. NVRTC 12.9, 13.0 and 13.5 use the same.
# d64 and d128 spill loop-invariant values on every architecture (and the masks their addresses); 255 registers are all
# that a thread can have.
_SHIPPED = {
    "d64": (255, 172),
    "d64 fp16": (255, 172),
    "d64 softcap alibi": (255, 376),
    "d128": (255, 184),
    "d128 fp16": (255, 184),
    "d128 softcap alibi": (255, 140),
    "d128 boolean": (255, 356),
    "d128 added16": (255, 352),
    "d128 added32": (255, 352),
    "d256": (244, 0),
    "d256 softcap alibi": (250, 0),
}

# Images compiled at first use: the tiles, the worse of NVRTC 13.0 and 13.5.
_LATER_ARCHS = ("sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
_LATER = {
    "d64": ((255, 148), (255, 148), (255, 184), (255, 224), (255, 244), (255, 212), (255, 212)),
    "d128": ((255, 144), (255, 144), (255, 112), (255, 136), (255, 108), (255, 132), (255, 132)),
    "d256": ((244, 0), (244, 0), (249, 0), (255, 0), (255, 0), (254, 0), (254, 0)),
}

# Registers are those of vector and accumulation together, of 512; clang 22.
_CDNA_ARCHS = ("gfx90a", "gfx942", "gfx950")
_CDNA_GATES = {
    "d64": ((94, 0), (102, 0), (102, 0)),
    "d64 fp16": ((94, 0), (96, 0), (96, 0)),
    "d64 softcap alibi": ((100, 0), (104, 0), (104, 0)),
    "d128": ((128, 0), (128, 0), (128, 0)),
    "d128 fp16": ((126, 0), (126, 0), (126, 0)),
    "d128 softcap alibi": ((128, 0), (128, 0), (128, 0)),
    "d128 boolean": ((128, 0), (128, 0), (128, 0)),
    "d128 added16": ((128, 0), (128, 0), (128, 0)),
    "d128 added32": ((128, 0), (128, 0), (128, 0)),
    "d256": ((146, 0), (146, 0), (146, 0)),
    "d256 softcap alibi": ((148, 0), (148, 0), (148, 0)),
}

GATES: dict[tuple[str, str], Gate] = {
    **{(name, "sm_80"): Gate(*cell) for name, cell in _SHIPPED.items()},
    **{(n, a): Gate(*c) for n, row in _LATER.items() for a, c in zip(_LATER_ARCHS, row, strict=True)},
    **{(n, a): Gate(*c) for n, row in _CDNA_GATES.items() for a, c in zip(_CDNA_ARCHS, row, strict=True)},
}
