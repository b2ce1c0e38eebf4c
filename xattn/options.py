"""Values of command-line options, as text becomes them; argparse names the option in what is raised here."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError

MOST = 2**63 - 1  # of a size, in torch


def is_whole(text: str, low: int = 0) -> bool:
    """Whether ``text`` is a whole number from ``low`` to MOST in the digits 0 to 9."""
    return text.isascii() and text.isdigit() and len(text.lstrip("0")) < 20 and low <= int(text) <= MOST


def positive(text: str) -> int:
    """A whole number from 1."""
    if not is_whole(text, 1):
        raise ArgumentTypeError(f"{text!r}: a whole number from 1{_bound(text)}")
    return int(text)


def positive_float(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"{text!r}: a finite number above 0")
    return number


def shape(text: str) -> tuple[int, ...]:
    """batch, seqlen, heads, head_dim."""
    parts = [p.strip() for p in text.split(",")]
    if len(parts) != 4 or not all(map(is_whole, parts)):
        raise ArgumentTypeError(
            f"{text!r}: four whole numbers separated by commas: batch,seqlen,heads,head_dim{_bound(text)}"
        )
    return tuple(map(int, parts))


def window(text: str) -> tuple[int | None, int | None]:
    """Distances to the left and to the right."""
    parts = [p.strip() for p in text.split(",")]
    if len(parts) != 2 or not all(is_whole(p) or not p for p in parts):
        raise ArgumentTypeError(
            f"{text!r}: two distances from 0 separated by a comma; a side without bound is left empty (None in Python)"
            f"{_bound(text)}"
        )
    left, right = (int(p) if p else None for p in parts)
    return left, right


def _bound(text: str) -> str:
    return f", at most {MOST}" if any(len(p.strip()) > 18 for p in text.split(",")) else ""
