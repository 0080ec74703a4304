import numpy as np
import pytest
from errors import rejects

from tidegate.experts.voronoi import Atoms, voronoi_loss

TRUTH = Atoms(masses=np.array([[3.0, 0.0], [0.0, 2.0]]), locations=np.array([[1.0, 0.0], [-1.0, 0.0]]))
KINDS = ("vector_mass", "scalar_mass", "raw")


@pytest.mark.parametrize("kind", KINDS)
def test_the_truth_costs_nothing_in_any_order(kind):
    turned = Atoms(masses=TRUTH.masses[::-1], locations=TRUTH.locations[::-1])
    for fitted in (TRUTH, turned):
        assert voronoi_loss(fitted, TRUTH, kind=kind).total == 0


def test_cells_are_told_by_gates_and_not_by_index():
    fitted = Atoms(masses=TRUTH.masses, locations=TRUTH.locations[::-1])
    found = voronoi_loss(fitted, TRUTH)
    assert list(found.assignment) == [1, 0]
    assert found.merged == pytest.approx(2 * np.sqrt(13))


def test_a_split_atom_costs_its_squared_distance_and_no_mass():
    locations = np.array([[1.1, 0.0], [0.9, 0.0], [-1.0, 0.2]])
    fitted = Atoms(masses=np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 2.0]]), locations=locations)
    found = voronoi_loss(fitted, TRUTH)
    assert found.merged == pytest.approx(0)
    assert found.covered == pytest.approx(2 * 0.2)
    assert found.over == pytest.approx(3 * 0.1**2)
    assert found.total == pytest.approx(0.4 + 0.03)
    assert voronoi_loss(fitted, TRUTH, kind="raw").merged == pytest.approx(2 + 1)


def test_masses_that_cancel_differ_by_kind():
    fitted = Atoms(masses=np.array([[4.0, 0.0], [-1.0, 0.0], [0.0, 2.0]]), locations=TRUTH.locations[[0, 0, 1]])
    assert voronoi_loss(fitted, TRUTH, kind="vector_mass").merged == pytest.approx(0)
    assert voronoi_loss(fitted, TRUTH, kind="scalar_mass").merged == pytest.approx(2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_cell_costs_its_whole_mass(kind):
    fitted = Atoms(masses=np.array([[3.0, 0.0], [0.0, 0.0]]), locations=np.array([[1.0, 0.0], [1.0, 0.0]]))
    extra = 3 if kind == "raw" else 0
    assert voronoi_loss(fitted, TRUTH, kind=kind).merged == pytest.approx(2 + extra)


def test_experts_without_gates_take_their_best_assignment():
    truth = Atoms(masses=TRUTH.masses)
    fitted = Atoms(masses=np.array([[0.0, 2.0], [1.0, 0.0], [2.0, 0.0]]))
    found = voronoi_loss(fitted, truth)
    assert found.total == pytest.approx(0)
    assert list(found.assignment) == [1, 0, 0]


def test_bad_atoms_are_rejected():
    with rejects("kind"):
        voronoi_loss(TRUTH, TRUTH, kind="other")
    with rejects("fitted"):
        voronoi_loss(Atoms(masses=np.ones((1, 2))), Atoms(masses=TRUTH.masses))
    with rejects("fitted"):
        voronoi_loss(Atoms(masses=np.ones((20, 2))), Atoms(masses=TRUTH.masses))
