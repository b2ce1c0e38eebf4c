"""Exceptions and warnings of xattn. Bad arguments raise ValueError or TypeError; the classes here say more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class UnsupportedError(RuntimeError):
    """No backend can answer the question as asked.

    ``rejected`` maps each backend's name to the refusals (see ``xattn.capability.Refusal``) it gave.
    """

    def __init__(self, message: str, rejected: Mapping[str, Sequence[Any]] | None = None):
        self.rejected = {name: tuple(refusals) for name, refusals in (rejected or {}).items()}
        lines = [message]
        lines += [f"  {name}: {refusal}" for name, refusals in self.rejected.items() for refusal in refusals]
        super().__init__("\n".join(lines))


class DeviceValueError(ValueError):
    """Values that only the device could see (lengths, page ids, offsets) were out of range.

    Raised by ``xattn.check_errors()`` for GPUs, and at once on the CPU.
    """


class OutOfPagesError(RuntimeError):
    """A paged cache has fewer free pages than were asked for. Nothing was changed."""


class FallbackWarning(UserWarning):
    """A call on a GPU is answered by a backend that is not native to it; the text lists the refusals."""
