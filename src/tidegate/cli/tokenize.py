"""`tidegate tokenize`: text of any size to shards of tokens."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tidegate._text import number_of
from tidegate.cli.console import new_console, print_json
from tidegate.cli.errors import FAILED, INTERRUPTED, stop
from tidegate.cli.folders import require_apart, require_writable
from tidegate.cli.options import FieldOption, JsonOption, QuietOption
from tidegate.cli.progress import display


def tokenize(
    data: Annotated[
        str,
        typer.Argument(
            help="A text file, a folder, a quoted glob, .jsonl, hf:NAME of a Hugging Face dataset, which is streamed, "
            "or stdlib for Python's own sources.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the shards; the same command goes on there.")] = Path("shards"),
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bytes, bpe:32768 to learn byte pairs from the first 64 MiB, or a tokenizer.json of other shards."
        ),
    ] = "bytes",
    field: FieldOption = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that encode; one for each core by default.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a text as shards of tokens on the disk, for --data of train and compare: it may be larger than memory.

    Each shard has a digest. Ctrl-C stops; the same command goes on, and makes anew what is missing or damaged.

    Example: tidegate tokenize 'corpus/*.jsonl' --field body --tokenizer bpe:32768 --out shards
    """
    from tidegate.lab.tasks.tokenizing import EncoderLost
    from tidegate.lab.tasks.tokenizing import tokenize as write_shards
    from tidegate.lab.training.machine import num_cores

    require_writable(out)
    require_apart(out, data)
    console = new_console(stderr=True)

    def report(num_shards: int, num_tokens: int) -> None:
        if not quiet:
            console.print(f"{number_of(num_shards, 'shard')}, {number_of(num_tokens, 'token')}", soft_wrap=True)

    try:
        with display(console, quiet=quiet):
            index = write_shards(
                data,
                out,
                tokenizer=tokenizer,
                field=field,
                num_processes=processes or num_cores(),
                report=report,
            )
    except KeyboardInterrupt:
        stop("nothing is lost. Run the command again to go on.", code=INTERRUPTED)
    except EncoderLost as problem:
        stop(f"{problem} Nothing is lost: run the command again to go on, or give fewer --processes.", code=FAILED)
    if as_json:
        print_json({"folder": str(out), **asdict(index)})
        return
    training = sum(shard.num_training for shard in index.shards)
    held_out = sum(shard.num_tokens for shard in index.shards) - training
    new_console().print(
        f"{number_of(len(index.shards), 'shard')} in {out}: {training:,} tokens to train on and {held_out:,} held out, "
        f"of {index.vocab_size:,} kinds.",
        soft_wrap=True,
    )
