"""What a call spends: processor time, and memory above what its process held before."""

import time
from contextlib import contextmanager
from dataclasses import dataclass

from tidegate.lab.compare.cost import _PEAKS_RESET, _status_bytes


@dataclass
class Spent:
    """Known once the block has ended."""

    seconds: float = 0.0
    num_bytes: int = 0


@contextmanager
def measure_spending():
    """Measure a block: its processor time, and the highest that memory rose above where it stood at its beginning."""
    spent, resting = Spent(), _status_bytes("VmRSS")
    _PEAKS_RESET.write_text("5")
    start = time.process_time()
    try:
        yield spent
    finally:
        spent.seconds = time.process_time() - start
        spent.num_bytes = _status_bytes("VmHWM") - resting
