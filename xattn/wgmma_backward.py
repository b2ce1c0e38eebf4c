"""Hopper's own backward kernels (csrc_cuda/arch/sm90/backward*.h): three launches, of which the second makes all
gradients in five matrix products.

First delta, and what else a row brings to the gradients of its scores; then, by tiles of keys, dk and dv, while dq is
added up in float32; then dq is rounded. The order in which it is added up is that of the blocks: dq is the same to its
rounding, not bit for bit, so that what asks for the same bits goes to the shared kernels (backward_call.py). Beside
gradients and delta, memory holds dq in float32 and two numbers a row meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from . import backward_call, forward_call
from .backward_call import BackwardBody, Ready
from .capability import Refusal
from .device import of as device_of
from .forward_call import Fields, Forward
from .images import ImageSpec
from .inputs import Inputs
from .kernel_call import Call, Output, Prepared, Shape
from .launch_params import BackwardParams, Operand
from .problem import Problem, SizeBucket
from .tensor_maps import mapped, tensor_map

_ARCH = "sm_90a"
_TILE_N = 128
_THREADS = 256  # of the kernels over rows
_MAPS = ("q", "k", "v", "dout")


class Params(ctypes.Structure):
    """Sm90BackwardParams of csrc_cuda/arch/sm90/backward_params.h, which is a multiple of 64 bytes."""

    _fields_ = (
        ("maps", ctypes.c_uint64 * (16 * len(_MAPS))),
        ("b", BackwardParams),
        ("numbers", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("head_tiles", ctypes.c_int32),
        ("tiles", ctypes.c_int32),
        ("key_tiles", ctypes.c_int32),
        ("padding", ctypes.c_byte * (-(ctypes.sizeof(BackwardParams) + 28) % 64)),
    )


def tile(head_dim: int, head_dim_v: int) -> Fields:
    """Padded head dimensions, and the queries of a tile: as many as registers hold scores of."""
    if max(head_dim, head_dim_v) <= 64:
        return (("head_dim", 64), ("head_dim_v", 64), ("tile_m", 128))
    d, dv = (next(n for n in dims if x <= n) for x, dims in ((head_dim, (96, 128)), (head_dim_v, (64, 96, 128))))
    return (("head_dim", d), ("head_dim_v", dv), ("tile_m", 64))


def shared_bytes(fields: Fields) -> int:
    """Shared memory of a configuration, kSharedBytes of csrc_cuda/arch/sm90/backward.h."""
    c = dict(fields)
    panels, panels_v = (-(-int(c[n]) // 64) for n in ("head_dim", "head_dim_v"))
    panel_q = 128 * int(c["tile_m"])
    return (
        (panels + panels_v) * (128 * _TILE_N + 2 * panel_q) + 4 * panel_q + 2 * 8 * int(c["tile_m"]) + 2 * 16 + 8 * 15
    )


@dataclass(frozen=True)
class WgmmaBackward:
    """The kernels, and those of the shared body for what these do not answer."""

    shared: BackwardBody

    def serves(self, problem: Problem) -> bool:
        """Whether these kernels answer."""
        p = problem
        return max(p.head_dim, p.head_dim_v) <= 128 and not (p.attn_mask or p.deterministic or p.dropout)

    def plan(self, problem: Problem) -> tuple[tuple[str, object], ...]:
        """As ``BackwardBody.plan``."""
        if not problem.grads or not self.serves(problem):
            return self.shared.plan(problem)
        c = dict(tile(problem.head_dim, problem.head_dim_v))
        return (("backward", f"arch/sm90, {c['tile_m']}x{_TILE_N}, dq added up in no fixed order"),)

    def too_large(self, problem: Problem, size: SizeBucket) -> tuple[Refusal, ...]:
        """As ``Backend.too_large``: the shared kernels' tiles are as small as these, or smaller."""
        return self.shared.too_large(problem, size)

    def images(self, arch: str) -> Iterator[ImageSpec]:
        """Every configuration for an architecture."""
        yield from self.shared.images(arch)
        if arch != _ARCH:
            return
        dims = dict.fromkeys(tile(d, dv) for d, dv in product((64, 96, 128), repeat=2))
        for sizes, (element, forward) in product(dims, forward_call.variants()):
            switches = backward_call.switches(forward)
            if switches is not None and dict(switches)["attn_mask"] == "none" and not forward_call.drops(switches):
                yield ImageSpec(_entry(""), (("element", element), *sizes, *switches), arch)
        for sizes, element, part in product(dims, forward_call.ELEMENTS, ("_rows", "_queries")):
            yield ImageSpec(_entry(part), (("element", element), *sizes), arch)

    def backward(
        self,
        x: Inputs,
        config: tuple[tuple[str, object], ...],
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: list[bool],
    ) -> list[Tensor]:
        """``Backend.backward``. Raises what making and loading an image raises."""
        own = str(dict(config)["backward"]).startswith("arch/sm90,")
        # Without elements there is nothing to describe to TMA, and nothing to multiply.
        kernels = self if own and x.q.numel() and x.k.numel() and x.v.numel() else self.shared
        return backward_call.run(kernels, x, out, lse, dout, dlse, wanted)

    def prepare(self, x: Inputs, given: dict[str, Tensor], names: list[str]) -> tuple[Ready, dict[str, Tensor]]:
        """``Kernels.prepare``."""
        launches = _Launches(
            self.shared.section_bytes, x, *backward_call.read(x, given, self.shared.section_bytes, mapped)
        )
        prepared = (backward_call.loaded(call) for call in (launches.rows(), launches.keys()))
        rows, keys = (call for call in prepared if call is not None)
        return _Ready(rows, keys, backward_call.loaded(launches.queries()) if "q" in names else None), launches.tensors


