"""The cost of gates: our layers, a plain implementation and layers of other libraries, in one interleaved run.

`python benchmarks/layers.py` checks values first, then measures forward, training step, decoding, saved bytes and peak
memory, and writes `layers.json` and `layers.md` to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from harness import (
    Timing,
    as_json,
    in_fresh_process,
    interleave,
    kept_bytes,
    machine_record,
    markdown_table,
    marks_table,
    paired_ratio,
    peak_above_rest,
    ratio_in_turns,
)
from peers import D_MODEL, NUM_HEADS, OURS, ScoreMatrixAttention, contenders
from torch import Tensor, nn

from tidegate.torch import GatedAttention, KVCache
from tidegate.torch.convert import from_stacked_qkv

Mark: TypeAlias = tuple[str, float, str]
"""A figure, its measured value, and its mark."""

TIMES_OVER_NONE = {"bma": 1.08, "bma-query": 1.08, "sink": 1.05}
"""Marks of the time relative to `none` from T = 512 on; from T = 2048 on they are at most 1.05."""
KEPT_OVER_NONE = {"bma-query recomputed": 1.05, "bma recomputed": 1.2, "sink": 1.05}
"""Marks of the bytes saved for the backward pass, relative to `none`."""
PEAKS_OVER_NONE = {"bma": 1.4, "bma-query": 1.4, "sink": 1.05}
"""Marks of the peak memory, relative to `none`."""

LENGTHS = (128, 512, 2048, 4096)
CACHED = 4096
DEPTH = 4
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="interleaved rounds behind each median; marks have at least three times as many (default 5)",
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="sequence lengths T")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for layers.json and layers.md")
    parser.add_argument("--peak-of", nargs=3, metavar=("NAME", "T", "WORK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if options.peak_of:
        name, length, work = options.peak_of
        print(json.dumps(peak_memory(name, int(length), work)))
        return
    check_values()
    record = measure(options.lengths, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "layers.json").write_text(json.dumps(record, default=as_json, indent=1))
    (options.out / "layers.md").write_text(report(record))
    print(report(record))


def check_values() -> None:
    """Check that outputs and gradients of the plain implementation and ours agree on the same weights before timing."""
    torch.manual_seed(0)
    plain = ScoreMatrixAttention()
    ours = GatedAttention(D_MODEL, NUM_HEADS, gate="bma")
    ours.load_state_dict(from_stacked_qkv(plain.state_dict()))
    x, y = (torch.randn(1, 256, D_MODEL, requires_grad=True) for _ in range(2))
    y.data.copy_(x.data)
    ours(x).square().sum().backward()
    plain(y).square().sum().backward()
    torch.testing.assert_close(ours(x), plain(y), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(x.grad, y.grad, atol=2e-4, rtol=2e-4)


def measure(lengths: list[int], rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = {name: build() for name, build in contenders().items()}
    packages = ("torch", "transformers", "x-transformers", "tidegate")
    record: dict[str, Any] = {"surroundings": machine_record(packages), "rounds": rounds, "lengths": list(lengths)}
    record |= {"forward": {}, "training": {}, "kept_bytes": {}, "peak_bytes": {}, "marks": []}
    for length in lengths:
        x = torch.randn(1, length, D_MODEL, requires_grad=True)
        for title, work in WORKS.items():
            print(f"T = {length}: {title}", flush=True)
            runs = {name: work(layer, x) for name, layer in layers.items()}
            record[title][length] = interleave(runs, rounds=rounds)
            pairs = 3 * rounds * max(1, 2048 // length)
            record["marks"] += _time_marks(title, length, runs, pairs=pairs)
        record["kept_bytes"][length] = {
            name: kept_bytes(partial(layer, x), layer.parameters()) for name, layer in layers.items()
        }
    longest = str(max(lengths))
    for work in WORKS:
        print(f"T = {longest}: peak memory, {work}, each in a process of its own", flush=True)
        record["peak_bytes"][work] = {
            name: in_fresh_process(__file__, "--peak-of", name, longest, work) for name in layers
        }
    print(f"decoding through {DEPTH} layers with {CACHED} cached positions each", flush=True)
    record["decoding"] = decoding(OURS, rounds=40 * rounds)
    for name in OURS[1:]:
        ratio = paired_ratio(record["decoding"], name, "none")
        record["marks"].append((f"{name}, decode step", ratio, "≤ 1.05"))
    record["marks"] += _memory_marks(record["kept_bytes"][max(lengths)], record["peak_bytes"])
    return record


def forward(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            layer(x)

    return run


def train(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).sum().backward()

    return run


WORKS = {"forward": forward, "training": train}


def decoding(names: Iterable[str], *, rounds: int) -> dict[str, Timing]:
    """Time one new position after full caches, through `DEPTH` layers of each kind, like a step of a decoder.

    Several layers are used because the keys and values of a decoder's layers compete for the processor's cache. All
    kinds share the same caches, because their addresses change the time of a step by more than a gate does. The caches
    are truncated after each step.
    """
    build = contenders()
    stacks = {name: [build[name]() for _ in range(DEPTH)] for name in names}
    caches = [SharedCache(CACHED + 1) for _ in range(DEPTH)]
    prompt, x = torch.randn(1, CACHED, D_MODEL), torch.randn(1, 1, D_MODEL)
    with torch.no_grad():
        for layer, cache in zip(stacks["none"], caches, strict=True):
            layer(prompt, cache=cache)

    def decode(stack: list[nn.Module]) -> None:
        with torch.no_grad():
            for layer, cache in zip(stack, caches, strict=True):
                layer(x, cache=cache)
                cache.truncate(CACHED)

    return interleave({name: partial(decode, stack) for name, stack in stacks.items()}, rounds=rounds)


class SharedCache:
    """A cache that several layers share, unlike a `KVCache`, so that all use the same memory."""

    def __init__(self, max_length: int) -> None:
        self._cache = KVCache(max_length)
        self.update = self._cache.update
        self.truncate = self._cache.truncate

    @property
    def length(self) -> int:
        return self._cache.length


def peak_memory(name: str, length: int, work: str) -> int:
    torch.manual_seed(0)
    layer = contenders()[name]()
    x = torch.randn(1, length, D_MODEL, requires_grad=True)
    # A short pass first, so that one-time allocations of libraries do not count.
    WORKS[work](layer, x[:, :16].detach().requires_grad_())()
    return peak_above_rest(WORKS[work](layer, x))


def report(record: dict[str, Any]) -> str:
    """Return tables of the ratios to plain attention (`none`) in the same rounds, with medians."""
    parts = [f"# Layers, d = {D_MODEL}, {NUM_HEADS} heads, one sequence, float32\n"]
    for work in ("forward", "training"):
        rows = []
        for name in record[work][record["lengths"][0]]:
            cells = []
            for length in record["lengths"]:
                timings = record[work][length]
                low, high = (1e3 * second for second in timings[name].spread)
                ratio = paired_ratio(timings, name, "none")
                cells.append(f"{ratio:.3f} ({1e3 * timings[name].median:.2f} ms, {low:.2f}–{high:.2f})")
            rows.append([name, *cells])
        title = "Forward" if work == "forward" else "Training step (forward and backward)"
        header = ["layer", *(f"T = {length}" for length in record["lengths"])]
        parts.append(f"## {title}: time over `none` (median, quartiles)\n\n{markdown_table(header, rows)}\n")
    parts.append(_summary(record))
    rounds, around = record["rounds"], json.dumps(record["surroundings"])
    parts.append(f"Tables: medians of {rounds} interleaved rounds; marks: of back-to-back pairs. {around}\n")
    return "\n".join(parts)


def _summary(record: dict[str, Any]) -> str:
    longest = max(record["lengths"])
    kept, peaks = record["kept_bytes"][longest], record["peak_bytes"]
    rows = []
    for name in kept:
        row = [name, f"{kept[name] / kept['none']:.3f}"]
        row += [f"{peaks[work][name] / max(1, peaks[work]['none']):.2f}" for work in ("forward", "training")]
        row.append(f"{paired_ratio(record['decoding'], name, 'none'):.3f}" if name in record["decoding"] else "")
        rows.append(row)
    header = ["layer", "bytes saved for backward", "peak, forward", "peak, training", f"decode step, {CACHED} cached"]
    memory = f"## Memory at T = {longest} and decoding, over `none`\n\n{markdown_table(header, rows)}\n"
    return f"{memory}\n{marks_table(record['marks'])}\n"


def _memory_marks(kept: dict[str, int], peaks: dict[str, dict[str, int]]) -> Iterator[Mark]:
    for name, mark in KEPT_OVER_NONE.items():
        yield f"{name}, bytes saved", kept[name] / kept["none"], f"≤ {mark:g}"
    for work, peak in peaks.items():
        for name, mark in PEAKS_OVER_NONE.items():
            yield f"{name}, peak memory, {work}", peak[name] / max(1, peak["none"]), f"≤ {mark:g}"
        yield f"bma over score matrix, peak memory, {work}", peak["bma"] / peak["score matrix"], "≤ 0.1"


def _time_marks(work: str, length: int, runs: dict[str, Callable[[], None]], *, pairs: int) -> Iterator[Mark]:
    """Yield the figures of times with their measured values and marks."""
    where = f"{work}, T = {length}"
    for ours, peer in (("g1", "x-transformers gated"), ("g1, norm and rotary", "Qwen3-Next")):
        yield f"{ours} over {peer}, {where}", ratio_in_turns(runs[ours], runs[peer], rounds=pairs), "≤ 1"
    if length < 512:
        return
    for name, mark in TIMES_OVER_NONE.items():
        limit = min(mark, 1.05) if length >= 2048 else mark
        yield f"{name}, {where}", ratio_in_turns(runs[name], runs["none"], rounds=pairs), f"≤ {limit:g}"

    def none_and_matmul() -> None:
        runs["none"]()
        runs["matmul alone"]()

    yield f"g1 over none and its matmul, {where}", ratio_in_turns(runs["g1"], none_and_matmul, rounds=pairs), "≤ 1.03"
    if length == max(LENGTHS):
        ratio = ratio_in_turns(runs["score matrix"], runs["bma"], rounds=max(1, pairs // 3))
        yield f"score matrix over bma, {where}", ratio, "≥ 5" if work == "forward" else "≥ 4"


if __name__ == "__main__":
    main()
