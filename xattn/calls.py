"""From the arguments of the public functions to the ops: one way for every kind of call, and for ``explain``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import appends, autograd, dispatch, fusion, ops, probe, reference, repeats, rng, segments, validate
from .device import Device
from .device import of as device_of
from .errors import UnsupportedError
from .fusion import Epilogue
from .inputs import TENSORS, Inputs, Mod
from .rotary import Rotary

_TENSORS = {
    "attention": ("q", "k", "v"),
    "varlen": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    "paged": ("q", "k_cache", "v_cache", "page_table", "seqlens_k"),
}
_OPTIONAL = ("attn_mask", "alibi_slopes", "sinks", "seqused_k", "dropout_rng", "out")
_OPTIONAL_PAGED = ("cu_seqlens_q", "k_new", "v_new", "cu_seqlens_new")
_COUNTS = {"attention": (), "varlen": ("max_seqlen_q", "max_seqlen_k"), "paged": ("max_seqlen_q", "max_seqlen_k")}
_FUNCTIONS = ("score_mod", "mask_mod", "epilogue")
_NOT_OF_THE_OP = ("window", "out", "k_new", "v_new", "cu_seqlens_new", "rotary", *_FUNCTIONS)


@dataclass(frozen=True)
class Call:
    """One call in the terms of the ops; in paged calls seqlens_k is as it was given. ``append``: the arguments of
    append_paged, None where no token is written."""

    kind: str
    positional: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Tensor | None
    append: dict[str, Any] | None
    rotary: Rotary | None

    def lengths(self) -> Tensor:
        """Of the sequences of a paged call, the new tokens included."""
        new = self.append or {"k_new": None, "cu_seqlens_new": None}
        return appends.lengths_after(self.positional[4], new["k_new"], new["cu_seqlens_new"])


def normalise(kind: str, given: dict[str, Any], trace: bool = True) -> Call:
    """Python values checked, scales as tensors; with ``trace`` user functions are traced and dropout is drawn."""
    tensors = _TENSORS[kind]
    for name in tensors:
        validate.tensor(name, given[name], optional=False)
    for name in (*_OPTIONAL, *(_OPTIONAL_PAGED if kind == "paged" else ())):
        validate.tensor(name, given.get(name))
    given = _autocast(kind, given)
    kwargs = {name: value for name, value in given.items() if name not in tensors and name not in _NOT_OF_THE_OP}
    for name in _COUNTS[kind]:
        if kind == "varlen" or kwargs[name] is not None:
            kwargs[name] = validate.count(name, kwargs[name])
    kwargs["batch_invariant"] = segments.invariant()
    _numbers(kwargs, given)
    q = given["q"]
    for name in ("q_scale", "k_scale", "v_scale"):
        kwargs[name] = validate.scale(name, kwargs[name], q)
    if kwargs["dropout_p"] > 0 and kwargs["dropout_rng"] is None:
        if trace:
            kwargs["dropout_rng"] = rng.draw(q.device)
        else:
            kwargs["dropout_rng"] = torch.empty(2, dtype=torch.int64, device=q.device)
    positional = tuple(given[name] for name in tensors)
    if kind == "varlen":
        positional += (kwargs.pop("max_seqlen_q"), kwargs.pop("max_seqlen_k"))
    if kind != "paged":
        _functions(kind, kwargs, given, None, trace)
        return Call(kind, positional, kwargs, given["out"], None, None)
    append = _append(given, kwargs)
    if append is not None:
        _validate_append(append)
    call = Call(kind, positional, kwargs, given["out"], append, given["rotary"])
    _functions(kind, kwargs, given, call.lengths, trace)
    return call


_NUMBERS = (float, int)


def repeated(
    kind: str,
    tensors: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    longest: tuple[int, int] = (0, 0),
    paged: tuple[Any, ...] = ("", None, False),
) -> Any:
    """The result of a call that came before, or None: the short way for arguments of just the usual types.

    Args: ``tensors`` as ``repeats.answer`` takes them; ``options``: causal, window, softmax_scale, softcap, return_lse,
    backend; ``longest``: the max_seqlens; ``paged``: kv_layout, num_splits, batch_invariant.
    """
    q = tensors[0]
    if torch.compiler.is_compiling() or type(q) is not Tensor or not q.is_cuda:
        return None
    numbers = _usual(options)
    found = None if numbers is None else repeats.answer(kind, tensors, (*numbers, *longest, *paged))
    if found is None:
        return None
    return (found[0], found[1]) if options[4] else found[0]


def _usual(options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The first of repeats.OPTIONS; None where one is not of its usual type."""
    causal, window, softmax_scale, softcap, return_lse, backend = options
    usual = (
        (type(causal) is bool and type(return_lse) is bool)
        and (window is None or (type(window) is tuple and len(window) == 2))
        and (softmax_scale is None or type(softmax_scale) in _NUMBERS)
        and type(softcap) in _NUMBERS
    )
    left, right = window or (None, None)
    return (causal, left, right, softmax_scale, softcap, return_lse, backend) if usual else None


