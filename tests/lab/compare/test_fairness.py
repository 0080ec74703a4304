from dataclasses import replace

import pytest
from lab_lines import diverged, everywhere, replanned, with_curve
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


def lengthened(record):
    """Twice as long, in plan and in fact."""
    return replace(with_run(record, training={"steps": 2 * record.run.training.steps}), tokens=2 * record.tokens)


def test_a_comparison_is_fair_by_construction(compared):
    found = checks(compared)
    assert all(check.detail for check in found.values())
    # The runs are miniatures, and the page says that they are under-trained.
    assert [name for name, check in found.items() if check.state == "violated"] == ["Tokens per parameter"]
    assert {name for name, check in found.items() if check.state == "holds"} >= {
        "Same seeds",
        "Same initial weights",
        "Same batches in the same order",
        "Same evaluation set",
        "Tokens matched",
        "No run diverged",
        "Same machine and versions",
    }


class TestRed:
    """Each condition, once it is broken."""

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            (lambda record: with_run(record, seed=99), "Same seeds"),
            (with_print("weights:embedding.weight leading"), "Same initial weights"),
            (with_print("batches"), "Same batches in the same order"),
            (with_print("validation"), "Same evaluation set"),
            (
                lambda record: replace(record, environment=record.environment | {"torch": "1"}),
                "Same machine and versions",
            ),
        ],
    )
    def test_what_one_run_does_not_share(self, compared, change, name):
        found = states(tampered(compared, "g1", change, block=1))
        assert found[name] == "violated"
        assert [name for name, state in found.items() if state == "violated"] == [name, "Tokens per parameter"] or (
            name == "Same machine and versions"
        )

    def test_weights_of_a_variant_with_another_init_are_not_compared(self, compared):
        def started(record):
            record = with_print("weights:embedding.weight leading")(record)
            return with_run(record, model={"init": "torch"})

        assert states(tampered(compared, "g1", started, block=2))["Same initial weights"] == "holds"
        assert states(tampered(compared, "g1", with_print("weights:own")))["Same initial weights"] == "holds"

    def test_tokens_that_were_to_be_equal(self, compared):
        found = checks(everywhere(compared, lengthened, variants=["g1"]))
        assert found["Tokens matched"].state == "violated"
        assert found["Tokens matched"].detail.endswith("g1 +100.00%")
        assert found["Same batches in the same order"].state == "note"

    @pytest.mark.parametrize(
        ("match", "name", "share", "state"),
        [
            ("params", "Parameters matched", 1.0009, "holds"),
            ("params", "Parameters matched", 1.002, "violated"),
            ("params", "Parameters matched", 0.998, "violated"),
            ("flops", "Training FLOPs matched", 1.009, "holds"),
            ("flops", "Training FLOPs matched", 1.02, "violated"),
            ("flops", "Training FLOPs matched", 0.98, "violated"),
        ],
    )
    def test_what_was_to_be_equal_within_a_tolerance(self, compared, match, name, share, state):
        field, amount = {"params": ("num_parameters", 10_000), "flops": ("flops", 1e9)}[match]
        lines = everywhere(replanned(compared, match=match), lambda record: replace(record, **{field: amount}))
        lines = everywhere(lines, lambda record: replace(record, **{field: round(share * amount)}), variants=["g1"])
        assert states(lines)[name] == state

    def test_a_control_that_guesses(self, compared):
        found = states(everywhere(compared, lambda record: replace(record, loss=5.4 + record.loss / 100)))
        assert found["Better than chance"] == "violated"
        better = everywhere(compared, lambda record: replace(record, loss=2 + record.loss / 100))
        assert states(better)["Better than chance"] == "holds"
        task = with_facts(compared[0].task, chance_loss=0.0)
        assert "Better than chance" not in states(replanned(compared, task=task))


class TestAWarning:
    def test_of_runs_that_diverged(self, compared):
        found = checks(tampered(compared, "g1", diverged))
        assert found["Diverged runs"].state == "warning"
        assert found["Diverged runs"].detail == "g1 1 of 3"
        assert found["Same batches in the same order"].state == "note"
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
        assert ("this training length" in found.detail) == (state in ("violated", "warning"))

    @pytest.mark.parametrize(("ratio", "state"), [(4.9, "violated"), (5.0, "holds")])
    def test_of_few_tokens_for_each_parameter(self, compared, ratio, state):
        lines = everywhere(compared, lambda r: replace(r, num_parameters=1000, tokens=round(1000 * ratio)))
        assert states(lines)["Tokens per parameter"] == state

    def test_images_are_not_counted_as_tokens(self, compared):
        lines = everywhere(compared, lambda record: replace(record, loss_by_position=()))
        lines = replanned(lines, task=with_facts(compared[0].task, kind="image"))
        assert "Tokens per parameter" not in states(lines)
        assert "Images matched" in states(lines)

    @pytest.mark.parametrize(("available", "state"), [(1000, "holds"), (999, "warning")])
    def test_of_many_passes_over_the_data(self, compared, available, state):
        lines = replanned(compared, task=with_facts(compared[0].task, num_training_examples=available))
        lines = everywhere(lines, lambda record: replace(record, tokens=4000))
        assert states(lines)["Epochs"] == state

    def test_of_options_that_one_variant_has_to_itself(self, compared):
        variants = compared[0].variants
        own = (variants[0], replace(variants[1], overrides={"lr": 1e-3, "clip": 0.5}), variants[2])
        found = checks(replanned(compared, variants=own))["Own options of g1"]
        assert (found.state, found.detail) == ("warning", "lr = 0.001, clip = 0.5")
        alike = tuple(replace(variant, overrides={"lr": 1e-3}) for variant in variants)
        shared = {
            name: check for name, check in checks(replanned(compared, variants=alike)).items() if "options" in name
        }
        assert [check.state for check in shared.values()] == ["note"]


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

    @pytest.mark.parametrize(
        ("blocks", "highest", "state"),
        [((0, 1, 2), 0.5, "holds"), ((0, 1, 2), 0.125, "warning"), ((0,), 0.125, "warning")],
    )
    def test_of_tuned_rates_warns_of_one_at_an_end(self, compared, blocks, highest, state):
        assert states(compared)["Not tuned"] == "note"
        lines = replanned(compared, grid=Grid(rates=(0.5, 1.0), starts=(0.02,)))
        for block in blocks:
            lines = tampered(lines, "g1", with_training(lr=0.125), block=block)
        first = next(line for line in lines if isinstance(line, Record))
        trials = [
            replace(with_run(first, role="tuning", training={"lr": rate}), id=f"trial {rate}")
            for rate in (0.001, 0.01, highest)
        ]
        found = checks([*lines, *trials])["Tuned on the same grid"]
        assert found.state == state
        assert (f"g1 in {len(blocks)} of 3 seeds" in found.detail) == (state == "warning")


def test_a_control_that_diverged_at_once_is_no_crash(compared):
    def stillborn(record):
        return replace(record, status="diverged", loss=None, metrics={}, tokens=0, flops=0.0, curve=())

    found = states(everywhere(compared, stillborn, variants=["none"]))
    assert (found["Diverged runs"], found["Training FLOPs"], found["Tokens matched"]) == ("warning", "note", "holds")
    assert "Trained to a plateau" not in found
