"""One run, from its description to its record."""

from __future__ import annotations

import hashlib
import math
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tidegate.lab.tasks.task import Batch, TaskData
from tidegate.lab.training.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from tidegate.lab.training.events import Interrupted, Notice, Progress, RunEvent
from tidegate.lab.training.loop import NUM_BEFORE_SPIKE, StepMetrics, is_spike, take_step
from tidegate.lab.training.machine import environment, keep_freed_memory
from tidegate.lab.training.model import (
    build_model,
    compile_blocks,
    evaluate,
    in_precision,
    loss_parts,
    require_independent_rows,
    task_metrics,
    training_flops,
    without_compilation,
)
from tidegate.lab.training.observe import loss_by_position, observe_probe
from tidegate.lab.training.optimizers import make_optimizer
from tidegate.lab.training.parallel import Processes, whole_tensor
from tidegate.lab.training.records import ObservationSummary, Point, Record, Timing
from tidegate.lab.training.run import Run
from tidegate.torch.gate import AttentionGate, gate_parameters
from tidegate.torch.parallel import local_weights

CHECKPOINT_SECONDS = 20.0
"""Default time between two checkpoints."""
_WORK_OVER_SAVING = 20
"""Minimum ratio of the time between two checkpoints to the time that it takes to save one."""
_LEADING_CHANNELS = 8
"""Channels that layers of any width have, for fingerprints."""
_DIVERGED = 1.5
"""A loss above this multiple of a blind guess's counts as divergence, though clipped gradients keep it finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """Where a run saves checkpoints and reports, and when it stops. It does not affect results."""

    folder: Path | None = None
    """Where the run saves its checkpoints, the last one at its end; None saves none."""
    report: Callable[[RunEvent], None] = lambda _: None
    stopping: Callable[[], bool] = lambda: False
    """Called after each step; True saves a checkpoint and raises `Interrupted`."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    """Minimum time between two checkpoints; 0 saves after every step."""
    num_threads: int | None = None
    """CPU threads; None takes the run's own number. Sums may round differently."""
    processes: Processes | None = None
    """The processes that train the run together; None trains it in this process. Sums may round differently."""

    def seconds_after(self, saving: float) -> float:
        """Return the time until the next checkpoint, after one that took `saving` seconds."""
        return max(self.checkpoint_seconds, _WORK_OVER_SAVING * saving) if self.checkpoint_seconds else 0.0


def execute_run(run: Run, context: RunContext) -> Record:
    """Train, or resume from a checkpoint. A failure returns its traceback in a record; a stop raises `Interrupted`."""
    keep_freed_memory()
    try:
        return _Trainer(run, context).record()
    except Interrupted:
        raise
    except Exception:
        return Record(id=run.id, run=run, status="failed", error=traceback.format_exc(), environment=environment())


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    run: Run,
    step: int,
    processes: Processes | None = None,
) -> StepMetrics:
    """Make one update of a run's model on a batch, alone or as one of several processes."""
    together = {} if processes is None else {"mean": processes.mean}
    return take_step(
        loss_parts(model, batch, run.training, processes),
        optimizer,
        share=run.training.lr_share(step),
        clip=run.training.clip,
        parameters=model.parameters(),
        gates=gate_parameters(model),
        **together,
    )


