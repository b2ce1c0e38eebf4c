"""Ampere and later: mma.sync. One image of sm_80 serves 8.x, PTX of compute_80 the rest. Its capability is empty until
its kernels are there: it refuses every kind of call."""

from ..capability import Capability
from .base import Backend

CAPABILITY = Capability(vendors=frozenset({"nvidia"}), archs=frozenset())

BACKEND = Backend("sm80", native=True, capabilities=lambda: (CAPABILITY,))
