import model_types
import pytest
import torch


def test_every_exception_names_a_type():
    named = {*model_types.OWN, *model_types.NOT_BUILT, *model_types.NO_ATTENTION}
    assert named <= set(model_types.model_types())
    assert not set(model_types.OWN) & set(model_types.NOT_BUILT)


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted(set(model_types.model_types()) - set(model_types.NOT_BUILT)))
def test_a_tiny_model_answers(model_type):
    model = model_types.build(model_type)
    assert sum(weight.numel() for weight in model.parameters()) < 500_000
    with torch.no_grad():
        assert model(**model_types.inputs_of(model)).logits.isfinite().all()


def sees_later_tokens(model_type):
    model = model_types.build(model_type)
    inputs = model_types.inputs_of(model)
    others = inputs | {"input_ids": inputs["input_ids"].clone()}
    others["input_ids"][:, -1] = 3 + (others["input_ids"][:, -1] - 2) % 60
    with torch.no_grad():
        before, after = (model(**each).logits[:, :-1] for each in (inputs, others))
    return not torch.allclose(before, after, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted(set(model_types.model_types()) - set(model_types.NOT_BUILT)))
def test_no_token_of_any_type_sees_a_later_one_unless_it_cannot_do_otherwise(model_type):
    assert sees_later_tokens(model_type) == (model_type in model_types.BOTH_WAYS)
