from dataclasses import replace
from itertools import product

import pytest
from lab_runs import run_of

from tidegate.lab.compare.design import design_runs
from tidegate.lab.compare.request import GRID
from tidegate.lab.compare.tuning import Setting, choose_settings, next_trials
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.training.records import Grid, Record

TASK = RecallTask()
SMALL = Grid(rates=(0.5, 2.0), starts=(0.02, "torch"))


def base(**first_seeds):
    return {name: run_of(TASK, variant=name, seed=seed, steps=100) for name, seed in first_seeds.items()}


def recorded(run, loss):
    return Record(id=run.id, run=run, status="diverged" if loss is None else "finished", loss=loss)


def tuning_runs(base, grid, *, num_seeds):
    """All trials of a grid of which every point is tried."""
    runs = next_trials(base, grid, num_seeds=num_seeds, done=[])
    assert next_trials(base, grid, num_seeds=num_seeds, done=[recorded(run, 1.0) for run in runs]) == []
    return runs


@pytest.mark.parametrize("num_seeds", [1, 5, 50])
@pytest.mark.parametrize("first_seeds", [{"a": 0, "b": 0}, {"a": 0, "b": 100}, {"a": 0, "b": 1_000_003}, {"a": 10**7}])
def test_no_seed_of_the_comparison_is_used(num_seeds, first_seeds):
    compared = {seed + block for seed in first_seeds.values() for block in range(num_seeds)}
    assert not compared & {run.seed for run in tuning_runs(base(**first_seeds), SMALL, num_seeds=num_seeds)}


def test_every_variant_has_the_whole_grid_in_every_block_at_full_length():
    runs = tuning_runs(base(a=0, b=7), GRID, num_seeds=3)
    for own in ("a", "b"):
        tried = {(run.block, run.training.lr, run.model.init) for run in runs if run.variant == own}
        rates = [1e-2 * rate for rate in GRID.rates]
        assert tried == set(product(range(3), rates, GRID.starts))
    assert len(runs) == 2 * 3 * len(GRID.rates) * len(GRID.starts)
    assert len({run.id for run in runs}) == len(runs)
    assert {(run.role, run.training.steps, run.training.num_evaluations) for run in runs} == {("tuning", 100, 1)}


def test_a_block_has_one_seed_of_its_own_for_all_variants():
    seeds = {(run.block, run.seed) for run in tuning_runs(base(a=0, b=7), SMALL, num_seeds=3)}
    assert len(seeds) == len({block for block, _ in seeds}) == len({seed for _, seed in seeds}) == 3


def test_nothing_else_differs_from_the_run():
    original = base(a=0)["a"]
    for run in tuning_runs({"a": original}, SMALL, num_seeds=2):
        assert replace(run.training, lr=1e-2, num_evaluations=8, num_observations=4) == replace(
            original.training, num_evaluations=8, num_observations=4
        )
        rest = {"block": 0, "seed": 0, "role": "comparison", "training": original.training, "model": original.model}
        assert replace(run, **rest) == original
        assert replace(run.model, init=original.model.init) == original.model


def losses(table, *, num_seeds=2):
    """Records of tuning runs, their losses by (rate, start), for all blocks or one each."""
    for run in tuning_runs({name: base(**{name: 0})[name] for name in table}, SMALL, num_seeds=num_seeds):
        loss = table[run.variant][run.training.lr / 1e-2, run.model.init]
        yield recorded(run, loss[run.block] if isinstance(loss, tuple) else loss)


def test_each_block_of_each_variant_gets_the_setting_of_its_own_lowest_loss():
    table = {
        "a": {(0.5, 0.02): 3.0, (2.0, 0.02): (1.0, 5.0), (0.5, "torch"): 2.0, (2.0, "torch"): 4.0},
        "b": {(0.5, 0.02): 3.0, (2.0, 0.02): 4.0, (0.5, "torch"): 5.0, (2.0, "torch"): (2.0, 1.0)},
    }
    assert choose_settings(losses(table)) == {
        ("a", 0): Setting(lr=2e-2, init=0.02),
        ("a", 1): Setting(lr=0.5e-2, init="torch"),
        ("b", 0): Setting(lr=2e-2, init="torch"),
        ("b", 1): Setting(lr=2e-2, init="torch"),
    }