def repeated_extended(
    tensors: tuple[Tensor | None, ...],
    new: tuple[Any, ...],
    rotary: Any,
    options: tuple[Any, ...],
    longest: tuple[int, int],
    paged: tuple[Any, ...],
) -> Any:
    """As ``repeated``, for a paged call with new tokens. ``new``: k_new, v_new, cu_seqlens_new."""
    q, k_cache, v_cache, cu_seqlens_q, page_table, _, *rest = tensors
    if torch.compiler.is_compiling() or type(q) is not Tensor or not q.is_cuda:
        return None
    numbers = _usual(options)
    if numbers is None or (rotary is not None and type(rotary) is not Rotary):
        return None
    tables = (None, None, False) if rotary is None else (rotary.cos, rotary.sin, rotary.interleaved)
    asked_for = (*numbers, *longest, *paged)
    extended = repeats.answer("extend", (*tensors, *new, *tables[:2]), (*asked_for, tables[2]))
    if extended is None:
        return None
    turned, lengths = q if rotary is None else extended[-1], extended[0]
    found = repeats.answer("paged", (turned, k_cache, v_cache, cu_seqlens_q, page_table, lengths, *rest), asked_for)
    if found is None:  # it was checked when it came first: what was planned of it is forgotten, or there is a copy
        kwargs = dict(zip(repeats.OPTIONS, asked_for, strict=True))
        kwargs |= dict(zip(TENSORS["paged"][6:], rest, strict=True)) | {"cu_seqlens_q": cu_seqlens_q}
        found = torch.ops.xattn.attention_paged(turned, k_cache, v_cache, page_table, lengths, **kwargs)
    return (found[0], found[1]) if options[4] else found[0]


def run(call: Call) -> Any:
    """Makes the call: everything the host can see is checked before anything is written."""
    compiling = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    appender = call.kwargs["backend"]
    if not compiling:
        _refuse_transforms(call)
    if compiling and call.out is not None:
        held = [t for role in ("score_mod", "epilogue") for t in call.kwargs.get(f"{role}_aux") or ()]
        given = [t for t in (*call.positional, *call.kwargs.values(), *held) if isinstance(t, Tensor)]
        _check_out(call, torch.is_grad_enabled() and any(t.requires_grad for t in given))
    if compiling and call.append is not None:
        # The same checks as below, by an op that what is written depends on: lengths flow through it.
        call.append["seqlens_k"] = torch.ops.xattn.check_paged(
            *call.positional, **call.kwargs, out=call.out, lengths=call.lengths()
        )
    elif not compiling and (call.out is not None or call.append is not None or call.rotary is not None):
        inputs = ops.record(call.kind, call.positional, call.kwargs)
        check(call, inputs)
        at, backend = device_of(inputs.q.device), inputs.backend
        found = dispatch.plan(inputs.problem(asked(inputs)), inputs.size_bucket(), at, backend=backend)
        dispatch.must_answer(found, backend)
        if dispatch.get(found.backend).prepare is None:  # else kernels report what they find, and no function is given
            if call.append is not None:
                _validate_appended(inputs, call.append, call.lengths())
                inputs = replace(inputs, seqlens_k=call.lengths())
            probe.functions(inputs)
        appender = found.backend
        if found.native and call.append is not None and not repeats.modes():
            return _extended_natively(call, inputs, appender)
    positional = call.positional
    if call.append is not None or call.rotary is not None:
        positional = _extended(call, appender)
    if autograd.transforms_active():
        inputs = ops.record(call.kind, positional, call.kwargs)
        if call.kind == "paged":
            validate.call(inputs, asked(inputs))
        needs = [t is not None and t.is_floating_point() and t.dtype.itemsize > 1 for _, t in inputs.differentiable()]
        needs = [need and call.kind != "paged" for need in needs]
        result, lse = autograd.Attention.apply(inputs.without_tensors(), needs, *inputs.flat())
    elif call.kind == "attention":
        result, lse = torch.ops.xattn.attention(*positional, **call.kwargs)
    elif call.kind == "varlen":
        result, lse = torch.ops.xattn.attention_varlen(*positional, **call.kwargs)
    else:
        result, lse = torch.ops.xattn.attention_paged(*positional, **call.kwargs)
    if call.out is not None:
        result = call.out.copy_(result)
    return (result, lse) if call.kwargs["return_lse"] else result


