"""Whatever is killed at whatever moment goes on, and ends with the records of one that was left alone."""

import json
import random
import time
from collections import Counter

import pytest
import victims
from lab_runs import records_of, text_of, timeless

from tidegate._faults import POINTS, VARIABLE
from tidegate.lab.training.records import Record, RecordFile, records_path

WRITES = [point for point in POINTS if point.startswith(("record:", "checkpoint:"))]
"""The moments inside the writing of a record and of a checkpoint."""


def lines_of(out):
    return RecordFile(records_path(out)).read()


def require_equal(out, expected):
    """Every record is there once, and is bit for bit that of the undisturbed comparison, times aside."""
    records = [timeless(line) for line in lines_of(out) if isinstance(line, Record)]
    assert Counter(record.id for record in records) == Counter(expected.keys())
    assert {record.id: record for record in records} == expected


class Disturbed:
    """A comparison by one executor: where its text lies, what it gives undisturbed, and how long that takes."""

    def __init__(self, folder, work, *sizes):
        self.folder, self.work, self.sizes = folder, work, sizes
        text_of(folder)
        self.finish(folder / "first")  # which waits for the server of the victims
        start = time.monotonic()
        self.finish(folder / "undisturbed")
        self.seconds = time.monotonic() - start
        self.expected = records_of(lines_of(folder / "undisturbed"))

    def start(self, out, **environment):
        return victims.start(self.work, self.folder, out, *self.sizes, environment=environment)

    def finish(self, out):
        process = self.start(out)
        process.join()
        assert process.exitcode == 0

    def kill_at_random(self, out, kill, times, moments):
        """Start and kill so many times, then let it end; returns how many kills met something alive."""
        killed = 0
        for _ in range(times):
            process = self.start(out)
            process.join(moments.uniform(0, self.seconds))
            killed += kill(process)
        self.finish(out)
        require_equal(out, self.expected)
        return killed


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    return Disturbed(tmp_path_factory.mktemp("serial"), victims.small_comparison, 1, 40)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    return Disturbed(tmp_path_factory.mktemp("processes"), victims.comparison_in_processes, 2, 400)


def test_a_comparison_killed_at_random_moments_goes_on(serial, tmp_path, effort, report):
    moments, killed, folders = random.Random(14), 0, 0
    while killed < effort(4, 50):
        killed += serial.kill_at_random(tmp_path / str(folders), victims.kill, 4, moments)
        folders += 1
    report(
        "SIGKILL of a serial comparison at a random moment",
        tried=killed,
        outcome=f"every restart went on; in all {folders} folders the records equal those of an undisturbed run bit "
        "for bit, none lost, none doubled",
    )


@pytest.mark.parametrize("point", WRITES)
def test_a_kill_inside_a_write_loses_nothing(serial, point, tmp_path, effort, report):
    counts = range(1, effort(2, 5))
    for count in counts:
        out = tmp_path / str(count)
        process = serial.start(out, **{VARIABLE: f"{point}:{count}:kill"})
        process.join()
        assert process.exitcode == -9
        serial.finish(out)
        require_equal(out, serial.expected)
    report(
        f"SIGKILL when {POINTS[point]}",
        tried=len(counts),
        outcome="the restart went on to the same records, none lost, none doubled",
    )


@pytest.mark.torture
@pytest.mark.parametrize("whom", ["the driver", "a worker", "driver and workers at once"])
def test_a_comparison_in_processes_killed_at_random_moments_goes_on(processes, whom, tmp_path, effort, report):
    kill = {"the driver": victims.kill, "a worker": victims.kill_child, "driver and workers at once": victims.kill_all}
    moments, killed, folders = random.Random(whom), 0, 0
    while killed < effort(1, 18):
        killed += processes.kill_at_random(tmp_path / str(folders), kill[whom], 3, moments)
        folders += 1
    report(
        f"SIGKILL of {whom} at a random moment of a comparison in processes",
        tried=killed,
        outcome=f"every restart went on; in all {folders} folders the records equal those of an undisturbed run bit "
        "for bit, none lost, none doubled",
    )


def test_a_study_killed_at_random_moments_leaves_no_half_of_a_record(tmp_path, effort, report):
    victims.start(victims.small_study, tmp_path / "expected").join()
    expected = json.loads((tmp_path / "expected" / "depth.json").read_bytes())
    start = time.monotonic()
    victims.start(victims.small_study, tmp_path / "out").join()
    seconds, moments, killed = time.monotonic() - start, random.Random(3), 0
    for _ in range(effort(2, 50)):
        process = victims.start(victims.small_study, tmp_path / "out")
        process.join(moments.uniform(0, seconds))
        killed += victims.kill(process)
        assert json.loads((tmp_path / "out" / "depth.json").read_bytes()) == expected
    report(
        "SIGKILL of a study at a random moment",
        tried=killed,
        outcome="the record that was there stayed whole; a restart gives the same one",
    )
