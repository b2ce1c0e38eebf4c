"""The fixture of the kernels that run on the CPU."""

from __future__ import annotations

from functools import cache

import pytest
from host.forward_kernel import HostKernel


@pytest.fixture(scope="session")
def kernel(tmp_path_factory):
    """kernel(layer, **config): compiled once for each configuration."""
    folder = tmp_path_factory.mktemp("host-images")

    @cache
    def make(layer: str, config: tuple) -> HostKernel:
        return HostKernel(layer, folder, **dict(config))

    return lambda layer, **config: make(layer, tuple(config.items()))
