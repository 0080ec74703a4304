"""`tidegate train`: train one model of any size."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tidegate._text import number_of
from tidegate.cli.console import new_console, new_table, print_json
from tidegate.cli.folders import require_output_folder
from tidegate.cli.options import DATA, TrainingData, option, this_command, verb
from tidegate.cli.progress import display
from tidegate.cli.training import do_training, launch_training, require_launch, stop_training

if TYPE_CHECKING:
    from tidegate.lab.training.estimate import Estimate
    from tidegate.lab.training.presets import ModelSize
    from tidegate.lab.training.run import Run, Training

_MODEL, _TRAINING, _WORK = "Model", "Training", "Running"


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainingData):
    """Options of `tidegate train`."""

    gate: str = option(
        "bma",
        "Gate, with options as in --variants of tidegate compare: none, g1, bma@init=fan-in.",
        panel=_MODEL,
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
        1,
        "Number of local training processes; torchrun -m tidegate train works as well.",
        panel=_WORK,
        min=1,
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

    around = world_size()
    num_processes = max(options.nproc, around)
    require_launch(nproc=options.nproc, parallel=options.parallel, max_restarts=options.max_restarts, num_around=around)
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
            launch_training(run, options.out, num_processes=options.nproc, max_restarts=options.max_restarts)
            return
        with joined_processes(options.parallel, options.device) if around > 1 else nullcontext() as processes:
            do_training(run, options, threads=max(1, threads // around), processes=processes)
    except KeyboardInterrupt:
        stop_training(options.out, this_command(), num_around=around)


def _size(options: TrainOptions) -> ModelSize:
    """Return the preset with the options that override it."""
    from tidegate.lab.training.presets import SIZES

    names = ("d_model", "num_layers", "num_heads", "length", "batch_size", "tokenizer")
    given = {name: getattr(options, name) for name in names}
    if options.tokenizer is None and _holds_tokens(options.data):
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


def _holds_tokens(data: str | None) -> bool:
    from tidegate.lab.tasks.source import source_kind

    return data is not None and source_kind(data) in ("tokens", "shards")


def _print_estimate(run: Run, options: TrainOptions, num_processes: int) -> None:
    """Print the memory and time that the run takes here, and on hardware with the given FLOP/s."""
    from tidegate.lab.training.estimate import estimate_run

    estimate, flops, mfu, parallel = estimate_run(run), options.flops, options.mfu, options.parallel
    in_each = estimate.bytes_in_each(parallel, num_processes)
    if options.as_json:
        there = None if flops is None else estimate.hours_at(flops, mfu)
        more = {"bytes_in_each_process": in_each, "lr": run.training.lr, "hours": estimate.hours, "hours_there": there}
        print_json({**asdict(estimate), **more})
        return
    table = new_table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    rows = _estimate_rows(estimate, run.training, flops=flops, mfu=mfu)
    if num_processes > 1:
        how = f"{num_processes} processes, {parallel}, without communication buffers; times are for one process"
        rows.append(("memory per process", _memory(in_each), how))
    for row in rows:
        table.add_row(*row)
    new_console().print(table)


def _estimate_rows(
    estimate: Estimate, training: Training, *, flops: float | None, mfu: float
) -> list[tuple[str, str, str]]:
    """Return the rows of a dry run: quantity, value and explanation."""
    per_update = estimate.tokens // estimate.steps
    rows = [
        ("parameters", f"{estimate.num_parameters:,}", f"{estimate.num_gate_parameters:,} of them in gates"),
        ("tokens", f"{estimate.tokens:,}", f"{number_of(estimate.steps, 'update')} of {per_update:,} tokens"),
        ("learning rate", f"{training.lr:.3g}", f"{training.optimizer}, {training.precision}"),
        ("FLOPs", f"{estimate.flops:.3g}", f"{estimate.flops / estimate.tokens:.3g} per token"),
        (
            "memory",
            _memory(estimate.bytes),
            f"{_memory(estimate.weight_bytes)} for weights, gradients and optimizer, "
            f"{_memory(estimate.activation_bytes)} for activations "
            f"({number_of(training.accumulate, 'accumulation step')})",
        ),
    ]
    if estimate.step_seconds is None or estimate.hours is None or estimate.flops_per_second is None:
        rows.append(("time here", "?", f"not measured: {estimate.why_not_measured}"))
    else:
        how = f"{per_update / estimate.step_seconds:,.0f} tokens/s, {estimate.flops_per_second:.3g} FLOP/s, measured"
        rows.append(("time here", _duration(estimate.hours), how))
    if flops is not None:
        how = f"at {mfu:g} of {flops:.3g} FLOP/s"
        rows.append(("time on that hardware", _duration(estimate.hours_at(flops, mfu)), how))
    return rows


def _duration(hours: float) -> str:
    """Return a time in a readable unit, such as "3.5 s" or "2.1 days"."""
    units = (("days", hours / 24), ("h", hours), ("min", 60 * hours))
    return next((f"{number:,.1f} {unit}" for unit, number in units if number >= 2), f"{3600 * hours:.1f} s")


def _memory(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
