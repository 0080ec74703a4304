import copy
import gc
import pickle
import weakref

import pytest
import torch
from closeness import assert_close
from covers import SPELLING, axis, over
from errors import rejects
from torch_layers import OPTIONS, gradients, largest_gap, make, rounding, sample, ungated

from tidegate.torch import KVCache

T = 7
CAUSAL = {
    "plain": {},
    "everything": OPTIONS["everything"],
    "multi-query window rotary": {"num_kv_heads": 1, "window": 2, "rope": True},
}
CAUSAL_OPTION = axis(CAUSAL, "everything")
ROOM = axis({"growing": None, "exact": T, "roomy": 20})
CHUNKS = {"token by token": [1] * T, "chunks": [3, 1, 2, 1], "prompt first": [4, 1, 1, 1], "at once": [T]}


def in_chunks(layer, x, sizes, cache, **by_position):
    """Return the outputs of all chunks; the mask (B, 1, 1, T) and positions (B, T) are sliced for each chunk."""
    outputs, start = [], 0
    for size in sizes:
        end = start + size
        given = {}
        if "mask" in by_position:
            given["mask"] = by_position["mask"][..., :end]
        if "positions" in by_position:
            given["positions"] = by_position["positions"][:, start:end]
        outputs.append(layer(x[:, start:end], cache=cache, **given))
        start = end
    return torch.cat(outputs, dim=1)


@over(gate=SPELLING, options=CAUSAL_OPTION)
def test_token_by_token_chunked_and_full_passes_agree(gate, options):
    layer, x = make(gate, dtype=torch.float32, **options), sample(2, T, 24, dtype=torch.float32)
    with torch.no_grad():
        full = layer(x)
        for room in (None, T):
            for sizes in CHUNKS.values():
                assert largest_gap(in_chunks(layer, x, sizes, KVCache(room)), full) <= 1e-5


@over(room=ROOM, sizes=axis(CHUNKS, "chunks"), options=CAUSAL_OPTION)
def test_left_padded_rows_are_the_rows_alone(options, sizes, room):
    layer, x = make("g1+bma+g3", dtype=torch.float32, **options), sample(3, T, 24, dtype=torch.float32)
    padding = torch.tensor([0, 2, 3])
    slots = torch.arange(T)
    mask = (slots >= padding[:, None])[:, None, None, :]
    positions = (slots - padding[:, None]).clamp(min=0)
    with torch.no_grad():
        y = in_chunks(layer, x, sizes, KVCache(room), mask=mask, positions=positions)
        for row, pad in enumerate(padding.tolist()):
            assert largest_gap(y[row : row + 1, pad:], layer(x[row : row + 1, pad:])) <= 1e-5


@over(gate=SPELLING, options=CAUSAL_OPTION)
def test_no_gate_makes_the_cache_hold_more(gate, options):
    layer, x = make(gate, **options), sample(2, T, 24)
    plain = ungated(layer)
    with torch.no_grad():
        for room in (None, 20):
            held, expected = KVCache(room), KVCache(room)
            in_chunks(layer, x, [4, 1, 2], held)
            in_chunks(plain, x, [4, 1, 2], expected)
            positions = T if room is None else room
            width = layer.shape.num_kv_heads * layer.shape.head_dim
            assert held.num_bytes == expected.num_bytes == 2 * 2 * positions * width * 8


@over(gate=SPELLING, options=CAUSAL_OPTION)
def test_gradients_pass_through_a_growing_cache(gate, options):
    layer, x = make(gate, **options), sample(2, T, 24, requires_grad=True)
    expected = gradients(layer, layer(x), x)
    for name, gradient in gradients(layer, in_chunks(layer, x, [3, 1, 2, 1], KVCache()), x).items():
        assert_close(gradient, expected[name], what="gradient")


def test_a_preallocated_cache_keeps_its_memory():
    cache, new = KVCache(T), sample(1, 1, 1, 4)
    first, _ = cache.update(new, new)
    for _ in range(T - 1):
        last, _ = cache.update(new, new)
    assert first.data_ptr() == last.data_ptr()


def test_a_preallocated_cache_refuses_gradients():
    layer, x = make("bma"), sample(2, 3, 24)
    cache = KVCache(5)
    with pytest.raises(RuntimeError, match="no_grad"):
        layer(x, cache=cache)
    with torch.no_grad():
        layer(x, cache=cache)
    assert cache.length == 3


def test_a_cache_that_overflows_says_how_much_is_needed():
    layer, x, cache = make("bma"), sample(2, 3, 24), KVCache(5)
    with torch.no_grad():
        layer(x, cache=cache)
        with rejects("max_length"):
            layer(x, cache=cache)
    assert cache.length == 3


@pytest.mark.parametrize("room", [None, 9])
def test_a_refused_mask_leaves_the_cache_as_it_was(room):
    layer, cache = make("bma"), KVCache(room)
    with torch.no_grad():
        layer(sample(2, 3, 24), cache=cache)
        with rejects("mask"):
            layer(sample(2, 1, 24), cache=cache, mask=torch.ones(1, 3, dtype=torch.bool))
    assert cache.length == 3


