"""Contenders side by side in one run: interleaved timings, exact counts of kept bytes, peaks in fresh processes."""

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
    """Seconds of repeated calls, made in turns with all other contenders."""

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
    """Time each contender once a round, the order turning from round to round, so that drift falls on all alike."""
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
    """Median over the rounds of one contender's time over another's in the same round."""
    return statistics.median(a / b for a, b in zip(timings[name].seconds, timings[over].seconds, strict=True))


def ratio_in_turns(contender: Callable[[], Any], peer: Callable[[], Any], *, rounds: int) -> float:
    """Median of one's time over the other's, the two called back to back and by turns the first.

    What else a machine does changes from second to second: only neighbours in time can be compared closely.
    """
    return paired_ratio(interleave({"contender": contender, "peer": peer}, rounds=rounds), "contender", "peer")


def kept_bytes(forward: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> int:
    """Bytes that autograd keeps between forward and backward, each storage once, the parameters left out."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The result keeps the graph, and so the storages, alive until they are all counted.
        result = forward()
    del result
    return sum(kept.values())


def resident_bytes(field: str = "VmRSS") -> int:
    """Memory of this process now (`VmRSS`) or at its peak (`VmHWM`)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak_above_rest(work: Callable[[], Any]) -> int:
    """Bytes by which the work raises this process's peak above what it held before; for fresh processes."""
    gc.collect()
    resting = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return resident_bytes("VmHWM") - resting


def in_fresh_process(script: str, *arguments: str) -> Any:
    """Run a script of this folder anew and read the JSON that it prints last."""
    # Large blocks go back to the system as soon as they are freed, so that a peak is of what is alive.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def machine_record(packages: Iterable[str]) -> dict[str, Any]:
    """Versions and machine, for the record."""
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
    """Each figure beside its mark, `≤ 1.05` or `≥ 4`, and whether it was met."""
    rows = []
    for figure, measured, mark in marks:
        sign, limit = mark.split()
        met = measured <= float(limit) if sign == "≤" else measured >= float(limit)
        rows.append([figure, f"{measured:.3f}", mark, "met" if met else "missed"])
    return f"## Against their marks\n\n{markdown_table(['figure', 'measured', 'mark', 'verdict'], rows)}"


def as_json(value: Any) -> Any:
    """Timings as their medians, quartiles and raw seconds."""
    if isinstance(value, Timing):
        return {"median": value.median, "quartiles": value.spread, **asdict(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form here")
