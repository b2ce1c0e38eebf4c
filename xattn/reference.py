"""The oracle: attention by its definition, with every argument, on any device; float64 for float64 inputs, otherwise
float32.

``attend`` gives the meaning of one chunk (see chunks.py, which cuts calls so that memory stays linear in seqlen); all
derivatives come from differentiating it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import masks, rng
from .chunks import Chunk
from .inputs import Inputs, present

# Scores held at once: the memory of a chunk is a small multiple of it.
CHUNK_SCORES = {"cpu": 1 << 22, "gpu": 1 << 26}


def chunk_scores(inputs: Inputs) -> int:
    return CHUNK_SCORES["cpu" if inputs.q.device.type == "cpu" else "gpu"]


def compute_dtype(q: Tensor, attn_mask: Tensor | None) -> torch.dtype:
    wide = torch.float64 in (q.dtype, None if attn_mask is None else attn_mask.dtype)
    return torch.float64 if wide else torch.float32


def attend(inputs: Inputs, chunk: Chunk, t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Rows (batch, rows, heads_q, head_dim) against keys (batch, keys, heads_kv, head_dim): out rows, and lse (batch,
    heads_q, rows)."""
    segment, x = chunk.segment, inputs
    q, k, v = t["q"], t["k"], t["v"]
    b, rows, hq, d = q.shape
    keys, hkv, dv = k.shape[1], k.shape[2], v.shape[3]
    i = torch.arange(chunk.rows.start, chunk.rows.start + rows, device=q.device)[:, None]
    j = torch.arange(chunk.keys.start, chunk.keys.start + keys, device=q.device)
    seqlen_q, seqlen_k = _as_4d(segment.seqlen_q), _as_4d(segment.seqlen_k)
    if segment.valid_keys is not None:  # what lies outside never reaches a product, even when it is NaN
        valid = segment.valid_keys[:, chunk.keys]
        k, v = (torch.where(valid[:, :, None, None], y, 0) for y in (k, v))
    # coordinates, each of shape (batch, heads, rows, keys) up to broadcasting
    at = (segment.batch_idx[:, None, None, None], torch.arange(hq, device=q.device)[:, None, None])
    q_idx = i if x.kind != "paged" else i + (seqlen_k - seqlen_q)

    seen = _seen(inputs, chunk, t, at, i, j, q_idx)
    if seen is not None:  # what a row holds that sees nothing reaches no gradient
        q = torch.where(seen.any(-1, keepdim=True).expand(-1, -1, rows, 1).transpose(1, 2), q, 0)
    grouped = q.reshape(b, rows, hkv, hq // hkv, d).permute(0, 2, 3, 1, 4).reshape(b, hkv, hq // hkv * rows, d)
    s = (grouped @ k.permute(0, 2, 3, 1)).reshape(b, hq, rows, keys) * x.scale
    for name in ("q_scale", "k_scale"):
        if name in t:
            s = s * _per_head(t[name], hq)
    if x.softcap:
        s = x.softcap * torch.tanh(s / x.softcap)
    if x.score_mod is not None:
        aux = [t.get(f"score_mod_aux{n}", a) for n, a in enumerate(x.score_mod_aux)]
        s = x.score_mod.eager(s, *at, q_idx, j, *aux).to(s.dtype)
    if "alibi_slopes" in t:
        s = s - t["alibi_slopes"][..., None, None] * (i + (seqlen_k - seqlen_q) - j).abs()
    if x.attn_mask is not None and "attn_mask" in t:
        s = s + t["attn_mask"]
    if x.score_mod is not None:  # it hides a key by -inf
        seen = s != -math.inf if seen is None else seen & (s != -math.inf)
    if seen is not None:
        s = torch.where(seen, s, -math.inf)  # no gradient comes back from what is hidden
    unseen = None if seen is None else ~seen.any(-1, keepdim=True)

    if keys:
        row_max = s.detach().amax(-1, keepdim=True)
    else:
        row_max = s.new_full((b, hq, rows, 1), -math.inf)
    sinks = t["sinks"][:, None, None] if "sinks" in t else None
    takes_all = None
    if sinks is not None:
        takes_all = sinks == math.inf
        sinks = torch.where(takes_all, 0, sinks)
        row_max = torch.maximum(row_max, sinks.detach())
    row_max = torch.where(row_max == -math.inf, 0, row_max)
    p = torch.exp(s - row_max)
    row_sum = p.sum(-1, keepdim=True)
    if sinks is not None:
        row_sum = row_sum + torch.exp(sinks - row_max)
    empty = row_sum == 0
    row_sum = torch.where(empty, 1, row_sum)
    lse = torch.where(empty, -math.inf, torch.log(row_sum) + row_max)[..., 0]

    if x.dropout_p:
        kept = rng.keep(present(x.dropout_rng), x.dropout_p, *at, q_idx, j)
        p = torch.where(kept, p / (1 - x.dropout_p), 0) if x.dropout_p < 1 else p * 0
    o = (p.reshape(b, hkv, hq // hkv * rows, keys) @ v.permute(0, 2, 1, 3)).reshape(b, hq, rows, dv)
    # Twice: a row without keys takes nothing from v, be it NaN, and gives nothing back.
    o = (o if unseen is None else torch.where(unseen, 0, o)) / row_sum
    o = o if unseen is None else torch.where(unseen, 0, o)
    if takes_all is not None:
        o, lse = torch.where(takes_all, 0, o), torch.where(takes_all[..., 0], math.inf, lse)
    if "v_scale" in t:
        o = o * _per_head(t["v_scale"], hq)
    if x.epilogue is not None:
        aux = [t.get(f"epilogue_aux{n}", a) for n, a in enumerate(x.epilogue_aux)]
        o = x.epilogue.eager(o, *at, q_idx, torch.arange(dv, device=q.device), *aux)
    if isinstance(seqlen_q, Tensor):  # rows of padding
        o, lse = torch.where(i < seqlen_q, o, 0), torch.where((i < seqlen_q)[..., 0], lse, -math.inf)
    return o.transpose(1, 2), lse


def _seen(
    x: Inputs, chunk: Chunk, t: dict[str, Tensor], at: tuple[Tensor, Tensor], i: Tensor, j: Tensor, q_idx: Tensor
) -> Tensor | None:
    """Boolean (batch, heads, rows, keys) up to broadcasting: what the masks leave; None where there are none."""
    segment = chunk.segment
    seqlen_q, seqlen_k = _as_4d(segment.seqlen_q), _as_4d(segment.seqlen_k)
    terms = [masks.visible(i, j, seqlen_q, seqlen_k, x.causal, x.window_left, x.window_right)]
    terms.append(None if segment.valid_keys is None else segment.valid_keys[:, None, None, chunk.keys])
    if x.mask_mod is not None:
        terms.append(x.mask_mod.eager(*at, q_idx, j, *x.mask_mod_aux))
    terms.append(chunk.bool_mask(x, i, j))
    if "attn_mask" in t:
        terms.append(t["attn_mask"] != -math.inf)
    seen = masks.conjunction([term for term in terms if term is not None])
    return None if seen is None else seen.reshape((1,) * (4 - seen.dim()) + seen.shape)


def _as_4d(length: int | Tensor) -> int | Tensor:
    return length[:, None, None, None] if isinstance(length, Tensor) else length


def _per_head(scale: Tensor, hq: int) -> Tensor:
    """A scale, one number or (batch, heads_kv), against (batch, heads_q, rows, width)."""
    return scale.repeat_interleave(hq // scale.shape[1], 1)[..., None, None] if scale.dim() == 2 else scale
