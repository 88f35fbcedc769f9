"""SAGE: corrected pseudo-labels and their loss against naive versions, and what crosses between whom."""

from __future__ import annotations

import sys
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench.discovery import discover
from fedbench.errors import UserError
from fedbench.suite import load
from fedbench_baselines.sage import SAGE, corrected, correction_loss, distributions, log_distributions

sys.path.append(str(Path(__file__).parent))
from public_exchange import ALONE, CLASSES, TASKS, B, R, T, batches, call, changed, exchanges, five_users
from spies import Exchange, verbs
from tiny import WriteSuite, host, program

EVERYONE = list(TASKS)
DIFFERENT, TWINS = ["user1", "user2"], ["user3", "user4"]
KAPPA = log(2) / 0.05


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- equations


def naive(local: list[float], other: list[float], threshold: float, kappa: float) -> tuple[list[float], float]:
    """One item's q and mask, as the header says."""
    c_l, c_g = max(local), max(other)
    h_l, h_g = ([float(k == p.index(max(p))) for k in range(len(p))] for p in (local, other))
    trust = exp(-kappa * min(max(abs(c_l - c_g) + 1e-6, 1e-6), 1.0))
    q = [trust * a + (1 - trust) * b for a, b in zip(h_l, h_g, strict=True)] if c_l >= threshold else h_g
    return q, float(c_l >= threshold or c_g >= threshold)


@pytest.mark.parametrize(("threshold", "kappa"), [(0.95, KAPPA), (0.6, KAPPA), (0.6, 1.0), (0.0, 3.0)])
def test_pseudo_labels_are_corrected_as_a_loop_would(threshold: float, kappa: float) -> None:
    local, other = (3 * random(80, 4, seed=1)).softmax(1), (3 * random(80, 4, seed=2)).softmax(1)
    q, mask = corrected(local, other, threshold=threshold, kappa=kappa)
    expected = [naive(*pair, threshold, kappa) for pair in zip(local.tolist(), other.tolist(), strict=True)]
    assert torch.allclose(q, torch.tensor([row for row, _ in expected], dtype=torch.float64), atol=1e-12)
    assert mask.tolist() == [one for _, one in expected]
    assert (0 < mask.sum() < 80) == (threshold > 0)


def test_a_difference_of_a_twentieth_halves_the_trust() -> None:
    local, other = torch.tensor([[0.98, 0.02]], dtype=torch.float64), torch.tensor([[0.07, 0.93]], dtype=torch.float64)
    q, mask = corrected(local, other, threshold=0.95, kappa=KAPPA)
    assert q.tolist() == [pytest.approx([0.5, 0.5], abs=1e-4)] and mask.tolist() == [1.0]
    q, mask = corrected(other, local, threshold=0.95, kappa=KAPPA)  # who is unsure itself takes the other's
    assert q.tolist() == [[1.0, 0.0]] and mask.tolist() == [1.0]
    _, mask = corrected(other, other, threshold=0.95, kappa=KAPPA)
    assert mask.tolist() == [0.0]


def test_with_oneself_as_the_other_it_is_fixmatch() -> None:
    p, strong = (4 * random(40, 5)).softmax(1), random(40, 5, seed=3)
    q, mask = corrected(p, p, threshold=0.8, kappa=KAPPA)
    loss = correction_loss(strong.log_softmax(1), q, mask)
    fixmatch = torch.nn.functional.cross_entropy(strong, p.argmax(1), reduction="none") * (p.max(1).values >= 0.8)
    assert loss.item() == pytest.approx(fixmatch.mean().item(), abs=1e-9) and loss > 0


