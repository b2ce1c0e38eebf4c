"""One pair of functions, forward and backward, for every kind of attention that has a gradient, and the second
derivative behind it.

``Attention`` is applied in the Autograd kernels of the ops (eager, compile, export), and directly under torch.func
transforms. Only inputs that ask get gradients; q, k, v are saved as they are, never copied.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import UnsupportedError
from .inputs import Inputs


def transforms_active() -> bool:
    """Whether a torch.func transform (grad, vmap, ...) is at work: then autograd.Function must be applied in the
    open. Not while a function is compiled, which looks like one."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def no_forward_mode() -> UnsupportedError:
    return UnsupportedError(
        "a forward-mode derivative of attention was asked for (torch.func.jvp, jacfwd, hessian, dual tensors); "
        "allowed: reverse mode, torch.func.grad, vjp and jacrev, and of second order jacrev(jacrev(f)) with "
        "backend='reference'"
    )


def forward_mode() -> bool:
    """Whether tensors may carry tangents that nobody else looks at."""
    return forward_ad._current_level >= 0 and not transforms_active()


def refuse_forward_mode(tensors: Iterable[Tensor | None]) -> None:
    """Raises UnsupportedError where a tensor carries a tangent; torch.func.jvp finds the Functions' own refusal."""
    if forward_mode() and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise no_forward_mode()


class Attention(torch.autograd.Function):
    """(inputs without tensors, needs_grad, *inputs.flat()) -> (out, lse)."""

    @staticmethod
    def forward(inputs: Inputs, needs_grad: list[bool], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        from . import ops

        return ops.forward(inputs.with_flat(tensors), needs_grad)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.inputs, ctx.needs_grad, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)
        if not ctx.inputs.return_lse:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        if ctx.inputs.kind == "paged":
            raise UnsupportedError(
                "q: attention_paged has no gradient, and one was asked for by a torch.func transform"
            )
        *tensors, out, lse = ctx.saved_tensors
        wanted = [bool(w) for w in ctx.needs_input_grad[2 : 2 + len(ctx.needs_grad)]]
        nothing = (None,) * len(ctx.needs_input_grad)
        if not any(wanted) or (dout is None and dlse is None):
            return nothing
        if dout is None:
            dout = torch.zeros_like(out)
        saved = (dout, dlse, out, lse, *tensors)
        if transforms_active():
            grads = iter(AttentionBackward.apply(ctx.inputs, ctx.needs_grad, wanted, *saved))
        else:
            grads = iter(_backward(ctx.inputs, ctx.needs_grad, wanted, *saved))
        found = [next(grads) if w else None for w in wanted]
        return (None, None, *found, *nothing[2 + len(found) :])

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_forward_mode()

    @staticmethod
    def vmap(info, in_dims, inputs, needs_grad, *tensors):
        return _each(info, in_dims[2:], tensors, lambda *ts: Attention.apply(inputs, needs_grad, *ts))


class AttentionBackward(torch.autograd.Function):
    """(inputs without tensors, needs_grad, wanted, dout, dlse, out, lse, *inputs.flat()) -> gradients of the wanted
    tensors."""

    @staticmethod
    def forward(inputs: Inputs, needs_grad: list[bool], wanted: list[bool], *tensors):
        return tuple(_backward(inputs, needs_grad, wanted, *tensors))

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.inputs, ctx.needs_grad, ctx.wanted, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads):
        nothing = (None,) * len(ctx.needs_input_grad)
        if all(g is None for g in grads):
            return nothing
        dout, dlse, _, _, *tensors = ctx.saved_tensors
        counts = (len(grads), len(ctx.wanted))
        how = (ctx.inputs, ctx.needs_grad, ctx.wanted)
        d_dout, d_dlse, *rest = AttentionDoubleBackward.apply(*how, counts, *grads, dout, dlse, *tensors)
        return (None, None, None, d_dout, d_dlse, None, None, *rest, *nothing[7 + len(rest) :])

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_forward_mode()

    @staticmethod
    def vmap(info, in_dims, inputs, needs_grad, wanted, *tensors):
        return _each(info, in_dims[3:], tensors, lambda *ts: AttentionBackward.apply(inputs, needs_grad, wanted, *ts))


class AttentionDoubleBackward(torch.autograd.Function):
    """(inputs without tensors, needs_grad, wanted, counts, *seeds, dout, dlse, *inputs.flat()) -> gradients of dout,
    dlse, tensors."""

    @staticmethod
    def forward(inputs: Inputs, needs_grad: list[bool], wanted: list[bool], counts: tuple[int, int], *rest):
        from . import ops

        seeds, (dout, dlse, *tensors) = list(rest[: counts[0]]), rest[counts[0] :]
        d_dout, d_dlse, grads = ops.double_backward(inputs.with_flat(tensors), needs_grad, wanted, dout, dlse, seeds)
        return (d_dout, d_dlse, *grads)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads):
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        raise UnsupportedError("a third derivative of attention was asked for; the first two are there")

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_forward_mode()

    @staticmethod
    def vmap(info, in_dims, inputs, needs_grad, wanted, counts, *tensors):
        how = (inputs, needs_grad, wanted, counts)
        return _each(info, in_dims[4:], tensors, lambda *ts: AttentionDoubleBackward.apply(*how, *ts))


def _backward(
    inputs: Inputs, needs_grad: list[bool], wanted: list[bool], dout, dlse, out, lse, *tensors
) -> list[Tensor]:
    from . import ops

    return ops.backward(inputs.with_flat(tensors), needs_grad, wanted, dout, dlse, out, lse)


def _each(info, in_dims, tensors, fn):
    """The vmap rule: one call for each element of the mapped dimension, results stacked. Dropout repeats its mask in
    each."""
    results = []
    if not info.batch_size:  # one call on zeros tells the shapes
        lone = (
            t if d is None else t.new_zeros((*t.shape[:d], *t.shape[d + 1 :]))
            for t, d in zip(tensors, in_dims, strict=True)
        )
        found = tuple(None if x is None else x.new_zeros((0, *x.shape)) for x in fn(*lone))
        return found, tuple(None if x is None else 0 for x in found)
    for n in range(info.batch_size):
        results.append(fn(*(t if d is None else t.select(d, n) for t, d in zip(tensors, in_dims, strict=True))))
    stacked = [None if column[0] is None else torch.stack(column) for column in zip(*results, strict=True)]
    return tuple(stacked), tuple(None if s is None else 0 for s in stacked)
