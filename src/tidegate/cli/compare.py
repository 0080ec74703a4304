"""`tidegate compare`: the main job."""

from __future__ import annotations

import pkgutil
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from tidegate.cli.errors import FAILED, INTERRUPTED, stop
from tidegate.cli.progress import display

if TYPE_CHECKING:
    from tidegate.lab.compare import Request
    from tidegate.lab.run import Run
    from tidegate.lab.summary import Summary

__all__ = ["compare"]

_DATA, _BUDGET, _WORK = "Data", "Budget and fairness", "Running"


def compare(
    variants: Annotated[
        str,
        typer.Option(
            help="What to compare, the control first: gates, or name=gate@lr=3e-3 for one with a name and training "
            "options of its own (lr, gate_lr, weight_decay, warmup, final_lr, clip, first_seed)."
        ),
    ] = "none,g1,bma,bma-query",
    data: Annotated[
        str | None,
        typer.Option(
            help="A text file, a folder, a quoted glob, .jsonl, .npy tokens, a Hugging Face dataset id; for images a "
            "folder of class folders, or digits. Without it: Python's own sources, digits, or recall made on the fly.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        Literal["lm", "image", "recall"],
        typer.Option(help="Language modelling, image classification, associative recall.", rich_help_panel=_DATA),
    ] = "lm",
    tokenizer: Annotated[
        str, typer.Option(help="bytes, or bpe:4096 to train one of that size.", rich_help_panel=_DATA)
    ] = "bytes",
    field: Annotated[
        str | None,
        typer.Option(
            help="Where .jsonl lines and datasets have their text; text by default.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of a training example; the preset's by default.", rich_help_panel=_DATA),
    ] = None,
    preset: Annotated[
        Literal["tiny", "small", "base"],
        typer.Option(
            help="Size of model and training: about 0.2, 1 and 14 million parameters.", rich_help_panel=_BUDGET
        ),
    ] = "tiny",
    seeds: Annotated[
        int, typer.Option(help="Runs of each variant. Three are needed for a verdict.", rich_help_panel=_BUDGET)
    ] = 5,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens (or images) to train on; the preset's by default.", rich_help_panel=_BUDGET, show_default=False
        ),
    ] = None,
    match: Annotated[
        Literal["tokens", "params", "flops", "time"],
        typer.Option(help="What is made equal; the rest is reported.", rich_help_panel=_BUDGET),
    ] = "tokens",
    tune_lr: Annotated[
        bool,
        typer.Option(
            "--tune-lr", help="Give each variant its best learning rate of one grid.", rich_help_panel=_BUDGET
        ),
    ] = False,
    margin: Annotated[
        float,
        typer.Option(
            help="Share of the control's loss below which a difference does not matter.", rich_help_panel=_BUDGET
        ),
    ] = 0.005,
    out: Annotated[
        Path, typer.Option(help="Folder for records and page; the same command goes on there.", rich_help_panel=_WORK)
    ] = Path("comparison"),
    executor: Annotated[
        Literal["serial", "processes", "ray"],
        typer.Option(help="Where runs are done; numbers do not depend on it.", rich_help_panel=_WORK),
    ] = "processes",
    study: Annotated[
        str | None,
        typer.Option(
            help="module:function that gives a list of Runs, to be compared instead.",
            rich_help_panel=_WORK,
            show_default=False,
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show the result alone.", rich_help_panel=_WORK)] = False,
) -> None:
    """Train attention variants under equal conditions, and write a page that says what differs, and how surely.

    With no options: four gates, five seeds, a small byte-level language model on Python's own sources, some minutes
    on two cores. Ctrl-C stops; the same command goes on, and ends with the same numbers.
    """
    from tidegate.lab.compare import Failed, Request
    from tidegate.lab.compare import compare as run_comparison
    from tidegate.lab.comparison_page import comparison_page
    from tidegate.lab.executors.executor import executor_of
    from tidegate.lab.presets import PRESETS
    from tidegate.lab.summary import summarise
    from tidegate.lab.tasks.catalogue import task_of
    from tidegate.lab.variants import parse_variants
    from tidegate.report import write_page

    command = shlex.join(["tidegate", *sys.argv[1:]])
    console = Console(highlight=False)
    try:
        if study is None:
            length = PRESETS[task][preset].length if length is None else length
            request = Request(
                variants=parse_variants(variants),
                task=task_of(task, data, tokenizer=tokenizer, field=field, length=length),
                preset=preset,
                num_seeds=seeds,
                budget=tokens,
                match=match,
                tune_lr=tune_lr,
                margin=margin,
                command=command,
            )
        else:
            request = _studied(study, margin=margin, command=command)
        _require_writable(out)
        with display(console, quiet=quiet) as shown:
            lines = run_comparison(request, out, executor=executor_of(executor), tell=shown.show)
        page = write_page(comparison_page(lines), out)
    except (ValueError, OSError, ImportError) as problem:
        stop(problem)
    except Failed as problem:
        stop(
            f"{problem} Their tracebacks are in {out / 'records.jsonl'}; the same command tries them again.",
            code=FAILED,
        )
    except KeyboardInterrupt:
        stop(f"nothing is lost. Go on with: {command}", code=INTERRUPTED)
    _print_summary(console, summarise(lines))
    console.print(f"The page: {page}", soft_wrap=True)


def _print_summary(console: Console, summary: Summary) -> None:
    table = Table(
        title="Validation loss (nats)",
        title_justify="left",
        title_style="bold",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("variant", "verdict", "loss", "difference", "95 % interval", "p", "time"):
        table.add_column(heading, justify="left" if heading in ("variant", "verdict") else "right", no_wrap=True)
    for variant in summary.variants:
        result, cost = variant.result, variant.cost
        interval = "" if result.low is None else f"{result.low:+.4f} … {result.high:+.4f}"
        table.add_row(
            variant.name,
            result.verdict,
            "" if result.mean is None else f"{result.mean:.4f}",
            "" if result.difference is None else f"{result.difference:+.4f}",
            interval,
            "" if result.p_value is None else f"{result.p_value:.4f}",
            "" if cost is None else f"×{cost.time_ratio:.3f}",
        )
    console.print(table)
    for result in summary.comparison.variants:
        console.print(result.sentence, markup=False, soft_wrap=True)


def _studied(study: str, *, margin: float, command: str) -> Request:
    """The request that a study's runs make: their variants in order, the first the control."""
    from tidegate.gates import Gates
    from tidegate.lab.compare import Request
    from tidegate.lab.variants import Variant

    runs = _runs_of(study)
    variants = {run.variant: Variant(name=run.variant, gates=Gates.parse(run.model.gate)) for run in runs}
    seeds = {name: sum(run.variant == name for run in runs) for name in variants}
    if len(set(seeds.values())) != 1 or len(variants) < 2:
        raise ValueError(f"--study {study} must give as many runs of each of several variants; got {seeds}.")
    first = runs[0]
    return Request(
        variants=tuple(variants.values()),
        task=first.task,
        num_seeds=seeds[first.variant],
        budget=first.training.steps * first.training.batch_size * first.task.length,
        margin=margin,
        command=command,
        study=tuple(runs),
    )


def _runs_of(study: str) -> list[Run]:
    from tidegate.lab.run import Run

    if study.count(":") != 1:
        raise ValueError(f"--study must be module:function; got {study!r}.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = pkgutil.resolve_name(study)
    except AttributeError as problem:
        raise ValueError(f"--study {study}: {problem}.") from None
    if not callable(found):
        raise ValueError(f"--study {study} is no function.")
    given: Any = found()
    if not isinstance(given, list) or not given or not all(isinstance(run, Run) for run in cast("list[Any]", given)):
        raise ValueError(f"--study {study} must give a list of tidegate.lab.run.Run; got {given!r}.")
    return cast("list[Run]", given)


def _require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written to before any work is done; nothing is left behind."""
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir():
        raise ValueError(f"--out {folder} cannot be a folder: {nearest} is a file. Choose another place.")
    probe = nearest / ".tidegate-probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise ValueError(f"--out {folder} cannot be written to: {problem.strerror}. Choose another place.") from None
