"""What a metric must do: a number in range that is better for better scores, whatever the order of the items."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedbench.conformance import Check, Failed, Subject
from fedbench.seeds import numpy_generator

ITEMS, CLASSES = 40, 5


def targets_of(*, multi_label: bool) -> np.ndarray:
    """Class numbers (N,), or 0 and 1 (N, C); every class occurs."""
    numbers = np.arange(ITEMS, dtype=np.int64) % CLASSES
    plain = np.eye(CLASSES, dtype=np.uint8)[numbers]
    return plain | np.roll(plain, 1, axis=1) if multi_label else numbers


def scores_of(targets: np.ndarray, sharpness: float) -> np.ndarray:
    """Scores that are right for a sharpness of 1, random for 0 and wrong for -1."""
    noise = numpy_generator("conformance", "metric").random((ITEMS, CLASSES))
    right = targets.astype(np.float64) if targets.ndim == 2 else np.eye(CLASSES)[targets]
    return sharpness * right + (1 - abs(sharpness)) * noise


def taken(subject: Subject) -> tuple[Any, np.ndarray]:
    """The metric, and targets that it takes: class numbers, else several classes an item."""
    metric, refusal = subject.create(), None
    for multi_label in (False, True):
        targets = targets_of(multi_label=multi_label)
        try:
            metric(scores_of(targets, 0.0), targets)
        except Exception as error:
            refusal = refusal or error
            continue
        return metric, targets
    assert refusal is not None
    raise refusal


def value(subject: Subject) -> str:
    """A finite number with a label, from 0 to 100 where higher is better."""
    metric, targets = taken(subject)
    if not isinstance(getattr(metric, "label", None), str) or not metric.label:
        raise Failed(f"label is {getattr(metric, 'label', None)!r}, no text", at=subject.target)
    for sharpness in (-1.0, 0.0, 1.0):
        found = metric(scores_of(targets, sharpness), targets)
        if not isinstance(found, float) or not math.isfinite(found):
            raise Failed(f"it returned {found!r}, no finite float", at=subject.target.__call__)
        if found < 0 or (metric.higher_is_better and found > 100):
            most = "100" if metric.higher_is_better else "more"
            raise Failed(f"it returned {found:.6g}, expected 0 to {most}", at=subject.target.__call__)
    return str(metric.label)


def direction(subject: Subject) -> str:
    """Right scores are better than random ones, and these better than wrong ones."""
    metric, targets = taken(subject)
    wrong, random, right = (metric(scores_of(targets, sharpness), targets) for sharpness in (-1.0, 0.0, 1.0))
    found = f"wrong {wrong:.4g}, random {random:.4g}, right {right:.4g}"
    if not (wrong < random < right if metric.higher_is_better else wrong > random > right):
        raise Failed(f"{found}; better is {'higher' if metric.higher_is_better else 'lower'}", at=subject.target)
    return found


def order_of_items(subject: Subject) -> None:
    """Items are a set, also where scores are equal."""
    metric, targets = taken(subject)
    order = numpy_generator("conformance", "order").permutation(ITEMS)
    for scores in (scores_of(targets, 0.2), scores_of(targets, 0.2).round(1)):
        one, two = metric(scores, targets), metric(scores[order], targets[order])
        if not math.isclose(one, two, rel_tol=1e-9, abs_tol=1e-9):
            raise Failed(f"{one:.9g}, and {two:.9g} in another order of items", at=subject.target.__call__)


def inputs(subject: Subject) -> None:
    """It leaves scores and targets as they are, and says the same twice."""
    metric, targets = taken(subject)
    scores = scores_of(targets, 0.2)
    given = scores.copy(), targets.copy()
    values = [metric(*given) for _ in range(2)]
    if not (np.array_equal(given[0], scores) and np.array_equal(given[1], targets)):
        raise Failed("it changed its inputs", at=subject.target.__call__)
    if values[0] != values[1]:
        raise Failed(f"{values[0]:.9g}, and {values[1]:.9g} for the same again", at=subject.target.__call__)


def no_number(subject: Subject) -> None:
    """A score that is no number gives NaN or an error, never a value that looks sound."""
    metric, targets = taken(subject)
    scores = scores_of(targets, 1.0)
    scores[0, 0] = float("nan")
    try:
        found = metric(scores, targets)
    except Exception:
        return
    if math.isfinite(found):
        raise Failed(f"with a score that is NaN it returned {found:.6g}", at=subject.target.__call__)


_FIRST = ("value",)

CHECKS = (
    Check("value", value, "return a float from 0 to 100 (percent), or from 0 up where lower is better"),
    Check("direction", direction, "set higher_is_better to what the metric means", _FIRST),
    Check("inputs", inputs, "change nothing that was given in place (sort, +=)", _FIRST),
    Check("order of items", order_of_items, "treat items of equal score alike", ("inputs",)),
    Check("no number", no_number, "return NaN where a score is NaN", _FIRST),
)
