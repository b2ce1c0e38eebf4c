"""The random numbers of dropout: a pure function of (seed, offset; batch, head, q_idx, kv_idx), the same on every
device.

Generator: Philox4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011;
7 is the fewest rounds that pass BigCrush there). One evaluation gives four 32-bit words, used as eight 16-bit numbers.

    key     = (seed + offset * 0x9E3779B97F4A7C15) mod 2^64, low word first
    counter = (kv_group, q_idx, batch, head), each mod 2^32, so that negative positions count too
    kv_group takes kv_idx without its bits 0, 4 and 5:  (kv_idx >> 6) * 8 + ((kv_idx >> 1) & 7)
    word     = (kv_idx >> 4) & 3                          (bits 4 and 5)
    half     = kv_idx & 1                                 (0: low 16 bits, 1: high 16 bits)

The eight keys of a group ({0, 1, 16, 17, 32, 33, 48, 49} + 2i of 64) belong to one query and lie with one lane both in
the accumulator of mma.m16n8k16 and wgmma (columns 2t, 2t+1 of each 8) and in that of MFMA with S^T = K Q^T (rows
4g..4g+3 of each 16, or 8i + 4g..4g+3 of each 32), so no lane evaluates Philox twice for a tile whose keys are a
multiple of 64.

A weight is kept where the number, an integer u in [0, 65536), satisfies u >= round(p * 65536): p is honoured to 2^-16.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFF


def threshold(dropout_p: float) -> int:
    """Numbers below it are dropped; 65536 drops all."""
    return round(dropout_p * 65536)


def draw(device: torch.device) -> Tensor:
    """A fresh (seed, offset), int64[2], from torch's generator of the device; inside a graph every replay draws a new
    one."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def keep(rng: Tensor, dropout_p: float, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """True where a weight is kept. ``rng`` is int64[2], or int64[4] with the q_idx of the first query and the kv_idx of
    the first key; the indices are integer tensors that broadcast to the result's shape."""
    if rng.shape[0] == 4:
        q_idx, kv_idx = q_idx + rng[2], kv_idx + rng[3]
    return uniform16(rng, batch, head, q_idx, kv_idx) >= threshold(dropout_p)


def uniform16(rng: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """The 16-bit number of each (batch, head, q_idx, kv_idx), as int64 of the broadcast shape."""
    batch, head, q_idx, kv_idx = (x.to(torch.int64) for x in (batch, head, q_idx, kv_idx))
    key = rng[0] + rng[1] * (_GOLDEN - (1 << 64))  # int64 arithmetic wraps, as the definition wants
    group = (kv_idx >> 6) * 8 + ((kv_idx >> 1) & 7)
    counter = tuple(n & _MASK for n in (group, q_idx, batch, head))
    words = philox4x32(counter, (key & _MASK, (key >> 32) & _MASK))
    select = (kv_idx >> 4) & 3
    low, high = torch.where(select == 0, words[0], words[1]), torch.where(select == 2, words[2], words[3])
    return (torch.where(select < 2, low, high) >> ((kv_idx & 1) * 16)) & 0xFFFF


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor], rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Four 32-bit words for each counter (four words) and key (two words), all held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        (hi0, lo0), (hi1, lo1) = _mul32(c0, _M0), _mul32(c2, _M1)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def _mul32(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, in halves: int64 has no room for the whole of it."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
