"""`tidegate train` compared with a plain PyTorch loop around transformers' Llama of the same size.

`python benchmarks/training.py` checks that both models have the same size, times steps in turns, and writes
`training.json` and `training.md` to `benchmarks/results/`. Our steps are complete steps of the trainer, from one report
to the next, with batch, update and fingerprint. The peer is a handwritten loop with a prepared batch and no record.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import (
    in_fresh_process,
    interleave,
    machine_record,
    markdown_table,
    marks_table,
    paired_ratio,
    peak_above_rest,
)
from peers import llama
from torch.nn import functional as F

from tidegate.lab.compare.design import single_run
from tidegate.lab.compare.variants import parse_variant
from tidegate.lab.training.events import Interrupted, RunEvent
from tidegate.lab.training.machine import matrix_flops
from tidegate.lab.training.model import build_model
from tidegate.lab.training.presets import SIZES
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import RunContext, execute_run

PEER = "transformers Llama"
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "g1": ("g1", {}),
    "bma": ("bma", {}),
    "none --compile": ("none", {"compile": True}),
    "bma --compile": ("bma", {"compile": True}),
    "none --precision bf16": ("none", {"precision": "bf16"}),
}
"""The variants to train, with options of the engine."""
MARKS = {"none": 1.0, "g1": 0.95, "bma": 0.95, "none --compile": 1.1, "bma --compile": 1.1}
"""Lower marks of the tokens per second relative to the peer."""
SLOW_PRESET = "base"
"""Has fewer rounds, because its steps are slow."""
STEPS = {"tiny": 8, "small": 2}
"""Steps per round, by default one, so that a round takes about a second."""
RESULTS = Path(__file__).parent / "results"


def share_freed_memory() -> None:
    """Make all threads of this process allocate from one arena, so that they reuse each other's freed memory.

    Otherwise each thread keeps the gigabytes that it freed, and `base` needs more memory than most machines have.
    """
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


_ARENA_MAX = -8
"""The number of this option in glibc's mallopt."""


def run_of(preset: str, name: str) -> Run:
    """Return the run of the command for a preset and a contender's options."""
    variant, engine = OURS[name]
    return single_run(parse_variant(variant), SIZES[preset], engine=engine)


class Trainer:
    """A running training that makes one step per call, and otherwise waits in its report function."""

    def __init__(self, run: Run, threads: int) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._ends, self._failure = False, ""
        context = RunContext(report=self._report, stopping=lambda: self._ends, num_threads=threads)
        self._thread = threading.Thread(target=self._train, args=(run, context), daemon=True)
        self._thread.start()
        # Wait until the model is built and the first step is done.
        self._wait()

    def __call__(self) -> None:
        self._go.release()
        self._wait()

    def close(self) -> None:
        self._ends = True
        self._go.release()
        self._thread.join()

    def _wait(self) -> None:
        self._done.acquire()
        if self._failure:
            raise RuntimeError(self._failure)

    def _report(self, _: RunEvent) -> None:
        self._done.release()
        self._go.acquire()

    def _train(self, run: Run, context: RunContext) -> None:
        try:
            record = execute_run(run, context)
            self._failure = record.error or "The training ended before the benchmark did."
        except Interrupted:
            return
        self._done.release()


