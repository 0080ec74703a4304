import model_types
import pytest
import torch

from tidegate.torch.retrofit.probe import has_cache


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


@pytest.mark.parametrize("model_type", ["bert", "llama", "xlm", "xlnet"])
def test_a_token_sees_no_later_one_unless_the_type_cannot_do_otherwise(model_type):
    assert sees_later_tokens(model_type) == (model_type in model_types.BOTH_WAYS)


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted(set(model_types.model_types()) - set(model_types.NOT_BUILT)))
def test_no_token_of_any_type_sees_a_later_one_unless_it_cannot_do_otherwise(model_type):
    assert sees_later_tokens(model_type) == (model_type in model_types.BOTH_WAYS)


def test_a_bert_that_is_told_to_be_no_decoder_attends_both_ways_and_has_no_cache():
    model = model_types.build("bert", is_decoder=False)
    inputs = model_types.inputs_of(model)
    with torch.no_grad():
        whole, part = (model(input_ids=inputs["input_ids"][:, :stop]).logits[:, :4] for stop in (7, 4))
    assert not torch.allclose(whole, part, atol=1e-5)
    assert not has_cache(model, {"input_ids": inputs["input_ids"]})
