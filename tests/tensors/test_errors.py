"""Arguments that do not fit are rejected by name, whatever library the arrays come from."""

import numpy as np
import pytest
from errors import rejects
from libraries import JAX, NUMPY, TORCH

from tidegate.tensors.attention import (
    attention_output,
    attention_scores,
    batched_attention,
    scaled_dot_product_attention,
)
from tidegate.tensors.bilinear import (
    bilinear_form,
    bilinear_form_batch,
    diagonal_metric,
    euclidean_metric,
    inner_product,
    learned_metric,
    lower_index,
    metric_inverse,
    raise_index,
    scaled_euclidean_metric,
    verify_metric_properties,
)
from tidegate.tensors.heads import merge_groups, repeat_heads, split_groups, sum_groups
from tidegate.tensors.hopfield import (
    attention_as_hopfield,
    classical_capacity,
    energy_landscape_1d,
    hopfield_retrieve,
    modern_capacity,
    modern_hopfield_energy,
    modern_hopfield_update,
    retrieval_basin,
    retrieval_success,
)
from tidegate.tensors.masking import (
    apply_mask,
    attention_mask_from_padding,
    block_sparse_mask,
    causal_mask,
    causal_mask_with_window,
    causal_padding_mask,
    document_mask,
    global_local_mask,
    local_attention_mask,
    mask_to_additive,
    padding_mask,
    strided_attention_mask,
    visualize_mask,
)
from tidegate.tensors.multihead import (
    head_attention_entropy,
    head_diversity,
    multihead_attention,
    multihead_attention_batched,
)
from tidegate.tensors.sink import sink_attention
from tidegate.tensors.softmax import (
    attention_entropy,
    entropy,
    free_energy,
    gibbs_distribution,
    log_partition,
    max_entropy,
    partition_function,
    softmax_jacobian_batched,
    temperature_sweep,
)
from tidegate.tensors.thermodynamics import (
    entropy_from_log_partition,
    fisher_metric,
    heat_capacity,
    internal_energy,
    mean_score,
    natural_gradient,
)


def ones(*shape, dtype=float):
    return np.ones(shape, dtype)


def mask(*shape):
    return np.ones(shape, bool)


SCORES, ROW = ones(2, 3, 4), ones(4)
Q, K, V = ones(2, 3, 4), ones(2, 5, 4), ones(2, 5, 6)
X, W_Q, W_V, W_O = ones(2, 3, 6), ones(4, 6, 3), ones(4, 6, 2), ones(4, 2, 6)
HEADS = (W_Q, W_Q, W_V, W_O)
STATE, PATTERNS = ones(4), ones(6, 4)

