"""Runs on a Ray cluster of two machines: lost runs resume on the other, with the records of a single process."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import lab_cluster
import pytest
from errors import rejects
from lab_cluster import LONG, SCENARIOS, long_runs, pair_run
from lab_runs import executed, run_of, text_of, timeless

from tidegate.lab.training.events import Notice, Progress
from tidegate.lab.training.executors.executor import RunResources, make_executor
from tidegate.lab.training.parallel import is_lost_peer

# One cluster serves all; each run of several processes starts some ten interpreters.
SECONDS_FOR_A_SCENARIO = 300
pytestmark = pytest.mark.timeout(SECONDS_FOR_A_SCENARIO * (len(SCENARIOS) + 1))


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory):
    """The records, events and folder of each scenario."""
    folder = tmp_path_factory.mktemp("cluster")
    names = list(SCENARIOS) if request.config.getoption("--full") else ["crowded"]
    script = Path(lab_cluster.__file__)
    output = folder / "output.txt"
    with output.open("w") as file:
        cluster = subprocess.Popen(
            [sys.executable, str(script), str(folder), *names],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        cluster.wait(SECONDS_FOR_A_SCENARIO * len(names))
    except subprocess.TimeoutExpired:
        cluster.kill()
    assert cluster.wait() == 0, f"waited for {', '.join(names)} on a cluster:\n{output.read_text()[-5000:]}"
    return {name: (*pickle.loads((folder / name / "answer.pickle").read_bytes()), folder / name) for name in names}


def notices(events):
    return [event.text for event in events if isinstance(event, Notice)]


def first_steps(events):
    """The step at which each run was first heard of."""
    return {event.run: event.step for event in reversed(events) if isinstance(event, Progress)}


def timeless_by_id(records):
    return {record.id: timeless(record) for record in records}


@pytest.mark.full
def test_runs_that_lose_their_process_or_their_machine_go_on_elsewhere_and_are_recorded_once(answers):
    records, events, folder = answers["losses"]
    runs = long_runs(text_of(folder.parent))
    assert sorted(record.id for record in records) == sorted(run.id for run in runs)
    assert timeless_by_id(records) == timeless_by_id(executed(run) for run in runs)
    killed, left = notices(events)
    assert "ended early, by a signal or a crash, possibly for lack of memory. The run resumes from its last" in killed
    assert "ended early, with its machine, which left the cluster. The run resumes from its last checkpoint" in left


def test_runs_that_no_machine_has_room_for_are_refused_instead_of_waiting_for_ever(answers):
    said, _, _ = answers["crowded"]
    assert [words.partition(". ")[2] for words in said] == [
        f"Ray has no room for a run of {needs}: its machines have 2 × 1 core. Ask for less, or add machines before "
        "you start."
        for needs in ("2 cores", "3 cores, in 3 processes", "4 cores, in 2 processes")
    ]


@pytest.mark.full
def test_runs_that_were_stopped_go_on_to_the_same_records(answers):
    records, events, folder = answers["interrupted"]
    runs = long_runs(text_of(folder.parent))
    assert timeless_by_id(records) == timeless_by_id(executed(run) for run in runs)
    assert len(records) == 3
    # One or two had begun, and the others had not.
    assert 1 <= sum(step > 1 for step in first_steps(events).values()) <= 2


@pytest.mark.full
class TestTwoProcessesOfARun:
    @pytest.fixture
    def undisturbed(self, answers):
        (record,), _, _ = answers["together"]
        return record

    def test_make_the_record_of_one_to_rounding(self, answers, undisturbed):
        _, events, folder = answers["together"]
        run = pair_run(text_of(folder.parent))
        alone = executed(run)
        assert undisturbed.id == run.id
        assert undisturbed.status == "finished", undisturbed.error
        assert undisturbed.fingerprints == alone.fingerprints
        assert undisturbed.loss == pytest.approx(alone.loss, abs=1e-4)
        losses = [[point.loss for point in record.curve] for record in (undisturbed, alone)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)
        assert events[-1].step == LONG

    def test_that_are_lost_go_on_when_there_is_room_and_end_as_if_nothing_had_been(self, answers, undisturbed):
        (record,), events, _ = answers["together_lost"]
        assert timeless(record) == timeless(undisturbed)
        told = notices(events)
        assert [text for text in told if "ended early, one of 2, by a signal or a crash" in text]
        assert told[-1].startswith("No machine that is left has 2 cores, in 2 processes: the run waits until one joins")

    def test_that_fail_by_themselves_are_recorded_with_the_reason_and_not_tried_again(self, answers):
        (record,), events, _ = answers["together_failed"]
        assert record.status == "failed"
        assert "gone.txt" in record.error.strip().splitlines()[-1]
        assert not is_lost_peer(record.error)
        assert notices(events) == []

    def test_that_were_stopped_go_on_to_the_same_record(self, answers, undisturbed):
        records, events, _ = answers["together_interrupted"]
        (again,) = (record for record in records if record.run.seed == 0)
        assert timeless(again) == timeless(undisturbed)
        assert len(records) == 2
        assert first_steps(events)[again.id] > 1


def test_a_cluster_that_does_not_answer_is_an_error_at_once(task, monkeypatch):
    # Bound, so that nobody else takes the port, and not listening, so that it refuses.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        message = f"no Ray cluster answers at RAY_ADDRESS {address}: .*refused.* Start it"
        with pytest.raises(ConnectionError, match=message):
            make_executor("ray").require([run_of(task)])


@pytest.mark.parametrize(
    ("problem", "kind", "words"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (Exception("It timed out."), ConnectionError, r"Ray cannot be started or joined: It timed out\. Try again"),
    ],
)
def test_a_start_that_is_broken_off_leaves_no_connection_to_wait_for(task, monkeypatch, problem, kind, words):
    done = []

    def fail(**_):
        raise problem

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", fail)
    monkeypatch.setattr("ray.shutdown", lambda: done.append("shut down"))
    with pytest.raises(kind, match=words):
        make_executor("ray").require([run_of(task)])
    assert done == ["shut down"]


class TestWhatARunIsGiven:
    @pytest.mark.parametrize(
        ("options", "field"),
        [({"cpus": 1.5}, "cpus"), ({"cpus": 3, "processes": 2}, "cpus"), ({"gpus": 1, "processes": 2}, "gpus")],
    )
    def test_is_rejected_where_it_makes_no_sense(self, options, field):
        with rejects(field):
            RunResources(**options)

    def test_is_for_ray_alone(self):
        with rejects("executor"):
            make_executor("serial", resources=RunResources(cpus=2))

    @pytest.mark.parametrize(
        ("options", "training", "field", "expected"),
        [
            ({"gpus": 1}, {}, "gpus", "0 for runs on cpu"),
            ({}, {"device": "cuda"}, "gpus", "at least 1 for runs on cuda"),
            ({"processes": 3}, {}, "nproc", "4 in 1"),
        ],
    )
    def test_must_fit_the_run(self, task, options, training, field, expected):
        with rejects(field) as caught:
            RunResources(**options).require(run_of(task, **training))
        assert expected in caught.value.expected

    def test_is_counted_on_each_machine(self, task):
        run, machines = run_of(task), [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 3.0, "memory": 1e9}, {}]
        assert RunResources().num_places(run, machines) == 7
        assert RunResources(cpus=3).num_places(run, machines) == 2
        assert RunResources(cpus=8).num_places(run, machines) == 0
        # Several processes may be on several machines.
        assert RunResources(cpus=6, processes=2).num_places(run, machines) == 1
        assert RunResources(processes=3).num_places(run, machines) == 2
        assert RunResources(gpus=1).num_places(run, machines) == 2
        assert RunResources(gpus=4, processes=4).num_places(run, machines) == 0

    def test_is_the_runs_own_number_of_threads_unless_told(self, task):
        run = run_of(task, num_threads=3)
        assert RunResources().of_process(run) == {"CPU": 3, "GPU": 0}
        assert RunResources().threads is None
        assert RunResources(cpus=4, gpus=2, processes=2).of_process(run) == {"CPU": 2, "GPU": 1}
        assert RunResources(cpus=4, gpus=2, processes=2).describe(run) == "4 cores and 2 GPUs, in 2 processes"