def _refuse_transforms(call: Call) -> None:
    """What a torch.func transform or a dual tensor asks for in vain, by name."""
    if autograd.transforms_active():
        written = {"out": call.out, "k_new": call.append}
        for name in (n for n, given in written.items() if given is not None):
            raise UnsupportedError(
                f"{name}: got a tensor under a torch.func transform (vmap, grad); allowed: None there"
            )
    if autograd.forward_mode():
        held = [t for role in _FUNCTIONS for t in call.kwargs.get(f"{role}_aux") or ()]
        turned = [call.rotary.cos, call.rotary.sin] if call.rotary is not None else []
        given = [*call.positional, *call.kwargs.values(), *(call.append or {}).values(), call.out, *held, *turned]
        autograd.refuse_forward_mode(t for t in given if isinstance(t, Tensor))


def describe(kind: str, given: dict[str, Any]) -> Inputs:
    """The record of a call that is not made, checked as if it were; user functions are traced, and only noted."""
    return _described(kind, given)[1]


def explain(kind: str, given: dict[str, Any], device: Device | None) -> dispatch.Plan:
    """The plan of a call that is not made, on ``device``, or on that of its tensors."""
    call, inputs = _described(kind, given)
    at = device_of(inputs.q.device) if device is None else device
    found = dispatch.plan(inputs.problem(asked(inputs)), inputs.size_bucket(), at, backend=inputs.backend)
    if found.native:
        mods = [mod for _, mod in inputs.functions() if mod is not None and mod.lowered is not None]
        found = replace(found, sources=tuple((mod.key, mod.lowered.source) for mod in mods if mod.lowered))
    if found.backend is None or (call.append is None and call.rotary is None):
        return found
    extended = appends.planned(ops.append_record(**_extension(call)), at, found.backend)
    return replace(found, config=(*found.config, *extended))


def _described(kind: str, given: dict[str, Any]) -> tuple[Call, Inputs]:
    call = normalise(kind, given, trace=False)
    epilogue = given["epilogue"]
    device = given["q"].device
    mods: dict[str, Mod | None] = dict.fromkeys(_FUNCTIONS)
    for role in _FUNCTIONS:
        if given[role] is not None:
            fn, aux = (epilogue.fn, call.kwargs.pop("epilogue_aux")) if role == "epilogue" else (given[role], ())
            mods[role] = _noted(role, fn, device, aux, reference.compute_dtype(given["q"], given["attn_mask"]))
    inputs = replace(
        ops.record(kind, call.positional, call.kwargs),
        score_mod=mods["score_mod"],
        score_mod_aux=_stand_ins(_held(given["score_mod"]), device),
        mask_mod=mods["mask_mod"],
        epilogue=mods["epilogue"],
        epilogue_aux=_stand_ins([*epilogue.aux, *_held(epilogue.fn)], device) if epilogue else (),
    )
    check(call, inputs)
    return call, inputs


def check(call: Call, inputs: Inputs) -> None:
    """What the host can see of a call's tensors, those that are written to included."""
    grads = asked(inputs)
    if (
        call.rotary is not None
        and torch.is_grad_enabled()
        and (call.rotary.cos.requires_grad or call.rotary.sin.requires_grad)
    ):
        allowed = "attention_paged has no gradient: call it under torch.no_grad()"
        validate.fail("rotary", "cos or sin that requires a gradient", allowed)
    validate.call(inputs, grads)
    if call.rotary is not None:
        call.rotary.check(inputs.q)
    if call.out is not None:
        _check_out(call, bool(grads))


