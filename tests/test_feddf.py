"""FedDF: distillation from the ensemble against naive versions, and what crosses, weights included."""

from __future__ import annotations

import sys
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbench.errors import UserError
from fedbench.suite import load
from fedbench_baselines.feddf import FedDF
from fedbench_baselines.public_logits import divergence, probabilities

sys.path.append(str(Path(__file__).parent))
from public_exchange import (
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
)
from spies import Exchange, verbs
from tiny import WriteSuite, host, program

SIBLINGS = ["user3", "user4"]
OUTPUTS = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.0, -0.5]], dtype=torch.float64)
TEACHER = torch.tensor([[1.5, 0.0, -2.0], [0.3, 0.2, 0.1]], dtype=torch.float64)


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def naive_softmax(row: list[float]) -> list[float]:
    return [exp(value) / sum(exp(other) for other in row) for value in row]


def naive_kl(target: list[float], given: list[float]) -> float:
    return sum(p * log(p / q) for p, q in zip(target, given, strict=True) if p > 0)


def test_divergence_of_one_class_an_item_is_the_kl_of_softmaxes() -> None:
    outputs = OUTPUTS.clone().requires_grad_()
    target = probabilities(TEACHER, multi_label=False)
    loss = divergence(outputs, target, multi_label=False)
    pairs = zip(TEACHER.tolist(), OUTPUTS.tolist(), strict=True)
    naive = sum(naive_kl(naive_softmax(teacher), naive_softmax(own)) for teacher, own in pairs) / 2
    assert loss.item() == pytest.approx(naive, abs=1e-12)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(outputs.grad, (OUTPUTS.softmax(1) - target) / 2, atol=1e-12)  # type: ignore[arg-type]


def test_divergence_of_many_classes_an_item_is_the_mean_of_each_class() -> None:
    outputs = OUTPUTS.clone().requires_grad_()
    target = probabilities(TEACHER, multi_label=True)
    loss = divergence(outputs, target, multi_label=True)

    def both(logit: float) -> list[float]:
        return [1 / (1 + exp(-logit)), 1 / (1 + exp(logit))]

    pairs = zip(TEACHER.flatten().tolist(), OUTPUTS.flatten().tolist(), strict=True)
    naive = sum(naive_kl(both(teacher), both(own)) for teacher, own in pairs) / 6
    assert loss.item() == pytest.approx(naive, abs=1e-12)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(outputs.grad, (OUTPUTS.sigmoid() - target) / 6, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("multi_label", [False, True])
def test_divergence_is_zero_from_itself_and_finite_from_certainty(multi_label: bool) -> None:
    own = divergence(OUTPUTS, probabilities(OUTPUTS, multi_label=multi_label), multi_label=multi_label)
    assert own.item() == pytest.approx(0, abs=1e-12)
    outputs = OUTPUTS.clone().requires_grad_()
    certain = torch.tensor([[1.0, 0, 0], [0, 0, 1]], dtype=torch.float64)
    loss = divergence(outputs, certain, multi_label=multi_label)
    loss.backward()  # type: ignore[no-untyped-call]
    reference = nn.functional.binary_cross_entropy_with_logits if multi_label else nn.functional.cross_entropy
    assert loss.item() == pytest.approx(reference(OUTPUTS, certain).item(), abs=1e-12)
    assert torch.isfinite(outputs.grad).all()  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "multi_label"), [("user1", True), ("user3", False)])
def test_the_student_divides_both_sides_by_the_temperature(path: Path, name: str, multi_label: bool) -> None:
    user: Any = program(path, "feddf", name=name, temperature=2.0)
    expected = divergence(OUTPUTS / 2, probabilities(TEACHER / 2, multi_label=multi_label), multi_label=multi_label)
    assert user.distance(OUTPUTS, TEACHER).item() == expected.item()
    assert user.multi_label == multi_label


