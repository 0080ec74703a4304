import math
from dataclasses import replace
from itertools import pairwise

import pytest
from lab_runs import run_of

from tidegate.lab.compare.design import GRID, choose_rates, tuning_runs
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.training.records import Record

TASK = RecallTask()


def base(**first_seeds):
    return {name: run_of(TASK, variant=name, seed=seed, steps=100) for name, seed in first_seeds.items()}


def recorded(run, loss):
    return Record(id=run.id, run=run.to_dict(), status="diverged" if loss is None else "finished", loss=loss)


@pytest.mark.parametrize("num_seeds", [1, 5, 50])
@pytest.mark.parametrize("first_seeds", [{"a": 0, "b": 0}, {"a": 0, "b": 100}, {"a": 0, "b": 1_000_003}, {"a": 10**7}])
def test_no_seed_of_the_comparison_is_used(num_seeds, first_seeds):
    compared = {seed + block for seed in first_seeds.values() for block in range(num_seeds)}
    assert not compared & {run.seed for run in tuning_runs(base(**first_seeds), num_seeds=num_seeds)}


def test_every_variant_has_the_same_grid_seeds_and_steps():
    runs = tuning_runs(base(a=0, b=7), num_seeds=5)
    for own in ("a", "b"):
        trials = sorted((run.seed, run.training.lr) for run in runs if run.variant == own)
        seeds = sorted({seed for seed, _ in trials})
        assert len(seeds) == 2
        assert trials == [(seed, pytest.approx(1e-2 * multiple)) for seed in seeds for multiple in GRID]
    assert len({run.seed for run in runs}) == 2
    assert {(run.role, run.training.steps, run.training.num_evaluations) for run in runs} == {("tuning", 20, 1)}
    assert len({run.id for run in runs}) == len(runs)


def test_only_seed_block_role_and_the_short_training_differ_from_the_run():
    original = base(a=0)["a"]
    for run in tuning_runs({"a": original}, num_seeds=5):
        rest = {"block": 0, "seed": 0, "role": "comparison", "training": original.training}
        assert replace(run, **rest) == original


def test_the_shortest_run_is_tried_for_a_step():
    short = replace(base(a=0)["a"], training=replace(base(a=0)["a"].training, steps=1))
    assert {run.training.steps for run in tuning_runs({"a": short}, num_seeds=1)} == {1}


def losses(table):
    """Records of tuning runs whose loss for each multiple, of all seeds alike or one each, is in a table."""
    for run in tuning_runs({name: base(**{name: 0})[name] for name in table}, num_seeds=3):
        loss = table[run.variant][GRID.index(round(run.training.lr / 1e-2, 6))]
        yield recorded(run, loss[run.block] if isinstance(loss, tuple) else loss)


def test_each_variant_gets_the_rate_of_its_lowest_mean_loss():
    table = {"a": (3, 2, 1, 2, 3), "b": (5, 4, 3, (1.0, 4.0), (3.0, 1.0)), "c": (1, 2, 3, 4, 5)}
    chosen = choose_rates(losses(table))
    assert chosen == {name: pytest.approx(1e-2 * multiple) for name, multiple in {"a": 1, "b": 4, "c": 0.25}.items()}


def test_a_rate_at_which_one_run_diverged_is_never_chosen():
    assert choose_rates(losses({"a": (3, 2.5, 2.9, (0.1, None), None)})) == {"a": pytest.approx(0.5e-2)}


def test_if_every_rate_diverges_the_lowest_is_left_for_the_comparison_to_show():
    records = list(losses({"a": (None, (1, None), None, (None, 2), None)}))
    assert choose_rates(records) == {"a": min(record.run["training"]["lr"] for record in records)}


def test_the_grid_is_even_in_logarithms_around_the_variants_own_rate():
    steps = {round(math.log2(later / earlier), 12) for earlier, later in pairwise(GRID)}
    assert steps == {1.0}
    assert GRID[len(GRID) // 2] == 1.0
