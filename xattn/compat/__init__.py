"""Drop-ins for what other libraries call: each module keeps the other library's arguments and their meaning."""

from importlib import import_module
from types import ModuleType

_MODULES = ("flash_attn", "sdpa", "transformers", "transformers_cache")


def __getattr__(name: str) -> ModuleType:
    """A module, imported where it is used."""
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