def plain_loop(run: Run, threads: int) -> Callable[[], None]:
    """Return one handwritten update of a Llama on a prepared batch."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    peer, ours = llama(run.model), build_model(run.model)
    assert sum(weight.numel() for weight in peer.parameters()) == ours.num_parameters()
    optimizer = torch.optim.AdamW(peer.parameters(), lr=run.training.lr, fused=True)
    batch = run.task.load().batch(seed=0, step=0, size=run.training.batch_size)

    def step() -> None:
        torch.set_num_threads(threads)
        optimizer.zero_grad()
        logits = peer(input_ids=batch.inputs, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()

    return step


def contender(preset: str, name: str) -> Callable[[], None]:
    threads = SIZES[preset].num_threads
    return plain_loop(run_of(preset, "none"), threads) if name == PEER else Trainer(run_of(preset, name), threads)


def several(step: Callable[[], None], count: int) -> Callable[[], None]:
    """Return a function that makes several steps."""

    def steps() -> None:
        for _ in range(count):
            step()

    return steps


def names_at(preset: str, asked: list[str], *, half_helps: bool) -> list[str]:
    """Return the peer and the requested names; without hardware for bfloat16, its names only at `tiny`."""
    return [PEER, *(name for name in asked if "bf16" not in name or half_helps or preset == "tiny")]


def measure(presets: list[str], asked: list[str], rounds: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """Time each preset, and keep the record after each, because the next one may run out of memory."""
    packages = ("torch", "transformers", "tidegate")
    half_helps = matrix_flops("cpu", half=True) > matrix_flops("cpu", half=False)
    record: dict[str, Any] = {
        "surroundings": machine_record(packages),
        "half_helps": half_helps,
        "marks": [],
        "presets": {},
        "side_by_side": {},
    }
    for preset in presets:
        names = names_at(preset, asked, half_helps=half_helps)
        count = max(2, rounds // 4) if preset == SLOW_PRESET else rounds
        print(f"{preset}: {len(names)} contenders, {count} rounds on {SIZES[preset].num_threads} threads", flush=True)
        steps = {name: contender(preset, name) for name in names}
        number = STEPS.get(preset, 1)
        rounds_of = {name: several(step, number) for name, step in steps.items()}
        # Compilation happens in the first step.
        timings = interleave(rounds_of, rounds=count, warmups=1)
        for step in steps.values():
            if isinstance(step, Trainer):
                step.close()
        steps.clear()
        tokens = number * SIZES[preset].batch_size * SIZES[preset].length
        peaks = {name: in_fresh_process(__file__, "--peak", preset, name) for name in names}
        record["presets"][preset] = {
            "rounds": count,
            "steps": number,
            "threads": SIZES[preset].num_threads,
            "rows": {
                name: {
                    "parameters": build_model(run_of(preset, "none" if name == PEER else name).model).num_parameters(),
                    "tokens_per_second": tokens / timings[name].median,
                    "ratio": paired_ratio(timings, PEER, name),
                    "peak_bytes": peaks[name],
                    "peak_ratio": peaks[name] / peaks[PEER],
                }
                for name in names
            },
        }
        rows = record["presets"][preset]["rows"]
        print(", ".join(f"{name} {row['ratio']:.3f}" for name, row in rows.items()), flush=True)
        record["marks"] += [
            (f"{name} over the plain loop, {preset}", rows[name]["ratio"], f"≥ {mark}")
            for name, mark in MARKS.items()
            if name in rows
        ]
        if SIZES[preset].num_threads == 1:
            record["side_by_side"][preset] = side_by_side(preset, rounds)
        keep(record)


def peak(preset: str, name: str) -> int:
    """Return the peak memory of building and three steps, for a fresh process."""
    torch.set_num_threads(SIZES[preset].num_threads)
    run_of(preset, "none").task.load()

    def work() -> None:
        step = contender(preset, name)
        for _ in range(3):
            step()

    return peak_above_rest(work)


def side_by_side(preset: str, rounds: int) -> float:
    """Return the steps per second of two concurrent runs on one thread each, relative to one run on two threads."""
    print(f"{preset}: two runs of one thread against one of two", flush=True)
    apart = statistics.median(_together(preset, num_processes=2, threads=1, steps=4 * rounds))
    alone = statistics.median(_together(preset, num_processes=1, threads=2, steps=4 * rounds))
    return 2 * alone / apart


def _together(preset: str, *, num_processes: int, threads: int, steps: int) -> list[float]:
    """Return the median seconds of a step in each of several concurrent processes."""
    context = multiprocessing.get_context("spawn")
    barrier, told = context.Barrier(num_processes), context.SimpleQueue()
    arguments = (preset, threads, steps, barrier, told)
    processes = [context.Process(target=_train, args=arguments) for _ in range(num_processes)]
    for process in processes:
        process.start()
    medians = [told.get() for _ in processes]
    for process in processes:
        process.join()
    return medians


def _train(preset: str, threads: int, steps: int, barrier: Any, told: Any) -> None:
    step = Trainer(run_of(preset, "none"), threads)
    barrier.wait()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    told.put(statistics.median(seconds))


def report(record: dict[str, Any]) -> str:
    header = ["preset", "parameters", "contender", "tokens/s", "over the plain loop", "peak memory over its"]
    rows = [
        [
            f"`{preset}`",
            f"{row['parameters']:,}",
            f"`{name}`" if name != PEER else f"plain loop, {PEER}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ratio']:.2f}",
            f"{row['peak_ratio']:.2f}",
        ]
        for preset, found in record["presets"].items()
        for name, row in found["rows"].items()
    ]
    each = ", ".join(
        f"{preset} {found['rounds']} rounds of {found['steps']} on {found['threads']} threads"
        for preset, found in record["presets"].items()
    )
    parts = [
        "# `tidegate train` beside a plain loop around transformers' Llama\n",
        markdown_table(header, rows) + "\n",
        f"Medians of interleaved steps, float32 unless it says otherwise; {each}. Load before: "
        f"{record['surroundings']['load_before']:.1f}. The peak of `--compile` includes the compiler's memory.\n",
    ]
    if not record["half_helps"]:
        parts.append("Products in bfloat16 are slower than in float32 on this processor.\n")
    gains = ", ".join(f"{preset} {gain:.2f}" for preset, gain in record["side_by_side"].items())
    parts.append(
        f"Throughput of two concurrent runs on one thread each, relative to one run on two threads: {gains}.\n"
    )
    parts += [f"{marks_table(record['marks'])}\n", f"{json.dumps(record['surroundings'])}\n"]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help=f"rounds behind each median; a quarter at {SLOW_PRESET}")
    parser.add_argument("--presets", nargs="+", default=["tiny", "small", "base"], help="sizes of tidegate train")
    parser.add_argument("--contenders", nargs="+", choices=list(OURS), default=list(OURS), help="what to time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for training.json and training.md")
    parser.add_argument("--peak", nargs=2, metavar=("PRESET", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak(*options.peak), flush=True)
        # The trainer's thread still waits for its next step.
        os._exit(0)
    share_freed_memory()
    options.out.mkdir(parents=True, exist_ok=True)

    def keep(record: dict[str, Any]) -> None:
        (options.out / "training.json").write_text(json.dumps(record, indent=1))
        (options.out / "training.md").write_text(report(record))

    measure(options.presets, options.contenders, options.rounds, keep)
    print((options.out / "training.md").read_text())


if __name__ == "__main__":
    main()
