"""What several files of this folder use."""

import contextlib
import warnings

import pytest
import torch
from gpu.native import BACKENDS, LAUNCHERS

import xattn
from xattn import launch, repeats


@pytest.fixture(params=LAUNCHERS or ["bindings"])
def launcher(request):
    """One launcher after the other, with nothing remembered or reported before."""
    repeats.forget()
    xattn.check_errors()
    with launch.using(request.param):
        yield request.param
    repeats.forget()
    xattn.check_errors()


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def quiet():
    """Fallbacks are no surprise; what kernels reported is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xattn.FallbackWarning)
        yield
    xattn.check_errors()


@pytest.fixture
def unsynchronised():
    """A context in which what makes the host wait for the device raises."""

    @contextlib.contextmanager
    def context():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context
