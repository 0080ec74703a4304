"""Estimate a run before it starts: FLOPs and memory by counting, time from a few steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tidegate._validation import InputError, require_positive
from tidegate.config import TransformerConfig
from tidegate.lab.tasks.task import Batch
from tidegate.lab.training.machine import available_bytes
from tidegate.lab.training.model import (
    batch_loss,
    build_model,
    compile_blocks,
    in_precision,
    loss_parts,
    training_flops,
)
from tidegate.lab.training.optimizers import hidden_matrices, make_optimizer
from tidegate.lab.training.parallel import Parallel
from tidegate.lab.training.run import Run, Training
from tidegate.torch.gate import gate_parameters

_FLOAT_BYTES = 4
_TIMED_TOKENS = 2048
"""Approximate size of a timed step: enough to keep a processor busy."""
_TIMED_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The cost of a run."""

    num_parameters: int
    num_gate_parameters: int
    num_hidden_parameters: int
    """In matrices between hidden features, which tensor parallelism shards."""
    steps: int
    tokens: int
    flops: float
    """FLOPs of the training, without recomputation that saves memory."""
    weight_bytes: int
    """Weights, gradients and optimizer state, in one process."""
    activation_bytes: int
    """Activations of one micro-batch that are kept for the backward pass."""
    step_seconds: float | None
    """Seconds of one update; None if it was not measured."""
    why_not_measured: str = ""
    """The reason why no time was measured; empty if it was."""

    @property
    def bytes(self) -> int:
        """All counted memory."""
        return self.weight_bytes + self.activation_bytes

    def bytes_in_each(self, parallel: Parallel, num_processes: int) -> int:
        """Return the counted memory per process, without communication buffers."""
        shared = {"ddp": 0.0, "fsdp": 1.0, "tp": self.num_hidden_parameters / self.num_parameters}[parallel]
        weights = self.weight_bytes * (1 - shared + shared / num_processes)
        rows = 1 if parallel == "tp" else num_processes
        return round(weights + self.activation_bytes / rows)

    @property
    def hours(self) -> float | None:
        """Hours of the whole run; None if no step was measured."""
        return None if self.step_seconds is None else self.steps * self.step_seconds / 3600

    @property
    def flops_per_second(self) -> float | None:
        """FLOP/s of the training; None if no step was measured."""
        return None if self.step_seconds is None else self.flops / self.steps / self.step_seconds

    def hours_at(self, flops: float, mfu: float) -> float:
        """Return the hours of the whole run on other hardware; see `training_hours`."""
        return training_hours(self.flops, flops=flops, mfu=mfu)


def training_hours(operations: float, *, flops: float, mfu: float) -> float:
    """Return the hours of operations on hardware with a peak of `flops` a second, at a utilization `mfu` in (0, 1]."""
    require_rate(flops, mfu)
    return operations / (flops * mfu) / 3600


def require_rate(flops: float, mfu: float) -> None:
    """Raise InputError unless peak FLOP/s and utilization are positive."""
    require_positive("flops", flops)
    if not 0 < mfu <= 1:
        raise InputError("mfu", expected="in (0, 1]", got=mfu)


def estimate_run(run: Run) -> Estimate:
    """Count the cost of a run of a language model, and time a few updates if memory allows."""
    assert isinstance(run.model, TransformerConfig)
    with torch.device("meta"):
        model = build_model(run.model)
    tokens = run.training.steps * run.training.batch_size * run.task.length
    num_hidden = sum(matrix.numel() for matrix in hidden_matrices(model))
    # Muon keeps one moment, AdamW two.
    num_moments = 2 * model.num_parameters() - (num_hidden if run.training.optimizer == "muon" else 0)
    counted = Estimate(
        num_parameters=model.num_parameters(),
        num_gate_parameters=sum(gate.numel() for gate in gate_parameters(model)),
        num_hidden_parameters=num_hidden,
        steps=run.training.steps,
        tokens=tokens,
        flops=training_flops(model) * tokens,
        weight_bytes=_FLOAT_BYTES * (2 * model.num_parameters() + num_moments),
        activation_bytes=_activation_bytes(run.model, run.training, run.task.length),
        step_seconds=None,
    )
    free = available_bytes(run.training.device)
    rows = max(1, min(run.training.batch_size // run.training.accumulate, _TIMED_TOKENS // run.task.length))
    needed = counted.weight_bytes + counted.activation_bytes * rows * run.training.accumulate // run.training.batch_size
    if free is not None and needed > free:
        reason = f"a step needs {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free here"
        return replace(counted, why_not_measured=reason)
    return replace(counted, step_seconds=_step_seconds(run, rows))


def _activation_bytes(config: TransformerConfig, training: Training, length: int) -> int:
    """Return the bytes kept for the gradients of one micro-batch.

    They are bilinear in the numbers of blocks and sequences, so that four small models determine them.
    """
    rows, blocks = training.batch_size // training.accumulate, config.num_layers
    width = config.d_ff[0] if isinstance(config.d_ff, tuple) else config.d_ff
    small = replace(config, num_layers=1, d_ff=width, checkpoint_blocks=False, max_length=length)
    (one, twice), (both, both_twice) = (
        [_kept_bytes(replace(small, num_layers=layers), training, (count, length)) for count in (1, 2)]
        for layers in (1, 2)
    )
    first = one + (rows - 1) * (twice - one)
    block = both - one + (rows - 1) * (both_twice - both - (twice - one))
    # The gradient of the logits is as large as they are.
    logits = rows * length * config.vocab_size * _FLOAT_BYTES
    if config.checkpoint_blocks:
        # Each block keeps its input; one block at a time is computed again.
        return first + blocks * rows * length * config.d_model * _FLOAT_BYTES + logits
    return first + (blocks - 1) * block + logits


def _kept_bytes(config: TransformerConfig, training: Training, size: tuple[int, int]) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, without weights.

    `size` is the number and the length of the sequences.
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    # Fake tensors take the same kernels as real ones; on the device "meta" attention takes another.
    with FakeTensorMode():
        model = build_model(config)
        own = {id(weight.untyped_storage()) for weight in model.parameters()}
        tokens = torch.zeros(size, dtype=torch.int64)
        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            in_precision(replace(training, device="cpu")),
        ):
            batch_loss(model, Batch(tokens, tokens))
    return sum(storage.nbytes() for place, storage in kept.items() if place not in own)


def _step_seconds(run: Run, rows: int) -> float:
    """Time gradients of a few rows and updates; return the time of one update of the run."""
    device = torch.device(run.training.device)
    model = build_model(run.model, seed=run.seed).to(device)
    compile_blocks(model, run.training)
    optimizer = make_optimizer(model, run)
    tokens = torch.zeros(rows, run.task.length, dtype=torch.int64, device=device)
    whole = replace(run.training, accumulate=1, batch_size=rows)
    gradients: list[float] = []
    updates: list[float] = []
    for _ in range(_TIMED_STEPS + 1):
        start = _now(device)
        for loss in loss_parts(model, Batch(tokens, tokens), whole):
            loss.backward()
        middle = _now(device)
        optimizer.step()
        updates.append(_now(device) - middle)
        optimizer.zero_grad()
        gradients.append(middle - start)
    # The first one compiles, and makes the optimizer's state.
    return min(gradients[1:]) * run.training.batch_size / rows + min(updates[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