def test_the_loss_is_a_masked_divergence_over_the_whole_batch() -> None:
    outputs = random(6, 3).requires_grad_()
    q, mask = (2 * random(6, 3, seed=1)).softmax(1), torch.tensor([1.0, 0, 1, 1, 0, 1], dtype=torch.float64)
    q[0] = torch.tensor([0.0, 1.0, 0.0])
    loss = correction_loss(log_distributions(outputs, multi_label=False), q, mask)
    p = outputs.detach().softmax(1)
    expected = sum(
        q[i, k].item() * log(q[i, k].item() / p[i, k].item())
        for i in range(6)
        for k in range(3)
        if mask[i] and q[i, k] > 0
    )
    assert loss.item() == pytest.approx(expected / 6, abs=1e-12)
    loss.backward()
    assert torch.allclose(outputs.grad, (p - q) * mask.unsqueeze(1) / 6, atol=1e-12)  # type: ignore[arg-type]


def test_the_multi_label_form_is_binary_for_every_class() -> None:
    local, other = (3 * random(20, 4, seed=1)).sigmoid(), (3 * random(20, 4, seed=2)).sigmoid()
    outputs = random(20, 4, seed=3).requires_grad_()
    pair = [distributions(p, multi_label=True) for p in (local, other)]
    q, mask = corrected(*pair, threshold=0.9, kappa=KAPPA)
    total, gradient = 0.0, torch.zeros(20, 4, dtype=torch.float64)
    for i in range(20):
        for k in range(4):
            two = [[1 - p[i, k].item(), p[i, k].item()] for p in (local, other)]
            (_, yes), counts = naive(*two, 0.9, KAPPA)
            p = 1 / (1 + exp(-outputs[i, k].item()))
            if counts:  # binary cross-entropy, less the entropy of q, which has no gradient
                total -= (yes * log(p) if yes else 0) + ((1 - yes) * log(1 - p) if yes < 1 else 0)
                total += (yes * log(yes) if yes else 0) + ((1 - yes) * log(1 - yes) if yes < 1 else 0)
                gradient[i, k] = (p - yes) / 80
    assert 0 < mask.sum() < 80 and ((q[..., 1] > 0) & (q[..., 1] < 1) & (mask > 0)).any()
    loss = correction_loss(log_distributions(outputs, multi_label=True), q, mask)
    assert loss.item() == pytest.approx(total / 80, abs=1e-10)
    loss.backward()
    assert torch.allclose(outputs.grad, gradient, atol=1e-10)  # type: ignore[arg-type]


def test_huge_outputs_give_a_finite_loss() -> None:
    outputs = torch.tensor([[500.0, -500.0]], requires_grad=True)
    for multi_label in (False, True):
        log_p = log_distributions(outputs, multi_label=multi_label)
        q = torch.zeros_like(log_p)
        q[..., 1] = 1
        loss = correction_loss(log_p, q, torch.ones(log_p.shape[:-1]))
        loss.backward()
        assert loss.isfinite() and loss > 100 and outputs.grad is not None and outputs.grad.isfinite().all()


# -- the user


def peers_of(task: str, seed: int = 0) -> Tensor:
    """What peers may say of T batches, float16."""
    outputs = 4 * random(T, B, CLASSES[task], seed=seed)
    return (outputs.sigmoid() if task == "mlc" else outputs.softmax(-1)).half()


