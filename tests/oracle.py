"""Attention by its definition, one sequence after the other, and the one rule by which results are measured against it.

Nothing of xattn is imported. The functions compute in the dtype of q: float64 gives the truth, the dtype of a call's q
the plain PyTorch computation that sets the tolerance. They take what the public functions take; ``keep`` (batch,
heads_q, seqlen_q, seqlen_k) says which weights dropout keeps.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


def attention(q: Tensor, k: Tensor, v: Tensor, *, seqused_k: Tensor | None = None, **options) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, heads_q, head_dim_v), lse (batch, heads_q, seqlen_q)."""
    results = []
    for b in range(q.shape[0]):
        n = k.shape[1] if seqused_k is None else int(seqused_k[b])
        results.append(_sequence(q[b], k[b, :n], v[b, :n], b, **options))
    if not results:
        return q.new_zeros((0, *q.shape[1:3], v.shape[3])), q.new_zeros((0, q.shape[2], q.shape[1]))
    return torch.stack([o for o, _ in results]), torch.stack([lse for _, lse in results])


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, seqused_k=None, **options):
    """out (total_q, heads_q, head_dim_v), lse (heads_q, total_q); rows that belong to no sequence are empty rows."""
    outs, lses = [], []
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        keys = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
        if seqused_k is not None:
            keys = slice(keys.start, keys.start + int(seqused_k[b]))
        out, lse = _sequence(q[rows], k[keys], v[keys], b, **options)
        outs.append(out)
        lses.append(lse)
    rest = q.shape[0] - int(cu_seqlens_q[-1])
    outs.append(q.new_zeros((rest, q.shape[1], v.shape[2])))
    lses.append(q.new_full((q.shape[1], rest), -math.inf))
    return torch.cat(outs), torch.cat(lses, 1)


