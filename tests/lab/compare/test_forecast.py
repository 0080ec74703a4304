"""What is said before the first run: the number of runs, their time, and what they can detect."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab_runs import cost_of, request_of, text_of

from tidegate.lab.compare.design import base_runs
from tidegate.lab.compare.forecast import TUNED_NOISE, forecast
from tidegate.lab.compare.request import GRID
from tidegate.lab.compare.summary import summarise
from tidegate.lab.training.records import Costs, RecordFile, records_path

RECORDS = Path(__file__).parents[3] / "docs" / "records" / "compare"
COSTS = Costs(request="", items=(cost_of("none"), cost_of("g1")), environment={})


@pytest.fixture
def said(tmp_path, miniatures):
    """Gives the forecast of a request on a small text."""

    def say(costs=COSTS, **options):
        request = request_of(text_of(tmp_path), "none,g1", **options)
        return forecast(request, base_runs(request), costs)

    return say


def test_it_counts_the_runs_and_their_time(said):
    assert said(num_seeds=5).startswith("This trains 10 comparison runs, in about 1 min on ")


@pytest.mark.parametrize(("search", "number"), [("grid", 54), ("stepwise", 30)])
def test_it_counts_the_trials_of_each_search(said, search, number):
    assert f"{number} tuning runs and 6 comparison runs" in said(grid=replace(GRID, search=search))


def test_evaluated_tokens_cost_a_third(tmp_path, miniatures, monkeypatch):
    monkeypatch.setattr("tidegate.lab.compare.forecast.num_cores", lambda: 1)
    request = request_of(text_of(tmp_path), "none,g1", num_seeds=5)
    base = base_runs(request)
    slow = replace(COSTS, items=tuple(replace(cost, tokens_per_second=1.0) for cost in COSTS.items))
    run = base["none"]
    data, options = run.task.load(), run.training
    rows = options.steps * options.batch_size
    rows += sum(len(batch.inputs) for batch in [*options.num_evaluations * data.validation(), *data.final()]) / 3
    hours, minutes = divmod(round(2 * 5 * rows * run.task.length / 60), 60)
    assert f"in about {hours} h {minutes} min on 1 core" in forecast(request, base, slow)


def test_tuning_is_assumed_to_have_the_noise_of_the_first_arm(said):
    assert "0.65 %" in said(num_seeds=5)
    assert "3.1 %" in said(num_seeds=5, grid=GRID)
    assert "%" not in said(num_seeds=2), "two seeds give no verdict"
    tuned = summarise(RecordFile(records_path(RECORDS / "first-arm")).read())
    control = np.array([record.loss for record in tuned.control.records])
    losses = np.array([[r.loss for r in v.records] for v in tuned.variants if v.name != "none"])
    scatter = (losses - control).std(axis=1, ddof=1) / control.mean()
    assert np.sqrt((scatter**2).mean()) == pytest.approx(TUNED_NOISE, rel=0.01)
