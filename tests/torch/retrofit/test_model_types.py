import model_types
import pytest
import torch


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted(set(model_types.model_types()) - set(model_types.NOT_BUILT)))
def test_a_tiny_model_answers_and_no_token_sees_a_later_one_unless_it_cannot_do_otherwise(model_type):
    model = model_types.build(model_type)
    assert sum(weight.numel() for weight in model.parameters()) < 500_000
    inputs = model_types.inputs_of(model)
    others = inputs | {"input_ids": inputs["input_ids"].clone()}
    others["input_ids"][:, -1] = 3 + (others["input_ids"][:, -1] - 2) % 60
    with torch.no_grad():
        before, after = (model(**each).logits for each in (inputs, others))
    assert before.isfinite().all()
    sees_later = not torch.allclose(before[:, :-1], after[:, :-1], atol=1e-5)
    assert sees_later == (model_type in model_types.BOTH_WAYS)
