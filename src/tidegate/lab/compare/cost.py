"""The costs of each variant: time, memory and decoding, measured side by side."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tidegate.lab.tasks.task import Batch
from tidegate.lab.training.machine import environment, keep_freed_memory
from tidegate.lab.training.model import build_model, compile_blocks
from tidegate.lab.training.records import Cost, Costs
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import make_optimizer, train_step
from tidegate.torch.decoder import TransformerLM

_ROUNDS = 15
_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
_PEAKS_RESET = Path("/proc/self/clear_refs")
"""Writing to this file resets the peak memory that the system keeps for a process."""


def measure_costs(runs: Mapping[str, Run], *, control: str, request: str, rounds: int = _ROUNDS) -> Costs:
    """Measure time, memory and decoding of one run of each variant, in turns, so that noise affects all equally.

    Step times are relative to the control's. `request` is the hash under which the costs are recorded; `rounds` is the
    number of rounds of timed steps.
    """
    keep_freed_memory()
    torch.set_num_threads(runs[control].training.num_threads)
    steps = {name: _step(run) for name, run in runs.items()}
    seconds = _in_turns(steps, rounds)
    decoding = {name: step for name, run in runs.items() if (step := _decoding_step(run)) is not None}
    decoded = _in_turns(decoding, 4 * rounds)
    items: list[Cost] = []
    for name, run in runs.items():
        ratios = [own / other for own, other in zip(seconds[name], seconds[control], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        decodes, shape = name in decoded, run.model.shape
        cache_bytes = 2 * run.model.num_layers * shape.num_kv_heads * shape.head_dim * torch.float32.itemsize
        items.append(
            Cost(
                variant=name,
                tokens_per_second=run.training.batch_size * run.task.length / statistics.median(seconds[name]),
                time_ratio=middle,
                time_ratio_low=low,
                time_ratio_high=high,
                peak_bytes=_peak_bytes(run),
                decode_milliseconds=1e3 * statistics.median(decoded[name]) if decodes else None,
                cache_bytes_per_token=cache_bytes if decodes else None,
            )
        )
    return Costs(request=request, items=tuple(items), environment=environment())


def _step(run: Run) -> Callable[[], object]:
    device = run.training.device
    model = build_model(run.model, seed=run.seed).to(device)
    compile_blocks(model, run.training)
    optimizer = make_optimizer(model, run)
    inputs, targets = run.task.load().batch(seed=run.seed, step=0, size=run.training.batch_size)
    batch = Batch(inputs.to(device), targets.to(device))
    return lambda: train_step(model, optimizer, batch, run, 0)


def _decoding_step(run: Run) -> Callable[[], object] | None:
    """Return a function that decodes one token after a full context, with a cache; None for models without decoding."""
    model = build_model(run.model, seed=run.seed).to(run.training.device).eval()
    if not isinstance(model, TransformerLM) or model.config.gates.read_other_sequences:
        return None
    # Learned positions end at the training length.
    length = max(1, run.task.length - 1)
    caches = model.new_caches(length + 1)
    tokens = torch.zeros(1, length, dtype=torch.int64, device=run.training.device)
    with torch.no_grad():
        model(tokens, caches=caches, num_logits=1)

    def step() -> None:
        with torch.no_grad():
            model(tokens[:, :1], caches=caches)
        # Shorten the cache again, so that all steps are alike.
        for cache in caches:
            cache.truncate(length)

    return step


def _in_turns(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time each function once per round, after a warm-up round, in an order that rotates between rounds."""
    names = list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    for turn in range(rounds + 1):
        shift = turn % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            works[name]()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _peak_bytes(run: Run) -> int | None:
    """Measure the peak memory of a training step above rest, in a new process; None if it is unknown."""
    if not _PEAKS_RESET.exists():
        return None
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_peak, args=(run, sender))
    # Return large blocks to the system as soon as they are freed, so that the peak counts only live memory.
    before = os.environ.get(_THRESHOLD)
    os.environ[_THRESHOLD] = "65536"
    try:
        process.start()
    finally:
        del os.environ[_THRESHOLD]
        if before is not None:
            os.environ[_THRESHOLD] = before
    # An open end in this process would make it wait forever for a process that died.
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()


def _measure_peak(run: Run, sender: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(run.training.num_threads)
    step = _step(run)
    # The first step allocates the optimizer's state and the libraries' buffers.
    step()
    gc.collect()
    resting = _status_bytes("VmRSS")
    _PEAKS_RESET.write_text("5")
    step()
    sender.send(_status_bytes("VmHWM") - resting)


def _status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
