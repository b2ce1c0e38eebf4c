"""torch's scaled_dot_product_attention, where its meaning is the same or can be made so.

Its causal mask is aligned top-left, ours bottom-right: they agree for equal lengths; otherwise, and for windows and
lengths, rows are taken in chunks under an explicit mask, so that no mask of the whole size is made. Rows that see
nothing are let see something and zeroed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import chunks, masks
from ..capability import Capability
from ..chunks import Chunk
from ..device import Device
from ..inputs import Inputs
from ..problem import KINDS, Problem, SizeBucket
from .base import Backend, Config

_FEATURES = frozenset({"causal", "window", "attn_mask_bool", "attn_mask_additive", "seqused_k", "gqa"})
_CPU = Capability(
    vendors=frozenset({"cpu"}),
    kinds=frozenset(KINDS),
    dtypes=frozenset((d, d) for d in ("bf16", "fp16", "fp32", "fp64")),
    features=_FEATURES,
    grads=frozenset({"q", "k", "v"}),
)
CAPABILITIES = (_CPU, replace(_CPU, vendors=frozenset({"nvidia", "amd", "other"}), deterministic=False))

# Elements of an explicit mask held at once; without a mask a call is one chunk.
_MASK_ELEMENTS = 1 << 26
_ALL = 1 << 62


def _attend(inputs: Inputs, chunk: Chunk, t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One chunk: see ``reference.attend``. The second result, which would be lse, is an empty tensor."""
    segment, x = chunk.segment, inputs
    q, k, v = (t[n].transpose(1, 2) for n in "qkv")
    rows, keys = q.shape[2], k.shape[2]
    nothing = q.new_zeros(())
    if keys == 0:
        return (q.sum() * 0 + q.new_zeros((*q.shape[:3], v.shape[3]))).transpose(1, 2), nothing
    i = torch.arange(chunk.rows.start, chunk.rows.stop, device=q.device)[:, None]
    j = torch.arange(chunk.keys.start, chunk.keys.stop, device=q.device)
    valid = segment.valid_keys
    if valid is not None:  # what lies outside never reaches a product, even when it is NaN
        valid = valid[:, None, chunk.keys]
        k, v = (torch.where(valid[..., None], y, 0) for y in (k, v))
    causal = _plain_causal(inputs, chunk)
    seqlen_q, seqlen_k = (
        n[:, None, None, None] if isinstance(n, Tensor) else n for n in (segment.seqlen_q, segment.seqlen_k)
    )
    seen = None
    if not causal:
        terms = [
            masks.visible(i, j, seqlen_q, seqlen_k, x.causal, x.window_left, x.window_right),
            chunk.bool_mask(x, i, j),
        ]
        terms.append(None if valid is None else valid[:, :, None])
        seen = masks.conjunction([term for term in terms if term is not None])
    bias, empty = t.get("attn_mask"), None
    if bias is not None:
        bias = bias.to(q.dtype) if seen is None else torch.where(seen, bias.to(q.dtype), float("-inf"))
        empty = (bias == float("-inf")).all(-1, keepdim=True)
        bias = torch.where(empty, 0, bias)
    elif seen is not None:
        empty = ~seen.any(-1, keepdim=True)
        seen = seen | empty
    mask = bias if bias is not None else seen
    if mask is not None:
        mask = chunks.to_4d(mask).expand(q.shape[0], -1, rows, keys)
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.device.type == "cpu":  # torch repeats the heads too, but rounds after each gradient that it adds
        k, v = (y[:, :, None].expand(-1, -1, q.shape[1] // y.shape[1], -1, -1).flatten(1, 2) for y in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=x.scale, enable_gqa=grouped)
    if empty is not None:
        out = torch.where(empty, 0, out)
    return out.transpose(1, 2), nothing


def _plain_causal(inputs: Inputs, chunk: Chunk) -> bool:
    """Whether torch's causal mask says all: equal lengths known to the host, and nothing else hidden."""
    return (
        inputs.causal
        and inputs.attn_mask is None
        and inputs.window_left is None
        and (inputs.window_right is None or inputs.window_right >= 0)
        and isinstance(chunk.segment.seqlen_k, int)
        and chunk.segment.seqlen_q == chunk.segment.seqlen_k == chunk.rows.stop - chunk.rows.start
        and chunk.segment.valid_keys is None
    )


def _limit(inputs: Inputs) -> int:
    """One chunk where no mask is made, otherwise chunks whose mask has a bounded size."""
    x = inputs
    hidden = x.attn_mask is not None or x.window_left is not None or x.window_right is not None
    if x.kind == "varlen":
        assert x.cu_seqlens_q is not None and x.cu_seqlens_k is not None
        known = x.q.device.type == "cpu"
        equal = known and x.seqused_k is None and torch.equal(x.cu_seqlens_q, x.cu_seqlens_k)
    else:
        known = x.seqused_k is None
        equal = x.kind == "attention" and x.seqlen_q == x.seqlen_k
    return _ALL if known and not hidden and (equal or not x.causal) else _MASK_ELEMENTS


def _run(inputs: Inputs, config: Config) -> tuple[Tensor, None]:
    out, _ = chunks.forward(inputs, _attend, inputs.q.dtype, _limit(inputs), with_lse=False)
    return out, None


def _backward(
    inputs: Inputs, config: Config, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    return chunks.backward(inputs, _attend, inputs.q.dtype, _limit(inputs), dout, None, wanted)


def _config(problem: Problem, size: SizeBucket, device: Device) -> Config:
    return (("gather", "pages to dense"),) if problem.kind == "paged" else ()


BACKEND = Backend("sdpa", native=False, capabilities=lambda: CAPABILITIES, run=_run, backward=_backward, config=_config)
