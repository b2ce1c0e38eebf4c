"""The backward kernels (csrc_cuda/kernels/backward_*.h): from the inputs of a forward call, its results and the
gradients of these to three launches.

First delta, one number a row; then, independent of each other, dk and dv by tiles of keys, and dq by tiles of queries.
Scores are computed once for each, nothing is added up between thread blocks: gradients are the same bit for bit, and
memory holds no more than them and delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from . import forward_call, launch
from .capability import Refusal
from .device import of as device_of
from .forward_call import Fields, Forward, Tiles, direct
from .images import ImageSpec
from .inputs import TENSORS, Inputs
from .kernel_call import Call, Output, Prepared, Shape, slot
from .launch_params import BackwardParams, ForwardParams, KeyTiles, Operand, order_sections
from .problem import Problem, SizeBucket

_TILE_NAMES = ("tile_m", "tile_n", "num_warps", "min_blocks", "num_stages", "tile_at_once", "parts")
_ROWS_TILE: Fields = (("tile_m", 64), ("num_warps", 4), ("min_blocks", 1))
# Inputs that must lie at multiples of 16 bytes stand first.
ALIGNED = ("q", "k", "v", "dout", "out")
# Arguments beside tensors that a launch depends on.
_OPTIONS = (
    *("causal", "window_left", "window_right", "softmax_scale", "softcap", "dropout_p"),
    *("max_seqlen_q", "max_seqlen_k"),
)


@dataclass(frozen=True)
class BackwardBody:
    """A layer of the backward kernels.

    ``keys`` and ``queries``: tile tables, rows (largest head dimension, queries of a tile, keys of a tile, warps,
    blocks on a multiprocessor, stages of copies, rows of the walk whose scores are in registers at once, 2 where dk and
    dv are made by different blocks). What neighbouring blocks walk over fills ``section_bytes``, a part of the L2
    cache. ``arch``: of the images, where it is not that of the device.
    """

    folder: str
    suffix: str
    warp_size: int
    keys: Tiles
    queries: Tiles
    section_bytes: int
    arch: str = ""
    most_threads: int | None = None

    def entry(self, kernel: str) -> str:
        return f"{self.folder}/backward_{kernel}{self.suffix}"

    def tile(self, kernel: str, head_dim: int, head_dim_v: int) -> tuple[tuple[str, int], ...]:
        """Of the kernel over "keys" or "queries"."""
        tiles = self.keys if kernel == "keys" else self.queries
        return forward_call.chosen_tile(tiles, _TILE_NAMES, head_dim, head_dim_v)

    def images(self, arch: str) -> Iterator[ImageSpec]:
        """Every configuration for an architecture."""
        for element in forward_call.ELEMENTS:
            yield ImageSpec(self.entry("rows"), (("element", element), *_ROWS_TILE), arch)
        for dims, kernel in product(forward_call.padded_dims(self.keys), ("keys", "queries")):
            for element, forward in forward_call.variants():
                chosen = switches(forward)
                if chosen is not None:
                    fields: Fields = (("element", element), *self.tile(kernel, *dims), *chosen)
                    yield ImageSpec(self.entry(kernel), fields, arch)

    def plan(self, problem: Problem) -> tuple[tuple[str, object], ...]:
        """What a plan prints of the backward, where one is asked for: which kernels, and their tiles (queries x
        keys)."""
        if not problem.grads:
            return ()
        tiles = {name: dict(self.tile(name, problem.head_dim, problem.head_dim_v)) for name in ("keys", "queries")}
        shapes = ", ".join(f"{name} {c['tile_m']}x{c['tile_n']}" for name, c in tiles.items())
        compiled = f" compiled for {self.arch}" if self.arch else ""
        return (("backward", f"{self.folder}{compiled}, {shapes}"),)

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
        return run(self, x, out, lse, dout, dlse, wanted)

    def prepare(self, x: Inputs, given: dict[str, Tensor], names: list[str]) -> tuple[Ready, dict[str, Tensor]]:
        """``Kernels.prepare``."""
        give: tuple[str, ...] = tuple(n for n in ("k", "v") if n in names)
        if give and dict(self.tile("keys", x.head_dim, x.head_dim_v))["parts"] == 1:
            give = ("k", "v")
        launches = _Launches(self, x, *read(x, given, self.section_bytes, direct))
        ready = _Ready(
            loaded(launches.rows()),
            loaded(launches.keys(give)) if give else None,
            loaded(launches.queries()) if "q" in names else None,
            give,
        )
        return ready, launches.tensors

    def too_large(self, problem: Problem, size: SizeBucket) -> tuple[Refusal, ...]:
        """As ``Backend.too_large``, of the backward alone."""
        if not problem.grads:
            return ()
        dims = problem.head_dim, problem.head_dim_v
        found: list[Refusal] = []
        for kernel, length in (("keys", size.seqlen_k), ("queries", size.seqlen_q)):
            c = dict(self.tile(kernel, *dims))
            rows = c["tile_n"] // c["parts"] if kernel == "keys" else min(c["tile_m"], dict(_ROWS_TILE)["tile_m"])
            threads = self.warp_size * c["num_warps"]
            most = min(forward_call.MOST_TILES, (self.most_threads or 1 << 62) // threads)
            found += forward_call.too_large(problem, replace(size, seqlen_q=length), int(rows), most)
        return tuple(dict.fromkeys(found))


# Not measured. 99 KiB hold a block on every architecture.
NVIDIA = BackwardBody(
    folder="arch/sm80",
    suffix=".cu",
    warp_size=32,
    keys=((64, 64, 128, 4, 1, 2, 16, 1), (128, 32, 128, 8, 1, 2, 16, 1), (256, 16, 64, 4, 1, 2, 16, 2)),
    queries=((64, 128, 64, 4, 2, 2, 32, 1), (128, 128, 32, 8, 1, 2, 32, 1), (256, 64, 16, 4, 1, 2, 16, 1)),
    section_bytes=32 << 20,
)


class Ready(Protocol):
    """Prepared launches of a backward."""

    def __call__(self, x: Inputs, inputs: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """(delta, gradients of q, k and v by name), from the tensors that were prepared for."""


class Kernels(Protocol):
    """Kernels of a backward."""

    def prepare(self, x: Inputs, given: dict[str, Tensor], names: list[str]) -> tuple[Ready, dict[str, Tensor]]:
        """Launches that give the gradients of ``names``, and the tensors of ``given`` as they read them."""


class _Ready(NamedTuple):
    """Launches; None where nothing is wanted of one. ``keys_give``: what the kernel over keys makes."""

    rows: Prepared | None
    keys: Prepared | None
    queries: Prepared | None
    keys_give: tuple[str, ...]

    def __call__(self, x: Inputs, inputs: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if self.rows is None:
            delta = torch.zeros(x.lse_shape, dtype=torch.float32, device=x.q.device)
        else:
            (delta,) = self.rows(inputs)
        found: dict[str, Tensor] = {}
        if self.keys is not None:
            found |= dict(zip(self.keys_give, self.keys([*inputs, delta]), strict=True))
        if self.queries is not None:
            (found["q"],) = self.queries([*inputs, delta])
        return delta, found


_MOST = 1024
_known: dict[tuple, Ready] = {}


def forget() -> None:
    """Prepares every call anew from now on."""
    _known.clear()


def run(
    kernels: Kernels, x: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    """Gradients of the wanted tensors (``Backend.backward``). What was prepared once is launched at once when the same
    is asked of other tensors."""
    names = [name for (name, _), w in zip(x.differentiable(), wanted, strict=True) if w]
    names_of_tensors = (*TENSORS[x.kind], *(("dropout_rng",) if x.dropout_p else ()))
    given = {n: t for n in names_of_tensors if (t := getattr(x, n)) is not None}
    given |= {"dout": dout.to(out.dtype), "out": out, "lse": lse}
    if dlse is not None:
        given["dlse"] = dlse
    given = {n: given[n] for n in (*ALIGNED, *(n for n in given if n not in ALIGNED))}
    question = _question(kernels, x, given, names)
    ready = _known.get(question)
    if ready is None:
        ready, tensors = kernels.prepare(x, given, names)
        if all(tensors[n] is t for n, t in given.items()):
            if len(_known) >= _MOST:
                _known.clear()
            _known[question] = ready
    else:
        tensors = given
    delta, found = ready(x, list(tensors.values()))
    if "sinks" in names:
        found["sinks"] = _of_sinks(x, tensors["lse"], delta)
    return [found[n] if n in found else torch.zeros_like(getattr(x, n)).contiguous() for n in names]


def _question(kernels: Kernels, x: Inputs, given: dict[str, Tensor], names: list[str]) -> tuple:
    parts: list[object] = [kernels, x.kind, *names, *(getattr(x, n) for n in _OPTIONS)]
    for name, t in given.items():
        parts += (name, t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() % 16)
    return tuple(parts)


def _of_sinks(x: Inputs, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink is one more key of every row, whose value is 0: its weight times -delta, added up over the rows."""
    sinks = x.sinks
    assert sinks is not None
    weights = torch.exp(sinks.float()[:, None] - lse)
    terms = torch.where(lse.isinf(), 0, -weights * delta)
    return terms.sum(-1 if x.packed else (0, -1)).to(sinks.dtype)


