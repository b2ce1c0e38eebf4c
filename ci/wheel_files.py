"""Wheels as files: images and a local version are put into one, and what is in one is held to what should be.

What ci/build_wheels is made of; nothing here compiles or installs.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import tempfile
import zipfile
from collections import Counter
from dataclasses import dataclass
from email.parser import Parser
from itertools import product
from pathlib import Path

LAUNCHER = "xattn/libxattn_launcher.so"
NEEDED = {"libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "libstdc++.so.6"}
EXPORTED = {"xattn_register", "xattn_prepare", "xattn_forget", "xattn_description_bytes"}
MOST_BYTES = 100 << 20  # of a file, as the usual index takes it
_TIME = (1980, 1, 1, 0, 0, 0)  # of every file that is added: equal inputs give equal wheels


@dataclass(frozen=True)
class Contents:
    """What a wheel should hold: ``images`` of each architecture, by number, and the launcher or not."""

    version: str
    images: dict[str, int]
    launcher: bool


def local_version(wheel: Path) -> str:
    """The version in a wheel's name."""
    return wheel.name.split("-")[1]


def assemble(base: Path, out: Path, local: str, images: Path | None, archs: tuple[str, ...]) -> Path:
    """A wheel like ``base`` with a local version ("rocm"), and with the images that the folder ``images`` holds for
    ``archs``. RECORD is written anew. The path of what was made, in the folder ``out``."""
    name, version, *tags = base.name.removesuffix(".whl").split("-")
    new = f"{version}+{local}"
    target = out / "-".join([name, new, *tags])
    target = target.with_name(target.name + ".whl")
    old_info, new_info = f"{name}-{version}.dist-info", f"{name}-{new}.dist-info"
    record: list[str] = []
    with zipfile.ZipFile(base) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made:

        def add(path: str, data: bytes, mode: int = 0o644) -> None:
            entry = zipfile.ZipInfo(path, _TIME)
            entry.external_attr, entry.compress_type = (0o100000 | mode) << 16, zipfile.ZIP_DEFLATED
            made.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(data)}")

        for item in source.infolist():
            if item.is_dir() or item.filename == f"{old_info}/RECORD":
                continue
            data, path = source.read(item), item.filename.replace(old_info, new_info)
            if path == f"{new_info}/METADATA":
                head = re.compile(rb"^Version: .*$", re.MULTILINE)
                data = head.sub(f"Version: {new}".encode(), data, count=1)
            add(path, data, 0o755 if item.external_attr >> 16 & 0o111 else 0o644)
        for arch in archs if images else ():
            assert images is not None
            for file in sorted((images / arch).glob("*.image")):
                add(f"xattn/images/{arch}/{file.name}", file.read_bytes())
        record.append(f"{new_info}/RECORD,,")
        entry = zipfile.ZipInfo(f"{new_info}/RECORD", _TIME)
        entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
        made.writestr(entry, "\n".join(record) + "\n")
    return target


