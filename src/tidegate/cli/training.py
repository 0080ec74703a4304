"""The training of `tidegate train`, in one process or several: launch, run, save, report."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from tidegate._validation import InputError
from tidegate.cli.console import new_console, print_json
from tidegate.cli.errors import FAILED, INTERRUPTED, stop, stop_interrupted
from tidegate.cli.progress import display

if TYPE_CHECKING:
    from tidegate.cli.train import TrainOptions
    from tidegate.lab.training.outputs import TrainingFolder
    from tidegate.lab.training.parallel import Parallel, Processes
    from tidegate.lab.training.records import Record
    from tidegate.lab.training.run import Run


def launch_training(run: Run, out: Path, *, num_processes: int, max_restarts: int) -> None:
    """Run this command in several processes, and stop with one line if one of them is lost."""
    from tidegate.lab.training.checkpoint import saved_step
    from tidegate.lab.training.outputs import TrainingFolder
    from tidegate.lab.training.parallel import ProcessLost, launch

    # Check once here, not in every process.
    TrainingFolder(out).finished(run)
    try:
        launch(sys.argv[1:], num_processes=num_processes, max_restarts=max_restarts)
    except ProcessLost as problem:
        if problem.code == INTERRUPTED:
            raise KeyboardInterrupt from None
        step = saved_step(TrainingFolder(out).checkpoints, run.id)
        where = "There is no checkpoint yet" if step is None else f"The checkpoint of step {step} is saved"
        stop(f"{problem} {where}; rerun the same command to resume.", code=FAILED)


def require_launch(*, nproc: int, parallel: Parallel, max_restarts: int, num_around: int) -> None:
    """Raise InputError for multi-process options with one process, or an `nproc` other than torchrun's world size.

    Args:
        nproc: Value of --nproc.
        parallel: Value of --parallel.
        max_restarts: Value of --max-restarts.
        num_around: World size under torchrun, else 1.
    """
    if num_around > 1 and nproc not in (1, num_around):
        raise InputError("nproc", expected=f"left out under torchrun, which started {num_around}", got=nproc)
    if nproc == 1 and parallel != "ddp" and "WORLD_SIZE" not in os.environ:
        hint = "Add --nproc, or use torchrun."
        raise InputError("parallel", expected="left out for a single process", got=parallel, hint=hint)
    if nproc == 1 and max_restarts:
        hint = "Add --nproc, or use torchrun's own option."
        raise InputError("max_restarts", expected="0 without --nproc", got=max_restarts, hint=hint)


def stop_training(out: Path, command: str, *, num_around: int) -> NoReturn:
    """Exit after Ctrl-C; only the launcher, or under torchrun the first process, prints how to resume.

    Args:
        out: Output folder.
        command: The running command line.
        num_around: World size under torchrun or `launch_training`, else 1.
    """
    from tidegate.lab.training.outputs import TrainingFolder
    from tidegate.lab.training.parallel import LAUNCHED

    if LAUNCHED in os.environ or os.environ.get("RANK", "0") != "0":
        raise typer.Exit(INTERRUPTED)
    again = command if num_around == 1 else "the same torchrun command"
    stop_interrupted(again, begun=TrainingFolder(out).has_begun())


def do_training(run: Run, options: TrainOptions, *, threads: int, processes: Processes | None) -> None:
    """Train, save record and model, and print the result."""
    from tidegate.lab.training.events import Ended, Interrupted, Phase
    from tidegate.lab.training.executors.executor import capture_signals
    from tidegate.lab.training.machine import use_threads
    from tidegate.lab.training.outputs import TrainingFolder
    from tidegate.lab.training.train import RunContext, execute_run

    folder, is_first = TrainingFolder(options.out), processes is None or processes.is_first
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if is_first:
            stack.enter_context(folder.records.lock())
            folder.remove_partial_files()
        if (done := folder.finished(run)) is not None:
            if is_first:
                # A kill right after training may have left both undone.
                folder.forget_checkpoints(run)
                _export(folder, done)
                _print_result(folder, done, before=True, as_json=options.as_json)
            return
        use_threads(threads)
        tell, report = _open_displays(run, options, processes, stack)
        captured = stack.enter_context(capture_signals())
        tell(Phase(name="training", num_runs=1))
        context = RunContext(
            folder=folder.checkpoints,
            report=report,
            stopping=lambda: bool(captured),
            checkpoint_seconds=options.save_seconds,
            num_threads=threads,
            processes=processes,
        )
        try:
            record = execute_run(run, context)
        except Interrupted:
            raise KeyboardInterrupt from None
        if record.status == "failed" and processes is not None:
            _end_with_others(record)
        if not is_first:
            return
        folder.keep(run, record)
        tell(Ended(run=run.id, variant=run.variant, seed=run.seed, status=record.status, loss=record.loss))
        _export(folder, record)
    _print_result(folder, record, before=False, as_json=options.as_json)


def _open_displays(
    run: Run, options: TrainOptions, processes: Processes | None, stack: ExitStack
) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    """Open the display and, in the first process, the log; return the callbacks for the display and for both."""
    from tidegate.lab.training.machine import matrix_flops
    from tidegate.lab.training.outputs import RunLog

    is_first = processes is None or processes.is_first
    num_devices = 1 if processes is None else processes.size
    peak = options.flops or num_devices * matrix_flops(run.training.device, half=run.training.precision == "bf16")
    quiet = options.quiet or not is_first
    tell = stack.enter_context(display(new_console(stderr=True), quiet=quiet, peak=peak))
    if not is_first:
        return tell, tell
    log = RunLog(options.out, peak=peak, tensorboard=options.tensorboard)
    stack.callback(log.close)

    def report(event: Any) -> None:
        log.report(event)
        tell(event)

    return tell, report


def _end_with_others(record: Record) -> NoReturn:
    """Exit one of several processes after another was lost or all failed."""
    from tidegate.lab.training.parallel import LAUNCHED, is_lost_peer

    last = record.error.strip().splitlines()[-1]
    if LAUNCHED in os.environ and is_lost_peer(record.error):
        # The launcher reports which process was lost.
        raise typer.Exit(FAILED)
    stop(f"Training failed, or another process was lost: {last} Rerun the same command to resume.", code=FAILED)


def _export(folder: TrainingFolder, record: Record) -> None:
    """Export the model for transformers, if that is installed, once and atomically."""
    from importlib.util import find_spec

    from tidegate.lab.models.export import export_hugging_face
    from tidegate.torch import TransformerLM, load_model

    place, partial = folder.path / "hf", folder.path / "hf.partial"
    if record.status != "finished" or place.exists() or find_spec("transformers") is None:
        return
    shutil.rmtree(partial, ignore_errors=True)
    model = load_model(folder.model)
    assert isinstance(model, TransformerLM)
    export_hugging_face(model, partial, tokenizer=folder.tokenizer)
    partial.rename(place)


def _print_result(folder: TrainingFolder, record: Record, *, before: bool, as_json: bool) -> None:
    from tidegate._json import encode
    from tidegate.lab.models.export import reading_code
    from tidegate.lab.training.outputs import log_path

    console = new_console()
    if record.status == "failed":
        last = record.error.strip().splitlines()[-1]
        stop(f"{last} See {folder.records.path}; rerun the same command to retry.", code=FAILED)
    if record.status == "diverged":
        stop(f"The training diverged. {record.error} Choose a smaller --lr and another --out.", code=FAILED)
    assert record.loss is not None
    hf = folder.path / "hf"
    if as_json:
        files = {"model": folder.model, "hf": hf if hf.exists() else None, "log": log_path(folder.path)}
        places = {name: None if path is None else str(path) for name, path in files.items()}
        print_json({**places, "trained_before": before, "record": encode(record)})
        return
    metrics = "".join(f", {value:.4f} {name.replace('_', ' ')}" for name, value in record.metrics.items())
    when = "Already trained" if before else "Trained"
    console.print(
        f"{when}: {record.num_parameters:,} parameters on {record.tokens:,} tokens. Held-out loss "
        f"{record.loss:.4f} nats{metrics} ({record.num_evaluated:,} tokens).",
        soft_wrap=True,
    )
    console.print(f"Model: {folder.model}", soft_wrap=True)
    console.print(f"Log: {log_path(folder.path)}", soft_wrap=True)
    if hf.exists():
        console.print(f"For transformers: {hf}. To load it:\n\n{reading_code(hf)}", soft_wrap=True)
