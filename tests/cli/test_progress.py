import re
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from tidegate.cli import progress
from tidegate.cli.progress import display
from tidegate.lab.training.events import Ended, Notice, PartsDone, Phase, Progress


@pytest.fixture
def clock(monkeypatch):
    """A time that changes only when a test changes its `now`."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(progress, "time", clock)
    return clock


def step_of(variant="bma", *, step=5, run="1", **changes):
    fields = {"seed": 3, "role": "comparison", "steps": 20, "tokens": 6000, "loss": 2.5, "seconds": 4.0} | changes
    return Progress(run=run, variant=variant, step=step, **fields)


def end_of(variant="bma", *, run="1", status="finished", loss=1.25):
    return Ended(run=run, variant=variant, seed=3, status=status, loss=loss)


def parts_of(done, *, item="g1", **changes):
    return PartsDone(**({"work": "depth", "done": done, "total": 4, "unit": "layer", "item": item} | changes))


def written(*events, quiet=False, **options):
    """The text that a file gets."""
    console = Console(file=StringIO(), width=60)
    with display(console, quiet=quiet, **options) as shown:
        for event in events:
            shown(event() if callable(event) else event)
    return console.file.getvalue()


@pytest.fixture
def drawn(monkeypatch):
    """The text that a terminal gets, without escape sequences."""
    monkeypatch.setenv("TERM", "xterm-256color")

    def draw(*events, **options):
        console = Console(file=StringIO(), force_terminal=True, width=160)
        with display(console, quiet=False, **options) as shown:
            for event in events:
                shown(event)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())

    return draw


def later(clock, seconds, event):
    """The event, after some time."""

    def happen():
        clock.now += seconds
        return event

    return happen


class TestLines:
    def test_tell_of_phases_and_ends(self):
        text = written(
            Phase(name="measuring costs", num_runs=0),
            Phase(name="comparing", num_runs=2, num_done=4),
            end_of(loss=1.25),
            end_of("g1", run="2", status="diverged", loss=None),
        )
        lines = text.splitlines()
        assert lines[0] == "measuring costs..."
        assert lines[1] == "comparing: 2 runs (4 already done)"
        assert written(Phase(name="training", num_runs=1)) == "training: 1 run\n"
        assert written(parts_of(1, total=1)) == "depth: 1 of 1 layer\n"
        assert lines[2].startswith("bma, seed 3: validation loss 1.2500 (1 of 2")
        assert lines[3] == "g1, seed 3: diverged (2 of 2)"

    def test_come_now_and_then_while_a_run_goes_on(self, clock):
        text = written(
            Phase(name="comparing", num_runs=2),
            later(clock, 10, step_of(step=5)),
            later(clock, 10, step_of(step=10)),
            later(clock, 10, step_of(step=15)),
        )
        assert text.splitlines()[1:] == [
            "bma, seed 3: step 10 of 20, loss 2.500, 1,500 tokens/s, about 2:00 left in total"
        ]

    def test_count_what_was_done_before_as_no_work_of_this_phase(self, clock):
        text = written(
            Phase(name="comparing", num_runs=1),
            later(clock, 0, step_of(step=10)),
            later(clock, 30, step_of(step=15)),
        )
        # A quarter took half a minute, and a quarter is left.
        assert text.splitlines()[-1].endswith("about 0:30 left in total")

    def test_count_the_runs_of_later_phases(self, clock):
        text = written(
            Phase(name="tuning", num_runs=2, num_later=3),
            later(clock, 0, step_of(step=0)),
            later(clock, 60, end_of()),
        )
        assert text.splitlines()[-1].endswith("(1 of 2, about 4:00 left in total)")

    def test_tell_of_parts_now_and_then_and_of_their_end(self, clock):
        text = written(
            parts_of(0),
            later(clock, 10, parts_of(1)),
            later(clock, 10, parts_of(2)),
            later(clock, 10, parts_of(3)),
            later(clock, 10, parts_of(4)),
        )
        assert text.splitlines() == ["depth: 2 of 4 layers (g1), about 0:20 left", "depth: 4 of 4 layers"]


class TestBars:
    def test_show_each_run_with_loss_speed_and_time_left_and_one_for_all(self, drawn):
        text = drawn(
            Phase(name="comparing", num_runs=2, num_done=1), step_of(), step_of("g1", run="2", step=10, loss=3.0)
        )
        own, other = (next(line for line in reversed(text.splitlines()) if name in line) for name in ("bma,", "g1,"))
        assert re.search(r"bma, seed 3 .*loss 2\.500  1,500 tokens/s  0:12 left", own)
        assert re.search(r"g1, seed 3 .*loss 3\.000  1,500 tokens/s  0:04 left", other)
        assert re.search(r"comparing .*0 of 2 runs", text)

    def test_of_runs_that_ended_give_way_to_a_line(self, drawn):
        text = drawn(Phase(name="comparing", num_runs=2), step_of(), end_of())
        final = text.splitlines()[-2:]
        assert "bma, seed 3: validation loss 1.2500" in text
        assert not any("bma" in line for line in final[-1:])
        assert "1 of 2 runs" in text

    def test_show_each_work_by_its_parts_from_its_beginning(self, drawn):
        assert re.search(r"depth +\S* +0 of 4 layers ", drawn(parts_of(0, item="")))
        text = drawn(parts_of(0), parts_of(2), parts_of(1, work="modulus", item="[bold]"))
        assert re.search(r"depth .*2 of 4 layers  0:00 left  g1", text)
        assert re.search(r"modulus .*1 of 4 layers  0:00 left  \[bold\]", text)


def test_quiet_is_quiet():
    assert written(Phase(name="comparing", num_runs=1), step_of(), end_of(), quiet=True) == ""


def test_a_notice_is_a_line_on_a_terminal_and_elsewhere(drawn):
    notice = Notice(text="Its process was killed. It resumes.", run="1", variant="[bold]", seed=3)
    events = Phase(name="comparing", num_runs=1), step_of("[bold]"), notice, Notice(text="Another takes its place.")
    for shown in (written(*events), drawn(*events)):
        assert "[bold], seed 3: Its process was killed. It resumes.\n" in shown
        assert "Another takes its place.\n" in shown
    assert written(notice, quiet=True) == ""
