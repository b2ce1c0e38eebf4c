"""Where the compilers are: NVIDIA's come with the test extra, on Linux; AMD's is clang, which no package brings."""

from __future__ import annotations

import sys

import pytest
from compile.resources import missing_amd_compiler

collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]


@pytest.fixture(scope="session")
def amd_compiler() -> None:
    missing = missing_amd_compiler()
    if missing:
        pytest.skip(f"no AMD compiler: {missing}")
