"""What several files of this folder use."""

import warnings

import pytest

import xattn


@pytest.fixture
def quiet():
    """Fallbacks are no surprise; what kernels reported is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xattn.FallbackWarning)
        yield
    xattn.check_errors()
