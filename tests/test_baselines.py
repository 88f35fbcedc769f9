"""What the built-in methods exchange and train, seen from the wire of a real tiny run."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench import messages
from fedbench.discovery import discover
from fedbench.interfaces import Protocol
from fedbench.suite import load
from fedbench.user import UserHost
from fedbench_baselines.fedmuscle import FedMuscle

sys.path.append(str(Path(__file__).parent))
from spies import Exchange, spied, verbs
from tiny import WriteSuite, cell_of, participant, program, run

R, T, B, M, D = 2, 3, 8, 2, 16
USERS = ["user1", "user2", "user3", "user4"]
METHODS = ["local", "local-long", "fedmuscle", "fedmuscle:loss=pairwise", "fedmuscle:shuffle=true", "simclr"]

LEARNED = """
import torch, fedbench

class Learned(fedbench.AlignmentLoss):
    '''A loss with a temperature of its own.'''
    def __init__(self) -> None:
        super().__init__()
        self.log_tau = torch.nn.Parameter(torch.zeros(()))
    def forward(self, anchor, others):
        return (-self.log_tau).exp() * (1 - (anchor * others).sum(-1)).mean() + self.log_tau

@fedbench.hookimpl
def fedbench_losses(register):
    register("learned", Learned)
"""


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    """Four users, so that two others are a choice, and three iterations a round."""
    suite = write_suite(("iterations = 2", f"iterations = {T}"))
    text = suite.read_text()
    user = text[text.rindex("[[user]]") :].replace("user3", "user4")
    suite.write_text(f"{text}\n{user}")
    return suite


def exchanges(path: Path, method: str, runs: Path, seed: int = 0) -> tuple[list[Exchange], dict[str, Any]]:
    """What a cell exchanged, and its result."""
    cell, registry = cell_of(path, method, seed=seed)
    memory = spied(registry)
    return memory, run(cell, registry, runs)


def rounds_of(memory: list[Exchange]) -> list[list[Exchange]]:
    """What methods asked, round by round: a round starts with `fit`."""
    rounds: list[list[Exchange]] = []
    for exchange in memory:
        if exchange.verb == "fit":
            rounds.append([])
        if exchange.verb != "evaluate":
            rounds[-1].append(exchange)
    return rounds


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_same_local_phases_and_is_scored_after_each(
    path: Path, tmp_path: Path, method: str
) -> None:
    memory, _ = exchanges(path, method, tmp_path)
    asked = verbs(memory)
    assert asked.count("fit") == R + 1
    splits = [exchange.sent["user1"]["split"] for exchange in memory if exchange.verb == "evaluate"]
    assert splits == ["validation"] * (R + 1) + ["test"]
    assert asked[-3:] == ["fit", "evaluate", "evaluate"]
    for before, after in pairwise(asked):
        assert before != "fit" or after == "evaluate"
    assert all(list(exchange.sent) == USERS for exchange in memory)


def test_fedmuscle_forwards_the_rows_of_distinct_others_for_the_same_public_items(path: Path, tmp_path: Path) -> None:
    memory, _ = exchanges(path, "fedmuscle", tmp_path)
    rounds = rounds_of(memory)
    assert [verbs(one) for one in rounds] == [["fit", "represent"] + ["align"] * T] * R + [["fit"]]
    sampled: set[tuple[str, tuple[str, ...]]] = set()
    for one in rounds[:R]:
        z = {user: reply["z"] for user, reply in one[1].replies.items()}
        batches = [one[1].sent["user1"]["batch"], *(exchange.sent["user1"]["next"] for exchange in one[2:-1])]
        assert len(batches) == T
        for batch in batches:
            assert batch.shape == (B,) and len(set(batch.tolist())) == B
        assert all(torch.equal(sent["batch"], batches[0]) for sent in one[1].sent.values())
        for t, exchange in enumerate(one[2:]):
            for user, sent in exchange.sent.items():
                assert sent.keys() == ({"others", "next"} if t + 1 < T else {"others"})
                if t + 1 < T:
                    assert torch.equal(sent["next"], batches[t + 1])
                assert sent["others"].shape == (M, B, D)
                whose = [next(name for name in USERS if torch.equal(z[name], rows)) for rows in sent["others"]]
                assert len(set(whose)) == M and user not in whose
                sampled.add((user, tuple(sorted(whose))))
            z = {user: reply["z"] for user, reply in exchange.replies.items() if "z" in reply}
            assert len(z) == (4 if t + 1 < T else 0)
    assert len(sampled) > 8  # of 12 pairs that a user can get, six times drawn by four users


def test_fedmuscle_costs_what_it_should(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "fedmuscle", tmp_path)
    N, row = len(USERS), B * D * 4
    numbers = N * B * 8
    assert result["bytes"]["tensor_up"] == T * N * row
    assert result["bytes"]["tensor_down"] == T * N * M * row + T * numbers
    assert result["bytes"]["paper"] == 4 * N * T * (B * D + B**M * D + B**M)
    rounds = rounds_of(memory)
    for way in ("up", "down"):
        totals = [sum(sum(getattr(exchange, way).values()) for exchange in one) for one in rounds]
        assert [record[f"bytes_{way}"] for record in result["rounds"]] == totals
        assert result["bytes"][way] == round(sum(totals[:R]) / R)
    for row_of in result["users"]:
        name = row_of["name"]
        assert row_of["bytes_up"] == round(sum(e.up[name] for one in rounds[:R] for e in one) / R)
        assert row_of["bytes_down"] == round(sum(e.down[name] for one in rounds[:R] for e in one) / R)


def test_the_papers_bytes_are_those_of_its_message_format() -> None:
    protocol = Protocol(iterations=10, batch=4, others=3, dimension=5)
    up, sums, weights = 4 * 5, 64 * 5, 64
    assert FedMuscle().paper_bytes(protocol, 6) == 6 * 10 * 4 * (up + sums + weights)


def test_the_bound_is_m_log_b_minus_the_mean_loss(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "fedmuscle", tmp_path)
    for record, one in zip(result["rounds"], rounds_of(memory), strict=True):
        if record["round"] == R:
            assert record["log"] == {}
            continue
        for user in USERS:
            losses = [exchange.replies[user]["loss"] for exchange in one[2:]]
            mean = sum(losses) / T
            assert record["log"]["alignment loss"][user] == pytest.approx(mean, rel=1e-9)
            assert record["log"]["paper's bound"][user] == pytest.approx(M * math.log(B) - mean, rel=1e-9)


def test_a_loss_without_a_bound_logs_none(path: Path, tmp_path: Path) -> None:
    _, result = exchanges(path, "fedmuscle:loss=gramian", tmp_path)
    assert not result["rounds"][0]["log"].get("paper's bound")
    assert set(result["rounds"][0]["log"]["alignment loss"]) == set(USERS)


def test_all_methods_see_the_same_public_batches(path: Path, tmp_path: Path) -> None:
    def public(method: str, seed: int = 0) -> list[list[int]]:
        memory, _ = exchanges(path, method, tmp_path, seed)
        found: list[Tensor] = []
        for exchange in memory:
            sent = exchange.sent["user1"]
            found += list(sent.get("batches", [])) + [sent[key] for key in ("batch", "next") if key in sent]
        return [batch.tolist() for batch in found]

    batches = public("fedmuscle")
    assert len(batches) == R * T
    assert public("simclr") == public("fedmuscle:shuffle=true") == batches
    assert public("simclr", seed=1) != batches


def test_shuffled_rows_cost_the_same_and_mean_something_else(path: Path, tmp_path: Path) -> None:
    _, plain = exchanges(path, "fedmuscle", tmp_path)
    _, control = exchanges(path, "fedmuscle:shuffle=true", tmp_path)
    for way in ("up", "down"):
        assert control["bytes"][f"tensor_{way}"] == plain["bytes"][f"tensor_{way}"]
        # The digits of a loss may differ in number.
        assert control["bytes"][way] == pytest.approx(plain["bytes"][way], rel=0.005)
    assert control["rounds"][0]["validation"] == plain["rounds"][0]["validation"]  # nothing was aligned before it
    assert control["rounds"][0]["log"] != plain["rounds"][0]["log"]


def test_shuffled_rows_are_a_permutation_for_each_user_and_seed(path: Path) -> None:
    users: list[Any] = [
        program(path, "fedmuscle", name=name, seed=seed, shuffle=True)
        for name, seed in (("user1", 0), ("user3", 0), ("user1", 1), ("user1", 0))
    ]
    rows = [user._rows.tolist() for user in users]
    assert all(sorted(order) == list(range(32)) for order in rows)
    assert rows[0] == rows[3] and rows[0] != rows[1] and rows[0] != rows[2] and rows[0] != list(range(32))
    batch = torch.tensor([5, 0, 9])
    plain = program(path, "fedmuscle")
    assert torch.equal(users[0].represent(batch)["z"], plain.embed(users[0]._rows[batch]).detach())


def test_own_views_are_drawn_by_each_user_and_plain_ones_are_the_first(write_suite: WriteSuite) -> None:
    path = write_suite(("size = 32\nviews = 2", "size = 32\nviews = 3"))
    one, two, plain = (
        program(path, "fedmuscle", views="own"),
        program(path, "fedmuscle", views="own", name="user3"),
        program(path, "fedmuscle"),
    )
    drawn = [user.views(300).tolist() for user in (one, two)]  # type: ignore[attr-defined]
    assert drawn[0] != drawn[1] and all(set(views) == {0, 1, 2} for views in drawn)
    batch = torch.arange(8)
    assert torch.equal(plain.represent(batch)["z"], plain.embed(batch, 0).detach())  # type: ignore[misc]
    again: Any = program(path, "fedmuscle", views="own")
    views = again.view_generator.get_state()
    z = again.represent(batch)["z"]
    again.view_generator.set_state(views)
    assert torch.equal(z, again.embed(batch, again.views(8)).detach())


@pytest.mark.parametrize("views", [2, 4])
def test_simclr_contrasts_two_different_views(write_suite: WriteSuite, views: int) -> None:
    user: Any = program(write_suite(("size = 32\nviews = 2", f"size = 32\nviews = {views}")), "simclr")
    first, second = user.two_views(600)
    assert not torch.any(first == second)
    pairs = set(zip(first.tolist(), second.tolist(), strict=True))
    assert pairs == {(a, b) for a in range(views) for b in range(views) if a != b}
    batch = torch.arange(8)
    z = user.embed(torch.cat([batch, batch]), torch.cat([torch.zeros(8), torch.ones(8)]).long()).detach()
    assert not torch.allclose(z[:8], z[8:], atol=1e-3)
    assert torch.allclose(z[8:], user.embed(batch, torch.ones(8, dtype=torch.int64)).detach(), atol=1e-5)


def test_simclr_with_one_view_contrasts_it_with_itself(write_suite: WriteSuite) -> None:
    user: Any = program(write_suite(("size = 32\nviews = 2", "size = 32\nviews = 1")), "simclr")
    first, second = user.two_views(8)
    assert torch.equal(first, second) and not first.any()


def test_simclr_steps_on_its_own_loss(write_suite: WriteSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    user: Any = program(write_suite(), "simclr", tau=0.5)
    batch = torch.arange(8)
    views = torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.int64)
    monkeypatch.setattr(user, "two_views", lambda count: views)
    z = user.embed(torch.cat([batch, batch]), torch.cat(views)).detach()
    similar = (z @ z.T / 0.5).fill_diagonal_(-torch.inf)
    partner = (torch.arange(16) + 8) % 16
    expected = torch.nn.functional.cross_entropy(similar, partner)
    assert user.contrast(batch.unsqueeze(0))["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_nothing_of_a_user_reaches_another_without_collaboration(path: Path, tmp_path: Path) -> None:
    for method, allowed in (("local", set()), ("local-long", set()), ("simclr", {"batches"})):
        memory, result = exchanges(path, method, tmp_path)
        for exchange in memory:
            if exchange.verb == "evaluate":
                continue
            assert all(sent.keys() <= allowed for sent in exchange.sent.values())
            assert all(reply.keys() == {"loss"} for reply in exchange.replies.values())
        assert result["bytes"]["tensor_up"] == 0
        assert result["bytes"]["tensor_down"] == (4 * T * B * 8 if allowed else 0)
        assert result["bytes"]["paper"] is None


def test_a_user_alone_is_the_same_whoever_else_takes_part(path: Path, tmp_path: Path) -> None:
    whole = exchanges(path, "local", tmp_path)[1]
    text = path.read_text()
    path.write_text(text[: text.rindex("[[user]]")])
    fewer = exchanges(path, "local", tmp_path)[1]
    assert fewer["key"] != whole["key"]
    assert fewer["users"] == whole["users"][:3]


def test_local_long_takes_exactly_the_extra_steps(write_suite: WriteSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {}
    for method in ("local", "local-long"):
        user = program(write_suite(("iterations = 2", "iterations = 5")), method)
        count = 0
        step = user.step

        def counted(optimizer: torch.optim.Optimizer, loss: Tensor, step: Any = step) -> None:
            nonlocal count
            count += 1
            step(optimizer, loss)

        monkeypatch.setattr(user, "step", counted)
        phases = []
        for _ in range(R + 1):
            before = count
            user.fit()
            phases.append(count - before)
        taken[method] = phases
    assert taken == {"local": [2, 2, 2], "local-long": [7, 7, 2]}
    assert sum(taken["local-long"]) - sum(taken["local"]) == R * 5


def test_a_losss_own_parameters_are_trained_saved_and_restored(path: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "learned.py"
    plugin.write_text(LEARNED)
    loss = discover([plugin]).resolve("loss", "learned")
    made = FedMuscle(loss="learned")
    made.loss_factory = loss
    plain = program(path, "fedmuscle")
    examiner = participant(load(str(path)), discover())[1]

    def user() -> Any:
        return FedMuscle.User(plain.participant, made, plain.protocol, 0)

    trained = user()
    group = trained.align_optimizer.param_groups[1]["params"]
    assert any(parameter is trained.loss.log_tau for parameter in group)
    host = UserHost(trained, examiner)
    z = torch.nn.functional.normalize(torch.randn(2, B, D, generator=torch.Generator().manual_seed(0)), dim=-1)
    for _ in range(2):
        host.call("represent", messages.encode({"batch": torch.arange(B)}))
        host.call("align", messages.encode({"others": z}))
    learned = float(trained.loss.log_tau.detach())
    assert learned != 0
    state = host.save()
    again = UserHost(user(), examiner)
    assert float(again.program.loss.log_tau.detach()) == 0
    again.restore(state)
    assert float(again.program.loss.log_tau.detach()) == learned
    assert again.save() == state


def test_where_users_are_skipped_fewer_others_are_forwarded(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(path.read_text().replace("others = 2", 'others = 3\non_failure = "skip"'))
    cell, registry = cell_of(path, "fedmuscle")
    memory = spied(registry)
    align = FedMuscle.User.align  # type: ignore[attr-defined]

    def failing(self: Any, others: Tensor, next: Tensor | None = None) -> dict[str, Any]:
        if self.name == "user2" and self.steps == 1:
            raise RuntimeError("no such luck")
        return align(self, others, next)  # type: ignore[no-any-return]

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(FedMuscle.User, "align", failing)
    result = run(cell, registry, tmp_path)
    shapes = [tuple(exchange.sent["user1"]["others"].shape) for exchange in memory if exchange.verb == "align"]
    assert shapes == [(3, B, D), (3, B, D)] + [(2, B, D)] * 4
    second = result["rounds"][1]["log"]
    for user in ("user1", "user3", "user4"):
        expected = 2 * math.log(B) - second["alignment loss"][user]
        assert second["paper's bound"][user] == pytest.approx(expected, rel=1e-9)