def paged(
    q, k_cache, v_cache, page_table, lengths, *, cu_seqlens_q=None, max_seqlen_q=None, max_seqlen_k=None,
    kv_layout="NHD", num_splits=None, attn_mask=None, **options,
):  # fmt: skip
    """Over the first ``lengths`` tokens of each sequence, the new ones included."""
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    page_size = k_cache.shape[1]
    outs, lses = [], []
    for b in range(len(lengths)):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1])) if cu_seqlens_q is not None else None
        q_b = q[b] if rows is None else q[rows]
        at = torch.arange(int(lengths[b]), device=q.device)
        page, slot = page_table[b].long()[at // page_size], at % page_size
        tree = None
        if attn_mask is not None:
            first = b * q.shape[1] if rows is None else rows.start
            tree = attn_mask[first : first + len(q_b), : len(q_b)]
            tree = torch.cat(
                [tree.new_ones(len(q_b), max(len(at) - len(q_b), 0)), tree[:, max(len(q_b) - len(at), 0) :]], 1
            )
        out, lse = _sequence(q_b, k_cache[page, slot], v_cache[page, slot], b, positions=True, tree=tree, **options)
        outs.append(out)
        lses.append(lse)
    if cu_seqlens_q is None:
        return torch.stack(outs), torch.stack(lses)
    rest = q.shape[0] - int(cu_seqlens_q[-1])
    outs.append(q.new_zeros((rest, q.shape[1], v_cache.shape[3])))
    lses.append(q.new_full((q.shape[1], rest), -math.inf))
    return torch.cat(outs), torch.cat(lses, 1)


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, b: int, *, causal=False, window=None, softmax_scale=None, softcap=0.0,
    attn_mask=None, alibi_slopes=None, sinks=None, dropout_p=0.0, keep=None, score_mod=None, mask_mod=None,
    epilogue=None, q_scale=None, k_scale=None, v_scale=None, positions=False, tree=None, round_p=False,
):  # fmt: skip
    """q (seqlen_q, heads_q, head_dim), k and v (seqlen_k, heads_kv, ...) -> out (seqlen_q, heads_q, head_dim_v), lse
    (heads_q, seqlen_q)."""
    (sq, hq, d), (sk, hkv, dv) = q.shape, v.shape
    ratio = hq // hkv
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    index = torch.tensor(b, device=q.device)
    h = torch.arange(hq, device=q.device)[:, None, None]
    i = torch.arange(sq, device=q.device)[:, None]
    j = torch.arange(sk, device=q.device)
    diagonal = i + sk - sq
    q_idx = diagonal if positions else i

    def per_head(scale):
        """A scale, one number or (batch, heads_kv), for each query head."""
        if scale is None:
            return 1.0
        return scale[b].repeat_interleave(ratio)[:, None, None] if isinstance(scale, Tensor) and scale.dim() else scale

    s = torch.einsum("ihd,jhd->hij", q, k)
    if round_p:
        s = s + (_narrow_sum(q, k) - s).detach()
    s = s * (d**-0.5 if softmax_scale is None else softmax_scale)
    s = s * per_head(q_scale) * per_head(k_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if score_mod is not None:
        s = score_mod(s, index, h, q_idx, j).to(q.dtype)
    if alibi_slopes is not None:
        slopes = alibi_slopes[b] if alibi_slopes.dim() == 2 else alibi_slopes
        s = s - slopes[:, None, None] * (diagonal - j).abs()
    seen = torch.ones((hq, sq, sk), dtype=torch.bool, device=q.device)
    if attn_mask is not None:
        mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
        mask = mask[b if mask.shape[0] > 1 else 0]
        mask = mask if mask.shape[1] == 1 else mask[:, :sq]
        mask = mask if mask.shape[2] == 1 else mask[..., :sk]
        if mask.dtype == torch.bool:
            seen = seen & mask
        else:
            s = s + mask
    if causal:
        seen = seen & (j <= diagonal)
    left, right = window or (None, None)
    if left is not None:
        seen = seen & (j >= diagonal - left)
    if right is not None:
        seen = seen & (j <= diagonal + right)
    if mask_mod is not None:
        seen = seen & mask_mod(index, h, q_idx, j)
    if tree is not None:
        seen = seen & tree
    s = s.masked_fill(~seen, -math.inf)

    logits = s if sinks is None else torch.cat([s, sinks[:, None, None].expand(hq, sq, 1)], -1)
    top = logits.detach().amax(-1, keepdim=True) if logits.shape[-1] else s.new_zeros((hq, sq, 1))
    top = top.masked_fill(top == -math.inf, 0)
    total = torch.exp(logits - top).sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (torch.log(total) + top).masked_fill(empty, -math.inf)[..., 0]
    p = torch.exp(s - top)
    if round_p:
        p = p + (p.to(E4M3).to(p.dtype) - p).detach()
    if dropout_p:
        p = p * keep[b, :, :sq, :sk] / (1 - dropout_p) if dropout_p < 1 else p * 0
    o = torch.einsum("hij,jhd->hid", p, v) / total * per_head(v_scale)
    if epilogue is not None:
        o = epilogue.fn(o, index, h, q_idx, torch.arange(dv, device=q.device), *epilogue.aux)
    return o.transpose(0, 1), lse


def _narrow_sum(q: Tensor, k: Tensor) -> Tensor:
    """q k^T of 8-bit floats as tensor cores sum it: of 32 products and the sum so far, what lies 13 bits below the
    largest is cut off ("DeepSeek-V3 technical report", 2024, section 3.3.2; an H200 gives these errors to a few
    percent). Here it is 12 bits: in which order they sum is not told."""
    total = q.new_zeros(q.shape[1], q.shape[0], k.shape[0])
    for c in range(0, q.shape[2], 32):
        terms = torch.einsum("ihd,jhd->hijd", q.detach()[..., c : c + 32], k.detach()[..., c : c + 32])
        terms = torch.cat([terms, total[..., None]], -1)
        unit = torch.exp2(torch.floor(torch.log2(terms.abs().amax(-1, keepdim=True))) - 12)
        total = torch.where(unit > 0, torch.trunc(terms / unit) * unit, terms).sum(-1)
    return total


# ---------------------------------------------------------------- tolerance
def assert_close(name: str, got: Tensor, truth: Tensor, plain: Tensor, among: tuple[Tensor, ...] = ()) -> None:
    """The one rule: error at most twice that of the plain computation, plus one rounding, plus 1e-6 of the largest
    value.

    It holds for the largest absolute error and for the Frobenius error. The largest value is that of ``truth`` and
    ``among``: all gradients of a call count together, since one of them may be zero only because larger terms cancel.
    What is infinite must be so in both; NaN is never right.
    """
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(truth.shape)}"
    dtype, got, truth, plain = got.dtype, got.detach().double(), truth.detach().double(), plain.detach().double()
    finite = torch.isfinite(truth)
    assert not got.isnan().any(), f"{name}: {int(got.isnan().sum())} of {got.numel()} elements are NaN"
    assert torch.equal(got[~finite], truth[~finite]), f"{name}: infinite where it should not be, or the reverse"
    got, truth, plain = got[finite], truth[finite], plain[finite]
    if not got.numel():
        return
    of_plain = torch.where(torch.isfinite(plain), plain - truth, 0)
    largest = max(float(t.detach().abs().max()) for t in (truth, *among) if t.numel())
    rounding, floor = _rounding(dtype)
    floor += 1e-6 * largest
    for measure, norm, root in (("largest", torch.inf, 1.0), ("Frobenius", 2, got.numel() ** 0.5)):
        error, by_plain, value = (float(torch.linalg.vector_norm(t, norm)) for t in (got - truth, of_plain, truth))
        allowed = 2 * by_plain + rounding * value + floor * root
        assert error <= allowed, f"{name}: {measure} error {error:.3g}, allowed {allowed:.3g}, of {value:.3g}"