def read(
    x: Inputs, given: dict[str, Tensor], section_bytes: int, direct: Callable[[Tensor], Tensor]
) -> tuple[Forward, dict[str, Tensor]]:
    """The call in the terms of the kernels, and its tensors as they read them; ``direct`` copies what they cannot read
    as it lies."""
    per_head = max(1, x.seqlen_k * (x.head_dim + x.head_dim_v) * 2)
    described = forward_call.describe(replace(x, return_lse=True), 64, section_bytes // per_head, direct)
    tensors = dict(given) | described.tensors
    tensors |= {n: direct(given[n]) for n in ("dout", "out")}
    tensors |= {
        n: given[n] if given[n].is_contiguous() else given[n].contiguous() for n in ("lse", "dlse") if n in given
    }
    return described, tensors


def params_of(x: Inputs, described: Forward, tensors: dict[str, Tensor], tile_m: int) -> BackwardParams:
    """What all kernels are told, with the tiles of queries in order."""
    p = ForwardParams.from_buffer_copy(described.params)
    p.out = Operand.of(tensors["out"])
    p.m_blocks = max(-(-x.seqlen_q // tile_m), int(x.packed))
    order_sections(p, p.section_heads.value)
    return BackwardParams(p=p, dout=Operand.of(tensors["dout"]), scale=x.scale)


def order_keys(x: Inputs, tile_n: int, section_bytes: int) -> KeyTiles:
    """The tiles of keys: heads whose queries, and what else is as long, fill ``section_bytes`` together."""
    packed = int(x.cu_seqlens_k is not None)
    tiles = KeyTiles(
        m_blocks=max(-(-x.seqlen_k // tile_n), packed),
        sequences=x.batch + packed,
        heads_q=x.num_heads_kv,
        window_right=-1,
    )
    per_head = max(1, x.seqlen_q * (x.num_heads_q // x.num_heads_kv) * (x.head_dim + x.head_dim_v) * 2)
    order_sections(tiles, max(1, section_bytes // per_head))
    return tiles


def slot_of(name: str) -> int:
    """Where the address of a tensor goes in BackwardParams."""
    if name in ("dout", "dlse"):
        return slot(BackwardParams, name)
    return BackwardParams.p.offset + forward_call.slot_of(name)


def loaded(call: Call) -> Prepared | None:
    """None where there are no blocks."""
    return launch.prepare(call) if all(call.shape.grid) else None


@dataclass(frozen=True)
class _Launches:
    """The calls of one backward."""

    body: BackwardBody
    x: Inputs
    described: Forward
    tensors: dict[str, Tensor]

    def rows(self) -> Call:
        tile = (("element", forward_call.element(self.x)[1]), *_ROWS_TILE)
        params = self._params(int(dict(_ROWS_TILE)["tile_m"]))
        delta = Output(slot(BackwardParams, "delta"), self.x.lse_shape, torch.float32)
        return self._call("rows", tile, params, self._query_tiles(params), 0, (delta,))

    def queries(self) -> Call:
        c = dict(self._tile("queries"))
        params = self._params(c["tile_m"])
        params.dq = Operand.dense(self.x.q.shape)
        own = 2 * c["tile_m"] * (c["head_dim"] + c["head_dim_v"])
        walked = 2 * c["num_stages"] * c["tile_n"] * (c["head_dim"] + c["head_dim_v"])
        dq = Output(slot(BackwardParams, "dq"), tuple(self.x.q.shape), self.x.q.dtype)
        shared = own + walked + 2 * self._kept(c["tile_m"], max(64, c["tile_n"]))
        return self._call("queries", self._fields("queries"), params, self._query_tiles(params), shared, (dq,))

    def keys(self, give: tuple[str, ...]) -> Call:
        """``give``: of which of k and v the gradient is made."""
        x, c = self.x, dict(self._tile("keys"))
        params = self._params(1)
        params.keys = tiles = order_keys(x, c["tile_n"], self.body.section_bytes)
        outputs = []
        for name in give:
            t: Tensor = getattr(x, name)
            setattr(params, f"d{name}", Operand.dense(t.shape))
            outputs.append(Output(slot(BackwardParams, f"d{name}"), tuple(t.shape), t.dtype))
        params.part = 0 if len(give) == 2 else 1 if give == ("v",) else 2
        own = 2 * c["tile_n"] * (c["head_dim"] + c["head_dim_v"])
        walked = c["num_stages"] * c["tile_m"] * (2 * (c["head_dim"] + c["head_dim_v"]) + 8)
        shared = own + walked + c["num_stages"] * self._kept(c["tile_m"], c["tile_n"])
        blocks = tiles.sequences * tiles.heads_q * tiles.m_blocks * (len(give) if c["parts"] == 2 else 1)
        return self._call("keys", self._fields("keys"), params, blocks, shared, tuple(outputs))

    def _kept(self, queries: int, keys: int) -> int:
        """Bytes of shared memory for what dropout keeps of a tile: KeptTile of csrc_cuda/kernels/dropout.h."""
        return -(-keys // 64) * 8 * (queries + 8) if self.x.dropout_p else 0

    def _tile(self, kernel: str) -> tuple[tuple[str, int], ...]:
        return self.body.tile(kernel, self.x.head_dim, self.x.head_dim_v)

    def _fields(self, kernel: str) -> Fields:
        return (forward_call.element(self.x), *self._tile(kernel), *switches_of(self.x, self.described.mask))

    def _params(self, tile_m: int) -> BackwardParams:
        return params_of(self.x, self.described, self.tensors, tile_m)

    @staticmethod
    def _query_tiles(params: BackwardParams) -> int:
        return params.p.sequences * params.p.heads_q * params.p.m_blocks

    def _call(
        self, kernel: str, fields: Fields, params: BackwardParams, blocks: int, shared: int, outputs: tuple[Output, ...]
    ) -> Call:
        device = self.x.q.device
        arch = self.body.arch or device_of(device).arch
        image, another = forward_call.choose(self.body.entry(kernel), fields, arch)
        warps = int(dict(fields)["num_warps"])
        slots = tuple(slot_of(name) for name in self.tensors)
        return Call(
            image=image,
            symbol="xattn_backward",
            device=device,
            shape=Shape((blocks, 1, 1), (self.body.warp_size * warps, 1, 1), shared),
            params=params,
            slots=slots if kernel == "rows" else (*slots, slot(BackwardParams, "delta")),
            outputs=outputs,
            aligned=len(ALIGNED),
            other_image=another,
        )


def switches(of_forward: Fields) -> Fields | None:
    """The part of a configuration that features decide; None for forward's configuration of scales of any sign, which
    these kernels take as any other."""
    chosen = dict(of_forward)
    if chosen.pop("any_scale"):
        return None
    return tuple(chosen.items())


def switches_of(x: Inputs, mask: str) -> Fields:
    """``switches`` of a call."""
    found = switches(forward_call.switches(replace(x, softmax_scale=1.0), mask))
    assert found is not None
    return found