def asked(inputs: Inputs) -> tuple[str, ...]:
    """The arguments whose gradient a call asks for."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(dict.fromkeys(name for name, t in inputs.differentiable() if t is not None and t.requires_grad))


# ---------------------------------------------------------------- parts
def _autocast(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as autocast makes them, where it is on: what is checked and planned is what is computed."""
    at = given["q"].device.type
    if at not in ("cpu", "cuda") or not torch.is_autocast_enabled(at):
        return given
    dtype = torch.get_autocast_dtype(at)
    names = ["q", "k", "v", "attn_mask"]
    if kind == "paged":
        names, dtype = ["q", "k_new", "v_new"], ops.autocast_of_cache(given["k_cache"], dtype)
    return given | {n: ops.autocast(given[n], dtype) for n in names if given[n] is not None}


def _numbers(kwargs: dict[str, Any], given: dict[str, Any]) -> None:
    for name in ("causal", "return_lse", *(("deterministic",) if kwargs["deterministic"] is not None else ())):
        kwargs[name] = validate.flag(name, kwargs[name])
    if kwargs["softmax_scale"] is not None:
        kwargs["softmax_scale"] = validate.factor("softmax_scale", kwargs["softmax_scale"])
    kwargs["softcap"] = validate.factor("softcap", kwargs["softcap"])
    kwargs["dropout_p"] = validate.number("dropout_p", kwargs["dropout_p"], 0.0, 1.0)
    if kwargs["backend"] is not None and not isinstance(kwargs["backend"], str):
        validate.fail("backend", type(kwargs["backend"]).__name__, "the name of a backend, or None", TypeError)
    if "num_splits" in kwargs and kwargs["num_splits"] is not None:
        kwargs["num_splits"] = validate.count("num_splits", kwargs["num_splits"], 1)
    if "kv_layout" in kwargs and not isinstance(kwargs["kv_layout"], str):
        validate.fail("kv_layout", type(kwargs["kv_layout"]).__name__, "'NHD' or 'HND'", TypeError)
    kwargs["window_left"], kwargs["window_right"] = validate.window(given["window"])


def _functions(
    kind: str, kwargs: dict[str, Any], given: dict[str, Any], lengths: Callable[[], Tensor] | None, trace: bool
) -> None:
    """``lengths``: of paged calls, the new tokens included."""
    epilogue = given["epilogue"]
    if epilogue is not None and not isinstance(epilogue, Epilogue):
        validate.fail("epilogue", type(epilogue).__name__, "an xattn.Epilogue or None", TypeError)
    for role in ("score_mod", "mask_mod"):
        if given[role] is not None and not callable(given[role]):
            validate.fail(role, type(given[role]).__name__, "a function, or None", TypeError)
    aux: tuple[Tensor, ...] = ()
    if epilogue is not None:
        kwargs["out_dtype"] = epilogue.out_dtype
        aux = _epilogue_aux(kind, epilogue, given, lengths)
        if not trace:
            kwargs["epilogue_aux"] = aux
    if not trace:
        return
    for role in _FUNCTIONS:
        if given[role] is None:
            continue
        # What torch.compiler.is_exporting returns, which is always True in code that torch 2.10 and 2.11 compile.
        exporting = torch.compiler._is_exporting_flag
        if exporting or torch._C._get_tracing_state() is not None:
            _refuse_to_export(role)
        fn = epilogue.fn if role == "epilogue" and epilogue else given[role]
        dtype = reference.compute_dtype(given["q"], given["attn_mask"])
        key, tensors = fusion.trace(role, fn, given["q"].device, aux if role == "epilogue" else (), dtype)
        kwargs[role], kwargs[f"{role}_aux"] = key, tensors or None


def _refuse_to_export(role: str) -> None:
    raise UnsupportedError(
        f"{role}: user functions do not travel in exported modules, nor in traced ones; export without it"
    )


_refuse_to_export._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called, not traced: the error is seen


