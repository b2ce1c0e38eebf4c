"""Which images a wheel ships: rows of data (ci/images.toml) that select among all that the backends name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .backends import REGISTRY, Backend
from .images import ConfigValue, ImageSpec

# Built where no set names others: the architectures of the wheels, and PTX for those yet unknown.
ARCHS = ("sm_80", "compute_80", "sm_90a", "gfx90a", "gfx942", "gfx950")


@dataclass(frozen=True)
class Row:
    """Ships the images of ``backends`` (empty: of all) whose configuration agrees.

    ``values`` gives the allowed values of fields that an image must have; one that it does not name must be as in a
    plain call.
    ``head_dims``: pairs; empty: all with head_dim = head_dim_v. Images that serve all head dimensions are taken.
    """

    backends: tuple[str, ...] = ()
    head_dims: tuple[tuple[int, int], ...] = ()
    values: Mapping[str, tuple[ConfigValue, ...]] | None = None

    def takes(self, backend: str, spec: ImageSpec) -> bool:
        config, values = dict(spec.config), self.values or {}
        if (self.backends and backend not in self.backends) or not values.keys() <= config.keys():
            return False
        dims = (config.get("head_dim"), config.get("head_dim_v"))  # an image without them serves all
        if dims[0] is not None and (dims not in self.head_dims if self.head_dims else dims[0] != dims[1]):
            return False
        return all(value in values[name] if name in values else _is_plain(name, config) for name, value in spec.config)


def _is_plain(name: str, config: Mapping[str, ConfigValue]) -> bool:
    value = config[name]
    if name == "cache":  # holds what q does
        return value == config["element"]
    return value == "none" if name == "attn_mask" else value is not True or name == "keep_q"


@dataclass(frozen=True)
class ShippedSet:
    """``archs`` are those built where none are named; ``origin`` says where the set comes from."""

    rows: tuple[Row, ...]
    archs: tuple[str, ...] = ARCHS
    origin: str = "built in: plain calls, every head dimension"

    def specs(self, arch: str, registry: Sequence[Backend] = REGISTRY) -> list[ImageSpec]:
        """The images shipped for ``arch``, each once; empty where no backend has any."""
        named = ((b.name, spec) for b in registry for spec in b.images(arch))
        return list(dict.fromkeys(spec for name, spec in named if any(row.takes(name, spec) for row in self.rows)))


BUILT_IN = ShippedSet((Row(),))


def everything(arch: str, registry: Sequence[Backend] = REGISTRY) -> list[ImageSpec]:
    """All images that any backend may ask for on ``arch``."""
    return list(dict.fromkeys(spec for b in registry for spec in b.images(arch)))


def known(arch: str, registry: Sequence[Backend] = REGISTRY) -> bool:
    """Whether any backend has images for ``arch``."""
    return any(next(iter(b.images(arch)), None) is not None for b in registry)


def default() -> ShippedSet:
    """The set of the checkout (ci/images.toml), or the built-in one where xattn is installed without its checkout."""
    path = Path(__file__).parents[1] / "ci" / "images.toml"
    return load(path) if path.is_file() else BUILT_IN


def load(path: Path) -> ShippedSet:
    """The set of a file. ValueError, with the file's name, for what is not understood: nothing in it is ignored."""
    try:
        return _parse(_toml(path.read_text()), str(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from error


def _toml(text: str) -> dict[str, Any]:
    reader = next((name for name in ("tomllib", "tomli") if find_spec(name)), None)
    if reader is None:
        raise ValueError("Python 3.10 reads TOML with tomli only: pip install 'xattn[cli]'")
    return import_module(reader).loads(text)


def _parse(data: dict[str, Any], origin: str) -> ShippedSet:
    unknown = sorted(data.keys() - {"archs", "images"})
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not understood; allowed: archs, images")
    archs = data.get("archs", list(ARCHS))
    if not _all(archs, str):
        raise ValueError(f"archs: got {archs!r}; allowed: a list of names")
    images = data.get("images", [])
    if not images or not _all(images, dict):
        raise ValueError("images: there is no [[images]] row")
    rows = []
    for n, table in enumerate(images, 1):
        try:
            rows.append(_row(table))
        except ValueError as error:
            raise ValueError(f"row {n} of images: {error}") from error
    return ShippedSet(tuple(rows), tuple(archs), origin)


def _row(table: dict[str, Any]) -> Row:
    table = dict(table)
    names = table.pop("backends", [])
    known = {b.name: b for b in REGISTRY}
    if not _all(names, str) or not set(names) <= known.keys():
        raise ValueError(f"backends: got {names!r}; allowed: a list of {', '.join(known)}")
    pairs = table.pop("head_dims", [])
    if not (_all(pairs, list) and all(len(p) == 2 and _all(p, int) for p in pairs)):
        raise ValueError(f"head_dims: got {pairs!r}; allowed: pairs [head_dim, head_dim_v]")
    values = {name: tuple(v) if isinstance(v, list) else (v,) for name, v in table.items()}
    row = Row(tuple(names), tuple((p[0], p[1]) for p in pairs), values)
    _must_select(row, [known[n] for n in names] or list(REGISTRY))
    return row


def _must_select(row: Row, backends: list[Backend]) -> None:
    """Every value that a row names must be one of some image: a misspelt one would silently ship nothing."""
    fields: dict[str, set[ConfigValue]] = {}
    pairs: set[tuple[ConfigValue, ConfigValue]] = set()
    for spec in (spec for b in backends for arch in ARCHS for spec in b.images(arch)):
        for name, value in spec.config:
            fields.setdefault(name, set()).add(value)
        config = dict(spec.config)
        if "head_dim" in config:
            pairs.add((config["head_dim"], config["head_dim_v"]))
    for name, wanted in (row.values or {}).items():
        if name not in fields:
            raise ValueError(f"{name}: no image has this field; there are {', '.join(fields)}")
        for value in wanted:
            if not any(value == v and type(value) is type(v) for v in fields[name]):
                allowed = ", ".join(map(str, sorted(fields[name], key=str)))
                raise ValueError(f"{name}: got {value!r}; allowed: {allowed}")
    for pair in row.head_dims:
        if pair not in pairs:
            raise ValueError(f"head_dims: got {list(pair)}; no image has these head dimensions")


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(v) is kind for v in values)
