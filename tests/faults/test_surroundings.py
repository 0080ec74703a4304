"""A full disk, a folder that vanishes, a clock that jumps, two commands on one folder, data that change."""

import random
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import victims
from lab_runs import LENGTH, executed, patch_miniatures, records_of, request_of, run_of, text_of, timeless

from tidegate import _faults
from tidegate.lab.compare.run import CHECKPOINTS, Failed, compare
from tidegate.lab.training import train
from tidegate.lab.training.events import ignore
from tidegate.lab.training.executors import serial
from tidegate.lab.training.train import RunContext


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    """A function that does a small comparison in a folder, from wherever it stands, and returns its records."""
    patch_miniatures(monkeypatch)
    # A checkpoint after each step, so that there is a previous one.
    monkeypatch.setattr(serial, "RunContext", partial(RunContext, checkpoint_seconds=0.0))
    request = request_of(text_of(tmp_path), num_seeds=1, budget=12 * 4 * LENGTH)

    def done(out, tell=ignore):
        return records_of(compare(request, out, executor=serial.SerialExecutor(), tell=tell))

    return done


@pytest.mark.parametrize("point", ["record:half-written", "checkpoint:before-move", "checkpoint:after-previous"])
def test_a_disk_that_is_full_at_a_write_is_named_and_nothing_is_lost(point, comparison, tmp_path, monkeypatch, report):
    expected = comparison(tmp_path / "undisturbed")
    monkeypatch.setenv(_faults.VARIABLE, f"{point}:1:full")
    _faults._reached.clear()
    out = tmp_path / "out"
    with pytest.raises(
        (OSError, Failed), match=r"could not be written: No space left on device.* are free\. Make room"
    ):
        comparison(out)
    monkeypatch.delenv(_faults.VARIABLE)
    assert comparison(out) == expected
    report(
        f"A full disk when {_faults.POINTS[point]}",
        tried=1,
        outcome="the error names the file, what it needs and what is free; with room again, the same records",
    )


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB, where mounting is allowed."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_small_disk_is_filled_and_given_room_again(small_disk, comparison, tmp_path, report):
    expected = comparison(tmp_path / "undisturbed")
    ballast = small_disk / "ballast"
    for kilobytes in (1000, 900, 750):
        ballast.write_bytes(bytes(1024 * kilobytes))
        with pytest.raises((OSError, Failed), match="No space left on device"):
            comparison(small_disk / "out")
    ballast.unlink()
    assert comparison(small_disk / "out") == expected
    report(
        "A disk of 1 MB that is full, at three fillings",
        tried=3,
        outcome="refused each time, naming the file; with room again it went on to the same records",
    )


def test_a_limit_on_the_size_of_files_is_an_error_and_no_silence(comparison, tmp_path, report):
    expected = comparison(tmp_path / "undisturbed")
    process = victims.start(victims.limited_comparison, tmp_path, tmp_path / "out", 1, 12)
    process.join()
    assert process.exitcode not in (0, None)
    assert comparison(tmp_path / "out") == expected
    report(
        "A limit on the size of files (RLIMIT_FSIZE)",
        tried=1,
        outcome="the command failed; without the limit it went on to the same records",
    )


def test_a_folder_that_vanishes_is_named(comparison, tmp_path, report):
    out = tmp_path / "out"

    def remove(_event):
        shutil.rmtree(out, ignore_errors=True)

    with pytest.raises(OSError, match=str(out)):
        comparison(out, tell=remove)
    assert comparison(out) == comparison(tmp_path / "undisturbed")
    report(
        "The folder of a comparison vanishes while it runs",
        tried=1,
        outcome="the error names the folder; the same command does it anew, to the same records",
    )


class Jumping(datetime):
    """A clock that is anywhere within thirty years of now, at each look."""

    rng = random.Random(5)

    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) + timedelta(days=cls.rng.uniform(-10_000, 10_000))


def test_a_clock_that_jumps_changes_no_number(comparison, tmp_path, monkeypatch, report):
    expected = comparison(tmp_path / "undisturbed")
    monkeypatch.setattr(train, "datetime", Jumping)
    rng = random.Random(6)
    monkeypatch.setattr(train.time, "time", lambda: rng.uniform(0, 4e9))
    assert comparison(tmp_path / "out") == expected
    assert Jumping.now(UTC) != Jumping.now(UTC)
    report("A clock that jumps by years", tried=1, outcome="records equal but for the moment that they name")


def test_a_second_command_on_a_folder_is_refused_and_harms_nothing(comparison, tmp_path, report):
    out, refused = tmp_path / "out", []

    def disturb(event):
        if not refused:
            refused.append(True)
            with pytest.raises(
                ValueError, match=r"Another command is at work in .*Wait for it, or choose another --out"
            ):
                comparison(out)

    records = comparison(out, tell=disturb)
    assert refused
    assert records == comparison(tmp_path / "undisturbed")
    report("Two commands on one folder", tried=1, outcome="the second is refused; the first is unharmed")


def test_data_that_change_between_driver_and_worker_are_noticed(tmp_path, report):
    run = run_of(text_of(tmp_path))
    path = tmp_path / "sums.txt"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"the sum", b"the Sum", 1))
    changed = executed(run, folder=tmp_path / CHECKPOINTS)
    assert changed.status == "failed"
    assert "has changed" in changed.error
    path.write_bytes(whole)
    assert timeless(executed(run, folder=tmp_path / CHECKPOINTS)) == timeless(executed(run))
    report(
        "Data that change between driver and worker",
        tried=1,
        outcome="the run fails, naming the file; with the data back, the same record",
    )
