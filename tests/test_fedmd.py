"""FedMD: consensus and digest against naive versions, and what crosses; also what all methods on outputs share."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench.errors import UserError
from fedbench_baselines.fedmd import FedMD

sys.path.append(str(Path(__file__).parent))
from public_exchange import (
    CLASSES,
    DIFFERENT_RATES,
    GROUPS,
    PARTNERS,
    TASKS,
    B,
    R,
    T,
    batches,
    call,
    changed,
    exchanges,
    five_users,
)
from spies import verbs
from tiny import WriteSuite, host, program


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def test_the_digest_is_the_mean_absolute_error(path: Path) -> None:
    user: Any = program(path, "fedmd")
    outputs = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 0.25]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0.0, -1.0, 0.5], [2.0, 1.0, 0.0]], dtype=torch.float64)
    loss = user.distance(outputs, target)
    naive = sum(abs(outputs[b, c].item() - target[b, c].item()) for b in range(2) for c in range(3)) / 6
    assert loss.item() == pytest.approx(naive, abs=1e-12)
    loss.backward()
    assert torch.equal(outputs.grad, (outputs - target).sign().detach() / 6)  # type: ignore[arg-type]


def test_a_round_is_fit_predict_and_digest_towards_the_groups_mean(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "fedmd", tmp_path)
    assert verbs(memory) == ["fit", "predict", "digest"] * R + ["fit"]
    assert result["touched"] == PARTNERS
    for fit, predict, digest in zip(memory[:-1:3], memory[1::3], memory[2::3], strict=True):
        assert list(fit.sent) == list(TASKS)
        assert list(predict.sent) == list(digest.sent) == PARTNERS
        rows = predict.sent["user1"]["batches"]
        assert rows.shape == (T, B) and all(len(set(batch.tolist())) == B for batch in rows)
        assert all(torch.equal(sent["batches"], rows) for sent in predict.sent.values())
        for group in GROUPS:
            scores = [predict.replies[user]["outputs"] for user in group]
            assert all(each.shape == (T, B, CLASSES[TASKS[group[0]]]) for each in scores)
            assert all(each.dtype == torch.float32 for each in scores)
            for user in group:
                assert torch.allclose(digest.sent[user]["targets"], (scores[0] + scores[1]) / 2, atol=1e-6)
        losses = {user: reply["loss"] for user, reply in digest.replies.items()}
        assert result["rounds"][memory.index(fit) // 3]["log"]["digest loss"] == losses


def test_it_costs_the_scores_of_a_rounds_rows(path: Path, tmp_path: Path) -> None:
    _, result = exchanges(path, "fedmd", tmp_path)
    outputs = sum(T * B * CLASSES[TASKS[user]] * 4 for user in PARTNERS)
    assert result["bytes"]["tensor_up"] == outputs
    assert result["bytes"]["tensor_down"] == outputs + len(PARTNERS) * T * B * 8


def test_public_rows_are_those_of_every_method(path: Path, tmp_path: Path) -> None:
    rows = [
        [exchange.sent["user1"]["batches"].tolist() for exchange in memory if "batches" in exchange.sent["user1"]]
        for memory, _ in (exchanges(path, method, tmp_path) for method in ("fedmd", "simclr"))
    ]
    assert rows[0] == rows[1] and len(rows[0]) == R


def test_a_user_alone_trains_as_in_local_training_and_the_others_do_not(path: Path, tmp_path: Path) -> None:
    assert changed(path, "fedmd", tmp_path) == PARTNERS


@pytest.mark.parametrize("head", ["features", "embedding"])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "restarts"])
def test_a_public_phase_is_t_steps_of_the_whole_model_at_its_rates(
    write_suite: WriteSuite, head: str, schedule: str
) -> None:
    place = ("[protocol]", f'[protocol]\nhead = "{head}"\nschedule = "{schedule}"')
    path = five_users(write_suite, DIFFERENT_RATES, place)
    user: Any = program(path, "fedmd", rate=0.5)
    user.fit()
    before = copy.deepcopy(user.representation.projection.state_dict())
    twin = copy.deepcopy(user.representation), copy.deepcopy(user.head)
    rates = {"backbone": 5e-4, "projection": 2e-3, "head": 1e-3}
    parts = {"backbone": twin[0].backbone, "projection": twin[0].projection, "head": twin[1]}
    optimizer = torch.optim.AdamW(
        [{"params": parts[name].parameters(), "lr": rate} for name, rate in rates.items()], weight_decay=0.01
    )
    rows, targets = batches(), torch.randn(T, B, 10, generator=torch.Generator().manual_seed(1))
    user.predict(rows)
    total = 0.0
    for t in range(T):
        user.schedule(user.public_optimizer, t / T, R)  # checked in tests/test_user.py
        for group, copied in zip(user.public_optimizer.param_groups, optimizer.param_groups, strict=True):
            copied["lr"] = group["lr"]
        x = user.participant.public.rows(rows[t], 0)
        features = twin[0].backbone(x)
        outputs = twin[1](twin[0].projection(features) if head == "embedding" else features)
        loss = (outputs - targets[t]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
    reply = user.digest(targets)
    assert reply["loss"] == pytest.approx(total / T, rel=1e-5)
    trained = {
        "backbone": user.representation.backbone,
        "projection": user.representation.projection,
        "head": user.head,
    }
    for name, module in trained.items():
        for value, copied in zip(module.parameters(), parts[name].parameters(), strict=True):
            assert torch.allclose(value, copied, atol=1e-5), name
    moved = not all(torch.equal(before[name], value) for name, value in trained["projection"].state_dict().items())
    assert moved == (head == "embedding")
    assert [group["rate"] for group in user.public_optimizer.param_groups] == pytest.approx(list(rates.values()))
    assert user.public_steps == T


def test_predictions_are_those_of_the_model_in_evaluation_mode(path: Path) -> None:
    user: Any = program(path, "fedmd")
    modes: list[bool] = []
    user.head.register_forward_hook(lambda module, inputs, outputs: modes.append(module.training))
    outputs = user.predict(batches())["outputs"]
    assert modes == [False] * T and not outputs.requires_grad
    expected = [user.outputs(user.participant.public.rows(batch, 0)) for batch in batches()]
    assert torch.equal(outputs, torch.stack(expected).detach())
    modes.clear()
    user.digest(outputs)
    assert modes == [True] * T


def test_a_digest_needs_as_many_targets_as_predictions(path: Path) -> None:
    user: Any = program(path, "fedmd")
    with pytest.raises(ValueError, match="zip"):
        user.digest(torch.zeros(T, B, 10))


def test_a_restored_user_goes_on_bit_for_bit(path: Path) -> None:
    hosts = [host(path, "fedmd") for _ in range(2)]

    def round_of(user: Any, seed: int) -> None:
        call(user, "fit")
        outputs = call(user, "predict", batches=batches(seed))["outputs"]
        call(
            user, "digest", targets=outputs + torch.randn(outputs.shape, generator=torch.Generator().manual_seed(seed))
        )

    round_of(hosts[0], 0)
    state = hosts[0].save()
    hosts[1].restore(state)
    assert hosts[1].save() == state
    for user in hosts:
        round_of(user, 1)
    assert hosts[0].save() == hosts[1].save() != state
    assert hosts[1].program.public_steps == 2 * T  # type: ignore[attr-defined]


def test_who_loses_its_partner_goes_on_alone(
    write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = five_users(write_suite, ("others = 2", 'others = 2\non_failure = "skip"'))
    predict = FedMD.User.predict  # type: ignore[attr-defined]

    def failing(self: Any, batches: Tensor) -> dict[str, Any]:
        if self.name == "user2":
            raise RuntimeError("no such luck")
        return predict(self, batches)  # type: ignore[no-any-return]

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(FedMD.User, "predict", failing)
    memory, _ = exchanges(path, "fedmd", tmp_path)
    asked = [(exchange.verb, list(exchange.sent)) for exchange in memory]
    left, pair = [user for user in TASKS if user != "user2"], ["user3", "user4"]
    assert asked == [
        ("fit", list(TASKS)),
        ("predict", PARTNERS),
        ("digest", pair),
        ("fit", left),
        ("predict", pair),
        ("digest", pair),
        ("fit", left),
    ]


def test_a_rate_is_above_zero() -> None:
    with pytest.raises(UserError, match="'rate' of fedmd"):
        FedMD(rate=0.0)
