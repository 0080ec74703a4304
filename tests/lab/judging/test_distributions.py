import math

import numpy as np
import pytest
from closeness import assert_close
from errors import rejects
from scipy import integrate, special, stats

from tidegate.lab.judging import dunnett_critical_value, dunnett_p_value, mean_and_sd, t_interval


class TestDunnettsDistribution:
    @pytest.mark.parametrize("degrees", [1, 2, 4, 12, 60, 10_000])
    @pytest.mark.parametrize("statistic", [0.0, 0.3, 2.0, 5.0])
    def test_of_one_comparison_it_is_students(self, degrees, statistic):
        student = 2 * stats.t.sf(statistic, degrees)
        assert_close(np.float64(dunnett_p_value(statistic, 1, degrees)), np.float64(student))

    def test_its_critical_values_are_those_of_the_printed_tables(self):
        printed = {
            5: (2.57, 3.03, 3.29, 3.48, 3.62),
            12: (2.18, 2.50, 2.68, 2.81, 2.90),
            20: (2.09, 2.38, 2.54, 2.65, 2.73),
            10**6: (1.96, 2.21, 2.35, 2.44, 2.51),
        }
        computed = {
            degrees: tuple(round(dunnett_critical_value(k, degrees), 2) for k in (1, 2, 3, 4, 5)) for degrees in printed
        }
        assert computed == printed

    @pytest.mark.parametrize(("k", "degrees", "statistic"), [(2, 2, 5.0), (3, 12, 2.6), (5, 4, 3.0), (9, 40, 1.0)])
    def test_it_is_the_largest_of_a_multivariate_t_with_correlation_one_half(self, k, degrees, statistic):
        joint = stats.multivariate_t(shape=np.full((k, k), 0.5) + 0.5 * np.eye(k), df=degrees, seed=0)
        inside = joint.cdf([statistic] * k, lower_limit=[-statistic] * k, random_state=0)
        # The quasi-random integration of scipy is good to about 2e-4.
        assert abs(dunnett_p_value(statistic, k, degrees) - (1 - inside)) < 1e-3

    def test_it_is_what_adaptive_quadrature_finds(self):
        k, degrees, statistic = 3, 12, 2.5

        def density(z, s):
            reach = math.sqrt(2) * statistic * s
            inside = (special.ndtr(z + reach) - special.ndtr(z - reach)) ** k
            return inside * math.exp(-(z**2) / 2) * s ** (degrees - 1) * math.exp(-degrees * s**2 / 2)

        inside, _ = integrate.dblquad(density, 0, 4, -9, 9, epsabs=1e-9)
        inside /= (
            math.sqrt(2 * math.pi) * special.gamma(degrees / 2) * 2 ** (degrees / 2 - 1) / degrees ** (degrees / 2)
        )
        assert abs(dunnett_p_value(statistic, k, degrees) - (1 - inside)) < 1e-8

    def test_its_p_values_are_those_of_scipys_one_way_comparison(self):
        samples = np.random.default_rng(3).standard_normal((4, 6)) + np.array([[0.0], [0.4], [1.5], [-0.8]])
        peer = stats.dunnett(*samples[1:], control=samples[0], random_state=np.random.default_rng(0))
        ours = [dunnett_p_value(statistic, 3, 20) for statistic in peer.statistic]
        np.testing.assert_allclose(ours, peer.pvalue, atol=1e-3)

    def test_p_grows_with_the_comparisons_and_falls_with_the_statistic_and_the_degrees_of_freedom(self):
        by_comparisons = [dunnett_p_value(2.5, k, 12) for k in range(1, 9)]
        by_statistic = [-dunnett_p_value(t, 3, 12) for t in np.linspace(0, 8, 9)]
        by_degrees = [-dunnett_p_value(2.5, 3, degrees) for degrees in (1, 2, 5, 12, 50, 500)]
        assert all(np.diff(values).min() > 0 for values in (by_comparisons, by_statistic, by_degrees))

    def test_it_asks_for_less_than_independent_comparisons_would(self):
        sidak = stats.t.isf((1 - 0.95 ** (1 / 3)) / 2, 12)
        assert stats.t.isf(0.025, 12) < dunnett_critical_value(3, 12) < sidak

    @pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
    def test_the_critical_value_is_where_p_is_the_level(self, confidence):
        critical = dunnett_critical_value(4, 12, confidence)
        assert dunnett_p_value(critical, 4, 12) == pytest.approx(1 - confidence, rel=1e-9)

    def test_its_ends(self):
        assert dunnett_p_value(0.0, 3, 12) == pytest.approx(1, abs=1e-12)
        assert dunnett_p_value(float("inf"), 3, 12) == 0
        assert dunnett_p_value(-2.0, 3, 12) == dunnett_p_value(2.0, 3, 12)

    def test_it_needs_a_comparison_and_a_degree_of_freedom(self):
        with rejects("num_comparisons"):
            dunnett_p_value(2.0, 0, 12)
        with rejects("degrees_of_freedom"):
            dunnett_p_value(2.0, 3, 0)


class TestMeans:
    def test_mean_and_sd_are_the_usual_ones(self):
        assert mean_and_sd([1.0, 2.0, 6.0]) == (3.0, pytest.approx(np.sqrt(7)))
        assert mean_and_sd([4.0]) == (4.0, None)

    def test_the_interval_of_a_mean_is_students(self):
        values = np.random.default_rng(0).standard_normal(7)
        peer = stats.ttest_1samp(values, 0).confidence_interval(0.9)
        assert_close(np.array(t_interval(values.tolist(), 0.9)), np.array([peer.low, peer.high]))

    def test_they_need_numbers_and_a_confidence(self):
        with rejects("values"):
            mean_and_sd([])
        with rejects("values"):
            t_interval([1.0])
        with rejects("confidence"):
            t_interval([1.0, 2.0], 95)
