from dataclasses import replace

import pytest
from lab_lines import everywhere, replanned, with_curve
from lab_runs import tampered, with_facts, with_run

from tidegate.lab.compare.fairness import fairness_checks
from tidegate.lab.compare.summary import summarise
from tidegate.lab.training.records import Grid, Record


def checks(lines):
    return {check.name: check for check in fairness_checks(summarise(lines))}


def states(lines):
    return {name: check.state for name, check in checks(lines).items()}


def with_print(name, value="0"):
    return lambda record: replace(record, fingerprints=record.fingerprints | {name: value})


def with_training(**options):
    return lambda record: with_run(record, training=options)


def diverged(record):
    return replace(record, status="diverged", loss=None, metrics={}, tokens=record.tokens // 2)


def stillborn(record):
    return replace(record, status="diverged", loss=None, metrics={}, tokens=0, flops=0.0, curve=())


def doubled(name):
    return lambda record: replace(record, **{name: 2 * getattr(record, name)})


def lengthened(record):
    """Twice as long, in plan and in fact."""
    return replace(with_run(record, training={"steps": 2 * record.run.training.steps}), tokens=2 * record.tokens)


CONDITIONS = (
    "The same seeds",
    "Shared weights start alike",
    "The same batches in the same order",
    "One evaluation set",
    "Tokens matched",
    "Runs that diverged",
    "One machine, one set of versions",
)


def test_a_comparison_is_fair_by_construction(compared):
    found = states(compared)
    # The runs are miniatures, and the page says that they are under-trained.
    assert [name for name, state in found.items() if state == "violated"] == ["Tokens for each parameter"]
    assert {found[name] for name in CONDITIONS} == {"holds"}


def test_every_check_says_something(compared):
    assert all(check.detail for check in checks(compared).values())


class TestRed:
    """Each condition, once it is broken."""

    def test_other_seeds(self, compared):
        lines = tampered(compared, "g1", lambda record: with_run(record, seed=99))
        found = checks(lines)
        assert found["The same seeds"].state == "violated"
        assert found["The same seeds"].detail.startswith("g1 ran on other seeds than the control")
        assert "Shared weights start alike" not in found

    def test_another_start_of_a_shared_weight(self, compared):
        found = checks(tampered(compared, "g1", with_print("weights:embedding.weight leading"), block=2))
        assert found["Shared weights start alike"].state == "violated"
        assert found["Shared weights start alike"].detail == "1 weights differ at the start"

    def test_another_start_of_a_variant_with_another_init_is_none(self, compared):
        def started(record):
            record = with_print("weights:embedding.weight leading")(record)
            return with_run(record, model={"init": "torch"})

        found = checks(tampered(compared, "g1", started, block=2))["Shared weights start alike"]
        assert found.state == "holds"
        assert found.detail.startswith("every weight that variants of one `init` have in common")

    def test_another_start_of_a_weight_that_nobody_shares_is_none(self, compared):
        assert states(tampered(compared, "g1", with_print("weights:own")))["Shared weights start alike"] == "holds"

    def test_other_batches(self, compared):
        found = checks(tampered(compared, "bma-query", with_print("batches"), block=1))
        assert found["The same batches in the same order"].state == "violated"
        assert found["The same batches in the same order"].detail == "batches differ under 1 of 3 seeds"

    def test_another_evaluation_set(self, compared):
        found = checks(tampered(compared, "g1", with_print("validation")))
        assert found["One evaluation set"].state == "violated"
        assert found["One evaluation set"].detail.startswith("2 different ones: 0, ")

    def test_tokens_that_were_to_be_equal(self, compared):
        found = checks(everywhere(compared, lengthened, variants=["g1"]))
        assert found["Tokens matched"].state == "violated"
        assert found["Tokens matched"].detail == "over the control: g1 +100.00%"
        assert found["The same batches in the same order"].state == "note"

    @pytest.mark.parametrize(
        ("share", "state"), [(1.0, "holds"), (1.0009, "holds"), (1.002, "violated"), (0.998, "violated")]
    )
    def test_parameters_that_were_to_be_equal(self, compared, share, state):
        lines = everywhere(replanned(compared, match="params"), lambda record: replace(record, num_parameters=10_000))
        change = lambda record: replace(record, num_parameters=round(share * 10_000))  # noqa: E731
        assert states(everywhere(lines, change, variants=["g1"]))["Parameters matched"] == state

    @pytest.mark.parametrize(
        ("share", "state"), [(1.0, "holds"), (1.009, "holds"), (1.02, "violated"), (0.98, "violated")]
    )
    def test_flops_that_were_to_be_equal(self, compared, share, state):
        lines = everywhere(replanned(compared, match="flops"), lambda record: replace(record, flops=1e9))
        change = lambda record: replace(record, flops=share * 1e9)  # noqa: E731
        assert states(everywhere(lines, change, variants=["g1"]))["Training FLOPs matched"] == state

    def test_a_control_that_guesses(self, compared):
        found = states(everywhere(compared, lambda record: replace(record, loss=5.4 + record.loss / 100)))
        assert found["Better than guessing"] == "violated"
        better = everywhere(compared, lambda record: replace(record, loss=2 + record.loss / 100))
        assert states(better)["Better than guessing"] == "holds"

    def test_data_of_one_token_leaves_nothing_to_guess(self, compared):
        task = with_facts(compared[0].task, chance_loss=0.0)
        assert "Better than guessing" not in states(replanned(compared, task=task))

    def test_other_versions(self, compared):
        lines = tampered(
            compared, "g1", lambda record: replace(record, environment=record.environment | {"torch": "1"})
        )
        assert states(lines)["One machine, one set of versions"] == "violated"


class TestAWarning:
    def test_of_runs_that_diverged(self, compared):
        found = checks(tampered(compared, "g1", diverged))
        assert found["Runs that diverged"].state == "warning"
        assert found["Runs that diverged"].detail.startswith("g1 1 of 3")
        assert found["The same batches in the same order"].state == "note"
        assert found["Tokens matched"].state == "holds"

    @pytest.mark.parametrize(
        ("curve", "state"),
        [
            ((9, 8, 7, 6, 5, 4, 3, 2, 1.999, 1.998), "holds"),
            ((9, 8, 7, 6, 5, 4, 3, 2, 1.99, 1.98), "warning"),
            ((9, 8, 7, 6, 5, 4, 3, 2, 1.8, 1.7), "violated"),
            ((5, 4, 3, 2, 1.999, 1.998, 1.997, 1.996), "holds"),
            ((5, 4, 3, 2, 1.999, 1.998, 1.5, 1.499), "violated"),
            ((4, 3, 2, 1), "note"),
        ],
    )
    def test_of_a_loss_that_still_falls(self, compared, curve, state):
        found = checks(everywhere(compared, with_curve(*curve)))["Trained to a plateau"]
        assert found.state == state
        assert ("under-trained" in found.detail) == (state == "violated")
        assert ("at this budget" in found.detail) == (state in ("violated", "warning"))

    @pytest.mark.parametrize(("ratio", "state"), [(4.9, "violated"), (5.0, "holds")])
    def test_of_few_tokens_for_each_parameter(self, compared, ratio, state):
        lines = everywhere(compared, lambda r: replace(r, num_parameters=1000, tokens=round(1000 * ratio)))
        assert states(lines)["Tokens for each parameter"] == state

    def test_images_are_not_counted_as_tokens(self, compared):
        lines = everywhere(compared, lambda record: replace(record, loss_by_position=()))
        lines = replanned(lines, task=with_facts(compared[0].task, kind="image"))
        assert "Tokens for each parameter" not in states(lines)
        assert "Images matched" in states(lines)

    @pytest.mark.parametrize(("available", "state"), [(1000, "holds"), (999, "warning")])
    def test_of_many_passes_over_the_data(self, compared, available, state):
        lines = replanned(compared, task=with_facts(compared[0].task, num_training_examples=available))
        lines = everywhere(lines, lambda record: replace(record, tokens=4000))
        assert states(lines)["Passes over the data"] == state

    def test_of_options_that_one_variant_has_to_itself(self, compared):
        variants = compared[0].variants
        own = (variants[0], replace(variants[1], overrides={"lr": 1e-3, "clip": 0.5}), variants[2])
        found = checks(replanned(compared, variants=own))
        assert found["Options of g1's own"].state == "warning"
        assert found["Options of g1's own"].detail.startswith("lr = 0.001, clip = 0.5: asked for")


class TestANote:
    @pytest.mark.parametrize(
        ("match", "names"),
        [
            ("tokens", {"Parameters (not matched)", "Training FLOPs (not matched)"}),
            ("params", {"Tokens (not matched)", "Training FLOPs (not matched)"}),
            ("flops", {"Tokens (not matched)", "Parameters (not matched)"}),
            ("time", {"Tokens (not matched)", "Parameters (not matched)", "Training FLOPs (not matched)", "Time"}),
        ],
    )
    def test_tells_of_what_was_not_to_be_equal(self, compared, match, names):
        found = states(replanned(compared, match=match))
        budgets = {name for name in found if name.endswith("(not matched)") or name == "Time"}
        assert budgets == names
        assert {found[name] for name in budgets} == {"note"}

    def test_says_by_how_much(self, compared):
        detail = checks(compared)["Parameters (not matched)"].detail
        counts = {line.run.variant: line.num_parameters for line in compared if isinstance(line, Record)}
        assert detail.startswith(f"over the control: g1 {counts['g1'] / counts['none'] - 1:+.2%}, bma-query +")

    def test_that_time_cannot_be_reproduced(self, compared):
        assert "cannot be reproduced bit by bit" in checks(replanned(compared, match="time"))["Time"].detail

    @pytest.mark.parametrize(("tried", "state"), [(0.5, "holds"), (0.05, "warning")])
    def test_of_rates_that_were_not_tuned_and_that_they_were_if_they_were(self, compared, tried, state):
        assert states(compared)["Not tuned"] == "note"
        grid = Grid(rates=(0.5, 1.0), starts=(0.02,))
        lines = everywhere(replanned(compared, grid=grid), with_training(lr=0.125), variants=["g1"])
        first = next(line for line in lines if isinstance(line, Record))
        trials = [
            replace(with_run(first, role="tuning", training={"lr": rate}), id=f"trial {rate}")
            for rate in (0.001, 0.01, 0.125, tried)
        ]
        found = checks([*lines, *trials])["Tuned alike"]
        assert found.state == state
        assert "none lr 0.01, init 0.02; g1 lr 0.125, init 0.02; bma-query lr 0.01, init 0.02" in found.detail
        assert ("may lie beyond: g1 in 3 of 3 blocks" in found.detail) == (state == "warning")

    def test_of_a_single_block_at_an_end_of_the_rates(self, compared):
        lines = replanned(compared, grid=Grid(rates=(0.5, 1.0), starts=(0.02,)))
        lines = tampered(lines, "g1", with_training(lr=0.125))
        first = next(line for line in lines if isinstance(line, Record))
        trials = [
            replace(with_run(first, role="tuning", training={"lr": rate}), id=f"trial {rate}")
            for rate in (0.001, 0.01, 0.125)
        ]
        found = checks([*lines, *trials])["Tuned alike"]
        assert found.state == "warning"
        assert found.detail.endswith("may lie beyond: g1 in 1 of 3 blocks")

    def test_of_the_gates_group(self, compared):
        assert "learning rate times 1, no weight decay" in checks(compared)["Gates' parameters"].detail


def test_a_control_that_diverged_at_once_is_no_crash(compared):
    lines = everywhere(compared, stillborn, variants=["none"])
    found = states(lines)
    assert found["Runs that diverged"] == "warning"
    assert found["Training FLOPs"] == "note"
    assert found["Tokens matched"] == "holds"
    assert "Trained to a plateau" not in found


def test_a_control_that_diverged_in_part_is_measured_by_its_longest_run(compared):
    assert states(tampered(compared, "none", diverged))["Tokens matched"] == "holds"


def test_data_without_a_rule_of_holding_out_claims_none(compared):
    assert "Held-out data" not in states(replanned(compared, task=with_facts(compared[0].task, held_out="")))
