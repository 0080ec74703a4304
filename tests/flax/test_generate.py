from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close, naming
from errors import rejects
from jax_layers import key
from jax_models import jit_quickly, left_padded, logits_of_torch, make, make_torch, sample, with_stacked_blocks

from tidegate.flax import generate
from tidegate.flax.generate import _generate, next_token_probabilities
from tidegate.torch.generate import next_token_probabilities as torch_probabilities

PROMPT = sample(3, 5)


OPTIONS = {"gate": "bma+g1", "num_kv_heads": 2, "window": 4, "tie_embeddings": False, "num_layers": 1}
"""An untied head, so that the model does not repeat what it read last."""


@pytest.fixture(scope="module")
def model():
    """Configuration and parameters."""
    return make(**OPTIONS)


def continued(model, prompt=PROMPT, *, key=None, prompt_mask=None, max_new_tokens=8, **options):
    """`generate` under a `jit` of the caller: always as many tokens as asked for."""
    config, params = model
    run = jit_quickly(partial(generate, config=config, max_new_tokens=max_new_tokens, **options))
    return run(params, prompt, key=key, prompt_mask=prompt_mask)


def continued_by_torch(prompt, *, max_new_tokens=8, **options):
    """What the PyTorch model says greedily: what ours should, without a compilation."""
    model = make_torch(**options)
    return model.generate(torch.tensor(prompt.tolist()), max_new_tokens=max_new_tokens, temperature=0).numpy()


@pytest.fixture(scope="module")
def greedy(model):
    return continued(model, temperature=0)


def test_cached_greedy_decoding_is_what_the_whole_sequence_says(model, greedy):
    logits = logits_of_torch(greedy[:, :-1], **OPTIONS)
    assert np.array_equal(greedy[:, :5], PROMPT)
    assert np.array_equal(greedy[:, 5:], logits[:, 4:].argmax(-1))
    assert len(np.unique(greedy[:, 5:])) > 3


def test_stacked_blocks_generate_the_same():
    config, params = make(tie_embeddings=False)
    plain = continued_by_torch(PROMPT, tie_embeddings=False)
    assert np.array_equal(continued((config, with_stacked_blocks(params)), temperature=0), plain)


def test_left_padded_prompts_in_a_batch_equal_each_alone(model, greedy):
    short = sample(1, 2)
    padded, mask = left_padded([short, PROMPT])
    together = continued(model, padded, temperature=0, prompt_mask=mask)
    assert np.array_equal(together[:, :5], padded)
    assert np.array_equal(together[:1, 5:], continued_by_torch(short, **OPTIONS)[:, 2:])
    assert np.array_equal(together[1:], greedy)


ALIKE = {
    "window, grouped heads and sinks": (OPTIONS | {"gate": "bma+g1+sink"}, 3.0),
    "learned positions": ({"positions": "learned", "max_length": 12, "num_layers": 1}, 0),
}


@pytest.mark.parametrize(("options", "temperature"), ALIKE.values(), ids=ALIKE)
def test_what_is_written_does_not_depend_on_the_length_that_is_compiled(options, temperature):
    """Inside a `jit` of the caller nothing is padded."""
    config, params = make(**options)
    given = {"max_new_tokens": 7, "prompt_mask": None, "key": key(3), "temperature": temperature}
    padded = generate(params, PROMPT, config, **given)
    assert np.array_equal(padded, continued((config, params), **given))
    assert len(np.unique(padded[:, 5:])) > 2


@pytest.mark.full
def test_lengths_are_compiled_a_few_times(model):
    config, params = model
    compiled = _generate._cache_size()
    for length in range(1, 21):
        num_new = 1 + length % 2
        prompt = sample(2, length)
        result = generate(params, prompt, config, max_new_tokens=num_new, temperature=0)
        assert result.shape == (2, length + num_new)
        assert np.array_equal(result[:, :length], prompt)
    assert _generate._cache_size() - compiled <= 2


def test_the_key_decides_what_is_drawn(model):
    config, params = model
    run = jit_quickly(partial(generate, config=config, max_new_tokens=8, temperature=3.0))
    first, again, other = (run(params, PROMPT, key=key(seed)) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_tokens_are_drawn_as_often_as_their_probabilities_say(model):
    options = {"temperature": 8.0, "top_k": 9, "top_p": 0.8}
    drawn = continued(model, jnp.tile(PROMPT[:1], (1000, 1)), key=key(), max_new_tokens=1, **options)[:, -1]
    logits = logits_of_torch(PROMPT[:1], **OPTIONS)[0, -1]
    expected = np.asarray(jit_quickly(partial(next_token_probabilities, **options))(logits))
    found = np.bincount(drawn, minlength=31) / 1000
    assert 1 < (expected > 0).sum() < 9
    assert not found[expected == 0].any()
    # Five standard deviations of a frequency, at most.
    assert (np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / 1000) + 1e-12).all()


def test_rows_that_have_stopped_go_on_with_padding(model, greedy):
    free = greedy[:, 5:].tolist()
    stop = free[0][2]
    stopped = continued(model, temperature=0, stop_tokens=[stop], pad_token=30)[:, 5:].tolist()
    assert free[1][0] != stop
    for row, wanted in zip(stopped, free, strict=True):
        length = wanted.index(stop) + 1 if stop in wanted else 8
        assert row == wanted[:length] + [30] * (8 - length)


