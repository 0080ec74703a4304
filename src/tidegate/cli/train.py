"""`tidegate train`: one model, at any size."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from tidegate.cli.console import new_console
from tidegate.cli.dry_run import print_estimate
from tidegate.cli.folders import require_apart, require_writable
from tidegate.cli.options import JsonOption, QuietOption, options_named
from tidegate.cli.progress import display
from tidegate.cli.training import Work, do_training, launch_training, require_launch, stop_training

_DATA, _MODEL, _TRAINING, _WORK = "Data", "Model", "Training", "Running"


def train(
    variant: Annotated[
        str,
        typer.Option(
            help="The gate, and options of the variant, as --variants of tidegate compare spells them: none, g1, "
            "bma@init=fan-in.",
            rich_help_panel=_MODEL,
        ),
    ] = "bma",
    data: Annotated[
        str | None,
        typer.Option(
            help="A text file, a folder, a quoted glob, .jsonl, .npy tokens, shards of tidegate tokenize, or hf:NAME. "
            "Without it: Python's own sources.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="bytes, or bpe:4096 to train one of that size; the preset's by default. Tokens and shards have their "
            "own.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(
            help="Where .jsonl lines and datasets have their text; text by default.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        Literal["tiny", "small", "base", "35m", "124m", "1.3b"],
        typer.Option(
            help="Sizes, budget and learning rate: about 0.2, 1, 14, 34, 124 and 1,311 million parameters. Options "
            "below replace single ones.",
            rich_help_panel=_MODEL,
        ),
    ] = "tiny",
    d_model: Annotated[
        int | None, typer.Option(min=1, help="Width.", rich_help_panel=_MODEL, show_default=False)
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(min=1, help="Blocks.", rich_help_panel=_MODEL, show_default=False)
    ] = None,
    num_heads: Annotated[
        int | None, typer.Option(min=1, help="Heads of queries.", rich_help_panel=_MODEL, show_default=False)
    ] = None,
    num_kv_heads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Heads of keys and values; as many as of queries by default.",
            rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence.", rich_help_panel=_MODEL, show_default=False)
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens to train on; twenty for each parameter by default.",
            rich_help_panel=_TRAINING,
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences of an update.", rich_help_panel=_TRAINING, show_default=False),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="The largest learning rate; by default 3e-3, times 144 over the width where that is less than 1.",
            rich_help_panel=_TRAINING,
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        Literal["adamw", "muon"],
        typer.Option(
            help="muon updates the matrices inside blocks by Muon, and gates, norms and embeddings by AdamW.",
            rich_help_panel=_TRAINING,
        ),
    ] = "adamw",
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.", rich_help_panel=_TRAINING)] = 0,
    precision: Annotated[
        Literal["fp32", "bf16"],
        typer.Option(
            help="bf16 computes in half precision; weights, updates and the gates' logits stay float32.",
            rich_help_panel=_WORK,
        ),
    ] = "fp32",
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile the blocks: slow to start, then faster.", rich_help_panel=_WORK)
    ] = False,
    accumulate: Annotated[
        int,
        typer.Option(
            min=1, help="Cut a batch into so many parts: the same update, in less memory.", rich_help_panel=_WORK
        ),
    ] = 1,
    checkpoint_activations: Annotated[
        bool,
        typer.Option(
            "--checkpoint-activations",
            help="Compute blocks again in the backward pass: less memory, a third more time.",
            rich_help_panel=_WORK,
        ),
    ] = False,
    device: Annotated[
        str, typer.Option(help="Where to train, as PyTorch names it: cpu, cuda.", rich_help_panel=_WORK)
    ] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads on the CPU; by default one for each core, and one alone below a width of 256.",
            rich_help_panel=_WORK,
            show_default=False,
        ),
    ] = None,
    nproc: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes of this machine that train the model together; torchrun -m tidegate train starts them too.",
            rich_help_panel=_WORK,
        ),
    ] = 1,
    parallel: Annotated[
        Literal["ddp", "fsdp", "tp"],
        typer.Option(
            help="How processes share the work: rows of a batch with a copy of the model each (ddp) or with weights "
            "shared out (fsdp), or heads and their gates (tp).",
            rich_help_panel=_WORK,
        ),
    ] = "ddp",
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Times that --nproc starts all processes anew from the last checkpoint after one was lost.",
            rich_help_panel=_WORK,
        ),
    ] = 0,
    save_seconds: Annotated[
        float,
        typer.Option(
            min=0, help="Time between checkpoints, at least; 0 saves after every step.", rich_help_panel=_WORK
        ),
    ] = 60.0,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for model, log and checkpoints; the same command goes on there.", rich_help_panel=_WORK
        ),
    ] = Path("model"),
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Write event files for TensorBoard too, to OUT/tensorboard.", rich_help_panel=_WORK
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Say what the run would take, by counting and by a few steps, and end.",
            rich_help_panel=_WORK,
        ),
    ] = False,
    flops: Annotated[
        float | None,
        typer.Option(
            help="Operations a second that the hardware can do, such as 4e14: --dry-run says the hours there, and "
            "progress is shown as a share of it.",
            rich_help_panel=_WORK,
            show_default=False,
        ),
    ] = None,
    mfu: Annotated[
        float, typer.Option(help="Share of --flops that training reaches, for --dry-run.", rich_help_panel=_WORK)
    ] = 0.4,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train one language model, and write it where observe, curvature and transformers read it.

    OUT/model.safetensors is for Tidegate, OUT/hf for AutoModelForCausalLM; OUT/log.jsonl has a line for each step.

    Ctrl-C stops; the same command goes on, and ends with the same numbers.

    Example: tidegate train --variant g1 --preset small --data notes/ --out notes-g1
    """
    command = shlex.join(["tidegate", *sys.argv[1:]])
    from tidegate.lab.compare.single import single_run
    from tidegate.lab.compare.variants import Variant
    from tidegate.lab.training.engine.parallel import joined_processes, num_processes_around, require_parallel
    from tidegate.lab.training.estimate import require_rate
    from tidegate.lab.training.machine import require_device, use_threads
    from tidegate.lab.training.presets import SIZES

    given = {
        "d_model": d_model,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "length": length,
        "batch_size": batch_size,
        # A preset's tokenizer is for text.
        "tokenizer": "none" if tokenizer is None and _holds_tokens(data) else tokenizer,
    }
    size = replace(SIZES[preset], **{name: value for name, value in given.items() if value is not None})
    if threads is None:
        threads = size.num_threads
    around = num_processes_around()
    num_processes = max(nproc, around)
    with options_named(_OPTIONS):
        require_launch(nproc=nproc, parallel=parallel, max_restarts=max_restarts, num_around=around)
        require_rate(1.0 if flops is None else flops, mfu)
        require_device(device)
        # Of several processes the first speaks.
        with display(new_console(stderr=True), quiet=quiet or os.environ.get("RANK", "0") != "0"):
            run = single_run(
                Variant.parse(variant),
                size,
                data=data,
                field=field,
                budget=tokens,
                lr=lr,
                seed=seed,
                model={"num_kv_heads": num_kv_heads, "checkpoint_blocks": checkpoint_activations},
                engine={
                    "precision": precision,
                    "compile": compile_,
                    "accumulate": accumulate,
                    "optimizer": optimizer,
                    "device": device,
                },
            )
        if num_processes > 1:
            require_parallel(run, parallel, num_processes)
    if dry_run:
        use_threads(threads)
        print_estimate(run, flops=flops, mfu=mfu, parallel=parallel, num_processes=num_processes, as_json=as_json)
        return
    require_writable(out)
    require_apart(out, data)
    # Data that are damaged are an error of one line, and no run that failed.
    run.task.load()
    try:
        if nproc > 1 and around == 1:
            launch_training(run, out, num_processes=nproc, max_restarts=max_restarts)
            return
        with joined_processes(parallel, device) if around > 1 else nullcontext() as processes:
            work = Work(
                run=run,
                out=out,
                threads=max(1, threads // around),
                peak=flops,
                tensorboard=tensorboard,
                as_json=as_json,
                quiet=quiet,
                save_seconds=save_seconds,
                processes=processes,
            )
            do_training(work)
    except KeyboardInterrupt:
        stop_training(out, command, num_around=around)


_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in ("variant", "device", "accumulate", "lr", "flops", "mfu", "nproc", "parallel", "max_restarts")
}
"""The options by what their checks call them."""


def _holds_tokens(data: str | None) -> bool:
    from tidegate.lab.tasks.source import source_kind

    return data is not None and source_kind(data) in ("tokens", "shards")
