"""LG-FedAvg: where the shared head sits, what is averaged among whom, and that who has no partner trains locally."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbench import messages
from fedbench.user import UserHost
from fedbench_baselines.lg_fedavg import HeadSharingUser

sys.path.append(str(Path(__file__).parent))
from conftest import USER
from spies import Exchange, spied, verbs
from tiny import WriteSuite, cell_of, host, program, run

R, D, CLASSES = 2, 16, 10
SIZES = {"user1": 40, "user4": 24}


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    """Users 1 and 4 share a label space, not an architecture; users 2 and 3 are alone in theirs."""
    suite = write_suite()
    fourth = USER.format(name="user4", task="mlc", model="small-resnet").replace("train = 40", "train = 24")
    suite.write_text(suite.read_text() + fourth)
    return suite


def exchanges(path: Path, method: str, runs: Path) -> tuple[list[Exchange], dict[str, Any]]:
    """What a cell exchanged but for scores, and its result."""
    cell, registry = cell_of(path, method)
    memory = spied(registry)
    result = run(cell, registry, runs)
    return [exchange for exchange in memory if exchange.verb != "evaluate"], result


def test_the_shared_head_starts_equal_in_a_label_space(path: Path) -> None:
    def weight(name: str, seed: int = 0) -> torch.Tensor:
        user: Any = program(path, "lg-fedavg", name=name, seed=seed)
        return user.shared_head.weight.detach()  # type: ignore[no-any-return]

    assert weight("user1").shape == (CLASSES, D)
    assert torch.equal(weight("user1"), weight("user4"))
    assert not torch.equal(weight("user1"), weight("user3"))  # as many classes, another task
    assert not torch.equal(weight("user1"), weight("user1", seed=1))


@pytest.mark.parametrize("place", ["features", "embedding"])
def test_the_shared_head_sits_on_the_projection_once_a_user_has_joined(path: Path, place: str) -> None:
    path.write_text(path.read_text().replace("[protocol]", f'[protocol]\nhead = "{place}"'))
    user: Any = program(path, "lg-fedavg")
    x = user.participant.train.rows(torch.arange(6), 0)
    assert torch.equal(user.outputs(x), program(path, "local").outputs(x))
    user.join()
    projected = user.representation.projection(user.representation.backbone(x))
    expected = projected @ user.shared_head.weight.T + user.shared_head.bias
    assert torch.allclose(user.outputs(x), expected, atol=1e-6)


@pytest.mark.parametrize("joined", [True, False])
def test_a_local_phase_trains_the_head_in_use_and_leaves_the_other(path: Path, joined: bool) -> None:
    user, local = (program(path, method) for method in ("lg-fedavg", "local"))
    assert isinstance(user, HeadSharingUser)
    if joined:
        user.join()
    before = {name: value.clone() for name, value in user.shared_head.state_dict().items()}
    head = {name: value.clone() for name, value in user.head.state_dict().items()}
    projection = user.representation.projection.state_dict()
    projection = {name: value.clone() for name, value in projection.items()}
    user.fit()
    local.fit()
    kept = all(torch.equal(value, head[name]) for name, value in user.head.state_dict().items())
    shared = all(torch.equal(value, before[name]) for name, value in user.shared_head.state_dict().items())
    still = all(
        torch.equal(value, projection[name]) for name, value in user.representation.projection.state_dict().items()
    )
    assert (kept, shared, still) == (joined, not joined, not joined)
    if not joined:
        for mine, theirs in ((user.representation, local.representation), (user.head, local.head)):
            assert messages.pack(mine.state_dict()) == messages.pack(theirs.state_dict())


def test_every_local_phase_has_the_protocols_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user: Any = program(path, "lg-fedavg")
    user.join()
    taken = []
    step = user.step
    monkeypatch.setattr(user, "step", lambda optimizer, loss: (taken.append(optimizer), step(optimizer, loss)))
    user.fit()
    assert taken == [user.fit_optimizer] * 2


def test_partners_send_their_heads_and_get_the_weighted_mean(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "lg-fedavg", tmp_path)
    assert verbs(memory) == ["join", *["fit", "upload", "download"] * R, "fit"]
    everyone = ["user1", "user2", "user3", "user4"]
    for exchange in memory:
        assert list(exchange.sent) == (everyone if exchange.verb == "fit" else list(SIZES))
    ups = [exchange.replies for exchange in memory if exchange.verb == "upload"]
    downs = [exchange.sent for exchange in memory if exchange.verb == "download"]
    for up, down in zip(ups, downs, strict=True):
        for name, shape in (("weight", (CLASSES, D)), ("bias", (CLASSES,))):
            assert not torch.equal(up["user1"][name], up["user4"][name])
            wanted = torch.zeros(shape, dtype=torch.float64)
            for user, size in SIZES.items():
                wanted += size / 64 * up[user][name].double()
            for user in SIZES:
                assert down[user].keys() == {"weight", "bias"}
                assert torch.allclose(down[user][name].double(), wanted, atol=1e-7)
    size = 4 * (CLASSES * D + CLASSES)
    assert result["bytes"]["tensor_up"] == result["bytes"]["tensor_down"] == 2 * size
    assert result["touched"] == list(SIZES)


def test_a_user_goes_on_from_the_mean(path: Path) -> None:
    user: Any = program(path, "lg-fedavg")
    mean = {"weight": torch.ones(CLASSES, D), "bias": torch.arange(float(CLASSES))}
    user.download(**mean)
    assert all(torch.equal(value, mean[name]) for name, value in user.upload().items())


def test_partners_change_and_the_others_are_local_bit_for_bit(path: Path, tmp_path: Path) -> None:
    results = {
        method: exchanges(path, method, tmp_path)[1] for method in ("local", "lg-fedavg", "lg-fedavg:average=false")
    }
    curves: dict[str, dict[str, list[float]]] = {
        method: {
            user: [record[kind][user] for record in result["rounds"] for kind in ("validation", "train_loss")]
            for user in result["rounds"][0]["validation"]
        }
        for method, result in results.items()
    }
    local, averaged, apart = curves.values()
    for user in ("user2", "user3"):
        assert local[user] == averaged[user] == apart[user]
    for user in SIZES:
        assert averaged[user] != local[user] != apart[user]
        assert averaged[user][:2] == apart[user][:2]  # nothing was averaged before the first score
        assert averaged[user] != apart[user]


def test_the_control_exchanges_nothing(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "lg-fedavg:average=false", tmp_path)
    assert verbs(memory) == ["join"] + ["fit"] * (R + 1)
    assert result["bytes"]["tensor_up"] == result["bytes"]["tensor_down"] == 0
    assert result["touched"] == list(SIZES)


def test_it_does_not_apply_where_nobody_has_a_partner(write_suite: WriteSuite, tmp_path: Path) -> None:
    _, result = exchanges(write_suite(), "lg-fedavg", tmp_path)
    assert result["touched"] == [] and result["status"] not in ("done", "failed")


def test_where_a_partner_is_skipped_nobody_is_left_to_average_with(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(path.read_text().replace("[protocol]", '[protocol]\non_failure = "skip"'))
    upload: Any = HeadSharingUser.upload

    def failing(self: Any) -> dict[str, Any]:
        if self.name == "user4" and self.fits == 2:
            raise RuntimeError("no such luck")
        return upload(self)  # type: ignore[no-any-return]

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(HeadSharingUser, "upload", failing)
    memory, result = exchanges(path, "lg-fedavg", tmp_path)
    assert result["status"] == "done"
    assert [list(exchange.sent) for exchange in memory if exchange.verb == "download"] == [list(SIZES), []]


def test_a_restored_user_goes_on_bit_for_bit(path: Path) -> None:
    hosts = [host(path, "lg-fedavg") for _ in range(2)]

    def round_of(user: UserHost) -> None:
        user.call("fit", messages.encode({}))
        sent = messages.decode(user.call("upload", messages.encode({})))
        user.call("download", messages.encode({name: value / 2 for name, value in sent.items()}))

    hosts[0].call("join", messages.encode({}))
    round_of(hosts[0])
    state = hosts[0].save()
    hosts[1].restore(state)
    assert hosts[1].save() == state
    for user in hosts:
        round_of(user)
    assert hosts[0].save() == hosts[1].save() != state
