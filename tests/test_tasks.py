"""Tasks: their losses and scores against the formulas written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedbench.errors import UserError
from fedbench_plugins.tasks.classification import ImageClassification
from fedbench_plugins.tasks.multi_label import MultiLabelClassification

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]])


def test_classification_loss_is_cross_entropy() -> None:
    total = [math.log(sum(math.exp(v) for v in row)) for row in LOGITS.tolist()]
    expected = ((total[0] - 2.0) + (total[1] - 0.5)) / 2
    assert ImageClassification().loss(LOGITS, torch.tensor([0, 1])).item() == pytest.approx(expected, rel=1e-6)


def test_label_smoothing_mixes_in_the_uniform_target() -> None:
    targets = torch.tensor([0, 1])
    plain = ImageClassification().loss(LOGITS, targets)
    uniform = torch.stack([ImageClassification().loss(LOGITS, torch.full((2,), c)) for c in range(3)]).mean()
    torch.testing.assert_close(
        ImageClassification(label_smoothing=0.2).loss(LOGITS, targets), 0.8 * plain + 0.2 * uniform
    )
    for wrong in (-0.1, 1.0):
        with pytest.raises(UserError, match="label_smoothing"):
            ImageClassification(label_smoothing=wrong)


def test_multi_label_loss_is_binary_cross_entropy_of_uint8_targets() -> None:
    targets = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=torch.uint8)
    terms = [
        math.log1p(math.exp(-v if t else v))
        for row, truth in zip(LOGITS.tolist(), targets.tolist(), strict=True)
        for v, t in zip(row, truth, strict=True)
    ]
    expected = sum(terms) / len(terms)
    assert MultiLabelClassification().loss(LOGITS, targets).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("task", [ImageClassification(), MultiLabelClassification()])
def test_scores_are_float64_probabilities_in_the_order_of_the_outputs(
    task: ImageClassification | MultiLabelClassification,
) -> None:
    outputs = LOGITS.clone().requires_grad_()
    scores = task.scores(outputs)
    assert scores.dtype == np.float64 and scores.shape == (2, 3)
    assert ((scores > 0) & (scores < 1)).all()
    assert (np.argsort(scores, axis=1, kind="stable") == np.argsort(LOGITS.numpy(), axis=1, kind="stable")).all()


def test_classification_scores_sum_to_one_and_multi_label_scores_stand_alone() -> None:
    np.testing.assert_allclose(ImageClassification().scores(LOGITS).sum(1), 1)
    assert MultiLabelClassification().scores(LOGITS)[0, 0] == pytest.approx(1 / (1 + math.exp(-2)))


@pytest.mark.parametrize("task", [ImageClassification(), MultiLabelClassification()])
def test_heads_are_linear_and_trained_by_the_loss(task: ImageClassification | MultiLabelClassification) -> None:
    torch.manual_seed(0)
    head = task.head(5, 3)
    outputs = head(torch.randn(4, 5))
    assert outputs.shape == (4, 3)
    multi = isinstance(task, MultiLabelClassification)
    targets = torch.ones(4, 3, dtype=torch.uint8) if multi else torch.tensor([0, 1, 2, 0])
    loss = task.loss(outputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.shape == () and all(parameter.grad is not None for parameter in head.parameters())
