"""Metrics against naive loops, with ties, one class, one item, and what they refuse."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from fedbench.errors import UserError
from fedbench_plugins.metrics.accuracy import Accuracy
from fedbench_plugins.metrics.mean_average_precision import MeanAveragePrecision


def naive_accuracy(scores: np.ndarray, targets: np.ndarray) -> float:
    right = 0
    for row, target in zip(scores.tolist(), targets.tolist(), strict=True):
        right += row.index(max(row)) == target
    return 100 * right / len(targets)


def naive_average_precision(scores: list[float], truth: list[int]) -> float | None:
    positives = sum(truth)
    if not positives:
        return None
    total, recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = [t for s, t in zip(scores, truth, strict=True) if s >= threshold]
        total += (sum(chosen) / positives - recall) * sum(chosen) / len(chosen)
        recall = sum(chosen) / positives
    return total


def naive_mean_average_precision(scores: np.ndarray, targets: np.ndarray) -> float:
    columns = zip(scores.T.tolist(), targets.T.tolist(), strict=True)
    found = [value for value in (naive_average_precision(s, t) for s, t in columns) if value is not None]
    return 100 * sum(found) / len(found)


def drawn(seed: int, *, ties: bool, items: int = 40, classes: int = 6) -> tuple[np.ndarray, np.random.Generator]:
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(items, classes))
    return (np.round(scores) if ties else scores), generator


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_accuracy_equals_the_loop(seed: int, ties: bool) -> None:
    scores, generator = drawn(seed, ties=ties)
    targets = generator.integers(0, 6, 40)
    assert Accuracy()(scores, targets) == pytest.approx(naive_accuracy(scores, targets))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_mean_average_precision_equals_the_loop(seed: int, ties: bool) -> None:
    scores, generator = drawn(seed, ties=ties)
    targets = (generator.random((40, 6)) < 0.3).astype(np.uint8)
    targets[:, 2] = 0
    targets[:, 3] = 1
    value = MeanAveragePrecision()(scores, targets)
    assert value == pytest.approx(naive_mean_average_precision(scores, targets), rel=1e-12)
    shuffled = generator.permutation(40)
    assert MeanAveragePrecision()(scores[shuffled], targets[shuffled]) == pytest.approx(value, rel=1e-12)


def test_accuracy_at_its_limits() -> None:
    scores = np.eye(3)
    assert Accuracy()(scores, np.array([0, 1, 2])) == 100
    assert Accuracy()(scores, np.array([1, 2, 0])) == 0
    assert Accuracy()(np.array([[0.3]]), np.array([0])) == 100
    assert Accuracy()(np.ones((4, 2)), np.array([0, 1, 1, 1])) == 25


def test_mean_average_precision_at_its_limits() -> None:
    metric = MeanAveragePrecision()
    truth = np.array([[1], [1], [0], [0]])
    assert metric(np.array([[4.0], [3.0], [2.0], [1.0]]), truth) == pytest.approx(100)
    assert metric(np.array([[1.0], [2.0], [3.0], [4.0]]), truth) == pytest.approx(100 * (1 / 3 + 2 / 4) / 2)
    assert metric(np.zeros((4, 1)), truth) == pytest.approx(50)
    assert metric(np.array([[0.2, 0.9]]), np.array([[1, 0]])) == pytest.approx(100)
    assert metric(np.array([[np.inf], [0.0], [-np.inf], [-np.inf]]), truth) == pytest.approx(100)


def test_only_the_order_within_a_class_counts() -> None:
    scores, generator = drawn(9, ties=False)
    targets = (generator.random((40, 6)) < 0.3).astype(np.uint8)
    metric = MeanAveragePrecision()
    assert metric(np.exp(scores) * np.arange(1, 7), targets) == pytest.approx(metric(scores, targets))


def test_nothing_to_score_is_nan() -> None:
    assert math.isnan(Accuracy()(np.zeros((0, 3)), np.zeros(0, dtype=np.int64)))
    assert math.isnan(MeanAveragePrecision()(np.zeros((0, 3)), np.zeros((0, 3), dtype=np.uint8)))
    assert math.isnan(MeanAveragePrecision()(np.ones((4, 3)), np.zeros((4, 3), dtype=np.uint8)))


def test_a_diverged_model_scores_nan_rather_than_luck() -> None:
    scores = np.array([[0.1, 0.9], [np.nan, np.nan]])
    assert math.isnan(Accuracy()(scores, np.array([1, 0])))
    assert math.isnan(MeanAveragePrecision()(scores, np.array([[0, 1], [1, 0]])))


@pytest.mark.parametrize("targets", [np.array([0, 3]), np.array([-1, 0]), np.array([0, 1, 2]), np.array([[0], [1]])])
def test_accuracy_refuses_targets_that_do_not_fit(targets: np.ndarray) -> None:
    with pytest.raises(UserError, match="metric accuracy"):
        Accuracy()(np.zeros((2, 3)), targets)


@pytest.mark.parametrize("targets", [np.array([[0, 2], [1, 0]]), np.array([0, 1]), np.array([[0, 1]])])
def test_mean_average_precision_refuses_targets_that_do_not_fit(targets: np.ndarray) -> None:
    with pytest.raises(UserError, match="metric mean-average-precision"):
        MeanAveragePrecision()(np.zeros((2, 2)), targets)


def test_mean_average_precision_is_quick_on_a_test_set() -> None:
    scores, generator = drawn(1, ties=False, items=4000, classes=20)
    targets = (generator.random(scores.shape) < 0.2).astype(np.uint8)
    start = time.perf_counter()
    MeanAveragePrecision()(scores, targets)
    # 15 ms where nothing else runs; a loop over thresholds takes seconds.
    assert time.perf_counter() - start < 0.5
