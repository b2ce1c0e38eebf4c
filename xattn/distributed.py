"""Context parallelism: attention over a sequence of which every rank of a process group holds a part.

shards.py says which queries see which keys, agreement.py whether all ranks ask the same. What a rank computes are calls
of ``attention``, merged by their lse; so backends, fallbacks and refusals are those of every call.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import agreement, api, autograd, calls, fusion, ops, questions, rng, validate
from .errors import UnsupportedError
from .inputs import present
from .partials import Call, members_of, options_of, partials
from .ranks import GRADIENTS, Gather, Ranks, pass_on, rotation, wide
from .shards import SHARDINGS, pieces

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import Shards

METHODS = ("ring", "all_gather")
_SIGNATURE = inspect.signature(api.attention)
_REFUSED = {
    "attn_mask": "it would be quadratic in the sequence",
    "seqused_k": "lengths that only the device knows do not say which shards see each other",
    "epilogue": "it is applied to the merged output: apply it to the result",
    "out": "the result is merged from parts",
}
# What each part of the attention is told as it is, and what follows the part.
_PASSED = ("softmax_scale", "softcap", "dropout_p", "deterministic", "backend")
_TENSORS = ("alibi_slopes", "sinks", "q_scale", "k_scale", "v_scale", "dropout_rng")
_FUNCTIONS = ("score_mod", "mask_mod")


def _not_compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(fn, reason="context parallelism communicates between calls of attention")


@overload
def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    method: str = "ring",
    sharding: str = "zigzag",
    *,
    return_lse: Literal[False] = False,
    **kw: Unpack[Shards],
) -> Tensor: ...
@overload
def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    method: str = "ring",
    sharding: str = "zigzag",
    *,
    return_lse: Literal[True],
    **kw: Unpack[Shards],
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    method: str = "ring",
    sharding: str = "zigzag",
    *,
    return_lse: bool,
    **kw: Unpack[Shards],
) -> Tensor | tuple[Tensor, Tensor]: ...
@_not_compiled
def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    method: str = "ring",
    sharding: str = "zigzag",
    **kw: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` over a sequence that is shared out among the ranks of a process group; every rank gives its shard,
    all of one size, and gets the output of its queries. Exact, forward and backward.

    "ring": keys and values go round, one shard per step, while the scores of the one at hand are computed (Liu,
    Zaharia, Abbeel, "Ring attention with blockwise transformers for near-infinite context", 2023); a rank holds three
    shards of keys and values at most. The backward goes round again, with the gradients of keys and values in float32,
    and computes each part anew. "all_gather": keys and values of the whole sequence are gathered, and nothing else;
    their gradients are summed in float32 by a reduce-scatter (Llama 3, 2024, section 3.3.2). Neither holds anything
    quadratic.

    Args:
        q: (batch, seqlen_q / ranks, heads_q, head_dim), the shard of this rank as ``context_parallel_shard`` cuts it.
        k, v: (batch, seqlen_k / ranks, heads_kv, head_dim) and (batch, seqlen_k / ranks, heads_kv, head_dim_v). dtypes
            and strides: those of ``attention``.
        group: a torch.distributed.ProcessGroup; None is the default group. All its ranks make the same call, in the
            same order, and its backward for the same tensors.
        method: "ring" or "all_gather".
        sharding: "zigzag" (rank r holds the parts r and 2 * ranks - 1 - r of 2 * ranks, so that causal ranks have equal
            work; shards have even lengths) or "contiguous" (the rank-th part of as many as there are ranks). Whatever
            belongs to tokens (positions for rotary embeddings, labels) is sharded alike.
        kw: causal, window, softmax_scale, softcap, alibi_slopes, sinks, dropout_p, dropout_rng, score_mod, mask_mod,
            q_scale, k_scale, v_scale, return_lse, deterministic and backend of ``attention``, with its meaning for the
            whole sequence: distances, q_idx and kv_idx are global. Their values must be the same on every rank. Without
            dropout_rng the first rank's draw is taken.

    Returns:
        out (batch, seqlen_q / ranks, heads_q, head_dim_v), with return_lse (out, lse (batch, heads_q, seqlen_q /
        ranks)), of this rank's queries over all keys. Gradients of q, k, v are those of the shards. Those of what all
        ranks hold alike (alibi_slopes, sinks, scales, captured tensors) are each rank's share: their sum is the
        gradient.

    Raises:
        As ``attention``. ValueError on every rank where ranks called with different shapes, dtypes or options, or one
        of them failed: on the CPU at each call; on other devices, so that the host is not held up, where a rank calls
        with something for the first time, and at each call with XATTN_VALIDATE=device. RuntimeError where
        torch.distributed is not initialised, or a rank does not call within its time. UnsupportedError, before anything
        is sent: attn_mask, seqused_k, epilogue and out; what a named backend refuses; torch.func transforms; a second
        derivative of "ring" ("all_gather" has one with backend="reference").

    Under torch.compile the call is a graph break: what is before and behind it is compiled, and fullgraph=True raises.
    """
    ranks = Ranks.of(group)
    try:
        call, tensors = _checked(ranks, q, k, v, method, sharding, kw)
    except (TypeError, ValueError, RuntimeError) as error:
        ranks.fail(error)
    ranks.compare(call.said, q.device)
    if call.numbers["dropout_p"] and "dropout_rng" not in tensors:
        drawn = rng.draw(q.device)  # by all, so that their generators stay in step
        if ranks.world > 1:
            dist.broadcast(drawn, ranks.world_ranks[0], ranks.group)
        tensors["dropout_rng"] = drawn
    q, k, v = (tensors.pop(n) for n in "qkv")
    with _without_autocast(q.device):
        if method == "ring":
            call.names = tuple(tensors)
            out, lse = _Ring.apply(call, q, k, v, *tensors.values(), *call.captured)
        else:
            found = call.blocks(None)
            k, v = (Gather.apply(ranks, sharding, 1, t) for t in (k, v))
            parts = partials(call, found, q, k, v, tensors, own=True, with_lse=call.return_lse)
            dtype = max((o.dtype for _, o, _ in parts), key=lambda d: d.itemsize)
            out = torch.cat([o.to(dtype) for _, o, _ in parts], 1).to(call.dtype_out)
            lse = torch.cat([x for _, _, x in parts if x is not None], -1) if call.return_lse else None
    return (out, lse) if call.return_lse else out


