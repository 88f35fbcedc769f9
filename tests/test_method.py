"""The server side of a method: what it asks, draws and samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch

from fedbench.federation import Federation
from fedbench.interfaces import Protocol, UserSpec
from fedbench.method import Method, PublicRows, ServerProgram, architecture, label_space, partnered
from fedbench.seeds import torch_generator

USERS = ["user1", "user2", "user3", "user4"]
SPECS = [
    UserSpec("user1", "mlc", "net", 10, 0.1, 0.1, 0.1),
    UserSpec("user2", "ic100", "net", 10, 0.1, 0.1, 0.1, model_options={"width": 8, "depth": 2}),
    UserSpec("user3", "mlc", "net", 10, 0.1, 0.1, 0.1, model_options={"depth": 2, "width": 8}),
    UserSpec("user4", "ic10", "other", 10, 0.1, 0.1, 0.1),
]


class Recorder:
    """Stands in for the federation and remembers what it was asked."""

    def __init__(self) -> None:
        self.alive = list(USERS)
        self.asked: list[tuple[str, dict[str, dict[str, Any]]]] = []
        self.logged: list[tuple[str, dict[str, float]]] = []

    def ask(self, verb: str, outgoing: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        self.asked.append((verb, {user: dict(message) for user, message in outgoing.items()}))
        return {user: {} for user in outgoing}

    def log(self, name: str, values: Mapping[str, float]) -> None:
        self.logged.append((name, dict(values)))


class Server(ServerProgram):
    """Has a number of its own to keep."""

    kept = 0

    def save(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.kept = state["kept"]


def server(seed: int = 0, size: int = 20) -> tuple[Server, Recorder]:
    recorder = Recorder()
    specs = {spec.name: spec for spec in SPECS}
    return Server(Method(), Protocol(), cast(Federation, recorder), specs, size, seed), recorder


def test_public_batches_have_no_item_twice_and_pass_over_the_whole_set() -> None:
    public = PublicRows(20, torch_generator("test"))
    batches = public.draw(9, 6)
    assert all(batch.shape == (6,) and batch.dtype == torch.int64 for batch in batches)
    assert all(len(set(batch.tolist())) == 6 for batch in batches)
    for start in (0, 3, 6):  # three whole batches fit into one pass; the two rows left over are dropped
        passed = torch.cat(batches[start : start + 3]).tolist()
        assert len(set(passed)) == 18
    assert set(torch.cat(batches).tolist()) == set(range(20))
    assert batches[0].tolist() != batches[3].tolist()


def test_public_batches_are_apart_in_memory() -> None:
    first, second = PublicRows(20, torch_generator("test")).draw(2, 6)
    kept = second.clone()
    first.zero_()
    assert torch.equal(second, kept)


def test_a_batch_may_be_the_whole_set() -> None:
    batches = PublicRows(6, torch_generator("test")).draw(3, 6)
    assert [sorted(batch.tolist()) for batch in batches] == [list(range(6))] * 3


def test_a_seed_decides_batches_and_others() -> None:
    def drawn(seed: int) -> tuple[list[list[int]], list[list[str]]]:
        program, _ = server(seed)
        batches = [batch.tolist() for batch in program.public.draw(4, 6)]
        return batches, [program.sample_others(user, 2) for user in USERS * 3]

    assert drawn(0) == drawn(0)
    assert drawn(0)[0] != drawn(1)[0] and drawn(0)[1] != drawn(1)[1]


def test_others_are_others_distinct_and_all_in_turn() -> None:
    program, _ = server()
    orders = set()
    for _ in range(60):
        others = program.sample_others("user2", 2)
        assert len(set(others)) == 2 and "user2" not in others
        orders.add(tuple(others))
    assert len(orders) == 6  # every ordered pair of the three others
    assert sorted(program.sample_others("user2", 9)) == ["user1", "user3", "user4"]


def test_who_is_gone_is_no_other() -> None:
    program, recorder = server()
    recorder.alive.remove("user4")
    assert {other for _ in range(30) for other in program.sample_others("user1", 1)} == {"user2", "user3"}


def test_ask_addresses_everyone_some_or_each() -> None:
    program, recorder = server()
    program.ask("represent", batch=1)
    program.ask("represent", users=["user2"], batch=1)
    program.ask("align", each={"user3": {"others": 2, "batch": 3}, "user1": {"others": 4}}, batch=1)
    program.ask("align", each={"user1": {"others": 4}}, users=["user1", "user2"])
    assert recorder.asked == [
        ("represent", {user: {"batch": 1} for user in USERS}),
        ("represent", {"user2": {"batch": 1}}),
        ("align", {"user3": {"others": 2, "batch": 3}, "user1": {"others": 4, "batch": 1}}),
        ("align", {"user1": {"others": 4}, "user2": {}}),
    ]


def test_users_can_be_looped_over_while_some_get_lost() -> None:
    program, recorder = server()
    seen = []
    for user in program.users:
        seen.append(user)
        recorder.alive.remove(user)
    assert seen == USERS and program.users == []


def test_a_cell_ends_with_a_local_phase() -> None:
    program, recorder = server()
    program.finish()
    assert recorder.asked == [("fit", {user: {} for user in USERS})]


def test_the_state_of_a_server_comes_back() -> None:
    program, _ = server()
    program.public.draw(1, 6)
    program.sample_others("user1", 2)
    program.kept = 7
    state = program.packed()
    again, _ = server(seed=9)
    again.unpacked(state)
    assert again.kept == 7
    assert [b.tolist() for b in again.public.draw(3, 6)] == [b.tolist() for b in program.public.draw(3, 6)]
    assert [again.sample_others("user1", 2) for _ in range(5)] == [program.sample_others("user1", 2) for _ in range(5)]


def test_batches_do_not_depend_on_what_else_was_sampled() -> None:
    one, _ = server()
    two, _ = server()
    two.sample_others("user1", 2)
    assert [b.tolist() for b in one.public.draw(3, 6)] == [b.tolist() for b in two.public.draw(3, 6)]


def test_a_method_must_write_its_round() -> None:
    program, _ = server()
    with pytest.raises(NotImplementedError):
        program.round(0)


def test_log_reaches_the_record() -> None:
    program, recorder = server()
    program.log("alignment loss", {"user1": 1.0})
    assert recorder.logged == [("alignment loss", {"user1": 1.0})]


def test_a_loss_needs_the_option() -> None:
    class Bare(Method):
        """Has no option."""

    with pytest.raises(TypeError, match="Bare has no option 'loss'"):
        Bare().create_loss()
    assert Bare().paper_bytes(Protocol(), 6) is None


def test_users_are_grouped_by_labels_and_by_architecture() -> None:
    made, recorder = server()
    assert made.groups(label_space) == [["user1", "user3"], ["user2"], ["user4"]]
    assert made.groups(architecture) == [["user1"], ["user2", "user3"], ["user4"]]
    assert partnered(SPECS, label_space) == ["user1", "user3"]
    assert partnered(SPECS, architecture) == ["user2", "user3"]
    recorder.alive.remove("user3")
    assert made.groups(label_space) == [["user1"], ["user2"], ["user4"]]


def test_a_method_touches_everyone_unless_it_says_otherwise() -> None:
    assert Method().touches(SPECS) == USERS
