"""Training as `tidegate compare` does it: our decoder beside a Llama of the same size, and two ways to use two cores.

`python benchmarks/training.py` checks that both models are of one size, times training steps in turns, and writes
`training.json` and `training.md` to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import interleave, machine_record, markdown_table, marks_table, ratio_in_turns
from peers import llama
from torch.nn import functional as F

from tidegate.config import TransformerConfig
from tidegate.gates import Gates
from tidegate.lab.compare.request import PRESETS
from tidegate.lab.tasks.catalogue import task_of
from tidegate.torch import TransformerLM

VARIANTS = ("none", "g1", "bma", "bma-query")
RESULTS = Path(__file__).parent / "results"


def config_of(preset: str, gate: str) -> tuple[TransformerConfig, int]:
    """A preset's model, and its batch size."""
    sizes = PRESETS["lm"][preset]
    task = task_of("lm", length=sizes.length)
    return sizes.model(task, task.load(), Gates.parse(gate)), sizes.batch_size


def step_of(model: torch.nn.Module, logits: Callable[[torch.Tensor], torch.Tensor], batch: int, length: int) -> Any:
    """One update of the same loop for every contender."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(256, (batch, length + 1), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def contenders(preset: str) -> dict[str, Callable[[], None]]:
    """Our decoder with each gate, and the Llama."""
    torch.manual_seed(0)
    steps: dict[str, Callable[[], None]] = {}
    for gate in VARIANTS:
        config, batch = config_of(preset, gate)
        model = TransformerLM(config)
        steps[gate] = step_of(model, model, batch, config.max_length)
    config, batch = config_of(preset, "none")
    peer, ours = llama(config), TransformerLM(config)
    assert sum(p.numel() for p in peer.parameters()) == ours.num_parameters()
    steps["transformers Llama"] = step_of(
        peer, lambda x: peer(input_ids=x, use_cache=False).logits, batch, config.max_length
    )
    return steps


def measure(presets: list[str], rounds: int) -> dict[str, Any]:
    packages = ("torch", "transformers", "tidegate")
    record: dict[str, Any] = {"surroundings": machine_record(packages), "rounds": rounds, "marks": [], "steps": {}}
    torch.set_num_threads(1)
    for preset in presets:
        print(f"{preset}: training steps on one thread", flush=True)
        steps = contenders(preset)
        timings = interleave(steps, rounds=rounds)
        record["steps"][preset] = {name: timing.median for name, timing in timings.items()}
        ratio = ratio_in_turns(steps["none"], steps["transformers Llama"], rounds=3 * rounds)
        record["marks"].append((f"none over a Llama of its size, {preset}", ratio, "≤ 1"))
        for gate in VARIANTS[1:]:
            overhead = ratio_in_turns(steps[gate], steps["none"], rounds=3 * rounds)
            record["marks"].append((f"{gate} over none, {preset}", overhead, "≤ 1.25"))
    record["side_by_side"] = {preset: side_by_side(preset, rounds) for preset in presets}
    return record


def side_by_side(preset: str, rounds: int) -> float:
    """Two runs of one thread each, side by side, over one run on two threads: how many more steps a second."""
    print(f"{preset}: two runs of one thread against one of two", flush=True)
    apart = statistics.median(_together(preset, num_processes=2, num_threads=1, steps=4 * rounds))
    alone = statistics.median(_together(preset, num_processes=1, num_threads=2, steps=4 * rounds))
    return 2 * alone / apart


def _together(preset: str, *, num_processes: int, num_threads: int, steps: int) -> list[float]:
    """Median seconds of a step in each of some processes that train at the same time."""
    context = multiprocessing.get_context("spawn")
    barrier, told = context.Barrier(num_processes), context.SimpleQueue()
    arguments = (preset, num_threads, steps, barrier, told)
    processes = [context.Process(target=_train, args=arguments) for _ in range(num_processes)]
    for process in processes:
        process.start()
    medians = [told.get() for _ in processes]
    for process in processes:
        process.join()
    return medians


def _train(preset: str, num_threads: int, steps: int, barrier: Any, told: Any) -> None:
    torch.set_num_threads(num_threads)
    step = contenders(preset)["none"]
    step()
    barrier.wait()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    told.put(statistics.median(seconds))


def report(record: dict[str, Any]) -> str:
    parts = ["# Training steps of the comparison's models, one thread, float32\n"]
    rows = [
        [preset, *(f"{1e3 * seconds:.1f} ms ({seconds / timings['none']:.3f})" for seconds in timings.values())]
        for preset, timings in record["steps"].items()
    ]
    names = next(iter(record["steps"].values()))
    parts.append(markdown_table(["preset", *names], rows) + "\n")
    gains = ", ".join(f"{preset} {gain:.2f}" for preset, gain in record["side_by_side"].items())
    parts.append(
        f"Two runs of one thread side by side do more than one run on two threads, by these factors: {gains}.\n"
    )
    parts.append(f"{marks_table(record['marks'])}\n")
    parts.append(
        f"Median step and its ratio to `none`; marks: of pairs back to back. {json.dumps(record['surroundings'])}\n"
    )
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds behind each median; marks have thrice as many")
    parser.add_argument("--presets", nargs="+", default=["tiny", "small"], help="sizes of tidegate compare")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for training.json and training.md")
    options = parser.parse_args()
    record = measure(options.presets, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "training.json").write_text(json.dumps(record, indent=1))
    (options.out / "training.md").write_text(report(record))
    print(report(record))


if __name__ == "__main__":
    main()
