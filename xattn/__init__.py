"""xattn: one attention API for fleets that mix NVIDIA and AMD GPUs. Importing needs no GPU and creates no context."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from .api import (
    Capabilities,
    attention,
    attention_paged,
    attention_varlen,
    batch_invariant,
    capabilities,
    check_errors,
    devices,
    explain,
    merge_states,
    supported,
)
from .capability import Refusal
from .device import Device
from .dispatch import Plan
from .distributed import context_parallel, context_parallel_shard, context_parallel_unshard
from .errors import DeviceValueError, FallbackWarning, OutOfPagesError, UnsupportedError
from .fusion import Epilogue, epilogues
from .kv_layout import KVLayout, convert_page_table, convert_pages
from .paged import PagedKVCache
from .rotary import Rotary


def __getattr__(name: str) -> ModuleType:
    """The drop-ins, imported where they are used: their libraries are large, and may be absent."""
    if name == "compat":
        return import_module(".compat", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


try:
    __version__ = version("xattn")
except PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Capabilities",
    "Device",
    "DeviceValueError",
    "Epilogue",
    "FallbackWarning",
    "KVLayout",
    "OutOfPagesError",
    "PagedKVCache",
    "Plan",
    "Refusal",
    "Rotary",
    "UnsupportedError",
    "attention",
    "attention_paged",
    "attention_varlen",
    "batch_invariant",
    "capabilities",
    "check_errors",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "convert_page_table",
    "convert_pages",
    "devices",
    "epilogues",
    "explain",
    "merge_states",
    "supported",
]
