"""The backends in the order in which they are asked: native kernels first, then what torch offers, then the
reference."""

from . import cdna, flex, reference, sdpa, sm80, sm90
from .base import Backend, Config, Unavailable, give_up

REGISTRY: tuple[Backend, ...] = (
    sm90.BACKEND,
    sm80.BACKEND,
    cdna.BACKEND,
    flex.BACKEND,
    sdpa.BACKEND,
    reference.BACKEND,
)

__all__ = ["REGISTRY", "Backend", "Config", "Unavailable", "give_up"]
