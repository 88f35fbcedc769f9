"""The alignment losses against golden values, written-out sums, and what the paper and the design promise of them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fedbench
from fedbench.errors import UserError
from fedbench.seeds import torch_generator
from fedbench_plugins.losses import contraction, muscle
from fedbench_plugins.losses.gramian import Gramian
from fedbench_plugins.losses.muscle import Muscle
from fedbench_plugins.losses.nt_xent import NTXent
from fedbench_plugins.losses.pairwise import Pairwise

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text())["cases"]
DIRECTIONS = {"anchor": "anchor_to_others", "others": "others_to_anchor", "symmetric": "symmetric"}
LOSSES: dict[str, Callable[[], fedbench.AlignmentLoss]] = {
    "muscle": Muscle,
    "pairwise": Pairwise,
    "gramian": Gramian,
    "gramian-all": lambda: Gramian(tuples="all", learn_tau=True),
    "nt_xent": NTXent,
}
shapes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(2, 9), st.integers(0, 10**6))
quick = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def unit(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    rows = torch.randn(*shape, generator=torch_generator("test_losses", seed), dtype=torch.float64)
    return functional.normalize(rows, dim=-1).to(dtype)


def naive_muscle(anchor: Tensor, others: Tensor, tau: float = 0.2, tau_prev: float = 0.15) -> Tensor:
    """The paper's formula, tuple by tuple."""
    models, batch = others.shape[:2]
    gamma = 1 / tau_prev - 1 / tau
    terms, positives = [], {}
    for j in itertools.product(range(batch), repeat=models):
        chosen = [others[m, j[m]] for m in range(models)]
        agreement = sum(
            (chosen[p] @ chosen[q] for p, q in itertools.permutations(range(models), 2)), anchor.new_zeros(())
        )
        terms.append(anchor @ torch.stack(chosen).sum(0) / tau - 0.5 * gamma * agreement)
        if len(set(j)) == 1:
            positives[j[0]] = terms[-1][j[0]]
    return (torch.stack(terms).logsumexp(0) - torch.stack([positives[i] for i in range(batch)])).mean()


def naive_pairwise(anchor: Tensor, others: Tensor, tau: float = 0.2) -> Tensor:
    rows = [
        [z @ other[i] / tau - torch.stack([z @ row / tau for row in other]).logsumexp(0) for i, z in enumerate(anchor)]
        for other in others
    ]
    return -torch.stack([torch.stack(row).mean() for row in rows]).sum()


def naive_volume(rows: list[Tensor]) -> Tensor:
    stacked = torch.stack(rows)
    return torch.det(stacked @ stacked.T).clamp_min(1e-30).sqrt()


def naive_gramian(anchor: Tensor, others: Tensor, tau: float = 0.2, tuples: str = "diagonal") -> Tensor:
    models, batch = others.shape[:2]
    items = range(batch)
    choices = [(j,) * models for j in items]
    logits = torch.stack(
        [torch.stack([-naive_volume([z, *(others[m, k] for m, k in enumerate(j))]) for j in choices]) for z in anchor]
    )
    for_others = functional.cross_entropy(logits.T / tau, torch.arange(batch))
    if tuples == "all":
        choices = list(itertools.product(items, repeat=models))
        logits = torch.stack(
            [
                torch.stack([-naive_volume([z, *(others[m, k] for m, k in enumerate(j))]) for j in choices])
                for z in anchor
            ]
        )
    at = torch.tensor([choices.index((i,) * models) for i in items])
    return (functional.cross_entropy(logits / tau, at) + for_others) / 2


