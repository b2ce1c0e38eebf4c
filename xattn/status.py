"""What kernels find wrong with values that only the device can see: reported there, raised when the host asks.

On the CPU a bad value raises at once. On a GPU a sticky status word is set, without a synchronisation, and
``check_errors`` raises it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .concurrency import ForkSafeLock
from .errors import DeviceValueError

# One bit each; native kernels set the same bits.
MESSAGES = {
    "cu_seqlens": "cu_seqlens_q or cu_seqlens_k: must start at 0, never decrease, and end within the packed tensor",
    "max_seqlen": "max_seqlen_q or max_seqlen_k: smaller than the longest sequence",
    "seqlens_k": "seqlens_k or seqused_k: negative, or more than the page table, the cache or k has room for",
    "page_table": "page_table: a page id within a sequence's length is negative or not below num_pages",
    "rotary": "rotary: a token stands behind the last position of the cos and sin tables",
    "no_room": "k_new, v_new: the page table has no room for all new tokens; those without room were not written",
}
CODES = {name: 1 << n for n, name in enumerate(MESSAGES)}

_words: dict[torch.device, Tensor] = {}
_lock = ForkSafeLock()


def word(device: torch.device) -> Tensor:
    """The status of a GPU: int32[len(MESSAGES)], 0 or 1 each, which kernels may set and only ``check_errors``
    clears."""
    with _lock:
        if device not in _words:
            _words[device] = torch.zeros(len(MESSAGES), dtype=torch.int32, device=device)
        return _words[device]


def report(code: str, bad: Tensor, detail: str = "") -> None:
    """Notes that ``code`` happened if the boolean tensor ``bad`` has a True anywhere."""
    if bad.device.type == "cpu":
        if bad.any():
            raise DeviceValueError(MESSAGES[code] + (f" ({detail})" if detail else ""))
        return
    slot = word(bad.device)[list(CODES).index(code)]
    torch.maximum(slot, bad.any().to(torch.int32), out=slot)


def check_errors(device: torch.device | str | int | None = None) -> None:
    """Waits for the device and raises DeviceValueError with what kernels reported since the last call; clears it.

    ``device``: a torch device, default the current GPU; with None and no GPU it does nothing, as the CPU raises at
    once.
    """
    if device is None:
        with _lock:
            devices = list(_words)
    else:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.index is None and device.type != "cpu":
            device = torch.device(device.type, torch.get_device_module(device.type).current_device())
        with _lock:
            devices = [d for d in _words if d == device]
    for d in devices:
        values = _words[d].tolist()
        if any(values):
            _words[d].zero_()
            found = [text for text, value in zip(MESSAGES.values(), values, strict=True) if value]
            raise DeviceValueError(f"on {d}: " + "; ".join(found))