REJECTED = [
    (gibbs_distribution, (SCORES, 1.0, mask(3)), "mask"),
    (gibbs_distribution, (SCORES, ones(4)), "temperature"),
    (gibbs_distribution, (SCORES[0], ones(1, 1, 1)), "temperature"),
    (gibbs_distribution, (ones(),), "energies"),
    (temperature_sweep, (SCORES, ones(1, 2)), "temperatures"),
    (attention_entropy, (ROW,), "A"),
    (softmax_jacobian_batched, (ROW,), "probs"),
    (entropy, (ROW, 0.0), "eps"),
    (max_entropy, (0,), "n"),
    *[
        (function, (SCORES, temperature), "temperature")
        for function in (gibbs_distribution, log_partition, partition_function, free_energy)
        for temperature in (0.0, -1.0, np.nan)
    ],
    *[(function, (SCORES, 0.0), "temperature") for function in (mean_score, internal_energy, heat_capacity)],
    (entropy_from_log_partition, (ones(2), ones(2), -1.0), "temperature"),
    (entropy_from_log_partition, (ones(3), ones(2)), "mean_score"),
    (entropy_from_log_partition, (ones(3), ones(3), ones(3, 1)), "temperature"),
    (natural_gradient, (ones(3), ones(1)), "probs"),
    (natural_gradient, (ones(2, 3), ones(4, 3)), "probs"),
    (repeat_heads, (ones(4, 3, 2), 6), "num_heads"),
    (merge_groups, (ones(4, 3, 2), 3), "num_groups"),
    (split_groups, (ones(4, 3, 2), 3), "group_size"),
    (sum_groups, (ones(4, 3, 2), 3), "num_groups"),
    *[(function, (ones(3, 2), 1), "x") for function in (repeat_heads, merge_groups, split_groups, sum_groups)],
    (causal_mask, (-1,), "n"),
    (causal_mask_with_window, (3, 0), "window"),
    (local_attention_mask, (3, 0), "window"),
    (strided_attention_mask, (3, 0), "stride"),
    (block_sparse_mask, (3, 0), "block_size"),
    (block_sparse_mask, (0, 3), "n"),
    *[(global_local_mask, (3, 1, tokens), "global_tokens") for tokens in (4, [0, 3], -1, [-1])],
    (padding_mask, (ones(1, dtype=int), 0), "max_len"),
    (attention_mask_from_padding, (ones(2, dtype=int), ones(3, dtype=int), 4, 3), "key_lengths"),
    (document_mask, (ones(2, dtype=int), ones(dtype=int)), "key_documents"),
    (document_mask, (ones(2, 3, dtype=int), ones(4, 3, dtype=int)), "key_documents"),
    (apply_mask, (ones(2, 2), mask(3, 2)), "mask"),
    (apply_mask, (ones(2, 2), mask(1, 2, 2)), "mask"),
    (apply_mask, (ones(2), mask(1, 2)), "scores"),
    (apply_mask, (ones(1, 2), mask(1, 2), np.nan), "fill_value"),
    (mask_to_additive, (mask(2),), "mask"),
    (visualize_mask, (mask(2),), "mask"),
    (scaled_dot_product_attention, (Q, V, K), "K"),
    (scaled_dot_product_attention, (Q, K, V[:, :3]), "V"),
    (scaled_dot_product_attention, (Q, K, ones(4, 5, 6)), "V"),
    (attention_scores, (Q[0, 0], K), "Q"),
    (attention_scores, (Q, K[0, 0]), "K"),
    (attention_scores, (Q, ones(4, 5, 4)), "K"),
    (attention_output, (ones(2, 3, 5), V[0, 0]), "V"),
    *[
        (scaled_dot_product_attention, (Q, K, V, mask(*shape)), "mask")
        for shape in ((5,), (2, 3, 3), (1, 1, 2, 3, 5), (2, 5, 3))
    ],
    (batched_attention, (Q[0], K, V), "Q"),
    (batched_attention, (Q, K, V[0]), "V"),
    *[(multihead_attention, (X, X, X, *HEADS, mask(*shape)), "mask") for shape in ((4, 3, 3), (2, 3, 3), (2, 2, 3, 3))],
    (multihead_attention, (X[..., :5], X, X, *HEADS), "W_Q"),
    (multihead_attention, (X, X, X, W_Q, W_V, W_V, W_O), "W_K"),
    (multihead_attention, (X, X, X, W_Q, W_Q, W_Q, W_O), "W_O"),
    (multihead_attention, (X, X, X, W_Q, W_Q, W_V, W_O[:1]), "W_O"),
    (multihead_attention, (X, X, X[:, :2], *HEADS), "V"),
    (multihead_attention, (X, X, X, W_Q[0], W_Q, W_V, W_O), "W_Q"),
    (multihead_attention, (ones(4, 3, 6), X, X, *HEADS), "K"),
    (multihead_attention_batched, (X, X[0], X, *HEADS), "K"),
    (head_diversity, (ones(3, 3),), "A"),
    (head_attention_entropy, (ones(3, 3),), "A"),
    (euclidean_metric, (0,), "d"),
    (scaled_euclidean_metric, (2, 0.0), "scale"),
    (scaled_euclidean_metric, (2, ones(2)), "scale"),
    (learned_metric, (ones(3),), "W"),
    (diagonal_metric, (ones(),), "diag"),
    (metric_inverse, (ones(2, 3),), "g"),
    (metric_inverse, (ones(0, 0),), "g"),
    (lower_index, (ones(3), np.eye(2)), "g"),
    (lower_index, (ones(2, 3), ones(4, 3, 3)), "g"),
    (raise_index, (ones(3), np.eye(2)), "g_inv"),
    (bilinear_form, (ones(3), ones(1), np.eye(3)), "v"),
    (bilinear_form, (ones(2, 3), ones(4, 3), np.eye(3)), "v"),
    (bilinear_form_batch, (ones(3), ones(2, 3), np.eye(3)), "Q"),
    (bilinear_form_batch, (ones(2, 3), ones(2, 1), np.eye(3)), "K"),
    (inner_product, (ones(3), ones(1)), "v"),
    (inner_product, (ones(3), ones(3), "cosine"), "metric_type"),
    (verify_metric_properties, (np.eye(2), -1.0), "tol"),
    (hopfield_retrieve, (ones(), PATTERNS), "query"),
    (hopfield_retrieve, (STATE, PATTERNS, 1.0, 0), "max_iterations"),
    (modern_hopfield_energy, (STATE, STATE), "patterns"),
    (modern_hopfield_energy, (STATE[:3], PATTERNS), "patterns"),
    (modern_hopfield_energy, (STATE, PATTERNS[:0]), "patterns"),
    (modern_hopfield_energy, (ones(3, 4), ones(2, 6, 4)), "patterns"),
    (modern_hopfield_energy, (STATE, PATTERNS, 0.0), "beta"),
    (modern_hopfield_energy, (STATE, PATTERNS, ones(6)), "beta"),
    (attention_as_hopfield, (ones(3, 4), PATTERNS[:, :3], PATTERNS), "keys"),
    (attention_as_hopfield, (ones(3, 4), PATTERNS, PATTERNS[:5]), "values"),
    (attention_as_hopfield, (ones(3, 4), PATTERNS, PATTERNS, -1.0), "beta"),
    (classical_capacity, (0,), "N"),
    (modern_capacity, (1,), "d"),
    (modern_capacity, (8, 0.0), "epsilon"),
    (modern_capacity, (8, 1.5), "epsilon"),
    (energy_landscape_1d, (PATTERNS, 4), "axis"),
    (retrieval_basin, (6, PATTERNS), "pattern_idx"),
    (retrieval_basin, (0, PATTERNS, 0), "n_samples"),
    (retrieval_success, (np.random.default_rng(0), 4, 0), "num_patterns"),
]

