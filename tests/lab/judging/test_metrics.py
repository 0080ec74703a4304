import numpy as np
import pytest
from errors import rejects

from tidegate.lab.judging import RunMetric, judge_metrics, t_interval

NONE = (1.00, 1.20, 1.10, 1.30, 1.25)
HIGH = (1.51, 1.69, 1.60, 1.82, 1.73)
LEVEL = (1.01, 1.18, 1.12, 1.29, 1.24)
LOW = (0.50, 0.71, 0.59, 0.81, 0.76)
ROWS = {"none": NONE, "high": HIGH, "level": LEVEL, "low": LOW}


def metric(rows=ROWS, name="mass", control="none"):
    return RunMetric(name=name, rows=rows, control=control)


def judged(rows=ROWS, **options):
    """The results of one metric, by variant."""
    return {result.variant: result for result in judge_metrics([metric(rows, **options)]).results}


def test_words_say_the_direction_and_no_praise():
    results = judged()
    assert {name: result.verdict for name, result in results.items()} == {
        "high": "higher",
        "level": "no significant difference",
        "low": "lower",
    }
    assert all(result.low < result.difference < result.high for result in results.values())
    assert [result.control_mean for result in results.values()] == pytest.approx([1.17] * 3)


@pytest.mark.parametrize("number", [1, 2, 9])
def test_metrics_and_the_variants_of_each_share_the_level_equally(number):
    judgement = judge_metrics([metric(name=str(index)) for index in range(number)])
    assert (judgement.num_figures, judgement.confidence) == (number, 0.95)
    assert judgement.figure_confidence == pytest.approx(1 - 0.05 / number)
    assert [result.figure for result in judgement.results] == [str(index) for index in range(number) for _ in range(3)]
    for result in judgement.results:
        paired = [own - other for own, other in zip(ROWS[result.variant], NONE, strict=True)]
        assert (result.low, result.high) == pytest.approx(t_interval(paired, 1 - 0.05 / number / 3), rel=1e-9)
        assert result.difference == pytest.approx(sum(paired) / 5)


def test_the_more_metrics_there_are_the_fewer_are_significant():
    rows = {"none": NONE, "high": tuple(value + 0.035 for value in LEVEL)}
    assert judged(rows)["high"].verdict == "higher"
    many = judge_metrics([metric(rows, name=str(index)) for index in range(9)])
    assert {result.verdict for result in many.results} == {"no significant difference"}


def test_a_quiet_variant_is_judged_by_itself_however_wild_the_others_are():
    wild = {"wild": (9.0, -4.0, 3.0, 0.0, 7.0), "wilder": (0.0, 90.0, -30.0, 11.0, 5.0)}
    three = {"none": NONE, "high": HIGH, "level": LEVEL, "low": LOW}
    two = {"none": NONE, "high": HIGH, **wild}
    assert judged(three)["high"] == judged(two)["high"]


@pytest.mark.full
@pytest.mark.parametrize(("spreads", "num_seeds"), [((1, 0.7, 1.2, 3.6), 5), ((2, 1, 1), 3)])
def test_without_any_difference_hardly_a_table_shows_one_though_spreads_differ(spreads, num_seeds):
    rng, num_tables, found = np.random.default_rng(0), 250, 0
    for _ in range(num_tables):
        metrics = []
        for name in "abcdefghi":
            rows = 3 * rng.normal(size=num_seeds) + np.array(spreads)[:, None] * rng.normal(
                size=(len(spreads), num_seeds)
            )
            metrics.append(metric(dict(zip("0123", rows.tolist(), strict=False)), name=name, control="0"))
        found += any(result.verdict != "no significant difference" for result in judge_metrics(metrics).results)
    # At 5 %, more than 23 of 250 tables are seen once in a thousand times.
    assert found <= 23


REFUSED = {
    "few seeds": ({name: row[:2] for name, row in ROWS.items()}, "a verdict needs at least 3 seeds, got 2"),
    "a control with a gap": (
        ROWS | {"none": (None, *NONE[1:])},
        "the baseline, none, has no value in 1 of 5 runs",
    ),
    "no noise": ({"none": NONE, "high": tuple(value + 1 for value in NONE)}, "there is no noise to estimate"),
    "equal numbers under two seeds": ({"none": NONE[:2], "high": NONE[:2]}, "a verdict needs at least 3 seeds"),
}


@pytest.mark.parametrize(("rows", "reason"), REFUSED.values(), ids=REFUSED)
def test_without_a_verdict_there_is_a_reason(rows, reason):
    for result in judged(rows).values():
        assert (result.verdict, result.low, result.high) == ("no verdict", None, None)
        assert reason in result.reason


def test_a_row_with_a_gap_has_no_mean_and_no_verdict():
    gap = judged(ROWS | {"gap": (None, None, 1.0, 1.0, 1.0)})["gap"]
    assert (gap.mean, gap.difference, gap.verdict) == (None, None, "no verdict")
    assert gap.reason == "it has no value in 2 of 5 runs"


@pytest.mark.parametrize("row", [NONE, (0.0,) * 5], ids=["the control's numbers", "a count of nothing"])
def test_equal_numbers_in_every_run_are_no_significant_difference(row):
    same = judged({"none": row, "twin": row})["twin"]
    assert (same.verdict, same.difference, same.low) == ("no significant difference", 0.0, None)
    assert "untested" in same.reason


class TestAgainstZero:
    def test_rows_share_the_level_of_their_metric(self):
        rows = {"rising": (0.3, 0.31, 0.29), "flat": (0.1, -0.1, 0.05), "falling": (-0.3, -0.31, -0.29)}
        results = judge_metrics([metric(), metric(rows, name="slope", control=None)]).results[-3:]
        assert [result.verdict for result in results] == ["higher", "no significant difference", "lower"]
        for result in results:
            assert (result.low, result.high) == pytest.approx(t_interval(rows[result.variant], 1 - 0.05 / 2 / 3))
            assert result.control_mean is None
            assert result.mean == result.difference

    @pytest.mark.parametrize(
        ("row", "verdict", "reason"),
        [
            ((0.1, 0.2), "no verdict", "at least 3 seeds"),
            ((0.1, None, 0.2), "no verdict", "no value in 1 of 3 runs"),
            ((0.1, 0.1, 0.1 + 1e-16), "no verdict", "no noise"),
            ((0.0, 0.0, 0.0), "no significant difference", "untested"),
        ],
    )
    def test_what_cannot_be_judged_has_a_reason(self, row, verdict, reason):
        result = judged({"gate": row}, control=None)["gate"]
        assert (result.verdict, result.low) == (verdict, None)
        assert reason in result.reason


def test_no_metrics_give_no_results():
    assert judge_metrics([]).results == ()


def test_the_control_must_have_a_row_and_the_confidence_be_a_share():
    with rejects("control"):
        judge_metrics([metric({"g1": NONE})])
    with rejects("confidence"):
        judge_metrics([metric()], confidence=95)
