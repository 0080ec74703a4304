"""The cost of windows and packed documents, relative to full causal attention over the same row in the same run.

`python benchmarks/windows.py` measures forward and training step of whole layers, and peak memory at two lengths, and
writes `windows.json` and `windows.md` to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import in_fresh_process, machine_record, marks_table, peak_above_rest, ratio_in_turns
from layers import RESULTS, WORKS, Mark
from peers import D_MODEL, NUM_HEADS
from torch import Tensor

from tidegate.torch import GatedAttention

LENGTH, LONG = 4096, 16384
NARROW = 128
WINDOWS = (1, 16, NARROW, 512, 1024, 2048, 3500, 4095, LENGTH)
NUM_DOCUMENTS = (1, 2, 8, 64)
TIGHT = {f"window {NARROW}": 0.6, "8 equal documents": 0.65}
"""Marks that differ from the usual 1.05."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="pairs behind each median; a third at the long length")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for windows.json and windows.md")
    parser.add_argument("--peak-of", nargs=2, metavar=("T", "WORK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        length, work = options.peak_of
        print(json.dumps(peak_memory(int(length), work)))
        return
    torch.manual_seed(0)
    marks = list(measure(options.rounds))
    record = {"surroundings": machine_record(("torch", "tidegate")), "rounds": options.rounds, "marks": marks}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "windows.json").write_text(json.dumps(record, indent=1))
    (options.out / "windows.md").write_text(report := f"{marks_table(marks)}\n\n{json.dumps(record['surroundings'])}\n")
    print(report)


def measure(rounds: int) -> Iterator[Mark]:
    row = torch.randn(1, LENGTH, D_MODEL, requires_grad=True)
    for name, layer in contenders(LENGTH).items():
        for work in WORKS:
            yield ratio(f"{name}, {work}, T = {LENGTH}", layer, row, work, rounds, f"≤ {TIGHT.get(name, 1.05)}")
    batch = torch.randn(8, LENGTH // 8, D_MODEL, requires_grad=True)
    for work in WORKS:
        title = f"window {NARROW}, {work}, 8 rows of {LENGTH // 8}"
        yield ratio(title, windowed(NARROW), batch, work, rounds, "≤ 1.05")
    row = torch.randn(1, LONG, D_MODEL, requires_grad=True)
    for work in WORKS:
        title = f"window {NARROW}, {work}, T = {LONG}"
        yield ratio(title, windowed(NARROW), row, work, max(1, rounds // 3), "≤ 0.25")
        short, long = (in_fresh_process(__file__, "--peak-of", str(length), work) for length in (LENGTH, LONG))
        yield f"window {NARROW}, peak memory, {work}, T = {LONG} over {LENGTH}", long / short, "≤ 4.4"


def ratio(title: str, layer: Any, x: Tensor, work: str, rounds: int, mark: str) -> Mark:
    full = GatedAttention(D_MODEL, NUM_HEADS, gate="none")
    measured = ratio_in_turns(WORKS[work](layer, x), WORKS[work](full, x), rounds=rounds)
    print(f"{title}: {measured:.3f}", flush=True)
    return title, measured, mark


def windowed(window: int) -> GatedAttention:
    return GatedAttention(D_MODEL, NUM_HEADS, gate="none", window=window)


def contenders(length: int) -> dict[str, Any]:
    """Return layers as functions of their input, by name."""
    found: dict[str, Any] = {f"window {window}": windowed(window) for window in WINDOWS}
    for number in NUM_DOCUMENTS:
        equal = torch.linspace(0, length, number + 1).round().long()
        found[f"{number} equal documents"] = Packed(GatedAttention(D_MODEL, NUM_HEADS, gate="none"), equal)
    for number in (*NUM_DOCUMENTS[1:], 1000):
        cuts = torch.randperm(length - 1)[: number - 1].sort().values + 1
        unequal = torch.cat((torch.tensor([0]), cuts, torch.tensor([length])))
        found[f"{number} unequal documents"] = Packed(GatedAttention(D_MODEL, NUM_HEADS, gate="none"), unequal)
        found[f"window {NARROW} in {number} unequal documents"] = Packed(windowed(NARROW), unequal)
    return found


class Packed(torch.nn.Module):
    """A layer over one row of packed documents."""

    def __init__(self, layer: GatedAttention, boundaries: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.boundaries = boundaries

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, documents=self.boundaries)


def peak_memory(length: int, work: str) -> int:
    layer, x = windowed(NARROW), torch.randn(1, length, D_MODEL, requires_grad=True)
    run = partial(WORKS[work], layer)
    # A short pass first, so that one-time allocations of libraries do not count.
    run(x[:, :512].detach().requires_grad_())()
    return peak_above_rest(run(x))


if __name__ == "__main__":
    main()
