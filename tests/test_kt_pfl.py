"""KT-pFL: coefficients and teachers against naive versions, and what crosses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench import messages
from fedbench.errors import UserError
from fedbench.suite import load
from fedbench_baselines.kt_pfl import KTpFL, coefficient_gradient, onto_simplex, step_size, updated
from fedbench_baselines.public_logits import divergence

sys.path.append(str(Path(__file__).parent))
from public_exchange import (
    ALONE,
    CLASSES,
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
    server,
)
from spies import verbs
from tiny import WriteSuite, host, program


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def soft_predictions(users: int, rows: int = 6, classes: int = 4, seed: int = 0) -> Tensor:
    """(N, rows·classes) float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(users, rows, classes, dtype=torch.float64, generator=generator).softmax(2).flatten(1)


def naive_loss(row: Tensor, own: Tensor, soft: Tensor, rho: float) -> Tensor:
    """What the server minimises in one user's coefficients."""
    teacher = torch.zeros_like(own)
    for coefficient, other in zip(row, soft, strict=True):
        teacher = teacher + coefficient * other
    mean = torch.zeros((), dtype=torch.float64)
    for coefficient in row:
        mean = mean + (coefficient - 1 / len(row)) ** 2 / len(row)
    return ((own - teacher) ** 2).mean() + rho * mean


def naive_step(row: Tensor, gradient: Tensor) -> Tensor:
    """One step whose size is multiplied or divided by 5, five times at most, towards a mean of 0.01."""
    average, rate = gradient.abs().sum().item() / len(row), 1.0
    for _ in range(5):
        if average > 0.01:
            average, rate = average / 5, rate / 5
        if average < 0.01:
            average, rate = average * 5, rate * 5
    return row - rate * gradient


@pytest.mark.parametrize("users", [2, 3, 5])
@pytest.mark.parametrize("rho", [0.7, 3.0])
def test_the_gradient_is_that_of_the_servers_loss(users: int, rho: float) -> None:
    soft = soft_predictions(users)
    coefficients = torch.rand(users, users, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = coefficient_gradient(coefficients, soft, rho)
    for user in range(users):
        row = coefficients[user].clone().requires_grad_()
        naive_loss(row, soft[user], soft, rho).backward()  # type: ignore[no-untyped-call]
        assert torch.allclose(found[user], row.grad, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e-7, 1e-4, 0.003, 0.02, 0.3, 7.0, 1e4])
def test_a_step_is_rescaled_as_in_the_official_code(scale: float) -> None:
    gradient = scale * torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    row = torch.full((3,), 1 / 3, dtype=torch.float64)
    size = step_size(gradient)
    assert torch.allclose(row - size * gradient, naive_step(row, gradient), rtol=1e-12)
    if 1e-5 < scale < 100:
        assert 0.01 < size * gradient.abs().mean() <= 0.05
    assert 5.0**-5 * 0.99 < size < 5.0**5 * 1.01


def test_no_gradient_is_no_step() -> None:
    soft = soft_predictions(1).repeat(3, 1)
    equal = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    for rows in ("softmax", "simplex"):
        assert torch.allclose(updated(equal, soft, rho=0.7, rows=rows), equal, atol=1e-12)


@pytest.mark.parametrize("rows", ["softmax", "simplex"])
def test_updated_rows_are_steps_brought_back_to_sum_one(rows: str) -> None:
    soft, coefficients = soft_predictions(3), torch.full((3, 3), 1 / 3, dtype=torch.float64)
    found = updated(coefficients, soft, rho=0.7, rows=rows)
    gradient = coefficient_gradient(coefficients, soft, 0.7)
    for user in range(3):
        row = naive_step(coefficients[user], gradient[user])
        simplex = row + (1 - row.sum()) / 3  # near the middle no entry is cut off
        expected = simplex if rows == "simplex" else (5 * row).exp() / (5 * row).exp().sum()
        assert torch.allclose(found[user], expected, atol=1e-12)
        assert found[user].sum().item() == pytest.approx(1) and found[user].min() >= 0


def test_the_nearest_point_of_the_simplex() -> None:
    generator = torch.Generator().manual_seed(3)
    for size in (1, 2, 5):
        for _ in range(20):
            row = torch.randn(size, dtype=torch.float64, generator=generator)
            low, high = float(row.min()) - 2, float(row.max())
            for _ in range(100):  # the shift after which the positive parts sum to 1, by bisection
                middle = (low + high) / 2
                low, high = (middle, high) if float((row - middle).clamp_min(0).sum()) > 1 else (low, middle)
            assert torch.allclose(onto_simplex(row), (row - low).clamp_min(0), atol=1e-10)
    inside = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    assert torch.allclose(onto_simplex(inside), inside, atol=1e-12)


@pytest.mark.parametrize("rows", ["softmax", "simplex"])
def test_who_predicts_alike_gets_more_weight_than_an_outsider(rows: str) -> None:
    one, other = soft_predictions(2, seed=4)
    soft = torch.stack([one, 0.9 * one + 0.1 * other, other])
    equal = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    coefficients = updated(equal, soft, rho=0.7, rows=rows)
    assert coefficients[0, 1] > coefficients[0, 2] and coefficients[1, 0] > coefficients[1, 2]
    assert coefficients[2, 2] > coefficients[2, 0]


@pytest.mark.parametrize(("name", "multi_label"), [("user1", True), ("user3", False)])
def test_users_send_soft_predictions_and_distil_at_the_temperature(path: Path, name: str, multi_label: bool) -> None:
    user: Any = program(path, "kt-pfl", name=name, temperature=4.0)
    outputs = torch.stack([user.outputs(user.public_rows(batch)) for batch in batches()]).detach()
    soft = user.predict(batches())["outputs"]
    expected = (outputs / 4).sigmoid() if multi_label else (outputs / 4).softmax(2)
    assert torch.allclose(soft, expected, atol=1e-6)
    target = soft[1].double()
    assert user.distance(outputs[0].double(), target).item() == pytest.approx(
        divergence(outputs[0].double() / 4, target, multi_label=multi_label).item(), rel=1e-12
    )


