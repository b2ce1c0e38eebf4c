"""What images may use: bounds by configuration and architecture, as data. Measured by ci/isa_report.

Spills may only fall from what they are; the wanted number is 0.
"""

from __future__ import annotations

from typing import NamedTuple

from xattn.backends import cdna, sm80
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

# What a configuration adds to plain bf16 (causal is a run-time parameter: the plain image has it).
VARIANTS: dict[str, dict[str, ConfigValue]] = {
    "": {},
    "fp16": {"element": "fp16"},
    "softcap alibi": {"softcap": True, "alibi": True},
    "boolean": {"attn_mask": "boolean"},
    "added16": {"attn_mask": "added16"},
    "added32": {"attn_mask": "added32"},
    "dropout": {"dropout": True},
}
PAGED_VARIANTS: dict[str, dict[str, ConfigValue]] = {
    "": {},
    "softcap alibi tree": {"softcap": True, "alibi": True, "attn_mask": "tree"},
}
FP8_VARIANTS: dict[str, dict[str, ConfigValue]] = {**PAGED_VARIANTS, "fp16": {"element": "fp16"}}
_PLAIN: dict[str, ConfigValue] = {"any_scale": False, "softcap": False, "alibi": False, "attn_mask": "none"}


def spec(name: str, arch: str) -> ImageSpec:
    """The image of a cell of GATES: "d128 softcap alibi" is the tile of head_dim 128 with that variant, "paged d128"
    and "decode d128" those that read pages, "decode-fp8 d128" that which reads pages of 8-bit floats."""
    words = name.split(" ", 2) if name.startswith(("paged", "decode")) else ["", *name.split(" ", 1)]
    kind, dim, variant = (*words, "")[:3]
    backend = sm80 if ARCHS[arch].entry == _SM80 else cdna
    changed = (FP8_VARIANTS if kind == "decode-fp8" else PAGED_VARIANTS if kind else VARIANTS)[variant]
    dropout = bool(changed.get("dropout"))
    chosen = {name: changed.get(name, value) for name, value in _PLAIN.items()} | ({"dropout": True} if dropout else {})
    element = ("element", str(changed.get("element", "bf16")))
    forward, decode, dims = backend.BODY, backend.DECODE, (int(dim[1:]), int(dim[1:]))
    if kind == "decode-fp8":
        chosen["any_scale"] = not any(changed.get(name) for name in _PLAIN)  # the scale of keys
        tile, cache = decode.tile(*dims, narrow=True), decode.narrow_cache(arch)
        return ImageSpec(decode.entry, decode.fields(element, tile, tuple(chosen.items()), cache), arch)
    switches = tuple(chosen.items())
    if kind == "decode":
        return ImageSpec(decode.entry, decode.fields(element, decode.tile(*dims), switches), arch)
    return ImageSpec(
        forward.entry, forward.fields(element, forward.tile(*dims, dropout), kind == "paged", switches), arch
    )


# Shipped images: every variant. NVRTC 12.9, 13.0 and 13.5 use the same. 255 registers are all that a thread can have;
# d64 and d128 spill loop-invariant values (and the masks their addresses).
_SHIPPED = {
    "d64": (255, 136),
    "d64 fp16": (255, 136),
    "d64 softcap alibi": (255, 340),
    "d128": (255, 128),
    "d128 fp16": (255, 128),
    "d128 softcap alibi": (255, 172),
    "d128 boolean": (255, 352),
    "d128 added16": (255, 388),
    "d128 added32": (255, 388),
    "d256": (255, 0),
    "d256 softcap alibi": (255, 212),
    "d64 dropout": (255, 0),
    "d128 dropout": (255, 40),
    "d256 dropout": (255, 0),
    "paged d64": (255, 112),
    "paged d128": (255, 96),
    "paged d128 softcap alibi tree": (255, 248),
    "paged d256": (255, 0),
    "decode d64": (196, 0),
    "decode d128": (212, 0),
    "decode d128 softcap alibi tree": (236, 0),
    "decode d256": (255, 256),
    "decode-fp8 d64": (200, 0),
    "decode-fp8 d64 fp16": (196, 0),
    "decode-fp8 d128": (248, 0),
    "decode-fp8 d128 softcap alibi tree": (249, 0),
    "decode-fp8 d256": (255, 0),
}

