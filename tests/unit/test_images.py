"""The image store: addresses, files that are whole or nothing, broken files, folders that cannot be written to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from xattn import images
from xattn.images import Image, ImageError, ImageSpec, Store

SPEC = ImageSpec("arch/sm80/forward.cu", (("element", "bf16"), ("head_dim", 64), ("softcap", False)), "sm_80")


def image(spec: ImageSpec = SPEC, code: bytes = b"code") -> Image:
    return Image(spec.key(), spec.arch, "cubin", spec.name(), "a compiler 1.0", code)


def store(tmp_path) -> Store:
    return Store(shipped=(tmp_path / "shipped",), cache=tmp_path / "cache")


def test_a_put_image_is_found_and_private(tmp_path):
    s = store(tmp_path)
    assert s.find(SPEC) is None
    path = s.put(image())
    assert replace(s.find(SPEC), path="") == image()
    assert [i.key for i in s] == [SPEC.key()]
    assert os.stat(path.parent).st_mode & 0o077 == 0 and os.stat(path.parent.parent).st_mode & 0o077 == 0
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_wheel_comes_first(tmp_path):
    s = store(tmp_path)
    images.publish(image(code=b"shipped"), tmp_path / "shipped")
    s.put(image(code=b"cached"))
    assert s.find(SPEC).code == b"shipped"


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, arch="sm_90"),
        replace(SPEC, entry="arch/cdna/forward.hip"),
        replace(SPEC, config=(*SPEC.config[:-1], ("softcap", True))),
    ],
    ids=["arch", "source", "config"],
)
def test_the_address_tells_apart(other):
    assert other.key() != SPEC.key()


def test_the_address_depends_on_every_header(monkeypatch):
    before, text = SPEC.key(), dict(images.sources(SPEC.entry, SPEC.arch))
    assert "kernels/softmax.h" in text and images.CONFIG_HEADER not in text
    text["kernels/softmax.h"] += "\n"
    monkeypatch.setattr(images, "sources", lambda entry, arch: text)
    assert SPEC.key() != before
    monkeypatch.undo()
    monkeypatch.setattr(images, "PARAMS_VERSION", images.PARAMS_VERSION + 1)
    assert SPEC.key() != before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d[:-1],
        lambda d: d[:20],
        lambda d: b"",
        lambda d: d[:-1] + b"x",
        lambda d: b"x" + d,
        lambda d: d + b"x",
    ],
    ids=["last byte", "header", "empty", "changed", "magic", "longer"],
)
def test_a_broken_file_is_noticed_and_removed(tmp_path, caplog, spoil):
    s = store(tmp_path)
    path = s.put(image())
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ImageError):
        images.decode(path.read_bytes())
    assert s.find(SPEC) is None and not path.exists() and "passed over" in caplog.text


def described(**changes) -> bytes:
    """The file of an image whose description is changed."""
    head, line, code = images.encode(image()).split(b"\n", 2)
    return b"\n".join([head, json.dumps(json.loads(line) | changes).encode(), code])


@pytest.mark.parametrize(
    "data",
    [
        *(b"XATTN-IMAGE-1\n%b\ncode" % line for line in (b"null", b"3", b'"text"', b"[]", b"[" * 100_000)),
        *(described(**{n: 5}) for n in ("key", "arch", "kind", "name", "compiler", "log", "size", "sha256", "new")),
        *(described(**{n: None}) for n in ("name", "compiler", "log")),
        described(kind="cubjn"),
    ],
    ids=lambda data: data.split(b"\n")[1][:40].decode(),
)
def test_a_description_that_is_none(tmp_path, data):
    """Whatever a file says of itself, it is an image or passed over."""
    s = store(tmp_path)
    path = s.put(image())
    path.write_bytes(data)
    assert [f.image for f in s.files()] == [None] and list(s) == []
    assert s.find(SPEC) is None and not path.exists()


def test_a_broken_file_on_a_disk_that_is_only_read(tmp_path, caplog, monkeypatch):
    def read_only(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    s = store(tmp_path)
    path = s.put(image())
    path.write_bytes(b"broken")
    monkeypatch.setattr(os, "unlink", read_only)
    assert s.find(SPEC) is None and path.exists() and "passed over" in caplog.text


def test_a_folder_whose_name_cannot_be_one(tmp_path):
    s = Store(shipped=(), cache=tmp_path / ("long" * 100))
    assert s.put(image()) is None and s.find(SPEC) is None and list(s) == []


def test_an_image_under_a_wrong_name_is_not_taken(tmp_path):
    s = store(tmp_path)
    other = replace(SPEC, arch="sm_90")
    path = s.put(image(other))
    target = path.parent.parent / "sm_80" / f"{SPEC.key()}.image"
    target.parent.mkdir()
    target.write_bytes(path.read_bytes())
    assert s.find(SPEC) is None


def test_a_disk_that_takes_nothing(tmp_path, caplog, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    s = store(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    assert s.put(image()) is None and "No space left" in caplog.text
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    (tmp_path / "file").write_text("")
    assert Store(shipped=(), cache=tmp_path / "file").put(image()) is None


def test_a_refused_image_is_passed_over_and_kept(tmp_path):
    """The next one of that address is taken."""
    s = store(tmp_path)
    images.publish(image(code=b"shipped"), tmp_path / "shipped")
    s.put(replace(image(code=b"cached"), compiler="another compiler"))
    assert s.find(SPEC, {(SPEC.key(), "a compiler 1.0")}).code == b"cached"
    assert s.find(SPEC, {(SPEC.key(), "a compiler 1.0"), (SPEC.key(), "another compiler")}) is None
    assert len(list(s)) == 2


def test_files_of_a_store(tmp_path):
    """Broken ones too, and nothing is removed."""
    s = store(tmp_path)
    shipped = images.publish(image(), tmp_path / "shipped")
    cached = s.put(image())
    cached.write_bytes(cached.read_bytes()[:-1])
    stray = cached.with_name("0" * 32 + ".image")
    stray.write_bytes(shipped.read_bytes())
    files = {f.path: f for f in s.files()}
    assert [f.place for f in s.files()] == ["wheel", "cache", "cache"]
    assert files[shipped].image.code == b"code" and files[shipped].fault == ""
    assert files[cached].image is None and "3 of 4 bytes" in files[cached].fault
    assert files[stray].image is None and "holds arch/sm80/forward.cu" in files[stray].fault
    assert all(f.size == f.path.stat().st_size and f.modified == f.path.stat().st_mtime for f in files.values())
    assert [i.path for i in s] == [str(shipped)]


def test_a_configuration_in_words():
    config = (("element", "fp16"), ("head_dim", 192), ("head_dim_v", 128), ("tile_m", 64), ("tile_n", 32))
    config += (("num_warps", 4), ("softcap", True), ("alibi", False), ("attn_mask", "added16"))
    words = image(replace(SPEC, config=config)).words()
    assert words == "arch/sm80/forward.cu: fp16, head_dim 192, v 128, tile 64x32, softcap, attn_mask added16"
    plain = (("element", "bf16"), ("head_dim", 64), ("head_dim_v", 64), ("tile_m", 8), ("tile_n", 8))
    assert image(replace(SPEC, config=plain)).words() == "arch/sm80/forward.cu: bf16, head_dim 64, tile 8x8"
    assert replace(image(), name="something else").words() == "something else"


MANY = """
import sys
from dataclasses import replace
from pathlib import Path
from xattn.images import Image, ImageSpec, Store
spec = ImageSpec("arch/sm80/forward.cu", (("element", "bf16"),), "sm_80")
store = Store(shipped=(), cache=Path(sys.argv[1]))
for _ in range(20):
    store.put(Image(spec.key(), spec.arch, "cubin", spec.name(), "a compiler", bytes(200_000)))
    assert len(store.find(spec).code) == 200_000
"""


def test_many_processes_at_once(tmp_path):
    running = [subprocess.Popen([sys.executable, "-c", MANY, str(tmp_path)]) for _ in range(4)]
    assert [p.wait(120) for p in running] == [0] * 4
