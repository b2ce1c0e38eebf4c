"""A stand-in for a GPU's streams over tensors on the CPU. Work of ordinary streams is done when it is queued; that of
the side stream as late as allowed, or, with a seed, at any moment before. So a wait that is missing shows in contents.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Event:
    def __init__(self, name: str, done: bool, reach: Callable[[], None]):
        self.name, self.done, self._reach = name, done, reach

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self._reach()
        assert self.done


class Stream:
    """Equal to another of the same name, as torch's are of one handle."""

    def __init__(self, name: str, owner: FakeStreams):
        self.name, self._owner = name, owner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def record_event(self) -> Event:
        owner = self._owner
        event = Event(f"{self.name}{len(owner.log)}", self.name != "side", lambda: owner.run_until(event))
        if self.name == "side":
            owner.queued.append(event)
        owner.log.append((self.name, "records", event.name))
        return event

    def wait_event(self, event: Event) -> None:
        self._owner.log.append((self.name, "waits for", event.name))
        if self.name != "side":  # what is queued on it from now on is done at once
            event.synchronize()
        assert self.name != "side" or event.done, "the side stream waits for what was queued on an ordinary one"


class FakeStreams:
    def __init__(self, seed: int | None = None):
        self.queued: deque[Any] = deque()
        self.log: list[tuple[str, str, str]] = []
        self.name, self.captured = "main", False
        self._random = None if seed is None else random.Random(seed)

    def _progress(self) -> None:
        if self._random is not None:
            for _ in range(self._random.randint(0, len(self.queued))):
                self._step()

    def _step(self) -> None:
        entry = self.queued.popleft()
        if isinstance(entry, Event):
            entry.done = True
        else:
            entry()

    def run_until(self, event: Event) -> None:
        while not event.done:
            self._step()

    # ---- what Transfers calls
    def current(self) -> Stream:
        self._progress()
        return Stream(self.name, self)

    def side(self) -> Stream:
        return Stream("side", self)

    def capturing(self) -> bool:
        return self.captured

    def queue(self, work: Callable[[], None], tensors: Sequence[Tensor]) -> None:
        self.log.append(("side", "works", ""))
        self.queued.append(work)
