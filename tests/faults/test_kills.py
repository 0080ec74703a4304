"""Whatever is killed at whatever moment goes on, and ends with the records of one that was left alone."""

import json
import random
import time
from collections import Counter
from datetime import datetime

import fault_points
import pytest
import victims
from fault_points import POINTS
from lab_runs import records_of, text_of, timeless
from safetensors.torch import load_file

from tidegate.lab.training.executors.executor import RETRIES
from tidegate.lab.training.records import Record, RecordFile, records_path
from tidegate.torch import load_model

CHECKPOINT_WRITES = [point for point in POINTS if point.startswith("checkpoint:")]
WRITES = [point for point in POINTS if point.startswith("record:")] + CHECKPOINT_WRITES
"""The moments inside the writing of a record and of a checkpoint."""
NUM_KILLS_IN_PROCESSES = 8
"""Of driver, worker and both, in the long version: to begin, a worker imports PyTorch."""


def lines_of(out):
    return RecordFile(records_path(out)).read()


def require_equal(out, expected, *, num_failed=0):
    """Every record is there once, and is bit for bit that of the undisturbed comparison, times aside.

    num_failed : records besides those, of runs that were retried too often before they were done
    """
    records = [timeless(line) for line in lines_of(out) if isinstance(line, Record)]
    failed = [record for record in records if record.status == "failed"]
    assert len(failed) == num_failed
    records = [record for record in records if record not in failed]
    assert Counter(record.id for record in records) == Counter(expected.keys())
    assert {record.id: record for record in records} == expected


class Disturbed:
    """A comparison by one executor: where its text lies, what it gives undisturbed, and how long that takes."""

    def __init__(self, folder, work, *sizes):
        self.folder, self.work, self.sizes = folder, work, sizes
        text_of(folder)
        victims.wait_for_server()
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
    return Disturbed(tmp_path_factory.mktemp("processes"), victims.comparison_in_processes, 1, 400)


@pytest.mark.fault("SIGKILL of a serial comparison at a random moment")
def test_a_comparison_killed_at_random_moments_goes_on(serial, tmp_path, effort, report):
    moments, killed, folders = random.Random(14), 0, 0
    while killed < effort(4, 50):
        killed += serial.kill_at_random(tmp_path / str(folders), victims.kill, 4, moments)
        folders += 1
    report(tried=killed, outcome=equal_records(folders))


def equal_records(folders):
    return (
        f"every restart went on; in all {folders} folders the records equal those of an undisturbed run bit for bit, "
        "none lost, none doubled"
    )


@pytest.mark.fault(lambda point: f"SIGKILL when {POINTS[point]}")
@pytest.mark.parametrize("point", WRITES)
def test_a_kill_inside_a_write_loses_nothing(serial, point, tmp_path, effort, report):
    counts = range(1, effort(2, 5))
    for count in counts:
        out = tmp_path / str(count)
        process = serial.start(out, **fault_points.environment(point, count))
        process.join()
        assert process.exitcode == -9
        serial.finish(out)
        require_equal(out, serial.expected)
    report(tried=len(counts), outcome="the restart went on to the same records, none lost, none doubled")


@pytest.mark.torture
@pytest.mark.fault(lambda whom: f"SIGKILL of {whom} at a random moment of a comparison in processes")
@pytest.mark.parametrize("whom", ["the driver", "driver and workers at once"])
def test_a_comparison_whose_driver_is_killed_at_random_moments_goes_on(processes, whom, tmp_path, effort, report):
    kill = {"the driver": victims.kill, "driver and workers at once": victims.kill_all}
    moments, killed, folders = random.Random(whom), 0, 0
    while killed < effort(1, NUM_KILLS_IN_PROCESSES):
        killed += processes.kill_at_random(tmp_path / str(folders), kill[whom], 3, moments)
        folders += 1
    report(tried=killed, outcome=equal_records(folders))


def resumed_runs(out):
    """The runs that lost their process and went on from a checkpoint: by their records they started before the loss.

    A record has whole seconds, so that a run is left out if it was lost in the second in which it started.
    """
    started = {line.id: line.timing.started for line in lines_of(out) if isinstance(line, Record) and line.timing}
    return [
        run
        for run, moment in victims.first_losses(out).items()
        if datetime.fromisoformat(started[run]).timestamp() < int(moment)
    ]


