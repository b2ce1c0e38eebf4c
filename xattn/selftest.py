"""A self-test of one device: what is there, and whether small problems are answered as the float64 reference answers
them."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import api, device, jit, launch, masks, options, questions, settings
from .errors import FallbackWarning
from .images import Store

OK, NOTE, FAILED = "ok", "note", "FAILED"
_REPEATS, _ENOUGH = 5, 0.1  # of a timed call, or so many seconds
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """A small problem. ``options`` names what the call uses beside q, k and v (see ``_option``); ``dims``: head_dim
    and head_dim_v; ``lengths``: seqlen_q and seqlen_k; ``page_size`` is for paged calls."""

    label: str
    kind: str = "attention"
    dtype: str = "bf16"
    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (4, 2)
    lengths: tuple[int, int] = (67, 130)
    options: tuple[str, ...] = ("causal",)
    page_size: int = 0
    backward: bool = False


_WIDTHS = tuple(Case(f"{dtype}, head_dim {d}", dtype=dtype, dims=(d, d)) for dtype in _DTYPES for d in (64, 128, 256))
CASES: tuple[Case, ...] = (
    *_WIDTHS,
    Case("head_dim 72", dims=(72, 72)),
    Case("head_dim 192, v 128", dims=(192, 128)),
    Case("not causal", options=()),
    Case("one query", lengths=(1, 130)),
    Case("lse", options=("causal", "return_lse")),
    Case("window", options=("causal", "window")),
    Case("softcap", options=("causal", "softcap")),
    Case("ALiBi", options=("causal", "alibi_slopes")),
    Case("sinks", options=("causal", "sinks")),
    Case("attn_mask, boolean", options=("boolean",)),
    Case("attn_mask, added", options=("added",)),
    Case("seqused_k", options=("causal", "seqused_k")),
    Case("varlen", kind="varlen"),
    Case("varlen, window, softcap", kind="varlen", options=("causal", "window", "softcap")),
    Case("paged, page_size 16", kind="paged", page_size=16),
    Case("paged, one query, page_size 64", kind="paged", lengths=(1, 130), page_size=64),
    Case("bf16, backward", backward=True),
    Case("fp32, backward", dtype="fp32", dims=(64, 64), backward=True),
)


@dataclass(frozen=True)
class Result:
    """What came of a case: who answered and how, the error that came closest to what is allowed, or the fault that kept
    it from being answered (``trace``: where). ``first_ms``: the first call, compiling and loading included; ``us``: a
    call that comes again, the device waited for: mostly the host's time, as the problems are small."""

    label: str
    ok: bool
    backend: str = ""
    native: bool = False
    config: tuple[tuple[str, Any], ...] = ()
    error: float | None = None
    allowed: float | None = None
    fault: str = ""
    trace: str = ""
    first_ms: float | None = None
    us: float | None = None


@dataclass(frozen=True)
class Finding:
    """One thing of the machine: ``state`` is "ok", "note" (absent or degraded, and nothing breaks) or "FAILED"."""

    what: str
    state: str
    text: str


# ---------------------------------------------------------------- the device
def device_of(name: str | None) -> torch.device:
    """The torch device called "cpu" or by its number; None: the first GPU that this torch can use, else the CPU.
    ValueError where it is not there."""
    count = torch.cuda.device_count()
    if name is None:
        return torch.device("cuda", 0) if count else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not options.is_whole(name) or int(name) >= count:
        here = f"0 to {count - 1}, cpu" if count else "cpu; this torch sees no GPU"
        raise ValueError(f"--device: got {name!r}; allowed: {here}")
    return torch.device("cuda", int(name))


def describe(place: torch.device) -> str:
    """The device in words, and, of a CPU, whether there is a GPU at all."""
    text = f"{place}, {device.of(place)}"
    return text if place.type != "cpu" or torch.cuda.device_count() else f"{text}; this torch sees no GPU"


