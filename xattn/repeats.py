"""Calls that come again: what was planned once is launched at once when the same is asked of other tensors.

Questions are of the kinds of calls, and "extend": a paged call with new tokens, whose answer is what precedes its
attention (appends.py).

A question is the shapes, strides, dtypes and device of the tensors and every other argument. Only what a native kernel
answers in one launch, without a copy and without a gradient, is kept; all else is planned each time (ops.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import autograd, backward_call, settings
from .inputs import TENSORS, Inputs
from .kernel_call import Call, Prepared

OPTIONS = (
    "causal",
    "window_left",
    "window_right",
    "softmax_scale",
    "softcap",
    "return_lse",
    "backend",
    "max_seqlen_q",
    "max_seqlen_k",
    "kv_layout",
    "num_splits",
    "batch_invariant",
)
_OTHERS = ("dropout_p", "score_mod", "mask_mod", "epilogue", "out_dtype")

_MOST = 4096
_known: dict[tuple, Prepared] = {}
# The last question of each kind, and its answer; one assignment: threads see both or neither.
_latest: dict[str, tuple[tuple, Prepared | None]] = {}
_NONE: tuple[tuple, Prepared | None] = ((), None)
modes = torch._C._len_torch_dispatch_stack


def answer(kind: str, tensors: tuple[Any, ...], options: tuple) -> list[Tensor] | None:
    """The outputs of a call that came before; None where it did not, or has to be planned.

    Args: ``tensors`` in the order of inputs.TENSORS[kind], of calls that are not paged without the scales where there
    are none; ``options`` in that of OPTIONS.
    """
    grad = torch.is_grad_enabled()
    inputs = []
    for t in tensors:
        if t is not None:
            if type(t) is not Tensor or (grad and t.requires_grad):
                return None
            inputs.append(t)
    try:
        question = _question(kind, tensors, options)
        latest, prepared = _latest.get(kind, _NONE)
        if question != latest:  # layer after layer asks the same: comparing is cheaper than hashing
            prepared = _known.get(question)
            if prepared is not None:
                _latest[kind] = (question, prepared)
    except (RuntimeError, TypeError, ValueError):  # a tensor without strides, what cannot be hashed or compared
        return None
    if prepared is None or modes() or autograd.transforms_active() or settings.validate_on_device():
        return None
    if torch.is_autocast_enabled("cuda") and inputs[0].dtype != torch.get_autocast_dtype("cuda"):
        return None
    return prepared(inputs) or None


def _question(kind: str, tensors: tuple[Tensor | None, ...], options: tuple) -> tuple:
    parts: list[Any] = [kind, options]
    for t in tensors:
        if t is None:
            parts.append(None)
        else:
            parts += (t.shape, t.stride(), t.dtype, t.get_device())
    return tuple(parts)


def launch_first(x: Inputs, call: Call, tensors: dict[str, Tensor], prepared: Prepared) -> list[Tensor]:
    """The outputs of a call that was just planned; it is remembered if it works on the tensors of ``x`` themselves."""
    if not all(call.shape.grid):  # no blocks: the outputs have no elements
        return [torch.empty(o.shape, dtype=o.dtype, device=call.device) for o in call.outputs]
    outputs = prepared(list(tensors.values()))
    question = {name: getattr(x, name) for name in TENSORS[x.kind]}
    own = [(name, t) for name, t in question.items() if t is not None]  # in the order in which ``answer`` gives them
    same = len(own) == len(tensors) and all(
        n == m and t is u for (n, t), (m, u) in zip(own, tensors.items(), strict=True)
    )
    if same:
        remember(x, prepared)
    return outputs


def remember(
    x: Inputs, prepared: Prepared, kind: str = "", new: tuple[Tensor | None, ...] = (), options: tuple = ()
) -> None:
    """From now on ``prepared`` answers the question of ``x``; of another ``kind`` with more tensors and options."""
    if any(getattr(x, name) for name in _OTHERS):
        return
    if len(_known) >= _MOST:
        _known.clear()
    tensors = (*asked(x), *new)
    _known[_question(kind or x.kind, tensors, (*(getattr(x, name) for name in OPTIONS), *options))] = prepared


def asked(x: Inputs) -> tuple[Tensor | None, ...]:
    """The tensors of a question."""
    tensors = tuple(getattr(x, name) for name in TENSORS[x.kind])
    # The scales are the last ones: where there are none, a dense or packed call is not kept up by them.
    return tensors if x.kind == "paged" or any(t is not None for t in tensors[-3:]) else tensors[:-3]


def forget() -> None:
    """Plans every call anew from now on."""
    _known.clear()
    _latest.clear()
    backward_call.forget()
