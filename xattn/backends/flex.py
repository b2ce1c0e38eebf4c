"""torch's FlexAttention on GPUs where torch.compile works: score_mod, mask_mod and windows. (Being filled in.)"""

from ..capability import Capability
from .base import Backend

CAPABILITY = Capability(vendors=frozenset({"nvidia", "amd"}))
BACKEND = Backend("flex", native=False, capabilities=lambda: (CAPABILITY,))
