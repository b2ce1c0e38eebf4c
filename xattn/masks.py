"""Which keys a query sees. Everything is aligned bottom-right: query i stands at key position i + seqlen_k -
seqlen_q."""

from __future__ import annotations

from torch import Tensor

Length = int | Tensor  # one number, or a tensor that broadcasts against (batch, heads, rows, keys)


def visible(
    i: Tensor,
    j: Tensor,
    seqlen_q: Length,
    seqlen_k: Length,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
) -> Tensor | None:
    """Boolean, broadcastable to (batch, heads, rows, keys): True where query ``i`` (rows, 1) sees key ``j`` (keys,).

    None where nothing is hidden and no length is a tensor.
    """
    terms = []
    if isinstance(seqlen_q, Tensor):
        terms.append(i < seqlen_q)
    if isinstance(seqlen_k, Tensor):
        terms.append(j < seqlen_k)
    diagonal = i + (seqlen_k - seqlen_q)
    if causal:
        terms.append(j <= diagonal)
    if window_left is not None:
        terms.append(j >= diagonal - window_left)
    if window_right is not None:
        terms.append(j <= diagonal + window_right)
    return conjunction(terms)


def conjunction(terms: list[Tensor]) -> Tensor | None:
    """All of the boolean tensors, broadcast together; None for none."""
    result = None
    for term in terms:
        result = term if result is None else result & term
    return result


def key_range(
    i0: int, i1: int, seqlen_q: int, seqlen_k: int, causal: bool, window_left: int | None, window_right: int | None
) -> tuple[int, int]:
    """The keys [j0, j1) outside of which rows [i0, i1) see nothing."""
    shift = seqlen_k - seqlen_q
    j0, j1 = 0, seqlen_k
    if window_left is not None:
        j0 = max(j0, i0 + shift - window_left)
    right = window_right if not causal else 0 if window_right is None else min(0, window_right)
    if right is not None:
        j1 = min(j1, i1 + shift + right)
    return min(j0, seqlen_k), max(j1, min(j0, seqlen_k), 0)
