"""The torch ops ``torch.ops.xattn.*``: schemas, fakes with real strides, and their kernels, which plan and run a
backend.

    attention, attention_varlen, attention_paged       -> (out, lse); without return_lse, lse is for the backward alone:
                                                          empty, or zeros where a gradient is asked for and the backend
                                                          needs none
    attention_backward, attention_varlen_backward      -> gradients of the wanted tensors
    rotary                                             -> x rotated as tokens at their positions
    append_paged                                       writes new keys and values into a paged cache
    extend_paged                                       the same, and q rotated as the newest tokens: what precedes
                                                       attention_paged -> (lengths with the new tokens, rotated q),
                                                       each empty where it is not asked for
    check_paged                                        seqlens_k, once all is checked that a paged call can be refused
                                                       for

They take what the public functions take (``xattn.attention`` and its kin), with the window as two ints, ``window_left``
and ``window_right``, scales as tensors, ``batch_invariant`` as a flag, and the traced user functions by key; new
tokens are written by ``append_paged`` before ``attention_paged`` is called. An op's ``default._schema`` shows its
arguments. They serve TorchScript and export as well, where user functions are not to be had.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import appends, autograd, dispatch, fusion, launch, probe, repeats, settings, status, validate
from .append_call import Append
from .backends import Backend, Config, Unavailable
from .device import of as device_of
from .errors import UnsupportedError
from .inputs import FP8, NO_BOUND, Inputs, dtype_name, present
from .jit import CompileError
from .kernel_call import ImageRefused
from .rotary import Rotary

_LIBRARY = torch.library.Library("xattn", "DEF")

_TAIL = (
    "bool causal=False, SymInt? window_left=None, SymInt? window_right=None, float? softmax_scale=None, "
    "float softcap=0.0, Tensor? attn_mask=None, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? seqused_k=None, "
    "float dropout_p=0.0, Tensor? dropout_rng=None, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "str score_mod='', Tensor[]? score_mod_aux=None, str mask_mod='', Tensor[]? mask_mod_aux=None, "
    "str epilogue='', Tensor[]? epilogue_aux=None, ScalarType? out_dtype=None, bool return_lse=False, "
    "bool? deterministic=None, bool batch_invariant=False, str? backend=None"
)
_HEADS = {
    "attention": "Tensor q, Tensor k, Tensor v, *, ",
    "attention_varlen": "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, *, ",
    "attention_paged": "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seqlens_k, *, "
    "Tensor? cu_seqlens_q=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, str kv_layout='NHD', "
    "int? num_splits=None, ",
}
_BACKWARD = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needs_grad, bool[] wanted, "
_KINDS = {"attention": "attention", "attention_varlen": "varlen", "attention_paged": "paged"}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_POSITIONAL = {
    "attention": ("q", "k", "v"),
    "varlen": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "paged": ("q", "k", "v", "page_table", "seqlens_k"),
}
_ONLY_PAGED = ("cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "kv_layout", "num_splits")
_COMMON = tuple(part.split("=")[0].split()[-1] for part in _TAIL.split(", "))
_MODS = ("score_mod", "mask_mod", "epilogue")
# What making and loading an image raises where it cannot be had.
_NO_IMAGE = (CompileError, ImageRefused, UnsupportedError)
_FARTHEST = 1 << 62  # a window distance beyond every key

for _name, _head in _HEADS.items():
    _LIBRARY.define(f"{_name}({_head}{_TAIL}, bool[]? needs_grad=None) -> (Tensor, Tensor)")
    if _name != "attention_paged":
        _LIBRARY.define(f"{_name}_backward({_BACKWARD}{_head}{_TAIL}) -> Tensor[]")
_LIBRARY.define(f"check_paged({_HEADS['attention_paged']}{_TAIL}, Tensor? out=None, Tensor? lengths=None) -> Tensor")
_LIBRARY.define("rotary(Tensor x, Tensor positions, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor")
_CACHE = "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor page_table, Tensor seqlens_k, "
_NEW = (
    "Tensor? cu_seqlens_new=None, str kv_layout='NHD', Tensor? k_scale=None, Tensor? v_scale=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=False"
)
_LIBRARY.define(f"append_paged({_CACHE}Tensor k_new, Tensor? v_new, *, {_NEW}) -> ()")
_LIBRARY.define(
    f"extend_paged(Tensor q, {_CACHE}Tensor? k_new=None, Tensor? v_new=None, *, Tensor? cu_seqlens_q=None, {_NEW}, "
    "bool causal=False, str? backend=None) -> (Tensor, Tensor)"
)


# ---------------------------------------------------------------- calling the ops with a record, and reading a record
# from a call
def forward(inputs: Inputs, needs_grad: list[bool] | None = None) -> tuple[Tensor, Tensor]:
    """The op of ``inputs.kind``. ``needs_grad`` runs parallel to ``inputs.differentiable()``: what a backward may be
    asked for."""
    args, kwargs = _arguments(inputs)
    return getattr(torch.ops.xattn, _NAMES[inputs.kind])(*args, **kwargs, needs_grad=needs_grad)


def backward(
    inputs: Inputs,
    needs_grad: list[bool],
    wanted: list[bool],
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> list[Tensor]:
    """The backward op: gradients of ``inputs.differentiable()`` where ``wanted``, planned as the forward was, by
    ``needs_grad``."""
    args, kwargs = _arguments(inputs)
    op = getattr(torch.ops.xattn, f"{_NAMES[inputs.kind]}_backward")
    return op(dout, dlse, out, lse, needs_grad, wanted, *args, **kwargs)


def double_backward(
    inputs: Inputs,
    needs_grad: list[bool],
    wanted: list[bool],
    dout: Tensor,
    dlse: Tensor | None,
    seeds: list[Tensor | None],
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Gradients of ``backward``'s results with respect to dout, dlse and ``inputs.differentiable()``. Not an op: eager
    only."""
    plan = _plan(inputs, _names(inputs, needs_grad))
    run = dispatch.get(plan.backend).double_backward
    if run is None:
        raise UnsupportedError(
            f"a second derivative was asked for, and backend {plan.backend!r} has none; "
            "call attention with backend='reference'"
        )
    return run(inputs, dout, dlse, wanted, seeds)


