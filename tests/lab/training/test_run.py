import math
import shutil
from dataclasses import fields, replace

import pytest
from errors import rejects
from lab_runs import model_of, run_of

from tidegate._json import content_hash
from tidegate.config import TransformerConfig
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.training.run import Run, Training
from tidegate.tensors.rotary import Rotary

OTHER_RUN = {"variant": "other", "block": 1, "seed": 7, "role": "tuning"}
OTHER_TASK = {
    "length": 8,
    "validation_share": 0.2,
    "num_validation_tokens": 64,
    "tokenizer": "bpe:300",
    "fingerprint": "0" * 16,
}
OTHER_TRAINING = {
    "steps": 13,
    "batch_size": 5,
    "lr": 1e-3,
    "gate_lr": 2.0,
    "weight_decay": 0.2,
    "beta1": 0.8,
    "beta2": 0.9,
    "warmup": 0.5,
    "final_lr": 0.2,
    "clip": 0.5,
    "num_evaluations": 3,
    "num_observations": 1,
    "num_threads": 2,
    "device": "meta",
    "precision": "bf16",
    "compile": True,
    "accumulate": 4,
    "optimizer": "muon",
}
OTHER_MODEL = {
    "gate": "g1",
    "d_model": 32,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 4,
    "d_ff": (8, 9),
    "feedforward": "gelu",
    "norm": "layer",
    "qk_norm": True,
    "metric": "diagonal",
    "temperature": 2.0,
    "bias": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "init": "fan-in",
    "recompute_gate": True,
    "checkpoint_blocks": True,
    "vocab_size": 300,
    "max_length": 17,
    "positions": "none",
    "rotary": Rotary(base=100.0),
    "window": 3,
    "tie_embeddings": False,
}
SCHEDULES = [(1, 0.05), (3, 0.05), (12, 0.0), (100, 0.1), (100, 0.99), (7, 0.5)]


class TestTheContentHash:
    def test_the_tables_below_name_every_field(self):
        assert set(OTHER_TRAINING) == {field.name for field in fields(Training)}
        assert set(OTHER_MODEL) == {field.name for field in fields(TransformerConfig)}
        assert {*OTHER_RUN, "model", "task", "training"} == {field.name for field in fields(Run) if field.init}

    def test_it_changes_with_every_field(self, task):
        run = run_of(task)
        others = [
            run,
            *(replace(run, **{name: value}) for name, value in OTHER_RUN.items()),
            *(replace(run, training=replace(run.training, **{name: value})) for name, value in OTHER_TRAINING.items()),
            *(replace(run, model=replace(run.model, **{name: value})) for name, value in OTHER_MODEL.items()),
            *(replace(run, task=replace(task, **{name: value})) for name, value in OTHER_TASK.items()),
        ]
        assert len({other.id for other in others}) == len(others)

    def test_it_does_not_depend_on_where_the_text_lies(self, task, tmp_path):
        elsewhere = tmp_path / "elsewhere.txt"
        shutil.copy(task.source, elsewhere)
        assert run_of(replace(task, source=str(elsewhere))).id == run_of(task).id

    def test_a_text_without_a_fingerprint_is_known_by_its_place(self, task):
        here = replace(task, fingerprint="")
        assert run_of(replace(here, source="elsewhere")).id != run_of(here).id

    def test_it_is_the_same_tomorrow(self):
        run = Run(variant="a", block=0, seed=0, model=model_of(), task=RecallTask(), training=Training(steps=1))
        assert run.id == content_hash(run.to_dict())
        with pytest.raises(ValueError, match="JSON"):
            content_hash({"lr": math.nan})
        assert (
            content_hash({"b": [1, 2.5], "a": None}) == content_hash({"a": None, "b": [1, 2.5]}) == "e57f5d37865437a8"
        )

    def test_it_is_what_it_was_before_options_came_that_are_not_used(self):
        training = Training(steps=10)
        run = Run(variant="a", block=0, seed=0, model=model_of(), task=RecallTask(), training=training)
        assert run.id == "a107f252503c4c02"
        assert not {"precision", "compile", "accumulate", "optimizer"} & set(run.to_dict()["training"])


class TestTheLearningRate:
    @pytest.mark.parametrize(("steps", "warmup"), SCHEDULES)
    def test_it_rises_in_equal_steps_to_its_peak_at_the_end_of_the_warm_up_and_falls_from_there(self, steps, warmup):
        shares = [Training(steps=steps, warmup=warmup).lr_share(step) for step in range(steps)]
        risen = max(1, round(warmup * steps))
        assert min(shares) > 0
        assert shares[:risen] == [(step + 1) / risen for step in range(risen)]
        assert all(later < earlier for earlier, later in zip(shares[risen - 1 :], shares[risen:], strict=False))

    @pytest.mark.parametrize("final", [0.0, 0.1, 0.3])
    @pytest.mark.parametrize(("steps", "warmup"), SCHEDULES)
    def test_it_ends_where_it_is_told_to(self, steps, warmup, final):
        training = Training(steps=steps, warmup=warmup, final_lr=final)
        only_warm_up = round(warmup * steps) == steps or steps == 1
        assert training.lr_share(steps - 1) == pytest.approx(1 if only_warm_up else final, abs=1e-15)


class TestLooks:
    @pytest.mark.parametrize("steps", [1, 2, 7, 10, 11, 100, 997])
    @pytest.mark.parametrize("times", [1, 3, 10])
    def test_there_are_as_many_as_asked_for_evenly_spread_the_last_at_the_end(self, steps, times):
        training = Training(steps=steps, num_evaluations=times, num_observations=times)
        marks = [step for step in range(steps) if training.evaluates_after(step)]
        assert marks == [step for step in range(steps) if training.observes_after(step)]
        assert len(marks) == min(times, steps)
        assert marks[-1] == steps - 1
        gaps = [later - earlier for earlier, later in zip([-1, *marks], marks, strict=False)]
        assert max(gaps) - min(gaps) <= 1


INVALID = {
    **dict.fromkeys(("steps", "batch_size", "num_evaluations", "num_observations", "num_threads"), (0, 1.5, True)),
    **dict.fromkeys(("lr", "gate_lr", "clip"), (0.0, -1e-3, math.nan, math.inf)),
    **dict.fromkeys(("weight_decay", "warmup", "final_lr"), (-0.1, 1.1, math.nan)),
    **dict.fromkeys(("beta1", "beta2"), (-0.1, 1.0)),
    "precision": ("fp16",),
    "optimizer": ("sgd",),
    # It must divide the size of a batch.
    "accumulate": (0, 3),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in INVALID.items() for value in values])
def test_an_option_out_of_range_is_rejected(name, value):
    with rejects(name):
        Training(**{"steps": 3, name: value})