class _Ready(NamedTuple):
    rows: Prepared
    keys: Prepared
    queries: Prepared | None

    def __call__(self, x: Inputs, inputs: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        delta, numbers, sums = self.rows(inputs)
        between = [*inputs, numbers, sums]
        found = dict(zip("kv", self.keys(between), strict=True))
        if self.queries is not None:
            (found["q"],) = self.queries(between)
        return delta, found


@dataclass(frozen=True)
class _Launches:
    """The calls of one backward."""

    section_bytes: int
    x: Inputs
    described: Forward
    tensors: dict[str, Tensor]

    def rows(self) -> Call:
        x, c = self.x, self._tile()
        outputs = (
            Output(Params.b.offset + BackwardParams.delta.offset, x.lse_shape, torch.float32),
            Output(Params.numbers.offset, (self._tiles() + 1, 2 * c["tile_m"]), torch.float32),
            Output(Params.sums.offset, (self._tiles(), c["tile_m"] * (-(-c["head_dim"] // 64) * 64)), torch.float32),
        )
        return self._call("_rows", self._params(), self._query_tiles(), 0, outputs)

    def keys(self) -> Call:
        x, params = self.x, self._params()
        params.b.keys = backward_call.order_keys(x, _TILE_N, self.section_bytes)
        params.b.dk, params.b.dv = Operand.dense(x.k.shape), Operand.dense(x.v.shape)
        outputs = tuple(
            Output(Params.b.offset + getattr(BackwardParams, f"d{n}").offset, tuple(t.shape), t.dtype)
            for n, t in (("k", x.k), ("v", x.v))
        )
        keys = params.b.keys
        params.key_tiles = keys.sequences * keys.heads_q * keys.m_blocks
        blocks = min(params.key_tiles, device_of(x.q.device).sm_count)
        return self._call("", params, blocks, shared_bytes(self._fields("")), outputs)

    def queries(self) -> Call:
        x, params = self.x, self._params()
        params.b.dq = Operand.dense(x.q.shape)
        dq = Output(Params.b.offset + BackwardParams.dq.offset, tuple(x.q.shape), x.q.dtype)
        return self._call("_queries", params, self._query_tiles(), 2 * 64 * 128, (dq,))

    def _tile(self) -> dict[str, int]:
        return {name: int(n) for name, n in tile(self.x.head_dim, self.x.head_dim_v)}

    def _tiles(self) -> int:
        """Places for tiles of queries: of packed sequences each begins one."""
        return self.x.num_heads_q * self._head_tiles() * (1 if self.x.packed else self.x.batch)

    def _head_tiles(self) -> int:
        x, tile_m = self.x, self._tile()["tile_m"]
        return x.q.shape[0] // tile_m + x.batch + 1 if x.packed else -(-x.seqlen_q // tile_m)

    def _query_tiles(self) -> int:
        p = self._params().b.p
        return int(p.sequences * p.heads_q * p.m_blocks)

    def _params(self) -> Params:
        b = backward_call.params_of(self.x, self.described, self.tensors, self._tile()["tile_m"])
        return Params(b=b, head_tiles=self._head_tiles(), tiles=self._tiles())

    def _fields(self, part: str) -> Fields:
        fields = (forward_call.element(self.x), *tile(self.x.head_dim, self.x.head_dim_v))
        return fields if part else (*fields, *backward_call.switches_of(self.x, self.described.mask))

    def _call(self, part: str, params: Params, blocks: int, shared: int, outputs: tuple[Output, ...]) -> Call:
        image, another = forward_call.choose(_entry(part), self._fields(part), _ARCH)
        slots = tuple(Params.b.offset + backward_call.slot_of(name) for name in self.tensors)
        rows = {"q": self._tile()["tile_m"], "k": _TILE_N, "v": _TILE_N, "dout": self._tile()["tile_m"]}
        names = list(self.tensors)
        maps = tuple(tensor_map(128 * n, names.index(t), self.tensors[t], rows[t]) for n, t in enumerate(_MAPS))
        return Call(
            image=image,
            symbol="xattn_backward",
            device=self.x.q.device,
            shape=Shape((blocks, 1, 1), (_THREADS if part else _THREADS + 128, 1, 1), shared),
            params=params,
            slots=slots if part == "_rows" else (*slots, Params.numbers.offset, Params.sums.offset),
            outputs=outputs,
            aligned=len(backward_call.ALIGNED),
            maps=() if part else maps,
            other_image=another,
        )


def _entry(part: str) -> str:
    return f"arch/sm90/backward{part}.cu"
