import copy
import dataclasses
import json

import pytest
import torch
from closeness import assert_close
from covers import axis, over
from errors import rejects
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    StaticCache,
    Trainer,
    TrainingArguments,
)

from tidegate import PRESETS
from tidegate.config import TransformerConfig
from tidegate.tensors.rotary import Rotary
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.gate import AttentionGate
from tidegate.torch.hf import TidegateConfig, TidegateForCausalLM, TidegateModel, from_transformer_lm, to_transformer_lm

EVERY_GATE = ["none", *PRESETS]
SIZES = {"vocab_size": 11, "d_model": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "max_length": 64}
KINDS = {
    "plain": {},
    "learned positions": {"positions": "learned"},
    "no positions": {"positions": "none"},
    "window": {"window": 4, "gate": "g2+g1"},
    "untied, biased": {"tie_embeddings": False, "bias": True, "norm": "layer", "feedforward": "gelu"},
    "everything": {"qk_norm": True, "metric": "learned", "temperature": 1.3, "rotary": Rotary(fraction=1 / 3)},
    "sink": {"gate": "sink+g1", "window": 4, "num_kv_heads": 4},
    "widths of its own": {"d_ff": (16, 40), "metric": "diagonal", "gate": "output:input:b2"},
}
KIND = axis(list(KINDS), "window")
CACHES = {"dynamic": {}, "none": {"use_cache": False}, "static": {"cache_implementation": "static"}}


def native(*, dtype=torch.float32, **options):
    """Return a small model with large matrices, biases and sinks, so that every part has an effect."""
    model = TransformerLM(TransformerConfig(**SIZES | options), dtype=dtype)
    model.reset_parameters(0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
            if not parameter.any():
                parameter.normal_(generator=generator)
    return model.eval()


def made(**options):
    return from_transformer_lm(native(**options))


def sample(batch, length, *, seed=1):
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded_left(tokens, padding):
    """Return the tokens with padding on the left, and their mask."""
    tokens = torch.cat((torch.zeros_like(tokens[:, :padding]), tokens), dim=1)
    mask = torch.ones_like(tokens)
    mask[:, :padding] = 0
    return tokens, mask


def continued(model, tokens, **options):
    # Without a mask, generation would treat every token equal to the padding token as padding.
    options = {"attention_mask": torch.ones_like(tokens)} | options
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(tokens, **options)


# The same model, with transformers and without


@over(kind=KIND, dtype=axis([torch.float32, torch.bfloat16, torch.float64]))
def test_every_kind_of_model_converts_both_ways_with_equal_logits(kind, dtype):
    ours = native(dtype=dtype, **KINDS[kind])
    tokens = sample(2, 9)
    theirs = from_transformer_lm(ours)
    back = to_transformer_lm(theirs)
    assert theirs.dtype == dtype
    assert torch.equal(theirs(tokens, use_cache=False).logits, ours(tokens))
    assert torch.equal(back(tokens), ours(tokens))
    assert back.config == ours.config
    assert back.state_dict().keys() == ours.state_dict().keys()


def test_a_converted_model_has_weights_of_its_own():
    ours = native()
    theirs = from_transformer_lm(ours)
    back = to_transformer_lm(theirs)
    with torch.no_grad():
        theirs.model.embedding.weight.zero_()
    assert ours.embedding.weight.any()
    assert back.embedding.weight.any()


def test_something_else_than_our_model_is_refused():
    with pytest.raises(TypeError, match=r"^model must be"):
        to_transformer_lm(made().model)


# Configuration


def test_the_configuration_survives_json_and_comes_back_as_ours(tmp_path):
    for options in KINDS.values():
        ours = TransformerConfig(**SIZES | options)
        config = TidegateConfig.from_transformer_config(ours)
        config.save_pretrained(tmp_path)
        read = AutoConfig.from_pretrained(tmp_path)
        assert isinstance(read, TidegateConfig)
        assert read.transformer_config() == ours
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "tidegate"


def test_the_defaults_are_ours():
    assert TidegateConfig().transformer_config() == TransformerConfig()


def test_every_field_of_ours_is_declared_and_none_besides_those_of_transformers():
    renamed = {"temperature": "attention_temperature", "max_length": "max_position_embeddings"}
    renamed["tie_embeddings"] = "tie_word_embeddings"
    ours = {renamed.get(field.name, field.name) for field in dataclasses.fields(TransformerConfig)}
    tokens = {"use_cache", "pad_token_id", "bos_token_id", "eos_token_id"}
    declared = set(TidegateConfig.__annotations__) - {"model_type", "attribute_map", "keys_to_ignore_at_inference"}
    assert declared == ours | tokens


def test_the_names_that_others_look_for_are_there():
    config = TidegateConfig(hidden_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
    assert (config.d_model, config.num_heads, config.num_kv_heads, config.num_layers) == (24, 4, 2, 3)
    assert config.hidden_size == 24


def test_generation_keeps_its_own_temperature_and_length():
    model = made(temperature=1.3)
    assert model.generation_config.temperature in (None, 1.0)
    assert model.generation_config.max_length != SIZES["max_length"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"d_model": 24, "num_heads": 5}, "d_model"),
        ({"gate": "g9"}, "gate"),
        ({"positions": "rotated"}, "positions"),
        ({"qk_norm": "no"}, "qk_norm"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"use_cache": 1}, "use_cache"),
    ],
)
def test_an_invalid_configuration_is_rejected(options, field):
    with rejects(field) as caught:
        TidegateConfig(**options)
    assert caught.value.got == options[field]


