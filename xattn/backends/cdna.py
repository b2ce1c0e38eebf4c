"""CDNA2, CDNA3, CDNA4: MFMA. Its capability is empty until its kernels are there: it refuses every kind of call."""

from ..capability import Capability
from .base import Backend

CAPABILITY = Capability(vendors=frozenset({"amd"}), archs=frozenset({"gfx90a", "gfx942", "gfx950"}))

BACKEND = Backend("cdna", native=True, capabilities=lambda: (CAPABILITY,))
