"""New tokens of a paged call, and the rotation of its queries: by a native backend's kernel (append_call.py) where one
answers, else with torch operations (paging.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from . import dispatch, launch, paging, validate
from .append_call import Append, prepare
from .backends import Backend, Config
from .capability import Refusal
from .device import Device
from .device import of as device_of
from .errors import UnsupportedError
from .inputs import present
from .jit import CompileError
from .kernel_call import ImageRefused, Prepared

log = logging.getLogger("xattn")

_failed: dict[tuple[str, Device], str] = {}  # appending kernels that cannot be made or loaded, and why


def run(x: Append, backend: str | None = None) -> tuple[Tensor | None, Tensor | None]:
    """(lengths with the new tokens, rotated q); None for what is not wanted.

    ``backend``: which one's kernel, if it has one; None for the first that has one for the device. On the CPU bad
    values raise before anything is written; elsewhere what cannot be written is dropped and reported (status.py).
    """
    ready = prepared(x, backend)
    return _by_torch(x) if ready is None else ready.of(x)


class Ready:
    """The append kernel prepared for a record, and for others of the same shapes and strides."""

    def __init__(self, x: Append, launch: Prepared):
        self._launch = launch
        self._names = tuple(x.tensors())
        self._views = x.v_new is None
        self._distance = x.v_cache.data_ptr() - x.k_cache.data_ptr()
        self._spans = tuple(_span(cache) for cache in (x.k_cache, x.v_cache))

    def of(self, x: Append) -> tuple[Tensor | None, Tensor | None]:
        outputs = self._launch(list(x.tensors().values()))
        if x.k_new is not None:
            written(x.k_cache, x.v_cache)
        lengths = outputs[0] if x.lengths and x.k_new is not None else None
        return lengths, None if x.turned() is None else outputs[-1]

    def again(self, names: Sequence[str]) -> Prepared:
        """What takes tensors by ``names`` and returns the outputs; none where a check must be made anew."""
        order = [names.index(name) for name in self._names]
        k, v = names.index("k_cache"), names.index("v_cache")

        def answer(inputs: list[Tensor]) -> list[Tensor]:
            k_cache, v_cache = inputs[k], inputs[v]
            distance = v_cache.data_ptr() - k_cache.data_ptr()
            # Whether the caches share elements is known where they lie as before, and where they lie apart.
            if distance != self._distance and (self._views or -self._spans[1] < distance < self._spans[0]):
                return []
            if (k_cache.is_inference() or v_cache.is_inference()) and not torch.is_inference_mode_enabled():
                return []
            outputs = self._launch([inputs[n] for n in order])
            written(k_cache, v_cache)
            return outputs

        return answer


def _span(t: Tensor) -> int:
    """Bytes from the first element to behind the last."""
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.itemsize if t.numel() else 0


def native(x: Append, device: Device, backend: str | None) -> Backend | str:
    """The backend whose kernel answers, or why none does, in words."""
    appender = dispatch.appender(device, backend)
    if appender is None or appender.append is None:
        return "no kernel of this backend" if backend else "no kernel for this device"
    refusals: tuple[Refusal, ...] = appender.append.check(x)
    return "; ".join(map(str, refusals)) or _failed.get((appender.name, device), "") or appender


def planned(x: Append, device: Device, backend: str | None) -> Config:
    """What a plan says of it."""
    found = native(x, device, backend)
    return (("append", f"torch operations ({found})" if isinstance(found, str) else f"kernel of {found.name}"),)


def prepared(x: Append, backend: str | None = None) -> Ready | None:
    """The kernel of ``backend``, or of the first that has one for the device, ready for ``x``; None where none is."""
    device = device_of(x.seqlens_k.device)
    found = native(x, device, backend)
    if isinstance(found, str) or found.append is None:
        return None
    try:
        return Ready(x, launch.prepare(prepare(found.append, x)[0]))
    except (CompileError, ImageRefused, UnsupportedError) as error:
        _failed[found.name, device] = f"no image of it can be made and loaded here: {error}"
        log.warning("backend %s appends with torch operations on %s: %s", found.name, device, error)
        return None


def written(*caches: Tensor) -> None:
    """Tells autograd that a kernel wrote into tensors."""
    for cache in caches:
        if not cache.is_inference():
            torch.autograd.graph.increment_version(cache)


# ---------------------------------------------------------------- with torch operations
def _by_torch(x: Append) -> tuple[Tensor | None, Tensor | None]:
    lengths = lengths_after(x.seqlens_k, x.k_new, x.cu_seqlens_new)
    if x.cu_seqlens_new is not None:
        validate.offsets("cu_seqlens_new", x.cu_seqlens_new, present(x.k_new).shape[0])
    q = x.turned()
    if x.rotary is not None and q is not None:  # before anything is written: the tables may be too short for q
        q = x.rotary.apply(q, query_positions(q, lengths, x.cu_seqlens_q, x.causal))
    if x.k_new is None:
        return None, q
    paging.append(
        x.k_cache,
        x.v_cache,
        x.page_table,
        x.seqlens_k,
        x.k_new,
        x.v_new,
        cu_seqlens_new=x.cu_seqlens_new,
        kv_layout=x.kv_layout,
        k_scale=x.k_scale,
        v_scale=x.v_scale,
        rotary=x.rotary,
    )
    return lengths if x.lengths else None, q


def lengths_after(seqlens_k: Tensor, k_new: Tensor | None, cu_seqlens_new: Tensor | None) -> Tensor:
    """Tokens of each sequence, the new ones included, in the dtype of ``seqlens_k``."""
    if k_new is None:
        return seqlens_k
    if cu_seqlens_new is None:
        return seqlens_k + k_new.shape[1]
    return (seqlens_k + (cu_seqlens_new[1:] - cu_seqlens_new[:-1])).to(seqlens_k.dtype)


def query_positions(q: Tensor, lengths: Tensor, cu_seqlens_q: Tensor | None, causal: bool) -> Tensor:
    """The position of each query in its sequence of ``lengths`` tokens."""
    if cu_seqlens_q is None:
        positions = lengths.long()[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)
    else:
        first = lengths - (cu_seqlens_q[1:] - cu_seqlens_q[:-1])
        _, position, exists = paging.token_positions(first, q, cu_seqlens_q)
        positions = torch.where(exists, position, 0)
    # One at a negative position sees no key where causal: the tables need not have its row.
    return positions.clamp(min=0) if causal else positions