def naive_nt_xent(first: Tensor, others: Tensor, tau: float = 0.2) -> Tensor:
    views = [*first, *others[0]]
    count = len(views)
    found = []
    for i, z in enumerate(views):
        rest = torch.stack([z @ views[k] / tau for k in range(count) if k != i])
        found.append(rest.logsumexp(0) - z @ views[(i + count // 2) % count] / tau)
    return torch.stack(found).mean()


def value_and_gradients(loss: Callable[[Tensor, Tensor], Tensor], anchor: Tensor, others: Tensor) -> tuple[Tensor, ...]:
    anchor, others = anchor.clone().requires_grad_(), others.clone().requires_grad_()
    value = loss(anchor, others)
    return value.detach(), *torch.autograd.grad(value, (anchor, others))


def assert_agrees(loss: Callable[[Tensor, Tensor], Tensor], naive: Callable[..., Tensor], *inputs: Tensor) -> None:
    for got, expected in zip(value_and_gradients(loss, *inputs), value_and_gradients(naive, *inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-8)


# --- golden values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"B{case['B']}-M{case['M']}-tau{case['tau']}")
def test_golden_values_and_gradients(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    anchor = torch.tensor(case["anchor"], dtype=torch.float64).to(dtype).requires_grad_()
    others = torch.tensor(case["others"], dtype=torch.float64).to(dtype)
    value = Muscle(tau=case["tau"], tau_prev=case["tau_prev"])(anchor, others)
    assert value.dtype == dtype
    assert value.item() == pytest.approx(case["muscle"], rel=tolerance, abs=tolerance)
    if "muscle_grad_anchor" in case:
        (gradient,) = torch.autograd.grad(value, anchor)
        expected = torch.tensor(case["muscle_grad_anchor"], dtype=dtype)
        torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)
    pairwise = Pairwise(tau=case["tau"])(anchor, others).item()
    assert pairwise == pytest.approx(case["pairwise"], rel=tolerance, abs=tolerance)
    for direction, name in DIRECTIONS.items():
        gramian = Gramian(tau=case["tau"], direction=direction)(anchor, others)  # type: ignore[arg-type]
        assert gramian.dtype == dtype
        assert gramian.item() == pytest.approx(case["gramian"][name], rel=tolerance, abs=tolerance)


# --- against the written-out sums -------------------------------------------------------------------------------------


@quick
@given(shapes)
def test_muscle_is_the_written_out_sum_with_the_same_gradients(shape: tuple[int, int, int, int]) -> None:
    models, batch, d, seed = shape
    models = min(models, 3) if batch > 4 else models
    anchor, others = unit(batch, d, seed=seed), unit(models, batch, d, seed=seed + 1)
    naive = value_and_gradients(naive_muscle, anchor, others)
    assert_agrees(Muscle(), naive_muscle, anchor, others)
    fixed = anchor.clone().requires_grad_()
    value = Muscle()(fixed, others)  # others detached: the marginals' own path
    value.backward()
    torch.testing.assert_close((value.detach(), fixed.grad), naive[:2], rtol=1e-7, atol=1e-8)


@quick
@given(shapes)
def test_pairwise_and_gramian_are_the_written_out_sums(shape: tuple[int, int, int, int]) -> None:
    models, batch, d, seed = shape
    anchor, others = unit(batch, d + models, seed=seed), unit(models, batch, d + models, seed=seed + 1)
    assert_agrees(Pairwise(), naive_pairwise, anchor, others)
    assert_agrees(NTXent(), naive_nt_xent, anchor, others[:1])
    assert Gramian()(anchor, others).item() == pytest.approx(naive_gramian(anchor, others).item(), abs=1e-8)


@pytest.mark.parametrize("tuples", ["diagonal", "all"])
def test_gramian_gradients(tuples: Any) -> None:
    anchor, others = unit(4, 9, seed=3), unit(3, 4, 9, seed=4)
    found = value_and_gradients(Gramian(tuples=tuples), anchor, others)
    expected = value_and_gradients(lambda a, o: naive_gramian(a, o, tuples=tuples), anchor, others)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tail, chunk, longest", [(2**21, 2**19, 5), (2**21, 50, 5), (8, 2, 3)])
@pytest.mark.parametrize("models, batch", [(2, 5), (3, 5), (4, 4), (5, 3), (6, 2)])
def test_chunks_and_short_tails_change_nothing(
    models: int, batch: int, tail: int, chunk: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor, others = unit(batch, 6, seed=1), unit(models, batch, 6, seed=2)
    whole = value_and_gradients(Muscle(), anchor, others)
    monkeypatch.setattr(contraction, "FLAT", 0)
    monkeypatch.setattr(contraction, "TAIL", tail)
    monkeypatch.setattr(contraction, "CHUNK", chunk)
    assert contraction.tail_length(models, batch) <= min(longest, max(2, models - 1))
    torch.testing.assert_close(value_and_gradients(Muscle(), anchor, others), whole)
    fixed = anchor.clone().requires_grad_()
    Muscle()(fixed, others).backward()
    torch.testing.assert_close(fixed.grad, whole[1])


@pytest.mark.parametrize("leaf", [2**20, 8])
@pytest.mark.parametrize("models, batch", [(2, 4), (3, 4), (5, 2)])
def test_term_by_term_beyond_float64(models: int, batch: int, leaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contraction, "LEAF", leaf)
    anchor, others = unit(batch, 3, seed=5), unit(models, batch, 3, seed=6)
    others[1] = -others[0].roll(1, 0)  # the pair factors range over exp(±1/tau_prev)
    options = {"tau": 0.01, "tau_prev": 0.001}
    got = value_and_gradients(Muscle(**options), anchor, others)
    expected = value_and_gradients(lambda a, o: naive_muscle(a, o, **options), anchor, others)
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-6)
    fixed = anchor.clone().requires_grad_()
    Muscle(**options)(fixed, others).backward()
    torch.testing.assert_close(fixed.grad, expected[1], rtol=1e-7, atol=1e-6)
    single = Muscle(**options)(anchor.float(), others.float())
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(expected[0].item(), rel=1e-4)


@pytest.mark.parametrize("tau, tau_prev", [(0.2, 0.15), (0.07, 0.05), (0.02, 0.015), (0.02, 0.01)])
@pytest.mark.parametrize("models", [2, 3, 4, 5])
def test_float32_is_close_to_float64_however_small_tau_is(models: int, tau: float, tau_prev: float) -> None:
    anchor, others = unit(5, 16, seed=7), unit(models, 5, 16, seed=8)
    others = functional.normalize(anchor + 0.5 * others, dim=-1)
    exact = value_and_gradients(Muscle(tau=tau, tau_prev=tau_prev), anchor, others)
    single = value_and_gradients(Muscle(tau=tau, tau_prev=tau_prev), anchor.float(), others.float())
    for got, expected in zip(single, exact, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4 / tau)


# --- what the losses promise ------------------------------------------------------------------------------------------


@quick
@given(shapes)
def test_one_other_is_info_nce(shape: tuple[int, int, int, int]) -> None:
    _, batch, d, seed = shape
    anchor, others = unit(batch, d, seed=seed), unit(1, batch, d, seed=seed + 1)
    expected = functional.cross_entropy(anchor @ others[0].T / 0.2, torch.arange(batch))
    torch.testing.assert_close(Muscle()(anchor, others), expected)
    torch.testing.assert_close(Pairwise()(anchor, others), expected)


@quick
@given(shapes, st.randoms(use_true_random=False))
def test_the_order_of_the_others_does_not_matter(shape: tuple[int, int, int, int], random: Any) -> None:
    models, batch, d, seed = shape
    anchor, others = unit(batch, d, seed=seed), unit(models, batch, d, seed=seed + 1)
    order = random.sample(range(models), models)
    for loss in (Muscle(), Pairwise(), Gramian(), Gramian(tuples="all")):
        torch.testing.assert_close(loss(anchor, others), loss(anchor, others[order]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tau, tau_prev", [(0.2, 0.15), (0.02, 0.015), (0.02, 0.01)])
@pytest.mark.parametrize("models, batch", [(1, 32), (2, 32), (3, 32), (3, 17), (4, 13), (4, 32), (5, 7), (5, 32)])
def test_identical_rows_cost_m_log_b(models: int, batch: int, tau: float, tau_prev: float) -> None:
    row = unit(1, 128, seed=9, dtype=torch.float32)
    anchor, others = row.repeat(batch, 1).requires_grad_(), row.repeat(models, batch, 1)
    value = Muscle(tau=tau, tau_prev=tau_prev)(anchor, others)
    assert value.item() == pytest.approx(models * math.log(batch), rel=1e-6)
    (gradient,) = torch.autograd.grad(value, anchor)
    assert gradient.isfinite().all() and gradient.abs().max() < 1e-4 / tau
    assert Pairwise(tau=tau)(anchor, others).item() == pytest.approx(models * math.log(batch), rel=1e-6)


@pytest.mark.parametrize("models", [1, 2, 3, 5])
@pytest.mark.parametrize("options", [{}, {"tuples": "all"}])
def test_gramian_gradients_are_finite_on_degenerate_rows(models: int, options: dict[str, Any]) -> None:
    row = unit(1, 32, seed=9, dtype=torch.float32)
    same = row.repeat(4, 1), row.repeat(models, 4, 1)
    aligned = unit(4, 32, dtype=torch.float32), unit(4, 32, dtype=torch.float32).repeat(models, 1, 1)
    for anchor, others in (same, aligned):
        value, *gradients = value_and_gradients(Gramian(tau=0.02, **options), anchor, others)
        assert value.isfinite() and all(gradient.isfinite().all() for gradient in gradients)
    if not options:
        assert Gramian()(*same).item() == pytest.approx(math.log(4), rel=1e-4)


@pytest.mark.parametrize("models, expected", [(1, 0.1897), (2, 1.2345), (3, 3.6566)])
def test_perfect_alignment_of_orthonormal_rows(models: int, expected: float) -> None:
    rows = torch.eye(32, 64)
    assert Muscle()(rows, rows.repeat(models, 1, 1)).item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("models, expected", [(1, 3.12), (2, 5.46), (3, 6.43)])
def test_the_papers_bound_can_exceed_mutual_information(models: int, expected: float) -> None:
    atoms, loss = torch.eye(100), Muscle()
    generator = torch_generator("test_losses", "atoms")
    draws = [atoms[torch.randint(100, (32,), generator=generator)] for _ in range(200)]
    mean = sum(loss(rows, rows.repeat(models, 1, 1)).item() for rows in draws) / len(draws)
    bound = loss.bound(mean, batch=32, others=models)
    assert bound == pytest.approx(expected, abs=0.05)
    assert (bound > math.log(100)) == (models >= 2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_of_every_loss(name: str, dtype: torch.dtype) -> None:
    loss = LOSSES[name]()
    models = 1 if name == "nt_xent" else 3
    anchor, others = unit(6, 16, dtype=dtype).requires_grad_(), unit(models, 6, 16, seed=1, dtype=dtype)
    before = anchor.detach().clone(), others.clone()
    state = torch.get_rng_state()
    value = loss(anchor, others)
    value.backward()
    assert value.shape == () and value.dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(anchor.detach(), before[0]) and torch.equal(others, before[1])
    assert anchor.grad is not None and anchor.grad.dtype == dtype
    assert anchor.grad.isfinite().all() and anchor.grad.any()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in loss.parameters())
    wide = loss(anchor.detach().double(), others.double())
    assert value.item() == pytest.approx(wide.item(), abs=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert loss(anchor, others).item() == pytest.approx(wide.item(), abs=1e-4)
    assert "revision" in vars(type(loss))


def test_both_views_of_nt_xent_carry_gradients() -> None:
    first, second = unit(5, 8).requires_grad_(), unit(5, 8, seed=1).requires_grad_()
    gradients = torch.autograd.grad(NTXent()(first, second.unsqueeze(0)), (first, second))
    assert all(gradient.any() for gradient in gradients)


def test_gramian_options() -> None:
    anchor, others = unit(4, 9), unit(2, 4, 9, seed=1)
    assert not list(Gramian().parameters())
    learned = Gramian(learn_tau=True)
    assert learned(anchor, others).item() == pytest.approx(Gramian()(anchor, others).item(), abs=1e-6)
    anchored, reverse = (Gramian(direction=direction)(anchor, others) for direction in ("anchor", "others"))  # type: ignore[arg-type]
    torch.testing.assert_close(Gramian()(anchor, others), (anchored + reverse) / 2)
    smoothed = Gramian(direction="anchor", smoothing=0.1)(anchor, others)
    assert smoothed.item() != pytest.approx(anchored.item(), abs=1e-4)


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that one tensor had."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, Tensor):
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return found


def test_five_others_of_32_rows_stay_far_below_the_memory_promise() -> None:
    anchor, others = unit(32, 64, dtype=torch.float32).requires_grad_(), unit(5, 32, 64, seed=1, dtype=torch.float32)
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        Muscle()(anchor, others).backward()
    assert 2**20 < largest.bytes < 2**25


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: Muscle(tau=0.0), "'tau' of muscle"),
        (lambda: Muscle(tau_prev=-1.0), "'tau_prev' of muscle"),
        (lambda: Muscle(tau=0.15, tau_prev=0.15), "tau_prev below tau"),
        (lambda: Muscle(tau=0.1), "tau_prev below tau"),
        (lambda: Pairwise(tau=math.nan), "'tau' of pairwise"),
        (lambda: NTXent(tau=math.inf), "'tau' of nt_xent"),
        (lambda: Gramian(tau=0.0), "'tau' of gramian"),
        (lambda: Gramian(smoothing=1.0), "'smoothing' of gramian"),
        (lambda: Gramian(direction="both"), "one of symmetric, anchor, others"),  # type: ignore[arg-type]
        (lambda: Gramian(tuples="some"), "one of diagonal, all"),  # type: ignore[arg-type]
        (lambda: Muscle()(unit(4, 3), unit(2, 5, 3)), r"\(4, 3\) and others of shape \(2, 5, 3\)"),
        (lambda: Pairwise()(unit(4, 3), unit(4, 3)), r"\(M, B, d\)"),
        (lambda: Muscle()(unit(4, 3), unit(4, 3)[None][:0]), "at least 1"),
        (lambda: NTXent()(unit(4, 3), unit(2, 4, 3)), "exactly one"),
        (lambda: Gramian(tuples="all")(unit(32, 8), unit(4, 32, 8)), "M = 4 others and B = 32 rows"),
        (lambda: Muscle()(unit(32, 8), unit(6, 32, 8)), r"M = 6 others and B = 32 rows.*M ≤ 5 .*B ≤ 19"),
    ],
)
def test_errors_say_what_was_expected(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        make()


@pytest.mark.parametrize("models, batch, allowed", [(5, 32, True), (5, 33, False), (2, 1024, True), (29, 2, True)])
def test_exact_reach(models: int, batch: int, allowed: bool) -> None:
    if allowed:
        muscle._check_reach(models, batch)
    else:
        with pytest.raises(UserError, match=f"B ≤ {batch - 1} "):
            muscle._check_reach(models, batch)
