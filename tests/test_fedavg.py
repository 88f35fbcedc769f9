"""FedAvg and FedProx: means and the proximal term against naive versions; what weights cross, and where they go."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench.errors import UserError
from fedbench_baselines.averaging import flattened, total, unflattened
from fedbench_baselines.fedavg import FedAvg
from fedbench_baselines.fedprox import FedProx, squared_distance
from fedbench_baselines.shared_weights import SharingUser

sys.path.append(str(Path(__file__).parent))
from shared_architecture import (
    ALIKE,
    ALONE,
    TWINS,
    USERS,
    Cell,
    R,
    call,
    changed,
    check_resume,
    exchanges,
    five_users,
    of_part,
    same,
    sizes,
)
from spies import verbs
from tiny import WriteSuite, host, program

SUITES = Path(__file__).resolve().parent.parent / "suites"
ROUND = ["fit", "upload", "download"]


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def naive_mean(sent: dict[str, dict[str, Tensor]], part: str, users: list[str]) -> dict[str, Tensor]:
    """Σ_n |D^n| w^n / Σ_n |D^n|, number by number, in float64."""
    sizes = [USERS[user][2] for user in users]
    states = [of_part(sent[user], part) for user in users]
    found = {}
    for name, first in states[0].items():
        mean = torch.zeros(first.shape, dtype=torch.float64)
        for size, state in zip(sizes, states, strict=True):
            mean += size * state[name].double()
        found[name] = mean / sum(sizes)
    return found


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_a_round_is_fit_upload_and_download_of_the_means(path: Path, tmp_path: Path, method: str) -> None:
    memory, result = exchanges(path, method, tmp_path)
    assert verbs(memory) == ["upload", "upload", "download", *ROUND * R, "fit"]
    assert result["touched"] == ALIKE
    for fit, upload, download in zip(memory[3:-1:3], memory[4::3], memory[5::3], strict=True):
        assert list(fit.sent) == list(USERS) and not any(fit.sent.values())
        assert list(upload.sent) == list(download.sent) == ALIKE
        assert [sent["parts"] for sent in upload.sent.values()] == [
            ["body", "head"] if user in TWINS else ["body"] for user in ALIKE
        ]
        for user in ALIKE:
            assert bool(of_part(upload.replies[user], "head")) == (user in TWINS)
            for part, users in (("body", ALIKE), ("head", TWINS if user in TWINS else [])):
                mean = naive_mean(upload.replies, part, users) if users else {}
                got = of_part(download.sent[user], part)
                assert got.keys() == mean.keys()
                assert all(torch.allclose(got[name].double(), mean[name], atol=1e-6) for name in mean)


def test_all_of_a_group_start_from_its_first_user(path: Path, tmp_path: Path) -> None:
    memory, _ = exchanges(path, "fedavg", tmp_path)
    body, head, start = memory[:3]
    assert list(body.sent) == list(head.sent) == ["user1"]
    assert (body.sent["user1"]["parts"], head.sent["user1"]["parts"]) == (["body"], ["head"])
    whole = body.replies["user1"] | head.replies["user1"]
    assert same(whole, program_weights(path))
    for user in ALIKE:
        assert same(start.sent[user], whole if user in TWINS else body.replies["user1"])


def program_weights(path: Path) -> dict[str, Tensor]:
    """The initial weights of user1's backbone and head, as they cross."""
    user = program(path)
    parts = (("backbone.", user.representation.backbone), ("head.", user.head))
    return {f"{prefix}{name}": value.detach() for prefix, part in parts for name, value in part.named_parameters()}


def test_a_download_is_where_training_goes_on(path: Path) -> None:
    cell = Cell(path, "fedavg")
    for r in range(R):
        cell.play(r)
        weights = {user: cell.program(user).weights(["body", "head"]) for user in ALIKE}
        bodies = [of_part(weights[user], "body") for user in ALIKE]
        assert all(same(bodies[0], body) for body in bodies)
        assert same(weights["user1"], weights["user4"]) and not same(weights["user1"], weights["user3"])
    cell.play(R)
    assert not same(*(of_part(cell.program(user).weights(["body"]), "body") for user in TWINS))


def test_the_moments_stay_with_the_user(path: Path) -> None:
    user = host(path, "fedavg")
    call(user, "fit")
    before = user.program.packed()["fit_optimizer"]["state"]
    kept = {key: {name: value.clone() for name, value in state.items()} for key, state in before.items()}
    call(user, "download", **{name: value + 1 for name, value in call(user, "upload", parts=["body"]).items()})
    after = user.program.packed()["fit_optimizer"]["state"]
    assert kept and all(same(kept[key], after[key]) for key in kept)


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_bytes_are_those_of_the_weights(path: Path, tmp_path: Path, method: str) -> None:
    _, result = exchanges(path, method, tmp_path)
    body, head = sizes(program(path))
    a_round = len(ALIKE) * body + len(TWINS) * head
    assert result["bytes"]["tensor_up"] == a_round + round((body + head) / R)
    assert result["bytes"]["tensor_down"] == a_round + round(a_round / R)
    assert result["bytes"]["paper"] is None


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_users_without_a_partner_train_locally(path: Path, tmp_path: Path, method: str) -> None:
    assert changed(path, method, tmp_path) == ALIKE


def test_where_architectures_differ_nobody_is_touched(write_suite: WriteSuite, path: Path) -> None:
    users = Cell(path, "fedavg").suite.users
    assert FedAvg().touches(users) == ALIKE
    assert FedAvg().touches([user for user in users if user.name in ("user1", ALONE)]) == []


