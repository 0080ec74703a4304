"""Measure the CPU time and the additional memory of a block of code."""

import time
from contextlib import contextmanager
from dataclasses import dataclass

from tidegate.lab.compare.cost import _PEAKS_RESET, _status_bytes


@dataclass
class Spent:
    """CPU time and additional memory, set when the block ends."""

    seconds: float = 0.0
    num_bytes: int = 0


@contextmanager
def measure_spending():
    """Measure a block's CPU time, and its peak memory above that at its start."""
    spent, resting = Spent(), _status_bytes("VmRSS")
    _PEAKS_RESET.write_text("5")
    start = time.process_time()
    try:
        yield spent
    finally:
        spent.seconds = time.process_time() - start
        spent.num_bytes = _status_bytes("VmHWM") - resting
