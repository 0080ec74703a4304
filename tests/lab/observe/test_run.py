import pytest
import torch
from errors import rejects
from torch import nn

from tidegate.lab.models.language_models import LanguageModel, make_language_model
from tidegate.lab.observe.run import model_observation
from tidegate.torch import TransformerConfig, TransformerLM
from tidegate.torch.observing.watcher import observe


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    ours = TransformerLM(TransformerConfig(gate="bma", d_model=16, num_layers=2, num_heads=2))
    return make_language_model(ours, name="sea", derivatives=False)


@pytest.fixture(scope="module")
def windows():
    return torch.randint(256, (5, 8), generator=torch.Generator().manual_seed(0))


def test_batches_of_windows_give_the_same_as_observe(model, windows):
    with torch.no_grad(), observe(model.module, keys=2, heat=True) as watcher:
        for batch in windows.split(2):
            model.module(batch)
    assert model_observation(model, windows, batch_size=2, keys=2, heat=True) == watcher.observation()


@pytest.mark.parametrize("keys", [0, 9])
def test_the_key_set_fits_the_windows(model, windows, keys):
    with rejects("keys"):
        model_observation(model, windows, batch_size=2, keys=keys)


def test_a_model_without_attention_is_rejected_by_name(windows):
    layer = nn.Embedding(256, 4)
    blind = LanguageModel(
        name="blind", module=layer, run=layer, blocks=(layer,), encode=list, vocab_size=256, max_length=None
    )
    with rejects("model", hint="made no attention call") as error:
        model_observation(blind, windows, batch_size=2)
    assert error.value.got == "blind"
