"""The environment variables of xattn: all of them are read here, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES = {
    "XATTN_CACHE_DIR": "where compiled kernel images and converted models are kept (default: the user's cache folder)",
    "XATTN_LOG_LEVEL": "level of the logger 'xattn', printed to stderr where the application sets up no logging: "
    "DEBUG, INFO, WARNING, ERROR (default: as the application set it)",
    "XATTN_ARCHS": "architectures to build ahead of time, separated by commas",
    "XATTN_VALIDATE": "'device' checks after every call what kernels reported, with a synchronisation",
}

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def cache_dir() -> Path:
    """Folder for everything that can be made again: images, converted models. ValueError where its name needs a home
    folder that is not known."""
    own = os.environ.get("XATTN_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "xattn"
    except RuntimeError as error:
        got = f"is {own!r}" if own else "is not set, and neither is HOME"
        raise ValueError(f"XATTN_CACHE_DIR {got}; allowed: a folder; '~' is the home of a known user") from error


def log_level() -> str | None:
    """The level asked for, or None where the application decides."""
    level = os.environ.get("XATTN_LOG_LEVEL", "")
    if level and level.upper() not in _LOG_LEVELS:
        raise ValueError(f"XATTN_LOG_LEVEL is {level!r}; allowed: {', '.join(_LOG_LEVELS)}")
    return level.upper() or None


def archs() -> tuple[str, ...]:
    """Architectures to build ahead of time; empty where none were named."""
    return tuple(a.strip() for a in os.environ.get("XATTN_ARCHS", "").split(",") if a.strip())


def check() -> None:
    """Raises ValueError that names a variable whose value is wrong, whether or not anything asks for it. Which
    architectures there are is known to those who build."""
    log_level()
    validate_on_device()
    if os.environ.get("XATTN_CACHE_DIR"):
        cache_dir()


# What os.environ keeps, where it keeps it as CPython does.
_VALIDATE = os.fsencode("XATTN_VALIDATE")
_data = getattr(os.environ, "_data", None)
_environment = _data if isinstance(_data, dict) and all(type(name) is bytes for name in _data) else None


def validate_on_device() -> bool:
    """Whether every call is followed by a synchronisation that raises what kernels reported."""
    if _environment is not None and _VALIDATE not in _environment:  # a tenth of the time; this is asked at every call
        return False
    value = os.environ.get("XATTN_VALIDATE", "")
    if value not in ("", "device"):
        raise ValueError(f"XATTN_VALIDATE is {value!r}; allowed: 'device' or unset")
    return value == "device"


def host_compilers() -> tuple[str, ...]:
    """The C++ compiler that the user prefers (CXX), if any."""
    return tuple(filter(None, [os.environ.get("CXX")]))


def visible_devices() -> dict[str, str]:
    """The variables by which a user hides GPUs, as far as they are set."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    return {name: os.environ[name] for name in names if name in os.environ}


def given() -> dict[str, str]:
    """xattn's own variables and those of ``visible_devices``, as far as they are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ} | visible_devices()
