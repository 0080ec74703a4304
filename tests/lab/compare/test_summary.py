import json
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from lab_runs import cost_of, tampered, with_facts, with_run

from tidegate.lab.compare.summary import summarise
from tidegate.lab.judging import compare_to_control
from tidegate.lab.training.records import Costs, Plan, Record

NAMES = ("none", "g1", "bma-query")


def losses(lines, variant):
    return [line.loss for line in lines if isinstance(line, Record) and line.run.variant == variant]


def replanned(lines, **changes):
    return [replace(line, **changes) if isinstance(line, Plan) else line for line in lines]


def test_it_judges_the_losses_on_record(compared):
    table = {name: losses(compared, name) for name in NAMES}
    assert summarise(compared).comparison == compare_to_control(table, control="none", unit="nats")


def test_variants_stand_in_the_order_of_the_plan_with_one_record_a_block(compared):
    summary = summarise(compared)
    assert [variant.name for variant in summary.variants] == list(NAMES)
    assert summary.control is summary.variants[0]
    for variant in summary.variants:
        assert [record.run.block for record in variant.records] == [0, 1, 2]
        assert {record.run.variant for record in variant.records} == {variant.name}
        assert variant.num_parameters == variant.records[0].num_parameters
        assert variant.result == summary.comparison[variant.name]
        assert variant.cost == cost_of(variant.name)


def test_the_order_of_the_records_does_not_matter(compared):
    plan, costs, *records = compared
    assert summarise([plan, *reversed(records), costs]) == summarise(compared)


def test_without_costs_variants_have_none(compared):
    summary = summarise([line for line in compared if not isinstance(line, Costs)])
    assert {variant.cost for variant in summary.variants} == {None}


def test_a_metric_is_the_mean_and_deviation_over_the_runs_that_finished(compared):
    summary = summarise(compared)
    values = [record.metrics["bits_per_byte"] for record in summary.control.records]
    assert summary.metric == "bits_per_byte"
    assert summary.control.metric("bits_per_byte") == pytest.approx((fmean(values), stdev(values)), rel=1e-12)
    assert summary.control.metric("accuracy") is None


def diverged(record):
    return replace(record, status="diverged", loss=None, metrics={}, error="at step 3")


def test_a_diverged_run_is_counted_and_not_averaged(compared):
    summary = summarise(tampered(compared, "g1", diverged, block=1))
    gated = summary.variants[1]
    assert gated.result.verdict == "diverged"
    assert gated.result.num_diverged == 1
    assert [record.run.block for record in gated.finished] == [0, 2]
    mean = fmean(record.metrics["bits_per_byte"] for record in gated.finished)
    assert gated.metric("bits_per_byte")[0] == pytest.approx(mean, rel=1e-12)


def test_one_run_that_finished_has_no_spread(compared):
    lines = tampered(tampered(compared, "g1", diverged, block=1), "g1", diverged, block=2)
    assert summarise(lines).variants[1].metric("bits_per_byte")[1] is None


def test_a_variant_that_differs_in_name_alone_is_identical(compared):
    def renamed(record):
        return replace(with_run(record, variant="g1"), id=f"{record.id}'")

    others = [line for line in compared if not (isinstance(line, Record) and line.run.variant == "g1")]
    twins = [renamed(line) for line in compared if isinstance(line, Record) and line.run.variant == "none"]
    assert summarise([*others, *twins]).comparison["g1"].verdict == "identical"


def records(lines):
    return [line for line in lines if isinstance(line, Record)]


class TestRecordsThatAreNotAll:
    def test_are_refused_with_what_is_missing_and_how_to_go_on(self, compared):
        last = records(compared)[-1]
        with pytest.raises(
            ValueError,
            match=r"not complete: of 3 runs each, bma-query lacks 1\. Go on with: tidegate compare",
        ):
            summarise([line for line in compared if line is not last])

    def test_of_a_comparison_begun_from_python_go_on_with_the_same_command(self, compared):
        with pytest.raises(
            ValueError, match=r"none lacks 3, g1 lacks 3, bma-query lacks 3\. Go on with: the same command"
        ):
            summarise(replanned(compared, command="")[:2])

    def test_are_those_that_failed_too(self, compared):
        lines = tampered(compared, "none", lambda record: replace(record, status="failed", loss=None))
        with pytest.raises(ValueError, match="none lacks 1"):
            summarise(lines)

    def test_are_no_more_once_a_failed_run_was_done_again(self, compared):
        failed = [replace(line, status="failed", loss=None) for line in compared if isinstance(line, Record)]
        assert summarise([compared[0], *failed, *compared[1:]]) == summarise(compared)

    def test_without_a_plan_are_of_no_comparison(self, compared):
        with pytest.raises(ValueError, match="There is no plan among these records"):
            summarise(compared[1:])


def test_tuning_runs_are_kept_apart(compared):
    def trial(record):
        return replace(with_run(record, role="tuning"), id="trial", loss=0.0)

    summary = summarise([*compared, trial(records(compared)[-1])])
    assert [record.id for record in summary.tuning] == ["trial"]
    assert summary.comparison == summarise(compared).comparison


@pytest.mark.parametrize(("kind", "word"), [("lm", "tokens"), ("recall", "tokens"), ("image", "images")])
def test_what_is_counted_depends_on_the_task(compared, kind, word):
    # Images have no positions.
    lines = [replace(line, loss_by_position=()) if isinstance(line, Record) else line for line in compared]
    assert summarise(replanned(lines, task=with_facts(compared[0].task, kind=kind))).examples == word


def test_the_results_are_json_and_agree_with_the_summary(compared):
    summary = summarise(compared)
    data = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert [variant["losses"] for variant in data["variants"]] == [losses(compared, name) for name in NAMES]
    assert len(data["records"]) == 9
    assert [layers["id"] for layers in data["layers"]] == [variant.records[0].id for variant in summary.variants]
    assert data["plan"]["request"] == summary.plan.request
    for variant, own in zip(data["variants"], summary.variants, strict=True):
        assert variant["bits_per_byte"] == own.metric("bits_per_byte")[0]
        assert variant["num_parameters"] == own.num_parameters
        assert "accuracy" not in variant
    means = [variant["mean"] for variant in data["comparison"]["variants"]]
    assert means == [pytest.approx(fmean(variant["losses"])) for variant in data["variants"]]


def test_a_plan_whose_control_is_no_variant_is_refused(compared):
    with pytest.raises(ValueError, match="has no variant 'sea', which it names as its control"):
        summarise(replanned(compared, control="sea"))