# Files


@pytest.mark.parametrize("gate", EVERY_GATE)
def test_a_saved_model_is_read_back_bit_by_bit_without_remote_code(gate, tmp_path):
    model = made(gate=gate)
    model.save_pretrained(tmp_path)
    read, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(read, TidegateForCausalLM)
    assert not read.training
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = sample(2, 9)
    assert torch.equal(read(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_stays_tied_or_apart_through_a_file(tied, tmp_path):
    made(tie_embeddings=tied).save_pretrained(tmp_path)
    read = TidegateForCausalLM.from_pretrained(tmp_path)
    assert (read.lm_head.weight is read.model.embedding.weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied


def test_a_model_is_read_in_half_precision(tmp_path):
    model = made(gate="bma+g1")
    model.save_pretrained(tmp_path)
    read = TidegateForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tokens = sample(2, 9)
    assert {parameter.dtype for parameter in read.parameters()} == {torch.bfloat16}
    assert torch.equal(read(tokens).logits, model.to(torch.bfloat16)(tokens).logits)


@pytest.mark.parametrize(
    "gate", ["output:input:b3", "output:input:twosigmoid:s0", "value:query:r2:b1", "bma+g1", "sink"]
)
def test_gates_that_a_file_lacks_start_as_they_say_themselves(gate, tmp_path):
    made(gate=gate).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "attn_gate" not in name}
    assert len(kept) < len(weights)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = TidegateForCausalLM.from_pretrained(tmp_path)
    for module in read.modules():
        if isinstance(module, AttentionGate):
            assert_starts_as_it_says(module)
    for name, weight in kept.items():
        assert torch.equal(read.state_dict()[name], weight)


def assert_starts_as_it_says(module):
    for name, parameter in module.named_parameters():
        if name == "bias":
            assert (parameter == module.gate.bias).all()
        elif name == "weight_down":
            assert 0.3 < parameter.std() * parameter.shape[-1] ** 0.5 < 3
        else:
            assert parameter.abs().max() <= 6 * module.gate.init_std
            assert bool(parameter.any()) == (module.gate.init_std > 0)


@pytest.mark.parametrize("init", [0.1, "fan-in", "torch"])
def test_a_new_model_starts_as_its_configuration_says(init):
    torch.manual_seed(0)
    options = {"gate": "output:input:b2", "metric": "learned"}
    config = TransformerConfig(d_model=96, num_heads=4, num_layers=8, bias=True, init=init, **options)
    model = TidegateForCausalLM(TidegateConfig.from_transformer_config(config))
    ours = TransformerLM(config)
    for name, weight in ours.stack.named_parameters():
        if weight.ndim == 2:
            started = model.model.stack.get_parameter(name)
            assert started.std().item() == pytest.approx(weight.std().item(), rel=0.1), name
    assert model.lm_head.weight.std().item() == pytest.approx(ours.embedding.weight.std().item(), rel=0.1)
    attention = model.model.stack.blocks[3].attention
    assert bool(attention.q_proj.bias.any()) == (init == "torch")
    assert (attention.attn_gate.output.bias == 2).all()
    assert torch.equal(attention.metric.weight[1], torch.eye(24))


# The forward pass


def test_the_loss_is_that_of_the_next_token():
    model = made()
    tokens = sample(2, 9)
    labels = tokens.clone()
    labels[0, 4:] = -100
    output = model(tokens, labels=labels)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert_close(output.loss, expected)
    assert_close(model(tokens, labels=labels, num_items_in_batch=torch.tensor(22)).loss, expected * 11 / 22)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_either_side_changes_nothing(kind):
    model = made(**KINDS[kind])
    tokens = sample(2, 7)
    alone = model(tokens).logits
    left, mask = padded_left(tokens, 3)
    assert_close(model(left, attention_mask=mask).logits[:, 3:], alone)
    assert_close(model(left.flip(1), attention_mask=mask.flip(1)).logits[:, :7], model(tokens.flip(1)).logits)
    assert model(left, attention_mask=mask).logits.isfinite().all()


def test_a_mask_by_query_and_key_is_taken_as_it_is():
    model = made(gate="g2")
    tokens = sample(2, 6)
    visible = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    visible[..., 0] = False
    expected = model(tokens[:, 1:]).logits
    assert_close(model(tokens, attention_mask=visible).logits[:, 1:], expected)
    added = torch.zeros(2, 1, 6, 6).masked_fill(~visible, float("-inf"))
    assert_close(model(tokens, attention_mask=added).logits[:, 1:], expected)


@pytest.mark.parametrize("use_cache", [None, False])
def test_positions_that_begin_anew_begin_a_document(use_cache):
    model = made(positions="learned").eval()
    tokens = sample(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    alone = torch.cat([model(part).logits for part in tokens.split([4, 5], dim=1)], dim=1)
    assert_close(model(tokens, position_ids=positions, use_cache=use_cache).logits, alone)


def test_hidden_states_are_what_each_block_is_given_and_the_end():
    model = made()
    tokens = sample(2, 5)
    output = model(tokens, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert torch.equal(output.hidden_states[0], model.model.embedding(tokens))
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    assert torch.equal(model.model.stack.norm(model.model.stack.blocks[1](output.hidden_states[1])), output[-1][-1])
    assert model(tokens).hidden_states is None


def test_embeddings_may_stand_for_tokens():
    model = made()
    tokens = sample(2, 6)
    assert torch.equal(model(inputs_embeds=model.model.embedding(tokens)).logits, model(tokens).logits)
    for arguments in ({}, {"input_ids": tokens, "inputs_embeds": model.model.embedding(tokens)}):
        with rejects("input_ids"):
            model(**arguments)


def test_the_plain_kernel_agrees_with_the_fused_one():
    model = made(gate="bma+g1")
    plain = TidegateForCausalLM._from_config(copy.deepcopy(model.config), attn_implementation="eager")
    plain.load_state_dict(model.state_dict())
    tokens = sample(2, 9)
    assert plain.config._attn_implementation == "eager"
    assert_close(plain.eval()(tokens).logits, model(tokens).logits)
    left, mask = padded_left(tokens, 3)
    options = {"attention_mask": mask, "cache_implementation": "static"}
    assert torch.equal(continued(plain, left, **options), continued(model, left, **options))


def test_learned_positions_end_where_their_table_ends():
    model = made(positions="learned", max_length=8)
    with rejects("tokens"):
        model(sample(1, 9))
    # Padding does not count.
    mask = torch.tensor([[0] * 2 + [1] * 8, [1] * 10])
    assert model(sample(1, 10), attention_mask=mask[:1]).logits.shape[:2] == (1, 10)
    with rejects("tokens"):
        model(sample(2, 10), attention_mask=mask)


def test_a_mask_of_the_wrong_length_is_refused():
    model = made()
    cache = DynamicCache(config=model.config)
    model(sample(1, 4), past_key_values=cache)
    with rejects("attention_mask") as caught:
        model(sample(1, 2), past_key_values=cache, attention_mask=torch.tensor([[0, 1]]))
    assert "6 positions, including the 4 in the cache" in caught.value.expected
    assert caught.value.got == 2


def test_the_vocabulary_grows():
    model = made(tie_embeddings=True)
    tokens = sample(2, 5)
    before = model(tokens).logits
    model.resize_token_embeddings(16, mean_resizing=False)
    assert model.lm_head.weight is model.model.embedding.weight
    assert_close(model(tokens).logits[..., :11], before)
    assert to_transformer_lm(model)(tokens).shape == (2, 5, 16)


# Caches and generation


@over(kind=KIND, static=axis([False, True], False, True), chunks=axis([[9], [4, 1, 1, 3], [1] * 9], [4, 1, 1, 3]))
@torch.no_grad()
def test_chunks_with_a_cache_equal_all_at_once(kind, static, chunks):
    model = made(**KINDS[kind])
    tokens = sample(2, 9)
    cache = StaticCache(config=model.config, max_cache_len=12) if static else DynamicCache(config=model.config)
    logits = [model(chunk, past_key_values=cache).logits for chunk in tokens.split(chunks, dim=1)]
    assert_close(torch.cat(logits, dim=1), model(tokens).logits)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_chunks_with_a_cache_and_padding_equal_all_at_once(static, window):
    model = made(positions="learned", window=window)
    tokens, mask = padded_left(sample(2, 9), 2)
    mask[1, 2] = 0
    cache = StaticCache(config=model.config, max_cache_len=13) if static else DynamicCache(config=model.config)
    logits, end = [], 0
    for chunk in tokens.split([5, 1, 1, 4], dim=1):
        end += chunk.shape[1]
        logits.append(model(chunk, past_key_values=cache, attention_mask=mask[:, :end]).logits)
    assert_close(torch.cat(logits, dim=1)[:, 3:], model(tokens, attention_mask=mask).logits[:, 3:])


@pytest.mark.parametrize("gate", EVERY_GATE)
def test_greedy_generation_is_the_same_with_any_cache_and_without_one(gate):
    model = made(gate=gate)
    tokens = sample(2, 5)
    expected = model_by_hand(model, tokens, 6)
    assert torch.equal(continued(model, tokens), expected)
    assert torch.equal(continued(model, tokens, use_cache=False), expected)
    assert torch.equal(continued(model, tokens, cache_implementation="static"), expected)
    assert torch.equal(to_transformer_lm(model).generate(tokens, max_new_tokens=6, temperature=0.0), expected)


@torch.no_grad()
def model_by_hand(model, tokens, steps):
    for _ in range(steps):
        tokens = torch.cat((tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(dim=-1)), dim=1)
    return tokens


@over(kind=KIND, options=axis(CACHES, "static"))
def test_generation_goes_on_behind_padding_as_without_it(kind, options):
    model = made(**KINDS[kind])
    tokens = sample(2, 5)
    left, mask = padded_left(tokens, 3)
    assert torch.equal(continued(model, left, attention_mask=mask, **options)[:, 3:], continued(model, tokens))


def test_a_static_cache_is_used_again():
    model = made()
    first, second = sample(2, 5), sample(2, 4, seed=2)
    continued(model, first, cache_implementation="static")
    assert torch.equal(continued(model, second, cache_implementation="static"), continued(model, second))


def test_beams_reorder_the_cache():
    model = made()
    tokens = sample(2, 5)
    beams = [continued(model, tokens, num_beams=3, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*beams)


# Training and compilation


def test_a_trainer_trains_it(tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer of transformers runs on accelerate")
    model = TidegateForCausalLM(TidegateConfig(vocab_size=11, d_model=24, num_layers=2, gate="bma+g1"))
    rows = [{"input_ids": row, "labels": row} for row in sample(4, 16).repeat(6, 1)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        gradient_checkpointing=True,
        save_strategy="no",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.1
    trainer.save_model(str(tmp_path / "saved"))
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(read(sample(1, 5)).logits, model.eval()(sample(1, 5)).logits)


@pytest.mark.parametrize("gate", ["none", "bma+g1"])
def test_gradients_are_the_same_with_checkpointing(gate):
    model = made(gate=gate).train()
    tokens = sample(2, 9)
    expected = torch.autograd.grad(model(tokens, labels=tokens).loss, list(model.parameters()))
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    calls = []
    model.model.stack.blocks[0].register_forward_pre_hook(lambda *arguments: calls.append(1))
    actual = torch.autograd.grad(model(tokens, labels=tokens).loss, list(model.parameters()))
    assert len(calls) == 2
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize(
    "options", [{"every_n_layers": 2}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"offload": True}]
)
def test_checkpointing_of_another_kind_is_refused(options):
    (field,) = options
    with rejects(field, hint="stores the input of every block"):
        made().gradient_checkpointing_enable(**options)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_a_compiled_step_with_a_static_cache_is_one_graph_for_all_steps(window):
    model = made(num_layers=1, window=window)
    tokens = sample(2, 9)
    cache = StaticCache(config=model.config, max_cache_len=12)
    logits = [model(tokens[:, :4], past_key_values=cache).logits]
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    logits += [compiled(token, past_key_values=cache).logits for token in tokens[:, 4:].split(1, dim=1)]
    assert counter.frame_count == 1
    assert_close(torch.cat(logits, dim=1), model(tokens).logits)


def test_the_base_model_stands_alone(tmp_path):
    model = made()
    tokens = sample(2, 5)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, TidegateModel)
    assert torch.equal(model.lm_head(base(tokens).last_hidden_state), model(tokens).logits)


def test_tokens_outside_the_vocabulary_are_rejected():
    with rejects("input_ids", hint="tokenizer") as caught:
        made()(input_ids=torch.tensor([[1, -1]]))
    assert f"[0, {SIZES['vocab_size']})" in caught.value.expected
    assert caught.value.got == -1