def context_parallel_shard(
    x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1, sharding: str = "zigzag"
) -> Tensor:
    """This rank's part of ``x``, of which dimension ``dim`` is the whole sequence: what ``context_parallel`` takes.

    Any dtype; nothing is sent, and every rank must hold the same ``x``. Positions for rotary embeddings:
    ``context_parallel_shard(torch.arange(seqlen), dim=0)``. ``group``, ``sharding``: as in ``context_parallel``.

    Raises ValueError where the length is no multiple of the ranks ("contiguous") or of twice the ranks ("zigzag"): pad
    behind the end, where no causal query sees it.
    """
    ranks = Ranks.of(group)
    _of(sharding, "sharding", SHARDINGS)
    dim = _dimension(x, dim)
    parts = ranks.world * (2 if sharding == "zigzag" else 1)
    if x.shape[dim] % parts:
        validate.fail("x", f"{x.shape[dim]} in dimension {dim}", f"a multiple of {parts}, the parts of {sharding!r}")
    own = pieces(sharding, ranks.rank, ranks.world, x.shape[dim] // ranks.world)
    return torch.cat([x.narrow(dim, p.start, p.length) for p in own], dim)


@_not_compiled
def context_parallel_unshard(
    x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1, sharding: str = "zigzag"
) -> Tensor:
    """The whole sequence in its order, on every rank, from the shards ``x`` of all: ``context_parallel_shard`` undone.

    Any dtype. The gradient of ``x`` is the sum over the ranks of their gradients of the whole. ``group``, ``dim``,
    ``sharding`` and errors: as in ``context_parallel``.
    """
    ranks = Ranks.of(group)
    try:
        _of(sharding, "sharding", SHARDINGS)
        dim = _dimension(x, dim)
        _even("x", x, dim, sharding)
    except (TypeError, ValueError) as error:
        ranks.fail(error)
    said = {"x": _words(x), "dim": str(dim), "sharding": sharding, "gradients": str(_wants_grad(x))}
    ranks.compare(said, x.device)
    return Gather.apply(ranks, sharding, dim, x)


# ---------------------------------------------------------------- who calls, and with what
def _checked(
    ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, method: str, sharding: str, kw: dict[str, Any]
) -> tuple[Call, dict[str, Tensor]]:
    """The call and its tensors by name. Raises all that this rank can see by itself."""
    _of(method, "method", METHODS)
    _of(sharding, "sharding", SHARDINGS)
    for name, why in _REFUSED.items():
        if kw.get(name) is not None:
            raise UnsupportedError(f"{name}: got {type(kw[name]).__name__}; allowed: None in context_parallel: {why}")
    for name, t in {"q": q, "k": k, "v": v, **kw}.items():
        if isinstance(t, Tensor) and is_traceable_wrapper_subclass(t):
            validate.fail(name, type(t).__name__, "a plain tensor; of a DTensor its to_local()", TypeError)
    if autograd.transforms_active():
        raise UnsupportedError("context_parallel was called under a torch.func transform; allowed: none around it")
    bound = _SIGNATURE.bind(q, k, v, **kw)
    bound.apply_defaults()
    given = dict(bound.arguments)
    for name in "qkv":
        given[name] = _autocast(validate.tensor(name, given[name], optional=False))
    with _without_autocast(given["q"].device):
        x = calls.describe("attention", given)
    autograd.refuse_forward_mode(x.flat())
    for name in "qk":
        _even(name, given[name], 1, sharding)
    if x.dropout_p and tuple(present(x.dropout_rng).shape) != (2,):
        validate.fail("dropout_rng", "int64[4]", "int64[2]; where each part starts is added here")
    functions = {n: given[n] for n in _FUNCTIONS if given[n] is not None}
    held = [fusion.captured.at(fn, path) for fn in functions.values() for path in fusion.captured.tensors(fn)]
    tensors = {n: t for n in ("q", "k", "v", *_TENSORS) if (t := getattr(x, n)) is not None}
    if given["dropout_rng"] is None:
        tensors.pop("dropout_rng", None)
    call = Call(
        ranks,
        sharding,
        (x.seqlen_q, x.seqlen_k),
        x.window_left,
        x.window_right if not x.causal else 0,
        {name: getattr(x, name) for name in _PASSED},
        functions,
        tuple({id(t): t for t in held if _wants_grad(t)}.values()),
        x.alibi_slopes is not None,
        x.return_lse,
        x.batch_invariant,
        x.dtype_out,
        {},
    )
    call.said = _said(call, method, tensors, x)
    if x.backend is not None:
        _answers(call, method, tensors)
    return call, tensors


def _said(call: Call, method: str, tensors: dict[str, Tensor], x: Any) -> agreement.Said:
    said = {"method": method, "sharding": call.sharding}
    said |= {n: _words(tensors[n]) if n in tensors else "None" for n in ("q", "k", "v", *_TENSORS)}
    if "dropout_rng" in tensors and x.q.device.type == "cpu":
        said["dropout_rng"] = str(tensors["dropout_rng"].tolist())
    said |= {n: str(getattr(x, n)) for n in ("causal", "window_left", "window_right", "return_lse", "batch_invariant")}
    said |= {n: str(number) for n, number in call.numbers.items()}
    said |= {n: "given" if n in call.functions else "None" for n in _FUNCTIONS}
    return said | {"gradients": ", ".join(calls.asked(x)) or "none"}


def _answers(call: Call, method: str, tensors: dict[str, Tensor]) -> None:
    """Raises UnsupportedError where the named backend refuses a part of the call."""
    asked = set()
    q, k, v = (tensors[n] for n in "qkv")
    rest = {n: t for n, t in tensors.items() if n not in "qkv"}
    if call.numbers["dropout_p"]:
        rest.setdefault("dropout_rng", torch.empty(2, dtype=torch.int64, device=q.device))
    for owner in range(call.ranks.world) if method == "ring" else (None,):
        own = owner in (None, call.ranks.rank)
        for _, members, taker in members_of(call, call.blocks(owner), q.shape[1], own, "sinks" in rest):
            with_lse = method == "ring" or call.return_lse or len(members) > 1
            for block in members:
                has_keys = block.keys.stop > block.keys.start
                side = block.side if call.alibi else 0
                kind = (block.causal, block.window is None, side, with_lse, block is taker, has_keys)
                if kind in asked:
                    continue
                asked.add(kind)
                options, _ = options_of(call, replace(block, keys=slice(0, int(has_keys))), q, rest)
                sinks = rest.get("sinks") if block is taker else None
                few = (q[:, :1], k[:, : int(has_keys)], v[:, : int(has_keys)])
                plan = questions.explain(*few, sinks=sinks, return_lse=with_lse, **options)
                if plan.backend is None:
                    words = f"backend {call.numbers['backend']!r} cannot answer a part of this call"
                    raise UnsupportedError(words, dict(plan.rejected))


def _of(value: Any, name: str, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        error = ValueError if isinstance(value, str) else TypeError
        validate.fail(name, repr(value), " or ".join(map(repr, allowed)), error)


def _dimension(x: Any, dim: Any) -> int:
    t = validate.tensor("x", x, optional=False)
    assert t is not None
    if isinstance(dim, bool) or not isinstance(dim, int):
        validate.fail("dim", type(dim).__name__, "a whole number", TypeError)
    if not -t.dim() <= dim < t.dim():
        validate.fail("dim", dim, f"a dimension of x, of shape {tuple(t.shape)}")
    return dim % t.dim()


def _even(name: str, t: Tensor, dim: int, sharding: str) -> None:
    if sharding == "zigzag" and t.shape[dim] % 2:
        allowed = "an even length where sharding is 'zigzag': a shard is two parts of one length"
        validate.fail(name, f"{t.shape[dim]} in dimension {dim}", allowed)


def _wants_grad(t: Tensor) -> bool:
    return torch.is_grad_enabled() and t.requires_grad


def _words(t: Tensor) -> str:
    return f"shape {tuple(t.shape)}, {t.dtype}, {t.device.type}"


def _autocast(t: Tensor | None) -> Tensor:
    assert t is not None
    at = t.device.type
    on = at in ("cpu", "cuda") and torch.is_autocast_enabled(at)
    return ops.autocast(t, torch.get_autocast_dtype(at)) if on else t


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type in ("cpu", "cuda"):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


# ---------------------------------------------------------------- ring
class _Ring(torch.autograd.Function):
    """(call, q, k, v, *tensors) -> (out, lse)."""

    @staticmethod
    def forward(ctx, call: Call, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        tensors = dict(zip(call.names, others, strict=False))
        out = lse = q.new_empty(0)
        for owner, keys, values in rotation(call.ranks, k, v):
            own = owner == call.ranks.rank
            parts = partials(call, call.blocks(owner), q, keys, values, tensors, own)
            if own:
                out = torch.cat([wide(o) for _, o, _ in parts], 1)
                lse = torch.cat([present(x) for _, _, x in parts], -1)
                continue
            for rows, o, x in parts:
                states = [out[:, rows], wide(o)], [lse[..., rows], present(x)]
                out[:, rows], lse[..., rows] = api.merge_states(*states)
        out = out.to(call.dtype_out)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse, *others)
        ctx.set_materialize_grads(False)
        if not call.return_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        wanted = ctx.needs_input_grad[1:]
        grads = iter(_RingBackward.apply(ctx.call, wanted, dout, dlse, *ctx.saved_tensors))
        return (None, *(next(grads) if w else None for w in wanted))


class _RingBackward(torch.autograd.Function):
    """(call, wanted, dout, dlse, q, k, v, out, lse, *others) -> gradients of the wanted of q, k, v, *others.

    Each part is computed anew and differentiated by itself. With weights w = exp(lse_n - lse), out = sum w out_n: so
    out_n receives w dout, and lse_n receives w (dout . (out_n - out) + dlse).
    """

    @staticmethod
    def forward(ctx, call: Call, wanted: tuple[bool, ...], dout, dlse, q, k, v, out, lse, *others):
        ctx.set_materialize_grads(False)
        sums: dict[int, Tensor] = {}  # by place in (q, k, v, *others); of k and v, those of the shard at hand
        moving = [n for n in (1, 2) if wanted[n]]
        coming = None
        invariant = api.batch_invariant() if call.invariant else contextlib.nullcontext()
        with invariant, _without_autocast(q.device):
            for owner, keys, values in rotation(call.ranks, k, v):
                with torch.enable_grad():
                    given = [q, keys, values, *others[: len(call.names)]]
                    leaves = [t.detach().requires_grad_(w) for t, w in zip(given, wanted, strict=False)]
                    tensors = dict(zip(call.names, leaves[3:], strict=True))
                    own = owner == call.ranks.rank
                    parts = partials(call, call.blocks(owner), leaves[0], leaves[1], leaves[2], tensors, own)
                    leaves += call.captured
                grads = _differentiated(parts, leaves, wanted, dout, dlse, out, lse)
                for n in (n for n in grads if n not in moving):
                    sums[n] = sums[n] + grads[n] if n in sums else grads[n]
                if not moving:
                    continue
                # The sums for these keys come from the rank before, and go on with what is added here.
                found = [grads[n] if n in grads else torch.zeros_like(wide(leaves[n])) for n in moving]
                total = torch.cat([g.reshape(-1) for g in found])
                if coming is not None:
                    total += coming()
                coming = pass_on(call.ranks, total, GRADIENTS)
        given = [q, k, v, *others]
        if coming is not None:
            shares = coming().split([given[n].numel() for n in moving])
            sums |= {n: share.reshape(given[n].shape) for n, share in zip(moving, shares, strict=True)}
        places = [n for n, w in enumerate(wanted) if w]
        return tuple(sums[n].to(given[n].dtype) if n in sums else torch.zeros_like(given[n]) for n in places)

    @staticmethod
    def backward(ctx, *grads):
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        raise UnsupportedError(
            "a second derivative of context_parallel was asked for, and method 'ring' has none; "
            "call it with method='all_gather' and backend='reference'"
        )


def _differentiated(parts, leaves, wanted, dout, dlse, out, lse) -> dict[int, Tensor]:
    """Gradients of the wanted leaves, by place, in a wide dtype: what these parts give."""
    outputs: list[Tensor] = []
    seeds: list[Tensor] = []
    for rows, o, x in parts:
        level = lse[..., rows]
        weight = torch.where(x.detach() == level, 1, torch.exp(x.detach() - level))
        d_o, d_x = torch.zeros_like(wide(o)), torch.zeros_like(weight)
        if dout is not None:
            d_o = wide(dout[:, rows])
            d_x = (d_o * (wide(o.detach()) - out[:, rows])).sum(-1).transpose(1, 2).to(x.dtype)
        if dlse is not None:
            d_x = d_x + dlse[..., rows]
        by_row = weight.transpose(1, 2)[..., None]
        d_o, d_x = torch.where(by_row == 0, 0, d_o * by_row), torch.where(weight == 0, 0, d_x * weight)
        for result, seed in ((o, d_o), (x, d_x)):
            if result.requires_grad:
                outputs.append(result)
                seeds.append(seed.to(result.dtype))
    places = [n for n, w in enumerate(wanted) if w]
    if not outputs or not places:
        return {}
    grads = torch.autograd.grad(outputs, [leaves[n] for n in places], seeds, allow_unused=True)
    return {n: wide(g) for n, g in zip(places, grads, strict=True) if g is not None}
