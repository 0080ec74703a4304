import io
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from errors import rejects
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from tidegate.tensors.attention import attention_scores_with_metric, attention_weights
from tidegate.tensors.gradients import gradient_flow_analysis
from tidegate.tensors.hopfield import classical_capacity, energy_landscape_1d, hopfield_retrieve
from tidegate.tensors.masking import causal_mask
from tidegate.tensors.plots import (
    compare_metrics,
    plot_attention_weights,
    plot_entropy_distribution,
    plot_gradient_flow,
    plot_hopfield_energy,
    plot_mask,
    plot_multihead_attention,
    plot_retrieval_success,
    plot_temperature_sweep,
)
from tidegate.tensors.softmax import attention_entropy, entropy, gibbs_distribution

RNG = np.random.default_rng(2)
WEIGHTS = attention_weights(RNG.normal(size=(5, 7)))
HEADS = attention_weights(RNG.normal(size=(6, 5, 5)), causal_mask(5))
Q, K, V = (RNG.normal(size=(4, 3)) for _ in range(3))
TRIANGLE = np.asarray([[2.0, 0.0], [-1.0, 1.8], [-1.0, -1.8]])
WIDE = RNG.normal(size=(4, 9))
SMALL_FIGURES = {
    "weights": lambda: plot_attention_weights(WEIGHTS),
    "heads": lambda: plot_multihead_attention(HEADS),
    "entropy": lambda: plot_entropy_distribution(HEADS),
    "sweep": lambda: plot_temperature_sweep(RNG.normal(size=4)),
    "gradients": lambda: plot_gradient_flow(gradient_flow_analysis(Q, K, V)),
    "mask": lambda: plot_mask(causal_mask(4)),
    "energy": lambda: plot_hopfield_energy(TRIANGLE),
    "metrics": lambda: compare_metrics(Q, K, {"plain": np.eye(3)}),
    "success": lambda: plot_retrieval_success([1, 10], {8: [1.0, 0.5]}),
}


def shown(axes):
    """The numbers behind the heat map on these axes, masked cells as 0."""
    return np.ma.filled(axes.images[0].get_array(), 0)


def drawn(figure):
    """The axes of the plots, without those of colour bars."""
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


@pytest.mark.parametrize("name", SMALL_FIGURES)
def test_each_figure_renders_and_leaves_nothing_open_in_pyplot(name):
    figure = SMALL_FIGURES[name]()
    assert isinstance(figure, Figure)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=30)
    assert picture.getvalue().startswith(b"\x89PNG")
    assert plt.get_fignums() == []


@pytest.mark.parametrize(
    "convert",
    [np.asarray, jnp.asarray, lambda array: torch.tensor(array, requires_grad=True)],
    ids=["numpy", "jax", "torch with gradient"],
)
def test_arrays_of_every_library_show_the_same_weights(convert):
    np.testing.assert_array_equal(shown(plot_attention_weights(convert(WEIGHTS)).axes[0]), WEIGHTS)
    Q_, K_ = convert(Q), convert(K)
    np.testing.assert_array_equal(
        shown(drawn(compare_metrics(Q_, K_, {"plain": np.eye(3)}))[0]), attention_weights(Q @ K.T)
    )


# --- weights


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_shown(half):
    weights = torch.tensor(WEIGHTS).to(half)
    np.testing.assert_array_equal(shown(plot_attention_weights(weights).axes[0]), weights.float().numpy())


def test_each_head_has_a_panel_on_one_colour_scale():
    for weights, axes in zip(HEADS, drawn(plot_multihead_attention(HEADS)), strict=True):
        np.testing.assert_array_equal(shown(axes), weights)
        assert axes.images[0].get_clim() == (0, 1)


# --- entropy and temperature


def test_the_histogram_counts_the_queries_that_see_something_and_marks_mean_and_largest():
    axes = plot_entropy_distribution(HEADS).axes[0]
    assert sum(bar.get_height() for bar in axes.patches) == 30
    mean, largest = (line.get_xdata()[0] for line in axes.lines)
    assert_close(np.asarray(mean), np.asarray(attention_entropy(HEADS).mean()))
    assert largest == math.log(5)
    for weights, count in ((np.asarray([[0.5, 0.5], [0.0, 0.0]]), 1), (np.ones((3, 1)), 3)):
        assert sum(bar.get_height() for bar in plot_entropy_distribution(weights).axes[0].patches) == count


