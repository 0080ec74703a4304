import re
from io import StringIO

import pytest
from rich.table import Table
from rich.text import Text

from tidegate.cli.console import new_console
from tidegate.cli.progress import display
from tidegate.lab.training.events import Ended, PartsDone, Phase, Progress

HOSTILE = "a\x1b[5mb\x07c\x9bd\u202e"
SHOWN = r"a\u001b[5mb\u0007c\u009bd\u202e"


@pytest.fixture(params=["file", "terminal"])
def console(request, monkeypatch):
    if request.param == "terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    console = new_console()
    console.file, console.width = StringIO(), 200
    assert console.is_terminal == (request.param == "terminal")
    return console


def require_tame(written):
    """Nothing but rich's own sequences steers: colours and style, moves of the cursor, lines erased."""
    assert HOSTILE not in written
    rest = re.sub(r"\x1b\[(\d+(;\d+)*m|[012]?K|1A|\?25[hl])|\r", "", written)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", rest)
    assert "\x1b[5m" not in written


def test_text_is_spelled_and_no_markup(console):
    console.print(f"[bold]{HOSTILE}[/x] :bomb:", soft_wrap=True)
    assert f"[bold]{SHOWN}[/x] :bomb:\n" in console.file.getvalue()


@pytest.mark.parametrize("cell", [HOSTILE, Text(HOSTILE)])
def test_a_table_is_spelled_and_not_cut(console, cell):
    table = Table(title=HOSTILE)
    table.add_column(cell)
    table.add_row(cell)
    console.print(table)
    require_tame(console.file.getvalue())
    assert isinstance(cell, Text) or console.file.getvalue().count(SHOWN) == 3


def test_progress_is_spelled(console):
    with display(console, quiet=False) as shown:
        shown(Phase(name=HOSTILE, num_runs=2))
        shown(
            Progress(
                run="1", variant=HOSTILE, seed=3, role="comparison", step=1, steps=2, tokens=1, loss=2.5, seconds=4.0
            )
        )
        shown(PartsDone(work=HOSTILE, done=1, total=1, unit=HOSTILE, item=HOSTILE))
        shown(Ended(run="1", variant=HOSTILE, seed=3, status="finished", loss=1.0))
    require_tame(console.file.getvalue())
    assert f"{SHOWN}, seed 3: validation loss 1.0000" in console.file.getvalue()