class _Trainer:
    """A run in progress."""

    def __init__(self, run: Run, context: RunContext) -> None:
        torch.set_num_threads(context.num_threads or run.training.num_threads)
        self.run = run
        self.label = run.label
        self.context = context
        self.data: TaskData = run.task.load()
        self.device = torch.device(run.training.device)
        self.model = build_model(run.model, seed=run.seed)
        self.weights = weight_fingerprints(self.model)
        self.model.to(self.device)
        require_independent_rows(run.model, run.training)
        self.num_parameters = self.model.num_parameters()
        self.num_gate_parameters = sum(gate.numel() for gate in gate_parameters(self.model))
        self.flops_per_token = training_flops(self.model)
        compile_blocks(self.model, run.training)
        self.processes = context.processes
        self.computing = self.model if self.processes is None else self.processes.distribute(self.model)
        self.has_gates = any(True for _ in gate_parameters(self.model))
        self.optimizer = make_optimizer(self.model, run)
        self.tokens_per_step = run.training.batch_size * run.task.length
        self.validation = [self._to_device(batch) for batch in self.data.validation()]
        self.state = self._load_state()
        self.saved_step = self.state.step

    def record(self) -> Record:
        """Train to the end, or to divergence, and return the record."""
        diverged = self._train()
        return self._record("diverged", error=diverged) if diverged else self._final_record()

    def _load_state(self) -> TrainingState:
        """Return the state in the checkpoint, or that of a new run."""
        fresh = TrainingState(started=datetime.now(UTC).isoformat(timespec="seconds"))
        if self.context.folder is None:
            return fresh
        loaded = load_checkpoint(self.context.folder, self.model, self.optimizer, run=self.run.id)
        state = loaded.state or fresh
        if loaded.problems:
            how = "The run starts over." if loaded.state is None else f"The run resumes from step {state.step}."
            text = " ".join((*loaded.problems, how))
            self.context.report(Notice(text=text, run=self.run.id, variant=self.label, seed=self.run.seed))
        return state

    def _train(self) -> str:
        """Make the remaining steps; return where the run diverged, or an empty text."""
        state, options = self.state, self.run.training
        saved, pause = time.monotonic(), self.context.checkpoint_seconds
        while state.step < options.steps:
            start = time.perf_counter()
            batch = self.data.batch(seed=self.run.seed, step=state.step, size=options.batch_size)
            if self.run.model.dropout > 0 or self.run.model.attention_dropout > 0:
                torch.manual_seed(self._dropout_seed())
            figures = train_step(
                self.computing, self.optimizer, self._to_device(batch), self.run, state.step, self.processes
            )
            state.elapsed += time.perf_counter() - start
            state.batches = chained_fingerprint(state.batches, batch)
            if not all(math.isfinite(figure) for figure in figures):
                return f"The loss or its gradient was no longer finite at step {state.step + 1} of {options.steps}."
            state.sums_since_point = [
                total + figure for total, figure in zip(state.sums_since_point, figures, strict=True)
            ]
            state.num_summed += 1
            state.num_spikes += is_spike(figures.loss, state.last_losses)
            state.last_losses = [*state.last_losses, figures.loss][-NUM_BEFORE_SPIKE:]
            state.step += 1
            self._evaluate_and_observe(state.step - 1)
            self._report_progress(figures[0])
            start = time.monotonic()
            stops, saves = self.context.stopping(), start - saved > pause
            if self.processes is not None:
                # All processes stop or save if one of them does.
                stops, saves = self.processes.any(stops, saves)
            if stops:
                self._save()
                raise Interrupted(self.run.id)
            if saves:
                self._save()
                saved = time.monotonic()
                pause = self.context.seconds_after(saved - start)
        return ""

    def _evaluate_and_observe(self, step: int) -> None:
        """Evaluate and observe after a step, if that is due."""
        state, options = self.state, self.run.training
        if options.observes_after(step):
            state.observations += self._observations()
        if not options.evaluates_after(step):
            return
        with self._evaluating():
            loss = evaluate(self.model, self.validation).loss
        means = [total / state.num_summed for total in state.sums_since_point]
        state.curve.append(
            Point(
                step=state.step,
                tokens=self._tokens(),
                flops=self.flops_per_token * self._tokens(),
                loss=loss if math.isfinite(loss) else None,
                train_loss=means[0],
                gradient_norm=means[1],
                gate_gradient_norm=means[2] if self.has_gates else None,
            )
        )
        state.seconds.append(state.elapsed)
        state.sums_since_point, state.num_summed = [0.0, 0.0, 0.0], 0

    def _observations(self) -> list[ObservationSummary]:
        """Observe the probe, if the numbers are finite; with sharded weights, only in the first process."""
        model = self.model
        if self.processes is not None and self.processes.kind != "ddp":
            state = {name: whole_tensor(value) for name, value in model.state_dict().items()}
            if not self.processes.is_first:
                return []
            model = build_model(self.run.model).to(self.device)
            model.load_state_dict(state)
        with without_compilation():
            observation = observe_probe(model, self._to_device(self.data.probe()), tokens=self._tokens())
        return [] if observation is None else [observation]

    def _final_record(self) -> Record:
        with self._evaluating():
            evaluation = evaluate(self.model, map(self._to_device, self.data.final()))
        # Untrained, a model spreads its guess over the whole vocabulary.
        blind = max(self.data.chance_loss, math.log(self.data.vocab_size))
        if not evaluation.loss <= _DIVERGED * blind:
            guess = f"a blind guess has {blind:.3f}"
            return self._record("diverged", error=f"The validation loss at the end is {evaluation.loss:.3f}; {guess}.")
        # Save the trained model: the caller measures it, then deletes the checkpoint.
        self._save()
        by_position: tuple[tuple[float, float], ...] = ()
        if (long := self.data.long()) is not None:
            with self._evaluating():
                by_position = loss_by_position(self.model, self._to_device(long))
        return self._record(
            "finished",
            loss=evaluation.loss,
            metrics=task_metrics(evaluation, self.data),
            num_evaluated=evaluation.num_targets,
            loss_by_position=by_position,
        )

    @contextmanager
    def _evaluating(self) -> Generator[None]:
        with without_compilation(), in_precision(self.run.training), local_weights(self.model):
            yield

    def _record(self, status: Any, **results: Any) -> Record:
        state, tokens = self.state, self._tokens()
        return Record(
            id=self.run.id,
            run=self.run,
            status=status,
            num_parameters=self.num_parameters,
            num_gate_parameters=self.num_gate_parameters,
            flops=self.flops_per_token * tokens,
            tokens=tokens,
            num_spikes=state.num_spikes,
            curve=tuple(state.curve),
            observations=tuple(state.observations),
            fingerprints={
                "batches": state.batches,
                "validation": batches_fingerprint(self.data.final()),
                **self.weights,
            },
            environment=environment(),
            timing=Timing(
                started=state.started,
                seconds=tuple(state.seconds),
                tokens_per_second=tokens / state.elapsed if state.elapsed else 0.0,
            ),
            **results,
        )

    def _report_progress(self, loss: float) -> None:
        state = self.state
        self.context.report(
            Progress(
                run=self.run.id,
                variant=self.label,
                seed=self.run.seed,
                role=self.run.role,
                step=state.step,
                steps=self.run.training.steps,
                tokens=self._tokens(),
                loss=loss,
                seconds=state.elapsed,
                flops=self.flops_per_token * self._tokens(),
            )
        )

    def _save(self) -> None:
        folder = self.context.folder
        if folder is None or self.saved_step == self.state.step:
            return
        self.saved_step = self.state.step
        save_checkpoint(folder, self.model, self.optimizer, run=self.run, state=self.state, processes=self.processes)

    def _dropout_seed(self) -> int:
        """Return the seed of this step's dropout; processes with their own rows have different ones."""
        shift = self.processes.rank if self.processes is not None and self.processes.shares_rows else 0
        mixed = hashlib.blake2b(f"{self.run.seed}:{self.state.step}".encode(), digest_size=4)
        return int.from_bytes(mixed.digest()) + shift

    def _tokens(self) -> int:
        return self.state.step * self.tokens_per_step

    def _to_device(self, batch: Batch) -> Batch:
        return Batch(batch.inputs.to(self.device), batch.targets.to(self.device))


