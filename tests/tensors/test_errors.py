"""Arguments that do not fit are rejected by name, whatever library the arrays come from."""

import numpy as np
import pytest
from errors import rejects
from libraries import JAX, NUMPY, TORCH

import tidegate.tensors as tt


def ones(*shape, dtype=float):
    return np.ones(shape, dtype)


def mask(*shape):
    return np.ones(shape, bool)


SCORES, ROW = ones(2, 3, 4), ones(4)
Q, K, V = ones(2, 3, 4), ones(2, 5, 4), ones(2, 5, 6)
X, W_Q, W_V, W_O = ones(2, 3, 6), ones(4, 6, 3), ones(4, 6, 2), ones(4, 2, 6)
HEADS = (W_Q, W_Q, W_V, W_O)
STATE, PATTERNS = ones(4), ones(6, 4)
RNG = np.random.default_rng(0)

REJECTED = [
    (tt.gibbs_distribution, (SCORES, 1.0, mask(3)), "mask"),
    (tt.gibbs_distribution, (SCORES, ones(4)), "temperature"),
    (tt.gibbs_distribution, (ones(),), "energies"),
    (tt.temperature_sweep, (SCORES, ones(1, 2)), "temperatures"),
    (tt.attention_entropy, (ROW,), "A"),
    (tt.softmax_jacobian_batched, (ROW,), "probs"),
    (tt.entropy, (ROW, 0.0), "eps"),
    (tt.max_entropy, (0,), "n"),
    *[
        (function, (SCORES, temperature), "temperature")
        for function in (tt.gibbs_distribution, tt.log_partition, tt.partition_function, tt.free_energy)
        for temperature in (0.0, -1.0, np.nan)
    ],
    *[(function, (SCORES, 0.0), "temperature") for function in (tt.mean_score, tt.internal_energy, tt.heat_capacity)],
    (tt.entropy_from_log_partition, (ones(2), ones(2), -1.0), "temperature"),
    (tt.entropy_from_log_partition, (ones(3), ones(3), ones(3, 1)), "temperature"),
    (tt.natural_gradient, (ones(2, 3), ones(4, 3)), "probs"),
    (tt.causal_mask, (-1,), "n"),
    (tt.causal_mask_with_window, (3, 0), "window"),
    (tt.local_attention_mask, (3, 0), "window"),
    (tt.strided_attention_mask, (3, 0), "stride"),
    (tt.block_sparse_mask, (3, 0), "block_size"),
    *[(tt.global_local_mask, (3, 1, tokens), "global_tokens") for tokens in (4, [0, 3], -1, [-1])],
    (tt.padding_mask, (ones(1, dtype=int), 0), "max_len"),
    (tt.attention_mask_from_padding, (ones(2, dtype=int), ones(3, dtype=int), 4, 3), "key_lengths"),
    (tt.document_mask, (ones(2, 3, dtype=int), ones(4, 3, dtype=int)), "key_documents"),
    (tt.apply_mask, (ones(2, 2), mask(3, 2)), "mask"),
    (tt.apply_mask, (ones(1, 2), mask(1, 2), np.nan), "fill_value"),
    (tt.mask_to_additive, (mask(2),), "mask"),
    (tt.visualize_mask, (mask(2),), "mask"),
    (tt.scaled_dot_product_attention, (Q, V, K), "K"),
    (tt.scaled_dot_product_attention, (Q, K, V[:, :3]), "V"),
    (tt.attention_scores, (Q, ones(4, 5, 4)), "K"),
    (tt.attention_output, (ones(2, 3, 5), V[0, 0]), "V"),
    (tt.scaled_dot_product_attention, (Q, K, V, mask(5)), "mask"),
    (tt.scaled_dot_product_attention, (Q, K, V, mask(2, 5, 3)), "mask"),
    (tt.batched_attention, (Q[0], K, V), "Q"),
    (tt.multihead_attention, (X, X, X, *HEADS, mask(2, 3, 3)), "mask"),
    (tt.multihead_attention, (X[..., :5], X, X, *HEADS), "W_Q"),
    (tt.multihead_attention, (X, X, X, W_Q, W_V, W_V, W_O), "W_K"),
    (tt.multihead_attention, (X, X, X, W_Q, W_Q, W_Q, W_O), "W_O"),
    (tt.multihead_attention, (X, X, X[:, :2], *HEADS), "V"),
    (tt.multihead_attention_batched, (X, X[0], X, *HEADS), "K"),
    (tt.init_multihead_weights, (RNG, 6, 4), "num_heads"),
    (tt.init_multihead_weights, (RNG, 6, 3, None, 0), "d_v"),
    *[
        (function, (Q, *arguments), field)
        for function in (tt.bilinearly_modulated_attention, tt.naive_query_modulated_attention)
        for arguments, field in (
            ((Q, Q, ones(3, 5)), "W_g"),
            ((Q, ROW, ones(4, 4)), "V"),
        )
    ],
    (tt.bilinearly_modulated_attention, (Q, K, V, ones(4, 6)), "Q"),
    (tt.bma_backward, (ones(2, 3, 5), Q, Q, Q, ones(4, 4)), "dL_dO"),
    (tt.attention_backward, (ones(2, 3, 6), Q, K, V, ones(2, 3, 5), ones(2, 5, 3)), "S"),
    (tt.grad_scores_wrt_Q, (ones(4, 3), ones(4, 2), 1.0), "K"),
    (tt.grad_scores_wrt_K, (ones(4, 3), ones(3, 2), 1.0), "Q"),
    (tt.grad_softmax, (ones(4, 3), ones(3)), "dL_dA"),
    (tt.rotate, (ones(3, 4), ones(3, 3)), "angles"),
    (tt.rotate, (ones(4), ones(3, 2)), "x"),
    (tt.head_diversity, (ones(3, 3),), "A"),
    (tt.euclidean_metric, (0,), "d"),
    (tt.scaled_euclidean_metric, (2, 0.0), "scale"),
    (tt.learned_metric, (ones(3),), "W"),
    (tt.diagonal_metric, (ones(),), "diag"),
    (tt.metric_inverse, (ones(2, 3),), "g"),
    (tt.lower_index, (ones(2, 3), ones(4, 3, 3)), "g"),
    (tt.bilinear_form, (ones(2, 3), ones(4, 3), np.eye(3)), "v"),
    (tt.bilinear_form_batch, (ones(2, 3), ones(2, 1), np.eye(3)), "K"),
    (tt.inner_product, (ones(3), ones(3), "cosine"), "metric_type"),
    (tt.verify_metric_properties, (np.eye(2), -1.0), "tol"),
    (tt.hopfield_retrieve, (STATE, PATTERNS, 1.0, 0), "max_iterations"),
    (tt.modern_hopfield_energy, (STATE[:3], PATTERNS), "patterns"),
    (tt.modern_hopfield_energy, (ones(3, 4), ones(2, 6, 4)), "patterns"),
    (tt.modern_hopfield_energy, (STATE, PATTERNS, 0.0), "beta"),
    (tt.attention_as_hopfield, (ones(3, 4), PATTERNS, PATTERNS[:5]), "values"),
    (tt.classical_capacity, (0,), "N"),
    (tt.modern_capacity, (1,), "d"),
    (tt.modern_capacity, (8, 0.0), "epsilon"),
    (tt.energy_landscape_1d, (PATTERNS, 4), "axis"),
    (tt.retrieval_basin, (6, PATTERNS), "pattern_idx"),
    (tt.retrieval_basin, (0, PATTERNS, 0), "n_samples"),
    (tt.retrieval_success, (RNG, 4, 0), "num_patterns"),
]

