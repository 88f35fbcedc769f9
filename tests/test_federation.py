"""The exchange of a cell: order, bytes, who may ask for what, and what a fault means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from fedbench import messages
from fedbench.federation import CellFailed, Federation
from fedbench.interfaces import Engine, Fault, Protocol
from fedbench_plugins.engines.local import LocalEngine

USERS = ["user1", "user2", "user3"]
Answer = Callable[[str, str, dict[str, Any]], Any]


def echo(user: str, verb: str, message: dict[str, Any]) -> Any:
    """What most tests need of a user."""
    return {"who": user, "loss": float(len(user)), "value": 1.0}


class BackwardsEngine(Engine):
    """Answers in the opposite order, with what a test says: a reply, raw bytes, a fault, or None for silence."""

    def __init__(self, answer: Answer = echo) -> None:
        self.answer = answer
        self.asked: list[tuple[str, list[str]]] = []
        self.sent: dict[str, bytes] = {}

    def start(self, users: Mapping[str, Any]) -> None: ...

    def ask(
        self, verb: str, outgoing: Mapping[str, bytes], *, timeout: float | None = None
    ) -> dict[str, bytes | Fault]:
        self.asked.append((verb, list(outgoing)))
        self.sent = dict(outgoing)
        replies = {}
        for user in reversed(list(outgoing)):
            reply = self.answer(user, verb, messages.decode(outgoing[user]))
            if reply is not None:
                replies[user] = reply if isinstance(reply, Fault | bytes) else messages.encode(reply)
        return replies

    def save(self) -> dict[str, bytes]:
        return {}

    def restore(self, states: Mapping[str, bytes]) -> None: ...


def federation(
    answer: Answer = echo, *, after_fit: Callable[[], None] = lambda: None, **protocol: Any
) -> tuple[Federation, BackwardsEngine]:
    engine = BackwardsEngine(answer)
    return Federation(engine, USERS, Protocol(**protocol), after_fit), engine


def everyone(**message: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(USERS, message)


def failing(verb: str, who: str, kind: str = "raised") -> Answer:
    """Users that answer, but for one in one verb."""

    def answer(user: str, asked: str, message: dict[str, Any]) -> Any:
        if (user, asked) == (who, verb):
            return Fault(user, asked, kind, "out of luck", "Traceback: line 7")
        return echo(user, asked, message)

    return answer


def test_replies_come_in_user_order_whatever_the_engine_and_the_caller_did() -> None:
    exchange, engine = federation()
    replies = exchange.ask("represent", dict(reversed(everyone().items())))
    assert list(replies) == USERS == engine.asked[0][1]
    assert {user: reply["who"] for user, reply in replies.items()} == {user: user for user in USERS}
    assert list(exchange.evaluate("validation")) == USERS


def test_only_who_is_asked_hears_of_it() -> None:
    exchange, engine = federation()
    assert list(exchange.ask("represent", {"user3": {}, "user1": {}})) == ["user1", "user3"]
    assert engine.asked == [("represent", ["user1", "user3"])]


def test_bytes_are_those_of_the_encoded_messages() -> None:
    def answer(user: str, verb: str, message: dict[str, Any]) -> dict[str, Any]:
        return {"z": torch.zeros(4, int(user[-1])), "loss": 0.5}

    exchange, engine = federation(answer)
    z = {"others": torch.zeros(2, 4, 8), "batch": torch.zeros(4, dtype=torch.int64), "text": "x"}
    down = {user: len(messages.encode(z)) for user in USERS}
    up = {user: len(messages.encode(answer(user, "", {}))) for user in USERS}
    for times in (1, 2):
        exchange.ask("align", everyone(**z))
        assert {user: len(sent) for user, sent in engine.sent.items()} == down
        assert dict(exchange.meter.down) == {user: times * size for user, size in down.items()}
        assert dict(exchange.meter.up) == {user: times * size for user, size in up.items()}
        assert dict(exchange.meter.tensor_down) == dict.fromkeys(USERS, times * (2 * 4 * 8 * 4 + 4 * 8))
        assert dict(exchange.meter.tensor_up) == {user: times * 4 * 4 * int(user[-1]) for user in USERS}


def test_scoring_is_not_metered_but_timed() -> None:
    exchange, _ = federation()
    exchange.evaluate("test")
    assert not exchange.meter.up and not exchange.meter.down
    assert exchange.meter.seconds["evaluate"] > 0


def test_a_method_may_not_ask_for_scores() -> None:
    exchange, engine = federation()
    with pytest.raises(ValueError, match="'evaluate' belongs to the core"):
        exchange.ask("evaluate", everyone(split="test"))
    assert engine.asked == []


def test_unknown_users_are_named() -> None:
    exchange, engine = federation()
    with pytest.raises(ValueError, match="no such users: user9"):
        exchange.ask("represent", {"user1": {}, "user9": {}})
    assert engine.asked == []


def test_a_message_that_cannot_be_sent_names_its_key() -> None:
    exchange, _ = federation()
    with pytest.raises(TypeError, match="'others' is a dict"):
        exchange.ask("align", everyone(others={"nested": 1}))


def test_fit_is_scored_once_right_after_it() -> None:
    seen: list[list[str]] = []
    exchange, engine = federation(after_fit=lambda: seen.append([verb for verb, _ in engine.asked]))
    exchange.ask("represent", everyone())
    assert seen == []
    exchange.ask("fit", everyone())
    assert seen == [["represent", "fit"]]
    assert exchange.meter.logged()["fit loss"] == dict.fromkeys(USERS, 5.0)


def test_nobody_gets_two_local_phases_in_a_round() -> None:
    exchange, engine = federation()
    exchange.ask("fit", {"user1": {}})
    exchange.ask("fit", {"user2": {}})
    with pytest.raises(ValueError, match=r"'fit' was asked of user1 twice in a round.*R \+ 1"):
        exchange.ask("fit", everyone())
    assert [verb for verb, _ in engine.asked] == ["fit", "fit"]


def test_a_rounds_log_is_a_mean_for_each_user() -> None:
    exchange, _ = federation()
    for value in (1.0, 2.0, 6.0):
        exchange.log("alignment loss", {"user1": value, "user2": 1})
    assert exchange.meter.logged() == {"alignment loss": {"user1": 3.0, "user2": 1.0}}


@pytest.mark.parametrize("kind", ["raised", "gone", "timed out"])
def test_a_fault_ends_the_cell_and_keeps_its_cause(kind: str) -> None:
    exchange, _ = federation(failing("align", "user2", kind))
    exchange.ask("fit", everyone())
    with pytest.raises(CellFailed, match=f"user2 {kind} in 'align': out of luck") as caught:
        exchange.ask("align", everyone())
    assert caught.value.fault == Fault("user2", "align", kind, "out of luck", "Traceback: line 7")


def test_a_fault_in_scoring_counts_too() -> None:
    exchange, _ = federation(failing("evaluate", "user3"))
    with pytest.raises(CellFailed, match="user3 raised in 'evaluate'"):
        exchange.evaluate("validation")


def test_a_failed_user_is_left_out_where_the_suite_says_skip() -> None:
    exchange, engine = federation(failing("align", "user2"), on_failure="skip")
    assert list(exchange.ask("align", everyone())) == ["user1", "user3"]
    assert exchange.alive == ["user1", "user3"]
    assert [fault.user for fault in exchange.faults] == ["user2"]
    assert "user2" not in exchange.meter.up
    with pytest.raises(ValueError, match="no such users: user2"):
        exchange.ask("align", {"user2": {}})
    exchange.evaluate("validation")
    assert engine.asked[-1] == ("evaluate", ["user1", "user3"])


def test_a_cell_needs_its_quorum() -> None:
    def answer(user: str, verb: str, message: dict[str, Any]) -> Any:
        return echo(user, verb, message) if user == "user3" else Fault(user, verb, "gone", "no power")

    exchange, _ = federation(answer, on_failure="skip", quorum=2)
    with pytest.raises(CellFailed, match="user2 gone in 'represent': no power"):
        exchange.ask("represent", everyone())
    exchange, _ = federation(answer, on_failure="skip", quorum=1)
    assert list(exchange.ask("represent", everyone())) == ["user3"]


def test_silence_and_noise_are_faults_that_name_the_user() -> None:
    exchange, _ = federation(lambda user, verb, message: None if user == "user2" else {})
    with pytest.raises(CellFailed, match="user2 gone in 'represent': no reply"):
        exchange.ask("represent", everyone())
    exchange, _ = federation(lambda user, verb, message: b"noise" if user == "user2" else {})
    with pytest.raises(CellFailed, match="user2 raised in 'represent': its reply cannot be read"):
        exchange.ask("represent", everyone())


class Handle:
    """A user that breaks its own copies and fails when told to."""

    def __init__(self) -> None:
        self.calls = 0

    def call(self, verb: str, message: bytes) -> bytes:
        self.calls += 1
        arguments = messages.decode(message)
        if verb == "fail":
            raise RuntimeError("no such luck")
        arguments["z"].zero_()
        return messages.encode({"z": arguments["z"]})

    def save(self) -> bytes:
        return str(self.calls).encode()

    def restore(self, state: bytes) -> None:
        self.calls = int(state)


def local_engine() -> LocalEngine:
    engine = LocalEngine()
    engine.start({user: Handle() for user in USERS})
    return engine


def test_nothing_aliases_in_one_process() -> None:
    z = torch.ones(2, 3)
    exchange = Federation(local_engine(), USERS, Protocol(), lambda: None)
    replies = exchange.ask("clear", everyone(z=z))
    assert torch.equal(z, torch.ones(2, 3))
    replies["user1"]["z"].add_(1)
    assert torch.equal(replies["user2"]["z"], torch.zeros(2, 3))


def test_a_user_that_raised_lives_and_leaves_its_traceback() -> None:
    exchange = Federation(local_engine(), USERS, Protocol(), lambda: None)
    with pytest.raises(CellFailed) as caught:
        exchange.ask("fail", everyone())
    fault = caught.value.fault
    assert (fault.user, fault.verb, fault.kind) == ("user1", "fail", "raised")
    assert fault.message == "RuntimeError: no such luck"
    assert 'raise RuntimeError("no such luck")' in fault.trace and "test_federation.py" in fault.trace
    assert exchange.engine.ask("clear", {"user1": messages.encode({"z": torch.ones(1)})})


def test_the_local_engine_answers_in_user_order_and_keeps_states() -> None:
    engine = local_engine()
    message = messages.encode({"z": torch.ones(1)})
    assert list(engine.ask("clear", {"user3": message, "user1": message})) == ["user1", "user3"]
    states = engine.save()
    assert states == {"user1": b"1", "user2": b"0", "user3": b"1"}
    engine.ask("clear", {"user2": message})
    engine.restore(states)
    assert engine.save() == states
