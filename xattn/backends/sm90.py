"""Hopper (sm_90): TMA and wgmma. Its capability is empty until its kernels are there: it refuses every kind of call."""

from ..capability import Capability
from .base import Backend

CAPABILITY = Capability(vendors=frozenset({"nvidia"}), archs=frozenset({"sm_90"}))

BACKEND = Backend("sm90", native=True, capabilities=lambda: (CAPABILITY,))
