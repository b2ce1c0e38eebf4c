"""PagedCache: a cache for transformers' models whose keys and values live in pages. Use it through compat.transformers.

A layer's ``update`` gives the attention function a handle, not keys: the pages are never gathered into one tensor here.
Padding is not stored. transformers counts it as tokens all the same, so that lengths and masks on its side have a
column for each token that was ever given ("columns" below), while the pages hold the real tokens of each sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from ..api import attention_paged
from ..errors import UnsupportedError
from ..paged import PagedKVCache

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


class PagedCache(Cache):
    """``model.generate(..., past_key_values=PagedCache(model.config, num_pages))`` (``cache=`` in newer transformers),
    for a model loaded with, or switched to, ``attn_implementation="xattn"``.

    Serves greedy search, sampling, beams, assisted generation, long prompts in chunks and padding on any side. All
    tokens stay, also those behind a sliding window. Masks that say more than causal, a window and padding are refused
    with UnsupportedError: pages have no room for them. Only under ``torch.no_grad()``.

    Args:
        config: the model's.
        num_pages: in all, for all sequences: each takes ceil(tokens / page_size), and a beam search copies one page
            where beams part. OutOfPagesError when they do not suffice; the cache is then as before.
        page_size: tokens in a page.
        kv_layout: "NHD" or "HND", see ``xattn.PagedKVCache``.

    Attributes:
        pages: the PagedKVCache; None before the first tokens, which tell its dtype, device and sizes.
    """

    def __init__(self, config: PreTrainedConfig, num_pages: int, page_size: int = 64, kv_layout: str = "NHD"):
        text = config.get_text_config(decoder=True)
        others = sorted(set(getattr(text, "layer_types", None) or ()) - set(_LAYER_TYPES))
        if others:
            raise ValueError(f"config: got layers of type {', '.join(others)}; allowed: {', '.join(_LAYER_TYPES)}")
        num_layers = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
        super().__init__(layers=[_Layer(self, i) for i in range(num_layers)])
        self.pages: PagedKVCache | None = None
        self._sizes = {"num_pages": num_pages, "page_size": page_size, "kv_layout": kv_layout}
        self._ids: list[int] = []  # the sequence in each row of the batch
        self._next_id = 0
        self._columns = 0  # of complete steps
        self._real: Tensor | None = None  # (batch, columns) bool: False is padding; None where there is none
        self._step: _Step | None = None
        self._layers_used: frozenset[int] | None = None  # by every step

    # ---------------------------------------------------------------- what transformers calls
    def reset(self) -> None:
        """Forgets all sequences; the pages stay allocated."""
        if self.pages is not None:
            self.pages.free(self._ids)
        self._ids, self._columns, self._real, self._step = [], 0, None, None

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forgets the newest tokens of every sequence: ``-n`` forgets n, ``n`` keeps n (as transformers once had
        it)."""
        self._commit()
        count = int(tokens_to_remove)
        kept = max(0, min(count if count > 0 else self._columns + count, self._columns))
        if self.pages is None or kept == self._columns:
            return
        lengths = [kept] * len(self._ids) if self._real is None else self._real[:, :kept].sum(1).tolist()
        for key, length in zip(self._ids, lengths, strict=True):
            self.pages.truncate(key, length)
        self._columns = kept
        self._real = None if self._real is None else self._real[:, :kept]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was. Sequences share pages until they part."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times."""
        self._select([row for row in range(len(self._ids)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows ``indices``."""
        self._select(torch.arange(len(self._ids))[indices.cpu()].tolist())

    @property
    def batch_size(self) -> int:
        return len(self._ids) or -1

    def offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError("offload: a PagedCache is not moved layer by layer; its pages have swap_out")

    prefetch = offload

    # ---------------------------------------------------------------- a step: the tokens of one forward pass
    def _new_states(self, layer: int, k: Tensor, v: Tensor) -> tuple[NewStates, NewStates]:
        if self._step is not None and layer in self._step.updated:
            self._commit()
        if self._step is None:
            self._begin(k, v)
        assert self._step is not None
        if k.shape[0] != len(self._ids) or k.shape[2] != self._step.tokens:
            got, held = f"{k.shape[2]} tokens for {k.shape[0]} sequences", f"{self._step.tokens} for {len(self._ids)}"
            raise ValueError(f"key_states: got {got}; allowed: {held}; reset() empties the cache")
        self._step.updated.add(layer)
        step = self._step
        return NewStates(self, step, layer, k, v), NewStates(self, step, layer, k, v)

    def _begin(self, k: Tensor, v: Tensor) -> None:
        if self.pages is None:
            self.pages = PagedKVCache(
                num_layers=len(self.layers),
                num_heads_kv=k.shape[1],
                head_dim=k.shape[3],
                head_dim_v=v.shape[3],
                dtype=k.dtype,
                device=k.device,
                **self._sizes,  # type: ignore[arg-type]
            )
        if not self._ids:
            self._ids = self._new_ids(k.shape[0])
        self._step = _Step(k.shape[2])

    def _commit(self) -> None:
        """What a step wrote is part of the sequences from now on."""
        step, self._step = self._step, None
        if step is None or step.counts is None:
            return
        assert self.pages is not None
        if self._layers_used not in (None, frozenset(step.attended)):
            raise RuntimeError("PagedCache: the last forward pass ended before its last layer; call reset()")
        self._layers_used = frozenset(step.attended)
        self.pages.advance(self._ids, step.counts)
        self._columns += step.tokens
        self._real = step.real

    def _select(self, rows: Sequence[int]) -> None:
        self._commit()
        if self.pages is None or list(rows) == list(range(len(self._ids))):
            return
        ids, taken = [], set()
        for row in rows:
            key = self._ids[row]
            if row in taken:
                (key,) = self._new_ids(1)
                self.pages.fork(self._ids[row], key)
            taken.add(row)
            ids.append(key)
        self.pages.free([key for row, key in enumerate(self._ids) if row not in taken])
        self._ids = ids
        if self._real is not None:
            self._real = self._real[list(rows)]

    def _new_ids(self, count: int) -> list[int]:
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    def _prepare(self, step: _Step, mask: Tensor | None, causal: bool, window: int | None) -> None:
        """Finds out which tokens of the step are real, and makes room for them; checks that pages can say ``mask``."""
        if any(mask is m and (causal, window) == said for m, said in step.checked):
            return
        counts, rows, real = [step.tokens] * len(self._ids), None, None
        if mask is None:
            if self._real is not None:
                raise ValueError(
                    "attention_mask: got None after tokens with padding; allowed: their mask in every step"
                )
        else:
            counts, real = self._read(step, mask, causal, window)
        if step.counts is None:
            if real is not None and min(counts) < step.tokens:
                rows = real[:, -step.tokens :].flatten().nonzero().squeeze(1)
            self._reserve(step, counts, rows, real)
        elif counts != step.counts:
            raise UnsupportedError("attention_mask: layers of one model differ in what is padding")
        step.checked.append((mask, (causal, window)))

    def _read(self, step: _Step, mask: Tensor, causal: bool, window: int | None) -> tuple[list[int], Tensor | None]:
        """(real tokens of each sequence in the step, real columns (batch, columns) or None if all are)."""
        batch, columns = len(self._ids), self._columns + step.tokens
        if mask.dtype != torch.bool or tuple(mask.shape) != (batch, 1, step.tokens, columns):
            allowed = f"torch.bool, {(batch, 1, step.tokens, columns)}, with a PagedCache"
            raise ValueError(f"attention_mask: got {mask.dtype}, shape {tuple(mask.shape)}; allowed: {allowed}")
        new = mask[:, 0].diagonal(columns - step.tokens, dim1=1, dim2=2)  # a real token sees itself
        old = mask.new_ones(batch, self._columns) if self._real is None else self._real
        real = torch.cat([old, new], 1)
        position = real.cumsum(1)
        distance = position[:, -step.tokens :, None] - position[:, None]
        seen = real[:, None].expand_as(distance)
        if causal:
            seen = seen & (distance >= 0)
        if window is not None:
            seen = seen & (distance < window)
        same = ((seen == mask[:, 0]) | ~new[..., None]).all()
        *counts, same, padded = torch.cat([new.sum(1), torch.stack([same, ~real.all()]).long()]).tolist()
        if not same:
            raise UnsupportedError(
                "attention_mask: with a PagedCache a token sees the real tokens before it, within the layer's sliding "
                "window if it has one; this mask says otherwise"
            )
        return counts, real if padded else None

    def _reserve(self, step: _Step, counts: list[int], rows: Tensor | None, real: Tensor | None) -> None:
        assert self.pages is not None
        try:
            self.pages.reserve(self._ids, counts)
        except Exception:
            self._step = None  # nothing of it is in the cache
            raise
        step.counts, step.rows, step.real = counts, rows, real
        step.longest = max(self.pages.lengths(self._ids)) + max(counts)
        if rows is not None:
            ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            step.cu_seqlens = ends.to(rows.device, non_blocking=True)


@dataclass
class _Step:
    """``tokens`` columns of every sequence; what is below is known when the first layer attends.

    ``rows``: which of (batch * tokens) are real, None where all are; ``cu_seqlens`` (batch + 1,): where the sequences
    start among them. ``longest``: tokens of the longest sequence, these included. ``checked``: masks, and against what.
    """

    tokens: int
    updated: set[int] = field(default_factory=set)
    attended: set[int] = field(default_factory=set)
    checked: list[tuple[Tensor | None, tuple[bool, int | None]]] = field(default_factory=list)
    counts: list[int] | None = None
    rows: Tensor | None = None
    real: Tensor | None = None
    cu_seqlens: Tensor | None = None
    longest: int = 0


class NewStates:
    """Stands for the keys or the values of a layer, those in the pages and the new ones, on the way to the
    attention."""

    def __init__(self, cache: PagedCache, step: _Step, layer: int, k: Tensor, v: Tensor):
        self._cache, self._step, self._layer, self._k, self._v = cache, step, layer, k, v

    def attend(
        self,
        query: Tensor,
        mask: Tensor | None,
        *,
        causal: bool,
        sliding_window: int | None,
        **options: Any,
    ) -> Tensor:
        """Writes the new tokens into the pages, and attends: query (batch, heads, tokens, head_dim) -> (batch, tokens,
        heads, head_dim_v). Rows of padding are 0. ``options``: those of ``xattn.attention_paged``."""
        cache, step = self._cache, self._step
        if cache._step is not step:
            raise RuntimeError("PagedCache: keys of an earlier forward pass were used again")
        cache._prepare(step, mask, causal, sliding_window)
        pages = cache.pages
        assert pages is not None and step.counts is not None
        q, k, v = (t.transpose(1, 2) for t in (query, self._k, self._v))
        batch, tokens = q.shape[:2]
        if step.rows is not None:
            q, k, v = (t.reshape(batch * tokens, *t.shape[2:])[step.rows] for t in (q, k, v))
            options |= {"cu_seqlens_q": step.cu_seqlens, "cu_seqlens_new": step.cu_seqlens}
            options["max_seqlen_q"] = max(step.counts)
        if sliding_window is not None and step.longest > sliding_window:
            options["window"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
        out = attention_paged(
            q,
            *pages.layer(self._layer),
            pages.page_table,
            pages.seqlens_k,
            k_new=k,
            v_new=v,
            kv_layout=pages.kv_layout,
            causal=causal and tokens > 1,
            max_seqlen_k=step.longest,
            **options,
        )
        step.attended.add(self._layer)
        if step.rows is None:
            return out
        full = out.new_zeros(batch * tokens, *out.shape[1:])
        full[step.rows] = out
        return full.view(batch, tokens, *out.shape[1:])

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a PagedCache gave these states, which have no {name!r}: it serves models whose attention is xattn's "
            '(attn_implementation="xattn" after register()), and that hand on what the cache gives'
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        raise TypeError(
            f"a PagedCache gave these states, which {getattr(func, '__name__', func)} cannot take: it serves models "
            'whose attention is xattn\'s (attn_implementation="xattn" after register())'
        )


class _Layer(CacheLayerMixin):
    """One layer's view of a PagedCache."""

    is_sliding = False  # it keeps all tokens
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int):
        super().__init__()
        self._cache, self._index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.is_initialized = True
        return self._cache._new_states(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        step = self._cache._step
        return self._cache._columns + (step.tokens if step is not None and self._index in step.updated else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1