def _arguments(inputs: Inputs) -> tuple[list[Any], dict[str, Any]]:
    args = [getattr(inputs, name) for name in _POSITIONAL[inputs.kind]]
    kwargs = {name: getattr(inputs, name) for name in _COMMON}
    if inputs.kind == "paged":
        kwargs |= {name: getattr(inputs, name) for name in _ONLY_PAGED}
    for name in _MODS:
        kwargs[name] = fusion.intern(kwargs[name])
        kwargs[f"{name}_aux"] = list(kwargs[f"{name}_aux"]) or None
    return args, kwargs


def record(kind: str, args: tuple, kwargs: dict[str, Any]) -> Inputs:
    """The record of an op's arguments."""
    fields = dict(zip(_POSITIONAL[kind], args, strict=True)) | kwargs
    fields.pop("needs_grad", None)
    for name in _MODS:
        fields[name] = fusion.lookup(fields.get(name) or "")
        fields[f"{name}_aux"] = tuple(fields.get(f"{name}_aux") or ())
    for side in ("window_left", "window_right"):  # so that no sum of it and an index overflows
        if isinstance(fields.get(side), int):
            fields[side] = min(fields[side], _FARTHEST)
    if fields.get("deterministic") is None:
        fields["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if kind == "paged":
        fields["kv_layout"] = fields.get("kv_layout", "NHD")
        if fields.get("max_seqlen_k") is None:
            fields["max_seqlen_k"] = NO_BOUND
        if (
            fields.get("max_seqlen_q") is None
        ):  # packed queries whose longest run was not given: no run is longer than all
            shape = fields["q"].shape
            fields["max_seqlen_q"] = shape[0] if len(shape) == 3 else shape[1] if len(shape) > 1 else 0
    return Inputs(kind=kind, **fields)


def _plan(inputs: Inputs, grads: tuple[str, ...]) -> dispatch.Plan:
    return dispatch.cached_plan(inputs.problem(grads), inputs.size_bucket(), device_of(inputs.q.device), inputs.backend)


def _names(inputs: Inputs, wanted: list[bool]) -> tuple[str, ...]:
    pairs = zip(inputs.differentiable(), wanted, strict=True)
    return tuple(dict.fromkeys(name for (name, _), w in pairs if w))


# ---------------------------------------------------------------- kernels
def _run(inputs: Inputs, grads: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    check_after = settings.validate_on_device()  # raises where the variable is wrong, before anything is done
    validate.call(inputs, grads)
    plan = _plan(inputs, grads)
    backend = dispatch.get(plan.backend)
    if backend.prepare is None:
        validate.values(inputs)
    try:
        out, lse = _answer(backend, inputs, plan.config, bool(grads))
    except Unavailable as error:
        dispatch.give_up(plan, str(error))
        plan = _plan(inputs, grads)
        out, lse = _answer(dispatch.get(plan.backend), inputs, plan.config, bool(grads))
    if lse is None or not (inputs.return_lse or grads):
        lse = _no_lse(inputs, bool(grads))
    if check_after:
        status.check_errors(inputs.q.device)
    return out, lse


def _answer(backend: Backend, inputs: Inputs, config: Config, needs_grad: bool) -> tuple[Tensor, Tensor | None]:
    if backend.prepare is None:
        return backend.run(inputs, config)
    if needs_grad:  # native kernels have the weights again from lse
        inputs = replace(inputs, return_lse=True)
    try:
        call, tensors = backend.prepare(inputs, config)
        prepared = launch.prepare(call)
    except _NO_IMAGE as error:
        raise Unavailable(f"no image of it can be made and loaded here: {error}") from error
    outputs = repeats.launch_first(inputs, call, tensors, prepared)
    return outputs[0], outputs[1] if inputs.return_lse else None


def _no_lse(inputs: Inputs, needs_grad: bool) -> Tensor:
    """What stands for an lse that was not asked for: empty, or zeros where only a backward of another kind of backend
    could read it."""
    shape = inputs.lse_shape if inputs.return_lse or needs_grad else (0,)
    return torch.zeros(shape, dtype=torch.float32, device=inputs.q.device)


def _kernel(kind: str):
    def kernel(*args, needs_grad=None, **kwargs):
        inputs = record(kind, args, kwargs)
        return _run(inputs, _names(inputs, needs_grad) if needs_grad else ())

    return kernel


def _fake(kind: str):
    def fake(*args, needs_grad=None, **kwargs):
        inputs = record(kind, args, kwargs)
        validate.call(inputs, _names(inputs, needs_grad) if needs_grad else ())
        out = inputs.q.new_empty(inputs.out_shape, dtype=inputs.dtype_out)
        shape = inputs.lse_shape if inputs.return_lse or needs_grad else (0,)
        return out, inputs.q.new_empty(shape, dtype=torch.float32)

    return fake


def _autograd_kernel(kind: str):
    op = getattr(torch.ops.xattn, _NAMES[kind]).default

    def kernel(keyset, *args, needs_grad=None, **kwargs):
        if autograd.forward_mode():
            autograd.refuse_forward_mode(record(kind, args, kwargs).flat())
        if torch.is_grad_enabled() and needs_grad is None:
            inputs = record(kind, args, kwargs)
            asked = [t is not None and t.requires_grad for _, t in inputs.differentiable()]
            if any(asked):
                validate.call(inputs, _names(inputs, asked))
                return autograd.Attention.apply(inputs.without_tensors(), asked, *inputs.flat())
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, needs_grad=needs_grad, **kwargs)

    return kernel


def _backward_kernel(kind: str):
    def kernel(dout, dlse, out, lse, needs_grad, wanted, *args, **kwargs):
        inputs = record(kind, args, kwargs)
        plan = _plan(inputs, _names(inputs, needs_grad))
        given = (out, lse, dout, dlse, list(wanted))
        try:
            return dispatch.get(plan.backend).backward(inputs, plan.config, *given)
        except _NO_IMAGE as error:
            if not plan.native:
                raise
            # Those that follow need nothing of the forward but its arguments.
            dispatch.give_up(plan, f"no image of its backward can be made and loaded here: {error}")
            plan = _plan(inputs, _names(inputs, needs_grad))
            return dispatch.get(plan.backend).backward(inputs, plan.config, *given)

    return kernel


def _backward_fake(kind: str):
    def fake(dout, dlse, out, lse, needs_grad, wanted, *args, **kwargs):
        pairs = zip(record(kind, args, kwargs).differentiable(), wanted, strict=True)
        return [t.new_empty(t.shape) for (_, t), w in pairs if w and t is not None]

    return fake


def _backward_autograd_kernel(kind: str):
    op = getattr(torch.ops.xattn, f"{_NAMES[kind]}_backward").default

    def kernel(keyset, dout, dlse, out, lse, needs_grad, wanted, *args, **kwargs):
        if torch.is_grad_enabled():
            inputs = record(kind, args, kwargs)
            tensors = [dout, dlse, out, lse, *inputs.flat()]
            if any(t is not None and t.requires_grad for t in tensors):
                return list(
                    autograd.AttentionBackward.apply(inputs.without_tensors(), list(needs_grad), list(wanted), *tensors)
                )
        return op.redispatch(
            keyset & torch._C._after_autograd_keyset, dout, dlse, out, lse, needs_grad, wanted, *args, **kwargs
        )

    return kernel


def _check(*args, out=None, lengths=None, **kwargs):
    """All that a paged call can be refused for, as an op: what is written can be made to depend on it."""
    inputs = record("paged", args, kwargs)
    settings.validate_on_device()
    validate.call(inputs)
    if dispatch.get(_plan(inputs, ()).backend).prepare is None:
        validate.values(inputs, lengths)
    for name, t in (("k_cache", inputs.k), ("v_cache", inputs.v), ("out", out)):
        if t is not None:
            validate.writable(name, t)
    probe.functions(inputs if lengths is None else replace(inputs, seqlens_k=lengths))
    return present(inputs.seqlens_k).clone()


def _check_fake(*args, out=None, lengths=None, **kwargs):
    inputs = record("paged", args, kwargs)
    validate.call(inputs)
    return torch.empty_like(present(inputs.seqlens_k))


def _autocast_kernel(kind: str, device_type: str, name: str = ""):
    """Autocast's policy for attention: floats of q, k, v and attn_mask to the autocast dtype; float64 and fp8 stay."""
    op = getattr(torch.ops.xattn, name or _NAMES[kind])
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))

    def kernel(*args, **kwargs):
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            if kind == "paged":  # a cache is not cast, it is as large as it is
                k, v = args[1:3]
                q = autocast(args[0], autocast_of_cache(k, dtype))
            else:
                q, k, v = (autocast(t, dtype) for t in args[:3])
            if kwargs.get("attn_mask") is not None:
                kwargs["attn_mask"] = autocast(kwargs["attn_mask"], dtype)
            return op(q, k, v, *args[3:], **kwargs)

    return kernel


