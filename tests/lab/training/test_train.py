import math
import shutil
from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from covers import axis, over
from damage import flip_inside
from lab_runs import LENGTH, STEPS, executed, model_of, run_of, text_of, timeless

from tidegate.config import VisionConfig
from tidegate.lab.tasks.image import image_task
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.training import train
from tidegate.lab.training.checkpoint import forget_checkpoint
from tidegate.lab.training.events import Interrupted, Notice
from tidegate.lab.training.model import build_model, evaluate, training_flops
from tidegate.lab.training.observe import observe_probe
from tidegate.lab.training.train import make_optimizer, train_step
from tidegate.torch.gate import gate_parameters

RUNS = ("text", "dropout", "image", "recall")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The runs, and the record that each gives if nothing interrupts it."""
    task = text_of(tmp_path_factory.mktemp("text"))
    vision = VisionConfig(gate="g1", d_model=16, num_layers=1, num_heads=2, image_size=8, patch_size=4, channels=1)
    recalling = model_of("bma", vocab_size=128, dropout=0.1)
    runs = (
        run_of(task),
        run_of(task, model=model_of("g1", dropout=0.2, attention_dropout=0.1)),
        run_of(image_task(), model=vision),
        run_of(RecallTask(num_pairs=2), model=recalling, num_evaluations=1),
    )
    return {name: (run, executed(run)) for name, run in zip(RUNS, runs, strict=True)}


class TestTheSameRun:
    @pytest.mark.parametrize("name", RUNS)
    def test_gives_the_same_numbers(self, undisturbed, name):
        run, first = undisturbed[name]
        assert first.status == "finished", first.error
        torch.manual_seed(99)
        torch.rand(5)
        assert timeless(executed(run)) == timeless(first)

    @over(name=axis(RUNS, "dropout"), stop=axis((1, 2, 3, 7, STEPS - 1, STEPS), 7))
    def test_stopped_at_any_step_goes_on_as_if_never_stopped(self, undisturbed, tmp_path, name, stop):
        run, first = undisturbed[name]
        expected = timeless(first)
        interrupt(run, tmp_path, at=stop)
        assert [file.name for file in tmp_path.glob(f"{run.id}*")] == [f"{run.id}.safetensors"]
        told = []
        assert timeless(executed(run, folder=tmp_path, report=told.append)) == expected
        assert [progress.step for progress in told] == list(range(stop + 1, STEPS + 1))


def interrupt(run, folder, *, at):
    steps = []
    with pytest.raises(Interrupted, match=run.id):
        executed(run, folder=folder, report=lambda p: steps.append(p.step), stopping=lambda: steps[-1] == at)


def test_stopped_again_and_again_it_still_ends_the_same(undisturbed, tmp_path):
    run, expected = undisturbed["dropout"]
    for stop in range(1, STEPS + 1):
        interrupt(run, tmp_path, at=stop)
    assert timeless(executed(run, folder=tmp_path)) == timeless(expected)


def test_dropout_is_drawn_anew_at_each_step_and_by_each_seed(task, monkeypatch):
    drawn = []

    def noted(*arguments):
        drawn.append(torch.initial_seed())
        return train_step(*arguments)

    monkeypatch.setattr(train, "train_step", noted)
    for seed in (0, 1):
        executed(run_of(task, model=model_of("bma", dropout=0.1), seed=seed))
    assert len(set(drawn)) == len(drawn) == 2 * STEPS


class Killed(BaseException):
    """What no handler catches."""


@pytest.mark.parametrize(("saved", "killed"), [(0, 2), (1, 2), (3, 4), (3, 9), (7, STEPS), (STEPS - 1, STEPS)])
def test_killed_it_goes_on_from_an_older_checkpoint_as_if_nothing_had_been(undisturbed, tmp_path, saved, killed):
    run, expected = undisturbed["dropout"]
    file, kept = tmp_path / f"{run.id}.safetensors", tmp_path / "kept"

    def report(progress):
        # What is on the disk now was saved after the step before.
        if progress.step == saved + 1 and file.exists():
            shutil.copy(file, kept)
        if progress.step == killed:
            raise Killed

    with pytest.raises(Killed):
        executed(run, folder=tmp_path, checkpoint_seconds=0, report=report)
    file.unlink()
    if kept.exists():
        shutil.copy(kept, file)
    told = []
    assert timeless(executed(run, folder=tmp_path, report=told.append)) == timeless(expected)
    assert told[0].step == saved + 1


class TestADamagedCheckpoint:
    def damaged(self, task, folder, *, files):
        """A run, stopped after four checkpoints, of which those of these endings are damaged."""
        run = run_of(task, model=model_of("bma", dropout=0.1))

        def report(event):
            if event.step == 5:
                raise Killed

        with pytest.raises(Killed):
            executed(run, folder=folder, checkpoint_seconds=0, report=report)
        for ending in files:
            flip_inside(folder / f"{run.id}{ending}")
        return run

    @pytest.mark.parametrize(
        ("files", "words", "first"),
        [
            ([".safetensors"], "The run resumes from step 3.", 4),
            ([".safetensors", ".previous.safetensors"], "The run starts over.", 1),
        ],
        ids=["one", "both"],
    )
    def test_is_told_of_and_changes_no_number(self, task, tmp_path, files, words, first):
        run = self.damaged(task, tmp_path, files=files)
        told = []
        assert timeless(executed(run, folder=tmp_path, report=told.append)) == timeless(executed(run))
        notice, *progress = told
        assert isinstance(notice, Notice)
        assert (notice.run, notice.variant, notice.seed) == (run.id, "bma", 0)
        assert f"{run.id}.safetensors" in notice.text
        assert "damaged" in notice.text
        assert notice.text.endswith(words)
        assert progress[0].step == first

    def test_that_nobody_needs_is_not_told_of(self, task, tmp_path):
        run = self.damaged(task, tmp_path, files=[".previous.safetensors"])
        told = []
        assert timeless(executed(run, folder=tmp_path, report=told.append)) == timeless(executed(run))
        assert told[0].step == 5


def test_a_run_that_ends_keeps_its_checkpoint_until_it_is_forgotten(task, tmp_path):
    run, folder = run_of(task), tmp_path / "checkpoints"
    folder.mkdir()
    (folder / f"{run.id}.123.partial").write_bytes(b"half")
    (folder / "another.safetensors").write_bytes(b"")
    record = executed(run, folder=folder)
    assert (folder / f"{run.id}.safetensors").exists()
    assert timeless(executed(run, folder=folder)) == timeless(record)
    forget_checkpoint(folder, run.id)
    assert [file.name for file in folder.iterdir()] == ["another.safetensors"]


class TestTheRecord:
    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, tmp_path_factory):
        return run_of(text_of(tmp_path_factory.mktemp("text")), gate="g1", variant="gated", seed=4, block=2)

    @pytest.fixture(scope="class")
    @classmethod
    def record(cls, run):
        return executed(run)

    def test_counts_parameters_tokens_and_flops(self, run, record):
        model = build_model(run.model)
        assert record.num_parameters == model.num_parameters()
        assert record.num_gate_parameters == 2 * 16 * 16 > 0
        assert record.tokens == STEPS * 4 * LENGTH
        assert record.flops == record.tokens * training_flops(model)

    def test_has_as_many_points_and_observations_as_asked_for(self, record):
        assert [point.step for point in record.curve] == [3, 6, 9, 12]
        assert [point.tokens for point in record.curve] == [step * 4 * LENGTH for step in (3, 6, 9, 12)]
        assert [observation.tokens for observation in record.observations] == [6 * 4 * LENGTH, 12 * 4 * LENGTH]
        assert len(record.timing.seconds) == 4

    def test_ends_with_the_loss_on_all_held_out_text(self, run, record):
        final = run.task.load().final()
        assert record.num_evaluated == sum(batch.targets.numel() for batch in final)
        assert record.num_evaluated > sum(batch.targets.numel() for batch in run.task.load().validation())
        assert record.metrics == {"bits_per_byte": record.loss / math.log(2)}

    def test_is_what_a_plain_loop_gives(self, run, record):
        model, data = build_model(run.model, seed=run.seed), run.task.load()
        optimizer = make_optimizer(model, run)
        figures = [
            train_step(model, optimizer, data.batch(seed=run.seed, step=step, size=4), run, step)
            for step in range(STEPS)
        ]
        assert record.loss == evaluate(model, data.final()).loss
        assert record.observations[-1] == observe_probe(model, data.probe(), tokens=record.tokens)
        means = torch.tensor(figures, dtype=torch.float64).unflatten(0, (4, 3)).mean(dim=1)
        noted = [(p.train_loss, p.gradient_norm, p.gate_gradient_norm) for p in record.curve]
        assert_close(torch.tensor(noted, dtype=torch.float64), means)

    def test_loss_by_position_reaches_four_times_the_training_length(self, record):
        assert record.loss_by_position[-1][0] == pytest.approx(4 * LENGTH - 0.5)

    def test_without_gates_there_is_no_gradient_of_theirs(self, run):
        record = executed(replace(run, model=model_of("none")))
        assert {point.gate_gradient_norm for point in record.curve} == {None}
        assert record.observations[0].gates == {}


def test_variants_of_one_seed_share_batches_and_the_start_of_every_common_weight_whatever_their_widths(task):
    widths = {"none": None, "g1": (40, 41), "bma": (33, 32), "bma-query": 64}
    prints = [
        executed(run_of(task, variant=gate, model=model_of(gate, d_ff=width), steps=2)).fingerprints
        for gate, width in widths.items()
    ]
    assert {"batches", "validation"} < set.intersection(*map(set, prints))
    for name in set().union(*prints):
        assert len({own[name] for own in prints if name in own}) == 1, name


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 5}, {"steps": 3}])
def test_other_batches_have_another_fingerprint(task, change):
    first, second = (executed(run_of(task, **({"steps": 2} | own))).fingerprints for own in ({}, change))
    assert first["batches"] != second["batches"]
    assert first["validation"] == second["validation"]
    weight = "weights:embedding.weight leading"
    assert (first[weight] == second[weight]) == ("seed" not in change)


def test_gates_have_a_group_of_their_own_without_weight_decay(task):
    run = run_of(task, gate="g1+bma", gate_lr=0.25, weight_decay=0.3)
    model = build_model(run.model, seed=0)
    gates, matrices, vectors = make_optimizer(model, run).param_groups
    assert {id(p) for p in gates["params"]} == {id(p) for p in gate_parameters(model)}
    lr = run.training.lr
    assert (gates["weight_decay"], gates["lr"]) == (0.0, 0.25 * lr)
    assert (matrices["weight_decay"], matrices["lr"]) == (0.3, lr)
    assert (vectors["weight_decay"], vectors["lr"]) == (0.0, lr)
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in vectors["params"]} == {1}


class TestDivergence:
    @pytest.mark.parametrize("gate", ["none", "g1", "output:input:silu"])
    def test_under_an_absurd_learning_rate_it_is_a_result(self, task, gate, tmp_path):
        run = run_of(task, gate=gate, lr=1e6, weight_decay=1.0, steps=40, num_evaluations=40, num_observations=40)
        record = executed(run, folder=tmp_path / "checkpoints", checkpoint_seconds=0)
        assert record.status == "diverged"
        assert record.loss is None
        assert "no longer finite at step" in record.error
        assert 0 < record.tokens < 40 * 4 * LENGTH
        assert timeless(executed(run)) == timeless(record)

    def test_a_validation_loss_that_is_not_finite_at_the_end_is_a_result(self, task, monkeypatch):
        original = evaluate
        monkeypatch.setattr(train, "evaluate", lambda *inputs: original(*inputs)._replace(loss=math.inf))
        record = executed(run_of(task))
        assert (record.status, record.loss) == ("diverged", None)
        assert record.error.startswith("The validation loss at the end is inf; a blind guess has 5.545")
        assert {point.loss for point in record.curve} == {None}


def test_a_failure_is_a_record_with_the_traceback(task, monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(train, "train_step", broken)
    run = run_of(task)
    record = executed(run)
    assert (record.id, record.status, record.loss) == (run.id, "failed", None)
    assert record.run == run
    assert record.error.startswith("Traceback")
    assert record.error.strip().endswith("ZeroDivisionError: on purpose")
