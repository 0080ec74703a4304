"""`tidegate evaluate`: how likely a text is to a trained model, and what it reaches on tasks."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table

from tidegate._files import write_content
from tidegate._text import number_of
from tidegate.cli.console import new_console, print_json
from tidegate.cli.folders import require_writable
from tidegate.cli.options import DataOption, FieldOption, JsonOption, OwnModelArgument, QuietOption
from tidegate.cli.progress import display

if TYPE_CHECKING:
    from tidegate.lab.models.evaluate import TaskScores
    from tidegate.lab.models.text import TextLoss

_TASKS = "Tasks"


def evaluate(
    model: OwnModelArgument,
    data: DataOption = None,
    field: FieldOption = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a sequence; the length it was trained on by default.", show_default=False),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            min=1, help="Score that many sequences alone, spread over the text; all by default.", show_default=False
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 4,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Instead of a text: tasks of lm-evaluation-harness, parted by commas. Names of its own, which it "
            "downloads; .yaml files; folders of them. Paths inside such a file begin in the working folder. A task may "
            "name Python code, which runs: give those you trust.",
            rich_help_panel=_TASKS,
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of each task; all by default.", rich_help_panel=_TASKS, show_default=False),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Examples in front of a sample; what the task says by default.",
            rich_help_panel=_TASKS,
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    out: Annotated[Path | None, typer.Option(help="File to write the result to, as JSON.", show_default=False)] = None,
    quiet: QuietOption = False,
) -> None:
    """Say how good a model of tidegate train, or of save_model, is: on a text, or with --tasks on tasks.

    Of a text: loss, perplexity and bits per byte, which compare models whatever their tokens. Every token but the first
    is predicted, after those before it in its sequence.

    Tasks are those of lm-evaluation-harness, which the extra eval brings.

    Example: tidegate evaluate model --data notes.txt
    """
    from tidegate.lab.models.language_models import load_language_model, require_known_length, text_tokens
    from tidegate.lab.models.text import require_decoder, text_loss

    of_text = {"--data": data, "--field": field, "--length": length, "--sequences": sequences}
    _require_options_of_one_kind(tasks, of_text, [limit, num_fewshot])
    if out is not None:
        if out.is_dir():
            raise ValueError(f"--out {out} is a folder. Name the file to write, such as {out / 'scores.json'}.")
        require_writable(out.parent)
    loaded = load_language_model(model, derivatives=False)
    decoder = require_decoder(loaded)
    # The harness draws bars of its own while it prepares tasks.
    bars = redirect_stderr(io.StringIO()) if quiet else nullcontext()
    with display(new_console(stderr=True), quiet=quiet) as shown, bars:
        if tasks is None:
            size = length or decoder.config.max_length
            require_known_length(loaded, size)
            tokens = text_tokens(loaded, data, field=field)
            found = text_loss(loaded, tokens, length=size, count=sequences, batch_size=batch_size, tell=shown.show)
        else:
            from tidegate.lab.models.evaluate import evaluate_tasks

            found = evaluate_tasks(
                loaded,
                [task.strip() for task in tasks.split(",") if task.strip()],
                limit=limit,
                num_fewshot=num_fewshot,
                batch_size=batch_size,
                tell=shown.show,
            )
    result = {"model": loaded.name, **found.to_dict()}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_content(out, f"{json.dumps(result, indent=2)}\n".encode())
    if as_json:
        print_json(result)
    else:
        _print(found, loaded.name)


def _require_options_of_one_kind(tasks: str | None, of_text: Mapping[str, object], of_tasks: Sequence[object]) -> None:
    """Refuse options that would be passed over."""
    given = [option for option, value in of_text.items() if value is not None]
    if tasks is not None and given:
        raise ValueError(f"{given[0]} is for a text, and --tasks brings its own. Leave one of them out.")
    if tasks is None and any(value is not None for value in of_tasks):
        raise ValueError("--limit and --num-fewshot are for --tasks. Name some, or leave them out.")
    if tasks is not None and not tasks.strip(" ,"):
        raise ValueError("--tasks must name at least one task.")


def _print(found: TextLoss | TaskScores, name: str) -> None:
    from tidegate.lab.models.text import TextLoss

    if isinstance(found, TextLoss):
        share = found.num_tokens / found.num_text_tokens
        scored = "the whole text" if share == 1 else f"a sample, {share:.2%} of the text"
        new_console().print(
            f"{name} on {scored}, {number_of(found.num_tokens, 'token')}, {number_of(found.num_bytes, 'byte')}: "
            f"loss {found.loss:.4f} nats, perplexity {found.perplexity:.3f}, {found.bits_per_byte:.4f} bits per byte.",
            soft_wrap=True,
        )
        return
    table = Table(box=SIMPLE, pad_edge=False, title=f"{name} by lm-eval {found.harness}", title_justify="left")
    # The harness has no standard error of some metrics, such as bits per byte.
    has_errors = any(score.error is not None for score in found.scores)
    for column in ("task", "samples", "metric", "value", *(("±",) if has_errors else ())):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right", overflow="fold")
    for score in found.scores:
        better = {True: " ↑", False: " ↓", None: ""}[score.higher_is_better]
        cells = [score.task, f"{score.num_samples:,}", score.metric + better, f"{score.value:.4f}"]
        if has_errors:
            cells.append("" if score.error is None else f"{score.error:.4f}")
        table.add_row(*cells)
    new_console().print(table)