@pytest.mark.torture
@pytest.mark.fault("SIGKILL of a worker at a random moment of a comparison in processes")
def test_a_run_whose_worker_is_killed_goes_on_from_its_checkpoint(processes, tmp_path, effort, report):
    """In every second folder the moment is one at which runs are at work."""
    moments, killed, folders, lost, resumed = random.Random("worker"), 0, 0, 0, 0
    most = effort(1, NUM_KILLS_IN_PROCESSES)
    while (killed < most or not resumed) and folders < 3 * most:
        out = tmp_path / str(folders)
        process = processes.start(out)
        if folders % 2:
            victims.wait_for_a_step(process, out)
        process.join(moments.uniform(0, 2 if folders % 2 else processes.seconds))
        killed += victims.kill_child(process)
        assert process.exitcode == 0
        require_equal(out, processes.expected)
        folders += 1
        lost += len(victims.first_losses(out))
        resumed += len(resumed_runs(out))
    assert resumed, "no run went on from a checkpoint"
    report(
        tried=killed,
        outcome=f"{lost} met a run at work, of which at least {resumed} went on from a checkpoint; in all {folders} "
        "folders the same command ended with the records of an undisturbed run bit for bit, none lost, none doubled",
    )


@pytest.mark.torture
@pytest.mark.fault(lambda point: f"SIGKILL of a worker, three times in a row, when {POINTS[point]}")
@pytest.mark.parametrize("point", CHECKPOINT_WRITES)
def test_a_run_whose_workers_are_killed_inside_their_writes_fails_and_goes_on_later(processes, point, tmp_path, report):
    """Each worker is killed at its third checkpoint, so that two runs fail; the next command goes on with them."""
    out = tmp_path / "out"
    process = processes.start(out, **fault_points.environment(point, 3))
    process.join()
    assert process.exitcode == 1
    processes.finish(out)
    require_equal(out, processes.expected, num_failed=2)
    assert len(victims.first_losses(out)) == 2
    report(
        tried=2 * (1 + RETRIES),
        outcome="two runs were retried twice and recorded as failed; the next command went on with them to the same "
        "records",
    )


class DisturbedStudy:
    """A study in miniature: what its record is undisturbed, and how long it takes."""

    def __init__(self, folder):
        victims.wait_for_server()
        start = time.monotonic()
        self.expected = self.finish(folder / "undisturbed")
        self.seconds = time.monotonic() - start

    def finish(self, out):
        process = victims.start(victims.small_study, out)
        process.join()
        assert process.exitcode == 0
        return self.record_in(out)

    def record_in(self, out):
        path = out / "depth.json"
        return json.loads(path.read_bytes()) if path.exists() else None

    def require_whole(self, out):
        """A killed study has left its record or none, and the same command gives it."""
        assert self.record_in(out) in (None, self.expected)
        assert self.finish(out) == self.expected


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return DisturbedStudy(tmp_path_factory.mktemp("study"))


@pytest.mark.fault("SIGKILL of a study at a random moment")
def test_a_study_killed_at_random_moments_leaves_no_half_of_a_record(study, tmp_path, effort, report):
    moments, killed, folders = random.Random(3), 0, 0
    while killed < effort(2, 50):
        out = tmp_path / str(folders)
        folders += 1
        process = victims.start(victims.small_study, out)
        process.join(moments.uniform(0, study.seconds))
        killed += victims.kill(process)
        study.require_whole(out)
    report(tried=killed, outcome="no record or the whole of it was there; the same command gave the undisturbed one")


@pytest.mark.fault("SIGKILL of a study when its record is whole beside its place")
def test_a_study_killed_before_its_record_is_in_its_place_leaves_none(study, tmp_path, report):
    process = victims.start(victims.small_study, tmp_path, environment=fault_points.environment("file:before-move"))
    process.join()
    assert process.exitcode == -9
    assert study.record_in(tmp_path) is None
    study.require_whole(tmp_path)
    report(tried=1, outcome="no record was there; the same command gave the undisturbed one")