def test_generation_ends_once_every_row_has_stopped(model, greedy):
    config, params = model
    stops = greedy[:, 6].tolist()
    stopped = generate(params, PROMPT, config, max_new_tokens=8, temperature=0, stop_tokens=stops)
    assert 6 <= stopped.shape[1] <= 7
    assert np.array_equal(stopped[:, :6], greedy[:, :6])
    inside = continued(model, temperature=0, stop_tokens=stops)
    assert inside.shape == (3, 13)
    assert np.array_equal(inside[:, : stopped.shape[1]], stopped)


def test_logits_that_are_not_finite_are_rejected_after_the_loop(model, greedy):
    config, params = model
    # The options of the test above, which has compiled them.
    stops = greedy[:, 6].tolist()
    tokens = [set(row) for row in PROMPT.tolist()]
    stray = next(iter(tokens[1] - tokens[0] - tokens[2]))
    broken = params | {"embedding": {"embedding": params["embedding"]["embedding"].at[stray].set(jnp.nan)}}
    with rejects("logits", hint="row 1 of"):
        generate(broken, PROMPT, config, max_new_tokens=8, temperature=0, stop_tokens=stops)


def test_the_prompts_dtype_is_kept(model, greedy):
    result = continued(model, PROMPT.astype(jnp.int32), temperature=0)
    assert result.dtype == jnp.int32
    assert np.array_equal(result, greedy)


def test_an_empty_batch_stays_empty(model):
    config, params = model
    result = generate(params, sample(0, 3), config, max_new_tokens=2, temperature=0, stop_tokens=[1])
    assert result.shape == (0, 4)


def test_learned_positions_are_used_to_the_last():
    options = {"positions": "learned", "max_length": 8, "num_layers": 1}
    config, params = make(**options)
    rows = [sample(1, 2), sample(1, 5)]
    prompt, mask = left_padded(rows)
    wider, wider_mask = (np.pad(array, ((0, 0), (3, 0))) for array in (prompt, mask))
    # Outside a jit, where it is known how much of the prompt is padding.
    result = generate(
        params, jnp.asarray(wider), config, max_new_tokens=4, temperature=0, prompt_mask=jnp.asarray(wider_mask)
    )
    alone = [continued_by_torch(row, max_new_tokens=4, **options)[:, -4:] for row in rows]
    assert np.array_equal(result[:, 8:], np.concatenate(alone))


FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 3},
    {"top_k": 40},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.75},
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_probabilities_are_pytorchs(dtype):
    rng = np.random.default_rng(0)
    # Rounded, so that there are ties, also of 0 and -0, which go by index.
    logits = np.concatenate([rng.normal(size=(40, 9)), rng.normal(size=(40, 9)).round()]).astype(dtype)
    logits[3, 2:5] = -np.inf
    each = jit_quickly(lambda logits: [next_token_probabilities(logits, **filters) for filters in FILTERS])(logits)
    for filters, actual in zip(FILTERS, map(np.asarray, each), strict=True):
        expected = torch_probabilities(torch.from_numpy(logits), **filters)
        with naming(filters):
            assert_close(actual, expected)
            assert np.array_equal(actual > 0, (expected > 0).numpy())


def test_filters_work_in_single_precision_on_half_precision_logits():
    logits = jnp.arange(9, dtype=jnp.bfloat16)
    probabilities = np.asarray(jit_quickly(partial(next_token_probabilities, top_p=0.9))(logits))
    assert probabilities.dtype == np.float32
    assert_close(probabilities.sum(), np.float32(1))


REJECTED = [
    ({"prompt": PROMPT[0]}, "prompt", ""),
    ({"prompt": PROMPT.astype(float)}, "tokens", ""),
    ({"prompt": PROMPT.at[0, 0].set(31)}, "prompt", "tokenizer"),
    ({"prompt": PROMPT.at[2, 1].set(-1)}, "prompt", "tokenizer"),
    ({"prompt": jnp.ones((1, 40), int)}, "prompt", "Shorten prompt"),
    ({"max_new_tokens": 29}, "max_new_tokens", ""),
    ({"temperature": -1.0}, "temperature", ""),
    ({"temperature": 1.0}, "key", "jax.random.key"),
    ({"top_k": 0}, "top_k", ""),
    ({"top_p": 1.5}, "top_p", ""),
    ({"stop_tokens": [3, 31]}, "stop_tokens and pad_token", ""),
    ({"prompt_mask": jnp.ones((3, 5))}, "prompt_mask", ""),
    ({"prompt_mask": jnp.ones((3, 2), bool)}, "prompt_mask", ""),
    ({"prompt_mask": jnp.ones((3, 5), bool).at[0, 1].set(False)}, "prompt_mask", "Pad left"),
]


@pytest.fixture(scope="module")
def learned():
    return make(positions="learned", num_layers=1)


@pytest.mark.parametrize(("arguments", "field", "hint"), REJECTED)
def test_what_makes_no_sense_is_rejected_by_name(learned, arguments, field, hint):
    config, params = learned
    given = {"prompt": PROMPT, "max_new_tokens": 2, "temperature": 0} | arguments
    with rejects(field, hint=hint):
        generate(params, given.pop("prompt"), config, **given)