def _epilogue_aux(
    kind: str, epilogue: Epilogue, given: dict[str, Any], lengths: Callable[[], Tensor] | None
) -> tuple[Tensor, ...]:
    """The aux tensors of an epilogue; those of the output's shape by rows, and where each sequence starts in them, but
    in dense calls, whose q_idx are the tensors' own."""
    if not epilogue.rows:
        return epilogue.aux
    q, offsets = given["q"], given.get("cu_seqlens_q")
    rank = 3 if kind == "varlen" or offsets is not None else 4
    if q.dim() != rank:
        validate.fail("q", f"shape {tuple(q.shape)}", f"{rank} dimensions")
    wanted = (*q.shape[:-1], given["v_cache" if kind == "paged" else "v"].shape[-1])
    aux = list(epilogue.aux)
    for n in epilogue.rows:
        if tuple(aux[n].shape) != wanted:
            validate.fail("epilogue", f"a tensor of shape {tuple(aux[n].shape)}", f"{wanted}, the shape of the output")
        aux[n] = aux[n] if kind == "attention" else aux[n].flatten(0, -3)
    if kind == "attention":
        return tuple(aux)
    if offsets is not None:
        starts, seqlens_q = offsets[:-1].long(), (offsets[1:] - offsets[:-1]).long()
    else:
        starts, seqlens_q = torch.arange(q.shape[0], device=q.device) * q.shape[1], q.shape[1]
    if lengths is not None:  # q_idx counts from the start of the sequence, not from that of its queries
        starts = starts - (lengths().long() - seqlens_q)
    rows = aux[epilogue.rows[0]].shape[0]
    return (*aux, torch.cat([starts, torch.full((1,), rows - 1, dtype=torch.int64, device=q.device)]))