# ---------------------------------------------------------------- the problems
def run(case: Case, place: torch.device) -> Result:
    """Answers a case and measures it. Never raises: whatever goes wrong is the result's fault."""
    about: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)  # the table says who answers
            tensors, options = _arguments(case, place)
            plan = questions.explain(*tensors, kind=case.kind, **options)
            about = {"backend": plan.backend or "none", "native": plan.native, "config": plan.config}
            got, seconds = _timed(case, tensors, options, place)
            about["first_ms"] = 1e3 * seconds
            truth = _call(case, *_cast(tensors, options, torch.float64), backend="reference")
            plain = _results(case, _plain(case, tensors, options), tensors)
            pairs = [p for g, t, b in zip(got, truth, plain, strict=True) for p in compare(g, t, b)]
            again: list[float] = []
            while len(again) < _REPEATS and sum(again) < _ENOUGH:
                again.append(_timed(case, tensors, options, place)[1])
            about["us"] = 1e6 * statistics.median(again)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        return Result(case.label, False, fault=f"{type(error).__name__}: {error}", trace=trace, **about)
    if any(math.isinf(error) for error, _ in pairs):
        return Result(case.label, False, fault="NaN, or a wrong shape, or infinite where the reference is not", **about)
    error_, allowed = max(pairs, key=lambda p: p[0] / p[1])
    return Result(case.label, all(e <= a for e, a in pairs), error=error_, allowed=allowed, **about)


def _timed(
    case: Case, tensors: tuple[Any, ...], options: dict[str, Any], place: torch.device
) -> tuple[list[Tensor], float]:
    """What the call answers, and its seconds until the device is done."""
    _settle(place)
    start = time.perf_counter()
    got = _call(case, tensors, options)
    _settle(place)
    return got, time.perf_counter() - start


