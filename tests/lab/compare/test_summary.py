import json
import re
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from lab_lines import replanned
from lab_runs import cost_of, tampered, with_facts, with_run

from tidegate.lab.compare.summary import summarise
from tidegate.lab.judging import compare_to_control
from tidegate.lab.training.records import Plan, Record

NAMES = ("none", "g1", "bma-query")


def losses(lines, variant):
    return [line.loss for line in lines if isinstance(line, Record) and line.run.variant == variant]


def without_sentences(comparison):
    """The comparison without its sentences, which have the time of the runs."""
    return replace(comparison, variants=tuple(replace(variant, sentence="") for variant in comparison.variants))


def test_it_judges_the_losses_on_record(compared):
    expected = compare_to_control({name: losses(compared, name) for name in NAMES}, control="none", unit="nats")
    assert without_sentences(summarise(compared).comparison) == without_sentences(expected)


def test_the_time_of_more_seeds_is_that_of_the_recorded_training(compared):
    """Each seed on record took an hour of one core: three variants of 20 minutes."""

    def slow(line, cores="2"):
        if isinstance(line, Plan):
            return replace(line, environment={"cores": cores})
        if not isinstance(line, Record):
            return line
        loss = 2 + 0.1 * (line.run.block * (1 + len(line.run.variant)) % 7)
        return replace(line, loss=loss, timing=replace(line.timing, seconds=(1.0, 1200.0)))

    (found,) = [v for v in summarise([slow(line) for line in compared]).variants if v.name == "g1"]
    assert found.result.verdict == "inconclusive"
    number, hours = re.search(r"(\d+) seeds \((.*) h of training on 2 cores\)", found.result.sentence).groups()
    assert float(hours) == pytest.approx(int(number) * 0.5, abs=0.5)
    (unknown,) = [v for v in summarise([slow(line, "None") for line in compared]).variants if v.name == "g1"]
    assert "of training" not in unknown.result.sentence


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


def records(lines):
    return [line for line in lines if isinstance(line, Record)]


class TestIncompleteRecords:
    @pytest.mark.parametrize(("command", "hint"), [("tidegate compare", "tidegate compare"), ("", "compare")])
    def test_are_an_error_that_names_what_is_missing_and_the_command(self, compared, command, hint):
        last = records(compared)[-1]
        lines = replanned([line for line in compared if line is not last], command=command)
        with pytest.raises(ValueError, match=rf"bma-query lacks 1 run.*{hint}"):
            summarise(lines)

    def test_have_failed_runs_until_these_are_repeated(self, compared):
        lines = tampered(compared, "none", lambda record: replace(record, status="failed", loss=None))
        with pytest.raises(ValueError, match="none lacks 1"):
            summarise(lines)
        failed = [replace(line, status="failed", loss=None) for line in compared if isinstance(line, Record)]
        assert summarise([compared[0], *failed, *compared[1:]]) == summarise(compared)

    def test_without_a_plan_or_its_control_are_an_error(self, compared):
        with pytest.raises(ValueError, match="no plan"):
            summarise(compared[1:])
        with pytest.raises(ValueError, match="'sea'"):
            summarise(replanned(compared, control="sea"))


def test_tuning_runs_are_kept_apart(compared):
    def trial(record):
        return replace(with_run(record, role="tuning"), id="trial", loss=0.0)

    summary = summarise([*compared, trial(records(compared)[-1])])
    assert [record.id for record in summary.tuning] == ["trial"]
    assert without_sentences(summary.comparison) == without_sentences(summarise(compared).comparison)


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
