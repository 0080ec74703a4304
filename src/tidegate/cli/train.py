"""`tidegate train`: train one model of any size."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import typer

from tidegate._text import number_of
from tidegate._validation import InputError
from tidegate.cli.console import new_console, new_table, print_json
from tidegate.cli.errors import FAILED, INTERRUPTED, stop, stop_interrupted
from tidegate.cli.folders import require_output_folder
from tidegate.cli.options import DATA, TrainingData, option, this_command, verb
from tidegate.cli.progress import display

if TYPE_CHECKING:
    from tidegate.lab.training.outputs import TrainingFolder
    from tidegate.lab.training.parallel import Processes
    from tidegate.lab.training.presets import ModelSize
    from tidegate.lab.training.records import Record
    from tidegate.lab.training.run import Run

_MODEL, _TRAINING, _WORK = "Model", "Training", "Running"


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainingData):
    """Options of `tidegate train`."""

    gate: str = option(
        "bma", "Gate, with options as in --variants of tidegate compare: none, g1, bma@init=fan-in.", panel=_MODEL
    )
    preset: Literal["tiny", "small", "base", "35m", "124m", "1.3b"] = option(
        "tiny",
        "Model size, with its token budget and learning rate: about 0.2, 1, 14, 34, 124 and 1,311 million parameters. "
        "The options below override single values.",
        panel=_MODEL,
    )
    d_model: int | None = option(None, "Model width.", panel=_MODEL, min=1)
    num_layers: int | None = option(None, "Number of transformer blocks.", panel=_MODEL, min=1)
    num_heads: int | None = option(None, "Number of query heads.", panel=_MODEL, min=1)
    num_kv_heads: int | None = option(
        None, "Number of key/value heads. Default: as many as query heads.", panel=_MODEL, min=1
    )
    length: int | None = option(None, "Sequence length in tokens.", panel=DATA, min=2)
    tokens: int | None = option(None, "Training tokens. Default: 20 per parameter.", panel=_TRAINING, min=1)
    batch_size: int | None = option(None, "Batch size, in sequences.", panel=_TRAINING, min=1)
    lr: float | None = option(
        None, "Peak learning rate. Default: 3e-3, scaled by 144 / width for widths above 144.", panel=_TRAINING
    )
    optimizer: Literal["adamw", "muon"] = option(
        "adamw",
        "Optimizer. muon: Muon for the matrices of the blocks, AdamW for gates, norms and embeddings.",
        panel=_TRAINING,
    )
    seed: int = option(0, "Random seed for initialization and data order.", panel=_TRAINING, min=0)
    precision: Literal["fp32", "bf16"] = option(
        "fp32",
        "Precision of the matrix products. bf16: autocast; weights, updates and gate logits stay float32.",
        panel=_WORK,
    )
    compile: bool = option(
        False, "Compile the blocks with torch.compile: slower start, faster steps.", "--compile", panel=_WORK
    )
    accumulate: int = option(1, "Gradient accumulation steps: the same update in less memory.", panel=_WORK, min=1)
    checkpoint_activations: bool = option(
        False,
        "Activation checkpointing: recompute blocks in the backward pass, for less memory and a third more time.",
        "--checkpoint-activations",
        panel=_WORK,
    )
    device: str = option("cpu", "PyTorch device, such as cpu or cuda.", panel=_WORK)
    threads: int | None = option(
        None, "CPU threads. Default: one per core, or one for widths below 256.", panel=_WORK, min=1
    )
    nproc: int = option(
        1, "Number of local training processes; torchrun -m tidegate train works as well.", panel=_WORK, min=1
    )
    parallel: Literal["ddp", "fsdp", "tp"] = option(
        "ddp",
        "Parallelism: data parallel with replicated (ddp) or sharded weights (fsdp), or tensor parallel over heads "
        "and their gates (tp).",
        panel=_WORK,
    )
    max_restarts: int = option(
        0,
        "Times to restart all processes of --nproc from the last checkpoint after one was killed.",
        panel=_WORK,
        min=0,
    )
    save_seconds: float = option(
        60.0, "Minimum time between checkpoints, in seconds; 0 saves after every step.", panel=_WORK, min=0
    )
    out: Path = option(
        Path("model"), "Folder for the model, log and checkpoints; rerun the same command to resume.", panel=_WORK
    )
    tensorboard: bool = option(
        False, "Also write TensorBoard event files to OUT/tensorboard.", "--tensorboard", panel=_WORK
    )
    dry_run: bool = option(
        False, "Estimate the run's time and memory from a few steps, and exit.", "--dry-run", panel=_WORK
    )
    flops: float | None = option(
        None,
        "Peak FLOP/s of the hardware, such as 4e14. --dry-run estimates the time on it; progress shows its "
        "utilization.",
        panel=_WORK,
    )
    mfu: float = option(0.4, "Model FLOPs utilization that --dry-run assumes for --flops.", panel=_WORK)


@verb
def train(options: TrainOptions) -> None:
    """Train one language model, and save it for Tidegate and for transformers.

    Writes OUT/model.safetensors for Tidegate, OUT/hf for AutoModelForCausalLM, and OUT/log.jsonl with a line per step.

    After Ctrl-C, the same command resumes, with the same results.

    Example: tidegate train --gate g1 --preset small --data notes/ --out notes-g1
    """
    from tidegate.lab.training.estimate import require_rate
    from tidegate.lab.training.machine import require_device, use_threads
    from tidegate.lab.training.parallel import joined_processes, require_parallel, world_size

    # World size under torchrun or `_launch`, else 1.
    around = world_size()
    num_processes = max(options.nproc, around)
    _require_launch(options, around)
    require_rate(1.0 if options.flops is None else options.flops, options.mfu)
    require_device(options.device)
    # Only the first of several processes prints.
    with display(new_console(stderr=True), quiet=options.quiet or os.environ.get("RANK", "0") != "0"):
        run = _run(options)
    if num_processes > 1:
        require_parallel(run, options.parallel, num_processes)
    threads = options.threads or _size(options).num_threads
    if options.dry_run:
        use_threads(threads)
        _print_estimate(run, options, num_processes)
        return
    require_output_folder(options.out, options.data)
    # Load the data here, so that damaged data are an input error, not a failed run.
    run.task.load()
    try:
        if options.nproc > 1 and around == 1:
            _launch(run, options)
            return
        with joined_processes(options.parallel, options.device) if around > 1 else nullcontext() as processes:
            _train(run, options, threads=max(1, threads // around), processes=processes)
    except KeyboardInterrupt:
        _stop_interrupted(options, around)


def _size(options: TrainOptions) -> ModelSize:
    """Return the preset with the options that override it."""
    from tidegate.lab.tasks.source import source_kind
    from tidegate.lab.training.presets import SIZES

    names = ("d_model", "num_layers", "num_heads", "length", "batch_size", "tokenizer")
    given = {name: getattr(options, name) for name in names}
    if options.tokenizer is None and options.data is not None and source_kind(options.data) in ("tokens", "shards"):
        # The preset's tokenizer is for text.
        given["tokenizer"] = "none"
    return replace(SIZES[options.preset], **{name: value for name, value in given.items() if value is not None})


def _run(options: TrainOptions) -> Run:
    """Return the run that the options describe."""
    from tidegate.lab.compare.design import single_run
    from tidegate.lab.compare.variants import parse_variant

    engine = ("precision", "compile", "accumulate", "optimizer", "device")
    return single_run(
        parse_variant(options.gate),
        _size(options),
        data=options.data,
        field=options.field,
        budget=options.tokens,
        lr=options.lr,
        seed=options.seed,
        model={"num_kv_heads": options.num_kv_heads, "checkpoint_blocks": options.checkpoint_activations},
        engine={name: getattr(options, name) for name in engine},
    )


def _print_estimate(run: Run, options: TrainOptions, num_processes: int) -> None:
    """Print the memory and time that the run takes here, and on hardware with the given FLOP/s."""
    from tidegate.lab.training.estimate import estimate_run

    estimate, training = estimate_run(run), run.training
    flops, mfu, parallel = options.flops, options.mfu, options.parallel
    there = None if flops is None else estimate.hours_at(flops, mfu)
    in_each = estimate.bytes_in_each(parallel, num_processes)
    if options.as_json:
        more = {"bytes_in_each_process": in_each, "lr": training.lr, "hours": estimate.hours, "hours_there": there}
        print_json({**asdict(estimate), **more})
        return
    per_update = estimate.tokens // estimate.steps
    memory = (
        f"{_memory(estimate.weight_bytes)} for weights, gradients and optimizer, "
        f"{_memory(estimate.activation_bytes)} for activations ({number_of(training.accumulate, 'accumulation step')})"
    )
    rows = [
        ("parameters", f"{estimate.num_parameters:,}", f"{estimate.num_gate_parameters:,} of them in gates"),
        ("tokens", f"{estimate.tokens:,}", f"{number_of(estimate.steps, 'update')} of {per_update:,} tokens"),
        ("learning rate", f"{training.lr:.3g}", f"{training.optimizer}, {training.precision}"),
        ("FLOPs", f"{estimate.flops:.3g}", f"{estimate.flops / estimate.tokens:.3g} per token"),
        ("memory", _memory(estimate.bytes), memory),
    ]
    if estimate.step_seconds is None or estimate.hours is None or estimate.flops_per_second is None:
        rows.append(("time here", "?", f"not measured: {estimate.why_not_measured}"))
    else:
        speed = f"{per_update / estimate.step_seconds:,.0f} tokens/s, {estimate.flops_per_second:.3g} FLOP/s, measured"
        rows.append(("time here", _duration(estimate.hours), speed))
    if there is not None:
        rows.append(("time on that hardware", _duration(there), f"at {mfu:g} of {flops:.3g} FLOP/s"))
    if num_processes > 1:
        how = f"{num_processes} processes, {parallel}, without communication buffers; times are for one process"
        rows.append(("memory per process", _memory(in_each), how))
    table = new_table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    new_console().print(table)


def _duration(hours: float) -> str:
    """Return a time in a readable unit, such as "3.5 s" or "2.1 days"."""
    units = (("days", hours / 24), ("h", hours), ("min", 60 * hours))
    return next((f"{number:,.1f} {unit}" for unit, number in units if number >= 2), f"{3600 * hours:.1f} s")


def _memory(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def _launch(run: Run, options: TrainOptions) -> None:
    """Run this command in several processes, and stop with one line if one of them is lost."""
    from tidegate.lab.training.checkpoint import saved_step
    from tidegate.lab.training.outputs import TrainingFolder
    from tidegate.lab.training.parallel import ProcessLost, launch

    # Check once here, not in every process.
    folder = TrainingFolder(options.out)
    folder.finished(run)
    try:
        launch(sys.argv[1:], num_processes=options.nproc, max_restarts=options.max_restarts)
    except ProcessLost as problem:
        if problem.code == INTERRUPTED:
            raise KeyboardInterrupt from None
        step = saved_step(folder.checkpoints, run.id)
        where = "There is no checkpoint yet" if step is None else f"The checkpoint of step {step} is saved"
        stop(f"{problem} {where}; rerun the same command to resume.", code=FAILED)


def _require_launch(options: TrainOptions, around: int) -> None:
    """Raise InputError for multi-process options with one process, or an `nproc` other than torchrun's world size."""
    nproc, parallel, max_restarts = options.nproc, options.parallel, options.max_restarts
    if around > 1 and nproc not in (1, around):
        raise InputError("nproc", expected=f"left out under torchrun, which started {around}", got=nproc)
    if nproc == 1 and parallel != "ddp" and "WORLD_SIZE" not in os.environ:
        hint = "Add --nproc, or use torchrun."
        raise InputError("parallel", expected="left out for a single process", got=parallel, hint=hint)
    if nproc == 1 and max_restarts:
        hint = "Add --nproc, or use torchrun's own option."
        raise InputError("max_restarts", expected="0 without --nproc", got=max_restarts, hint=hint)


def _stop_interrupted(options: TrainOptions, around: int) -> NoReturn:
    """Exit after Ctrl-C; only the launcher, or under torchrun the first process, prints how to resume."""
    from tidegate.lab.training.outputs import TrainingFolder
    from tidegate.lab.training.parallel import LAUNCHED

    if LAUNCHED in os.environ or os.environ.get("RANK", "0") != "0":
        raise typer.Exit(INTERRUPTED)
    again = this_command() if around == 1 else "the same torchrun command"
    stop_interrupted(again, begun=TrainingFolder(options.out).has_begun())


def _train(run: Run, options: TrainOptions, *, threads: int, processes: Processes | None) -> None:
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