def _settle(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def compare(got: Tensor, truth: Tensor, plain: Tensor) -> Iterator[tuple[float, float]]:
    """(error, allowed) by the largest element and by the root of the mean square.

    Allowed is twice the error of the plain computation, plus one rounding of the result, plus 1e-6 of the largest
    value. NaN, another shape, and what is infinite in one only are infinite errors.
    """
    info = torch.finfo(got.dtype)
    got, truth, plain = (t.detach().double() for t in (got, truth, plain))
    finite = truth.isfinite()
    if got.shape != truth.shape or not torch.equal(got[~finite], truth[~finite]) or not got[finite].isfinite().all():
        yield math.inf, 0.0
        return
    got, truth, plain = got[finite], truth[finite], plain[finite]
    if not got.numel():
        return
    off = torch.where(plain.isfinite(), plain - truth, 0)
    floor = info.smallest_normal * info.eps / 2 + 1e-6 * float(truth.abs().max())
    for norm, root in ((math.inf, 1.0), (2, got.numel() ** 0.5)):
        error, by_plain, value = (float(torch.linalg.vector_norm(t, norm)) / root for t in (got - truth, off, truth))
        yield error, 2 * by_plain + info.eps / 2 * value + floor


_CALLS: dict[str, Callable[..., Any]] = {
    "attention": api.attention,
    "varlen": api.attention_varlen,
    "paged": api.attention_paged,
}


def _call(case: Case, tensors: tuple[Any, ...], options: dict[str, Any], **more: Any) -> list[Tensor]:
    return _results(case, _CALLS[case.kind](*tensors, **options, **more), tensors)


def _results(case: Case, answer: Any, tensors: tuple[Any, ...]) -> list[Tensor]:
    """Out, lse and gradients, as far as the case asks for them."""
    found = list(answer) if isinstance(answer, tuple) else [answer]
    if case.backward:
        dout = _randn(found[0].shape, found[0].device, seed=9).to(found[0].dtype)
        found += torch.autograd.grad(found[0], tensors[:3], dout)
    return found


def _cast(tensors: tuple[Any, ...], options: dict[str, Any], to: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def one(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.detach().to(to).requires_grad_(x.requires_grad)

    return tuple(map(one, tensors)), {name: one(x) for name, x in options.items()}


def _randn(shape: Any, place: torch.device, seed: int) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(place)


def _arguments(case: Case, place: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The tensors and the options of the call. What lies outside the valid range is NaN."""
    (d, dv), (hq, hkv), (sq, sk) = case.dims, case.heads, case.lengths
    dtype, batch = _DTYPES[case.dtype], 2
    options = {name: value for option in case.options for name, value in [_option(option, case, place, batch)]}
    q, k, v = (
        _randn(shape, place, seed).to(dtype)
        for seed, shape in enumerate([(batch, sq, hq, d), (batch, sk, hkv, d), (batch, sk, hkv, dv)])
    )
    if case.kind == "attention":
        if "seqused_k" in options:
            for b, used in enumerate(options["seqused_k"].tolist()):
                k[b, used:], v[b, used:] = math.nan, math.nan
        return tuple(t.requires_grad_(case.backward) for t in (q, k, v)), options
    if case.kind == "varlen":
        lengths_q, lengths_k = (sq, sq // 3), (sk, sk // 2)
        q = torch.cat([q[b, :n] for b, n in enumerate(lengths_q)])
        k, v = (torch.cat([t[b, :n] for b, n in enumerate(lengths_k)]) for t in (k, v))
        ends = (torch.tensor([0, n[0], sum(n)], dtype=torch.int32, device=place) for n in (lengths_q, lengths_k))
        return (q, k, v, *ends, sq, sk), options
    pages = -(-sk // case.page_size)
    table = torch.arange(2 * pages - 1, -1, -1, dtype=torch.int32, device=place).view(batch, pages)
    lengths = torch.tensor([sk, sk // 2 + 1], dtype=torch.int32, device=place)
    caches = []
    for t in (k, v):
        cache = t.new_full((batch * pages, case.page_size, hkv, t.shape[3]), math.nan)
        for b, n in enumerate(lengths.tolist()):
            at = torch.arange(n, device=place)
            cache[table[b, at // case.page_size].long(), at % case.page_size] = t[b, :n]
        caches.append(cache)
    return (q, *caches, table, lengths), options


def _option(name: str, case: Case, place: torch.device, batch: int) -> tuple[str, Any]:
    heads, (sq, sk) = case.heads[0], case.lengths
    if name in ("boolean", "added"):
        mask = _randn((batch, 1, sq, sk), place, seed=5)
        return "attn_mask", mask > -0.5 if name == "boolean" else mask.to(_DTYPES[case.dtype])
    if name == "seqused_k":
        return name, torch.tensor([sk, sk // 2], dtype=torch.int32, device=place)
    if name == "alibi_slopes":
        return name, torch.linspace(0.5, 0.01, heads, device=place)
    if name == "sinks":
        return name, torch.linspace(-1, 2, heads, device=place)
    return name, {"causal": True, "return_lse": True, "window": (40, None), "softcap": 5.0}[name]


# ---------------------------------------------------------------- the plain computation
def _plain(case: Case, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The call in plain torch, in the dtype of q: what sets the tolerance."""
    more = {n: x for n, x in options.items() if n not in ("seqused_k", "return_lse", "attn_mask")}
    answers = []
    for b, (q, k, v) in enumerate(_sequences(case, tensors, options)):
        mask = options["attn_mask"][b] if "attn_mask" in options else None
        answers.append(_plain_sequence(q, k, v, attn_mask=mask, **more))
    join = torch.cat if case.kind == "varlen" else torch.stack
    out = join([o for o, _ in answers])
    return (out, torch.stack([lse for _, lse in answers])) if "return_lse" in options else out


def _sequences(
    case: Case, tensors: tuple[Any, ...], options: dict[str, Any]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q (seqlen_q, heads_q, head_dim), k and v of each sequence, without what lies outside the valid range."""
    q, k, v = tensors[:3]
    if case.kind == "varlen":
        ends_q, ends_k = (t.tolist() for t in tensors[3:5])
        for b in range(len(ends_q) - 1):
            keys = slice(ends_k[b], ends_k[b + 1])
            yield q[ends_q[b] : ends_q[b + 1]], k[keys], v[keys]
    elif case.kind == "paged":
        table, lengths = tensors[3].long(), tensors[4].tolist()
        for b, n in enumerate(lengths):
            yield q[b], k[table[b]].flatten(0, 1)[:n], v[table[b]].flatten(0, 1)[:n]
    else:
        used = options["seqused_k"].tolist() if "seqused_k" in options else [k.shape[1]] * len(q)
        for b, n in enumerate(used):
            yield q[b], k[b, :n], v[b, :n]


def _plain_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (seqlen_q, heads_q, head_dim_v), lse (heads_q, seqlen_q)."""
    (sq, hq, d), sk = q.shape, k.shape[0]
    k, v = (t.repeat_interleave(hq // t.shape[1], 1) for t in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) * d**-0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(sq, device=q.device)[:, None], torch.arange(sk, device=q.device)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s.dtype)[:, None, None] * (i + sk - sq - j).abs()
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    seen = masks.visible(i, j, sq, sk, causal, *window)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype)[:, None, None].expand(hq, sq, 1)], -1)
    lse = torch.logsumexp(s, -1)
    p = torch.where(lse.isfinite()[..., None], torch.softmax(s, -1), 0)[..., :sk]
    return torch.einsum("hij,jhd->ihd", p, v), lse


# ---------------------------------------------------------------- the machine
def kernel_status(place: torch.device) -> Finding:
    """What kernels reported of values that only the device sees, in all problems."""
    try:
        api.check_errors(place if place.type == "cuda" else None)
    except Exception as error:
        return Finding("kernel status", FAILED, f"{type(error).__name__}: {error}")
    return Finding("kernel status", OK, "no kernel reported anything")


def environment() -> list[Finding]:
    """Drivers, compilers, the launcher, the image store, environment variables. No device context is created."""
    found = [*_devices(), *_compilers(), _launcher(), *_store()]
    variables = {n: v for n, v in settings.given().items() if v}
    text = ", ".join(f"{name}={value}" for name, value in variables.items())
    return [*found, Finding("environment variables", OK, text or "none of xattn's is set")]


def _devices() -> Iterator[Finding]:
    devices, notes = device.survey()
    for d in devices:
        driver = ", ".join(filter(None, [d.driver and f"driver {d.driver}", d.runtime and f"runtime {d.runtime}"]))
        yield Finding(f"device {d.arch}", OK, f"{d}{', ' + driver if driver else ''}")
    for note in notes:
        yield Finding("devices", NOTE, note)


def _compilers() -> Iterator[Finding]:
    for compiler in jit.COMPILERS:
        missing = compiler.missing()
        yield Finding(f"compiler {compiler.name}", NOTE if missing else OK, missing or compiler.version())


def _launcher() -> Finding:
    missing = launch.missing()
    return Finding("launcher", NOTE if missing else OK, missing or launch.description())


def _store() -> Iterator[Finding]:
    store = Store()
    files = list(store.files())
    for place, advice in (
        ("wheel", "install xattn again"),
        ("cache", "removed, and compiled again, when it is needed"),
    ):
        mine = [f for f in files if f.place == place]
        broken = [f for f in mine if f.image is None]
        text = f"{len(mine) - len(broken)} images"
        if broken:
            text += f", {len(broken)} broken ({advice}): " + "; ".join(f.fault for f in broken)
        state = OK if not broken else NOTE if place == "cache" else FAILED
        yield Finding(f"images, {place}", state, text)
    try:
        store.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=store.cache):
            pass
        yield Finding("images, cache folder", OK, f"{store.cache} can be written to")
    except OSError as error:
        text = f"{store.cache} cannot be written to ({error.strerror}): every process compiles its images again"
        yield Finding("images, cache folder", NOTE, text)
