"""What precedes the attention of a paged call, by one launch: new tokens are written, keys and queries rotated
(csrc_cuda/kernels/append.h)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import forward_call, status
from .capability import Refusal
from .device import of as device_of
from .forward_call import CACHES
from .images import ImageSpec
from .inputs import dtype_name, present
from .kernel_call import Call, Output, Shape, slot
from .launch_params import AppendParams, Divisor, Operand
from .rotary import Rotary

_WARPS = 4  # kThreads of append.h, in warps
_UNIT = 8  # elements that a lane moves at once
_MOST_THREADS = (1 << 32) - 1
_MOST_ROOM = (1 << 31) - 1
_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Values that only the device can see, by their bits in index64.
_INDEX_BITS = {"cu_seqlens_q": 0, "cu_seqlens_new": 1, "seqlens_k": 2, "page_table": 3}


@dataclass(frozen=True)
class Append:
    """New tokens for a paged cache, and the queries that are rotated with them; shapes: see ``xattn.attention_paged``.

    ``k_new`` None: only q is rotated; ``q`` None or ``rotary`` None: no query is. ``causal``: queries at negative
    positions count as at 0. ``lengths``: the result is wanted.
    """

    page_table: Tensor
    seqlens_k: Tensor
    k_cache: Tensor
    v_cache: Tensor
    kv_layout: str = "NHD"
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    cu_seqlens_new: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    rotary: Rotary | None = None
    causal: bool = False
    lengths: bool = True

    def turned(self) -> Tensor | None:
        """The queries that are to be rotated."""
        return None if self.rotary is None else self.q

    def by_token(self) -> tuple[Tensor, Tensor]:
        """The caches as (page, slot, head, head_dim)."""
        if self.kv_layout == "HND":
            return self.k_cache.transpose(1, 2), self.v_cache.transpose(1, 2)
        return self.k_cache, self.v_cache

    def tensors(self) -> dict[str, Tensor]:
        """What a kernel reads and writes, in the order in which it is handed to a launch."""
        names: tuple[str, ...] = ("seqlens_k",)
        if self.k_new is not None:
            names += ("page_table", "k_cache", "v_cache", "k_new", "v_new", "cu_seqlens_new", "k_scale", "v_scale")
        if self.turned() is not None:
            names += ("q", "cu_seqlens_q")
        found = {name: getattr(self, name) for name in names}
        if self.rotary is not None:
            found |= {"cos": self.rotary.cos, "sin": self.rotary.sin}
        return {name: t for name, t in found.items() if t is not None}


@dataclass(frozen=True)
class AppendBody:
    """A layer of the append kernel."""

    entry: str
    warp_size: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return _WARPS * self.warp_size

    def images(self, arch: str) -> Iterator[ImageSpec]:
        """Every configuration for an architecture."""
        for element in _ELEMENTS.values():
            for cache in ("", *CACHES.values()):
                yield ImageSpec(self.entry, self.fields(element, cache), arch)

    def fields(self, element: str, cache: str = "") -> forward_call.Fields:
        """``cache``: "" where it holds the element."""
        return (("element", element), ("cache", cache or element), ("paged", True))

    def check(self, x: Append) -> tuple[Refusal, ...]:
        """Why the kernel does not answer; empty where it does."""
        tensors = x.tensors()
        dtypes = {name: t.dtype for name, t in tensors.items() if name in ("k_new", "v_new", "q")}
        element = next(iter(dtypes.values()), None)
        found = [
            Refusal("dtype", name, dtype_name(dtype), tuple(_ELEMENTS.values()))
            for name, dtype in dtypes.items()
            if dtype not in _ELEMENTS or dtype != element
        ]
        for name in ("k_cache", "v_cache"):
            dtype = tensors[name].dtype if name in tensors else None
            if dtype and (dtype not in (element, *CACHES) or x.k_cache.dtype != x.v_cache.dtype):
                allowed = ("the dtype of k_new", *map(dtype_name, CACHES))
                found.append(Refusal("dtype", name, dtype_name(dtype), allowed))
        if x.rotary is not None and not x.rotary.cos.dtype == x.rotary.sin.dtype in (torch.float32, element):
            got = f"{dtype_name(x.rotary.cos.dtype)}/{dtype_name(x.rotary.sin.dtype)}"
            found.append(Refusal("dtype", "rotary", got, ("fp32", "the dtype of q")))
        for name, t in x.tensors().items():
            if "scale" not in name and t.shape[-1] > 1 and t.stride(-1) != 1:
                found.append(Refusal("layout", f"strides of {name}", t.stride(), ("the last 1",)))
        room, blocks = x.page_table.shape[1] * x.by_token()[0].shape[1], sum(_blocks(x, self.threads))
        if x.page_table.shape[0] < 1:
            found.append(Refusal("size", "batch", 0, ("from 1",)))
        if room > _MOST_ROOM:
            found.append(Refusal("large", "tokens of a row of page_table", room, (f"up to {_MOST_ROOM}",)))
        if blocks * self.threads > _MOST_THREADS:
            most = _MOST_THREADS // self.threads
            found.append(Refusal("large", f"parts of {self.threads * _UNIT} elements", blocks, (f"up to {most}",)))
        return tuple(found)


NVIDIA = AppendBody(entry="arch/sm80/append.cu", warp_size=32)


def _tokens(t: Tensor | None) -> int:
    """Of (batch, tokens, heads, head_dim), or packed (tokens, heads, head_dim)."""
    return 0 if t is None else math.prod(t.shape[:-2])


def _parts(elements: int, threads: int) -> int:
    """Blocks that share a token of so many elements."""
    return max(1, -(-elements // (_UNIT * threads)))


def _parts_of(x: Append, threads: int) -> tuple[int, int]:
    """Blocks of a new token, and of a query."""
    new = sum(t.shape[-2] * t.shape[-1] for t in (x.k_new, x.v_new) if t is not None)
    q = x.turned()
    return _parts(new, threads), _parts(0 if q is None else q.shape[-2] * q.shape[-1], threads)


def _blocks(x: Append, threads: int) -> tuple[int, int]:
    """Blocks for the new tokens, and for the queries."""
    new, q = _parts_of(x, threads)
    return _tokens(x.k_new) * new, _tokens(x.turned()) * q


def prepare(body: AppendBody, x: Append) -> tuple[Call, dict[str, Tensor]]:
    """The launch, whose outputs are the lengths, where they are wanted and a token is new, and the rotated q, where one
    is; and its tensors in the order of the slots."""
    tensors = x.tensors()
    p = AppendParams(batch=x.seqlens_k.shape[0], appends=int(x.k_new is not None), causal=int(x.causal))
    new_parts, q_parts = _parts_of(x, body.threads)
    p.new_parts, p.q_parts = Divisor.of(new_parts), Divisor.of(q_parts)
    p.new_tokens, p.q_tokens = _tokens(x.k_new), _tokens(x.turned())
    p.new_each = p.q_each = Divisor.of(1)
    p.status = status.word(x.seqlens_k.device).data_ptr()
    outputs = []
    if x.k_new is not None:
        caches = x.by_token()
        p.k_cache, p.v_cache = map(Operand.of, caches)
        p.k_new = Operand.of(x.k_new)
        if x.v_new is not None:
            p.v_new = Operand.of(x.v_new)
        p.heads_kv, p.head_dim, p.head_dim_v = caches[0].shape[2], caches[0].shape[3], caches[1].shape[3]
        p.num_pages, p.page_size = caches[0].shape[0], Divisor.of(caches[0].shape[1])
        p.page_table_stride, p.room = x.page_table.stride(0), x.page_table.shape[1] * caches[0].shape[1]
        if x.cu_seqlens_new is None:
            p.new_each = Divisor.of(max(1, x.k_new.shape[1]))
        for name in ("k_scale", "v_scale"):
            t = getattr(x, name)
            if t is not None:
                strides = t.stride() if t.dim() == 2 else (0, 0)
                for side, stride in zip(("batch", "head"), strides, strict=True):
                    setattr(p, f"{name}_{side}_stride", stride)
        if x.lengths:
            outputs.append(Output(slot(AppendParams, "lengths"), tuple(x.seqlens_k.shape), x.seqlens_k.dtype))
    q = x.turned()
    if q is not None:
        p.q, p.q_out = Operand.of(q), Operand.dense(q.shape)
        p.heads_q, p.head_dim = q.shape[-2:]
        if x.cu_seqlens_q is None:
            p.q_each = Divisor.of(max(1, q.shape[1]))
        outputs.append(Output(slot(AppendParams, "q_out"), tuple(q.shape), q.dtype))
    if x.rotary is not None:
        r = x.rotary
        p.cos_stride, p.sin_stride = r.cos.stride(0), r.sin.stride(0)
        p.positions, p.width = r.cos.shape
        p.interleaved, p.narrow_tables = int(r.interleaved), int(r.cos.dtype != torch.float32)
    for name, bit in _INDEX_BITS.items():
        p.index64 |= (name in tensors and tensors[name].dtype == torch.int64) << bit
    element = _ELEMENTS[next(present(t) for t in (q, x.k_new) if t is not None).dtype]
    cache = "" if x.k_new is None else CACHES.get(x.k_cache.dtype, "")
    image, another = forward_call.choose(body.entry, body.fields(element, cache), device_of(x.seqlens_k.device).arch)
    call = Call(
        image=image,
        symbol="xattn_append",
        device=x.seqlens_k.device,
        shape=Shape((max(1, sum(_blocks(x, body.threads))), 1, 1), (body.threads, 1, 1), 0),
        params=p,
        slots=tuple(slot(AppendParams, name) for name in tensors),
        outputs=tuple(outputs),
        other_image=another,
    )
    return call, tensors
