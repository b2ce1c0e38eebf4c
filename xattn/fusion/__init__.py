"""User functions inside attention: traced once per call into a graph whose captured tensors are arguments."""

from . import captured
from .epilogue import Epilogue, epilogues
from .trace import intern, lookup, trace

__all__ = ["Epilogue", "captured", "epilogues", "intern", "lookup", "trace"]
