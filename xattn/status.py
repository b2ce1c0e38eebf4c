"""What kernels find wrong with values that only the device can see: reported there, raised when the host asks.

On the CPU a bad value raises at once. On a GPU a sticky status word is set, without a synchronisation, and
``check_errors`` raises it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import places
from .concurrency import ForkSafeLock
from .errors import DeviceValueError

# One bit each; native kernels set the same bits.
MESSAGES = {
    "cu_seqlens": "cu_seqlens_q or cu_seqlens_k: must start at 0, never decrease, and end within the packed tensor",
    "max_seqlen": "max_seqlen_q or max_seqlen_k: smaller than the longest sequence",
    "seqlens_k": "seqlens_k or seqused_k: negative, or more than the page table, the cache or k has room for",
    "page_table": "page_table: a page id within a sequence's length is negative or not below num_pages",
    "rotary": "rotary: a token stands further from position 0 than the cos and sin tables reach",
    "no_room": "k_new, v_new: the page table has no room for all new tokens; those without room were not written",
    "captured": "score_mod or mask_mod: it indexes a captured tensor where that has no element; 0 was read there",
}
CODES = {name: 1 << n for n, name in enumerate(MESSAGES)}

_words: dict[torch.device, Tensor] = {}
_lock = ForkSafeLock()


def word(device: torch.device) -> Tensor:
    """The status of a GPU: int32[len(MESSAGES)], 0 or 1 each, which kernels may set and only ``check_errors``
    clears."""
    if device.type == "meta":  # nothing is ever reported there
        return torch.empty(len(MESSAGES), dtype=torch.int32, device=device)
    with _lock:
        if device not in _words:
            _words[device] = torch.zeros(len(MESSAGES), dtype=torch.int32, device=device)
        return _words[device]


def report(code: str, bad: Tensor, name: str = "", values: Tensor | int | None = None, allowed: str = "") -> None:
    """Notes that ``code`` happened if the boolean tensor ``bad`` has a True anywhere.

    On the CPU it raises at once, and says what was found: of ``values``, shaped like ``bad``, the first bad one, else
    all of them. Tensors without values report nothing.
    """
    if not places.readable(bad):
        return
    if bad.device.type == "cpu":
        if bad.any():
            raise DeviceValueError(f"{name}: got {_found(bad, values)}; allowed: {allowed}" if name else MESSAGES[code])
        return
    slot = word(bad.device)[list(CODES).index(code)]
    torch.maximum(slot, bad.any().to(torch.int32), out=slot)


def _found(bad: Tensor, values: Tensor | int | None) -> str:
    if not isinstance(values, Tensor):
        return str(values)
    if values.shape != bad.shape:
        first = values.flatten()[:8].tolist()
        return f"{first}" if values.numel() <= 8 else f"{first[:-1]}, and {values.numel() - 7} more"
    at = bad.nonzero()[0].tolist()
    where = f" at [{', '.join(map(str, at))}]" if at else ""
    return f"{values[tuple(at)].item()}{where}"


def check_errors(device: torch.device | str | int | None = None) -> None:
    """Waits for the device and raises DeviceValueError with what kernels reported since the last call; clears it.

    ``device``: a torch device, default the current GPU; with None and no GPU it does nothing, as the CPU raises at
    once. ValueError for a device that is not here, TypeError for what is none.
    """
    if device is None:
        with _lock:
            devices = list(_words)
    else:
        asked = places.parsed("device", device)
        with _lock:
            known = list(_words)
        if asked.type == "meta":
            raise ValueError(f"device: got 'meta'; allowed: {places.ALLOWED}")
        if all(d.type != asked.type or asked.index not in (None, d.index) for d in known):
            places.present("device", asked)  # nothing was reported there; is there such a device at all?
        elif asked.index is None and asked.type != "cpu":
            asked = torch.device(asked.type, torch.get_device_module(asked.type).current_device())
        devices = [d for d in known if d == asked]
    for d in devices:
        values = _words[d].tolist()
        if any(values):
            _words[d].zero_()
            found = [text for text, value in zip(MESSAGES.values(), values, strict=True) if value]
            raise DeviceValueError(f"on {d}: " + "; ".join(found))
