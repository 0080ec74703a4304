"""Compare contenders in one run: interleaved timings, exact counts of saved bytes, peak memory in fresh processes."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of repeated calls, in turns with all other contenders."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The first and third quartile."""
        first, _, third = statistics.quantiles(self.seconds, n=4)
        return first, third


def interleave(contenders: dict[str, Callable[[], Any]], *, rounds: int, warmups: int = 1) -> dict[str, Timing]:
    """Time each contender once a round, in rotating order, so that drift affects all of them equally."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    for turn in range(warmups + rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            contenders[name]()
            elapsed = time.perf_counter() - start
            if turn >= warmups:
                seconds[name].append(elapsed)
    gc.enable()
    return {name: Timing(seconds=taken) for name, taken in seconds.items()}


def paired_ratio(timings: dict[str, Timing], name: str, over: str) -> float:
    """Return the median over the rounds of one contender's time divided by another's."""
    return statistics.median(a / b for a, b in zip(timings[name].seconds, timings[over].seconds, strict=True))


def ratio_in_turns(contender: Callable[[], Any], peer: Callable[[], Any], *, rounds: int) -> float:
    """Return the median ratio of the times of two functions, called back to back in alternating order.

    The load of a machine changes from second to second, so that only neighboring measurements are comparable.
    """
    return paired_ratio(interleave({"contender": contender, "peer": peer}, rounds=rounds), "contender", "peer")


def kept_bytes(forward: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages that autograd saves for the backward pass, without the parameters."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The result keeps the graph and its storages alive until all are counted.
        result = forward()
    del result
    return sum(kept.values())


def resident_bytes(field: str = "VmRSS") -> int:
    """Return the memory of this process now (`VmRSS`) or at its peak (`VmHWM`)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak_above_rest(work: Callable[[], Any]) -> int:
    """Return the peak memory of the work above the memory in use before; for fresh processes."""
    gc.collect()
    resting = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return resident_bytes("VmHWM") - resting


def in_fresh_process(script: str, *arguments: str) -> Any:
    """Run a script of this folder in a new process, and return the JSON that it prints last."""
    # Freed large blocks return to the system at once, so that the peak counts only live memory.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def machine_record(packages: Iterable[str]) -> dict[str, Any]:
    """Return versions and properties of the machine."""
    return {
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "load_before": os.getloadavg()[0],
    }


def markdown_table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def marks_table(marks: Iterable[tuple[str, float, str]]) -> str:
    """Return a table of figures with their marks, such as `≤ 1.05` or `≥ 4`, and whether they are met."""
    rows = []
    for figure, measured, mark in marks:
        sign, limit = mark.split()
        met = measured <= float(limit) if sign == "≤" else measured >= float(limit)
        rows.append([figure, f"{measured:.3f}", mark, "met" if met else "missed"])
    return f"## Marks\n\n{markdown_table(['figure', 'measured', 'mark', 'verdict'], rows)}"


def as_json(value: Any) -> Any:
    """Return the median, quartiles and raw seconds of a timing."""
    if isinstance(value, Timing):
        return {"median": value.median, "quartiles": value.spread, **asdict(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form.")
