import model_types
import pytest
import torch
from closeness import assert_close
from retrofit_models import tiny

from tidegate.torch.retrofit.probe import (
    bitwise_equal,
    exceeds_rounding,
    has_cache,
    largest_change,
    probe_inputs,
    run_probe,
)


def test_a_model_with_a_cache_answers_in_one_pass_and_in_two():
    model = tiny("llama")
    whole, first, second = run_probe(model, probe_inputs(model))
    # Kernels may round differently for other lengths.
    assert_close(first, whole[:, :-1], what="forward")
    assert_close(second, whole[:, -1:], what="forward")
    assert len(run_probe(tiny("bert"), probe_inputs(tiny("bert")))) == 1


@pytest.mark.parametrize("model_type", ["llama", "mpt", "granitemoe"])
def test_a_cache_that_the_configuration_leaves_off_is_probed_too(model_type):
    model = model_types.build(model_type, use_cache=False)
    assert has_cache(model, probe_inputs(model))
    assert len(run_probe(model, probe_inputs(model))) == 3


def test_a_model_whose_cache_fails_is_probed_without():
    model = model_types.build("blt")
    assert not has_cache(model, probe_inputs(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_makes_a_difference_and_the_bits_of_nan_do_not(dtype):
    x = torch.tensor([1.0, -2.0, float("nan")], dtype=dtype)
    changed, other_nan, elsewhere = x.clone(), x.clone(), x.flip(0)
    changed[0] = torch.nextafter(changed[0], torch.tensor(9.0, dtype=dtype))
    other_nan.view(torch.uint8)[-x.element_size()] ^= 1
    assert bitwise_equal([x], [x.clone()])
    assert bitwise_equal([x], [other_nan])
    assert largest_change([x], [other_nan]) == 0
    for other in ([changed], [x.double()], [elsewhere], []):
        assert not bitwise_equal([x], other)
    assert not bitwise_equal([torch.zeros(1)], [-torch.zeros(1)])
    assert largest_change([x], [elsewhere]) == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_the_root_of_epsilon_of_the_size_and_nan_is_more(dtype):
    x, bound = torch.tensor([-3.0, 1.0, float("nan")], dtype=dtype), 3 * torch.finfo(dtype).eps ** 0.5
    assert not exceeds_rounding([x + 0.9 * bound], [x], dtype)
    assert exceeds_rounding([x + 1.1 * bound], [x], dtype)
    assert exceeds_rounding([x + torch.tensor([float("nan"), 0, 0], dtype=dtype)], [x], dtype)
