"""What a backend can answer, as data, and why it cannot, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.util import find_spec

from .device import Device
from .problem import FEATURES, GRADS, KINDS, Problem, SizeBucket

# Refusal codes, each with the words that explain it.
CODES = {
    "vendor": "the device is of another vendor",
    "arch": "the device's architecture is not served",
    "missing": "something it needs is not there",
    "failed": "it was tried and does not work here",
    "kind": "this kind of call is not answered",
    "dtype": "the dtype of q, k, v is not answered",
    "dtype_out": "the output dtype is not answered",
    "head_dim": "the head dimension is not answered",
    "head_dim_v": "the head dimension of v is not answered",
    "feature": "this argument is not answered",
    "operation": "its kernels cannot have this operation of a user function",
    "grad": "the gradient of this argument is not answered",
    "deterministic": "a bitwise reproducible backward is not offered",
    "size": "an empty tensor is not answered",
    "layout": "its kernels cannot read the tensor as it lies",
    "large": "its kernels do not count so far",
    "slower": "another backend is faster here",
    "plain": "this backend answers only questions that use one of these arguments",
}


@dataclass(frozen=True)
class Refusal:
    """One reason why a backend cannot answer: ``field`` of the problem or device, what was ``got``, what is
    ``allowed``."""

    code: str
    field: str
    got: object
    allowed: tuple[object, ...] = ()

    def __str__(self) -> str:
        allowed = (
            ", ".join(map(str, self.allowed)) if self.allowed else "none yet" if self.code == "kind" else "nothing else"
        )
        return f"{self.field} = {self.got}: {CODES[self.code]} (allowed: {allowed})"

    def as_dict(self) -> dict[str, object]:
        return {"code": self.code, "field": self.field, "got": str(self.got), "allowed": [str(a) for a in self.allowed]}


@dataclass(frozen=True)
class HeadDims:
    """The head dimensions answered: multiples of ``multiple_of`` from ``smallest`` to ``largest`` (0: without end)."""

    smallest: int = 1
    largest: int = 0
    multiple_of: int = 1

    def admits(self, n: int) -> bool:
        return n % self.multiple_of == 0 and n >= self.smallest and (not self.largest or n <= self.largest)

    def __str__(self) -> str:
        text = f"multiples of {self.multiple_of}" if self.multiple_of > 1 else "any"
        text += f" from {self.smallest}" if self.smallest > self.multiple_of else ""
        return f"{text} up to {self.largest}" if self.largest else text


@dataclass(frozen=True)
class Capability:
    """What a backend answers on the devices it names. ``dtypes`` holds pairs (q, k and v); empty sets answer nothing.

    ``archs`` empty means any of the vendors', ``least_arch`` that one and all newer of NVIDIA's. ``only_with``
    non-empty means that the backend answers only problems that use one of those features. ``needs`` names Python
    modules without which it cannot run on this machine's devices. ``nonempty``: it wants at least one query and one
    key. ``as_it_lies``: kinds of calls of which it copies nothing, so that q, k and v must lie as kernels read them.
    ``page_size_multiple_of``: tokens of which the pages of a cache hold a multiple. ``lowers``: user functions are
    compiled into its kernels, so that each of their operations must have a source.
    """

    vendors: frozenset[str] = frozenset()
    archs: frozenset[str] = frozenset()
    least_arch: str = ""
    kinds: frozenset[str] = frozenset()
    dtypes: frozenset[tuple[str, str]] = frozenset()
    dtypes_out: frozenset[str] = frozenset()  # empty: the dtype of q, bf16 where that is fp8
    head_dim: HeadDims = HeadDims()
    head_dim_v: HeadDims = HeadDims()
    same_head_dim: bool = False
    features: frozenset[str] = frozenset()
    grads: frozenset[str] = frozenset()
    deterministic: bool = True
    only_with: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    nonempty: bool = False
    as_it_lies: frozenset[str] = frozenset()
    page_size_multiple_of: int = 1
    lowers: bool = False

    def as_dict(self) -> dict[str, object]:
        """For JSON: sets as sorted lists."""
        orders = {"kinds": KINDS, "as_it_lies": KINDS, "features": FEATURES, "grads": GRADS}
        found: dict[str, object] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "dtypes":
                value = [list(pair) for pair in sorted(value)]
            elif isinstance(value, frozenset):
                value = list(_sorted(value, orders.get(f.name, ())))
            elif isinstance(value, HeadDims):
                value = asdict(value)
            found[f.name] = value
        return found

    def is_for(self, device: Device) -> bool:
        """Whether it speaks of that device at all."""
        known = not self.archs or device.arch in self.archs
        return device.vendor in self.vendors and known and (not self.least_arch or is_at_least(device, self.least_arch))


def check(problem: Problem, size: SizeBucket, device: Device, capability: Capability) -> tuple[Refusal, ...]:
    """Why ``capability`` cannot answer ``problem`` on ``device``; empty where it can."""
    c, p = capability, problem
    if device.vendor not in c.vendors:
        return (Refusal("vendor", "vendor", device.vendor, _sorted(c.vendors)),)
    if c.archs and device.arch not in c.archs:
        return (Refusal("arch", "arch", device.arch, _sorted(c.archs)),)
    if c.least_arch and not is_at_least(device, c.least_arch):
        return (Refusal("arch", "arch", device.arch, (f"{c.least_arch} or newer",)),)
    if p.kind not in c.kinds:
        return (Refusal("kind", "kind", p.kind, _sorted(c.kinds, KINDS)),)
    found: list[Refusal] = []
    if device.index is not None:  # a device of this machine, not one that is only talked about
        found += [Refusal("missing", "module", name, ("installed",)) for name in sorted(c.needs) if not installed(name)]
    if c.nonempty and 0 in (size.batch, size.seqlen_q, size.seqlen_k):
        found.append(
            Refusal("size", "batch, seqlen_q, seqlen_k", (size.batch, size.seqlen_q, size.seqlen_k), ("from 1",))
        )
    if (p.dtype, p.dtype_kv) not in c.dtypes:
        found.append(
            Refusal("dtype", "dtype", f"{p.dtype}/{p.dtype_kv}", tuple(f"{a}/{b}" for a, b in sorted(c.dtypes)))
        )
    usual = "bf16" if p.dtype.startswith("fp8") else p.dtype
    if p.dtype_out not in (c.dtypes_out or {usual}):
        found.append(Refusal("dtype_out", "out_dtype", p.dtype_out, _sorted(c.dtypes_out) or (usual,)))
    if not c.head_dim.admits(p.head_dim):
        found.append(Refusal("head_dim", "head_dim", p.head_dim, (c.head_dim,)))
    if not c.head_dim_v.admits(p.head_dim_v):
        found.append(Refusal("head_dim_v", "head_dim_v", p.head_dim_v, (c.head_dim_v,)))
    if c.same_head_dim and p.head_dim != p.head_dim_v:
        found.append(Refusal("head_dim_v", "head_dim_v", p.head_dim_v, (p.head_dim,)))
    if p.kind in c.as_it_lies and not p.direct:
        found.append(Refusal("layout", "strides of q, k or v", "given", ("vectors at multiples of 16 bytes",)))
    if p.page_size % c.page_size_multiple_of:
        found.append(Refusal("layout", "page_size", p.page_size, (f"multiples of {c.page_size_multiple_of}",)))
    used = p.features()
    found += [
        Refusal("feature", name, "given", _sorted(c.features, FEATURES)) for name in used if name not in c.features
    ]
    if c.lowers:
        found += [Refusal("operation", role, what, ("see help(xattn.attention)",)) for role, what in p.unlowered]
    found += [
        Refusal("grad", name, "gradient asked for", _sorted(c.grads, GRADS)) for name in p.grads if name not in c.grads
    ]
    if p.grads and p.deterministic and not c.deterministic:
        found.append(Refusal("deterministic", "deterministic", True, (False,)))
    if c.only_with and not c.only_with & set(used):
        found.append(Refusal("plain", "features", ", ".join(used) or "none", _sorted(c.only_with, FEATURES)))
    return tuple(found)


def _sorted(names: frozenset[str], order: tuple[str, ...] = ()) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda n: (order.index(n) if n in order else len(order), n)))


def is_at_least(device: Device, arch: str) -> bool:
    """Whether an NVIDIA device's architecture is ``arch`` or newer."""
    return device.arch.startswith("sm_") and int(device.arch[3:]) >= int(arch[3:])


@cache
def installed(module: str) -> bool:
    """Whether a module (of a package: "cuda.bindings") can be imported. Its parent is imported to find out."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
