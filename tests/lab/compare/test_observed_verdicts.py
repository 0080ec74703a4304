from dataclasses import replace
from statistics import fmean, pvariance

import pytest
from lab_lines import diverged, replanned
from lab_runs import tampered

from tidegate.lab.compare.observed_verdicts import judge_observed, observed_panel
from tidegate.lab.compare.summary import summarise
from tidegate.lab.judging import t_interval
from tidegate.lab.training.records import Record

SLOPE = "growth of token dependence over layers"
FIGURES = [
    "weight on the first token",
    "added by the first token",
    "rank of the stream",
    "rank of value to output",
    "loss within training length",
    "loss beyond training length",
    "loss spikes",
    SLOPE,
]
SITE = "output"
RANKS = {"higher": 0, "lower": 0, "no significant difference": 1, "no verdict": 2}


def judged(lines):
    return judge_observed(summarise(lines))


def by_figure(lines):
    """The results as a dictionary of dictionaries: figure, then variant."""
    found = {}
    for result in judged(lines).results:
        found.setdefault(result.figure, {})[result.variant] = result
    return found


def panel(lines):
    summary = summarise(lines)
    shown = observed_panel(judge_observed(summary), summary.plan.control)
    if shown.kind == "table":
        return shown
    tables = [view.panel for view in shown.views]
    return replace(tables[0], title=shown.title, rows=tuple(row for table in tables for row in table.rows))


def everywhere(lines, change):
    """The lines, in which every record is changed by a function of it."""
    return [change(line) if isinstance(line, Record) else line for line in lines]


def observing(change):
    """A change of the last observation of a record, by a function of the record and of the observation."""

    def changed(record):
        *before, last = record.observations
        return replace(record, observations=(*before, replace(last, **change(record, last))))

    return changed


def flat(rows):
    return [value for row in rows for value in row]


def last(record):
    return record.observations[-1]


def expected_rows(lines):
    """By figure, the number of a record."""
    length = lines[0].task.length
    return {
        "weight on the first token": lambda r: fmean(flat(last(r).sink_mass)),
        "added by the first token": lambda r: fmean(flat(last(r).sink_contribution)),
        "rank of the stream": lambda r: last(r).effective_rank[1],
        "rank of value to output": lambda r: fmean(flat(last(r).map_rank)),
        "loss within training length": lambda r: fmean(loss for place, loss in r.loss_by_position if place <= length),
        "loss beyond training length": lambda r: fmean(loss for place, loss in r.loss_by_position if place > length),
    }


def test_every_figure_of_every_variant_is_compared_with_the_controls_under_the_same_seed(compared):
    summary, found = summarise(compared), by_figure(compared)
    assert list(found) == FIGURES
    for name, figure in expected_rows(compared).items():
        rows = {variant.name: [figure(record) for record in variant.records] for variant in summary.variants}
        assert list(found[name]) == ["g1", "bma-query"]
        for variant, result in found[name].items():
            paired = [own - other for own, other in zip(rows[variant], rows["none"], strict=True)]
            assert (result.control_mean, result.mean) == pytest.approx((fmean(rows["none"]), fmean(rows[variant])))
            assert (result.low, result.high) == pytest.approx(t_interval(paired, 1 - 0.05 / len(FIGURES) / 2))
            assert result.difference == pytest.approx(fmean(paired))


def test_the_level_is_shared_over_the_figures_that_are_on_record(compared):
    assert judged(compared).num_figures == len(FIGURES)
    older = everywhere(compared, lambda record: replace(record, num_spikes=None))
    older = everywhere(older, observing(lambda *_: {"map_rank": None, "sink_contribution": None}))
    gone = {"added by the first token", "rank of value to output", "loss spikes"}
    assert list(by_figure(older)) == [name for name in FIGURES if name not in gone]
    assert judged(older).figure_confidence == pytest.approx(1 - 0.05 / 5)
    assert panel(older).note.startswith(
        "5 metrics share the level of 5 % equally (Bonferroni): each has 99 % intervals"
    )


def shifted(variant, amount):
    """Every run sees a weight that depends on its seed a little, and on its variant by this much."""

    def change(record, _seen):
        noise = (0.01, -0.02, 0.03)[record.run.block] * (1 + 0.01 * len(record.run.variant))
        return {"sink_mass": ((0.5 + noise + (amount if record.run.variant == variant else 0.0), None),) * 2}

    return observing(change)


@pytest.mark.parametrize(("amount", "word"), [(0.2, "higher"), (-0.2, "lower")])
def test_significant_differences_come_first_and_heads_without_a_number_are_left_out(compared, amount, word):
    lines = everywhere(compared, shifted("bma-query", amount))
    result = by_figure(lines)["weight on the first token"]["bma-query"]
    assert result.verdict == word
    assert result.difference == pytest.approx(amount, rel=0.02)
    table = panel(lines)
    ranks = [RANKS[row[2]] for row in table.rows]
    assert ranks == sorted(ranks)
    assert table.rows[0][:3] == ("weight on the first token", "bma-query", word)
    are = "1 is" if ranks.count(0) == 1 else f"{ranks.count(0)} are"
    assert table.title == f"Of {len(ranks) - ranks.count(2)} differences in observed metrics, {are} significant"


def test_a_diverged_run_leaves_its_variant_without_a_verdict_and_the_others_with_theirs(compared):
    found = by_figure(tampered(compared, "g1", diverged))
    for name in FIGURES[:4]:
        assert (found[name]["g1"].verdict, found[name]["g1"].mean) == ("no verdict", None)
        assert found[name]["g1"].reason == "it has no value in 1 of 3 runs"
        assert found[name]["bma-query"].low is not None


def token_share(means, spreads):
    tokens, heads = fmean(spread**2 for spread in spreads), pvariance(means)
    return tokens / (tokens + heads)


def test_specialisation_is_the_slope_over_layers_of_the_tokens_share_against_zero(compared):
    found = by_figure(compared)[SLOPE]
    assert list(found) == ["g1", "bma-query"]
    for variant in summarise(compared).variants[1:]:
        gates = [last(record).gates[SITE] for record in variant.records]
        shares = [[token_share(*layer) for layer in zip(gate["mean"], gate["spread"], strict=True)] for gate in gates]
        # Of two layers, the slope is the difference.
        assert found[variant.name].difference == pytest.approx(fmean(deep - early for early, deep in shares))
        assert found[variant.name].control_mean is None


def with_gates(lines, spelling, **gates):
    """The lines, in which bma-query has other gates: so the plan spells them, and so the last observations see them."""
    plans = tuple(replace(own, gate=spelling) if own.name == "bma-query" else own for own in lines[0].variants)

    def change(record):
        if record.run.variant != "bma-query":
            return record
        return replace(record, observations=(replace(last(record), gates=gates),))

    return everywhere(replanned(lines, variants=plans), change)


ROWS = {"mean": ((0.5, 0.6), (0.4, 0.7)), "below": ((0.0, 0.0),) * 2, "spread": ((0.1, 0.2), (0.3, 0.1))}


def test_several_sites_have_a_slope_each_and_what_reads_nothing_has_none(compared):
    lines = with_gates(compared, "g1+g2", value=ROWS, output=ROWS)
    assert list(by_figure(lines)[SLOPE]) == ["g1", "bma-query, value", "bma-query, output"]
    blind = with_gates(compared, "output:nothing", output=ROWS)
    assert list(by_figure(blind)[SLOPE]) == ["g1"]


def test_runs_without_anything_on_record_are_not_judged(compared):
    bare = everywhere(compared, lambda record: replace(record, observations=(), loss_by_position=(), num_spikes=None))
    assert judged(bare) is None
