"""Gates act once after the modules of a gated model are replaced, copied, wrapped or sharded."""

import copy
import io

import pytest
import torch
from closeness import assert_close
from errors import rejects
from peft import LoraConfig, get_peft_model
from retrofit_models import inputs_of, logits, merge_adapters, stir, tiny
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import parametrizations, parametrize

from tidegate.torch import gate_parameters
from tidegate.torch.gate import AttentionGate
from tidegate.torch.retrofit import add_gates, load_gates, load_pretrained, remove_gates, save_gates, save_pretrained

GATES = ("g1", "g2", "bma", "bma+g1+g3+g4+g5")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

gates = pytest.mark.parametrize("gate", GATES)
quantization = pytest.mark.filterwarnings("ignore:torch.ao.quantization", "ignore:torch.quantize_per_tensor")


def plain(**options):
    return tiny("llama", num_hidden_layers=1, **options)


def gated(gate):
    model = plain()
    add_gates(model, gate, activation=None)
    return stir(model)


def count_calls(model):
    """Run the model, and count the calls of each of its gates."""
    calls = {module: 0 for module in model.modules() if isinstance(module, AttentionGate)}

    def count(module, _args, _output):
        calls[module] += 1

    handles = [module.register_forward_hook(count) for module in calls]
    logits(model)
    for handle in handles:
        handle.remove()
    return list(calls.values())


