"""Copies between a GPU's pages and the host, on a stream beside that of the other work: what must wait for which, and
when. No pages and no copies: paged.py and page_moves.py have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class Streams:
    """torch's streams of one GPU, as far as ``Transfers`` asks for them. The side stream is made at its first use."""

    def __init__(self, device: torch.device):
        self._device, self._module = device, torch.get_device_module(device)
        self._side: Any = None

    def current(self) -> Any:
        return self._module.current_stream(self._device)

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        with self._module.device(self._device):
            return bool(self._module.is_current_stream_capturing())

    def side(self) -> Any:
        if self._side is None:
            self._side = self._module.Stream(self._device)
        return self._side

    def queue(self, work: Callable[[], None], tensors: Sequence[Tensor]) -> None:
        """Calls ``work`` with the side stream as the current one; ``tensors``, which it uses, are kept until it ends,
        also when their owner goes first."""
        side = self.side()
        for t in tensors:
            t.record_stream(side)
        with self._module.stream(side):
            work()


@dataclass
class Transfer:
    """``due``: work on pages that it touches may come, so that streams wait; ``waiting``: those that do already."""

    done: Any
    pages: frozenset[int]
    due: bool
    waiting: set[Any] = field(default_factory=set)


class Transfers:
    """Orders copies on the side stream with work on others, by events; the host waits for nothing but in ``settle``.

    - A copy begins after what was queued on the current stream before it, and after copies that were queued earlier.
    - Pages that a copy writes: the current stream waits for it at once, others when they next come (``wait``).
    - Pages that a copy reads may be read meanwhile; whoever is about to write to them says so first (``claim``), and
      waits, as do from then on the other streams that come.

    ``streams`` None: there is no stream, as on the CPU, and everything is done when a call returns. Not locked: the
    owner's lock is held in every call.
    """

    def __init__(self, streams: Streams | None):
        self._streams = streams
        self._flying: list[Transfer] = []

    def run(self, work: Callable[[], None], tensors: Sequence[Tensor], pages: Iterable[int], writes: bool) -> None:
        """Queues ``work``, which copies from ``pages``, or with ``writes`` to them; ``tensors``: see ``Streams``."""
        if self._streams is None:
            work()
            return
        self._flying = [t for t in self._flying if not t.done.query()]
        side = self._streams.side()
        side.wait_event(self._streams.current().record_event())
        try:
            self._streams.queue(work, tensors)
        finally:  # what was queued before an error is under way
            self._flying.append(Transfer(side.record_event(), frozenset(pages), writes))
        self.wait()

    def claim(self, pages: Iterable[int]) -> None:
        """Before work that writes to ``pages`` is queued."""
        if self._flying:
            claimed = frozenset(pages)
            for transfer in self._flying:
                transfer.due |= not transfer.pages.isdisjoint(claimed)
            self.wait()

    def wait(self) -> None:
        """The current stream waits for the transfers that are due, each once.

        Not while it is captured: a graph could not wait for what is outside it, and the stream that reserves pages for
        a replay has waited.
        """
        due = [t for t in self._flying if t.due]
        if not due or self._streams is None or self._streams.capturing():
            return
        current = self._streams.current()
        for transfer in due:
            if current not in transfer.waiting:
                current.wait_event(transfer.done)
                transfer.waiting.add(current)

    def settle(self) -> None:
        """The host waits for all transfers: before it reads what they copied."""
        for transfer in self._flying:
            transfer.done.synchronize()
        self._flying = []