# Images compiled at first use; compilers and architectures differ by some tens of bytes.
_LATER_ARCHS = ("sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
_LATER = {"d64": (255, 256), "d128": (255, 224), "d256": (255, 40), "decode-fp8 d128": (255, 0)}

# Vector and accumulation registers together, of 512: bounds are where a wave less would fit on a SIMD, but for masks at
# d128, which miss it by one, and for dropout and decode kernels, of which shared memory admits no more waves anyway.
# clang 22.
_CDNA_ARCHS = ("gfx90a", "gfx942", "gfx950")
_CDNA_REGISTERS = {
    "d64": 128,
    "d64 fp16": 128,
    "d64 softcap alibi": 128,
    "d128": 128,
    "d128 fp16": 128,
    "d128 softcap alibi": 129,
    "d128 boolean": 129,
    "d128 added16": 129,
    "d128 added32": 129,
    "d256": 168,
    "d256 softcap alibi": 168,
    "d64 dropout": 128,
    "d128 dropout": 160,
    "d256 dropout": 172,
    "paged d64": 128,
    "paged d128": 128,
    "paged d128 softcap alibi tree": 140,
    "paged d256": 168,
    "decode d64": 128,
    "decode d128": 136,
    "decode d128 softcap alibi tree": 140,
    "decode d256": 176,
    "decode-fp8 d64": 124,
    "decode-fp8 d64 fp16": 124,
    "decode-fp8 d128": 136,
    "decode-fp8 d128 softcap alibi tree": 144,
    "decode-fp8 d256": 214,
}
# Scalar registers, spilled into vector ones; nothing goes to memory.
_CDNA_SPILLS = {
    "d64 softcap alibi": (2, 0, 0),
    "d128 softcap alibi": (2, 0, 0),
    "d128 boolean": (8, 2, 2),
    "d128 added16": (8, 2, 2),
    "d128 added32": (8, 2, 2),
    "d256 softcap alibi": (2, 0, 0),
    "d64 dropout": (4, 0, 0),
    "d128 dropout": (4, 0, 0),
    "d256 dropout": (4, 0, 0),
}

# Waves on a compute unit that registers and LDS must admit: two on each SIMD, so that the softmax of one runs behind
# the matrix products of the other. Fewer where LDS admits no more today; they may only rise.
WAVES = 8
_FEWER = {
    **{"d128": 4, "d256": 4, "decode d64": 4, "decode d128": 4, "decode d256": 2},
    **{"decode-fp8 d128": 4, "decode-fp8 d256": 2},
}
FEWER_WAVES = {
    (name, arch): n
    for start, n in _FEWER.items()
    for name in _CDNA_REGISTERS
    for arch in ("gfx90a", "gfx942")
    if f"{name} ".removeprefix("paged ").startswith(f"{start} ")
}
# Cycles of the main loop's matrix products over those at the unit's peak rate: wanted 1, may only fall. gfx950 reaches
# its rate with twice the k of a product.
MATRIX_CYCLES = {"gfx90a": 1, "gfx942": 1, "gfx950": 2}

GATES: dict[tuple[str, str], Gate] = {
    **{(name, "sm_80"): Gate(*cell) for name, cell in _SHIPPED.items()},
    **{(name, arch): Gate(*cell) for name, cell in _LATER.items() for arch in _LATER_ARCHS},
    **{
        (name, arch): Gate(most, _CDNA_SPILLS.get(name, (0, 0, 0))[n])
        for name, most in _CDNA_REGISTERS.items()
        for n, arch in enumerate(_CDNA_ARCHS)
    },
}
