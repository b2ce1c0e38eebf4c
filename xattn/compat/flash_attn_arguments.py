"""The arguments of FlashAttention 2's functions in xattn's terms, and xattn's errors in theirs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import validate
from ..errors import UnsupportedError


def options(
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    deterministic: Any,
    return_attn_probs: Any,
) -> dict[str, Any]:
    """What the six functions without a cache have in common, in xattn's terms, and return_attn_probs."""
    return {
        "dropout_p": validate.number("dropout_p", dropout_p, 0.0, 1.0),
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": window(window_size),
        "softcap": softcap_from_zero(softcap),
        "alibi_slopes": alibi_slopes,
        "deterministic": validate.flag("deterministic", deterministic) or None,
        "return_attn_probs": validate.flag("return_attn_probs", return_attn_probs),
    }


def window(window_size: Any) -> tuple[int | None, int | None] | None:
    allowed = "(left, right), each a distance from 0, or -1 for a side without bound"
    try:
        sides = window_size.tolist() if isinstance(window_size, Tensor) else window_size
        if isinstance(sides, (tuple, list)):
            sides = [n.item() if isinstance(n, Tensor) else n for n in sides]
    except RuntimeError:  # a tensor whose values nobody can read: meta, nested, of several numbers
        sides = None
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        validate.fail("window_size", repr(window_size), allowed, TypeError)
    left, right = (validate.count("window_size", n, -1) for n in sides)
    return None if left == right == -1 else (None if left < 0 else left, None if right < 0 else right)


def softcap_from_zero(softcap: Any) -> float:
    return max(validate.number("softcap", softcap), 0.0)


def unpacked(name: str, t: Any, *shape: str | int) -> tuple[Tensor, ...]:
    """The tensors packed in ``t`` along the dimension whose size ``shape`` gives."""
    validate.tensor(name, t, optional=False)
    dim = next(n for n, size in enumerate(shape) if isinstance(size, int))
    if t.dim() != len(shape) or t.shape[dim] != shape[dim]:
        validate.fail(name, f"shape {tuple(t.shape)}", f"({', '.join(map(str, shape))})")
    return t.unbind(dim)


def named(names: Mapping[str, str], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn`` called; its errors name the arguments as ``names`` does, and window as window_size."""
    try:
        return fn(*args, **kwargs)
    except (TypeError, ValueError, UnsupportedError) as error:
        text = str(error)
        found = re.match(r"[\w, ]+(?=: got)", text)
        if found is None:
            raise
        known = {"window": "window_size", **names}
        said = dict.fromkeys(known.get(name, name) for name in found[0].split(", "))
        error.args = (", ".join(said) + text[found.end() :],)
        raise


def index(name: str, t: Any, batch: int, dims: int, device: torch.device) -> None:
    validate.tensor(name, t, optional=False)
    if t.dtype not in (torch.int32, torch.int64):
        validate.fail(name, t.dtype, "torch.int32 or torch.int64", TypeError)
    if t.dim() != dims or t.shape[0] != batch:
        allowed = f"({batch},)" if dims == 1 else f"({batch}, max_num_blocks)"
        validate.fail(name, f"shape {tuple(t.shape)}", allowed)
    if t.device != device:
        validate.fail(name, f"device {t.device}", f"the device of q, {device}")
