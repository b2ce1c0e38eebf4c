"""PagedKVCache: keys and values of many growing sequences, for all layers of a model, in pages of one size.

page_pool.py keeps the books, step_mirror.py shows them to the device, page_moves.py copies pages, transfers.py orders
the copies.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from . import ops as ops  # defines torch.ops.xattn
from . import page_moves, places, validate
from .concurrency import ForkSafeLock
from .inputs import DTYPES
from .page_pool import Ids, PagePool, PoolStats
from .rotary import Rotary
from .step_mirror import StepMirror, staged
from .transfers import Streams, Transfers
from .validate import fail


class PagedKVCache:
    """A paged cache with one page table for all layers.

    A step of a model, n new tokens for each of the sequences ``ids``::

        cache.reserve(ids, n)  # pages for them; ids is now the batch
        for i, layer in enumerate(layers):
            ...
            cache.append(i, k, v)
            table, lengths = cache.page_table, cache.seqlens_k + n
            out = xattn.attention_paged(q, *cache.layer(i), table, lengths, causal=True, kv_layout=cache.kv_layout)
        cache.advance(ids, n)  # they are part of the sequences from now on

    ``attention_paged`` can also write them itself: ``(q, ..., cache.page_table, cache.seqlens_k, k_new=k, v_new=v)``;
    what was reserved is not checked then.

    Lengths on the host are authoritative; ``page_table`` and ``seqlens_k`` mirror them on the device for the step.

    CUDA graphs: the mirrors are views of buffers that ``reserve`` and ``advance`` write in place, and replace only when
    a step has more sequences, or a sequence more pages, than fit; ``preallocate`` makes room beforehand. The table
    always has the width of its buffer, so for one batch size address, shape and strides stay, and a graph captured with
    them, appends included, can be replayed in any later step. Rows behind the batch are empty. During a capture call
    nothing but ``append``, ``layer`` and the two mirrors.

    Every call takes one lock, so threads may share a cache; as there is one current step, one thread at a time drives
    the steps. Work is queued on the current stream: use one stream, or order them. On a GPU swapped pages are copied on
    a stream of the cache's own, beside other work; events order it, and the host waits for nothing.

    Ids are hashable: ints, strings. In every method bad arguments raise TypeError or ValueError and change nothing; so
    do sizes that the memory does not hold, with MemoryError. ``copy.deepcopy`` gives a cache of its own;
    ``copy.copy`` and pickle raise TypeError.

    Args:
        num_pages, page_size: pages in all, and tokens in a page.
        head_dim_v: of the values; default head_dim.
        dtype: fp8 too; scales are given to ``append`` and to ``attention_paged``.
        kv_layout: "NHD", pages (page_size, heads_kv, head_dim), or "HND", pages (heads_kv, page_size, head_dim).

    Attributes:
        k: (num_layers, num_pages, page_size, heads_kv, head_dim), or as kv_layout says. v: likewise with head_dim_v.
            Not initialised: what is in no sequence is never read.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | int | None = None,
        kv_layout: str = "NHD",
    ):
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {"num_pages": num_pages, "page_size": page_size, "num_layers": num_layers}
        sizes |= {"num_heads_kv": num_heads_kv, "head_dim": head_dim, "head_dim_v": head_dim_v}
        sizes = {name: validate.count(name, value, 1) for name, value in sizes.items()}
        num_pages, page_size, num_layers, num_heads_kv, head_dim, head_dim_v = sizes.values()
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            fail("dtype", dtype, ", ".join(DTYPES.values()), TypeError)
        if not isinstance(kv_layout, str) or kv_layout not in ("NHD", "HND"):
            fail("kv_layout", repr(kv_layout), "'NHD' or 'HND'")
        place = None if device is None else places.present("device", device)
        page = (page_size, num_heads_kv) if kv_layout == "NHD" else (num_heads_kv, page_size)
        bytes_wanted = num_layers * num_pages * page_size * num_heads_kv * (head_dim + head_dim_v) * dtype.itemsize
        with _memory(f"a cache of {bytes_wanted / 2**30:.3g} GiB", ", ".join(sizes)), torch.inference_mode(False):
            self.k = torch.empty(num_layers, num_pages, *page, head_dim, dtype=dtype, device=place)
            self.v = torch.empty(num_layers, num_pages, *page, head_dim_v, dtype=dtype, device=place)
            self._pool = PagePool(num_pages, page_size)
        self.num_pages, self.page_size, self.num_layers = num_pages, page_size, num_layers
        self.dtype, self.device, self.kv_layout = dtype, self.k.device, kv_layout
        self._mirror = StepMirror(self.device)
        self._transfers = self._no_transfers()
        self._step: Ids | None = None
        self._lock = ForkSafeLock(reentrant=True)

    @property
    def _storages(self) -> tuple[Tensor, Tensor]:
        return self.k, self.v

    def _no_transfers(self) -> Transfers:
        return Transfers(Streams(self.device) if self.device.type == "cuda" else None)

    def __repr__(self) -> str:
        pool = self.stats()
        layout = f"{self.num_layers} layers, {self.num_pages} pages of {self.page_size} tokens, {self.kv_layout}"
        return (
            f"PagedKVCache({layout}, {self.dtype}, {self.device}: {pool.sequences} sequences, {pool.free} pages free)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        """A cache of its own: pages, sequences, swapped ones included, and the step."""
        with self._lock, torch.inference_mode(False):
            new = object.__new__(type(self))
            memo[id(self)] = new
            self._transfers.settle()  # the host reads what was swapped out
            memo |= {id(key): key for key in self._pool.sequences}  # callers go on naming sequences by the same ids
            shared = ("_lock", "_transfers")
            own = {name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name not in shared}
            vars(new).update(own, _lock=ForkSafeLock(reentrant=True), _transfers=self._no_transfers())
            return new

    def __copy__(self) -> NoReturn:
        raise TypeError("PagedKVCache: got copy.copy, two caches over the same pages; allowed: copy.deepcopy")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("PagedKVCache: got pickle, and pages stay in their process; allowed: copy.deepcopy")

    # ---------------------------------------------------------------- a step
    def reserve(self, ids: Iterable[Hashable], n: int | Sequence[int]) -> None:
        """Makes room for ``n`` tokens (a number, or one per id) behind the committed ones; ``ids`` become the batch.

        Unknown ids become empty sequences. Where tokens would be written into a page that others hold too, it is
        copied. What was reserved before and is not committed yet is part of the room, not added to it, and is never
        reduced (``truncate`` does that). A sequence with nothing reserved may be read in this step, not appended to.

        Raises:
            OutOfPagesError: fewer pages are free than are needed; nothing was changed.
        """
        keys = _ids(ids)
        with self._lock:
            counts = _counts(n, len(keys))
            mirror = self._mirror.with_room(len(keys), self._pool.most_pages(keys, counts), self.num_pages)
            self._pool.reserve(keys, counts, self._copy)
            self._transfers.claim(self._pool.written(keys))
            self._show(keys, mirror)

    def append(
        self,
        layer: int,
        k_new: Tensor,
        v_new: Tensor,
        cu_seqlens_new: Tensor | Sequence[int] | None = None,
        *,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        """Writes new tokens of the step's sequences behind their committed lengths, through the page table.

        Args:
            k_new: (batch, n, heads_kv, head_dim), or packed (total_new, heads_kv, head_dim).
            v_new: likewise with head_dim_v.
            cu_seqlens_new: (batch + 1,) where packed. A list, or a tensor on the CPU, is checked against what was
                reserved. A tensor on a GPU is not read by the host: tokens for which there is no page are not written,
                and ``xattn.check_errors`` raises.
            k_scale, v_scale: divide the tokens, see ``xattn.attention_paged``.
            rotary: applied to k_new at its positions.

        Raises (before anything is written):
            ValueError: more tokens than are reserved, another batch than the step's, no such layer, a gradient.
            RuntimeError: there is no step.
        """
        with self._lock:
            step = self._current()
            k_cache, v_cache = self.layer(layer)
            for name, t in (("k_new", k_new), ("v_new", v_new)):
                validate.tensor(name, t, optional=False)
                if torch.is_grad_enabled() and t.requires_grad:
                    fail(name, "a tensor that requires a gradient", "append only under torch.no_grad()")
            if rotary is not None and not isinstance(rotary, Rotary):
                fail("rotary", type(rotary).__name__, "an xattn.Rotary or None", TypeError)
            offsets, counts = self._new_tokens(k_new, cu_seqlens_new, len(step))
            for key, count in zip(step, counts, strict=False):
                room = self._pool.sequences[key].reserved
                if count > room:
                    fail("k_new", f"{count} tokens for {key!r}", f"up to the {room} that are reserved for it")
            self._transfers.wait()
            torch.ops.xattn.append_paged(
                k_cache,
                v_cache,
                self.page_table,
                self.seqlens_k,
                k_new,
                v_new,
                cu_seqlens_new=offsets,
                kv_layout=self.kv_layout,
                k_scale=validate.scale("k_scale", k_scale, self.k),
                v_scale=validate.scale("v_scale", v_scale, self.v),
                rotary_cos=None if rotary is None else rotary.cos,
                rotary_sin=None if rotary is None else rotary.sin,
                rotary_interleaved=rotary is not None and rotary.interleaved,
            )

    def advance(self, ids: Iterable[Hashable], n: int | Sequence[int]) -> None:
        """Commits ``n`` tokens of those reserved: once per step, for all layers, also after a graph was replayed."""
        keys = _ids(ids)
        with self._lock:
            self._pool.advance(keys, _counts(n, len(keys)))
            if self._step is not None and not set(keys).isdisjoint(self._step):
                self._mirror.show_lengths(self._pool.lengths(self._step))

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """(k_cache, v_cache) of a layer, views for ``attention_paged``."""
        i = validate.count("layer", i)
        if i >= self.num_layers:
            fail("layer", i, f"0 to {self.num_layers - 1}")
        return self.k[i], self.v[i]

    @property
    def page_table(self) -> Tensor:
        """(batch, max_pages) int32 on the device: pages of the step's sequences, -1 where there is none. Read only."""
        with self._lock:
            self._current()
            self._transfers.wait()
            return self._mirror.page_table

    @property
    def seqlens_k(self) -> Tensor:
        """(batch,) int32 on the device: committed lengths of the step's sequences. Read only."""
        with self._lock:
            self._current()
            self._transfers.wait()
            return self._mirror.seqlens_k

    def preallocate(self, max_batch: int, max_seqlen: int) -> None:
        """New mirrors, with room for steps of max_batch sequences of max_seqlen tokens: before a graph is captured."""
        rows, tokens = validate.count("max_batch", max_batch), validate.count("max_seqlen", max_seqlen)
        with self._lock:
            width = min(self._pool.pages_for(tokens), self.num_pages)
            with _memory(f"mirrors of {rows} sequences, {width} pages each", "max_batch, max_seqlen"):
                mirror = StepMirror(self.device, rows, width)
            if self._step is None:
                self._mirror = mirror
            else:
                longest = self._pool.most_pages(self._step, [0] * len(self._step))
                self._show(self._step, mirror.with_room(len(self._step), longest, self.num_pages))

    # ---------------------------------------------------------------- sequences
    def fork(self, src: Hashable, dst: Hashable) -> None:
        """Makes ``dst`` a sequence with the committed tokens of ``src``, in the same pages until a ``reserve``."""
        _ids((src, dst))
        with self._lock:
            self._pool.fork(src, dst)

    def free(self, ids: Iterable[Hashable]) -> None:
        """Forgets sequences. This, ``truncate`` and ``swap_out`` end the step if a sequence is of its batch."""
        keys = _ids(ids)
        with self._lock:
            self._pool.free(keys)
            self._end_step(keys)

    def truncate(self, id: Hashable, length: int) -> None:
        """Keeps the first ``length`` committed tokens; frees the pages behind them, reserved ones included."""
        keys = _ids((id,))
        with self._lock:
            self._pool.truncate(id, validate.count("length", length))
            self._end_step(keys)

    def swap_out(self, ids: Iterable[Hashable]) -> None:
        """Moves the committed tokens to host memory, pinned where the cache is on a GPU, and frees the pages.

        On a GPU the copy follows what is queued on the current stream, and goes on beside what is queued after it: work
        that writes to these pages, which are taken last, waits for it. Pages that other sequences hold too stay with
        those. A sequence that is swapped out has its length, and can be freed or swapped in; every other method raises.
        """
        keys = _ids(ids)
        with self._lock:
            self._pool.swap_out(keys, self._save)
            self._end_step(keys)

    def swap_in(self, ids: Iterable[Hashable]) -> None:
        """Brings sequences back into free pages. On a GPU the current stream waits for the copy, the host does not.

        Those that went in one call and come back in one share pages as before; otherwise each gets its own.

        Raises:
            OutOfPagesError: fewer pages are free than are needed; nothing was changed.
        """
        keys = _ids(ids)
        with self._lock:
            self._pool.swap_in(keys, self._load)

    @property
    def ids(self) -> Ids:
        """All sequences, swapped out or not."""
        with self._lock:
            return tuple(self._pool.sequences)

    @property
    def step(self) -> Ids:
        """The current step's sequences, in the order of the batch."""
        with self._lock:
            return self._current()

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds."""
        with self._lock:
            return len(self._pool.free_pages)

    def length(self, id: Hashable) -> int:
        """Committed tokens of a sequence."""
        return self.lengths((id,))[0]

    def lengths(self, ids: Iterable[Hashable]) -> list[int]:
        """Committed tokens of each sequence."""
        keys = _ids(ids)
        with self._lock:
            return [self._pool.known("ids", key).length for key in keys]

    def stats(self) -> PoolStats:
        """How full the cache is: pages, free and shared ones, sequences, tokens (``PoolStats``)."""
        with self._lock:
            return self._pool.stats()

    # ---------------------------------------------------------------- the current step
    def _current(self) -> Ids:
        if self._step is None:
            ended = "none, or one of its sequences was freed, truncated or swapped out"
            raise RuntimeError(f"step: got {ended}; allowed: calls that follow reserve(ids, n)")
        return self._step

    def _show(self, keys: Ids, mirror: StepMirror) -> None:
        """``keys`` become the step, shown in ``mirror``, which has room for them."""
        self._step = None
        mirror.show(self._pool.table(keys, mirror.width), self._pool.lengths(keys))
        self._mirror, self._step = mirror, keys

    def _end_step(self, keys: Ids) -> None:
        if self._step is not None and not set(keys).isdisjoint(self._step):
            self._step = None
            self._mirror.clear()

    def _new_tokens(self, k_new: Tensor, cu_seqlens_new: Any, batch: int) -> tuple[Tensor | None, list[int]]:
        """``cu_seqlens_new`` on the device, and how many tokens each sequence gets; none where only a GPU knows."""
        if cu_seqlens_new is None:
            if k_new.dim() != 4 or k_new.shape[0] != batch:
                allowed = f"({batch}, n, heads_kv, head_dim), or packed with cu_seqlens_new"
                fail("k_new", f"shape {tuple(k_new.shape)}", allowed)
            return None, [k_new.shape[1]] * batch
        if k_new.dim() != 3:
            fail(
                "k_new", f"shape {tuple(k_new.shape)}", "(total_new, heads_kv, head_dim) where cu_seqlens_new is given"
            )
        if isinstance(cu_seqlens_new, Tensor):
            if cu_seqlens_new.device.type != "cpu":
                return cu_seqlens_new, []
            cu_seqlens_new = cu_seqlens_new.tolist()
        if not isinstance(cu_seqlens_new, (list, tuple)):
            fail(
                "cu_seqlens_new", type(cu_seqlens_new).__name__, "a tensor, a list of whole numbers, or None", TypeError
            )
        offsets = [validate.count("cu_seqlens_new", offset) for offset in cu_seqlens_new]
        if len(offsets) != batch + 1:
            fail("cu_seqlens_new", f"{len(offsets)} offsets", f"{batch + 1}, one more than the step has sequences")
        if offsets[0] or offsets != sorted(offsets) or offsets[-1] > len(k_new):
            fail("cu_seqlens_new", offsets, f"from 0, never decreasing, up to the {len(k_new)} tokens of k_new")
        counts = [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
        return staged(array("i", offsets), self.device).to(self.device, non_blocking=True), counts

    # ---------------------------------------------------------------- moving pages
    def _copy(self, pages: list[int], to: list[int]) -> None:
        self._transfers.claim(to)
        page_moves.copy(self._storages, pages, to)

    def _save(self, pages: list[int]) -> list[Tensor]:
        hosts = page_moves.host_rows(self._storages, len(pages))
        work = functools.partial(page_moves.save, self._storages, pages, hosts)
        self._transfers.run(work, self._storages, pages, writes=False)
        return hosts

    def _load(self, hosts: list[Tensor], indices: list[int], pages: list[int]) -> None:
        work = functools.partial(page_moves.load, hosts, indices, self._storages, pages)
        self._transfers.run(work, self._storages, pages, writes=True)


@contextlib.contextmanager
def _memory(what: str, names: str) -> Iterator[None]:
    """Turns what torch and Python say of sizes that no memory holds into one MemoryError; that of a GPU stays."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        raise MemoryError(f"{names}: got {what}; allowed: what fits into the memory") from error


def _ids(ids: Iterable[Hashable]) -> Ids:
    if isinstance(ids, (str, bytes, Tensor)) or not isinstance(ids, Iterable):
        fail("ids", type(ids).__name__, "a list or tuple of ids", TypeError)
    keys = tuple(ids)
    try:
        repeated = len(set(keys)) < len(keys)
    except TypeError as error:
        raise TypeError(f"ids: got {keys!r}; allowed: hashable ids, such as ints and strings") from error
    if any(isinstance(key, Tensor) for key in keys):
        fail("ids", "a tensor", "ids that compare by value, such as ints and strings", TypeError)
    if repeated:
        fail("ids", repr(list(keys)), "each id once")
    return keys


def _counts(n: int | Sequence[int], batch: int) -> list[int]:
    counts = list(n) if isinstance(n, (list, tuple)) else [n] * batch
    if len(counts) != batch:
        fail("n", f"{len(counts)} numbers", f"a number, or {batch}: one per id")
    return [validate.count("n", count) for count in counts]
