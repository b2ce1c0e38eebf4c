"""xattn: one attention API for fleets that mix NVIDIA and AMD GPUs. Importing needs no GPU and creates no context."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .api import (
    attention,
    attention_paged,
    attention_varlen,
    batch_invariant,
    check_errors,
    merge_states,
)
from .capability import Refusal
from .device import Device
from .dispatch import Plan
from .errors import DeviceValueError, FallbackWarning, OutOfPagesError, UnsupportedError
from .fusion import Epilogue, epilogues
from .kv_layout import KVLayout, convert_page_table, convert_pages
from .paged import PagedKVCache
from .questions import Capabilities, capabilities, devices, explain, supported
from .rotary import Rotary

if TYPE_CHECKING:
    from .distributed import context_parallel, context_parallel_shard, context_parallel_unshard


def __getattr__(name: str) -> Any:
    """What is imported where it is used: the drop-ins, whose libraries are large and may be absent, and context
    parallelism, which brings torch's compiler along."""
    if name == "compat":
        return import_module(".compat", __name__)
    if name.startswith("context_parallel") and name in __all__:
        return getattr(import_module(".distributed", __name__), name)
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
