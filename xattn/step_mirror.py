"""The page table and the lengths of the current step on the device, at addresses that stay: what CUDA graphs read."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor


def staged(values: array[int], device: torch.device) -> Tensor:
    """int32 on the host, to be copied to ``device`` with non_blocking.

    For a GPU it is pinned: torch's allocator keeps it until the copy is done, so the host need not wait.
    """
    host = torch.frombuffer(values, dtype=torch.int32) if values else torch.empty(0, dtype=torch.int32, device="cpu")
    return host.pin_memory() if device.type == "cuda" else host


class StepMirror:
    """Two buffers, table (rows, width) and lengths (rows,), whose first ``batch`` rows show the step.

    They are written in place and replaced only where a step does not fit. Rows behind the step have no pages (-1) and
    length 0, so that a graph which was captured for a larger batch, or is replayed by mistake, touches no page.
    """

    def __init__(self, device: torch.device, rows: int = 0, width: int = 0):
        self.device = device
        self.resize(rows, width)

    @property
    def page_table(self) -> Tensor:
        return self._table[: self.batch]

    @property
    def seqlens_k(self) -> Tensor:
        return self._lengths[: self.batch]

    @property
    def width(self) -> int:
        return self._table.shape[1]

    def resize(self, rows: int, width: int) -> None:
        """New buffers, empty. Not as inference tensors: those could not be written in a step outside inference mode."""
        with torch.inference_mode(False):
            table = torch.full((rows, width), -1, dtype=torch.int32, device=self.device)
            lengths = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self._table, self._lengths, self.batch = table, lengths, 0

    def with_room(self, batch: int, pages: int, num_pages: int) -> StepMirror:
        """This one, or one with new buffers if the step does not fit: powers of two, as that makes it seldom; no row
        needs over num_pages."""
        rows = self._table.shape[0]
        if batch <= rows and pages <= self.width:
            return self
        roomy = (max(rows, _power_of_two(batch)), max(self.width, min(_power_of_two(pages), num_pages)))
        return StepMirror(self.device, *roomy)

    def show(self, table: array[int], lengths: array[int]) -> None:
        batch = len(lengths)
        rows = staged(table, self.device).view(batch, self.width)
        self._table[:batch].copy_(rows, non_blocking=True)
        self._table[batch : self.batch].fill_(-1)
        self._lengths[batch : self.batch].zero_()
        self.batch = batch
        self.show_lengths(lengths)

    def show_lengths(self, lengths: array[int]) -> None:
        self.seqlens_k.copy_(staged(lengths, self.device), non_blocking=True)

    def clear(self) -> None:
        self.page_table.fill_(-1)
        self.seqlens_k.zero_()
        self.batch = 0


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0