def quantize(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def attentions(model):
    return [layer.self_attn for layer in model.model.layers]


def copy_projections(model):
    for attention in attentions(model):
        for name in PROJECTIONS:
            setattr(attention, name, copy.deepcopy(getattr(attention, name)))
    return model


def copy_projections_behind_the_module(model):
    for attention in attentions(model):
        for name in PROJECTIONS:
            attention._modules[name] = copy.deepcopy(attention._modules[name])
    return model


def copy_layers(model):
    model.model.layers = nn.ModuleList(map(copy.deepcopy, model.model.layers))
    return model


def parametrize_projections(model):
    for attention in attentions(model):
        for name in PROJECTIONS:
            parametrize.register_parametrization(getattr(attention, name), "weight", nn.Identity())
    return model


def normalize_weights(model):
    for attention in attentions(model):
        for name in PROJECTIONS:
            parametrizations.weight_norm(getattr(attention, name))
    return model


def normalize_weights_by_hooks(model):
    for attention in attentions(model):
        with pytest.warns(FutureWarning, match="weight_norm"):
            nn.utils.weight_norm(attention.v_proj)
    return model


def adapt_nothing(model):
    """Put adapters that start at zero around the projections."""
    return get_peft_model(model, LoraConfig(r=2, target_modules=list(PROJECTIONS))).eval()


def adapt_and_merge(model):
    return merge_adapters(adapt_nothing(model).get_base_model())


def save_and_unpickle(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


CHANGES = (
    *(copy.deepcopy, copy.copy, copy_layers, copy_projections, copy_projections_behind_the_module, save_and_unpickle),
    *(parametrize_projections, normalize_weights, normalize_weights_by_hooks, adapt_nothing, adapt_and_merge),
)
"""Changes of modules that do not change the outputs."""


@pytest.mark.parametrize("change", CHANGES)
@gates
def test_gates_act_once_after_a_change_of_modules(change, gate):
    model = gated(gate)
    expected, calls = logits(model), count_calls(model)
    assert set(calls) == {1}
    changed = change(model)
    assert count_calls(changed) == calls
    assert_close(logits(changed), expected, what="forward")


@gates
def test_gates_act_once_where_layers_share_projections_later(gate):
    model, alike = tiny("llama"), tiny("llama")
    for each in (model, alike):
        add_gates(each, gate, activation=None)
        stir(each)
        first, second = attentions(each)
        for name in PROJECTIONS:
            getattr(second, name).load_state_dict(getattr(first, name).state_dict())
    first, second = attentions(model)
    for name in PROJECTIONS:
        setattr(second, name, getattr(first, name))
    assert set(count_calls(model)) == {1}
    assert torch.equal(logits(model), logits(alike))


@quantization
@gates
def test_gates_act_once_in_a_quantized_model_before_and_after(gate):
    model = gated(gate)
    quantized = quantize(model)
    assert set(count_calls(quantized)) == {1}
    # Compare with a model that is quantized before gates are added.
    later = quantize(plain())
    add_gates(later, gate, activation=None)
    stir(later)
    assert torch.equal(logits(quantized), logits(later))
    assert not torch.equal(logits(quantized), logits(quantize(plain())))
    remove_gates(quantized)
    assert torch.equal(logits(quantized), logits(quantize(plain())))


@quantization
@pytest.mark.parametrize("change", [quantize, copy.deepcopy])
@pytest.mark.parametrize("family", ["bert", "gpt-neox"])
def test_gates_act_once_with_fused_projections_and_with_an_output_projection_outside(family, change):
    model = tiny(family, num_hidden_layers=1)
    add_gates(model, "g1+g2+g5", activation=None)
    assert count_calls(change(model)) == [1, 1, 1]


@quantization
def test_gates_of_a_quantized_model_are_loaded_into_the_same_weights(tmp_path):
    model = quantize(gated("bma+g1"))
    save_gates(model, tmp_path)
    again = quantize(plain())
    load_gates(again, tmp_path)
    assert torch.equal(logits(again), logits(model))
    with rejects("model", hint="other weights"):
        load_gates(quantize(plain(seed=1)), tmp_path)


@quantization
@pytest.mark.parametrize("change", [normalize_weights, parametrize_projections, quantize])
def test_weights_that_cannot_be_loaded_are_not_saved(tmp_path, change):
    model = change(gated("g1"))
    with rejects("model", hint="use save_gates"):
        save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_remedy_for_parametrized_weights_works(tmp_path):
    model = normalize_weights(gated("g1"))
    expected = logits(model)
    for attention in attentions(model):
        for name in PROJECTIONS:
            parametrize.remove_parametrizations(getattr(attention, name), "weight")
    save_pretrained(model, tmp_path)
    assert torch.equal(logits(load_pretrained(tmp_path)), logits(model))
    assert_close(logits(model), expected, what="forward")


def test_weights_that_are_missing_from_a_folder_are_not_drawn_at_random(tmp_path):
    normalize_weights(gated("g1")).save_pretrained(tmp_path)
    with rejects("directory", hint="no model.layers.0.self_attn.k_proj.weight"):
        load_pretrained(tmp_path)


@pytest.fixture(name="mesh")
def _mesh():
    """A mesh of one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@gates
@pytest.mark.parametrize("parts", ["layers", "attention"])
def test_gates_act_once_and_learn_in_a_sharded_model(mesh, gate, parts):
    model = gated(gate)
    expected, inputs = logits(model), inputs_of(model)
    for module in (*(model.model.layers if parts == "layers" else attentions(model)), model):
        fully_shard(module, mesh=mesh)
    assert set(count_calls(model)) == {1}
    assert torch.equal(logits(model), expected)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(weight.grad.full_tensor().any() for weight in gate_parameters(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("use_orig_params", [True, False])
@gates
def test_gates_act_once_under_the_older_sharding_and_are_not_saved_in_part(tmp_path, gate, use_orig_params):
    model = gated(gate)
    expected = logits(model)
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    assert set(count_calls(wrapped)) == {1}
    assert torch.equal(logits(wrapped), expected)
    for save in (save_gates, save_pretrained):
        with rejects("model", hint="get_model_state_dict"):
            save(wrapped.module, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_attention_module_that_is_replaced_without_its_output_projection_is_an_error():
    model = tiny("bert", num_hidden_layers=1)
    add_gates(model, "g5")
    attention = model.bert.encoder.layer[0].attention
    attention.self = copy.deepcopy(attention.self)
    with pytest.raises(RuntimeError, match="output projection"):
        logits(model)


def test_gates_are_added_before_a_model_is_sharded(mesh):
    model = fully_shard(plain(), mesh=mesh)
    with rejects("model", hint="Add gates first"):
        add_gates(model)


@pytest.mark.parametrize("save", [save_gates, save_pretrained])
def test_a_sharded_model_is_saved_from_a_whole_copy(mesh, tmp_path, save):
    model = gated("bma+g1")
    expected = logits(model)
    fully_shard(model, mesh=mesh)
    with rejects("model", hint="get_model_state_dict"):
        save(model, tmp_path)
    assert not list(tmp_path.iterdir())
    whole = plain(seed=1)
    add_gates(whole, "bma+g1", activation=None)
    whole.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    save(whole, tmp_path)
    assert torch.equal(logits(whole), expected)
