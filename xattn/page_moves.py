"""Moves pages within a cache's storage, to the host and back.

``storages``: (num_layers, num_pages, ...), contiguous; each page of each layer is moved as one row of integers. Hosts:
what ``host_rows`` made. All work is queued on the current stream; on a GPU nothing waits, and the host reads no host
row, as a copy may still be writing it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .step_mirror import staged

# Pages are gathered and scattered on the device, this many bytes at once: a GPU that ran out of pages has little memory
# to spare, and copies of this size run at full speed.
_STAGED_BYTES = 32 << 20


def copy(storages: Sequence[Tensor], pages: Sequence[int], to: Sequence[int]) -> None:
    """Page ``pages[i]`` becomes the content of ``to[i]``, in all layers."""
    for rows in map(_rows, storages):
        rows.index_copy_(1, _index(to, rows), rows.index_select(1, _index(pages, rows)))


def host_rows(storages: Sequence[Tensor], count: int) -> list[Tensor]:
    """Host memory for ``count`` pages, (num_layers, count, words) for each storage; pinned beside a GPU."""
    return [
        torch.empty(
            (len(rows), count, rows.shape[2]), dtype=rows.dtype, device="cpu", pin_memory=rows.device.type == "cuda"
        )
        for rows in map(_rows, storages)
    ]


def save(storages: Sequence[Tensor], pages: Sequence[int], hosts: Sequence[Tensor]) -> None:
    """Page ``pages[i]`` goes to place i of the hosts."""
    for rows, host in zip(map(_rows, storages), hosts, strict=True):
        index = _index(pages, rows)
        for layer, target in zip(rows, host, strict=True):
            for part in _parts(len(pages), rows):
                target[part].copy_(layer.index_select(0, index[part]), non_blocking=True)


def load(hosts: Sequence[Tensor], indices: Sequence[int], storages: Sequence[Tensor], pages: Sequence[int]) -> None:
    """Place ``indices[i]`` of the hosts goes to page ``pages[i]``."""
    for rows, host in zip(map(_rows, storages), hosts, strict=True):
        index = _index(pages, rows)
        parts = [(index[part], list(_runs(indices[part]))) for part in _parts(len(pages), rows)]
        for layer, source in zip(rows, host, strict=True):
            for to, runs in parts:
                gathered = torch.empty((len(to), rows.shape[2]), dtype=rows.dtype, device=rows.device)
                for at, first, count in runs:
                    gathered[at : at + count].copy_(source[first : first + count], non_blocking=True)
                layer.index_copy_(0, to, gathered)


def _rows(storage: Tensor) -> Tensor:
    """(num_layers, num_pages, words): pages as the widest integers that fit, as not every operation knows fp8."""
    rows = storage.flatten(2)
    size = rows.shape[2] * rows.itemsize
    words = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return rows.view(next(word for word in words if size % word.itemsize == 0))


def _index(pages: Sequence[int], rows: Tensor) -> Tensor:
    return staged(array("i", pages), rows.device).to(rows.device, non_blocking=True).long()


def _parts(count: int, rows: Tensor) -> Iterator[slice]:
    step = max(1, _STAGED_BYTES // (rows.shape[2] * rows.itemsize))
    return (slice(at, min(at + step, count)) for at in range(0, count, step))


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(position, first index, length) of each run of consecutive numbers."""
    start = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield start, indices[start], at - start
            start = at