def rounds_of(memory: list[Exchange]) -> list[list[Exchange]]:
    """What was asked from one local phase to the next."""
    starts = [place for place, exchange in enumerate(memory) if exchange.verb == "fit"]
    return [memory[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def test_a_round_is_fit_predict_average_and_digest(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "feddf", tmp_path)
    assert verbs(memory[:2]) == ["upload", "download"]
    rounds = rounds_of(memory)
    assert [verbs(one) for one in rounds] == [["fit", "predict", "upload", "download", "digest"]] * R + [["fit"]]
    assert result["touched"] == PARTNERS
    for _, predict, upload, download, digest in rounds[:R]:
        assert list(predict.sent) == list(digest.sent) == PARTNERS
        assert list(upload.sent) == list(download.sent) == SIBLINGS
        for group in GROUPS:
            logits = [predict.replies[user]["outputs"] for user in group]
            assert all(each.shape == (T, B, CLASSES[TASKS[group[0]]]) for each in logits)
            for user in group:
                sent = digest.sent[user]["targets"]
                assert sent.dtype == logits[0].dtype == torch.float16
                assert torch.allclose(sent.float(), (logits[0].float() + logits[1].float()) / 2, atol=2e-3)


def test_weights_are_averaged_by_private_items_and_start_equal(path: Path, tmp_path: Path) -> None:
    memory, _ = exchanges(path, "feddf", tmp_path)
    first, start = memory[:2]
    initial: Any = program(path, "feddf", name="user3")
    assert list(first.sent) == ["user3"] and list(start.sent) == ["user4"]
    for name, value in initial.upload().items():
        assert torch.equal(start.sent["user4"][name], value)
    for _, _, upload, download, _ in rounds_of(memory)[:R]:
        for name, mean in download.sent["user3"].items():
            own, other = (upload.replies[user][name] for user in SIBLINGS)  # 40 and 20 private items
            assert torch.allclose(mean, own * 2 / 3 + other / 3, atol=1e-6)
            assert torch.equal(mean, download.sent["user4"][name])


@pytest.mark.parametrize(("head", "parts"), [("features", 2), ("embedding", 3)])
def test_the_weights_that_cross_are_those_that_make_the_outputs(write_suite: WriteSuite, head: str, parts: int) -> None:
    path = five_users(write_suite, ("[protocol]", f'[protocol]\nhead = "{head}"'))
    one: Any = program(path, "feddf", name="user3")
    two: Any = program(path, "feddf", name="user4")
    weights = one.upload()
    assert len({name.partition(".")[0] for name in weights}) == parts
    x = one.public_rows(torch.arange(B))
    assert not torch.equal(one.outputs(x), two.outputs(x))
    two.download(**weights)
    assert torch.equal(one.outputs(x), two.outputs(x))


def test_equal_students_stay_equal_through_a_distillation(path: Path) -> None:
    users = [host(path, "feddf", name=name) for name in SIBLINGS]
    weights = call(users[0], "upload")
    call(users[1], "download", **weights)
    for seed in range(2):
        for user in users:
            call(user, "fit")
        sent = [call(user, "predict", batches=batches(seed))["outputs"] for user in users]
        assert not torch.equal(*sent)
        one, two = (call(user, "upload") for user in users)
        mean = {name: (one[name] + two[name]) / 2 for name in one}
        for user in users:
            call(user, "download", **mean)
            call(user, "digest", targets=(sent[0] + sent[1]) / 2)
        ended = [call(user, "upload") for user in users]
        for name, value in ended[0].items():
            assert torch.equal(value, ended[1][name]) and (seed or not torch.equal(value, mean[name]))


def test_it_costs_logits_in_half_precision_and_the_weights_of_siblings(path: Path, tmp_path: Path) -> None:
    logits = sum(T * B * CLASSES[TASKS[user]] * 2 for user in PARTNERS)
    _, plain = exchanges(path, "feddf", tmp_path, average=False)
    assert plain["bytes"]["tensor_up"] == logits
    assert plain["bytes"]["tensor_down"] == logits + len(PARTNERS) * T * B * 8
    memory, result = exchanges(path, "feddf", tmp_path)
    weights = sum(value.numel() * 4 for value in memory[0].replies["user3"].values())
    # Before round 0 one user uploads and one downloads; then both do in each of R rounds.
    for way in ("tensor_up", "tensor_down"):
        assert result["bytes"][way] - plain["bytes"][way] == round(weights * (2 * R + 1) / R)


def test_without_averaging_no_weights_cross(path: Path, tmp_path: Path) -> None:
    memory, _ = exchanges(path, "feddf", tmp_path, average=False)
    assert verbs(memory) == ["fit", "predict", "digest"] * R + ["fit"]
    other = tmp_path / "different.toml"
    other.write_text(path.read_text().replace('"small-convnet", width = 8', '"small-convnet", width = 16', 1))
    text = other.read_text()
    place = text.rindex("width = 8", 0, text.index('name = "user4"'))
    other.write_text(text[:place] + "width = 16" + text[place + len("width = 8") :])
    memory, _ = exchanges(other, "feddf", tmp_path)
    assert "upload" not in verbs(memory)  # users 3 and 4 now differ in width


def test_a_user_alone_trains_as_in_local_training_and_the_others_do_not(path: Path, tmp_path: Path) -> None:
    assert changed(path, "feddf", tmp_path) == PARTNERS
    assert FedDF().touches(load(str(path)).users) == PARTNERS


def test_a_restored_user_goes_on_bit_for_bit(path: Path) -> None:
    hosts = [host(path, "feddf", name="user3") for _ in range(2)]

    def round_of(user: Any, seed: int) -> None:
        call(user, "fit")
        outputs = call(user, "predict", batches=batches(seed))["outputs"]
        call(user, "download", **{name: 0.9 * value for name, value in call(user, "upload").items()})
        call(user, "digest", targets=outputs.flip(2))

    round_of(hosts[0], 0)
    state = hosts[0].save()
    hosts[1].restore(state)
    assert hosts[1].save() == state
    for user in hosts:
        round_of(user, 1)
    assert hosts[0].save() == hosts[1].save() != state


def test_who_fails_while_weights_cross_is_left_out(
    write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = five_users(write_suite, ("others = 2", 'others = 2\non_failure = "skip"'))
    download = FedDF.User.download  # type: ignore[attr-defined]

    def failing(self: Any, **weights: Tensor) -> dict[str, Any]:
        if self.name == "user4" and self.fits:
            raise RuntimeError("no such luck")
        return download(self, **weights)  # type: ignore[no-any-return]

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(FedDF.User, "download", failing)
    memory, _ = exchanges(path, "feddf", tmp_path)
    digests = [list(exchange.sent) for exchange in memory if exchange.verb == "digest"]
    assert digests == [["user1", "user2"]] * R


@pytest.mark.parametrize("option", ["rate", "temperature"])
def test_options_are_above_zero(option: str) -> None:
    with pytest.raises(UserError, match=f"'{option}' of feddf"):
        FedDF(**{option: -1.0})  # type: ignore[arg-type]
