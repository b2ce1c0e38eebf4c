"""torch's FlexAttention on GPUs where torch.compile works: score_mod, mask_mod, windows, softcap, ALiBi.

One compiled function serves each kind of problem; numbers (window, softcap, scale) and captured tensors are its
arguments, so that new values do not compile again. The first call of a kind compiles, which takes seconds; where torch
cannot compile for the device, the backend drops out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..capability import Capability, HeadDims
from ..device import Device
from ..inputs import Inputs
from ..problem import Problem, SizeBucket
from .base import Backend, Config, Unavailable

_USES = frozenset({"window", "softcap", "score_mod", "alibi_slopes", "mask_mod"})
CAPABILITY = Capability(
    vendors=frozenset({"nvidia", "amd"}),
    kinds=frozenset({"attention"}),
    dtypes=frozenset((d, d) for d in ("bf16", "fp16", "fp32")),
    head_dim=HeadDims(smallest=16, largest=256, multiple_of=8),
    head_dim_v=HeadDims(smallest=16, largest=256, multiple_of=8),
    features=_USES | {"causal", "seqused_k", "return_lse", "gqa"},
    grads=frozenset({"q", "k", "v"}),
    deterministic=False,
    only_with=_USES,
    needs=frozenset({"triton"}),
    nonempty=True,
)


@dataclass(frozen=True)
class _Form:
    """What changes the code: everything else of a call is an argument."""

    problem: Problem
    left: bool
    right: bool
    compiled: bool


def _run(inputs: Inputs, config: Config) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return _attend(inputs, inputs.q, inputs.k, inputs.v)


def _backward(
    inputs: Inputs, config: Config, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    """The forward again, under autograd, then its gradient."""
    with torch.enable_grad():
        q, k, v = leaves = [
            t.detach().requires_grad_(w) for t, w in zip((inputs.q, inputs.k, inputs.v), wanted, strict=False)
        ]
        results = _attend(inputs, q, k, v)
        seeds = (dout, torch.zeros_like(results[1]) if dlse is None else dlse)
        return list(torch.autograd.grad(results, [t for t in leaves if t.requires_grad], seeds))


def _attend(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, compiled: bool = True) -> tuple[Tensor, Tensor]:
    """(out, lse); ``compiled`` False runs FlexAttention's eager form, for tests."""
    x = inputs
    form = _Form(x.problem(), x.window_left is not None, x.window_right is not None, compiled)
    mask, attend = _functions(
        form, x.score_mod.element if x.score_mod else None, x.mask_mod.element if x.mask_mod else None
    )
    lengths = x.seqused_k if x.seqused_k is not None else torch.full((), x.seqlen_k, device=q.device)
    bounds = tuple(torch.full((), n, device=q.device) for n in (x.window_left or 0, x.window_right or 0, x.seqlen_q))
    cap = torch.full((), x.softcap or 1.0, dtype=torch.float32, device=q.device)
    slopes = (
        x.alibi_slopes if x.alibi_slopes is None or x.alibi_slopes.dim() == 2 else x.alibi_slopes.expand(x.batch, -1)
    )
    try:
        block_mask = mask(x.batch, x.num_heads_q, x.seqlen_q, x.seqlen_k, q.device, lengths, bounds, x.mask_mod_aux)
        out, lse = attend(q, k, v, block_mask, x.scale, lengths, bounds, cap, slopes, x.score_mod_aux)
    except Exception as error:
        if not compiled or not _is_compile_error(error):
            raise
        raise Unavailable(f"torch.compile of FlexAttention failed: {str(error).splitlines()[0][:200]}") from error
    empty = torch.isinf(lse) & (lse < 0)
    return torch.where(empty.transpose(1, 2)[..., None], 0, out.transpose(1, 2)).contiguous(), lse


@lru_cache(maxsize=256)
def _functions(
    form: _Form, score_graph: Callable | None, mask_graph: Callable | None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    p = form.problem

    def length(lengths: Tensor, b: Tensor) -> Tensor:
        return lengths[b] if p.seqused_k else lengths

    def mask(batch, heads, seqlen_q, seqlen_k, device, lengths, bounds, aux):
        def seen(b, h, i, j):
            shift = length(lengths, b) - bounds[2]
            result = j < length(lengths, b)
            if p.causal:
                result = result & (j <= i + shift)
            if form.left:
                result = result & (j >= i + shift - bounds[0])
            if form.right:
                result = result & (j <= i + shift + bounds[1])
            if mask_graph is not None:
                result = result & mask_graph(b, h, i, j, *aux)
            return result

        by_batch = batch if p.seqused_k or mask_graph is not None else None
        by_head = heads if mask_graph is not None else None
        return create_block_mask(seen, by_batch, by_head, seqlen_q, seqlen_k, device=device, _compile=form.compiled)

    def attend(q, k, v, block_mask, scale, lengths, bounds, cap, slopes, aux):
        def score_mod(s, b, h, i, j):
            if p.softcap:
                s = cap * torch.tanh(s / cap)
            if score_graph is not None:
                s = score_graph(s, b, h, i, j, *aux)
            if p.alibi_slopes:
                s = s - slopes[b, h] * (i + length(lengths, b) - bounds[2] - j).abs()
            return s

        changed = p.softcap or score_graph is not None or p.alibi_slopes
        out, extra = flex_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=score_mod if changed else None,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=p.gqa_ratio != 1,
            return_aux=AuxRequest(lse=True),
            kernel_options={"BACKEND": "TRITON"},  # its decoding kernel refuses some head ratios
        )
        return out, extra.lse

    return mask, torch.compile(attend, dynamic=None) if form.compiled else attend


def _is_compile_error(error: Exception) -> bool:
    module = type(error).__module__
    return module.startswith(("torch._dynamo", "torch._inductor", "triton"))


def _config(problem: Problem, size: SizeBucket, device: Device) -> Config:
    return (("compiled by", "torch.compile at the first call"),)


BACKEND = Backend(
    "flex", native=False, capabilities=lambda: (CAPABILITY,), run=_run, backward=_backward, config=_config
)