@pytest.mark.parametrize("temperatures", [np.asarray([4.0, 0.5, 1.0]), np.asarray([2.0])])
def test_the_sweep_shows_weights_and_entropy_at_each_temperature(temperatures):
    scores = RNG.normal(size=4)
    left, right = drawn(plot_temperature_sweep(scores, temperatures))
    rising = np.sort(temperatures)
    weights = np.stack([gibbs_distribution(scores, float(t)) for t in rising])
    assert_close(left.collections[0].get_array(), weights.T)
    edges = left.collections[0].get_coordinates()[0, :, 0]
    assert ((edges[:-1] < rising) & (rising < edges[1:])).all()
    curve, largest = right.lines
    np.testing.assert_array_equal(curve.get_xdata(), rising)
    assert_close(curve.get_ydata(), entropy(weights))
    assert largest.get_ydata()[0] == math.log(4)


# --- gradients and masks


def test_gradient_flow_shows_both_gradients_and_all_norms():
    flow = gradient_flow_analysis(*(torch.tensor(array, requires_grad=True) for array in (Q, K, V)))
    left, middle, right = drawn(plot_gradient_flow(flow))
    np.testing.assert_array_equal(shown(left), flow["dL_dA"].detach())
    np.testing.assert_array_equal(shown(middle), flow["dL_dS"].detach())
    assert_close(
        np.asarray([bar.get_width() for bar in right.patches]),
        np.asarray([float(norm.detach()) for norm in flow["grad_norms"].values()]),
    )


def test_the_mask_is_shown():
    np.testing.assert_array_equal(shown(plot_mask(causal_mask(4)).axes[0]), causal_mask(4))


# --- Hopfield


def test_the_plane_of_patterns_of_width_two_is_their_own():
    found = hopfield_retrieve(np.asarray([0.3, 0.9]), TRIANGLE, 2.0, 5)
    left, right = drawn(plot_hopfield_energy(TRIANGLE, found.trajectory, beta=2.0))
    np.testing.assert_array_equal(left.collections[1].get_offsets(), TRIANGLE)
    np.testing.assert_array_equal(np.stack(left.lines[0].get_data(), axis=-1), found.trajectory)
    assert_close(right.lines[0].get_ydata(), found.energies)


def test_wide_patterns_are_projected_on_their_first_two_principal_directions():
    left, right = drawn(plot_hopfield_energy(WIDE))
    centred = WIDE - WIDE.mean(axis=0)
    spread = np.linalg.svd(centred, compute_uv=False)
    on_plane = np.asarray(left.collections[1].get_offsets())
    assert_close(np.sum(on_plane**2, axis=0), spread[:2] ** 2)
    positions, energies = energy_landscape_1d(WIDE)
    assert_close(right.lines[0].get_xdata(), positions)
    assert_close(right.lines[0].get_ydata(), energies)


def test_success_has_a_curve_and_a_classical_mark_for_each_width():
    counts, shares = [1, 10, 100], {16: [1.0, 0.5, 0.0], 32: np.asarray([1.0, 1.0, 0.25])}
    axes = plot_retrieval_success(counts, shares).axes[0]
    curves, marks = axes.lines[0:4:2], axes.lines[1:4:2]
    for curve, mark, (width, share) in zip(curves, marks, shares.items(), strict=True):
        np.testing.assert_array_equal(curve.get_data(), [counts, share])
        assert mark.get_xdata()[0] == classical_capacity(width)


def test_each_metric_gets_the_weights_it_makes():
    metrics = {"plain": np.eye(3), "stretched": np.diag([4.0, 1.0, 0.1])}
    panels = drawn(compare_metrics(Q, K, metrics))
    for axes, (name, metric) in zip(panels, metrics.items(), strict=True):
        weights = attention_weights(attention_scores_with_metric(Q, K, metric))
        np.testing.assert_array_equal(shown(axes), weights)
        assert axes.get_title().startswith(f"{name}\nmean entropy")


# --- bad input


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: plot_attention_weights(HEADS), "A"),
        (lambda: plot_attention_weights(WEIGHTS, ["a"]), "query_labels"),
        (lambda: plot_multihead_attention(WEIGHTS), "A"),
        (lambda: plot_entropy_distribution(WEIGHTS[0]), "A"),
        (lambda: plot_temperature_sweep(WEIGHTS[0], np.zeros(2)), "temperatures"),
        (lambda: plot_gradient_flow({"dL_dA": WEIGHTS}), "flow_data"),
        (lambda: plot_mask(causal_mask(3)[None]), "mask"),
        (lambda: plot_hopfield_energy(TRIANGLE, WIDE), "state_trajectory"),
        (lambda: compare_metrics(Q, K, {}), "metrics"),
        (lambda: plot_retrieval_success([1, 2], {}), "success"),
    ],
)
def test_bad_input_is_rejected_by_name(call, field):
    with rejects(field):
        call()
