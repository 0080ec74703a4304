import pytest
import torch
from errors import rejects
from retrofit_models import inputs_of, tiny

from tidegate.torch import freeze_all_but_gates, gate_optimizer_groups, gate_parameters
from tidegate.torch.retrofit import add_gates


def gated():
    model = tiny("opt")
    add_gates(model, "output:input:b0")
    return model


def test_after_freezing_gates_alone_learn():
    model = gated()
    assert freeze_all_but_gates(model) == sum(gate.numel() for gate in gate_parameters(model)) == 2 * (32 * 32 + 32)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(gate_optimizer_groups(model, lr=1e-2, weight_decay=0.1))
    inputs = inputs_of(model)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if ".attn_gate." in name}


def test_a_model_without_gates_cannot_be_frozen_but_for_them():
    with rejects("model", hint="add_gates(model)") as caught:
        freeze_all_but_gates(tiny("opt"))
    assert caught.value.got == "OPTForCausalLM"


@pytest.mark.parametrize(("given", "expected"), [(None, 0.1), (0.5, 0.5)])
def test_gates_have_a_rate_of_their_own_and_no_decay(given, expected):
    model = gated()
    groups = gate_optimizer_groups(model, lr=0.01, gate_lr=given, weight_decay=0.1)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(expected, 0.0), (0.01, 0.1), (0.01, 0.0)]
    assert groups[0]["params"] == list(gate_parameters(model))
    counted = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(counted) == sorted(map(id, model.parameters()))
    assert all(parameter.ndim > 1 for parameter in groups[1]["params"])


def test_what_does_not_learn_is_in_no_group():
    model = gated()
    freeze_all_but_gates(model)
    assert [group["params"] for group in gate_optimizer_groups(model, lr=0.01)] == [list(gate_parameters(model))]