def test_a_round_is_fit_predict_and_digest_towards_the_users_own_mixture(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "kt-pfl", tmp_path)
    assert verbs(memory) == ["fit", "predict", "digest"] * R + ["fit"]
    assert result["touched"] == PARTNERS
    rows = {user: torch.tensor([0.5, 0.5], dtype=torch.float64) for user in PARTNERS}
    for r, (predict, digest) in enumerate(zip(memory[1::3], memory[2::3], strict=True)):
        assert list(predict.sent) == list(digest.sent) == PARTNERS
        for group in GROUPS:
            soft = torch.stack([predict.replies[user]["outputs"] for user in group])
            assert soft.shape == (2, T, B, CLASSES[TASKS[group[0]]])
            if TASKS[group[0]] != "mlc":
                assert torch.allclose(soft.sum(3), torch.ones(2, T, B), atol=1e-5)
            for place, user in enumerate(group):
                leaf = rows[user].clone().requires_grad_()
                flat = soft.flatten(1).double()
                naive_loss(leaf, flat[place], flat, 0.7).backward()  # type: ignore[no-untyped-call]
                rows[user] = (5 * naive_step(rows[user], leaf.grad)).softmax(0)  # type: ignore[arg-type]
                teacher = sum(float(c) * each for c, each in zip(rows[user], soft, strict=True))
                assert torch.allclose(digest.sent[user]["targets"], teacher, atol=1e-6)  # type: ignore[arg-type]
                own = result["rounds"][r]["log"]["own coefficient"][user]
                assert own == pytest.approx(float(rows[user][place]), abs=1e-9)


def test_it_costs_the_predictions_of_a_rounds_rows(path: Path, tmp_path: Path) -> None:
    _, result = exchanges(path, "kt-pfl", tmp_path)
    outputs = sum(T * B * CLASSES[TASKS[user]] * 4 for user in PARTNERS)
    assert result["bytes"]["tensor_up"] == outputs
    assert result["bytes"]["tensor_down"] == outputs + len(PARTNERS) * T * B * 8


def test_a_user_alone_trains_as_in_local_training_and_the_others_do_not(path: Path, tmp_path: Path) -> None:
    assert changed(path, "kt-pfl", tmp_path) == PARTNERS
    assert KTpFL().touches(load(str(path)).users) == PARTNERS


def test_every_label_space_starts_from_equal_coefficients(path: Path) -> None:
    made = server(path, KTpFL())
    for group in [*GROUPS, [ALONE]]:
        for user in group:
            row = made.coefficients[made.order.index(user)]
            expected = [1 / len(group) if other in group else 0.0 for other in made.order]
            assert row.tolist() == expected


def test_a_restored_server_goes_on_bit_for_bit(path: Path) -> None:
    one, two = server(path, KTpFL()), server(path, KTpFL())
    one.learn(GROUPS[0], soft_predictions(2))
    one.learn(GROUPS[1], soft_predictions(2, seed=1))
    state = messages.pack(one.packed())
    assert state != messages.pack(two.packed())
    two.unpacked(messages.unpack(state))
    assert messages.pack(two.packed()) == state
    rows = [each.learn(GROUPS[1], soft_predictions(2, seed=2)) for each in (one, two)]
    assert torch.equal(*rows) and torch.equal(one.coefficients, two.coefficients)


def test_rows_are_rescaled_to_the_users_that_are_left(write_suite: WriteSuite) -> None:
    path = five_users(write_suite)
    path.write_text(path.read_text().replace('task = "ic100"', 'task = "mlc"').replace('task = "ic10"', 'task = "mlc"'))
    made = server(path, KTpFL(rows="simplex", rho=1.0))
    order = made.order
    left = ["user1", "user3", "user4"]
    members = made.places(left)
    made.coefficients[0] = torch.tensor([0.5, 0.2, 0.3, 0.0, 0.0])
    made.coefficients[2] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])  # all it had is gone
    soft = soft_predictions(3)
    start = torch.tensor([[5 / 8, 3 / 8, 0.0], [1 / 3] * 3, [1 / 3] * 3], dtype=torch.float64)
    expected = updated(start, soft, rho=1.0, rows="simplex")
    before = made.coefficients.clone()
    assert torch.allclose(made.learn(left, soft), expected, atol=1e-7)
    assert torch.allclose(made.coefficients[members[:, None], members], expected, atol=1e-7)
    gone = [order.index(user) for user in order if user not in left]
    assert torch.equal(made.coefficients[gone], before[gone])


def test_a_restored_user_goes_on_bit_for_bit(path: Path) -> None:
    hosts = [host(path, "kt-pfl") for _ in range(2)]

    def round_of(user: Any, seed: int) -> None:
        call(user, "fit")
        outputs = call(user, "predict", batches=batches(seed))["outputs"]
        call(user, "digest", targets=outputs.flip(1))

    round_of(hosts[0], 0)
    state = hosts[0].save()
    hosts[1].restore(state)
    assert hosts[1].save() == state
    for user in hosts:
        round_of(user, 1)
    assert hosts[0].save() == hosts[1].save() != state


@pytest.mark.parametrize("option", ["rate", "rho", "temperature"])
def test_options_are_above_zero(option: str) -> None:
    with pytest.raises(UserError, match=f"'{option}' of kt-pfl"):
        KTpFL(**{option: 0.0})  # type: ignore[arg-type]