REJECTED_VALUES = [
    *[
        (function, (SCORES, np.asarray(0.0)), "temperature")
        for function in (gibbs_distribution, log_partition, partition_function, free_energy)
    ],
    (temperature_sweep, (SCORES, np.array([1.0, 0.0])), "temperatures"),
    (padding_mask, (np.array([1, 4]), 3), "lengths"),
    (padding_mask, (np.array([-1]), 3), "lengths"),
    (causal_padding_mask, (np.array([4]), 3), "lengths"),
    (attention_mask_from_padding, (np.array([1]), np.array([4]), 4, 3), "key_lengths"),
    (attention_mask_from_padding, (np.array([5]), np.array([1]), 4, 3), "query_lengths"),
]

WRONG_TYPES = [
    (gibbs_distribution, (np.arange(3),), "energies"),
    (gibbs_distribution, ([1.0, 2.0],), "energies"),
    (gibbs_distribution, (SCORES, 1.0, ones(2, 3, 4)), "mask"),
    (fisher_metric, (np.arange(3),), "probs"),
    (causal_mask, (3.0,), "n"),
    (global_local_mask, (3, 1, [True, False]), "global_tokens"),
    (global_local_mask, (3, 1, 1.5), "global_tokens"),
    (padding_mask, (ones(1), 3), "lengths"),
    (padding_mask, (mask(1), 3), "lengths"),
    (padding_mask, ([2], 3), "lengths"),
    (document_mask, (ones(2), ones(2, dtype=int)), "query_documents"),
    (apply_mask, (ones(2, 2), ones(2, 2, dtype=int)), "mask"),
    (apply_mask, (ones(2, 2, dtype=int), mask(2, 2)), "scores"),
    (attention_scores, (Q, K.astype(int)), "K"),
    (attention_scores, (Q, K, 0.5), "scale"),
    (scaled_dot_product_attention, (Q, K, V, ones(3, 5, dtype=int)), "mask"),
    (scaled_dot_product_attention, ([[1.0]], K, V), "Q"),
    (multihead_attention, (X, X, X, *HEADS, ones(3, 3, dtype=int)), "mask"),
    (multihead_attention, (X, X, X, W_Q, W_Q, W_V, W_O.astype(int)), "W_O"),
    (sink_attention, (Q, K, V, np.arange(2)), "sink"),
    (euclidean_metric, (2.0,), "d"),
    (learned_metric, (ones(3, 3, dtype=int),), "W"),
    (diagonal_metric, ([1.0],), "diag"),
    (modern_hopfield_update, ([1.0], PATTERNS), "state"),
    (modern_hopfield_update, (STATE, PATTERNS.astype(int)), "patterns"),
    (hopfield_retrieve, (STATE, PATTERNS, 1.0, 2.5), "max_iterations"),
    (retrieval_basin, (0, PATTERNS, 100, 0.5, 1.0, 7), "key"),
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
        mask_to_additive(mask(2, 2), dtype=np.int64)