def test_a_setting_that_diverged_is_not_chosen_and_if_all_did_the_lowest_rate_is():
    table = {"a": {(0.5, 0.02): (3.0, None), (2.0, 0.02): None, (0.5, "torch"): 4.0, (2.0, "torch"): None}}
    chosen = choose_settings(losses(table))
    assert chosen == {("a", 0): Setting(lr=0.5e-2, init=0.02), ("a", 1): Setting(lr=0.5e-2, init="torch")}
    nowhere = {"a": dict.fromkeys(product((0.5, 2.0), (0.02, "torch")))}
    assert {setting.lr for setting in choose_settings(losses(nowhere)).values()} == {0.5e-2}


def test_the_runs_of_a_block_have_what_was_chosen_there():
    chosen = {("a", 0): Setting(lr=0.5, init="torch"), ("a", 1): Setting(lr=0.25, init="fan-in")}
    runs = design_runs(base(a=0, b=7), num_seeds=2, chosen=chosen)
    found = [(run.variant, run.block, run.seed, run.training.lr, run.model.init) for run in runs]
    assert found == [
        ("a", 0, 0, 0.5, "torch"),
        ("b", 0, 7, 1e-2, 0.02),
        ("a", 1, 1, 0.25, "fan-in"),
        ("b", 1, 8, 1e-2, 0.02),
    ]


def stepwise(table, *, num_seeds=1):
    """The rounds of trials of a stepwise search: (variant, block, rate, start) of each, and what was chosen.

    table : the loss by (variant, block, rate, start); 9 where nothing is said
    """
    grid, own = replace(GRID, search="stepwise"), base(a=0, b=0)
    rounds, done = [], []
    while trials := next_trials(own, grid, num_seeds=num_seeds, done=done):
        tried = [(run.variant, run.block, round(run.training.lr / 1e-2, 6), run.model.init) for run in trials]
        rounds.append(tried)
        done += [recorded(run, table.get(point, 9.0)) for run, point in zip(trials, tried, strict=True)]
    return rounds, choose_settings(done)


def test_a_stepwise_search_tries_all_starts_at_the_middle_rate_then_the_other_rates_at_the_best_start():
    table = {
        ("a", 0, 1.0, "torch"): 2.0,
        ("a", 1, 1.0, "fan-in"): 2.0,
        ("b", 0, 1.0, 0.02): 2.0,
        ("b", 1, 1.0, 0.02): 1.0,
    }
    (first, second), _ = stepwise(table, num_seeds=2)
    assert set(first) == {(name, block, 1.0, start) for name in "ab" for block in (0, 1) for start in GRID.starts}
    best = {("a", 0): "torch", ("a", 1): "fan-in", ("b", 0): 0.02, ("b", 1): 0.02}
    assert set(second) == {(*own, rate, start) for own, start in best.items() for rate in (0.5, 2.0)}


def test_every_variant_has_as_many_trials_in_a_stepwise_search_also_where_runs_diverge():
    diverging = dict.fromkeys(("a", 0, 1.0, start) for start in GRID.starts)
    (first, second), chosen = stepwise(diverging)
    assert [sum(point[0] == name for point in (*first, *second)) for name in "ab"] == [5, 5]
    assert chosen["a", 0].lr == pytest.approx(0.5e-2), "of trials that all diverged or tied, the lowest rate"


def test_a_stepwise_search_chooses_the_best_of_all_that_it_tried():
    _, chosen = stepwise({("a", 0, 1.0, "torch"): 2.0, ("a", 0, 2.0, "torch"): 1.5, ("b", 0, 1.0, "fan-in"): 1.0})
    assert chosen == {("a", 0): Setting(lr=2e-2, init="torch"), ("b", 0): Setting(lr=1e-2, init="fan-in")}
