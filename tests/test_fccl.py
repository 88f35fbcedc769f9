"""FCCL and FCCL+: their losses against naive versions, their memory of earlier models, and what crosses."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbench.errors import UserError
from fedbench.suite import load
from fedbench_baselines.fccl import FCCL, correlation_loss
from fedbench_baselines.fccl_plus import FCCLPlus, non_target_loss, similarities, similarity_loss

sys.path.append(str(Path(__file__).parent))
from public_exchange import (
    ALONE,
    CLASSES,
    DIFFERENT_RATES,
    GROUPS,
    PARTNERS,
    TASKS,
    B,
    D,
    R,
    T,
    batches,
    call,
    changed,
    exchanges,
    five_users,
)
from spies import Exchange, verbs
from tiny import WriteSuite, host, program

EVERYONE = list(TASKS)


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, two[name]) for name, value in one.items())


# -- the correlation of outputs


def naive_correlation(z: list[list[float]], mean: list[list[float]], weight: float) -> float:
    size, columns = len(z), len(z[0])

    def column(rows: list[list[float]], c: int) -> list[float]:
        values = [row[c] for row in rows]
        average = sum(values) / size
        deviation = (sum((value - average) ** 2 for value in values) / (size - 1)) ** 0.5
        return [(value - average) / deviation for value in values]

    total = 0.0
    for u in range(columns):
        for v in range(columns):
            entry = sum(a * b for a, b in zip(column(z, u), column(mean, v), strict=True)) / size
            total += (entry - 1) ** 2 if u == v else weight * (entry + 1) ** 2
    return total


def test_the_correlation_loss_is_that_of_the_paper() -> None:
    z, mean = random(6, 4), random(6, 4, seed=1)
    naive = naive_correlation(z.tolist(), mean.tolist(), 0.0051)
    assert correlation_loss(z, mean, 0.0051).item() == pytest.approx(naive, rel=1e-12)
    assert torch.autograd.gradcheck(lambda own: correlation_loss(own, mean, 0.3), (z.requires_grad_(),))


def test_the_correlation_loss_asks_for_equal_columns_up_to_scale() -> None:
    z = torch.linalg.qr(random(8, 4) - random(8, 4).mean(0))[0]
    z = z - z.mean(0)
    good = correlation_loss(z, 3 * z + 5, 0.0).item()
    assert good == pytest.approx(4 * (1 / 8) ** 2, rel=1e-9)  # (B - 1) / B on the diagonal
    assert correlation_loss(z, -z, 0.0).item() > 10


def test_a_constant_column_counts_as_zero_and_has_a_gradient() -> None:
    z, mean = random(6, 3), random(6, 3, seed=1)
    z[:, 1] = 2.0
    mean[:, 2] = -1.0
    z.requires_grad_()
    loss = correlation_loss(z, mean, 0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss) and torch.isfinite(z.grad).all()  # type: ignore[arg-type]
    kept = naive_correlation(z.detach()[:, :1].tolist(), mean[:, :1].tolist(), 0.5)
    # Two diagonal entries are 0; of six others four are 0 and two are as they are without the constant columns.
    pair = torch.stack([z.detach()[:, 0], z.detach()[:, 2]], 1), torch.stack([mean[:, 1], mean[:, 0]], 1)
    rows = [(each - each.mean(0)) / each.std(0) for each in pair]
    entries = [(rows[0][:, place] @ rows[1][:, place]) / 6 for place in (0, 1)]
    cross = (rows[0][:, 1] @ rows[1][:, 0]) / 6
    expected = kept + 2 + 0.5 * (3 + sum(float(entry + 1) ** 2 for entry in (*entries, cross)))
    assert loss.item() == pytest.approx(expected, rel=1e-9)


# -- FCCL's memory


def naive_kl(target: Tensor, own: Tensor, multi_label: bool) -> float:
    total, (rows, columns) = 0.0, target.shape
    for b in range(rows):
        if multi_label:
            for c in range(columns):
                for sign in (1, -1):
                    p = 1 / (1 + exp(-sign * target[b, c].item()))
                    q = 1 / (1 + exp(-sign * own[b, c].item()))
                    total += p * log(p / q) / columns
        else:
            p_row, q_row = target[b].double().softmax(0).tolist(), own[b].double().softmax(0).tolist()
            total += sum(p * log(p / q) for p, q in zip(p_row, q_row, strict=True))
    return total / rows


@pytest.mark.parametrize(("name", "multi_label"), [("user1", True), ("user3", False)])
def test_local_training_distils_from_the_last_and_the_first_model(path: Path, name: str, multi_label: bool) -> None:
    user: Any = program(path, "fccl", name=name, inter=2.0, intra=0.5)
    x, targets = user.private_batch()
    outputs: list[Tensor] = []

    def expected() -> float:
        own = user.outputs(x).detach()
        loss: float = user.task.loss(own, targets).item()
        if outputs:
            loss += 2.0 * naive_kl(outputs[-1], own, multi_label) + 0.5 * naive_kl(outputs[0], own, multi_label)
        return loss

    for _ in range(3):  # the first local phase is plain
        user.fit()
        assert user.private_loss(x, targets).item() == pytest.approx(expected(), rel=1e-4)
        outputs.append(user.outputs(x).detach())
        z = user.share(batches()[0])["z"]
        user.correlate(z.flip(0), next=batches()[1])
        user.correlate(z.flip(0))
        assert not torch.equal(user.outputs(x), outputs[-1])
        assert torch.equal(user.recall(user.previous, x), outputs[-1])
        assert torch.equal(user.recall(user.pretrained, x), outputs[0])
        assert user.private_loss(x, targets).item() == pytest.approx(expected(), rel=1e-4)


def test_an_earlier_model_gets_no_gradient_and_leaves_the_own_in_place(path: Path) -> None:
    user: Any = program(path, "fccl")
    user.share(batches()[0])
    x, targets = user.private_batch()
    own = user.representation, user.head
    loss = user.private_loss(x, targets)
    assert (user.representation, user.head) == own
    loss.backward()  # type: ignore[no-untyped-call]
    for model in user.previous:
        assert not model.training and all(parameter.grad is None for parameter in model.parameters())
    assert user.representation.training


def test_without_weights_nothing_is_recalled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user: Any = program(path, "fccl", inter=0.0, intra=0.0)
    user.share(batches()[0])
    monkeypatch.setattr(user, "recall", None)
    x, targets = user.private_batch()
    assert torch.equal(user.private_loss(x, targets), user.task.loss(user.outputs(x), targets))


# -- FCCL's exchange


def rounds_of(memory: list[Exchange]) -> list[list[Exchange]]:
    """What was asked from one local phase to the next."""
    starts = [place for place, exchange in enumerate(memory) if exchange.verb == "fit"]
    return [memory[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


@pytest.mark.parametrize(
    ("options", "groups", "width"),
    [({}, GROUPS, CLASSES), ({"on": "embedding"}, [EVERYONE], dict.fromkeys(CLASSES, D))],
)
def test_fccl_returns_the_mean_of_each_group_batch_by_batch(
    path: Path, tmp_path: Path, options: dict[str, Any], groups: list[list[str]], width: dict[str, int]
) -> None:
    memory, result = exchanges(path, "fccl", tmp_path, **options)
    rounds = rounds_of(memory)
    assert [verbs(one) for one in rounds] == [["fit", "share"] + ["correlate"] * T] * R + [["fit"]]
    members = [user for group in groups for user in group]
    assert result["touched"] == members
    for one in rounds[:R]:
        assert all(list(exchange.sent) == members for exchange in one[1:])
        rows = [one[1].sent["user1"]["batch"], *(exchange.sent["user1"]["next"] for exchange in one[2:-1])]
        assert len({tuple(batch.tolist()) for batch in rows}) == T
        for before, exchange in pairwise(one[1:]):
            for group in groups:
                z = [before.replies[user]["z"] for user in group]
                assert all(each.shape == (B, width[TASKS[group[0]]]) for each in z)
                for user in group:
                    assert torch.allclose(exchange.sent[user]["mean"], torch.stack(z).mean(0), atol=1e-6)
        assert all(reply.keys() == {"loss"} for reply in one[-1].replies.values())
    row = sum(B * width[TASKS[user]] * 4 for user in members)
    assert result["bytes"]["tensor_up"] == T * row
    assert result["bytes"]["tensor_down"] == T * row + T * len(members) * B * 8


def test_a_step_is_on_the_correlation_of_the_batch_that_was_shared(path: Path) -> None:
    user: Any = program(path, "fccl", off_diagonal=0.2)
    first, second = batches()[:2]
    mean = torch.randn(B, 10, generator=torch.Generator().manual_seed(0))
    z = user.share(first)["z"]
    assert torch.equal(z, user.outputs(user.public_rows(first)).detach())
    reply = user.correlate(mean, next=second)
    assert reply["loss"] == pytest.approx(correlation_loss(z, mean, 0.2).item(), rel=1e-5)
    assert torch.equal(reply["z"], user.outputs(user.public_rows(second)).detach())
    closer = user.outputs(user.public_rows(first)).detach()
    assert correlation_loss(closer, mean, 0.2) < correlation_loss(z, mean, 0.2)
    user.correlate(mean)
    assert user.public_steps == 2
    with pytest.raises(RuntimeError, match="before share"):
        user.correlate(mean)


def test_an_embedding_crosses_before_it_is_normalised_and_spares_the_head(write_suite: WriteSuite) -> None:
    user: Any = program(five_users(write_suite, DIFFERENT_RATES), "fccl", on="embedding", rate=0.5)
    user.fit()
    head = weights(user.head)
    parts = user.representation.backbone, user.representation.projection
    before = [weights(part) for part in parts]
    z = user.share(batches()[0])["z"]
    assert torch.equal(z, parts[1](parts[0](user.public_rows(batches()[0]))).detach())
    assert not torch.allclose(z.norm(dim=1), torch.ones(B), atol=1e-2)
    user.correlate(z.flip(0))
    assert same(head, user.head.state_dict())
    assert not any(same(old, part.state_dict()) for old, part in zip(before, parts, strict=True))
    assert [group["rate"] for group in user.public_optimizer.param_groups] == pytest.approx([5e-4, 2e-3])


def test_the_public_phase_on_logits_trains_the_head_too(path: Path) -> None:
    user: Any = program(path, "fccl")
    head, backbone = weights(user.head), weights(user.representation.backbone)
    projection = weights(user.representation.projection)
    z = user.share(batches()[0])["z"]
    user.correlate(z.flip(0))
    assert not same(head, user.head.state_dict())
    assert not same(backbone, user.representation.backbone.state_dict())
    assert same(projection, user.representation.projection.state_dict())


@pytest.mark.parametrize(
    ("method", "options", "touched"),
    [("fccl", {}, PARTNERS), ("fccl", {"on": "embedding"}, EVERYONE), ("fccl+", {}, EVERYONE)],
)
def test_who_exchanges_is_touched_and_the_rest_trains_as_in_local_training(
    path: Path, tmp_path: Path, method: str, options: dict[str, Any], touched: list[str]
) -> None:
    assert changed(path, method, tmp_path, **options) == touched


def test_one_user_has_nobody_to_exchange_with(path: Path, tmp_path: Path) -> None:
    users = load(str(path)).users
    assert FCCL(on="embedding").touches(users[:1]) == FCCLPlus().touches(users[:1]) == FCCL().touches(users[3:]) == []
    assert FCCL(on="embedding").touches(users) == FCCLPlus().touches(users) == EVERYONE


# -- FCCL+


def test_similarities_are_cosines_between_items_without_themselves() -> None:
    features = random(4, 3)
    found = similarities(features, 0.02)
    assert found.shape == (4, 3)
    for i in range(4):
        others = [j for j in range(4) if j != i]
        for place, j in enumerate(others):
            cosine = (features[i] @ features[j]) / (features[i].norm() * features[j].norm())
            assert found[i, place].item() == pytest.approx(cosine.item() / 0.02, rel=1e-10)


def test_the_similarity_loss_is_a_kl_a_row_from_the_mean() -> None:
    own, mean = random(4, 3), random(4, 3, seed=1)
    assert similarity_loss(own, mean).item() == pytest.approx(naive_kl(mean, own, False), rel=1e-10)
    assert similarity_loss(own, own).item() == pytest.approx(0, abs=1e-12)
    features = random(4, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: similarity_loss(similarities(z, 0.5), mean), (features,))


def test_non_target_distillation_leaves_out_the_class_without_renormalising() -> None:
    own, earlier, targets = random(3, 4), random(3, 4, seed=1), torch.tensor([2, 0, 3])
    total = 0.0
    for b in range(3):
        p, q = (each[b].div(3.0).softmax(0).tolist() for each in (earlier, own))
        total += sum(p[c] * log(p[c] / q[c]) for c in range(4) if c != targets[b])
    assert non_target_loss(own, earlier, targets, 3.0).item() == pytest.approx(9 * total / 3, rel=1e-10)
    assert non_target_loss(own, own, targets, 3.0).item() == pytest.approx(0, abs=1e-12)
    assert torch.autograd.gradcheck(lambda z: non_target_loss(z, earlier, targets, 3.0), (own.requires_grad_(),))


def test_non_target_distillation_of_many_classes_is_over_the_absent_ones() -> None:
    own, earlier = random(2, 3), random(2, 3, seed=1)
    targets = torch.tensor([[1, 0, 0], [1, 1, 1]], dtype=torch.uint8)
    total = 0.0
    for c in (1, 2):
        for sign in (1, -1):
            p = 1 / (1 + exp(-sign * earlier[0, c].item() / 3))
            q = 1 / (1 + exp(-sign * own[0, c].item() / 3))
            total += p * log(p / q)
    own.requires_grad_()
    loss = non_target_loss(own, earlier, targets, 3.0)
    assert loss.item() == pytest.approx(9 * total / 6, rel=1e-10)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(own.grad == 0, targets == 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["user1", "user3"])
def test_fccl_plus_distils_from_the_last_model_only(path: Path, name: str) -> None:
    user: Any = program(path, "fccl+", name=name, local_temperature=2.0)
    x, targets = user.private_batch()
    assert torch.equal(user.private_loss(x, targets), user.task.loss(user.outputs(x), targets))
    for _ in range(2):
        user.fit()
        earlier = user.outputs(x).detach()
        similarity = user.share(batches()[0], outputs=False)["similarity"]
        user.collaborate(similarity.flip(0))
        own = user.outputs(x).detach()
        assert not torch.equal(own, earlier)
        expected = user.task.loss(own, targets) + non_target_loss(own, earlier, targets, 2.0)
        assert user.private_loss(x, targets).item() == pytest.approx(expected.item(), rel=1e-5)


def test_fccl_plus_returns_similarities_of_all_and_outputs_of_partners(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "fccl+", tmp_path)
    rounds = rounds_of(memory)
    assert [verbs(one) for one in rounds] == [["fit", "share"] + ["collaborate"] * T] * R + [["fit"]]
    assert result["touched"] == EVERYONE
    for one in rounds[:R]:
        assert all(list(exchange.sent) == EVERYONE for exchange in one)
        for before, exchange in pairwise(one[1:]):
            similarity = torch.stack([before.replies[user]["similarity"] for user in EVERYONE])
            assert similarity.shape == (len(EVERYONE), B, B - 1)
            for user in EVERYONE:
                assert torch.allclose(exchange.sent[user]["similarity"], similarity.mean(0), atol=1e-4)
            for group in GROUPS:
                z = torch.stack([before.replies[user]["z"] for user in group])
                for user in group:
                    assert torch.allclose(exchange.sent[user]["z"], z.mean(0), atol=1e-6)
            assert "z" not in before.replies[ALONE] and "z" not in exchange.sent[ALONE]
    rows = sum(B * CLASSES[TASKS[user]] * 4 for user in PARTNERS) + len(EVERYONE) * B * (B - 1) * 4
    assert result["bytes"]["tensor_up"] == T * rows
    assert result["bytes"]["tensor_down"] == T * rows + T * len(EVERYONE) * B * 8


@pytest.mark.parametrize("head", ["features", "embedding"])
def test_a_step_of_fccl_plus_is_on_both_losses(write_suite: WriteSuite, head: str) -> None:
    path = five_users(write_suite, ("[protocol]", f'[protocol]\nhead = "{head}"'))
    user: Any = program(path, "fccl+", similarity=2.0, tau=0.5)
    first, second = batches()[:2]
    x = user.public_rows(first)
    features = user.representation.backbone(x)
    features = user.representation.projection(features) if head == "embedding" else features
    reply = user.share(first, outputs=True)
    assert torch.equal(reply["z"], user.outputs(x).detach())
    assert torch.equal(reply["similarity"], similarities(features, 0.5).detach())
    similarity, z = reply["similarity"].flip(0), reply["z"].flip(0)
    expected = 2.0 * similarity_loss(reply["similarity"], similarity) + correlation_loss(reply["z"], z, 0.0051)
    later = user.collaborate(similarity, z=z, next=second)
    assert later["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(later["z"], user.outputs(user.public_rows(second)).detach())
    last = user.collaborate(similarity)  # its partner has gone
    assert last["loss"] == pytest.approx(2.0 * similarity_loss(later["similarity"], similarity).item(), rel=1e-5)
    with pytest.raises(RuntimeError, match="before share"):
        user.collaborate(similarity)


def test_similarities_alone_leave_the_head_untouched(path: Path) -> None:
    user: Any = program(path, "fccl+", name=ALONE)
    user.fit()
    head, backbone = weights(user.head), weights(user.representation.backbone)
    reply = user.share(batches()[0], outputs=False)
    assert reply.keys() == {"similarity"}
    user.collaborate(reply["similarity"].flip(0), next=batches()[1])
    user.collaborate(reply["similarity"])
    assert same(head, user.head.state_dict())
    assert not same(backbone, user.representation.backbone.state_dict())


# -- both


@pytest.mark.parametrize(
    ("method", "options"), [("fccl", {}), ("fccl", {"on": "embedding"}), ("fccl+", {})], ids=["logits", "rep", "plus"]
)
def test_a_restored_user_goes_on_bit_for_bit(path: Path, method: str, options: dict[str, Any]) -> None:
    hosts = [host(path, method, **options) for _ in range(2)]

    def round_of(user: Any, seed: int) -> None:
        call(user, "fit")
        first, second = batches(seed)[:2]
        if method == "fccl":
            z = call(user, "share", batch=first)["z"]
            z = call(user, "correlate", mean=z.flip(0), next=second)["z"]
            call(user, "correlate", mean=z.flip(0))
        else:
            sent = call(user, "share", batch=first, outputs=True)
            means = {name: sent[name].flip(0) for name in ("similarity", "z")}
            call(user, "collaborate", **means, next=second)
            call(user, "collaborate", **means)

    round_of(hosts[0], 0)
    round_of(hosts[0], 1)
    state = hosts[0].save()
    hosts[1].restore(state)
    assert hosts[1].save() == state
    for user in hosts:
        round_of(user, 2)
    assert hosts[0].save() == hosts[1].save() != state


@pytest.mark.parametrize("method", ["fccl", "fccl+"])
def test_who_loses_its_partner_goes_on_alone(
    write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    path = five_users(write_suite, ("others = 2", 'others = 2\non_failure = "skip"'))
    kind = {"fccl": FCCL.User, "fccl+": FCCLPlus.User}[method]
    name = {"fccl": "correlate", "fccl+": "collaborate"}[method]
    step = getattr(kind, name)

    def failing(self: Any, **message: Any) -> dict[str, Any]:
        if self.name == "user2" and self.public_steps == 1:
            raise RuntimeError("no such luck")
        return step(self, **message)  # type: ignore[no-any-return]

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, name, failing)
    memory, _ = exchanges(path, method, tmp_path)
    later = [exchange for exchange in memory if exchange.verb == name][2:]
    if method == "fccl":
        assert all(list(exchange.sent) == ["user3", "user4"] for exchange in later)
    else:
        assert all(list(exchange.sent) == ["user1", "user3", "user4", ALONE] for exchange in later)
        assert not any("z" in exchange.sent["user1"] for exchange in later)
        assert all("z" in exchange.sent["user3"] for exchange in later)


def test_bad_options_are_named() -> None:
    for options in ({"inter": -1.0}, {"intra": float("nan")}, {"off_diagonal": 0.0}, {"rate": 0.0}):
        with pytest.raises(UserError, match=f"'{next(iter(options))}' of fccl "):
            FCCL(**options)  # type: ignore[arg-type]
    for option in ("similarity", "tau", "off_diagonal", "local_temperature", "rate"):
        with pytest.raises(UserError, match=f"'{option}' of fccl"):
            FCCLPlus(**{option: 0.0})