def weight_fingerprints(model: nn.Module) -> dict[str, str]:
    """Hash each parameter under its name and shape, and its leading channels under its name.

    Models with the same initialization have equal hashes for equal names and shapes; layers of different widths share
    their leading channels. Different gates at one site share nothing.
    """
    fingerprints: dict[str, str] = {}
    for path, module in model.named_modules():
        gate = f" of {module.gate}" if isinstance(module, AttentionGate) else ""
        for name, weight in module.named_parameters(prefix=path, recurse=False):
            leading = weight[tuple(slice(_LEADING_CHANNELS) for _ in weight.shape)]
            fingerprints[f"weights:{name}{gate} {tuple(weight.shape)}"] = _digest(_bytes(weight.detach()))
            fingerprints[f"weights:{name}{gate} leading"] = _digest(_bytes(leading.detach()))
    return fingerprints


def batches_fingerprint(batches: Iterable[Batch]) -> str:
    """Hash batches in their order."""
    chained = ""
    for batch in batches:
        chained = chained_fingerprint(chained, batch)
    return chained


def chained_fingerprint(before: str, batch: Batch) -> str:
    """Hash a batch together with the hash of all earlier ones, so that a checkpoint stores a single hash."""
    return _digest(before.encode() + _bytes(batch.inputs) + _bytes(batch.targets))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
