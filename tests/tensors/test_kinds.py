"""Every function of arrays returns arrays of its caller's library and dtype."""

import numpy as np
import pytest
from closeness import assert_close, naming, to_numpy
from libraries import JAX_JIT, NUMPY, TORCH

import tidegate.tensors as tt

RNG = np.random.default_rng(0)
MASK = RNG.random((3, 5)) < 0.6
SHAPES = {
    "Q": (2, 3, 4),
    "K": (2, 5, 4),
    "V": (2, 5, 6),
    "W_Q": (3, 4, 2),
    "W_V": (3, 6, 3),
    "W_O": (3, 3, 4),
    "W_g": (4, 6),
    "E": (2, 3, 6),
    "W": (4, 4),
    "x": (2, 3, 4),
    "patterns": (6, 4),
}
ARRAYS = {name: RNG.normal(size=shape) for name, shape in SHAPES.items()}
ARRAYS |= {"g": ARRAYS["W"].T @ ARRAYS["W"] + np.eye(4), "temperatures": np.array([0.5, 2.0])}


def results(Q, K, V, W_Q, W_V, W_O, W_g, E, W, x, patterns, g, temperatures):
    """The results by name; those of iterations, which rounding may change, apart."""
    weights, attended = tt.softmax_rows(x), tt.attention_weights(tt.attention_scores(Q, K), MASK)
    values = {
        "gibbs": tt.gibbs_distribution(x, np.float64(0.5), mask=np.ones((2, 3, 4), dtype=bool)),
        "sweep": tt.temperature_sweep(x, temperatures),
        "log partition entropy": tt.entropy_from_log_partition(tt.log_partition(x), tt.mean_score(x)),
        "natural gradient": tt.natural_gradient(x, weights),
        "learned metric": tt.learned_metric(W),
        "diagonal metric": tt.diagonal_metric(x),
        "lowered": tt.lower_index(x, g),
        "raised": tt.raise_index(x, g),
        "inverse": tt.metric_inverse(g),
        "form": tt.bilinear_form(x, x, g),
        "forms": tt.bilinear_form_batch(Q, K, g),
        "quadratic": tt.quadratic_form(x, g),
        "inner": tt.inner_product(x, x),
        "output": tt.attention_output(attended, V),
        "attention": tt.scaled_dot_product_attention(Q, K, V, MASK),
        "bilinear attention": tt.bilinear_attention(Q, K, V, g, MASK),
        "batched attention": tt.batched_attention(Q, K, V, MASK),
        "naive": tt.naive_query_modulated_attention(Q, K, V, W_g, mask=MASK),
        "partition": tt.decompose_attention(Q, K, V)["partition"],
        "hopfield attention": tt.attention_as_hopfield(Q, K, V),
        **tt.decompose_multihead(Q, K, V, W_Q, W_Q, W_V, W_O),
        **tt.bma_backward(E, Q, K, V, W_g, index="query", mask=MASK),
        **tt.sink_backward(E, Q, K, V, W_g[0, 0], mask=MASK),
    }
    of_scores = (tt.log_softmax, tt.log_partition, tt.partition_function, tt.free_energy)
    of_scores += (tt.mean_score, tt.internal_energy, tt.heat_capacity)
    of_weights = (tt.entropy, tt.normalized_entropy, tt.effective_number_of_states, tt.softmax_jacobian)
    values |= {function.__name__: function(x) for function in of_scores}
    values |= {function.__name__: function(weights) for function in (*of_weights, tt.fisher_metric)}
    *retrieved, _ = tt.hopfield_retrieve(x, patterns, 1.0, 4)
    basin = tt.retrieval_basin(0, patterns, 9)
    energies = (tt.classical_hopfield_energy(x, patterns), tt.classical_hopfield_update(x, patterns))
    return values, (*retrieved, basin, *energies, tt.separation_quality(patterns), *tt.energy_landscape_1d(patterns))


# Eager JAX would compile each step of each function.
@pytest.mark.parametrize("caller", [NUMPY, JAX_JIT, TORCH], ids=lambda caller: caller.name)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.full)])
def test_results_are_of_the_callers_kind_and_dtype(caller, dtype):
    exact, _ = results(**ARRAYS)
    found, others = caller.call(results, **{name: array.astype(dtype) for name, array in ARRAYS.items()})
    for name, result in [*found.items(), *(("Hopfield", other) for other in others)]:
        with naming(name):
            # NumPy returns its numbers without an array around them.
            assert isinstance(result, (caller.kind, np.floating))
            assert to_numpy(result).dtype == dtype
            if name in exact:
                assert_close(result, exact[name], dtype=dtype, what="gradient")
