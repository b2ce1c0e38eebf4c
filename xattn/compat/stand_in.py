"""Puts modules in place of a library's, so that code which imports it gets them, and takes them away again."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_replaced: dict[str, dict[str, ModuleType]] = {}  # by library: what stood in sys.modules


def put(library: str, distribution: str, version: str, file: str, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """``modules``: the names of each module, by its own ("" is the library itself, which has ``version`` too). Other
    modules of the library cannot be imported meanwhile, whether it is installed or not; ``distribution`` is found by
    importlib.metadata. A second call changes nothing."""
    if library in _replaced:
        return
    made: dict[str, ModuleType] = {}
    for part, names in modules.items():
        name = f"{library}.{part}" if part else library
        module = ModuleType(name, f"{name} as {file} offers it.")
        module.__spec__ = ModuleSpec(name, None, origin=file, is_package=not part)
        module.__file__ = file
        if not part:
            module.__path__ = []
        module.__dict__.update({"__version__": version} if not part else {}, __all__=list(names), **names)
        made[name] = module
    for name, module in made.items():
        if name != library:
            setattr(made[library], name.removeprefix(f"{library}."), module)
    _replaced[library] = _pop(library)
    sys.modules.update(made)
    sys.meta_path.insert(0, _Finder(library, distribution, version))


def remove(library: str) -> None:
    """What stood in sys.modules before ``put`` stands there again. Names that were imported meanwhile stay."""
    if library in _replaced:
        sys.meta_path[:] = [f for f in sys.meta_path if not (isinstance(f, _Finder) and f.library == library)]
        _pop(library)
        sys.modules.update(_replaced.pop(library))


def _pop(library: str) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == library or name.startswith(f"{library}.")]
    return {name: sys.modules.pop(name) for name in names}


class _Distribution(importlib.metadata.Distribution):
    """The metadata by which packages are asked for."""

    def __init__(self, library: str, name: str, version: str):
        self.files_read = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{library}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self.files_read.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class _Finder(importlib.metadata.DistributionFinder):
    """Finds that distribution and no module: what is not in sys.modules is not offered."""

    def __init__(self, library: str, distribution: str, version: str):
        self.library, self.distribution, self.version = library, distribution, version

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        if name is None or name.lower().replace("_", "-").replace(".", "-") == self.distribution:
            yield _Distribution(self.library, self.distribution, self.version)
