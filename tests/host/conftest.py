"""The fixtures of the kernels that run on the CPU."""

from __future__ import annotations

from functools import cache

import cases
import pytest
import torch
from host.emulated_backend import DEVICES, HostLauncher
from host.forward_kernel import HostKernel

from xattn import device, dispatch, forward_call, launch, repeats


@pytest.fixture(scope="session")
def kernel(tmp_path_factory):
    """kernel(layer, **config): compiled once for each configuration."""
    folder = tmp_path_factory.mktemp("host-images")

    @cache
    def make(layer: str, config: tuple) -> HostKernel:
        return HostKernel(layer, folder, **dict(config))

    return lambda layer, **config: make(layer, tuple(config.items()))


# Tests of a backend share the images that the host's compiler made for it, in one process.
@pytest.fixture(scope="session")
def launchers(tmp_path_factory):
    return {backend: HostLauncher(backend, tmp_path_factory.mktemp(backend)) for backend in DEVICES}


@pytest.fixture(params=[pytest.param(b, marks=pytest.mark.one_worker(f"host-{b}")) for b in DEVICES])
def target(request, launchers, monkeypatch):
    """A backend on a CPU that passes for its device."""
    backend = request.param
    place = cases.Target(backend, "cpu:0")  # a name of its own: what a target admits is remembered
    for name in (torch.device("cpu"), torch.device("cpu:0")):
        monkeypatch.setitem(device._known, name, DEVICES[backend])
    monkeypatch.setattr(launch, "_chosen", {"": launchers[backend]})
    monkeypatch.setattr(forward_call, "choose", launchers[backend].choose)
    dispatch._plans.clear()
    repeats.forget()
    yield place
    dispatch._plans.clear()
    repeats.forget()
