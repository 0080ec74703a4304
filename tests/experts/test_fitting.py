import numpy as np
import pytest
from scipy.optimize import least_squares

from tidegate.experts.estimate import ExpertExperiment, draw_cells
from tidegate.experts.fitting import CellData, fit_batch
from tidegate.experts.models import Design, ExpertModel, default_design, default_truth

DESIGN = default_design(num_points=64)


def problems(placement="g1", *, fits=6, n=10_000):
    experiment = ExpertExperiment(placement=placement, design=DESIGN, replicates=fits, ns=(n,))
    rng = np.random.default_rng(1)
    truth = experiment.true_parameters.vector()
    return experiment, draw_cells(experiment, n, rng), truth + 0.2 * rng.standard_normal((fits, len(truth)))


@pytest.mark.parametrize("placement", ["g1", "g2"])
def test_cells_give_the_same_estimate_as_the_raw_samples(placement):
    rng = np.random.default_rng(0)
    model, truth = ExpertModel(placement=placement, k=2), default_truth(placement).vector()
    drawn = rng.integers(len(DESIGN.points), size=1500)
    clean = model.value(truth[None], DESIGN)[0]
    samples = clean[drawn] + 0.3 * rng.standard_normal(len(drawn))
    counts = np.bincount(drawn, minlength=len(clean))
    sums = np.bincount(drawn, weights=samples, minlength=len(clean))
    means = sums / np.maximum(counts, 1)
    precision = np.array([len(drawn) / 0.3**2])
    cells = CellData(means=means[None], weights=counts[None] / len(drawn), precision=precision)
    raw = CellData(means=samples[None], weights=np.full((1, len(drawn)), 1 / len(drawn)), precision=precision)
    start = truth[None] + 0.1 * rng.standard_normal(truth.shape)
    reduced = fit_batch(model, DESIGN, cells, start, tolerance=1e-12)
    whole = fit_batch(model, Design(points=DESIGN.points[drawn]), raw, start, tolerance=1e-12)
    assert reduced.converged.all()
    assert whole.converged.all()
    assert np.abs(reduced.parameters - whole.parameters).max() < 1e-8


@pytest.mark.parametrize("placement", ["dense", "g1", "bma"])
def test_fits_end_where_those_of_scipy_do(placement):
    experiment, cells, starts = problems(placement)
    fits = fit_batch(experiment.model, DESIGN, cells, starts)
    for row, start in enumerate(starts):
        scale = np.sqrt(cells.weights[row] * cells.precision[row])
        found = least_squares(
            lambda p, scale=scale, row=row: scale * (experiment.model.value(p[None], DESIGN)[0] - cells.means[row]),
            start,
        )
        assert abs(fits.objective[row] - 2 * found.cost) < 1e-5


def test_a_fit_does_not_depend_on_its_company():
    experiment, cells, starts = problems(fits=40)
    together = fit_batch(experiment.model, DESIGN, cells, starts)
    alone = fit_batch(
        experiment.model,
        DESIGN,
        CellData(means=cells.means[7:8], weights=cells.weights[7:8], precision=cells.precision[7:8]),
        starts[7:8],
    )
    np.testing.assert_allclose(together.parameters[7], alone.parameters[0], atol=1e-9)
    assert together.steps[7] == alone.steps[0]


def test_held_parameters_and_the_starts_stay():
    experiment, cells, starts = problems()
    before = starts.copy()
    free = np.arange(starts.shape[1]) != 5
    fits = fit_batch(experiment.model, DESIGN, cells, starts, free=free)
    np.testing.assert_array_equal(starts, before)
    np.testing.assert_array_equal(fits.parameters[:, 5], starts[:, 5])
    assert np.abs(fits.parameters[:, free] - starts[:, free]).min(axis=0).max() > 0


def test_single_precision_is_refused():
    experiment, cells, starts = problems()
    with pytest.raises(TypeError, match="float64"):
        fit_batch(experiment.model, DESIGN, cells, starts.astype(np.float32))
