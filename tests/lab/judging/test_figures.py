import math

import pytest

from tidegate.lab.judging import Figure, compare_to_control, dunnett_critical_value, judge_figures, t_interval

NONE = (1.00, 1.20, 1.10, 1.30, 1.25)
HIGH = (1.51, 1.69, 1.60, 1.82, 1.73)
LEVEL = (1.01, 1.18, 1.12, 1.29, 1.24)
LOW = (0.50, 0.71, 0.59, 0.81, 0.76)
ROWS = {"none": NONE, "high": HIGH, "level": LEVEL, "low": LOW}


def figure(rows=ROWS, name="mass", control="none"):
    return Figure(name=name, rows=rows, control=control)


def judged(rows=ROWS, **options):
    """The results of one figure, by variant."""
    return {result.variant: result for result in judge_figures([figure(rows, **options)]).results}


def test_words_say_the_direction_and_no_praise():
    results = judged()
    assert {name: result.verdict for name, result in results.items()} == {
        "high": "higher",
        "level": "not told apart",
        "low": "lower",
    }
    assert all(result.low < result.difference < result.high for result in results.values())
    assert [result.control_mean for result in results.values()] == pytest.approx([1.17] * 3)


WILD = ROWS | {"wild": (1.3, 0.8, 1.2, 1.8, 0.75)}


@pytest.mark.parametrize("rows", [ROWS, WILD], ids=["equal spreads", "unequal spreads"])
@pytest.mark.parametrize("number", [1, 9])
def test_figures_share_the_level_equally_and_the_wider_of_two_intervals_counts(number, rows):
    others = [figure({"gate": NONE}, name=str(index), control=None) for index in range(number - 1)]
    judgement, confidence = judge_figures([figure(rows), *others]), 1 - 0.05 / number
    assert (judgement.num_figures, judgement.confidence) == (number, 0.95)
    assert judgement.figure_confidence == pytest.approx(confidence)
    expected = compare_to_control(rows, control="none", confidence=confidence)
    assert expected.pooled == (rows is ROWS)
    num_others = len(rows) - 1
    pooled = dunnett_critical_value(num_others, 4 * num_others, confidence) * expected.residual_sd * math.sqrt(2 / 5)
    wider = []
    for result in judgement.results[:num_others]:
        paired = [own - other for own, other in zip(rows[result.variant], NONE, strict=True)]
        low, high = t_interval(paired, 1 - (1 - confidence) / num_others)
        half = max((high - low) / 2, pooled)
        assert (result.low, result.high) == pytest.approx((result.difference - half, result.difference + half))
        assert result.difference == pytest.approx(sum(paired) / 5)
        wider.append(half > pooled)
    # Each of the two is the wider one for some variant.
    assert rows is ROWS or set(wider) == {True, False}


def test_the_more_figures_there_are_the_less_is_told_apart():
    rows = ROWS | {"high": tuple(value + 0.035 for value in LEVEL)}
    others = [figure({"gate": NONE}, name=str(index), control=None) for index in range(39)]
    assert judged(rows)["high"].verdict == "higher"
    assert judge_figures([figure(rows), *others]).results[0].verdict == "not told apart"


def test_a_count_that_differs_by_the_same_under_every_seed_is_judged_by_the_noise_of_the_others():
    rows = {"none": (0.0, 0.0, 1.0), "one more": (1.0, 1.0, 2.0), "restless": (4.0, 0.0, 3.0)}
    result = judged(rows)["one more"]
    assert (result.difference, result.verdict) == (1.0, "not told apart")


REFUSED = {
    "few seeds": (
        {name: row[:2] for name, row in ROWS.items()},
        "a verdict needs at least 3 seeds, and there are 2",
    ),
    "a control with a gap": (
        ROWS | {"none": (None, *NONE[1:])},
        "the control, none, has no such number in 1 of 5 runs",
    ),
    "figures that never vary": (
        {"none": (0.0,) * 5, "high": (1.0,) * 5},
        "there is no noise to judge by, every seed says the same",
    ),
    "the control's own two numbers": ({"none": NONE[:2], "high": NONE[:2]}, "a verdict needs at least 3 seeds"),
}


@pytest.mark.parametrize(("rows", "reason"), REFUSED.values(), ids=REFUSED)
def test_where_nothing_can_be_judged_there_is_no_verdict_but_a_reason(rows, reason):
    for result in judged(rows).values():
        assert (result.verdict, result.low, result.high) == ("no verdict", None, None)
        assert reason in result.reason


def test_a_row_with_a_gap_has_no_mean_and_no_verdict_and_leaves_the_others_as_they_are():
    results = judged(ROWS | {"gap": (None, None, 1.0, 1.0, 1.0)})
    gap = results.pop("gap")
    assert (gap.mean, gap.difference, gap.verdict) == (None, None, "no verdict")
    assert gap.reason == "it has no such number in 2 of 5 runs"
    assert results == judged()


def test_the_numbers_of_the_control_are_not_told_apart_from_it():
    same = judged(ROWS | {"twin": NONE})["twin"]
    assert (same.verdict, same.difference, same.low) == ("not told apart", 0.0, None)
    assert same.reason == "the numbers are those of none in every run"


class TestAgainstZero:
    def test_rows_share_the_level_of_their_figure(self):
        rows = {"rising": (0.3, 0.31, 0.29), "flat": (0.1, -0.1, 0.05), "falling": (-0.3, -0.31, -0.29)}
        results = judge_figures([figure(), figure(rows, name="slope", control=None)]).results[-3:]
        assert [result.verdict for result in results] == ["higher", "not told apart", "lower"]
        for result in results:
            assert (result.low, result.high) == t_interval(rows[result.variant], 1 - 0.05 / 2 / 3)
            assert result.control_mean is None
            assert result.mean == result.difference

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ((0.1, 0.2), "at least 3 seeds"),
            ((0.1, None, 0.2), "no such number in 1 of 3 runs"),
            ((0.0, 0.0, 0.0), "no noise"),
            ((0.1, 0.1, 0.1 + 1e-17), "no noise"),
        ],
    )
    def test_what_cannot_be_judged_has_a_reason(self, row, reason):
        result = judged({"gate": row}, control=None)["gate"]
        assert (result.verdict, result.low) == ("no verdict", None)
        assert reason in result.reason


def test_no_figures_give_no_results():
    assert judge_figures([]).results == ()


def test_a_percentage_is_no_confidence():
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1"):
        judge_figures([figure()], confidence=95)
