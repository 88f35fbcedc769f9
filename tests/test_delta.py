"""Δ% and its statistics against values computed by hand and against scipy."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from fedbench import delta

sys.path.append(str(Path(__file__).parent))
from made_up import user_row


def rows(*values: float | None, **more: Any) -> list[dict[str, Any]]:
    return [user_row(f"user{index}", "mlc", "mAP", value, **more) for index, value in enumerate(values, 1)]


def test_the_mean_over_users_by_hand() -> None:
    # +10 %, -20 %, +40 %
    found = delta.of_seed(rows(44.0, 20.0, 70.0), rows(40.0, 25.0, 50.0))
    assert found.users == pytest.approx({"user1": 10.0, "user2": -20.0, "user3": 40.0})
    assert found.mean == pytest.approx(10.0)
    assert found.log_ratio == pytest.approx((math.log(1.1) + math.log(0.8) + math.log(1.4)) / 3)


def test_the_published_rows_of_setup1() -> None:
    for local, value, expected in [(42.17, 46.33, 9.864833), (24.77, 36.67, 48.041986), (43.77, 66.57, 52.090473)]:
        assert delta.relative(value, local) == pytest.approx(expected, abs=1e-5)


def test_lower_is_better_turns_the_sign_of_that_user_alone() -> None:
    mine = [user_row("user1", "lm", "perplexity", 8.0, higher=False), user_row("user2", "mlc", "mAP", 11.0)]
    local = [user_row("user1", "lm", "perplexity", 10.0, higher=False), user_row("user2", "mlc", "mAP", 10.0)]
    found = delta.of_seed(mine, local)
    assert found.users == pytest.approx({"user1": 20.0, "user2": 10.0})
    assert found.log_ratio == pytest.approx((math.log(10 / 8) + math.log(1.1)) / 2)


def test_several_tasks_are_averaged_within_the_user_first() -> None:
    def two(first: float, second: float, other: float) -> list[dict[str, Any]]:
        scores = [("user1", "retrieval", "i2t R@1", first), ("user1", "retrieval", "t2i R@1", second)]
        return [user_row(*score) for score in [*scores, ("user2", "mlc", "mAP", other)]]

    found = delta.over_seeds({0: delta.of_seed(two(22.0, 26.0, 50.0), two(20.0, 20.0, 50.0))})
    assert found.users == pytest.approx({"user1": 20.0, "user2": 0.0})
    assert found.mean == pytest.approx(10.0)  # not the mean of the three rows, 13.3
    assert found.tasks == pytest.approx({"retrieval": 20.0, "mlc": 0.0})


def test_each_seed_is_compared_with_its_own_local_training() -> None:
    seeds = {0: delta.of_seed(rows(22.0), rows(20.0)), 1: delta.of_seed(rows(22.0), rows(40.0))}
    found = delta.over_seeds(seeds)
    assert found.mean == pytest.approx((10.0 - 45.0) / 2)  # the ratio of means would say -26.7
    assert found.low is not None and found.high is not None
    half = scipy.stats.t.ppf(0.975, 1) * 55 / math.sqrt(2) / math.sqrt(2)
    assert found.high - found.low == pytest.approx(2 * half)
    assert found.harmed == 1
    assert found.worst == pytest.approx(-17.5)


def test_one_seed_has_no_interval() -> None:
    found = delta.over_seeds({3: delta.of_seed(rows(22.0), rows(20.0))})
    assert found.mean == pytest.approx(10.0)
    assert found.low is None and found.high is None


def test_the_interval_agrees_with_scipy() -> None:
    values = [3.1, -0.4, 5.9, 2.2, 2.8]
    _, low, high = delta.interval(values)
    expected = scipy.stats.t.interval(0.95, 4, loc=sum(values) / 5, scale=scipy.stats.sem(values))
    assert (low, high) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 1000])
@pytest.mark.parametrize("probability", [0.5, 0.6, 0.9, 0.975, 0.9995])
def test_the_t_quantile_agrees_with_scipy(probability: float, freedom: int) -> None:
    expected = scipy.stats.t.ppf(probability, freedom)
    assert delta.t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("base", [0.0, -1.0, None, math.nan])
def test_an_undefined_reference_leaves_no_number_and_says_why(base: float | None) -> None:
    found = delta.of_seed(rows(22.0, 30.0), rows(base, 20.0))
    assert found.users == {"user1": None, "user2": pytest.approx(50.0)}
    assert found.mean is None  # a mean over the other users would be another quantity
    assert len(found.notes) == 1 and "user1" in found.notes[0] and "local training" in found.notes[0]


def test_a_user_without_a_value_leaves_no_number_and_says_why() -> None:
    for mine in (rows(None, 30.0), rows(math.nan, 30.0), rows(20.0, 30.0)[1:]):
        found = delta.of_seed(mine, rows(20.0, 20.0))
        assert found.mean is None and found.users["user1"] is None
        assert found.notes == ["user1 has no test value (mlc mAP)"]


def test_an_undefined_seed_counts_in_no_mean_but_stays_noted() -> None:
    seeds = {0: delta.of_seed(rows(22.0), rows(20.0)), 1: delta.of_seed(rows(22.0), rows(0.0))}
    found = delta.over_seeds(seeds)
    assert found.mean == pytest.approx(10.0)
    assert found.low is None
    assert list(found.notes) == [1]


def test_local_training_is_zero_against_itself_even_where_it_scores_zero() -> None:
    mine = rows(0.0, 20.0)
    found = delta.over_seeds({0: delta.of_seed(mine, mine)})
    assert (found.mean, found.harmed, found.worst, found.geometric_mean) == (0.0, 0, 0.0, 1.0)


def test_the_geometric_mean() -> None:
    found = delta.over_seeds({0: delta.of_seed(rows(20.0, 5.0), rows(10.0, 10.0))})
    assert found.mean == pytest.approx(25.0)
    assert found.geometric_mean == pytest.approx(1.0)
    assert delta.over_seeds({0: delta.of_seed(rows(20.0, 0.0), rows(10.0, 10.0))}).geometric_mean is None


def test_mean_ranks_share_ties_and_mind_the_direction() -> None:
    def scores(first: float, second: float) -> list[dict[str, Any]]:
        return [user_row("user1", "mlc", "mAP", first), user_row("user2", "lm", "perplexity", second, higher=False)]

    found = delta.mean_ranks([{0: scores(10, 5)}, {0: scores(20, 5)}, {0: scores(5, 1)}, {}])
    assert found == [(2 + 2.5) / 2, (1 + 2.5) / 2, (3 + 1) / 2, None]


def test_the_order_of_users_and_seeds_changes_no_bit() -> None:
    draw = random.Random(0)
    local = {seed: rows(*(draw.uniform(10, 60) for _ in range(7))) for seed in range(5)}
    mine = {seed: rows(*(draw.uniform(10, 60) for _ in range(7))) for seed in range(5)}
    one = delta.over_seeds({seed: delta.of_seed(mine[seed], local[seed]) for seed in range(5)})
    other = delta.over_seeds({seed: delta.of_seed(mine[seed][::-1], local[seed][::-1]) for seed in (3, 1, 4, 0, 2)})
    assert (one.mean, one.low, one.high, one.geometric_mean) == (
        other.mean,
        other.low,
        other.high,
        other.geometric_mean,
    )
    assert one.users == other.users


def test_the_standard_deviation_is_of_the_sample() -> None:
    assert delta.deviation([1.0, 2.0, 3.0, None]) == pytest.approx(1.0)
    assert delta.deviation([1.0]) is None