def test_a_projection_crosses_where_heads_sit_on_it(write_suite: WriteSuite) -> None:
    plain = program(five_users(write_suite), "fedavg")
    path = five_users(write_suite, ("eval_batch = 50", 'eval_batch = 50\nhead = "embedding"'))
    user: Any = program(path, "fedavg")
    assert isinstance(plain, SharingUser) and not any("projection" in name for name in plain.weights(["body", "head"]))
    names = {name for name in user.weights(["body"]) if name.startswith("projection.")}
    assert names == {f"projection.{name}" for name, _ in user.representation.projection.named_parameters()}
    sent = {name: value + 1 for name, value in user.weights(["body"]).items()}
    user.download(**sent)
    assert same(user.weights(["body"]), sent)


@pytest.mark.parametrize("missing", ["user1", "user4"])
def test_where_users_are_skipped_the_others_go_on(
    write_suite: WriteSuite, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    path = five_users(write_suite, ("eval_batch = 50", 'eval_batch = 50\non_failure = "skip"'))
    upload = SharingUser.upload
    gone_in = {"user1": 0, "user4": 1}[missing]

    def failing(self: Any, parts: list[str]) -> dict[str, Any]:
        if self.name == missing and self.fits == gone_in:
            raise RuntimeError("no such luck")
        return upload(self, parts)

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(SharingUser, "upload", failing)
    cell = Cell(path, "fedavg")
    for r in range(R + 1):
        cell.play(r)
        left = [user for user in ALIKE if user != missing]
        weights = {user: cell.program(user).weights(["body"]) for user in left}
        assert all(same(weights["user3"], weights[user]) for user in left) == (r < R)
    assert missing not in cell.federation.alive


def test_the_proximal_term_is_half_mu_times_the_squared_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in (("a", (2, 3)), ("b", (4,)), ("own", (2,)))
    }
    reference = {name: (weights[name] * 1.5 + 0.25).detach() for name in ("a", "b")}
    distance = squared_distance(weights, reference)
    naive = sum(
        (mine - its) ** 2
        for name in reference
        for mine, its in zip(weights[name].flatten().tolist(), reference[name].flatten().tolist(), strict=True)
    )
    assert distance.item() == pytest.approx(naive, abs=1e-12)
    (0.3 / 2 * distance).backward()  # type: ignore[no-untyped-call]
    for name, value in reference.items():
        assert torch.allclose(weights[name].grad, 0.3 * (weights[name] - value).detach())  # type: ignore[arg-type]
    assert weights["own"].grad is None


def test_a_user_pays_for_leaving_what_it_got_and_for_nothing_else(path: Path) -> None:
    user, plain = (program(path, method, **options) for method, options in (("fedprox", {"mu": 0.5}), ("local", {})))
    assert isinstance(user, SharingUser)
    x, targets = user.private_batch()
    loss = plain.private_loss(x, targets).item()
    assert user.private_loss(x, targets).item() == loss  # nothing was sent yet
    user.download(**{name: value + 0.1 for name, value in user.weights(["body"]).items()})
    changed_loss = user.private_loss(x, targets).item()
    assert user.private_loss(x, targets).item() == changed_loss
    with torch.no_grad():
        for parameter in user.parameters(["body"]).values():
            parameter -= 0.1
        user.head.weight += 1  # type: ignore[operator]
        for parameter in plain.head.parameters():
            parameter.copy_(dict(user.head.named_parameters())["weight" if parameter.ndim == 2 else "bias"])
    count = sum(value.numel() for value in user.weights(["body"]).values())
    expected = plain.private_loss(x, targets).item() + 0.5 / 2 * count * 0.01
    assert user.private_loss(x, targets).item() == pytest.approx(expected, rel=1e-3)


def test_a_larger_mu_keeps_users_nearer(path: Path) -> None:
    distances = []
    for mu in (1e-4, 100.0):
        user = host(path, "fedprox", mu=mu)
        start = call(user, "upload", parts=["body", "head"])
        call(user, "download", **start)
        for _ in range(4):
            call(user, "fit")
        distances.append(float(squared_distance(call(user, "upload", parts=["body", "head"]), start)))
    assert distances[1] < 0.5 * distances[0]


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_a_restored_cell_goes_on_bit_for_bit(path: Path, method: str) -> None:
    check_resume(path, method)


def test_mu_must_be_positive() -> None:
    assert FedProx().mu == 0.01
    for mu in (0.0, -1.0, float("inf")):
        with pytest.raises(UserError, match=r"'mu' of fedprox"):
            FedProx(mu=mu)


def test_states_add_up_and_become_vectors_and_back() -> None:
    one = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])}
    two = {"a": torch.tensor([[0.5, -2.0]]), "b": torch.tensor([1.0])}
    assert same(total([one, two]), {"a": torch.tensor([[1.5, 0.0]]), "b": torch.tensor([4.0])})
    vector = flattened(one)
    assert vector.dtype == torch.float64 and vector.tolist() == [1, 2, 3]
    back = unflattened(vector * 2, like=one)
    assert same(back, {name: value * 2 for name, value in one.items()})
    assert {value.dtype for value in back.values()} == {torch.float32}
    assert len(flattened({})) == 0 and unflattened(flattened({}), like={}) == {}


def test_the_homogeneous_suite_is_setup1_with_one_architecture() -> None:
    setup1, suite = (tomllib.loads((SUITES / f"{name}.toml").read_text()) for name in ("setup1", "homogeneous"))
    for section in ("seeds", "protocol", "data", "public", "loss", "method"):
        assert suite[section] == setup1[section], section
    assert suite["rates"] == {"strong": setup1["rates"]["strong"]}
    assert len({str(user["model"]) for user in suite["user"]}) == 1
    assert {user["rates"] for user in suite["user"]} == {"strong"}
    for one, two in zip(suite["user"], setup1["user"], strict=True):
        assert {**one, "model": None, "rates": None} == {**two, "model": None, "rates": None}