def _append(given: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of append_paged."""
    rotary = given["rotary"]
    if rotary is not None and not isinstance(rotary, Rotary):
        validate.fail("rotary", type(rotary).__name__, "an xattn.Rotary or None", TypeError)
    if given["k_new"] is None:
        for name in ("v_new", "cu_seqlens_new"):
            if given[name] is not None:
                validate.fail("k_new", None, f"a tensor, where {name} is given")
        return None
    for name in ("k_scale", "v_scale"):
        if not isinstance(given[name], Tensor):
            validate.divisor(name, given[name])
    names = ("k_cache", "v_cache", "page_table", "seqlens_k", "k_new", "v_new", "cu_seqlens_new", "kv_layout")
    append = {name: given[name] for name in names}
    append["k_scale"], append["v_scale"] = kwargs["k_scale"], kwargs["v_scale"]
    return append if rotary is None else append | _tables(rotary)


def _validate_append(append: dict[str, Any]) -> None:
    for name in ("k_new", "v_new"):
        if append[name] is not None and append[name].requires_grad and torch.is_grad_enabled():
            allowed = "attention_paged has no gradient: call it under torch.no_grad()"
            validate.fail(name, "a tensor that requires a gradient", allowed)
    for name in ("k_cache", "v_cache"):
        validate.writable(name, append[name])
    if torch.compiler.is_compiling():
        return  # the op checks the rest
    validate.append(**{name: value for name, value in append.items() if not name.startswith("rotary")})
    if "rotary_cos" in append:
        Rotary(append["rotary_cos"], append["rotary_sin"], append["rotary_interleaved"]).check(append["k_new"])


def _validate_appended(inputs: Inputs, append: dict[str, Any], lengths: Tensor) -> None:
    """Values, before a token is written. ``lengths``: with the new tokens."""
    if append["cu_seqlens_new"] is not None:
        validate.offsets("cu_seqlens_new", append["cu_seqlens_new"], append["k_new"].shape[0])
    validate.values(inputs, lengths)


def _noted(role: str, fn: Any, device: torch.device, aux: Sequence[Tensor], dtype: torch.dtype) -> Mod | None:
    """A function in traced form, by the name of its role. Raises what tracing raises; for meta tensors it is traced on
    the device of what it holds, or on the CPU."""
    if device.type == "meta":
        device = next((t.device for t in _held(fn)), torch.device("cpu"))
        aux = [torch.zeros((), dtype=t.dtype, device=device).expand(t.shape) for t in aux]
    key, _ = fusion.trace(role, fn, device, aux, dtype)
    found = fusion.lookup(key)
    assert found is not None
    return replace(found, key=role)


def _check_out(call: Call, grads: bool) -> None:
    """Shape, dtype and device of ``out``; the same while torch.compile looks on."""
    out, q = call.out, call.positional[0]
    assert out is not None
    if grads or (torch.is_grad_enabled() and out.requires_grad):
        allowed = "out only under torch.no_grad(), or for inputs without gradients"
        validate.fail("out", "a gradient is asked for", allowed)
    if out.layout is not torch.strided:
        validate.fail("out", str(out.layout), "a dense (strided) tensor")
    shape = (*q.shape[:-1], call.positional[2].shape[-1])
    dtype = call.kwargs.get("out_dtype") or (torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != q.device:
        got = f"shape {tuple(out.shape)}, {out.dtype}, {out.device}"
        validate.fail("out", got, f"shape {shape}, {dtype}, {q.device}")
    validate.writable("out", out)


def _extended(call: Call, backend: str | None) -> tuple[Any, ...]:
    """The positional arguments of attention_paged, once its new tokens are written and q is rotated."""
    q, *caches, lengths = call.positional
    if autograd.transforms_active():  # only rotation may stand under them, by an op that writes nothing
        assert call.rotary is not None
        r = call.rotary
        positions = appends.query_positions(q, lengths, call.kwargs["cu_seqlens_q"], call.kwargs["causal"])
        return (torch.ops.xattn.rotary(q, positions, r.cos, r.sin, r.interleaved), *caches, lengths)
    after, turned = torch.ops.xattn.extend_paged(**_extension(call), backend=backend)
    return (q if call.rotary is None else turned, *caches, lengths if call.append is None else after)


_NEW = ("k_new", "v_new", "cu_seqlens_new", "cos", "sin")  # the tensors of "extend" behind those of "paged"


def _extended_natively(call: Call, inputs: Inputs, backend: str | None) -> Any:
    """The result of a paged call with new tokens, all checked, that native kernels answer; it is remembered."""
    record = ops.append_record(**_extension(call))
    ready = appends.prepared(record, backend)
    if ready is None:
        return _attended(call, _extended(call, backend))
    after, turned = ready.of(record)
    result = _attended(call, (call.positional[0] if turned is None else turned, *call.positional[1:4], after))
    if call.out is None:
        tables = (None, None) if call.rotary is None else (call.rotary.cos, call.rotary.sin)
        new = (record.k_new, record.v_new, record.cu_seqlens_new, *tables)
        given = {n: getattr(inputs, n) for n in TENSORS["paged"]} | dict(zip(_NEW, new, strict=True))
        names = [_given_as(name) for name, t in given.items() if t is not None]
        interleaved = call.rotary is not None and call.rotary.interleaved
        repeats.remember(inputs, ready.again(names), "extend", new, (interleaved,))
    return result


def _given_as(name: str) -> str:
    return {"k": "k_cache", "v": "v_cache"}.get(name, name)


def _attended(call: Call, positional: tuple[Any, ...]) -> Any:
    """The attention of a paged call behind its append."""
    result, lse = torch.ops.xattn.attention_paged(*positional, **call.kwargs)
    if call.out is not None:
        result = call.out.copy_(result)
    return (result, lse) if call.kwargs["return_lse"] else result


def _extension(call: Call) -> dict[str, Any]:
    """The arguments of extend_paged, but for the backend."""
    names = ("q", "k_cache", "v_cache", "page_table", "seqlens_k")
    given = dict(zip(names, call.positional, strict=True))
    given |= {name: call.kwargs[name] for name in ("cu_seqlens_q", "causal", "kv_layout")}
    given |= {} if call.rotary is None else _tables(call.rotary)
    return given | (call.append or {})


def _tables(rotary: Rotary) -> dict[str, Any]:
    return {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin, "rotary_interleaved": rotary.interleaved}


def _held(fn: Any) -> list[Tensor]:
    """The tensors that a user's function holds."""
    return [fusion.captured.at(fn, path) for path in fusion.captured.tensors(fn)]


def _stand_ins(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Tensors that ask for a gradient where the given ones do, and are nothing else."""
    return tuple(torch.empty(0, device=device, requires_grad=t.requires_grad) for t in tensors)
