"""Fits of expert models: the batched optimizer compared with a loop of scipy's `least_squares` over the same problems.

    python benchmarks/experts.py [--fits 256] [--rounds 3]

The loop has the same model, the same analytic Jacobian and an equally strict tolerance. Both must reach the same
objective before they are timed.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from harness import interleave, machine_record, markdown_table, marks_table, paired_ratio
from scipy.optimize import least_squares

from tidegate.experts.estimate import ExpertExperiment, draw_cells
from tidegate.experts.fitting import CellData, fit_batch
from tidegate.experts.models import PLACEMENTS

TOLERANCE = 1e-7
N = 10_000


def problems(placement: str, num_fits: int) -> tuple[ExpertExperiment, CellData, np.ndarray]:
    experiment = ExpertExperiment(placement=placement, replicates=num_fits, ns=(N,))
    rng = np.random.default_rng(0)
    truth = experiment.true_parameters.vector()
    starts = truth + experiment.radius * rng.standard_normal((num_fits, len(truth)))
    return experiment, draw_cells(experiment, N, rng), starts


def scipy_loop(experiment: ExpertExperiment, cells: CellData, starts: np.ndarray) -> np.ndarray:
    """Return the final objective of each fit."""
    model, design = experiment.model, experiment.design
    reached = []
    for means, weights, precision, start in zip(cells.means, cells.weights, cells.precision, starts, strict=True):
        scale = np.sqrt(weights * precision)
        # scipy's tolerance is relative, and the objective is about the number of design points.
        relative = TOLERANCE / len(means)
        found = least_squares(
            lambda p, scale=scale, means=means: scale * (model.value(p[None], design)[0] - means),
            start,
            jac=lambda p, scale=scale: scale[:, None] * model.value_and_jacobian(p[None], design)[1][0].T,
            method="lm",
            ftol=relative,
            xtol=relative,
            gtol=relative,
        )
        reached.append(2 * found.cost)
    return np.array(reached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fits", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows, marks = [], []
    for placement in PLACEMENTS:
        experiment, cells, starts = problems(placement, options.fits)

        def batched(experiment=experiment, cells=cells, starts=starts):
            return fit_batch(experiment.model, experiment.design, cells, starts, tolerance=TOLERANCE)

        def loop(experiment=experiment, cells=cells, starts=starts):
            return scipy_loop(experiment, cells, starts)

        ours, theirs = batched().objective, loop()
        same = float(np.mean(np.abs(ours - theirs) < 1e-4))
        not_worse = float(np.mean(ours < theirs + 1e-4))
        timings = interleave({"batched": batched, "loop": loop}, rounds=options.rounds)
        ratio = paired_ratio(timings, "loop", "batched")
        per_fit = [1e3 * timings[name].median / options.fits for name in ("batched", "loop")]
        rows.append(
            [placement, *(f"{taken:.3f}" for taken in per_fit), f"{ratio:.1f}", f"{same:.0%}", f"{not_worse:.0%}"]
        )
        marks.append((f"scipy loop over batched, {placement}", ratio, "≥ 5"))
    header = ["placement", "batched, ms a fit", "scipy, ms a fit", "ratio", "same objective", "as low or lower"]
    print(markdown_table(header, rows), end="\n\n")
    print(marks_table(marks), end="\n\n")
    print(machine_record(("numpy", "scipy")))


if __name__ == "__main__":
    main()
