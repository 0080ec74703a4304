import math
from itertools import chain

import numpy as np
import pytest
from closeness import assert_close
from errors import rejects
from scipy import stats

from tidegate.lab.judging import calibration, compare_to_control, dunnett_critical_value, false_positive_rate
from tidegate.lab.judging import judge as judge_module

NAMES = ("none", "g1", "bma", "bma-query")
NOISE = 0.003


def figures(*, num_blocks=5, effects=(0.0, 0.0, 0.0), spreads=(1, 1, 1, 1), seed=0):
    """Losses of the control and of variants that differ from it by the effects; seeds differ far more than runs."""
    rng = np.random.default_rng(seed)
    shape = (len(effects) + 1, num_blocks)
    noise = NOISE * np.array(spreads[: shape[0]])[:, None] * rng.standard_normal(shape)
    return 1.5 + 0.2 * rng.standard_normal(num_blocks) + np.array([0.0, *effects])[:, None] + noise


def judge(table, **options):
    losses = {name: row.tolist() for name, row in zip(NAMES, table, strict=False)}
    return compare_to_control(losses, control="none", **options)


def numbers(comparison, *fields):
    return np.array([[getattr(variant, field) for field in fields] for variant in comparison.variants[1:]])


def verdicts(comparison):
    return {variant.name: variant.verdict for variant in comparison.variants}


class TestTheModel:
    def test_with_two_variants_it_is_the_paired_t_test(self):
        table = figures(effects=(0.004,), num_blocks=6)
        (result,) = judge(table).variants[1:]
        peer = stats.ttest_rel(table[1], table[0])
        interval = peer.confidence_interval(0.95)
        assert judge(table).degrees_of_freedom == 5
        assert_close(np.array([result.low, result.high]), np.array([interval.low, interval.high]))
        assert_close(np.array([result.own_low, result.own_high]), np.array([interval.low, interval.high]))
        assert_close(np.float64(result.p_value), np.float64(peer.pvalue))

    def test_the_residual_is_that_of_least_squares(self):
        table = figures(effects=(0.01, -0.02, 0.0))
        variant, block = np.indices(table.shape)
        columns = [np.ones(20), *(variant.ravel() == v for v in (1, 2, 3)), *(block.ravel() == b for b in (1, 2, 3, 4))]
        design = np.stack(columns, axis=1).astype(float)
        _, (sum_of_squares,), rank, _ = np.linalg.lstsq(design, table.ravel())
        comparison = judge(table)
        assert comparison.degrees_of_freedom == 20 - rank == 12
        assert_close(np.float64(comparison.residual_sd), np.sqrt(sum_of_squares / 12))

    def test_intervals_are_the_difference_of_means_and_dunnetts_multiple_of_its_error(self):
        table = figures(effects=(0.01, -0.02, 0.0))
        comparison = judge(table)
        half = dunnett_critical_value(3, 12) * comparison.residual_sd * np.sqrt(2 / 5)
        difference = table[1:].mean(axis=1) - table[0].mean()
        expected = np.stack([difference, difference - half, difference + half], axis=1)
        assert_close(numbers(comparison, "difference", "low", "high"), expected)
        assert_close(numbers(comparison, "relative_difference")[:, 0], difference / table[0].mean())

    def test_an_interval_ends_at_zero_where_p_is_the_level(self):
        comparison = judge(figures(effects=(0.004, -0.006, 0.008), seed=4))
        for result in comparison.variants[1:]:
            assert (result.p_value < 0.05) == (result.low > 0 or result.high < 0)

    @pytest.mark.parametrize("spreads", [(1, 1, 1, 1), (1, 1, 12, 1)])
    def test_adding_a_constant_to_a_seed_changes_nothing(self, spreads):
        table = figures(effects=(0.01, -0.02, 0.0), spreads=spreads)
        shift = np.array([0.0, 3.0, -1.0, 0.5, 0.0])
        shifted, plain = judge(table + shift - shift.mean()), judge(table)
        fields = ("difference", "low", "high", "p_value", "own_low", "own_high", "detectable")
        assert_close(numbers(shifted, *fields), numbers(plain, *fields))
        assert verdicts(shifted) == verdicts(plain)

    def test_the_order_of_variants_and_of_seeds_changes_nothing(self):
        table = figures(effects=(0.01, -0.02, 0.0))
        plain = judge(table)
        losses = dict(zip(NAMES, table[:, [3, 1, 0, 4, 2]].tolist(), strict=True))
        turned = compare_to_control({name: losses[name] for name in reversed(NAMES)}, control="none")
        for name in NAMES[1:]:
            fields = ("difference", "low", "high", "p_value", "own_low", "own_high", "detectable")
            expected, actual = (np.array([getattr(c[name], field) for field in fields]) for c in (plain, turned))
            assert_close(actual, expected)
            assert turned[name].verdict == plain[name].verdict

    def test_scaling_the_figures_scales_the_intervals_and_keeps_the_verdicts(self):
        table = figures(effects=(0.01, -0.02, 0.0))
        plain, scaled = judge(table), judge(1000 * table)
        fields = ("difference", "low", "high", "own_low", "own_high", "detectable", "sd")
        assert_close(numbers(scaled, *fields) / 1000, numbers(plain, *fields))
        assert_close(
            numbers(scaled, "p_value", "relative_difference"), numbers(plain, "p_value", "relative_difference")
        )
        assert verdicts(scaled) == verdicts(plain)

    def test_turning_the_good_side_round_swaps_better_and_worse_and_no_number(self):
        table = figures(effects=(0.02, -0.02, 0.0))
        low, high = judge(table), judge(table, lower_is_better=False)
        assert verdicts(low) == {
            "none": "control",
            "g1": "worse",
            "bma": "better",
            "bma-query": verdicts(low)["bma-query"],
        }
        swapped = {"better": "worse", "worse": "better"}
        assert verdicts(high) == {name: swapped.get(word, word) for name, word in verdicts(low).items()}
        assert (numbers(low, "low", "high") == numbers(high, "low", "high")).all()


