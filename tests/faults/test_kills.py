"""Whatever is killed at whatever moment goes on, and ends with the records of one that was left alone."""

import random
import time
from collections import Counter

import pytest
import victims
from lab_runs import records_of, text_of, timeless

from tidegate.lab.training.records import Record, RecordFile, records_path

NUM_SEEDS, STEPS = 1, 40


def lines_of(folder):
    return RecordFile(records_path(folder)).read()


def records_in(folder):
    """Every record of a folder, timeless, in their order."""
    return [timeless(line) for line in lines_of(folder) if isinstance(line, Record)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of the text, the records of a comparison that nobody disturbed, and its seconds."""
    folder = tmp_path_factory.mktemp("undisturbed")
    text_of(folder)
    start = time.monotonic()
    process = victims.start(victims.small_comparison, folder, folder / "out", NUM_SEEDS, STEPS)
    process.join()
    assert process.exitcode == 0
    return folder, records_of(lines_of(folder / "out")), time.monotonic() - start


def finish(folder, out):
    process = victims.start(victims.small_comparison, folder, out, NUM_SEEDS, STEPS)
    process.join()
    assert process.exitcode == 0


def test_a_comparison_killed_at_random_moments_goes_on_to_the_same_records(undisturbed, tmp_path, effort, report):
    folder, expected, seconds = undisturbed
    moments, tries, killed, rounds = random.Random(14), effort(4, 50), 0, 0
    while killed < tries:
        out, rounds = tmp_path / str(rounds), rounds + 1
        for _ in range(4):
            process = victims.start(victims.small_comparison, folder, out, NUM_SEEDS, STEPS)
            process.join(moments.uniform(0, seconds))
            killed += victims.kill(process)
        finish(folder, out)
        records = records_in(out)
        assert Counter(record.id for record in records) == Counter(expected.keys())
        assert {record.id: record for record in records} == expected
    report(
        "SIGKILL of a serial comparison at a random moment",
        tried=killed,
        outcome=f"every restart went on; in all {rounds} folders the {len(expected)} records equal those of an "
        "undisturbed run bit for bit, none lost, none doubled",
    )