@pytest.mark.parametrize("name", ["user1", "user3"])
@pytest.mark.parametrize("guided", [True, False])
def test_a_step_is_on_a_private_batch_and_a_public_one(path: Path, name: str, guided: bool) -> None:
    options = {"threshold": 0.505, "lambda_u": 0.5} if name == "user1" else {"threshold": 0.0104, "lambda_u": 0.5}
    user, twin = (program(path, "sage", name=name, **options) for _ in range(2))
    rows, task = batches()[:1], TASKS[name]
    said = peers_of(task)[:1] if guided else None
    x, y = twin.private_batch()
    loss = twin.task.loss(twin.outputs(x), y)
    multi_label, public = task == "mlc", twin.participant.public
    view = twin.strong_views(B)  # type: ignore[attr-defined]
    outputs = twin.outputs(public.rows(rows[0], 0)).detach()
    local = outputs.sigmoid() if multi_label else outputs.softmax(1)
    other = local if said is None else said[0].float()
    q, mask = corrected(
        *(distributions(p, multi_label=multi_label) for p in (local, other)),
        threshold=options["threshold"],
        kappa=KAPPA,
    )
    strong = log_distributions(twin.outputs(public.rows(rows[0], view)), multi_label=multi_label)
    loss = loss + 0.5 * correction_loss(strong, q, mask)
    loss.backward()  # type: ignore[no-untyped-call]
    reply = user.learn(batches=rows, probabilities=said)  # type: ignore[attr-defined]
    assert reply["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert reply["confident"] == pytest.approx(float(mask.mean())) and reply["confident"] > 0
    parts = ((user.representation.backbone, twin.representation.backbone), (user.head, twin.head))
    for ours, theirs in parts:
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None
            assert torch.allclose(one.grad, two.grad, atol=1e-6)


@pytest.mark.parametrize("views", [1, 2, 4])
def test_the_strong_view_is_any_but_the_plain_one(write_suite: WriteSuite, views: int) -> None:
    path = five_users(write_suite, ("size = 32\nviews = 2", f"size = 32\nviews = {views}"))
    drawn = program(path, "sage").strong_views(200)  # type: ignore[attr-defined]
    assert set(drawn.tolist()) == (set(range(1, views)) or {0})


def test_peers_tell_probabilities_of_the_plain_view_in_evaluation_mode(path: Path) -> None:
    for name in ("user1", "user3"):
        user: Any = program(path, "sage", name=name)
        modes: list[bool] = []
        user.head.register_forward_hook(lambda module, inputs, outputs, seen=modes: seen.append(module.training))
        said = user.predict(batches())["outputs"]
        assert said.dtype == torch.float16 and said.shape == (T, B, CLASSES[TASKS[name]]) and modes == [False] * T
        outputs = torch.stack([user.outputs(user.participant.public.rows(batch, 0)) for batch in batches()])
        expected = outputs.sigmoid() if name == "user1" else outputs.softmax(-1)
        assert torch.equal(said, expected.detach().half())
        modes.clear()
        user.learn()
        assert modes == [True] * 3 * T


def test_a_step_takes_the_next_private_batch(path: Path) -> None:
    user: Any = program(path, "sage", name=ALONE)
    plain: Any = program(path, "local", name=ALONE)
    user.learn(batches=batches())
    for _ in range(T):
        plain.private_batch()
    assert user.public_steps == T and user.fits == 0
    assert all(torch.equal(one, two) for one, two in zip(user.private_batch(), plain.private_batch(), strict=True))


@pytest.mark.parametrize("head", ["features", "embedding"])
def test_the_global_model_is_what_the_mean_says_before_any_step(write_suite: WriteSuite, head: str) -> None:
    path = five_users(write_suite, ("[protocol]", f'[protocol]\nhead = "{head}"'))
    user, other = (program(path, "sage", name=name) for name in TWINS)
    sent: dict[str, Tensor] = other.upload()  # type: ignore[attr-defined]
    assert any(name.startswith("projection.") for name in sent) == (head == "embedding")
    assert {name.partition(".")[0] for name in sent} >= {"backbone", "head"}
    user.download(batches=batches(), **sent)  # type: ignore[attr-defined]
    assert all(torch.equal(value, sent[name]) for name, value in user.upload().items())  # type: ignore[attr-defined]
    said = other.predict(batches())["outputs"]  # type: ignore[attr-defined]
    guides: list[Tensor] = []
    public_loss = user.public_loss  # type: ignore[attr-defined]
    user.public_loss = lambda batch, guide: (guides.append(guide), public_loss(batch, guide))[1]  # type: ignore[attr-defined]
    user.fit()
    user.learn()  # type: ignore[attr-defined]
    assert torch.equal(torch.stack(guides), said)
    guides.clear()
    user.learn()  # type: ignore[attr-defined]
    assert guides == [None] * T  # a global model is that of one round


@pytest.mark.parametrize("name", ["user1", "user3", "user5"])
def test_a_restored_user_goes_on_bit_for_bit(write_suite: WriteSuite, name: str) -> None:
    path = five_users(write_suite, ("size = 32\nviews = 2", "size = 32\nviews = 4"))
    hosts = [host(path, "sage", name=name, threshold=0.1) for _ in range(2)]

    def round_of(user: Any, seed: int) -> None:
        if name in TWINS:
            call(user, "download", batches=batches(seed), **call(hosts[0], "upload"))
        call(user, "fit")
        said = {"probabilities": peers_of(TASKS[name], seed)} if name == "user1" else {}
        call(user, "learn", batches=batches(seed), **said)

    round_of(hosts[0], 0)
    state = hosts[0].save()
    hosts[1].restore(state)
    assert hosts[1].save() == state
    for user in reversed(hosts):  # the second gets the first one's weights before they change
        round_of(user, 1)
    assert hosts[0].save() == hosts[1].save() != state
    assert hosts[1].program.public_steps == 2 * T  # type: ignore[attr-defined]


# -- the exchange

ROUND = ["upload", "download", "fit", "predict", "learn"]


def asked(memory: list[Exchange]) -> list[tuple[str, list[str]]]:
    return [(exchange.verb, list(exchange.sent)) for exchange in memory]


def test_who_is_asked_what(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "sage", tmp_path)
    assert result["touched"] == EVERYONE
    one = [("upload", TWINS), ("download", TWINS), ("fit", EVERYONE), ("predict", DIFFERENT), ("learn", EVERYONE)]
    assert asked(memory) == one * R + one[:3]
    for start in range(0, len(ROUND) * R, len(ROUND)):
        upload, download, fit, predict, learn = memory[start : start + len(ROUND)]
        rows = predict.sent["user1"]["batches"]
        assert rows.shape == (T, B) and not any(fit.sent.values()) and not any(upload.sent.values())
        for name in DIFFERENT:
            assert torch.equal(predict.sent[name]["batches"], rows)
            other = predict.replies[next(user for user in DIFFERENT if user != name)]["outputs"]
            assert learn.sent[name].keys() == {"probabilities"}
            assert torch.equal(learn.sent[name]["probabilities"], other) and other.dtype == torch.float16
        for name in TWINS:
            assert torch.equal(download.sent[name]["batches"], rows) and learn.sent[name] == {}
        assert learn.sent[ALONE].keys() == {"batches"} and torch.equal(learn.sent[ALONE]["batches"], rows)
        record = result["rounds"][start // len(ROUND)]["log"]
        assert record["semi-supervised loss"] == {user: reply["loss"] for user, reply in learn.replies.items()}
        assert record["confident share"] == {user: reply["confident"] for user, reply in learn.replies.items()}


def test_equal_models_start_alike_and_go_on_from_their_mean_weighted_by_items(path: Path, tmp_path: Path) -> None:
    memory, _ = exchanges(path, "sage", tmp_path)
    for r in range(R + 1):
        upload, download = memory[r * len(ROUND) : r * len(ROUND) + 2]
        one, two = (upload.replies[name] for name in TWINS)  # of 40 and 20 items
        for sent in download.sent.values():
            assert sent.keys() - {"batches"} == one.keys() and ("batches" in sent) == (r < R)
            for name, value in one.items():
                expected = value if r == 0 else (2 * value + two[name]) / 3
                assert torch.allclose(sent[name], expected, atol=0 if r == 0 else 1e-6), name
        assert not all(torch.equal(value, two[name]) for name, value in one.items())


def test_it_costs_probabilities_of_a_rounds_rows_or_a_model(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "sage", tmp_path)
    said, rows = T * B * CLASSES["mlc"] * 2, T * B * 8
    model = sum(value.numel() * 4 for value in memory[0].replies["user3"].values())
    person: Any = program(path, "sage", name="user3")
    assert model == 4 * sum(
        p.numel() for part in (person.representation.backbone, person.head) for p in part.parameters()
    )
    assert result["bytes"]["tensor_up"] == 2 * said + 2 * model
    assert result["bytes"]["tensor_down"] == 2 * said + 2 * model + 5 * rows


def test_public_rows_are_those_of_every_method(path: Path, tmp_path: Path) -> None:
    rows = [
        [exchange.sent[ALONE]["batches"].tolist() for exchange in memory if "batches" in exchange.sent.get(ALONE, {})]
        for memory, _ in (exchanges(path, method, tmp_path) for method in ("sage", "simclr"))
    ]
    assert rows[0] == rows[1] and len(rows[0]) == R


@pytest.fixture
def mixed(path: Path) -> Path:
    """User 5 joins the two equal models' label space with a net of its own."""
    head, middle, last = path.read_text().rpartition("[[user]]")
    path.write_text(head + middle + last.replace("ic10", "ic100").replace("small-convnet", "small-resnet"))
    return path


def test_equal_models_have_a_global_one_and_speak_to_the_third(mixed: Path, tmp_path: Path) -> None:
    memory, _ = exchanges(mixed, "sage", tmp_path)
    speakers = [*DIFFERENT, *TWINS]
    one = [("upload", TWINS), ("download", TWINS), ("fit", EVERYONE), ("predict", speakers), ("learn", EVERYONE)]
    assert asked(memory) == one * R + one[:3]
    for start in range(0, len(ROUND) * R, len(ROUND)):
        predict, learn = memory[start + 3 : start + 5]
        said = [predict.replies[name]["outputs"].float() for name in TWINS]
        assert torch.equal(learn.sent["user5"]["probabilities"], ((said[0] + said[1]) / 2).half())
        assert learn.sent["user5"].keys() == {"probabilities", "batches"}
        assert all(not learn.sent[name] for name in TWINS)


def test_every_user_trains_otherwise_than_alone(path: Path, tmp_path: Path) -> None:
    assert changed(path, "sage", tmp_path) == EVERYONE
    assert SAGE().touches(load(str(path)).users) == EVERYONE


def test_before_the_first_exchange_users_are_as_in_local_training(path: Path, tmp_path: Path) -> None:
    local, ours = (exchanges(path, method, tmp_path)[1]["rounds"][0]["validation"] for method in ("local", "sage"))
    # The fourth user starts from the third one's weights.
    assert {user for user in TASKS if ours[user] == local[user]} >= {"user1", "user2", "user3", "user5"}


@pytest.mark.parametrize(("verb", "lost"), [("predict", "user2"), ("upload", "user3"), ("download", "user4")])
def test_who_loses_its_partner_trains_itself(
    write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, lost: str
) -> None:
    path = five_users(write_suite, ("others = 2", 'others = 2\non_failure = "skip"'))
    kept = getattr(SAGE.User, verb)

    def failing(self: Any, *positional: Any, **message: Any) -> dict[str, Any]:
        if self.name == lost:
            raise RuntimeError("no such luck")
        return kept(self, *positional, **message)  # type: ignore[no-any-return]

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(SAGE.User, verb, failing)
    memory, _ = exchanges(path, "sage", tmp_path)
    partner = next(user for pair in (DIFFERENT, TWINS) for user in pair if lost in pair and user != lost)
    learns = [exchange.sent for exchange in memory if exchange.verb == "learn"]
    assert [list(sent) for sent in learns] == [[user for user in TASKS if user != lost]] * R
    assert "probabilities" not in learns[0][partner] and learns[1][partner].keys() == {"batches"}
    assert verbs(memory).count("fit") == R + 1


@pytest.mark.parametrize(
    ("option", "value"), [("threshold", 1.1), ("threshold", -0.1), ("kappa", 0.0), ("lambda_u", 0.0), ("rate", 0.0)]
)
def test_options_are_checked(option: str, value: float) -> None:
    with pytest.raises(UserError, match=f"'{option}' of sage"):
        SAGE(**{option: value})


def test_its_options_can_be_tuned() -> None:
    method = discover().create("method", "sage")
    assert SAGE.tunable.keys() <= method.__dict__.keys()
    assert exp(-method.kappa * 0.05) == pytest.approx(0.5)
