import io
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from errors import rejects
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from tidegate.tensors.attention import attention_scores_with_metric, attention_weights
from tidegate.tensors.gradients import gradient_flow_analysis
from tidegate.tensors.hopfield import classical_capacity, energy_landscape_1d, hopfield_retrieve
from tidegate.tensors.masking import causal_mask
from tidegate.tensors.plots import (
    MASKED,
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


def tick_texts(axis):
    return [text.get_text() for text in axis.get_ticklabels()]


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


def test_given_axes_are_drawn_on():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert plot_attention_weights(WEIGHTS, ax=right) is figure
    assert not left.images
    np.testing.assert_array_equal(shown(right), WEIGHTS)


def test_weights_have_names_and_numbers():
    figure = plot_attention_weights(WEIGHTS, list("abcde"), list("tuvwxyz"), title="Mine", figsize=(3, 2))
    axes = drawn(figure)[0]
    assert axes.get_title() == "Mine"
    assert (tick_texts(axes.yaxis), tick_texts(axes.xaxis)) == (list("abcde"), list("tuvwxyz"))
    assert [text.get_text() for text in axes.texts] == [f"{weight:.2f}" for weight in WEIGHTS.ravel()]
    assert tuple(figure.get_size_inches()) == (3, 2)


def test_masked_cells_are_grey():
    image = plot_attention_weights(HEADS[0], cmap="viridis").axes[0].images[0]
    np.testing.assert_array_equal(np.ma.getmaskarray(image.get_array()), ~causal_mask(5))
    assert tuple(image.get_cmap().get_bad()) == to_rgba(MASKED)
    assert image.get_cmap().name == "viridis"


def test_long_sequences_get_few_labels_turned_upright_and_no_numbers():
    names = [f"token{i}" for i in range(100)]
    axes = drawn(plot_attention_weights(np.full((100, 100), 0.01), names, names))[0]
    assert tick_texts(axes.xaxis) == names[::4]
    assert {label.get_rotation() for label in axes.get_xticklabels()} == {90}
    assert {label.get_rotation() for label in axes.get_yticklabels()} == {0}
    assert not axes.texts


def test_heads_share_one_colour_scale_and_have_names():
    figure = plot_multihead_attention(HEADS, list("abcdef"))
    panels = drawn(figure)
    for head, axes in enumerate(panels):
        np.testing.assert_array_equal(shown(axes), HEADS[head])
        assert axes.get_title().startswith("abcdef"[head])
        assert axes.images[0].get_clim() == (0, 1)
    assert len(panels) == 6
    assert len(figure.axes) == 7


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
    low, high = middle.images[0].get_clim()
    assert low == -high == -float(flow["dL_dS"].detach().abs().max())
    assert tick_texts(right.yaxis) == list(flow["grad_norms"])
    assert_close(
        np.asarray([bar.get_width() for bar in right.patches]),
        np.asarray([float(norm.detach()) for norm in flow["grad_norms"].values()]),
    )


def test_the_mask_is_shown_and_a_small_one_has_a_grid():
    axes = plot_mask(causal_mask(4), title="Causal").axes[0]
    np.testing.assert_array_equal(shown(axes), causal_mask(4))
    assert axes.get_title() == "Causal"
    assert len(axes.xaxis.get_minorticklocs()) == 3
    large = plot_mask(torch.ones(40, 50, dtype=torch.bool)).axes[0]
    assert len(large.xaxis.get_minorticklocs()) == 0


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
    figure = plot_retrieval_success(counts, shares)
    axes = figure.axes[0]
    curves, marks = axes.lines[0:4:2], axes.lines[1:4:2]
    for curve, mark, (width, share) in zip(curves, marks, shares.items(), strict=True):
        np.testing.assert_array_equal(curve.get_data(), [counts, share])
        assert mark.get_xdata()[0] == classical_capacity(width)
        assert mark.get_color() == curve.get_color()


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
        (lambda: plot_attention_weights(WEIGHTS, None, ["a"]), "key_labels"),
        (lambda: plot_multihead_attention(WEIGHTS), "A"),
        (lambda: plot_multihead_attention(HEADS[:0]), "A"),
        (lambda: plot_multihead_attention(HEADS, ["one"]), "head_names"),
        (lambda: plot_entropy_distribution(WEIGHTS[0]), "A"),
        (lambda: plot_entropy_distribution(np.zeros((2, 2))), "A"),
        (lambda: plot_temperature_sweep(WEIGHTS), "scores"),
        (lambda: plot_temperature_sweep(WEIGHTS[0], np.zeros(2)), "temperatures"),
        (lambda: plot_gradient_flow({"dL_dA": WEIGHTS}), "flow_data"),
        (lambda: plot_mask(causal_mask(3)[None]), "mask"),
        (lambda: plot_hopfield_energy(np.ones((3, 1))), "patterns"),
        (lambda: plot_hopfield_energy(TRIANGLE, WIDE), "state_trajectory"),
        (lambda: compare_metrics(Q, K, {}), "metrics"),
        (lambda: compare_metrics(Q, K, {"flat": np.ones(3)}), "flat"),
        (lambda: plot_retrieval_success([1, 2], {}), "success"),
        (lambda: plot_retrieval_success([0], {8: [1.0]}), "num_patterns[0]"),
        (lambda: plot_retrieval_success([1], {8: [1.0, 1.0]}), "success[8]"),
    ],
)
def test_bad_input_is_rejected_by_name(call, field):
    with rejects(field):
        call()


def test_wrong_types_are_rejected_by_name():
    for call, name in (
        (lambda: plot_attention_weights([[1.0]]), "A"),
        (lambda: plot_attention_weights(np.ones((2, 2), dtype=int)), "A"),
        (lambda: plot_temperature_sweep(WEIGHTS[0], [1.0]), "temperatures"),
        (lambda: plot_mask(np.eye(3)), "mask"),
    ):
        with pytest.raises(TypeError, match=f"^{name} must"):
            call()