NUM_TABLES = 2000
"""Four standard deviations of a binomial 5 % are 2 % then."""


def leave_out_p_values(patch):
    """Dunnett's p takes half of the time. No verdict should depend on it; one that did would be seen by the nan."""
    patch.setattr(judge_module, "dunnett_p_value", lambda *_: math.nan)


@pytest.fixture(scope="module")
def without_differences():
    """Comparisons of tables in which nothing differs."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out_p_values(patch)
        return [judge(figures(seed=seed)) for seed in range(NUM_TABLES)]


class TestErrorRates:
    @pytest.fixture(autouse=True)
    def no_p_values(self, monkeypatch):
        leave_out_p_values(monkeypatch)

    def test_the_family_is_wrong_in_one_of_twenty_tables_without_differences(self, without_differences):
        wrong = [any(v.verdict in ("better", "worse") for v in c.variants) for c in without_differences]
        assert 0.03 < np.mean(wrong) < 0.07

    def test_all_intervals_hold_the_truth_at_once_in_nineteen_of_twenty_tables(self):
        effects = np.array([0.01, -0.003, 0.0])
        tables = np.stack([figures(effects=effects, seed=seed) for seed in range(NUM_TABLES)])
        residual = tables - tables.mean(axis=1, keepdims=True)
        residual = residual - residual.mean(axis=2, keepdims=True)
        half = dunnett_critical_value(3, 12) * np.sqrt((residual**2).sum(axis=(1, 2)) / 12 * 2 / 5)
        error = np.abs(tables[:, 1:].mean(axis=2) - tables[:, :1].mean(axis=2) - effects)
        assert 0.93 < np.mean(error.max(axis=1) < half) < 0.97

    # A noisy control is the hard case.
    @pytest.mark.parametrize(
        "spreads",
        [(5, 1, 1, 1), *(pytest.param(each, marks=pytest.mark.full) for each in ((1, 1, 1, 5), (1, 1, 5, 5)))],
    )
    def test_unequal_spreads_make_it_wrong_hardly_more_often(self, spreads):
        comparisons = [judge(figures(seed=seed, spreads=spreads)) for seed in range(600)]
        wrong = [any(v.verdict in ("better", "worse") for v in c.variants) for c in comparisons]
        # By the residual of the table alone it would be 14 % with a noisy control.
        assert np.mean(wrong) < 0.1

    def test_the_detectable_difference_is_called_four_times_in_five(self):
        standard_error = NOISE * np.sqrt(2 / 5)
        # What a run reports for a residual that is just the true noise.
        comparison = judge(figures())
        effect = comparison.detectable / comparison.residual_sd * NOISE
        comparisons = [judge(figures(effects=(effect, 0, 0), seed=seed)) for seed in range(800)]
        called = [c["g1"].verdict == "worse" for c in comparisons if c.pooled]
        assert 3 < effect / standard_error < 4
        # Four standard deviations of some 650 draws at 80 % are 6 %.
        assert len(called) > 600
        assert 0.74 < np.mean(called) < 0.86

    def test_recorded_noise_gives_the_rate_of_its_own_tables(self):
        noise = (1.5 + 0.01 * np.random.default_rng(1).standard_normal(60)).tolist()
        rate = false_positive_rate(noise, num_comparisons=400)
        assert 0.01 < rate < 0.09
        assert false_positive_rate(noise, num_comparisons=400) == rate

    def test_the_rate_is_that_of_tables_in_which_no_figure_comes_twice(self, monkeypatch):
        noise = (1.5 + 0.01 * np.random.default_rng(2).standard_normal(20)).tolist()
        seen = []

        def watched(losses, **options):
            seen.append((losses, compare_to_control(losses, **options)))
            return seen[-1][1]

        monkeypatch.setattr(calibration, "compare_to_control", watched)
        rate = false_positive_rate(noise, num_comparisons=100)
        wrong = [{"better", "worse"} & set(verdicts(comparison).values()) for _, comparison in seen]
        assert all(sorted(chain.from_iterable(losses.values())) == sorted(noise) for losses, _ in seen)
        assert rate == sum(map(bool, wrong)) / 100 > 0

    @pytest.mark.parametrize(
        ("field", "options"),
        [
            ("num_variants", {"num_variants": 1}),
            ("num_blocks", {"num_blocks": 2}),
            ("num_comparisons", {"num_comparisons": 0}),
            ("noise", {"num_blocks": 12}),
        ],
    )
    def test_a_rate_needs_enough_noise_for_a_table(self, field, options):
        with rejects(field):
            false_positive_rate([1.0 + index for index in range(20)], **options)


class TestVerdicts:
    def test_planted_effects_are_found_and_their_absence_is_not_called_a_difference(self):
        comparison = judge(figures(effects=(0.03, -0.03, 0.0), seed=1))
        found = verdicts(comparison)
        assert (found["g1"], found["bma"]) == ("worse", "better")
        assert found["bma-query"] in ("equivalent", "inconclusive")

    def test_equivalence_needs_precision(self):
        table = figures(num_blocks=8, seed=2)
        precise, coarse, none = (judge(table, margin=margin) for margin in (0.005, 0.001, 0.0))
        assert set(verdicts(precise).values()) == {"control", "equivalent"}
        assert set(verdicts(coarse).values()) == set(verdicts(none).values()) == {"control", "inconclusive"}
        assert precise.margin == pytest.approx(0.005 * table[0].mean())

    def test_a_difference_inside_the_margin_is_equivalent_though_its_interval_excludes_zero(self):
        table = figures(effects=(0.03, -0.03, 0.0), seed=1)
        wide, narrow = judge(table, margin=0.05), judge(table, margin=0.005)
        assert [wide[name].verdict for name in ("g1", "bma")] == ["equivalent", "equivalent"]
        assert wide["g1"].low > 0 > wide["bma"].high
        assert [narrow[name].verdict for name in ("g1", "bma")] == ["worse", "better"]

    def test_figures_without_noise_are_not_judged(self):
        seeds = np.array([1.5, 1.25, 2.0])
        comparison = judge(np.stack([seeds, seeds + 0.5, seeds - 0.25]))
        assert verdicts(comparison) == {"none": "control", "g1": "undecided", "bma": "undecided"}
        assert "no noise is left" in comparison.refusal
        assert comparison.residual_sd is None
        assert [variant.difference for variant in comparison.variants[1:]] == pytest.approx([0.5, -0.25])

    def test_figures_that_never_vary_are_not_judged_and_nobody_is_identical(self):
        comparison = judge(np.ones((3, 4)), lower_is_better=False)
        assert verdicts(comparison) == {"none": "control", "g1": "undecided", "bma": "undecided"}


class TestUnequalSpread:
    def test_an_unstable_variant_is_named_and_judged_by_its_own_runs(self):
        comparison = judge(figures(spreads=(1, 1, 12, 1)))
        (warning,) = comparison.warnings
        assert warning.startswith("the residuals of bma spread")
        assert not comparison.pooled
        assert comparison.degrees_of_freedom == 4
        assert (numbers(comparison, "low", "high") == numbers(comparison, "own_low", "own_high")).all()
        assert comparison["bma"].detectable == comparison.detectable > 3 * comparison["g1"].detectable

    def test_an_unstable_variant_does_not_hide_what_the_others_show(self):
        found = [judge(figures(effects=(0.02, 0, 0), spreads=(1, 1, 12, 1), seed=seed))["g1"] for seed in range(50)]
        assert np.mean([result.verdict == "worse" for result in found]) > 0.9

    def test_own_intervals_are_paired_and_share_the_level(self):
        table = figures(spreads=(1, 1, 12, 1))
        result = judge(table)["bma"]
        peer = stats.ttest_rel(table[2], table[0])
        interval = peer.confidence_interval(1 - 0.05 / 3)
        assert_close(np.array([result.own_low, result.own_high]), np.array([interval.low, interval.high]))
        assert result.p_value == pytest.approx(min(1, 3 * peer.pvalue))

    def test_equal_spreads_are_taken_for_unequal_as_often_as_they_should(self, without_differences):
        warned = [bool(comparison.warnings) for comparison in without_differences]
        # 10 % for the control and 10 % for the variants, less what they have in common.
        assert 0.1 < np.mean(warned) < 0.25

    def test_two_variants_give_no_warning_since_pairs_are_right_for_any_spread(self):
        assert judge(figures(effects=(0.0,), spreads=(1, 50))).warnings == ()

    def test_a_difference_that_never_varies_is_held_against_the_noise_of_the_table(self):
        table = np.array([[0.9, 0.8, 0.7, 0.85], [0.9, 0.8, 0.7, 0.85], [0.3, 0.9, 0.1, 0.4]])
        table[1] += 0.001
        comparison = judge(table, lower_is_better=False)
        assert comparison.warnings[0].startswith("the residuals of bma spread")
        assert verdicts(comparison)["g1"] == "inconclusive"
