"""torch's scaled_dot_product_attention, where its meaning is the same or can be made so.

Its causal mask is aligned top-left, ours bottom-right: they agree for equal lengths; otherwise, and for windows and
lengths, rows are taken in chunks under an explicit mask, so that no mask of the whole size is made. Rows that see
nothing are let see something and zeroed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
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

# torch's own, whatever stands in torch.nn.functional in its place (our drop-in may).
_sdpa = torch._C._nn.scaled_dot_product_attention

# Elements of an explicit mask held at once; without a mask a call is one chunk.
_MASK_ELEMENTS = {"cpu": 1 << 23, "gpu": 1 << 26}
_ALL = 1 << 62


def _attend(inputs: Inputs, chunk: Chunk, t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One chunk: see ``reference.attend``. The second result, which would be lse, is an empty tensor."""
    segment, x = chunk.segment, inputs
    q, k, v = (t[n].transpose(1, 2) for n in "qkv")
    rows, keys = q.shape[2], k.shape[2]
    nothing = q.new_zeros(())
    if keys == 0:
        return q.new_zeros((q.shape[0], rows, q.shape[1], v.shape[3])), nothing
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
        bias = bias.detach()  # torch leaves its fast kernels for a mask that asks for a gradient
        bias = bias if seen is None else torch.where(seen, bias, float("-inf"))
        empty = (bias == float("-inf")).all(-1, keepdim=True)
        bias = torch.where(empty, 0, bias)
    elif seen is not None:
        empty = ~seen.any(-1, keepdim=True)
        seen = seen | empty
    mask = bias if bias is not None else seen
    if mask is not None:
        mask = chunks.to_4d(mask).expand(q.shape[0], -1, rows, keys)
    if empty is not None:  # what such a row holds reaches no gradient
        q = torch.where(empty, 0, q)
    out = _call(q, k, v, mask, causal, x.scale)
    if empty is not None:
        out = torch.where(empty, 0, out)
    return out.transpose(1, 2), nothing


def _call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """torch's function, called such that it takes a kernel whose memory is linear, not its formula step by step."""
    if scale <= 0:  # it multiplies its causal mask, -inf, by the scale
        q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    on_cpu, width = q.device.type == "cpu", v.shape[3]
    grouped = q.shape[1] != k.shape[1]
    # On the CPU torch repeats the heads too, but rounds after each gradient that it adds; on GPUs one kernel does not.
    if grouped and (on_cpu or mask is not None or q.dtype.itemsize > 2 or not q.shape[3] == width <= 256):
        k, v = (y[:, :, None].expand(-1, -1, q.shape[1] // y.shape[1], -1, -1).flatten(1, 2) for y in (k, v))
        grouped = False
    if on_cpu:
        q, k, v = (_widened(y, max(q.shape[3], width)) for y in (q, k, v))
    out = _sdpa(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out[..., :width] if out.shape[3] != width else out


def _widened(x: Tensor, width: int) -> Tensor:
    """x (..., width or less) with zeros up to ``width``, and a last stride of 1."""
    if x.shape[-1] < width:
        return torch.cat([x, x.new_zeros((*x.shape[:-1], width - x.shape[-1]))], -1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _dtype(inputs: Inputs) -> torch.dtype:
    """That of q, or a wider one in which an added mask loses nothing."""
    mask = inputs.attn_mask
    added = mask is not None and mask.is_floating_point()
    return torch.promote_types(inputs.q.dtype, mask.dtype) if mask is not None and added else inputs.q.dtype


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
    on_cpu = x.q.device.type == "cpu"
    if x.kind == "varlen":
        assert x.cu_seqlens_q is not None and x.cu_seqlens_k is not None
        known = on_cpu
        equal = known and x.seqused_k is None and torch.equal(x.cu_seqlens_q, x.cu_seqlens_k)
    else:
        known = x.seqused_k is None and x.kind == "attention"
        equal = x.seqlen_q == x.seqlen_k
    unmasked = known and not hidden and (equal or not x.causal)
    return _ALL if unmasked else _MASK_ELEMENTS["cpu" if on_cpu else "gpu"]


def _run(inputs: Inputs, config: Config) -> tuple[Tensor, None]:
    out, _ = chunks.forward(inputs, _attend, _dtype(inputs), _limit(inputs), with_lse=False)
    return out, None


def _backward(
    inputs: Inputs, config: Config, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    return chunks.backward(inputs, _attend, _dtype(inputs), _limit(inputs), dout, None, wanted)


def _config(problem: Problem, size: SizeBucket, device: Device) -> Config:
    return (("gather", "pages to dense"),) if problem.kind == "paged" else ()


BACKEND = Backend("sdpa", native=False, capabilities=lambda: CAPABILITIES, run=_run, backward=_backward, config=_config)
