"""Kernel images: compiled code objects, addressed by what they are made from, and the store that finds them.

An image is looked for in the wheel, then in the user's cache directory; what is in neither is compiled (jit.py) and put
into the cache. Files appear by an atomic rename and carry a checksum, so that any number of processes may start at once
and a file cut short is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from . import settings

log = logging.getLogger("xattn")

PARAMS_VERSION = 6  # kParamsVersion of csrc_cuda/kernels/params.h
KINDS = ("cubin", "ptx", "hsaco", "host")  # of code
_MAGIC = b"XATTN-IMAGE-1\n"
_SUFFIX = ".image"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
CONFIG_HEADER = "config.h"

ConfigValue = int | bool | str


class Source(str):
    """The source of what a user's functions are in a kernel: the struct UserFunctions. ``scores``: whether they change
    scores."""

    scores = True


@dataclass(frozen=True)
class ImageSpec:
    """What an image is made from. ``entry``: the source file, relative to a source root; ``config``: fields of its
    Config struct, by name.

    Values: numbers and booleans become constants, the fields "element" (fp16, bf16, e4m3) and "cache" (those, e4m3fnuz)
        types, a Source stands ahead of Config, other strings are enumerators of ``attn_mask``.
    """

    entry: str
    config: tuple[tuple[str, ConfigValue], ...]
    arch: str  # "sm_80", "sm_90a", "compute_80" (PTX), "gfx942", "host"

    def header(self) -> str:
        """The text of config.h."""
        lines, functions = [], ""
        for name, value in self.config:
            if isinstance(value, Source):
                functions = value
            elif name in ("element", "cache"):
                lines.append(f"    using {name.capitalize()} = {value};")
            elif isinstance(value, bool):
                lines.append(f"    static constexpr bool {name} = {str(value).lower()};")
            elif isinstance(value, int):
                lines.append(f"    static constexpr int {name} = {value};")
            else:
                lines.append(f"    static constexpr Mask {name} = Mask::{value};")
        if "dropout" not in dict(self.config):
            lines.append("    static constexpr bool dropout = false;")
        lines.append(f"    using Functions = {'UserFunctions' if functions else 'NoFunctions'};")
        body = functions + "struct Config {\n" + "\n".join(lines) + "\n};\n"
        return f"#pragma once\nnamespace xattn {{\n{body}}}  // namespace xattn\n"

    def key(self) -> str:
        """The address: a hash of the sources as they are compiled (hipified for AMD), the configuration, the
        architecture and the parameter block's version."""
        parts = [
            str(PARAMS_VERSION),
            self.arch,
            self.header(),
            *(f"{n}\n{text}" for n, text in sources(self.entry, self.arch).items()),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def name(self) -> str:
        """For people: entry and configuration in one line."""
        values = ", ".join(f"{n}={_word(v)}" for n, v in self.config)
        return f"{self.entry} [{values}] for {self.arch}"


def _word(value: ConfigValue) -> str:
    """A value in a name; of a source its hash."""
    return hashlib.sha256(value.encode()).hexdigest()[:12] if isinstance(value, Source) else str(value)


@dataclass(frozen=True)
class Image:
    """A compiled image. ``kind``: one of KINDS; ``compiler`` and ``log`` serve messages, not the
    address."""

    key: str
    arch: str
    kind: str
    name: str
    compiler: str
    code: bytes = field(repr=False)
    log: str = field(default="", repr=False)
    path: str = ""

    def made(self) -> tuple[str, str]:
        """Address and compiler: which of the images of one address it is."""
        return self.key, self.compiler

    def words(self) -> str:
        """Entry and configuration as a table shows them: "arch/sm80/forward.cu: bf16, head_dim 128, tile 128x64"."""
        entry, _, rest = self.name.partition(" [")
        config = dict(pair.split("=", 1) for pair in rest.partition("]")[0].split(", ") if "=" in pair)
        head_dim, head_dim_v = config.get("head_dim", ""), config.get("head_dim_v", "")
        element, cache = config.get("element", ""), config.get("cache", "")
        parts = [element if cache in ("", element) else f"{element}, cache {cache}"]
        if head_dim:
            parts.append(f"head_dim {head_dim}" + (f", v {head_dim_v}" if head_dim_v not in ("", head_dim) else ""))
            parts.append(f"tile {config.get('tile_m', '')}x{config.get('tile_n', '')}")
        parts += [name for name, value in config.items() if value == "True"]
        parts += [f"functions {name}" for name in [config.get("functions", "")] if name]
        parts += [f"attn_mask {mask}" for mask in [config.get("attn_mask", "none")] if mask != "none"]
        return f"{entry}: {', '.join(filter(None, parts))}" if config else self.name


@dataclass(frozen=True)
class StoredFile:
    """A file of a store. ``place``: "wheel" or "cache"; ``image`` is None where it is broken, and ``fault`` says
    how; ``modified`` is in seconds since 1970."""

    place: str
    path: Path
    size: int
    modified: float
    image: Image | None
    fault: str = ""


class ImageError(RuntimeError):
    """A file that should hold an image does not."""


# ---------------------------------------------------------------- sources
def source_roots() -> list[Path]:
    """Where kernel sources lie: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    inside = [package / "csrc_cuda", package / "csrc_hip"]
    beside = [package.parent / "csrc_cuda", package.parent / "csrc_hip"]
    return [p for p in (*inside, *beside) if p.is_dir()]


@lru_cache(maxsize=64)
def sources(entry: str, arch: str) -> Mapping[str, str]:
    """Name and text of the entry and of all headers it includes, in the order of their names. config.h is left out.

    For AMD the shared tree is hipified here, always: a folder written earlier (csrc_hip/hipified) may be out of date.
    """
    change = _hipify() if arch.startswith("gfx") else None
    found: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name in found or name == CONFIG_HEADER:
            continue
        text = _read(name)
        found[name] = change(text) if change and name.startswith("kernels/") else text
        waiting += _INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


def _read(name: str) -> str:
    for root in source_roots():
        if (root / name).is_file():
            return (root / name).read_text()
    raise FileNotFoundError(
        f"kernel source {name} is not in {', '.join(map(str, source_roots())) or 'any source folder'}"
    )


@lru_cache(maxsize=1)
def _hipify() -> Callable[[str], str]:
    """The function of csrc_hip/hipify.py: it travels with the sources and is a program too, so it is loaded by path."""
    path = next((p for root in source_roots() if (p := root / "hipify.py").is_file()), None)
    spec = spec_from_file_location("xattn_hipify", path) if path else None
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"hipify.py is not in {', '.join(map(str, source_roots())) or 'any source folder'}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.hipify


# ---------------------------------------------------------------- files
def encode(image: Image) -> bytes:
    """The bytes of an image's file: magic, one line of JSON, the code."""
    about = {k: v for k, v in asdict(image).items() if k not in ("code", "path")}
    about |= {"size": len(image.code), "sha256": hashlib.sha256(image.code).hexdigest()}
    return _MAGIC + json.dumps(about).encode() + b"\n" + image.code


def decode(data: bytes, path: str = "") -> Image:
    """The image in a file's bytes; ImageError where they are cut short, changed, or something else."""
    if not data.startswith(_MAGIC):
        raise ImageError(f"{path}: not an image of this version")
    line, separator, code = data[len(_MAGIC) :].partition(b"\n")
    try:
        about = json.loads(line)
        if not isinstance(about, dict):
            raise TypeError(f"it is a {type(about).__name__}")
        size, digest = about.pop("size"), about.pop("sha256")
        image = Image(code=code, path=path, **about)
        _check_description(image)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ImageError(f"{path}: its description cannot be read ({error})") from error
    if not separator or len(code) != size or hashlib.sha256(code).hexdigest() != digest:
        raise ImageError(f"{path}: {len(code)} of {size} bytes, or changed")
    return image


def _check_description(image: Image) -> None:
    """The checksum is that of the code alone."""
    for name in ("key", "arch", "kind", "name", "compiler", "log"):
        if not isinstance(getattr(image, name), str):
            raise TypeError(f"{name} is {getattr(image, name)!r}")
    if image.kind not in KINDS:
        raise ValueError(f"kind is {image.kind!r}; there are {', '.join(KINDS)}")


class Store:
    """Images by key: folders that are only read (the wheel's), and one that is written to (the user's cache)."""

    def __init__(self, shipped: tuple[Path, ...] | None = None, cache: Path | None = None):
        self.shipped = (Path(__file__).parent / "images",) if shipped is None else shipped
        self.cache = settings.cache_dir() / "images" if cache is None else cache

    def find(self, spec: ImageSpec, refused: Container[tuple[str, str]] = ()) -> Image | None:
        """The image of ``spec``, or None. A broken file in the cache is removed; one in the wheel is reported and
        passed over, and so is, silently, what is among ``refused`` (see Image.made)."""
        key = spec.key()
        for folder in (*self.shipped, self.cache):
            path = folder / spec.arch / f"{key}{_SUFFIX}"
            try:
                data = path.read_bytes()
            except OSError:
                continue
            try:
                image = decode(data, str(path))
                if (image.key, image.arch) != (key, spec.arch):
                    raise ImageError(f"{path}: holds {image.name} for {image.arch}")
                if image.made() not in refused:
                    return image
            except ImageError as error:
                log.warning("image passed over: %s", error)
                if folder == self.cache:
                    with contextlib.suppress(OSError):  # a disk that is only read: it is passed over each time
                        path.unlink()
        return None

    def put(self, image: Image) -> Path | None:
        """Writes an image into the cache; None, and a warning, where that cannot be done (the caller has the image all
        the same)."""
        try:
            return publish(image, self.cache)
        except OSError as error:
            log.warning("image not kept: %s (%s); it is compiled again next time", image.name, error)
            return None

    def files(self) -> Iterator[StoredFile]:
        """Every file that should hold an image, those of the wheel first; nothing is removed."""
        for place, folder in (*(("wheel", f) for f in self.shipped), ("cache", self.cache)):
            for path in listed(folder):
                size, modified, fault = 0, 0.0, ""
                image: Image | None = None
                try:
                    size, modified = (about := path.stat()).st_size, about.st_mtime
                    found = decode(path.read_bytes(), str(path))
                    if (path.parent.name, path.stem) != (found.arch, found.key):
                        raise ImageError(f"{path}: holds {found.name}")
                    image = found
                except (OSError, ImageError) as error:
                    fault = str(error)
                yield StoredFile(place, path, size, modified, image, fault)

    def __iter__(self) -> Iterator[Image]:
        """All readable images, those of the wheel first."""
        for file in self.files():
            if file.image is None:
                log.warning("image passed over: %s", file.fault)
            else:
                yield file.image


def listed(folder: Path) -> list[Path]:
    """The files of a store's folder; none where it cannot be listed, or its name cannot be one."""
    try:
        return sorted(folder.glob(f"*/*{_SUFFIX}"))
    except OSError:
        return []


def publish(image: Image, folder: Path, mode: int = 0o700) -> Path:
    """Writes an image's file under ``folder``/arch: the whole of it appears at once, or nothing.

    A cache holds code that its user runs: it is private to them. ``mode`` (of folders; files have it without the right
    to execute) opens what is built for others.
    """
    target = folder / image.arch / f"{image.key}{_SUFFIX}"
    folder.mkdir(parents=True, exist_ok=True, mode=mode)
    target.parent.mkdir(exist_ok=True, mode=mode)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encode(image))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode & 0o666)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target
