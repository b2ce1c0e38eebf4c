"""Environment variables: what is taken, what is refused, and that none is read elsewhere."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import xattn
from xattn import cli, settings

PACKAGE = Path(xattn.__file__).parent


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in [*settings.VARIABLES, "XDG_CACHE_HOME"]:
        monkeypatch.delenv(name, raising=False)


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings.cache_dir() == tmp_path / ".cache" / "xattn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert settings.cache_dir() == tmp_path / "xdg" / "xattn"
    monkeypatch.setenv("XATTN_CACHE_DIR", "~/own")
    assert settings.cache_dir() == tmp_path / "own"
    monkeypatch.setenv("XATTN_CACHE_DIR", "")
    assert settings.cache_dir() == tmp_path / "xdg" / "xattn"
    assert not list(tmp_path.iterdir()), "asking created something"


@pytest.mark.parametrize("value", ["~nouser/x", "~nouser", None])
def test_a_cache_without_a_home(monkeypatch, value):
    """The folder itself may be absent; the home that its name needs may not."""
    if value is not None:
        monkeypatch.setenv("XATTN_CACHE_DIR", value)
    else:

        def home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", home)
        settings.check()  # nothing is wrong with a variable
    with pytest.raises(ValueError, match=r"^XATTN_CACHE_DIR is .*; allowed: a folder"):
        settings.cache_dir()


BAD = {"XATTN_CACHE_DIR": "~nouser/x", "XATTN_LOG_LEVEL": "LOUD", "XATTN_VALIDATE": "foo", "XATTN_ARCHS": "sm_90,sm_²"}
COMMANDS = (
    ("info",),
    ("info", "--json"),
    ("info", "--images"),
    ("info", "--matrix"),
    ("explain", "--q", "1,1,1,8"),
    ("check", "--device", "cpu"),
    ("bench", "--device", "cpu"),
    ("build", "--out", "never-made"),
    ("demo",),
)


def test_every_variable_can_be_wrong():
    assert set(BAD) == set(settings.VARIABLES)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_ends_at_once_where_a_variable_is_wrong(monkeypatch, capsys, command, name):
    monkeypatch.setenv(name, BAD[name])
    assert cli.main(command) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"xattn {command[0]}: {name} ") and "; allowed" in err
    assert not Path("never-made").exists()


@pytest.mark.parametrize("text, level", [("", None), ("debug", "DEBUG"), ("INFO", "INFO"), ("Critical", "CRITICAL")])
def test_log_level(monkeypatch, text, level):
    monkeypatch.setenv("XATTN_LOG_LEVEL", text)
    assert settings.log_level() == level


@pytest.mark.parametrize("text", ["LOUD", "loud", "10", " INFO"])
def test_log_level_refuses(monkeypatch, text):
    monkeypatch.setenv("XATTN_LOG_LEVEL", text)
    with pytest.raises(
        ValueError, match=f"XATTN_LOG_LEVEL is {text!r}; allowed: DEBUG, INFO, WARNING, ERROR, CRITICAL"
    ):
        settings.log_level()


@pytest.mark.parametrize(
    "text, archs", [(None, ()), ("", ()), ("sm_90", ("sm_90",)), (" sm_90 ,gfx942,, ", ("sm_90", "gfx942"))]
)
def test_archs(monkeypatch, text, archs):
    if text is not None:
        monkeypatch.setenv("XATTN_ARCHS", text)
    assert settings.archs() == archs


def test_validate_on_device(monkeypatch):
    assert settings.validate_on_device() is False
    monkeypatch.setenv("XATTN_VALIDATE", "")
    assert settings.validate_on_device() is False
    monkeypatch.setenv("XATTN_VALIDATE", "device")
    assert settings.validate_on_device() is True
    for text in ("1", "true", "Device", "none"):
        monkeypatch.setenv("XATTN_VALIDATE", text)
        with pytest.raises(ValueError, match=f"XATTN_VALIDATE is '{text}'; allowed: 'device' or unset"):
            settings.validate_on_device()


def test_validate_reaches_a_call(monkeypatch):
    import torch

    q = torch.randn(1, 2, 1, 16)
    monkeypatch.setenv("XATTN_VALIDATE", "device")
    assert xattn.attention(q, q, q).shape == q.shape
    monkeypatch.setenv("XATTN_VALIDATE", "everything")
    with pytest.raises(ValueError, match="XATTN_VALIDATE"):
        xattn.attention(q, q, q)


def test_visible_devices(monkeypatch):
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert settings.visible_devices() == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert settings.visible_devices() == {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_log_level_sets_the_logger():
    code = "import logging, xattn; print(logging.getLogger('xattn').level)"
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "XATTN_LOG_LEVEL": "debug"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "10", done.stderr


@pytest.mark.parametrize(
    "level, before, printed",
    [("debug", "", 1), ("info", "", 0), ("debug", "logging.basicConfig()", 1), ("debug", "LATER", 1)],
)
def test_a_log_level_is_heard(level, before, printed):
    """On stderr, once, whether the application sets up logging or not."""
    later = "import logging; logging.basicConfig()" if before == "LATER" else ""
    call = "q = torch.ones(1, 2, 1, 8); xattn.attention(q, q, q)"
    code = f"import logging, torch\n{'' if later else before}\nimport xattn\n{later}\n{call}"
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "XATTN_LOG_LEVEL": level}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("plan: attention")) == (0, printed), done.stderr


def test_variables_are_read_here_only():
    """No other module of the package reads the environment; setting a variable for another package is no reading."""
    guilty = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == PACKAGE / "settings.py":
            continue
        tree = ast.parse(path.read_text())
        written = [n.value for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
        for node in ast.walk(tree):
            if node in written:
                continue
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in ("environ", "getenv", "environb"):
                guilty.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not guilty


def test_every_variable_read_is_listed():
    tree = ast.parse((PACKAGE / "settings.py").read_text())
    words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert {w for w in words if w.startswith("XATTN_") and w.isupper() and " " not in w} == set(settings.VARIABLES)
    assert all(settings.VARIABLES.values())