@over(room=ROOM, options=CAUSAL_OPTION)
def test_a_cache_that_was_cut_back_continues_from_there(options, room):
    layer, x = make("g1+bma+g3", **options), sample(2, T, 24)
    other = sample(2, T, 24, seed=5)
    with torch.no_grad():
        expected = layer(x)
        cache = KVCache(room)
        layer(x[:, :3], cache=cache)
        layer(other[:, 3:], cache=cache)
        for length in (5, 3):
            cache.truncate(length)
            assert cache.length == length
        assert_close(layer(x[:, 3:], cache=cache), expected[:, 3:])
        cache.truncate(0)
        assert_close(layer(x, cache=cache), expected)


@pytest.mark.parametrize("room", [None, 9])
@pytest.mark.parametrize("length", [-1, 4, 2.0, True, None, "2"])
def test_a_cache_is_not_cut_to_a_length_that_it_does_not_have(room, length):
    cache, new = KVCache(room), sample(1, 1, 3, 4)
    cache.update(new, new)
    with rejects("length"):
        cache.truncate(length)
    assert cache.length == 3


@pytest.mark.parametrize("room", [None, 9])
def test_a_cache_belongs_to_the_layer_that_used_it_first(room):
    layer, x, cache = make("bma"), sample(2, 3, 24), KVCache(room)
    with torch.no_grad():
        with rejects("mask"):
            make("bma", seed=1)(x, cache=cache, mask=torch.ones(1, 2, dtype=torch.bool))
        # The rejected call left the cache empty.
        layer(x, cache=cache)
        for other in (make("bma", seed=1), copy.deepcopy(layer)):
            with rejects("cache", hint="another layer"):
                other(x, cache=cache)
        cache.truncate(0)
        with rejects("cache", hint="another layer"):
            make("bma", seed=1)(x, cache=cache)
        assert layer(x, cache=cache).shape == x.shape
    assert cache.length == 3


@pytest.mark.parametrize("room", [None, 9])
def test_copies_of_a_cache_go_on_apart(room):
    layer, x, cache = make("bma", rope=True), sample(2, 4, 24), KVCache(room)
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        expected = layer(x)[:, 3:]
        branch, both = copy.deepcopy(cache), copy.deepcopy((layer, cache))
        loaded = pickle.loads(pickle.dumps(cache))
        for owner, own in ((layer, branch), both, (copy.deepcopy(layer), loaded), (layer, cache)):
            assert_close(owner(x[:, 3:], cache=own), expected)
            assert own.length == 4
        with rejects("cache", hint="another layer"):
            both[0](x, cache=branch)


def test_a_cache_does_not_keep_its_layer():
    layer, cache = make("bma"), KVCache()
    layer(sample(2, 3, 24), cache=cache)
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None


def test_a_compiled_layer_owns_its_cache_too():
    layer, x = make("bma", rope=True), sample(2, 4, 24)
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=False)
    cache = KVCache(9)
    with torch.no_grad():
        compiled(x[:, :3], cache=cache)
        assert_close(compiled(x[:, 3:], cache=cache), layer(x)[:, 3:])
        with rejects("cache", hint="another layer"):
            copy.deepcopy(layer)(x, cache=cache)
    torch.compiler.reset()


@pytest.mark.parametrize("room", [None, 9])
@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        ((3, 4, 3, 6), torch.float64, "batch of 3"),
        ((2, 4, 3, 5), torch.float64, "width 5"),
        ((2, 4, 3, 6), torch.float32, "float32"),
    ],
)
def test_another_batch_width_or_dtype_needs_another_cache(room, shape, dtype, kind):
    cache, held, new = KVCache(room), sample(2, 4, 3, 6), sample(*shape, dtype=dtype)
    cache.update(held, held)
    with rejects("cache", hint="It holds a batch of 2 with 4 heads of width 6 in float64") as caught:
        cache.update(new, new)
    assert kind in caught.value.expected
    assert cache.length == 3


@pytest.mark.parametrize("autocast", [False, True])
def test_the_cache_has_half_precision_with_the_layer_and_under_autocast(autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    layer, x = make("g1+bma+g3", dtype=dtype, rope=True, qk_norm=True), sample(2, T, 24, dtype=dtype)
    cache = KVCache()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), torch.no_grad():
        layer(x, cache=cache)
    assert cache.num_bytes == 2 * 2 * T * 24 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ["none", "bma", "g1", "sink"])
def test_half_precision_decodes_what_it_reads_at_once(gate, dtype):
    layer, x = make(gate, dtype=dtype, rope=True), sample(2, T, 24, dtype=dtype)
    with torch.no_grad():
        full = layer(x)
        for room in (None, T):
            assert largest_gap(in_chunks(layer, x, [4, 1, 1, 1], KVCache(room)), full) <= rounding(dtype, full)