def audit(wheel: Path, wanted: Contents) -> list[str]:
    """What of a wheel is not as it should be, in words: its files, its record, its metadata, its library."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        found = [*_files(names, wanted), *_record(opened), *_metadata(opened, wheel, wanted)]
        if LAUNCHER in names:
            with tempfile.TemporaryDirectory(prefix="xattn-audit-") as folder:
                found += library(Path(opened.extract(LAUNCHER, folder)))
    if wheel.stat().st_size > MOST_BYTES:
        found.append(f"{wheel.stat().st_size} bytes, allowed {MOST_BYTES}")
    return found


def image_counts(wheel: Path) -> dict[str, int]:
    """Images by architecture."""
    with zipfile.ZipFile(wheel) as opened:
        archs = (n.split("/")[2] for n in opened.namelist() if n.startswith("xattn/images/"))
        return dict(sorted(Counter(archs).items()))


def _files(names: list[str], wanted: Contents) -> list[str]:
    found = [f"{name} is there twice" for name, times in Counter(names).items() if times > 1]
    top = {f"xattn-{wanted.version}.dist-info", "xattn"}
    found += [f"{name} is outside the package" for name in names if name.split("/")[0] not in top]
    built = (".pyc", ".o", ".a", ".pyd", ".dll", ".cubin", ".hsaco", ".ptx", ".so")
    found += [f"{name} should not be there" for name in names if name.endswith(built) and name != LAUNCHER]
    if (LAUNCHER in names) != wanted.launcher:
        found.append(f"{LAUNCHER} is {'missing' if wanted.launcher else 'in a pure wheel'}")
    images = Counter(n.split("/")[2] for n in names if n.startswith("xattn/images/"))
    for arch in sorted(images.keys() | wanted.images.keys()):
        if images[arch] != wanted.images.get(arch, 0):
            found.append(f"{images[arch]} images for {arch}, wanted {wanted.images.get(arch, 0)}")
    needed = ("xattn/__init__.py", "xattn/py.typed", "xattn/csrc_cuda/kernels/params.h", "xattn/csrc_hip/hipify.py")
    return found + [f"{name} is missing" for name in needed if name not in names]


def _record(opened: zipfile.ZipFile) -> list[str]:
    name = next((n for n in opened.namelist() if n.endswith(".dist-info/RECORD")), None)
    if name is None:
        return ["there is no RECORD"]
    rows = [line.rsplit(",", 2) for line in opened.read(name).decode().splitlines()]
    found = []
    for path, digest, _ in rows:
        if path == name:
            continue
        if path not in opened.namelist():
            found.append(f"RECORD names {path}, which is not there")
            continue
        actual = base64.urlsafe_b64encode(hashlib.sha256(opened.read(path)).digest()).rstrip(b"=").decode()
        if digest != f"sha256={actual}":
            found.append(f"{path} differs from RECORD")
    missing = set(opened.namelist()) - {row[0] for row in rows}
    return found + [f"RECORD does not name {path}" for path in sorted(missing)]


def _metadata(opened: zipfile.ZipFile, wheel: Path, wanted: Contents) -> list[str]:
    info = f"xattn-{wanted.version}.dist-info"
    if f"{info}/METADATA" not in opened.namelist():
        return [f"there is no {info}/METADATA"]
    metadata = Parser().parsestr(opened.read(f"{info}/METADATA").decode())
    tags = Parser().parsestr(opened.read(f"{info}/WHEEL").decode()).get_all("Tag") or []
    found = []
    if metadata["Version"] != wanted.version or local_version(wheel) != wanted.version:
        found.append(f"version {metadata['Version']} in a file {wheel.name}, wanted {wanted.version}")
    compressed = wheel.name.removesuffix(".whl").split("-")[2:]
    expanded = {"-".join(tag) for tag in product(*(part.split(".") for part in compressed))}
    if set(tags) != expanded:
        found.append(f"tags {sorted(tags)} in a file {wheel.name}")
    if wanted.launcher != any("manylinux" in tag for tag in tags):
        found.append(f"tags {sorted(tags)}, wanted {'manylinux' if wanted.launcher else 'any platform'}")
    found += [
        f"requires {r}: an exact version" for r in metadata.get_all("Requires-Dist") or [] if "==" in r.split(";")[0]
    ]
    return found


def library(path: Path) -> list[str]:
    """What of a launcher is not as it should be: it needs neither torch nor a driver and exports C functions only."""
    done = subprocess.run(
        ["readelf", "--wide", "--dynamic", "--dyn-syms", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode or "Dynamic section" not in done.stdout:
        return [f"the launcher is no shared library: {done.stderr.strip()}"]
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", done.stdout))
    found = [f"the launcher needs {name}" for name in sorted(needed - NEEDED) if not name.startswith("ld-linux")]
    if "libstdc++.so.6" not in needed:  # what it throws goes through torch, which has the same one
        found.append("the launcher has a C++ library of its own: torch could not catch what it throws")
    if re.search(r"\((RPATH|RUNPATH)\)", done.stdout):
        found.append("the launcher has a RUNPATH")
    # "    12: 0000000000003a10   120 FUNC    GLOBAL DEFAULT   14 xattn_prepare"
    symbols = re.findall(r"^\s*\d+:\s\S+\s+\S+\s\w+\s+(\w+)\s+\w+\s+(\w+) ([^\s@]+)", done.stdout, re.MULTILINE)
    strong = set()
    for bind, section, name in symbols:
        if section == "UND":
            if re.match(r"aoti_|torch_|cu[A-Z]|hip[A-Z]|_ZN(2at|3c10|5torch)", name):
                found.append(f"the launcher wants {name} when it is loaded")
        elif "5xattn" in name:
            found.append(f"the launcher shows {name}")
        elif bind == "GLOBAL":
            strong.add(name)
    return found + ([] if strong == EXPORTED else [f"the launcher exports {', '.join(sorted(strong)) or 'nothing'}"])