def _rounding(dtype: torch.dtype) -> tuple[float, float]:
    """The error of one rounding to ``dtype``: relative, and absolute (subnormal numbers, integers)."""
    if not dtype.is_floating_point:
        return 0.0, 1.0
    info = torch.finfo(dtype)
    return info.eps / 2, info.smallest_normal * info.eps / 2


# ---------------------------------------------------------------- dropout
def philox(counter, key, rounds: int = 7):
    """Philox4x32 (Salmon et al., SC 2011) of four and two 32-bit words: Python integers or numpy's uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def numbers16(pair, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """The 16-bit number of every weight, from (seed, offset), by the map that xattn/rng.py documents."""
    seed, offset = (int(n) for n in pair)
    key = (seed + offset * 0x9E3779B97F4A7C15) % 2**64
    b, h, i, j = np.ogrid[:batch, :heads, :seqlen_q, :seqlen_k]
    b, h, i, j = (x.astype(np.uint64) for x in np.broadcast_arrays(b, h, i, j))
    group = (j >> 6) * 8 + (j >> 1) % 8
    words = (
        np.stack(philox((group, i, b, h), (key % 2**32, key >> 32))) if j.size else np.zeros((4, *j.shape), np.uint64)
    )
    word = np.take_along_axis(words, ((j >> 4) % 4).astype(np.int64)[None], 0)[0]
    return (word >> (16 * (j % 2))) & 0xFFFF


def keep(pair, dropout_p: float, *shape: int) -> Tensor:
    """Which weights (batch, heads, seqlen_q, seqlen_k) dropout keeps."""
    return torch.from_numpy(numbers16(pair, *shape) >= round(dropout_p * 65536))


# ---------------------------------------------------------------- rotary embedding
def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (tokens, heads, head_dim) at ``positions`` (tokens,), channel by channel, in the dtype of x."""
    width = cos.shape[1]
    out = x.clone()
    for n in range(width):
        first, second = (2 * n, 2 * n + 1) if interleaved else (n, n + width)
        c, s = (t[positions.long(), n].to(x.dtype)[:, None] for t in (cos, sin))
        out[..., first] = x[..., first] * c - x[..., second] * s
        out[..., second] = x[..., first] * s + x[..., second] * c
    return out
