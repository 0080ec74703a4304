"""`tidegate compare`: the main job."""

from __future__ import annotations

import pkgutil
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from tidegate.cli.console import new_console, print_json
from tidegate.cli.errors import FAILED, stop, stop_interrupted
from tidegate.cli.folders import require_apart, require_writable
from tidegate.cli.options import JsonOption, options_named
from tidegate.cli.progress import display

if TYPE_CHECKING:
    from tidegate.lab.compare.request import Request
    from tidegate.lab.compare.summary import Summary, VariantSummary
    from tidegate.lab.training.executors.resources import RunResources
    from tidegate.lab.training.records import Search
    from tidegate.lab.training.run import Run

_DATA, _BUDGET, _WORK = "Data", "Budget and fairness", "Running"
_WIDE = 160
_G1, _BMA = "output:input:twosigmoid", "value:query:twosigmoid"
DEFAULT_VARIANTS = (
    f"none,g1-from-1={_G1},g1-shuffled={_G1}@placebo=shuffled,bma-from-1={_BMA},bma-shuffled={_BMA}@placebo=shuffled"
)
"""No gate; two gates that start at 1, so that they change no scale; and what these are without their mechanism."""


def compare(
    context: typer.Context,
    variants: Annotated[
        str,
        typer.Option(
            help="What to compare, the control first: gates (none, bma, bma-query, g1, g1-head, g2, g3, g4, g5, vga, "
            "sink, off-by-one, or spelled as docs/gates.md says), or name=gate@option=value for one with a name and "
            "options of its own: lr, gate_lr, weight_decay, warmup, final_lr, clip, first_seed; init (a deviation, "
            "fan-in, torch), d_ff, qk_norm (yes, no), params (another variant, to whose number of parameters it is "
            "widened); placebo (constant, shuffled)."
        ),
    ] = DEFAULT_VARIANTS,
    placebos: Annotated[
        bool,
        typer.Option(
            help="Add the constant that a gate starts from, where that is not 1: what its scale alone does.",
        ),
    ] = True,
    data: Annotated[
        str | None,
        typer.Option(
            help="A text file, a folder, a quoted glob, .jsonl, .npy tokens, hf:NAME of a Hugging Face dataset; for "
            "images a folder of class folders, or digits. Without it: Python's own sources, digits, or recall made on "
            "the fly.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        Literal["lm", "image", "recall"],
        typer.Option(help="Language modelling, image classification, associative recall.", rich_help_panel=_DATA),
    ] = "lm",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="bytes, or bpe:4096 to train one of that size; bytes by default. Tokens and shards have their own.",
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
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Give each variant its best of three learning rates and three starts of the weights, chosen inside "
            "each block on seeds of its own. Ten times the runs, or six with --search stepwise.",
            rich_help_panel=_BUDGET,
        ),
    ] = False,
    search: Annotated[
        Literal["grid", "stepwise"],
        typer.Option(
            help="How --tune searches: every pair of rate and start, or every start at the middle rate and then the "
            "other rates at the best start.",
            rich_help_panel=_BUDGET,
        ),
    ] = "grid",
    map_: Annotated[
        bool,
        typer.Option(
            "--map",
            help="Train every variant at every pair of rate and start in each block, and draw where its difference to "
            "the control and to its placebo holds, and where it turns. Without --tune, nothing is chosen by it.",
            rich_help_panel=_BUDGET,
        ),
    ] = False,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Multiples of the learning rate that --tune and --map try; 0.5,1,2 by default. A wider range shows "
            "how much of it each variant tolerates.",
            rich_help_panel=_BUDGET,
            show_default=False,
        ),
    ] = None,
    starts: Annotated[
        str | None,
        typer.Option(
            help="Starts of the weights that --tune and --map try; 0.02,fan-in,torch by default.",
            rich_help_panel=_BUDGET,
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        str | None,
        typer.Option(
            help="Folder of an earlier comparison with --tune on the same data: each variant gets the learning rate "
            "and start that most of its blocks chose there, one that was not tuned the control's. By default, settings "
            "that come with the package for Python's own sources at the size tiny, if they have every variant, and "
            "else the preset's; none takes the preset's always.",
            metavar="FOLDER|none",
            rich_help_panel=_BUDGET,
            show_default=False,
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            help="Share of the control's loss below which a difference does not matter; 0.002 by default, half of the "
            "gain that is reported for gates.",
            rich_help_panel=_BUDGET,
            show_default=False,
        ),
    ] = None,
    final_tokens: Annotated[
        int | None,
        typer.Option(
            help="Held-out tokens that the loss at the end is taken on; all of them by default, up to four million.",
            rich_help_panel=_BUDGET,
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for records and page; the same command goes on there.", rich_help_panel=_WORK)
    ] = Path("comparison"),
    executor: Annotated[
        Literal["serial", "processes", "ray"],
        typer.Option(
            help="Where runs are done: one after another, on all cores of this machine, or on a Ray cluster, that of "
            "RAY_ADDRESS or one that is started here. Numbers do not depend on it.",
            rich_help_panel=_WORK,
        ),
    ] = "processes",
    cpus_per_run: Annotated[
        int | None,
        typer.Option(
            help="Cores that --executor ray sets aside for each run, which computes on as many threads; 1 by default, "
            "or one for each process. With more, sums round differently.",
            rich_help_panel=_WORK,
            show_default=False,
        ),
    ] = None,
    gpus_per_run: Annotated[
        int | None,
        typer.Option(
            help="GPUs that --executor ray sets aside for each run: 0, the default, or as many as --procs-per-run. "
            "Runs with GPUs are on the device cuda.",
            rich_help_panel=_WORK,
            show_default=False,
        ),
    ] = None,
    procs_per_run: Annotated[
        int | None,
        typer.Option(
            help="Processes, on any machines of the cluster, that do each run together with --executor ray: each takes "
            "as many rows of a batch. 1 by default; with more, sums round differently.",
            rich_help_panel=_WORK,
            show_default=False,
        ),
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(
            help="Times that a run goes on in another process after its own was killed, before it has failed; twice by "
            "default.",
            rich_help_panel=_WORK,
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where models are trained, as PyTorch names it: cpu, cuda; cpu by default, or cuda with "
            "--gpus-per-run.",
            rich_help_panel=_WORK,
            show_default=False,
        ),
    ] = None,
    runs: Annotated[
        str | None,
        typer.Option(
            help="module:function that gives a list of Runs, to be compared instead.",
            rich_help_panel=_WORK,
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show the result alone.", rich_help_panel=_WORK)] = False,
) -> None:
    """Train attention variants under equal conditions, and write a page that says what differs, and how surely.

    With no options: no gate, g1 and bma from 1 and their shuffled placebos, five seeds, byte-level models of Python's
    own sources, about ten minutes on two cores.

    Ctrl-C stops; the same command goes on, and ends with the same numbers.

    Example: tidegate compare --data notes/ --variants none,g1,bma+g1,slow=g1@lr=1e-3 --out notes-gates
    """
    command = shlex.join(["tidegate", *sys.argv[1:]])
    console = new_console(stderr=as_json)
    if not console.is_terminal:
        # Output is not a terminal: do not wrap.
        console.width = _WIDE
    from tidegate.lab.compare.page import comparison_page
    from tidegate.lab.compare.placebos import with_constants
    from tidegate.lab.compare.presets import PRESETS
    from tidegate.lab.compare.request import Request, grid_of
    from tidegate.lab.compare.run import Failed
    from tidegate.lab.compare.run import compare as run_comparison
    from tidegate.lab.compare.settings import find_settings
    from tidegate.lab.compare.summary import summarise
    from tidegate.lab.compare.variants import parse_variants
    from tidegate.lab.judging import MARGIN
    from tidegate.lab.tasks.catalogue import task_of
    from tidegate.lab.training.executors.attempts import RETRIES
    from tidegate.lab.training.executors.executor import executor_of
    from tidegate.lab.training.records import RecordFile, records_path
    from tidegate.report import write_page

    try:
        if runs is None:
            _require_used(tune=tune, map_=map_, search=search, rates=rates, starts=starts)
            if length is not None and length < 2:
                raise ValueError(f"--length must be at least 2; got {length}.")
            length = PRESETS[task][preset].length if length is None else length
            with options_named(_OPTIONS):
                asked = parse_variants(variants)
                asked = with_constants(asked) if placebos else asked
                data_task = task_of(
                    task, data, tokenizer=tokenizer, field=field, length=length, final_tokens=final_tokens
                )
                grid = grid_of(rates, starts, search=search, chooses=tune) if tune or map_ else None
                request = Request(
                    variants=asked,
                    task=data_task,
                    preset=preset,
                    num_seeds=seeds,
                    budget=tokens,
                    match=match,
                    grid=grid,
                    settings=find_settings(settings, [v.plan() for v in asked], data_task, preset, grid),
                    device=device or ("cuda" if gpus_per_run else "cpu"),
                    margin=MARGIN if margin is None else margin,
                    command=command,
                )
        else:
            _require_no_other_options(context)
            request = _request_of_runs(runs, margin=MARGIN if margin is None else margin, command=command)
        with options_named(_OPTIONS):
            runner = executor_of(
                executor,
                retries=RETRIES if retries is None else retries,
                resources=_resources(cpus_per_run, gpus_per_run, procs_per_run),
            )
        require_writable(out)
        require_apart(out, data)
        examples = "images" if request.task.kind == "image" else "tokens"
        with display(console, quiet=quiet, examples=examples) as shown, options_named(_OPTIONS):
            lines = run_comparison(request, out, executor=runner, tell=shown.show)
        summary = summarise(lines)
        page = comparison_page(summary)
        written = write_page(page, out)
    except Failed as problem:
        stop(f"{problem} See {records_path(out)}; the same command tries them again.", code=FAILED)
    except KeyboardInterrupt:
        stop_interrupted(command, begun=RecordFile(records_path(out)).has_lines())
    if as_json:
        print_json({"page": str(written), "results": page.data})
        return
    _print_summary(console, summary)
    console.print(f"The page: {written}", soft_wrap=True)


def _require_used(*, tune: bool, map_: bool, search: Search, rates: str | None, starts: str | None) -> None:
    """Refuse options of a search where nothing searches."""
    for option, given in (("--rates", rates), ("--starts", starts)):
        if given is not None and not (tune or map_):
            raise ValueError(f"{option} are those that --tune and --map try. Add one of them, or leave it out.")
    if search == "stepwise" and map_:
        raise ValueError("--map needs every pair of rate and start. Leave --search stepwise out.")
    if search == "stepwise" and not tune:
        raise ValueError("--search is how --tune searches. Add --tune, or leave --search out.")


_OPTIONS = {
    "variants": "--variants",
    "num_seeds": "--seeds",
    "budget": "--tokens",
    "margin": "--margin",
    "device": "--device",
    "settings": "--settings",
    "rates": "--rates",
    "starts": "--starts",
    "num_final_tokens": "--final-tokens",
    "retries": "--retries",
    "executor": "--executor",
    "cpus": "--cpus-per-run",
    "gpus": "--gpus-per-run",
    "processes": "--procs-per-run",
    "nproc": "--procs-per-run",
}
"""The options by what their checks call them."""


def _resources(cpus: int | None, gpus: int | None, processes: int | None) -> RunResources | None:
    """What each run is to have of a cluster; None if nothing was asked for."""
    from tidegate.lab.training.executors.resources import RunResources

    if cpus is None and gpus is None and processes is None:
        return None
    return RunResources(cpus=cpus, gpus=gpus or 0, processes=1 if processes is None else processes)


def _print_summary(console: Console, summary: Summary) -> None:
    from tidegate.lab.compare.answer import answer
    from tidegate.lab.compare.fairness import fairness_checks, violations_in_words
    from tidegate.lab.compare.forecast import seeds_for_a_verdict

    table = Table(
        title="Loss on held-out data (nats)",
        title_justify="left",
        title_style="bold",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    metrics = () if summary.metric is None else (_METRICS[summary.metric],)
    for heading in ("variant", "verdict", "loss", *metrics, "difference", "95 % interval", "p", "time"):
        # On a narrow terminal a name goes on in the next line, and so do digits: nothing is cut.
        table.add_column(heading, justify="left" if heading in ("variant", "verdict") else "right", overflow="fold")
    for variant in summary.variants:
        table.add_row(*_cells(variant, summary))
    console.print(table)
    console.print(answer(summary), soft_wrap=True)
    for variant in summary.variants:
        console.print(variant.result.sentence, soft_wrap=True)
    for variant in summary.variants:
        if variant.effect_sentence:
            console.print(variant.effect_sentence, soft_wrap=True)
    if advice := seeds_for_a_verdict(summary):
        console.print(advice, soft_wrap=True)
    for sentence in violations_in_words(fairness_checks(summary)):
        console.print(sentence, soft_wrap=True)


_METRICS = {"bits_per_byte": "bits/byte", "accuracy": "accuracy"}


def _cells(variant: VariantSummary, summary: Summary) -> Iterator[str]:
    result, cost = variant.result, variant.cost
    metric = None if summary.metric is None else variant.metric(summary.metric)
    yield from (variant.name, result.verdict)
    yield "" if result.mean is None else f"{result.mean:.4f}"
    if summary.metric is not None:
        yield "" if metric is None else f"{metric[0]:.4f}"
    yield "" if result.difference is None else f"{result.difference:+.4f}"
    yield "" if result.low is None else f"{result.low:+.4f} … {result.high:+.4f}"
    yield "" if result.p_value is None else f"{result.p_value:.4f}"
    yield "" if cost is None else f"×{cost.time_ratio:.3f}"


def _require_no_other_options(context: typer.Context) -> None:
    """Refuse options that would make other runs than those given."""
    unread = set(context.params) - {
        *(
            "runs",
            "margin",
            "out",
            "executor",
            "retries",
            "cpus_per_run",
            "gpus_per_run",
            "procs_per_run",
            "as_json",
            "quiet",
        )
    }
    sources = {name: context.get_parameter_source(name) for name in unread}
    given = sorted(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--runs gives all runs, so that {options} would not be read. Leave them out.")


def _request_of_runs(function: str, *, margin: float, command: str) -> Request:
    """Return the request for given runs: their variants in order, the first the control."""
    from tidegate.gates import Gates
    from tidegate.lab.compare.request import Request
    from tidegate.lab.compare.variants import Variant

    runs = _call_function(function)
    variants = {run.variant: Variant(name=run.variant, gates=Gates.parse(run.model.gate)) for run in runs}
    if len(variants) < 2:
        raise ValueError(f"--runs {function} must give runs of several variants; got {list(variants)}.")
    first = runs[0]
    return Request(
        variants=tuple(variants.values()),
        task=first.task,
        num_seeds=len(runs) // len(variants),
        budget=first.training.steps * first.training.batch_size * first.task.length,
        margin=margin,
        command=command,
        runs=tuple(runs),
    )


def _call_function(name: str) -> list[Run]:
    """Import module:function, also from the working folder, and return the runs that it gives."""
    from tidegate.lab.training.run import Run

    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name):
        raise ValueError(f"--runs must be module:function; got {name!r}.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = pkgutil.resolve_name(name)
    except ModuleNotFoundError as problem:
        raise ValueError(
            f"--runs {name}: {problem}. Name a module of the working folder or an installed one."
        ) from None
    except AttributeError as problem:
        raise ValueError(f"--runs {name}: {problem}.") from None
    if not callable(found) or not _takes_nothing(found):
        raise ValueError(f"--runs {name} must be a function that can be called without arguments.")
    given: Any = found()
    if not isinstance(given, list) or not given or not all(isinstance(run, Run) for run in cast("list[Any]", given)):
        raise ValueError(f"--runs {name} must give a list of tidegate.lab.training.run.Run; got {given!r}.")
    return cast("list[Run]", given)


def _takes_nothing(function: Callable[..., object]) -> bool:
    try:
        signature(function).bind()
    except (TypeError, ValueError):
        # It needs arguments, or it is built in and does not tell.
        return False
    return True
