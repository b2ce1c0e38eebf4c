"""New tokens of a paged call, and the rotation of its queries: by a native backend's kernel (append_call.py) where one
answers, else with torch operations (paging.py)."""

from __future__ import annotations

import logging

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
    found = native(x, device_of(x.seqlens_k.device), backend)
    if not isinstance(found, str):
        ready = _prepared(x, found)
        if ready is not None:
            return _launched(x, *ready)
    return _by_torch(x)


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


def _prepared(x: Append, backend: Backend) -> tuple[Prepared, list[Tensor]] | None:
    assert backend.append is not None
    try:
        call, tensors = prepare(backend.append, x)
        return launch.prepare(call), list(tensors.values())
    except (CompileError, ImageRefused, UnsupportedError) as error:
        device = device_of(x.seqlens_k.device)
        _failed[backend.name, device] = f"no image of it can be made and loaded here: {error}"
        log.warning("backend %s appends with torch operations on %s: %s", backend.name, device, error)
        return None


def _launched(x: Append, prepared: Prepared, tensors: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    outputs = prepared(tensors)
    if x.k_new is not None:
        written(x.k_cache, x.v_cache)
    lengths = outputs[0] if x.lengths and x.k_new is not None else None
    return lengths, None if x.turned() is None else outputs[-1]


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