def autocast_of_cache(k_cache: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What queries and new tokens of a paged call become under autocast to ``dtype``: what the cache holds, if not
    fp8."""
    return dtype if dtype_name(k_cache.dtype) in FP8 else k_cache.dtype


def autocast(t: Tensor, dtype: torch.dtype) -> Tensor:
    eligible = t.is_floating_point() and t.dtype != torch.float64 and dtype_name(t.dtype) not in FP8
    return t.to(dtype) if eligible else t


def _no_gradient(name: str):
    """The Autograd kernel of an op that has no gradient: it raises where one is asked for."""
    op = getattr(torch.ops.xattn, name).default
    names = [argument.name for argument in op._schema.arguments]

    def kernel(keyset, *args, **kwargs):
        given = {n: t for n, t in (*zip(names, args, strict=False), *kwargs.items()) if isinstance(t, Tensor)}
        autograd.refuse_forward_mode(given.values())
        for asking, t in given.items():
            if torch.is_grad_enabled() and t.requires_grad:
                allowed = f"{name} has no gradient: call it under torch.no_grad()"
                validate.fail(asking, "a tensor that requires a gradient", allowed)
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return kernel


def _append(*tensors, **options):
    _extended(append_record(None, *tensors, lengths=False, **options), None)


def _append_fake(*tensors, **options):
    _check_extended(append_record(None, *tensors, lengths=False, **options))


def _extend(q, *tensors, backend=None, **options):
    return _extended(append_record(q, *tensors, **options), backend)


def _extend_fake(q, *tensors, backend=None, **options):
    x = append_record(q, *tensors, **options)
    _check_extended(x)
    return x.seqlens_k.new_empty(0 if x.k_new is None else x.seqlens_k.shape), q.new_empty(
        0 if x.rotary is None else q.shape
    )


def append_record(
    q: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seqlens_k: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    **more: Any,
) -> Append:
    """The record of the arguments of extend_paged, or of append_paged, where q is None."""
    rotary = None
    if rotary_cos is not None and rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    new = {"k_new": k_new, "v_new": v_new, "q": q, "rotary": rotary, **more}
    return Append(page_table, seqlens_k, k_cache, v_cache, **new)


def _check_extended(x: Append) -> None:
    """What the host can see of an append."""
    if x.k_new is not None:
        new = (x.k_new, x.v_new, x.cu_seqlens_new, x.kv_layout, x.k_scale, x.v_scale)
        validate.append(x.k_cache, x.v_cache, x.page_table, x.seqlens_k, *new)
        for name, scale in (("k_scale", x.k_scale), ("v_scale", x.v_scale)):
            validate.divisor(name, scale)
        for name, cache in (("k_cache", x.k_cache), ("v_cache", x.v_cache)):
            validate.writable(name, cache)
        if x.rotary is not None:
            x.rotary.check(x.k_new)
    if x.q is not None:
        validate.queries(x.q, x.cu_seqlens_q, x.seqlens_k)
        if x.rotary is not None:
            x.rotary.check(x.q)


def _extended(x: Append, backend: str | None) -> tuple[Tensor, Tensor]:
    check_after = settings.validate_on_device()
    _check_extended(x)
    with torch.no_grad():
        lengths, q = appends.run(x, backend)
    if check_after:
        status.check_errors(x.k_cache.device)
    return x.seqlens_k.new_empty(0) if lengths is None else lengths, x.k_cache.new_empty(0) if q is None else q


def _rotary_fake(x, positions, cos, sin, interleaved=False):
    Rotary(cos, sin, interleaved).check_positions(x, positions)
    return x.new_empty(x.shape)


for _name, _kind in _KINDS.items():
    _LIBRARY.impl(_name, _kernel(_kind), "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _autograd_kernel(_kind), "Autograd", with_keyset=True)
    for _device in ("cpu", "cuda"):
        _LIBRARY.impl(_name, _autocast_kernel(_kind, _device), f"Autocast{_device.upper()}")
    torch.library.register_fake(f"xattn::{_name}", _fake(_kind), lib=_LIBRARY)
    if _kind != "paged":
        _LIBRARY.impl(f"{_name}_backward", _backward_kernel(_kind), "CompositeExplicitAutograd")
        _LIBRARY.impl(f"{_name}_backward", _backward_autograd_kernel(_kind), "Autograd", with_keyset=True)
        torch.library.register_fake(f"xattn::{_name}_backward", _backward_fake(_kind), lib=_LIBRARY)
_LIBRARY.impl(
    "rotary", lambda x, at, cos, sin, pairs=False: Rotary(cos, sin, pairs).apply(x, at), "CompositeExplicitAutograd"
)
torch.library.register_fake("xattn::rotary", _rotary_fake, lib=_LIBRARY)
_LIBRARY.impl("check_paged", _check, "CompositeExplicitAutograd")
torch.library.register_fake("xattn::check_paged", _check_fake, lib=_LIBRARY)
for _device in ("cpu", "cuda"):
    _LIBRARY.impl("check_paged", _autocast_kernel("paged", _device, "check_paged"), f"Autocast{_device.upper()}")
_LIBRARY.impl("append_paged", _append, "CompositeExplicitAutograd")
_LIBRARY.impl("extend_paged", _extend, "CompositeExplicitAutograd")
for _name in ("append_paged", "extend_paged", "rotary"):
    _LIBRARY.impl(_name, _no_gradient(_name), "Autograd", with_keyset=True)
torch.library.register_fake("xattn::append_paged", _append_fake, lib=_LIBRARY)
torch.library.register_fake("xattn::extend_paged", _extend_fake, lib=_LIBRARY)
for _name, _words in {
    "attention": "xattn.attention",
    "attention_varlen": "xattn.attention_varlen",
    "attention_paged": "xattn.attention_paged, without new tokens and rotary",
    "append_paged": "what xattn.attention_paged does with k_new and v_new",
    "extend_paged": "what xattn.attention_paged does with k_new, v_new and rotary",
    "check_paged": "all that xattn.attention_paged can be refused for; returns seqlens_k",
    "rotary": "xattn.Rotary, applied to x at positions",
}.items():
    _packet = getattr(torch.ops.xattn, _name)
    _packet.__doc__ = f"{_words}, as an op: see help(xattn.ops).\n\n{_packet.default._schema}"
