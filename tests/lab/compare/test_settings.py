"""Settings that were tuned before: which are taken, for whom, and for what they are refused."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from errors import rejects
from lab_lines import replanned, with_trials
from lab_runs import request_of, text_of
from standard_settings import made_from_records

from tidegate.cli.compare import DEFAULT_VARIANTS
from tidegate.lab.compare import settings as settings_module
from tidegate.lab.compare.design import base_runs
from tidegate.lab.compare.fairness import fairness_checks
from tidegate.lab.compare.forecast import TUNED_NOISE, forecast, seeds_for_a_verdict
from tidegate.lab.compare.presets import PRESETS
from tidegate.lab.compare.settings import (
    _decisive_facts,
    find_settings,
    read_settings,
    settings_of_records,
    standard_settings,
    with_noise_of,
)
from tidegate.lab.compare.summary import summarise
from tidegate.lab.compare.tuning import Setting
from tidegate.lab.compare.variants import parse_variants
from tidegate.lab.judging import seeds_needed
from tidegate.lab.tasks.catalogue import task_of
from tidegate.lab.training.records import Grid, RecordFile, Variant, last_costs, records_path

RECORDS = Path(__file__).parents[3] / "docs" / "records" / "compare"
GRID = Grid(rates=(0.5, 1.0, 2.0), starts=(0.02, "torch"))
BEST = {"none": (1.0, 0.02), "g1": (2.0, "torch")}


def loss(variant, block, rate, start):
    """The lowest where BEST says, in all blocks but the last, which has one of its own."""
    best = (0.5, "torch") if block == 2 else BEST.get(variant, (1.0, 0.02))
    return 2.0 + (rate != best[0]) + (start != best[1])


@pytest.fixture(scope="module")
def lines(compared):
    return replanned(with_trials(compared, GRID, loss), grid=GRID)


@pytest.fixture(scope="module")
def settings(lines):
    return settings_of_records(lines, source="there")


def test_each_variant_gets_what_most_of_its_blocks_chose(settings):
    assert [(own.gate, own.lr, own.init, own.num_blocks) for own in settings.variants] == [
        ("none", 1e-2, 0.02, 2),
        ("g1", 2e-2, "torch", 2),
        ("bma-query", 1e-2, 0.02, 2),
    ]


def test_of_equally_many_blocks_those_with_the_lower_loss_decide(compared):
    def torn(variant, block, rate, start):
        return {0: 5.0, 1: 4.0, 2: 3.0}[block] + (rate != GRID.rates[block]) + (start != "torch")

    found = settings_of_records(replanned(with_trials(compared, GRID, torn), grid=GRID), source="")
    assert {own.lr for own in found.variants} == {2e-2}


def test_a_variant_that_was_not_tuned_gets_the_controls(settings):
    assert settings.setting_of(Variant(name="x", gate="vga")) == Setting(lr=1e-2, init=0.02)
    wide = Variant(name="x", gate="g1", overrides={"d_ff": 7})
    assert settings.setting_of(wide) == Setting(lr=1e-2, init=0.02), "options of its own make it another variant"


def test_noise_is_that_of_the_differences_and_for_strangers_the_largest(settings, compared):
    none, g1, query = with_noise_of(settings, compared).variants
    assert none.noise is None
    assert g1.noise is None, "its runs were not made at its settings"
    rows = {r.run.block: {} for r in compared if r.kind == "run"}
    for record in (line for line in compared if line.kind == "run"):
        rows[record.run.block][record.run.variant] = record.loss
    differences = [row["bma-query"] - row["none"] for row in rows.values()]
    assert query.noise == pytest.approx(stdev(differences) / fmean(row["none"] for row in rows.values()))
    known = replace(settings, variants=(none, replace(g1, noise=0.5), query))
    assert known.noise_of(Variant(name="x", gate="vga")) == 0.5
    assert known.noise_of(Variant(name="x", gate="bma-query")) == query.noise


class TestTheStandardSettings:
    def test_are_those_of_the_records(self):
        assert standard_settings() == made_from_records()

    def test_fit_the_default_comparison_and_no_other(self, monkeypatch, tmp_path):
        task = task_of("lm", None, length=PRESETS["lm"]["tiny"].length)
        standard = replace(standard_settings(), task=_decisive_facts(task.to_dict()))  # whatever Python's sources are
        monkeypatch.setattr(settings_module, "standard_settings", lambda: standard)
        asked = parse_variants(DEFAULT_VARIANTS)
        assert find_settings(None, asked, task, "tiny", None) == standard
        assert find_settings("none", asked, task, "tiny", None) is None
        assert find_settings(None, asked, task, "tiny", GRID) is None, "a grid has its own"
        assert find_settings(None, asked, task, "small", None) is None
        assert find_settings(None, asked, text_of(tmp_path), "tiny", None) is None
        assert find_settings(None, [*asked, Variant(name="x", gate="vga")], task, "tiny", None) is None

    def test_leave_the_default_variants_what_the_preset_has(self):
        """So that it makes no difference to them whether the settings fit."""
        preset = PRESETS["lm"]["tiny"]
        asked = parse_variants(DEFAULT_VARIANTS)
        assert {standard_settings().setting_of(plan) for plan in asked} == {Setting(lr=preset.lr, init=0.02)}


@pytest.fixture
def request_for(lines, settings, tmp_path, miniatures):
    """Makes requests on the text that the settings were tuned on."""

    def make(variants="none,g1", **options):
        return request_of(text_of(tmp_path), variants, settings=settings, **options)

    return make


def test_runs_have_them_and_options_of_a_variants_own_win(request_for):
    base = base_runs(request_for("none,g1,slow=g1@lr=1e-3,cold=g1@init=0.01"))
    found = {name: (run.training.lr, run.model.init) for name, run in base.items()}
    assert found["none"] == (1e-2, 0.02)
    assert found["g1"] == (2e-2, "torch")
    assert found["slow"][0] == 1e-3
    assert found["cold"][1] == 0.01


def test_they_fit_no_other_size_or_data_and_no_grid(request_for, settings, tmp_path, miniatures):
    with rejects("settings", hint="leave settings out"):
        request_for(preset="small")
    with rejects("settings", hint="Leave settings or the grid out"):
        request_for(grid=GRID)
    with rejects("settings", hint="leave settings out"):
        request_of(replace(text_of(tmp_path), fingerprint="other"), settings=settings)


def test_the_page_says_where_they_come_from(compared):
    checks = {check.name: check.detail for check in fairness_checks(summarise(replanned(compared, settings="there")))}
    assert checks["Tuned before"].startswith("there: none lr 0.01")


def test_they_are_read_from_the_folder_of_a_comparison(lines, settings, tmp_path):
    file = RecordFile(records_path(tmp_path))
    for line in lines:
        file.append(line)
    found = read_settings(tmp_path)
    assert (found.variants, found.task) == (settings.variants, settings.task)
    assert found.source == str(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [],
        lambda lines: replanned(lines, grid=None),
        lambda lines: [line for line in lines if line.kind != "run" or line.run.block < 2],
    ],
    ids=["nothing", "untuned", "incomplete"],
)
def test_a_folder_without_them_is_an_error(change, lines, tmp_path):
    file = RecordFile(records_path(tmp_path))
    for line in change(lines):
        file.append(line)
    with rejects("settings"):
        read_settings(tmp_path)


class TestTheForecast:
    def test_counts_the_runs_and_their_time(self, lines, request_for):
        request = request_for(num_seeds=5)
        said = forecast(request, base_runs(request), last_costs(lines))
        assert said.startswith("This will train 10 runs to compare, for about 1 min on ")

    def test_counts_what_is_evaluated_at_a_third(self, lines, request_for, monkeypatch):
        monkeypatch.setattr("tidegate.lab.compare.forecast.num_cores", lambda: 1)
        request = request_for("none,g1", num_seeds=5)
        base, costs = base_runs(request), last_costs(lines)
        slow = replace(costs, items=tuple(replace(cost, tokens_per_second=1.0) for cost in costs.items))
        run = base["none"]
        data, options = run.task.load(), run.training
        rows = options.steps * options.batch_size
        rows += sum(len(batch.inputs) for batch in [*options.num_evaluations * data.validation(), *data.final()]) / 3
        hours, minutes = divmod(round(2 * 5 * rows * run.task.length / 60), 60)
        assert f"for about {hours} h {minutes} min on 1 core" in forecast(request, base, slow)

    def test_counts_the_trials_of_each_search(self, lines, tmp_path, miniatures):
        for search, number in (("grid", 36), ("stepwise", 24)):
            grid = Grid(rates=GRID.rates, starts=GRID.starts, search=search)
            request = request_of(text_of(tmp_path), "none,g1", grid=grid)
            said = forecast(request, base_runs(request), last_costs(lines))
            assert f"{number} runs to tune and 6 runs to compare" in said

    def test_names_the_difference_that_each_variant_will_show(self, lines, settings, request_for):
        none, g1, query = settings.variants
        known = replace(settings, variants=(none, replace(g1, noise=0.01), replace(query, noise=0.02)))
        request = replace(request_for("none,g1,bma-query", num_seeds=5), settings=known)
        said = forecast(request, base_runs(request), last_costs(lines))
        assert "By the scatter of earlier runs, 5 seeds show these differences to none" in said
        assert "g1 " in said
        assert "bma-query " in said

    def test_tuning_inside_blocks_is_assumed_to_scatter_as_it_did(self, lines, tmp_path, miniatures):
        request = request_of(text_of(tmp_path), "none,g1", num_seeds=5)
        said = forecast(request, base_runs(request), last_costs(lines))
        assert "scatter by 0.65 % of the loss from seed to seed, as on the standard task" in said
        request = request_of(text_of(tmp_path), "none,g1", num_seeds=5, grid=GRID)
        said = forecast(request, base_runs(request), last_costs(lines))
        assert "scatter by 3.1 % of the loss from seed to seed, as on the standard task when it was tuned" in said
        tuned = summarise(RecordFile(records_path(RECORDS / "first-arm")).read())
        control = np.array([record.loss for record in tuned.control.records])
        losses = np.array([[r.loss for r in v.records] for v in tuned.variants if v.name != "none"])
        scatter = (losses - control).std(axis=1, ddof=1) / control.mean()
        assert np.sqrt((scatter**2).mean()) == pytest.approx(TUNED_NOISE, rel=0.01)

    def test_promises_nothing_with_two_seeds(self, lines, tmp_path, miniatures):
        request = request_of(text_of(tmp_path), "none,g1", num_seeds=2)
        assert "4 times in 5" not in forecast(request, base_runs(request), last_costs(lines))


def test_settings_of_another_length_are_said_to_be_that(settings):
    alike, longer = (settings.in_words(budget=budget) for budget in (settings.budget, 4 * settings.budget))
    assert alike.endswith(f"tuned on this data at {settings.budget:,} tokens in 3 blocks")
    assert longer == f"{alike}; these runs have {4 * settings.budget:,}, and may want other ones"


class TestWhatMoreSeedsWouldShow:
    def test_names_those_that_were_not_told_apart(self, compared):
        summary = summarise(compared)
        unclear = [v.name for v in summary.variants if v.result.verdict == "inconclusive"]
        said = seeds_for_a_verdict(summary)
        assert all(name in said for name in unclear) == bool(said)
        assert not any(f"{v.name} " in said for v in summary.variants if v.name not in unclear)

    def test_counts_as_the_forecast_does(self):
        lines = RecordFile(records_path(RECORDS / "default")).read()
        noise = {own.gate: own.noise for own in standard_settings().variants}["output:input:twosigmoid"]
        assert f"g1-from-1 {seeds_needed(noise, 0.01, num_comparisons=4, pooled=False)} seeds" in seeds_for_a_verdict(
            summarise(lines)
        )
