"""The cost of curvature: slices relative to forward passes, batches relative to the intrinsic route, peak memory.

`python benchmarks/curvature.py` checks values first, then measures, and writes `curvature.json` and `curvature.md` to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import in_fresh_process, machine_record, marks_table, peak_above_rest, ratio_in_turns

from tidegate.geometry import (
    gaussian_curvature,
    input_chart,
    intrinsic_curvature,
    sectional_curvature,
)
from tidegate.torch import GatedAttention

RESULTS = Path(__file__).parent / "results"
GATES = ("none", "bma", "bma-query", "g1")
D_MODEL, NUM_HEADS, LENGTH = 512, 8, 256
POINTS, AMBIENT = 1000, 16
PLANES = 64
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="pairs behind each ratio (default 9)")
    parser.add_argument(
        "--sample", type=int, default=50, help="points that the intrinsic route is timed on (default 50)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for curvature.json and curvature.md")
    parser.add_argument("--peak-of", metavar="MAP", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        print(json.dumps(peak_memory(options.peak_of)))
        return
    check_values()
    record = measure(options.rounds, options.sample)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "curvature.json").write_text(json.dumps(record, indent=1))
    (options.out / "curvature.md").write_text(report(record))
    print(report(record))


def check_values() -> None:
    """Check that both routes agree on the chart before timing it."""
    chart, x = small_chart(), points(3)
    u, v = torch.eye(2, dtype=torch.float64)
    slow = torch.stack([intrinsic_curvature(chart, point, u, v) for point in x])
    torch.testing.assert_close(gaussian_curvature(chart, x), slow, atol=1e-8, rtol=1e-8)


def measure(rounds: int, sample: int) -> dict[str, Any]:
    marks = [slice_mark(gate, rounds) for gate in GATES]
    marks.append(batch_mark(rounds, sample))
    for name in ("module", "chart"):
        used = in_fresh_process(__file__, "--peak-of", name) / GIB
        marks.append((f"{PLANES} planes of a {name} of d = {D_MODEL}, T = {LENGTH}, GiB above rest", used, "≤ 2"))
    packages = ("torch", "numpy", "scipy", "tidegate")
    return {"surroundings": machine_record(packages), "rounds": rounds, "sample": sample, "marks": marks}


def slice_mark(gate: str, rounds: int) -> tuple[str, float, str]:
    """Time the curvature of one plane relative to one forward pass of the same map, in float64."""
    print(f"slice: {gate}", flush=True)
    f, x, u, v = layer_map(gate)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return f(x)

    ratio = ratio_in_turns(lambda: sectional_curvature(f, x, u, v, tangent="plane"), forward, rounds=rounds)
    return f"one slice of a {gate} layer, d = {D_MODEL}, T = {LENGTH}, in forward passes", ratio, "≤ 25"


def batch_mark(rounds: int, sample: int) -> tuple[str, float, str]:
    """Time the intrinsic route on all points one by one, extrapolated from a sample, relative to one batched call.

    On one thread, because the arrays are too small for several.
    """
    print("batch", flush=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    chart, x = small_chart(), points(POINTS)
    u, v = torch.eye(2, dtype=torch.float64)

    def one_by_one() -> None:
        for point in x[:sample]:
            intrinsic_curvature(chart, point, u, v)

    ratio = ratio_in_turns(one_by_one, lambda: gaussian_curvature(chart, x), rounds=rounds) * POINTS / sample
    torch.set_num_threads(threads)
    return f"{POINTS} points into {AMBIENT} dimensions: intrinsic one by one over one batch", ratio, "≥ 200"


def small_chart() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a map from two coordinates to sixteen dimensions, a small network."""
    inner, outer = (torch.from_numpy(np.random.default_rng(0).standard_normal((n, AMBIENT))) for n in (2, AMBIENT))
    return lambda x: torch.tanh(x @ inner) @ outer


def points(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal((count, 2)))


def layer_map(gate: str, *, planes: tuple[int, ...] = ()) -> tuple[Callable[..., Any], torch.Tensor, Any, Any]:
    """Return a layer as a map of its whole input, with a point and planes."""
    torch.manual_seed(0)
    layer = GatedAttention(D_MODEL, NUM_HEADS, gate=gate, dtype=torch.float64)
    x = torch.randn(LENGTH * D_MODEL, dtype=torch.float64)
    u, v = torch.randn(2, *planes, LENGTH * D_MODEL, dtype=torch.float64)
    return lambda p: layer(p.reshape(1, LENGTH, D_MODEL)), x, u, v


def peak_memory(name: str) -> int:
    """Return the peak memory of many planes of a layer, or of its plain-array reference; for a fresh process."""
    f, x, u, v = layer_map("bma", planes=(PLANES,))
    if name == "chart":
        layer = GatedAttention(D_MODEL, NUM_HEADS, gate="bma", dtype=torch.float64)
        f = input_chart(layer.arrays(), x.reshape(LENGTH, D_MODEL))
    # Measure one plane first, so that memory for loading the library does not count.
    sectional_curvature(f, x, u[0], v[0], tangent="plane")
    return peak_above_rest(lambda: sectional_curvature(f, x, u, v, tangent="plane"))


def report(record: dict[str, Any]) -> str:
    around = json.dumps(record["surroundings"])
    how = (
        f"Medians of {record['rounds']} back-to-back pairs; the intrinsic route is timed on {record['sample']} points."
    )
    return f"# The cost of curvature\n\n{marks_table(record['marks'])}\n\n{how} {around}\n"


if __name__ == "__main__":
    main()
