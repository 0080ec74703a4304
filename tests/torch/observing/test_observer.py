from itertools import pairwise

import pytest
import torch
from errors import rejects
from observed import Attention, qkv
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tidegate.config import TransformerConfig
from tidegate.torch import ObserverCallback, TransformerLM
from tidegate.torch.observing.observer import Observer

TOKENS = torch.randint(40, (4, 9), generator=torch.Generator().manual_seed(0))


def language_model():
    torch.manual_seed(0)
    return TransformerLM(TransformerConfig(vocab_size=40, d_model=32, num_layers=2, num_heads=4, gate="g1"))


def train(model, observer, num_steps=7):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        if observer is None:
            loss = F.cross_entropy(model(TOKENS[:, :-1]).mT, TOKENS[:, 1:])
        else:
            with observer.step():
                loss = F.cross_entropy(model(TOKENS[:, :-1]).mT, TOKENS[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_plain_loop_is_observed_at_every_nth_step_and_trains_the_same():
    model = language_model()
    observer = Observer(model, every=3, keys=2, heat=True)
    assert train(model, observer) == train(language_model(), None)
    assert [step for step, _ in observer.history] == [0, 3, 6]
    for _, observation in observer.history:
        assert observation.num_batches == 1
        assert observation.keys == "the first 2 keys"
        assert len(observation.layers) == 2
        assert "heat_capacity" in observation.layers[0].heads
        assert observation.layers[0].gates["output"].mean
    means = [observation.layers[0].heads["mean_score"][0].mean for _, observation in observer.history]
    assert all(before != after for before, after in pairwise(means))


def test_a_step_takes_the_padding_of_its_batch_and_stores_short_curves():
    model = Attention()
    observer = Observer(model, every=1)
    with observer.step(padding=torch.arange(200) < torch.tensor([[150], [200]])):
        model(*qkv(T=200, S=200))
    (layer,) = observer.history[0][1].layers
    assert layer.heads["mass"][0].count == 350
    assert 32 < len(layer.positions) <= 64


def test_a_step_that_raises_is_discarded_and_the_next_works():
    model = Attention()
    observer = Observer(model, every=1)
    q, k, v = qkv()
    with pytest.raises(RuntimeError), observer.step():
        model(q, k[..., :3], v)
    assert not model._forward_hooks
    with observer.step():
        model(*qkv())
    assert [step for step, _ in observer.history] == [1]


def test_a_step_ends_before_the_next_and_must_attend():
    observer = Observer(nn.Linear(2, 2), every=1)
    observer.begin(4)
    with pytest.raises(RuntimeError):
        observer.begin(5)
    observer.abandon()
    assert observer.begin(5) is not None
    with pytest.raises(RuntimeError):
        observer.end()
    assert observer.history == []


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        (Attention(), {"every": 0}, rejects("every")),
        (Attention(), {"every": 1, "keys": 0}, rejects("keys")),
    ],
)
def test_invalid_options_are_named(model, options, error):
    with error:
        Observer(model, **options)


def trained_by_transformers(folder, callbacks, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    rows = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(6, 1)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        dataloader_pin_memory=False,
        **options,
    )
    made = [make(model) for make in callbacks]
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=made).train()
    return model, made


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}], ids=str)
def test_the_trainer_of_transformers_is_observed_and_trains_the_same(tmp_path, options):
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    model, (callback,) = trained_by_transformers(
        tmp_path, [lambda model: ObserverCallback(Observer(model, every=2))], **options
    )
    plain, _ = trained_by_transformers(tmp_path, [], **options)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True))
    history = callback.observer.history
    assert [step for step, _ in history] == [0, 2, 4]
    batches = options.get("gradient_accumulation_steps", 1)
    for _, observation in history:
        assert observation.num_batches == batches
        assert [layer.name for layer in observation.layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
        assert observation.layers[0].heads["mass"][0].count == batches * 2 * 8
    hooks, others = ([len(module._forward_hooks) for module in one.modules()] for one in (model, plain))
    assert hooks == others
