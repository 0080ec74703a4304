"""Tidegate: a library and laboratory for gated attention."""

from tidegate._validation import InputError
from tidegate.gate import PRESETS, Gate, legal_gates
from tidegate.gates import GateLike, Gates
from tidegate.sizes import HeadShape

__all__ = ["PRESETS", "Gate", "GateLike", "Gates", "HeadShape", "InputError", "legal_gates"]
