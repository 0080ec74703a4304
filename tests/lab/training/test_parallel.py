"""Two processes train what one does: one launch of both serves all gates and all ways to run in parallel."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import lab_processes
import pytest
import torch
from errors import rejects
from lab_processes import KINDS, LONG, SHORT, SIZES, STOP, run_with, steps_of, stopped_after
from lab_runs import executed, model_of, run_of, text_of
from safetensors.torch import load_file

from tidegate.gate import PRESETS
from tidegate.lab.models.measure import measure_run
from tidegate.lab.training.events import Interrupted
from tidegate.lab.training.model import build_model
from tidegate.lab.training.outputs import trained_model
from tidegate.lab.training.parallel import joined_processes, require_parallel

# All gates over fifty steps, with --full, take minutes in the first test.
pytestmark = pytest.mark.timeout(1500)

GATES = ("none", *PRESETS)
IN_EVERY_WAY = ("none", "bma", "g1", "g5", "sink")
"""A gate at each place that is shared out in another way: none, values, outputs, the dense projection, a sink."""
TOLERANCES = {"float64": (1e-10, 1e-10), "float32": (1e-5, 1e-4)}
"""Of losses and of weights."""


def cases_of(full):
    """Every gate in one way and some in every way in float64, which tells more, and one in float32.

    With --full all gates in all ways, over fifty steps.
    """
    whole = [
        ("float64", gate, kind, 1, LONG if full else SHORT)
        for place, gate in enumerate(GATES)
        for kind in (KINDS if full or gate in IN_EVERY_WAY else [KINDS[place % len(KINDS)]])
    ]
    single = [("float32", gate, kind, 1, LONG) for gate in (GATES if full else ("bma",)) for kind in KINDS]
    return [*whole, *single, *(("float64", "g1-head", kind, 2, SHORT) for kind in KINDS)]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """The folder in which two processes have left what they made."""
    place = tmp_path_factory.mktemp("processes")
    task = text_of(place)
    for kind in KINDS:
        with suppress(Interrupted):
            executed(run_with(task, "g1"), folder=place / f"from-one-{kind}", **stopped_after(STOP))
    # torchrun finds a port for them.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    cases = json.dumps(cases_of(request.config.getoption("--full")))
    done = subprocess.run(
        [*torchrun, lab_processes.__file__, str(place), cases],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(lab_processes.__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return place


@pytest.fixture(scope="module")
def task(folder):
    return text_of(folder)


@pytest.fixture(scope="module")
def alone(task):
    """What one process makes, once for each gate and dtype."""

    @cache
    def make(dtype, gate, steps):
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            return steps_of(run_with(task, gate, steps=steps))
        finally:
            torch.set_default_dtype(torch.float32)

    return make


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = cases_of(metafunc.config.getoption("--full"))
        metafunc.parametrize("case", cases, ids=["-".join(map(str, case)) for case in cases])


def test_two_processes_make_the_steps_of_one(folder, alone, case):
    dtype, gate, _, _, steps = case
    name = "-".join(map(str, case))
    losses, weights = json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")
    expected_losses, expected = alone(dtype, gate, steps)
    of_losses, of_weights = TOLERANCES[dtype]
    assert losses == pytest.approx(expected_losses, abs=of_losses)
    assert weights.keys() == expected.keys()
    for weight, value in expected.items():
        torch.testing.assert_close(weights[weight], value, rtol=0, atol=of_weights, msg=f"{name}: {weight}")
    assert len(losses) == steps
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_process_began_two_go_on_with(folder, task, kind):
    status, loss, error = json.loads((folder / f"from-one-{kind}.json").read_text())
    assert status == "finished", error
    run = run_with(task, "g1")
    whole = executed(run)
    assert loss == pytest.approx(whole.loss, abs=1e-5)
    # The last checkpoint is the trained model, whole again.
    trained = trained_model(run, folder / f"from-one-{kind}")
    assert trained.num_parameters() == whole.num_parameters


def test_the_layers_of_what_two_processes_trained_are_measured(folder, task):
    run = run_with(task, "g1")
    measured = measure_run(run, folder / "from-one-ddp")
    assert measured.curvature is not None, measured.curvature_reason
    assert len(measured.gauge) == SIZES["num_layers"], measured.gauge_reason


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_processes_began_one_goes_on_with(folder, task, kind):
    run, told = run_with(task, "g1"), []
    place = folder / f"from-two-{kind}"
    record = executed(run, folder=place, report=told.append)
    assert record.status == "finished", record.error
    assert told[0].step == STOP + 1
    whole = executed(run)
    assert record.loss == pytest.approx(whole.loss, abs=1e-5)
    assert record.fingerprints == whole.fingerprints


@pytest.mark.parametrize(
    ("kind", "number", "options", "field", "expected"),
    [
        ("ddp", 3, {}, "nproc", "4 in 1 parts"),
        ("ddp", 2, {"accumulate": 4}, "nproc", "4 in 4 parts"),
        ("fsdp", 2, {"optimizer": "muon"}, "parallel", "'ddp' for Muon"),
        ("tp", 2, {"compile": True}, "parallel", "'ddp' with compile"),
        ("tp", 8, {}, "num_processes", "the 4 heads"),
    ],
)
def test_what_processes_cannot_do_together_is_rejected_before_they_start(task, kind, number, options, field, expected):
    with rejects(field) as caught:
        require_parallel(run_with(task, "g1", **options), kind, number)
    assert expected in caught.value.expected


def test_a_gate_that_reads_the_next_sequence_is_refused_where_rows_are_shared_out(task):
    run = run_of(task, model=model_of("output:input:sigmoid:shuffled", **SIZES))
    with rejects("parallel"):
        require_parallel(run, "ddp", 2)
    grouped = run_of(task, model=replace(model_of("g1", **SIZES), num_kv_heads=1))
    with rejects("num_processes") as caught:
        require_parallel(grouped, "tp", 2)
    assert "(num_kv_heads)" in caught.value.expected


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="names of threads are read from /proc")
def test_a_process_group_ends_with_its_context_though_the_model_lives_on(monkeypatch):
    def threads():
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        return names.count("pt_gloo_runloop")

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with joined_processes("ddp", "cpu") as processes:
        computing = processes.distribute(build_model(model_of("none", **SIZES)))
        assert threads() > 0
    assert threads() == 0
    assert computing.module is not None