class DisturbedVerb:
    """A verb that writes a folder: what it leaves undisturbed, and how long that takes."""

    def __init__(self, folder, work, result_of):
        self.folder, self.work, self.result_of = folder, work, result_of
        victims.wait_for_server()
        start = time.monotonic()
        self.expected = self.finish(folder / "undisturbed")
        self.seconds = time.monotonic() - start

    def start(self, out, **environment):
        return victims.start(self.work, self.folder, out, environment=environment)

    def finish(self, out):
        process = self.start(out)
        process.join()
        assert process.exitcode == 0
        return self.result_of(out)

    def kill_at_random(self, folder, number, moments):
        """Kill so many in folders of their own, each of which is then finished; returns how many folders there were."""
        killed = folders = 0
        while killed < number:
            out = folder / str(folders)
            folders += 1
            for _ in range(2):
                process = self.start(out)
                process.join(moments.uniform(0, self.seconds))
                killed += victims.kill(process)
            assert self.finish(out) == self.expected
        return killed, folders

    def kill_at(self, point, out, count):
        process = self.start(out, **fault_points.environment(point, count))
        process.join()
        assert process.exitcode == -9
        assert self.finish(out) == self.expected


def trained(out):
    """What a training leaves, times aside: its record, its model twice, the log's losses, the names of its files."""
    (record,) = [timeless(line) for line in lines_of(out)]
    weights = load_model(out / "model.safetensors").state_dict()
    steps = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    exported = load_file(out / "hf" / "model.safetensors")
    return (
        record,
        {name: value.numpy().tobytes() for name, value in weights.items()},
        {name: value.numpy().tobytes() for name, value in exported.items()},
        (out / "hf" / "config.json").read_text(),
        [(line["step"], line["loss"]) for line in steps if "step" in line],
        {file.name for file in out.iterdir() if not file.name.endswith(".partial")},
    )


def shards_in(out):
    """All that a tokenizing leaves."""
    return {file.name: file.read_bytes() for file in out.iterdir() if not file.name.endswith(".partial")}


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    return DisturbedVerb(tmp_path_factory.mktemp("training"), victims.small_training, trained)


@pytest.fixture(scope="module")
def tokenizing(tmp_path_factory):
    return DisturbedVerb(tmp_path_factory.mktemp("tokenizing"), victims.small_tokenizing, shards_in)


@pytest.mark.fault("SIGKILL of `tidegate train` at a random moment")
def test_a_training_killed_at_random_moments_goes_on_to_the_same_model(training, tmp_path, effort, report):
    killed, folders = training.kill_at_random(tmp_path, effort(2, 50), random.Random(5))
    report(
        tried=killed,
        outcome=f"the same command went on; in all {folders} folders record, model and the losses of the log equal "
        "those of an undisturbed run bit for bit",
    )


@pytest.mark.fault(lambda point: f"SIGKILL of `tidegate train` when {POINTS[point]}")
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=() if point in ("record:written", "model:before-move") else pytest.mark.torture)
        for point in (*WRITES, "model:before-move")
    ],
)
def test_a_training_killed_inside_a_write_goes_on_to_the_same_model(training, point, tmp_path, effort, report):
    # A model and a record are written once, a checkpoint after each step.
    counts = range(1, effort(2, 5)) if point in CHECKPOINT_WRITES else (1,)
    for count in counts:
        training.kill_at(point, tmp_path / str(count), count)
    report(tried=len(counts), outcome="the same command went on to the same record, model and log")


@pytest.mark.fault("SIGKILL of `tidegate tokenize` at a random moment")
def test_a_tokenizing_killed_at_random_moments_goes_on_to_the_same_shards(tokenizing, tmp_path, effort, report):
    killed, folders = tokenizing.kill_at_random(tmp_path, effort(4, 100), random.Random(6))
    report(
        tried=killed,
        outcome=f"the same command went on; all files of the {folders} folders equal those of an undisturbed run",
    )


@pytest.mark.fault("SIGKILL of `tidegate tokenize` when a shard, its tokenizer or its index is whole beside its place")
def test_a_tokenizing_killed_inside_a_write_goes_on_to_the_same_shards(tokenizing, tmp_path, effort, report):
    num_writes = len(tokenizing.expected)
    counts = range(1, num_writes + 1, effort(5, 1))
    for count in counts:
        tokenizing.kill_at("file:before-move", tmp_path / str(count), count)
    report(tried=len(counts), outcome="the same command went on; all files equal those of an undisturbed run")
