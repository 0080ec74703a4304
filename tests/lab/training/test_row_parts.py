import pytest
import torch
from closeness import assert_close
from lab_runs import LENGTH, model_of

from tidegate.config import VisionConfig
from tidegate.lab.tasks.task import NO_TARGET, Batch
from tidegate.lab.training import model as models
from tidegate.lab.training.model import build_model, evaluate, row_parts
from tidegate.lab.training.observe import loss_by_position

ROW_BYTES = LENGTH * 256 * 4


@pytest.fixture
def model():
    return build_model(model_of("bma"), seed=0)


@pytest.fixture
def batch():
    tokens = torch.randint(256, (7, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[2:5, :9] = NO_TARGET
    return Batch(tokens[:, :-1], targets)


@pytest.mark.parametrize(("limit", "rows"), [(1, [3, 2, 2]), (4 * ROW_BYTES, [4, 3]), (7 * ROW_BYTES, [7])])
def test_logits_of_a_part_keep_to_the_limit_but_no_row_stands_alone(model, batch, monkeypatch, limit, rows):
    monkeypatch.setattr(models, "_LOGIT_BYTES", limit)
    parts = list(row_parts(model, batch))
    assert [len(part.inputs) for part in parts] == rows
    assert all(
        torch.equal(torch.cat(column), whole) for column, whole in zip(zip(*parts, strict=True), batch, strict=True)
    )


def test_small_vocabularies_go_through_whole(model):
    tokens = torch.zeros(128, 512, dtype=torch.int64)
    assert len(list(row_parts(model, Batch(tokens, tokens)))) == 1


def test_images_have_one_row_of_logits_each(monkeypatch):
    config = VisionConfig(d_model=16, num_layers=1, num_heads=2, image_size=8, patch_size=4, channels=1)
    monkeypatch.setattr(models, "_LOGIT_BYTES", 2 * config.num_classes * 4)
    batch = Batch(torch.zeros(5, 1, 8, 8), torch.zeros(5, dtype=torch.int64))
    assert [len(part.inputs) for part in row_parts(build_model(config, seed=0), batch)] == [3, 2]


def test_what_is_measured_does_not_depend_on_the_limit(model, batch, monkeypatch):
    whole, curve = evaluate(model, [batch]), loss_by_position(model, batch)
    monkeypatch.setattr(models, "_LOGIT_BYTES", 2 * ROW_BYTES)
    parts = evaluate(model, [batch])
    assert (parts.accuracy, parts.num_targets) == (whole.accuracy, whole.num_targets)
    assert_close(torch.tensor(parts.loss), torch.tensor(whole.loss))
    assert_close(torch.tensor(loss_by_position(model, batch)), torch.tensor(curve))
