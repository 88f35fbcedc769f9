"""FedHeNN: kernels, CKA and the proximal term against naive versions, the blocks of a phase, and what crosses."""

from __future__ import annotations

import sys
from itertools import pairwise
from math import exp, sqrt
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbench.errors import UserError
from fedbench.suite import load
from fedbench_baselines.fedhenn import FedHeNN, GramUser, alignment, gram_matrix, symmetric, triangle

sys.path.append(str(Path(__file__).parent))
from public_exchange import TASKS, R, call, changed, exchanges, five_users
from shared_architecture import check_resume
from spies import verbs
from tiny import WriteSuite, host, program

EVERYONE = list(TASKS)
PUBLIC, STEPS = 32, 2
FEW = torch.tensor([7, 3, 30, 11, 0, 21, 16, 5, 28, 9])


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def unit(*shape: int, seed: int = 0) -> Tensor:
    return nn.functional.normalize(numbers(*shape, seed=seed), dim=-1)


def weights(module: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(one, two, strict=True))


def naive_cka(one: Tensor, two: Tensor) -> Tensor:
    """⟨HKH, HLH⟩ / √(⟨HKH, HKH⟩ ⟨HLH, HLH⟩), with H written out."""
    size = len(one)
    centring = torch.eye(size, dtype=one.dtype) - 1 / size
    k, other = centring @ one @ centring, centring @ two @ centring
    hsic = [(x * y).sum() for x, y in ((k, other), (k, k), (other, other))]
    return hsic[0] / (hsic[1] * hsic[2]).sqrt()


# -- equations


@pytest.mark.parametrize("size", [3, 8])
def test_cka_and_its_gradient(size: int) -> None:
    z, target = numbers(size, 4).requires_grad_(), gram_matrix(numbers(size, 6, seed=1))
    again = z.detach().clone().requires_grad_()
    value, expected = alignment(target, gram_matrix(z)), naive_cka(target, again @ again.T)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    value.backward()
    expected.backward()
    assert torch.allclose(z.grad, again.grad, atol=1e-12)  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(lambda own: alignment(target, gram_matrix(own)), (z,))


def test_cka_asks_for_the_same_geometry_only() -> None:
    z, turn = numbers(7, 3), torch.linalg.qr(numbers(5, 3, seed=1))[0]
    moved = 3 * z @ turn.T + numbers(5, seed=2)
    assert alignment(gram_matrix(z), gram_matrix(moved)).item() == pytest.approx(1, abs=1e-12)
    assert alignment(gram_matrix(z), gram_matrix(numbers(7, 3, seed=3))).item() < 0.9


@pytest.mark.parametrize("size", [1, 2])
def test_two_rows_are_always_aligned_and_one_never(size: int) -> None:
    for kernel in ("linear", "rbf"):
        grams = [gram_matrix(unit(size, 4, seed=seed), kernel, 0.5) for seed in (0, 1)]
        assert alignment(*grams).item() == pytest.approx(size - 1, abs=1e-9)


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_equal_rows_have_no_cka_and_no_gradient(kernel: str) -> None:
    row = unit(1, 16, seed=4).float()
    z = (row.repeat(8, 1) + 1e-8 * numbers(8, 16).float()).requires_grad_()
    target = gram_matrix(unit(8, 16).float(), kernel)
    value = alignment(target, gram_matrix(z, kernel))
    value.backward()  # type: ignore[no-untyped-call]
    assert value.item() == 0 and z.grad is not None and not z.grad.any()
    assert alignment(gram_matrix(z.detach(), kernel), target).item() == 0


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_the_rbf_kernel_is_as_wide_as_a_fraction_of_the_median_distance(sigma: float) -> None:
    z = numbers(5, 3)
    squares = [[sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for y in z.tolist()] for x in z.tolist()]
    width = sigma * sqrt(median_low([square for row in squares for square in row]))
    found = gram_matrix(z, "rbf", sigma)
    for i in range(5):
        for j in range(5):
            assert found[i, j].item() == pytest.approx(exp(-squares[i][j] / (2 * width**2)), rel=1e-9)
    assert torch.allclose(gram_matrix(10 * z, "rbf", sigma), found)


