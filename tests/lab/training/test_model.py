import math

import pytest
import torch
from closeness import assert_close
from lab_runs import LENGTH, model_of
from torch.nn import functional as F

from tidegate.config import VisionConfig
from tidegate.lab.tasks.image import ImageTask
from tidegate.lab.tasks.task import NO_TARGET, Batch
from tidegate.lab.training import model as models
from tidegate.lab.training.model import (
    Evaluation,
    batch_loss,
    build_model,
    evaluate,
    row_parts,
    task_metrics,
    training_flops,
)
from tidegate.lab.training.observe import loss_by_position

ROW_BYTES = LENGTH * 256 * 4


def vision(gate="bma", **options):
    return VisionConfig(
        gate=gate, d_model=16, num_layers=1, num_heads=2, image_size=8, patch_size=4, channels=1, **options
    )


def batch_of(rows=3, *, seed=0, hidden=0):
    tokens = torch.randint(256, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[:, :hidden] = NO_TARGET
    return Batch(inputs, targets)


@pytest.mark.parametrize("make", [model_of, vision])
@pytest.mark.parametrize("gate", ["g1", "bma", "bma-query", "g1-head+vga"])
def test_variants_of_one_seed_start_alike_in_every_weight_that_they_share(make, gate):
    control, variant = (build_model(make(spelled), seed=5).state_dict() for spelled in ("none", gate))
    assert set(control) < set(variant)
    assert all(torch.equal(control[name], variant[name]) for name in control)


def test_the_loss_is_the_mean_cross_entropy_of_the_targets():
    model, batch = build_model(model_of(), seed=0), batch_of(hidden=5)
    logs = F.log_softmax(model(batch.inputs), dim=-1)
    picked = logs[:, 5:].gather(-1, batch.targets[:, 5:, None])
    assert_close(batch_loss(model, batch), -picked.mean())


def test_an_evaluation_counts_every_target_the_same_however_batched():
    model = build_model(model_of(), seed=0)
    parts = [batch_of(1, seed=1), batch_of(4, seed=2, hidden=9)]
    apart = evaluate(model, parts)
    joined = evaluate(model, [Batch(*(torch.cat(pair) for pair in zip(*parts, strict=True)))])
    assert apart.num_targets == joined.num_targets == LENGTH + 4 * (LENGTH - 9)
    assert apart.accuracy == joined.accuracy
    assert_close(torch.tensor(apart.loss), torch.tensor(joined.loss))


def test_accuracy_is_the_share_of_targets_that_are_likeliest():
    model, batch = build_model(model_of(), seed=0), batch_of()
    with torch.no_grad():
        likeliest = model(batch.inputs).argmax(dim=-1)
    targets = likeliest.clone()
    targets[:, ::2] = (targets[:, ::2] + 1) % 256
    assert evaluate(model, [Batch(batch.inputs, targets)]).accuracy == 0.5


def test_an_evaluation_drops_nothing_out_and_leaves_the_model_in_training():
    model, batch = build_model(model_of(dropout=0.5), seed=0), batch_of()
    assert evaluate(model, [batch]) == evaluate(model, [batch])
    assert model.training


def test_of_text_bits_per_byte_are_reported_and_of_images_the_accuracy(task):
    evaluation = Evaluation(loss=math.log(2), accuracy=0.25, num_targets=10)
    assert task_metrics(evaluation, task.load()) == {"bits_per_byte": 1.0}
    assert task_metrics(evaluation, ImageTask().load()) == {"accuracy": 0.25}


def test_training_takes_three_times_a_forward_pass_for_each_token_or_image():
    decoder, classifier = build_model(model_of()), build_model(vision())
    assert training_flops(decoder) == 3 * decoder.flops_per_token()
    # Four patches and the class token.
    assert training_flops(classifier) == pytest.approx(15 * classifier.flops_per_token(), rel=1e-12)


@pytest.mark.parametrize(("limit", "rows"), [(1, [3, 2, 2]), (4 * ROW_BYTES, [4, 3]), (7 * ROW_BYTES, [7])])
def test_logits_of_a_part_keep_to_the_limit_but_no_row_stands_alone(monkeypatch, limit, rows):
    model, batch = build_model(model_of(), seed=0), batch_of(7)
    monkeypatch.setattr(models, "_LOGIT_BYTES", limit)
    parts = list(row_parts(model, batch))
    assert [len(part.inputs) for part in parts] == rows
    assert all(
        torch.equal(torch.cat(column), whole) for column, whole in zip(zip(*parts, strict=True), batch, strict=True)
    )


def test_what_is_measured_does_not_depend_on_the_limit(monkeypatch):
    model, batch = build_model(model_of(), seed=0), batch_of(7, hidden=5)
    whole, curve = evaluate(model, [batch]), loss_by_position(model, batch)
    monkeypatch.setattr(models, "_LOGIT_BYTES", 2 * ROW_BYTES)
    parts = evaluate(model, [batch])
    assert (parts.accuracy, parts.num_targets) == (whole.accuracy, whole.num_targets)
    assert_close(torch.tensor(parts.loss), torch.tensor(whole.loss))
    assert_close(torch.tensor(loss_by_position(model, batch)), torch.tensor(curve))
