"""A full disk, a folder that vanishes, a clock that jumps, two commands in one folder, data that changes."""

import random
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fault_points
import pytest
import victims
from errors import rejects
from lab_runs import LENGTH, executed, patch_miniatures, records_of, request_of, run_of, text_of, timeless

from tidegate.lab.compare.run import CHECKPOINTS, RunsFailedError, compare
from tidegate.lab.training import train
from tidegate.lab.training.events import Ended, Phase, Progress, ignore
from tidegate.lab.training.executors.executor import SerialExecutor

MOMENTS = {Phase: "a phase begins", Progress: "a step is done", Ended: "a run has ended"}


@pytest.fixture(scope="module")
def request_and_expected(tmp_path_factory):
    """A small comparison, and the records that it has undisturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    request = request_of(text_of(folder), num_seeds=1, budget=12 * 4 * LENGTH)
    with pytest.MonkeyPatch.context() as patch:
        return request, compare_in(folder / "out", request, patch)


def compare_in(out, request, patch, on_event=ignore):
    patch_miniatures(patch)
    # A checkpoint after each step, so that there is a previous one.
    executor = SerialExecutor(checkpoint_seconds=0.0)
    return records_of(compare(request, out, executor=executor, on_event=on_event))


@pytest.fixture
def comparison(request_and_expected, monkeypatch):
    """A function that does the comparison in a folder, from wherever it stands, and returns its records."""
    return lambda out, on_event=ignore: compare_in(out, request_and_expected[0], monkeypatch, on_event)


@pytest.fixture
def expected(request_and_expected):
    return request_and_expected[1]


@pytest.mark.fault(lambda point: f"A full disk when {fault_points.POINTS[point]}")
@pytest.mark.parametrize("point", ["record:half-written", "checkpoint:before-move", "checkpoint:after-previous"])
def test_a_disk_that_is_full_at_a_write_is_named_and_nothing_is_lost(
    point, comparison, expected, tmp_path, monkeypatch, report
):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        fault_points.ask_for(patch, point)
        with pytest.raises((OSError, RunsFailedError), match="No space left on device"):
            comparison(out)
    assert comparison(out) == expected
    report(tried=1, outcome="the error names the file and the space that it needs; with room again, the same records")


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


@pytest.mark.fault("A disk of 1 MB that is full, at three fillings")
def test_a_small_disk_is_filled_and_given_room_again(small_disk, comparison, expected, report):
    ballast = small_disk / "ballast"
    for kilobytes in (1000, 900, 750):
        ballast.write_bytes(bytes(1024 * kilobytes))
        with pytest.raises((OSError, RunsFailedError), match="No space left on device"):
            comparison(small_disk / "out")
    ballast.unlink()
    assert comparison(small_disk / "out") == expected
    report(tried=3, outcome="an error each time, naming the file; with room again, the same records")


@pytest.mark.fault("A limit on the size of files (RLIMIT_FSIZE)")
def test_a_limit_on_the_size_of_files_is_an_error_and_no_silence(
    request_and_expected, comparison, expected, tmp_path, report
):
    folder = Path(request_and_expected[0].task.source).parent
    process = victims.start(victims.limited_comparison, folder, tmp_path / "out", 1, 12)
    process.join()
    assert process.exitcode not in (0, None)
    assert comparison(tmp_path / "out") == expected
    report(tried=1, outcome="the command fails; without the limit, the same records")


@pytest.mark.fault(lambda moment: f"The folder of a comparison vanishes when {MOMENTS[moment]}")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_folder_that_vanishes_is_named_and_no_record_is_lost_in_silence(
    moment, comparison, expected, tmp_path, report
):
    out, removed = tmp_path / "out", []

    def remove(event):
        if isinstance(event, moment) and not removed:
            removed.append(event)
            shutil.rmtree(out)

    # A checkpoint would create the folder again, and a new file of records would lack the plan.
    with pytest.raises(OSError, match=str(out)):
        comparison(out, on_event=remove)
    assert removed
    assert comparison(out) == expected
    report(tried=1, outcome="the error names the folder; the same command gives the same records")


class Jumping(datetime):
    """A clock that is anywhere within thirty years of now, at each look."""

    rng = random.Random(5)

    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) + timedelta(days=cls.rng.uniform(-10_000, 10_000))


@pytest.mark.fault("A clock that jumps by years")
def test_a_clock_that_jumps_changes_no_number(comparison, expected, tmp_path, monkeypatch, report):
    monkeypatch.setattr(train, "datetime", Jumping)
    rng = random.Random(6)
    monkeypatch.setattr(train.time, "time", lambda: rng.uniform(0, 4e9))
    assert comparison(tmp_path / "out") == expected
    assert Jumping.now(UTC) != Jumping.now(UTC)
    report(tried=1, outcome="the same records, times aside")


@pytest.mark.fault("Two commands on one folder")
def test_a_second_command_on_a_folder_is_refused_and_harms_nothing(comparison, expected, tmp_path, report):
    out, refused = tmp_path / "out", []

    def disturb(event):
        if not refused:
            refused.append(True)
            with rejects("out", hint="Wait for it"):
                comparison(out)

    records = comparison(out, on_event=disturb)
    assert refused
    assert records == expected
    report(tried=1, outcome="the second is rejected; the first is unharmed")


@pytest.mark.fault("Data that change between driver and worker")
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
    report(tried=1, outcome="the run fails, naming the file; with the data back, the same record")