def test_the_width_is_a_constant_in_the_gradient() -> None:
    z, same_z = numbers(5, 3).requires_grad_(), numbers(5, 3).requires_grad_()
    median = torch.cdist(z, z).detach().square().median()
    weight = numbers(5, 5, seed=1)
    (weight * gram_matrix(z, "rbf", 0.7)).sum().backward()  # type: ignore[no-untyped-call]
    squares = (same_z.unsqueeze(0) - same_z.unsqueeze(1)).square().sum(-1)
    (weight * torch.exp(-squares / (2 * 0.49 * median))).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(z.grad, same_z.grad, atol=1e-9)  # type: ignore[arg-type]


def test_a_triangle_is_the_whole_of_a_symmetric_matrix() -> None:
    matrix = numbers(5, 5)
    matrix = matrix + matrix.T
    upper = triangle(matrix)
    assert upper.tolist() == [matrix[i, j].item() for i in range(5) for j in range(i, 5)]
    assert torch.equal(symmetric(upper, 5), matrix)
    full = symmetric(upper.float(), 5)
    assert full.dtype == torch.float32 and torch.equal(full, full.T)


# -- the user


@pytest.mark.parametrize(("name", "kernel"), [("user1", "linear"), ("user5", "linear"), ("user3", "rbf")])
def test_users_send_the_gram_matrix_of_their_plain_embeddings(path: Path, name: str, kernel: str) -> None:
    user: Any = program(path, "fedhenn", name=name, kernel=kernel, sigma=0.8)
    user.fit()
    before, order = weights(user.representation) + weights(user.head), user.fit_generator.get_state()
    modes: list[bool] = []
    hook = user.representation.register_forward_hook(lambda module, *_: modes.append(module.training))
    upper = user.compare(FEW)["gram"]
    hook.remove()
    assert modes == [False] and user.representation.training and user.head.training
    assert same(before, weights(user.representation) + weights(user.head))
    assert torch.equal(user.fit_generator.get_state(), order)
    z = user.representation(user.participant.public.rows(FEW, 0)).detach()
    assert upper.shape == (55,) and upper.dtype == torch.float32 and not upper.requires_grad
    assert torch.allclose(symmetric(upper, 10), gram_matrix(z, kernel, 0.8), atol=1e-5)


def test_a_gram_matrix_does_not_depend_on_the_evaluation_batch(write_suite: WriteSuite) -> None:
    found = []
    for size in (3, 1000):
        user: Any = program(five_users(write_suite, ("eval_batch = 50", f"eval_batch = {size}")), "fedhenn")
        found.append(user.compare(FEW)["gram"])
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("place", ["features", "embedding"])
@pytest.mark.parametrize(("name", "kernel"), [("user1", "linear"), ("user3", "linear"), ("user5", "rbf")])
def test_local_training_adds_the_weighted_term_of_a_block(
    write_suite: WriteSuite, place: str, name: str, kernel: str
) -> None:
    path = five_users(write_suite, ("[protocol]", f'[protocol]\nhead = "{place}"'))
    user: Any = program(path, "fedhenn", name=name, kernel=kernel, sigma=0.6)
    local: Any = program(path, "local", name=name)
    x, targets = user.private_batch()
    user.compare(FEW)
    assert torch.equal(user.private_loss(x, targets), local.private_loss(x, targets))
    mean, block = gram_matrix(unit(10, 4, seed=5)).float(), [9, 2, 4, 0, 6]
    user._mean, user._weight, user._blocks = mean, 0.7, iter([torch.tensor(block)])
    z = local.representation(local.participant.public.rows(FEW[block], 0))
    part = torch.tensor([[mean[i, j].item() for j in block] for i in block])
    cka = naive_cka(part, gram_matrix(z, kernel, 0.6))
    assert abs(cka.item() - naive_cka(mean, mean).item()) > 0.05
    expected = local.private_loss(x, targets) + 0.7 * (1 - cka)
    loss = user.private_loss(x, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(
        user.fit_optimizer.param_groups[0]["params"], local.fit_optimizer.param_groups[0]["params"], strict=True
    ):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5)