REJECTED_VALUES = [
    *[
        (function, (SCORES, np.asarray(0.0)), "temperature")
        for function in (tt.gibbs_distribution, tt.log_partition, tt.partition_function, tt.free_energy)
    ],
    (tt.temperature_sweep, (SCORES, np.array([1.0, 0.0])), "temperatures"),
    (tt.padding_mask, (np.array([1, 4]), 3), "lengths"),
    (tt.causal_padding_mask, (np.array([4]), 3), "lengths"),
    (tt.attention_mask_from_padding, (np.array([1]), np.array([4]), 4, 3), "key_lengths"),
]

WRONG_TYPES = [
    (tt.gibbs_distribution, (np.arange(3),), "energies"),
    (tt.gibbs_distribution, (SCORES, 1.0, ones(2, 3, 4)), "mask"),
    (tt.fisher_metric, (np.arange(3),), "probs"),
    (tt.causal_mask, (3.0,), "n"),
    (tt.global_local_mask, (3, 1, [True, False]), "global_tokens"),
    (tt.padding_mask, (ones(1), 3), "lengths"),
    (tt.apply_mask, (ones(2, 2), ones(2, 2, dtype=int)), "mask"),
    (tt.attention_scores, (Q, K, 0.5), "scale"),
    (tt.scaled_dot_product_attention, (Q, K, V, ones(3, 5, dtype=int)), "mask"),
    (tt.sink_attention, (Q, K, V, np.arange(2)), "sink"),
    (tt.bilinearly_modulated_attention, (Q, Q, Q, ones(4, 4, dtype=int)), "W_g"),
    (tt.init_multihead_weights, (0, 6, 3), "key"),
    (tt.modern_hopfield_update, ([1.0], PATTERNS), "state"),
    (tt.hopfield_retrieve, (STATE, PATTERNS, 1.0, 2.5), "max_iterations"),
    (tt.retrieval_basin, (0, PATTERNS, 100, 0.5, 1.0, 7), "key"),
]


def each_row(table):
    return pytest.mark.parametrize(
        ("function", "arguments", "field"), table, ids=[f"{function.__name__}-{field}" for function, _, field in table]
    )


@each_row(REJECTED)
def test_an_argument_that_does_not_fit_is_rejected_by_name(library, function, arguments, field):
    with rejects(field):
        library.call(function, *arguments)


@each_row(REJECTED_VALUES)
@pytest.mark.parametrize("eager", [NUMPY, JAX, TORCH], ids=lambda library: library.name)
def test_a_value_out_of_range_is_rejected_by_name(eager, function, arguments, field):
    with rejects(field):
        eager.call(function, *arguments)


@each_row(WRONG_TYPES)
def test_a_wrong_type_is_rejected_by_name(library, function, arguments, field):
    with pytest.raises(TypeError, match=f"^{field} must"):
        library.call(function, *arguments)


def test_the_dtype_of_an_additive_mask_is_floating():
    with pytest.raises(TypeError, match=r"^dtype must"):
        tt.mask_to_additive(mask(2, 2), dtype=np.int64)
