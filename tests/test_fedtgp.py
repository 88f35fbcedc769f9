"""FedTGP: margin, contrastive loss and the server's training against naive versions; its exchange is FedProto's."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench.errors import UserError
from fedbench_baselines.fedtgp import FedTGP, TrainablePrototypes, adaptive_margin, contrastive_loss

sys.path.append(str(Path(__file__).parent))
from public_exchange import CLASSES, GROUPS, PARTNERS, D, R, changed, exchanges, five_users, server
from shared_architecture import Cell, check_resume
from tiny import WriteSuite

LABELS = torch.tensor([0, 2, 3, 0, 3, 3])


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distance(one: Tensor, two: Tensor) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one.tolist(), two.tolist(), strict=True)))


def sent_by(*owned: list[int], classes: int = 10, seed: int = 0) -> list[dict[str, Tensor]]:
    """What users with these classes might send."""
    return [
        {
            "prototypes": torch.nn.functional.normalize(numbers(len(has), D, seed=seed + n).float(), dim=1),
            "classes": torch.tensor([k in has for k in range(classes)]),
        }
        for n, has in enumerate(owned)
    ]


# -- equations


def test_the_margin_is_between_the_means_of_classes() -> None:
    rows = numbers(6, 3)
    centres = {}
    for k in (0, 2, 3):
        items = [rows[p] for p in range(6) if LABELS[p] == k]
        centres[k] = sum(items) / len(items)  # type: ignore[arg-type]
    apart = {k: [distance(centres[k], centres[m]) for m in centres if m != k] for k in centres}
    farthest = max(max(values) for values in apart.values())
    nearest = max(min(values) for values in apart.values())
    assert nearest < farthest
    for between, wanted in (("farthest", farthest), ("nearest", nearest)):
        assert adaptive_margin(rows, LABELS, threshold=100.0, between=between) == pytest.approx(wanted, rel=1e-12)
        assert adaptive_margin(rows, LABELS, threshold=wanted / 2, between=between) == wanted / 2


@pytest.mark.parametrize("between", ["farthest", "nearest"])
def test_the_margin_of_one_class_is_the_threshold(between: str) -> None:
    assert adaptive_margin(numbers(3, 4), torch.tensor([5, 5, 5]), threshold=7.0, between=between) == 7.0


@pytest.mark.parametrize("margin", [0.0, 1.5])
def test_the_contrastive_loss_and_its_gradient(margin: float) -> None:
    rows, (trained, same) = numbers(6, 3), (numbers(5, 3, seed=1).requires_grad_() for _ in range(2))
    loss = contrastive_loss(rows, LABELS, trained, margin)
    total = torch.zeros((), dtype=torch.float64)
    for row, k in zip(rows, LABELS.tolist(), strict=True):
        own = torch.exp(-((row - same[k]).square().sum().sqrt() + margin))
        others = sum(torch.exp(-(row - same[m]).square().sum().sqrt()) for m in range(5) if m != k)
        total = total - torch.log(own / (own + others))
    expected = total / 6
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    loss.backward()
    expected.backward()
    assert torch.allclose(trained.grad, same.grad, atol=1e-12)  # type: ignore[arg-type]


def test_a_prototype_that_is_met_exactly_has_a_finite_gradient() -> None:
    trained = numbers(3, 4).requires_grad_()
    contrastive_loss(trained.detach(), torch.arange(3), trained, 1.0).backward()
    assert torch.isfinite(trained.grad).all()  # type: ignore[arg-type]


def test_trainable_prototypes_are_vectors_through_two_layers() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = TrainablePrototypes(7, 4)
    first, _, second = module.network
    hidden = (module.vectors.weight @ first.weight.T + first.bias).clamp_min(0)
    assert module().shape == (7, 4)
    assert torch.allclose(module(), hidden @ second.weight.T + second.bias, atol=1e-6)


# -- the server


def test_it_learns_epochs_of_batches_at_its_rate(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = server(path, FedTGP(epochs=3, batch=4, server_rate=0.05))
    sent = sent_by([0, 1, 4], [1, 3], [4])
    rows, labels = torch.cat([one["prototypes"] for one in sent]), torch.tensor([0, 1, 4, 1, 3, 4])
    module, twin = made.initial(10), TrainablePrototypes(10, D)
    twin.load_state_dict(module.state_dict())
    state = made._generator.get_state()
    loss = made.learn(module, rows, labels, 0.5)
    generator = torch.Generator()
    generator.set_state(state)
    for _ in range(3):
        order = torch.randperm(6, generator=generator)
        values = []
        for batch in (order[:4], order[4:]):
            twin.zero_grad()
            value = contrastive_loss(rows[batch], labels[batch], twin(), 0.5)
            value.backward()  # type: ignore[no-untyped-call]
            values.append(value.item())
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter -= 0.05 * parameter.grad  # type: ignore[operator]
    assert loss == pytest.approx((4 * values[0] + 2 * values[1]) / 6, rel=1e-5)
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_it_learns_at_root_d_times_the_scale_of_the_embedding(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = server(path, FedTGP(epochs=1))
    seen: list[tuple[Tensor, Tensor, float]] = []
    learn = made.learn

    def remembered(module: Any, rows: Tensor, labels: Tensor, margin: float) -> float:
        seen.append((rows, labels, margin))
        return learn(module, rows, labels, margin)  # type: ignore[no-any-return]

    monkeypatch.setattr(made, "learn", remembered)
    monkeypatch.setattr(made, "log", lambda *_: None)
    sent = sent_by([0, 1, 4], [1, 3])
    found = made.globals_of(GROUPS[0], sent)
    rows, labels, margin = seen[0]
    assert torch.allclose(rows, math.sqrt(D) * torch.cat([one["prototypes"] for one in sent]), atol=1e-6)
    assert labels.tolist() == [0, 1, 4, 1, 3]
    assert margin == adaptive_margin(rows, labels, threshold=100.0, between="farthest")
    assert found["classes"].nonzero().flatten().tolist() == [0, 1, 3, 4]
    assert list(made.trainable) == ["mlc"]
    trained = made.trainable["mlc"]().detach()[[0, 1, 3, 4]]
    assert torch.allclose(found["prototypes"], trained / math.sqrt(D), atol=1e-6)
    assert not found["prototypes"].requires_grad


def test_what_it_learned_is_nearest_to_what_users_sent_and_lies_farther_apart_than_means(path: Path) -> None:
    made = server(path, FedTGP(server_rate=0.05, epochs=200))
    own = sent_by(list(range(10)), seed=5)[0]["prototypes"]
    sent = sent_by(*[list(range(10))] * 3)
    for one in sent:
        one["prototypes"] = torch.nn.functional.normalize(own + one["prototypes"], dim=1)
    made.log = lambda *_: None
    found = made.globals_of(GROUPS[0], sent)["prototypes"]
    rows = torch.cat([one["prototypes"] for one in sent])
    right = torch.cdist(rows, found).argmin(1) == torch.arange(10).repeat(3)
    assert right.float().mean() > 0.95
    means = torch.stack([one["prototypes"] for one in sent]).mean(0)
    assert torch.pdist(found).mean() > 1.5 * torch.pdist(means).mean()


def test_it_goes_on_from_the_last_rounds_prototypes(path: Path) -> None:
    made = server(path, FedTGP(epochs=1, server_rate=1e-6))
    made.log = lambda *_: None
    state = torch.random.get_rng_state()
    first = made.globals_of(GROUPS[0], sent_by([0, 1], [1, 2]))["prototypes"]
    later = made.globals_of(GROUPS[0], sent_by([0, 1], [1, 2], seed=9))["prototypes"]
    assert torch.allclose(first, later, atol=1e-4) and not torch.equal(first, later)
    other = made.globals_of(GROUPS[1], sent_by([0, 1], [1, 2], classes=100))["prototypes"]
    assert not torch.allclose(first, other, atol=1e-2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert made.trainable["ic100"].vectors.weight.shape == (100, D)


# -- the whole


def test_margin_and_loss_are_logged_for_partners(path: Path, tmp_path: Path) -> None:
    _, result = exchanges(path, "fedtgp", tmp_path, epochs=2)
    for record in result["rounds"][:R]:
        for name in ("margin", "server loss"):
            values = record["log"][name]
            assert list(values) == PARTNERS and all(value > 0 for value in values.values())
            assert values["user1"] == values["user2"] != values["user3"] == values["user4"]


def test_the_paper_and_the_code_take_different_margins(path: Path, tmp_path: Path) -> None:
    margins = {}
    for margin in ("farthest", "nearest"):
        _, result = exchanges(path, "fedtgp", tmp_path, epochs=1, margin=margin)
        margins[margin] = result["rounds"][0]["log"]["margin"]["user3"]
    assert 0 < margins["nearest"] < margins["farthest"]


def test_partners_change_and_the_others_are_local_bit_for_bit(path: Path, tmp_path: Path) -> None:
    assert changed(path, "fedtgp", tmp_path, epochs=2) == PARTNERS


def test_a_restored_cell_goes_on_bit_for_bit(path: Path) -> None:
    check_resume(path, "fedtgp", epochs=2)


def test_a_restored_server_knows_its_prototypes(path: Path) -> None:
    cell = Cell(path, "fedtgp", epochs=2)
    cell.play(0)
    again = Cell(path, "fedtgp", epochs=2)
    state = torch.random.get_rng_state()
    again.restore(cell.save())
    assert torch.equal(torch.random.get_rng_state(), state)
    for space, module in cell.server.trainable.items():
        assert module().shape == (CLASSES[space], D)
        assert torch.equal(again.server.trainable[space](), module())


@pytest.mark.parametrize(
    ("name", "value"),
    [("pull", 0.0), ("threshold", -1.0), ("server_rate", 0.0), ("epochs", 0), ("batch", 0)],
)
def test_bad_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"the option '{name}' of fedtgp"):
        FedTGP(**{name: value})
