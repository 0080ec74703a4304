"""`tidegate tokenize`: write text of any size as shards of tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tidegate._text import number_of
from tidegate.cli.console import new_console, print_json
from tidegate.cli.errors import FAILED, INTERRUPTED, stop
from tidegate.cli.folders import require_output_folder
from tidegate.cli.options import Output, argument, option, verb
from tidegate.cli.progress import display


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(Output):
    """Options of `tidegate tokenize`."""

    data: str = argument(
        "A text file, a folder, a quoted glob, .jsonl, hf:NAME of a Hugging Face dataset (streamed), or stdlib for "
        "Python's own sources."
    )
    out: Path = option(Path("shards"), "Folder for the shards; rerun the same command to resume.")
    tokenizer: str = option(
        "bytes", "bytes, bpe:32768 to train a BPE on the first 64 MiB, or the tokenizer.json of other shards."
    )
    field: str | None = option(None, "Field of .jsonl records that contains the text.")
    processes: int | None = option(None, "Number of encoder processes. Default: one per core.", min=1)


@verb
def tokenize(options: TokenizeOptions) -> None:
    """Tokenize text that may exceed memory into shards, for --data of train and compare.

    Each shard has a checksum. After Ctrl-C, the same command resumes; it also recreates missing or damaged shards.

    Example: tidegate tokenize 'corpus/*.jsonl' --field body --tokenizer bpe:32768 --out shards
    """
    from tidegate.lab.tasks.tokenizing import EncoderLost
    from tidegate.lab.tasks.tokenizing import tokenize as write_shards
    from tidegate.lab.training.machine import num_cores

    out = options.out
    require_output_folder(out, options.data)
    console = new_console(stderr=True)

    def report(num_shards: int, num_tokens: int) -> None:
        if not options.quiet:
            console.print(f"{number_of(num_shards, 'shard')}, {number_of(num_tokens, 'token')}", soft_wrap=True)

    try:
        with display(console, quiet=options.quiet):
            index = write_shards(
                options.data,
                out,
                tokenizer=options.tokenizer,
                field=options.field,
                num_processes=options.processes or num_cores(),
                report=report,
            )
    except KeyboardInterrupt:
        stop("Finished shards are saved; rerun the command to resume.", code=INTERRUPTED)
    except EncoderLost as problem:
        stop(f"{problem} Rerun the command to resume, or use fewer --processes.", code=FAILED)
    if options.as_json:
        print_json({"folder": str(out), **asdict(index)})
        return
    training = sum(shard.num_training for shard in index.shards)
    held_out = sum(shard.num_tokens for shard in index.shards) - training
    new_console().print(
        f"Wrote {number_of(len(index.shards), 'shard')} to {out}: {training:,} training tokens and {held_out:,} "
        f"held-out tokens, vocabulary {index.vocab_size:,}.",
        soft_wrap=True,
    )