def test_the_head_gets_the_gradient_of_its_task_alone(path: Path) -> None:
    user: Any = program(path, "fedhenn")
    local: Any = program(path, "local")
    x, targets = user.private_batch()
    user.compare(FEW)
    user._mean, user._weight, user._blocks = gram_matrix(unit(10, 4)).float(), 100.0, iter([torch.arange(10)])
    for one in (user, local):
        one.private_loss(x, targets).backward()
    for mine, theirs in zip(user.head.parameters(), local.head.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize(("steps", "batch", "passes"), [(5, 4, [2, 2, 1]), (3, 16, [1, 1, 1])])
def test_a_phase_goes_over_the_alignment_set_in_blocks(
    write_suite: WriteSuite, monkeypatch: pytest.MonkeyPatch, steps: int, batch: int, passes: list[int]
) -> None:
    path = five_users(write_suite, ("steps = 2", f"steps = {steps}"), ("\nbatch = 8", f"\nbatch = {batch}"))
    user: Any = program(path, "fedhenn")
    mean, local_steps, blocks = user.compare(FEW)["gram"], [], []
    embed, step = user.embed, user.step

    def remembered(rows: Tensor, view: Tensor | int = 0) -> Tensor:
        blocks.append((rows.tolist(), view))
        return embed(rows, view)  # type: ignore[no-any-return]

    monkeypatch.setattr(user, "embed", remembered)
    monkeypatch.setattr(user, "step", lambda optimizer, loss: (local_steps.append(optimizer), step(optimizer, loss)))
    user.fit(mean=mean, weight=0.5)
    assert local_steps == [user.fit_optimizer] * steps and len(blocks) == steps
    drawn = [rows for rows, view in blocks if view == 0]
    assert [len(rows) for rows in drawn] == [min(batch, len(FEW))] * steps
    for count in passes:
        whole = [row for rows in drawn[:count] for row in rows]
        drawn = drawn[count:]
        assert len(set(whole)) == len(whole) and set(whole) <= set(FEW.tolist())


def test_a_mean_is_for_one_phase_and_its_alignment_set(path: Path) -> None:
    user: Any = program(path, "fedhenn")
    mean = user.compare(FEW)["gram"]
    user.fit(mean=mean, weight=0.5)
    with pytest.raises(RuntimeError, match="before compare"):
        user.fit(mean=mean, weight=0.5)
    x, targets = user.private_batch()
    assert torch.equal(user.private_loss(x, targets), user.task.loss(user.outputs(x), targets))


def test_the_term_draws_users_to_the_mean_and_trains_the_projection(path: Path) -> None:
    users: list[Any] = [program(path, "fedhenn", name="user3") for _ in range(2)]
    rows = torch.arange(PUBLIC)
    mean = gram_matrix(unit(PUBLIC, 4, seed=6)).float()
    found = []
    for user, weight in zip(users, (0.0, 50.0), strict=True):
        projection = weights(user.representation.projection)
        for _ in range(6):
            user.compare(rows)
            user.fit(mean=triangle(mean), weight=weight)
        assert same(projection, weights(user.representation.projection)) == (weight == 0)
        found.append(alignment(mean, symmetric(user.compare(rows)["gram"], PUBLIC)).item())
    assert found[1] > found[0] + 0.02


def test_a_restored_user_goes_on_bit_for_bit(path: Path) -> None:
    hosts = [host(path, "fedhenn") for _ in range(2)]
    mean = triangle(gram_matrix(unit(10, 4)).float())

    def round_of(user: Any) -> None:
        call(user, "compare", rows=FEW)
        call(user, "fit", mean=mean, weight=0.5)

    round_of(hosts[0])
    state = hosts[0].save()
    hosts[1].restore(state)
    assert hosts[1].save() == state
    for user in hosts:
        round_of(user)
    assert hosts[0].save() == hosts[1].save() != state


# -- the exchange


@pytest.mark.parametrize(("size", "options"), [(PUBLIC, {}), (20, {"alignment": 20, "eta0": 0.3, "kernel": "rbf"})])
def test_a_round_is_gram_matrices_their_mean_and_a_local_phase(
    path: Path, tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    memory, result = exchanges(path, "fedhenn", tmp_path, **options)
    assert verbs(memory) == ["compare", "fit"] * (R + 1)
    assert result["touched"] == EVERYONE
    count, eta0 = size * (size + 1) // 2, options.get("eta0", 0.01)
    drawn = []
    for r, (compare, fit) in enumerate(zip(memory[::2], memory[1::2], strict=True)):
        assert list(compare.sent) == list(fit.sent) == EVERYONE
        rows = compare.sent["user1"]["rows"]
        drawn.append(rows.tolist())
        assert rows.shape == (size,) and len(set(rows.tolist())) == size and max(rows) < PUBLIC
        grams = [compare.replies[user]["gram"] for user in EVERYONE]
        assert all(gram.shape == (count,) and gram.dtype == torch.float32 for gram in grams)
        mean = sum(gram.double() for gram in grams) / len(EVERYONE)
        for user in EVERYONE:
            assert compare.sent[user].keys() == {"rows"} and torch.equal(compare.sent[user]["rows"], rows)
            assert compare.replies[user].keys() == {"gram"}
            assert fit.sent[user].keys() == {"mean", "weight"}
            assert torch.allclose(fit.sent[user]["mean"].double(), mean, atol=1e-6)
            assert fit.sent[user]["weight"] == pytest.approx(eta0 * r**0.5)
        logged = result["rounds"][r]["log"]["CKA"]
        for user, gram in zip(EVERYONE, grams, strict=True):
            naive = naive_cka(symmetric(gram, size).double(), symmetric(mean, size))  # type: ignore[arg-type]
            assert logged[user] == pytest.approx(naive.item(), rel=1e-4)
    assert all(one != two for one, two in pairwise(drawn))
    assert result["bytes"]["tensor_up"] == len(EVERYONE) * count * 4
    assert result["bytes"]["tensor_down"] == len(EVERYONE) * (count * 4 + size * 8)
    assert result["bytes"]["paper"] == 2 * len(EVERYONE) * options.get("alignment", 1000) ** 2 * 4


def test_the_first_round_is_local_training_and_later_ones_change_everyone(path: Path, tmp_path: Path) -> None:
    assert changed(path, "fedhenn", tmp_path / "all", eta0=1.0) == EVERYONE
    (local, alone), (memory, result) = (exchanges(path, name, tmp_path / name) for name in ("local", "fedhenn"))
    assert local[0].replies == memory[1].replies
    assert local[1].replies != memory[3].replies
    assert alone["rounds"][0]["validation"] == result["rounds"][0]["validation"]


def test_a_restored_cell_goes_on_bit_for_bit(path: Path) -> None:
    check_resume(path, "fedhenn", eta0=1.0)


@pytest.mark.parametrize("verb", ["compare", "fit"])
def test_the_last_user_trains_locally(
    write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    path = five_users(write_suite, ("others = 2", 'others = 2\non_failure = "skip"'))
    asked: Any = getattr(GramUser, verb)

    def failing(self: Any, **message: Any) -> dict[str, Any]:
        if self.fits == 1 and self.name != "user4":
            raise RuntimeError("no such luck")
        return asked(self, **message)  # type: ignore[no-any-return]

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(GramUser, verb, failing)
    memory, _ = exchanges(path, "fedhenn", tmp_path)
    assert verbs(memory) == ["compare", "fit"] * 2 + ["fit"]
    assert list(memory[3].replies) == ["user4"] == list(memory[4].sent)
    assert (memory[3].sent["user4"] == {}) == (verb == "compare")
    assert memory[4].sent["user4"] == {}


def test_who_fails_is_left_out_of_the_mean(
    write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = five_users(write_suite, ("others = 2", 'others = 2\non_failure = "skip"'))
    compare: Any = GramUser.compare

    def failing(self: Any, rows: Tensor) -> dict[str, Any]:
        if self.fits == 1 and self.name == "user2":
            raise RuntimeError("no such luck")
        return compare(self, rows)  # type: ignore[no-any-return]

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(GramUser, "compare", failing)
    memory, _ = exchanges(path, "fedhenn", tmp_path)
    left = [user for user in EVERYONE if user != "user2"]
    assert list(memory[3].sent) == left
    mean = torch.stack([memory[2].replies[user]["gram"] for user in left]).mean(0)
    assert torch.equal(memory[3].sent["user1"]["mean"], mean)


def test_it_needs_a_second_user(path: Path) -> None:
    users = load(str(path)).users
    assert FedHeNN().touches(users[:1]) == []
    assert FedHeNN().touches(users[3:]) == ["user4", "user5"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("eta0", 0.0), ("eta0", float("inf")), ("sigma", -1.0), ("sigma", float("nan")), ("alignment", 2)],
)
def test_bad_options_are_named(option: str, value: float) -> None:
    with pytest.raises(UserError, match=f"the option '{option}' of fedhenn is {value}"):
        FedHeNN(**{option: value})  # type: ignore[arg-type]
