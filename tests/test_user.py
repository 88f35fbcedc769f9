"""The user runtime: what it trains, what it leaves alone, and that it depends on named coordinates alone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbench import messages
from fedbench.discovery import discover
from fedbench.examiner import Examiner
from fedbench.inputs import Inputs
from fedbench.interfaces import World
from fedbench.method import Method
from fedbench.suite import load
from fedbench.user import UserHost, UserProgram, verb

sys.path.append(str(Path(__file__).parent))
from tiny import WriteSuite, host, participant, program, score

STATE = ("representation", "head", "fit_optimizer", "fit_generator", "order", "fits")


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def all_weights(user: UserProgram) -> dict[str, Tensor]:
    return {**weights(user.representation), **{f"head.{name}": value for name, value in weights(user.head).items()}}


def packed(user: UserProgram) -> bytes:
    """The part of a user's state that every method shares, as bytes: equal bytes are equal bits."""
    state = user.packed()
    return messages.pack({name: state[name] for name in STATE})


def align(user: UserProgram, steps: int = 1) -> None:
    """A few alignment steps towards fixed other users."""
    generator = torch.Generator().manual_seed(5)
    batch = torch.arange(8)
    user.represent(batch)  # type: ignore[misc]
    for _ in range(steps):
        others = nn.functional.normalize(torch.randn(2, 8, 16, generator=generator), dim=-1)
        user.align(others, batch)  # type: ignore[attr-defined]


def contrast(user: UserProgram, steps: int = 1) -> None:
    user.contrast(torch.arange(8).repeat(steps, 1))  # type: ignore[attr-defined]


# -- coordinates


def test_the_same_coordinates_give_the_same_user(write_suite: WriteSuite) -> None:
    path = write_suite()
    torch.manual_seed(1)
    one = program(path)
    torch.manual_seed(2)
    program(path, name="user2")
    two = program(path)
    assert same(all_weights(one), all_weights(two))
    for _ in range(8):
        for first, second in zip(one.private_batch(), two.private_batch(), strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("method", ["fedmuscle", "simclr", "local-long"])
def test_every_method_starts_from_the_same_weights_and_batches(write_suite: WriteSuite, method: str) -> None:
    path = write_suite()
    one, two = program(path), program(path, method)
    assert same(all_weights(one), all_weights(two))
    for first, second in zip(one.private_batch(), two.private_batch(), strict=True):
        assert torch.equal(first, second)


def test_another_seed_or_name_gives_another_user(write_suite: WriteSuite) -> None:
    path = write_suite(
        ('task = "ic100"\nmodel = { name = "small-resnet"', 'task = "mlc"\nmodel = { name = "small-convnet"')
    )
    users = [program(path), program(path, seed=1), program(path, name="user2")]
    first = [next(iter(user.representation.parameters())) for user in users]
    heads = [next(iter(user.head.parameters())) for user in users]
    batches = [user.private_batch()[0] for user in users]
    for values in (first, heads, batches):
        assert not torch.equal(values[0], values[1])
        assert not torch.equal(values[0], values[2])


def test_a_seed_redraws_validation_but_not_test_and_public(write_suite: WriteSuite) -> None:
    suite, registry = load(str(write_suite())), discover()
    one, two = participant(suite, registry, seed=0), participant(suite, registry, seed=1)
    for split, equal in (("train", False), ("validation", False), ("test", True), ("public", True)):
        arrays = [
            next(getattr(part, split) for part in parts if hasattr(part, split)).samples.inputs["image"]
            for parts in (one, two)
        ]
        assert np.array_equal(*arrays) == equal, split


# -- local training


def test_a_set_is_covered_evenly_in_changing_order(write_suite: WriteSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    user = program(write_suite(("fit_batch = 8", "fit_batch = 12"), ("pixels = 16", "pixels = 16\nviews = 2")))
    seen: list[list[int]] = []
    views: Counter[int] = Counter()
    data = user.participant.train

    def rows(index: Tensor, view: Tensor | int) -> Tensor:
        seen.append(index.tolist())
        assert isinstance(view, Tensor)
        views.update(view.tolist())
        return data._data[index, view].float()

    monkeypatch.setattr(data, "rows", rows)
    counts: Counter[int] = Counter()
    for _ in range(10):
        user.private_batch()
        counts.update(seen[-1])
        assert len(seen[-1]) == 12
        tally = [counts[item] for item in range(40)]
        assert max(tally) - min(tally) <= 1
    assert [counts[item] for item in range(40)] == [3] * 40
    order = [item for batch in seen for item in batch]
    assert order[:40] != order[40:80] != list(range(40))
    assert views.keys() == {0, 1} and min(views.values()) > 30


def test_a_batch_is_no_larger_than_the_set(write_suite: WriteSuite) -> None:
    user = program(write_suite(("fit_batch = 8", "fit_batch = 64")))
    x, targets = user.private_batch()
    assert len(x) == len(targets) == 40


def test_fit_takes_its_steps_and_says_the_mean_loss(write_suite: WriteSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    user = program(write_suite(("steps = 2", "steps = 5")))
    losses: list[float] = []
    step = user.step
    monkeypatch.setattr(
        user, "step", lambda optimizer, loss: (losses.append(float(loss.detach())), step(optimizer, loss))
    )
    before = all_weights(user)
    reply = user.fit()
    assert len(losses) == 5 and reply["loss"] == pytest.approx(sum(losses) / 5, rel=1e-6)
    assert not same(before, all_weights(user))


@pytest.mark.parametrize(("head", "width"), [("features", 64), ("embedding", 16)])
def test_the_head_sits_where_the_protocol_says(write_suite: WriteSuite, head: str, width: int) -> None:
    user = program(write_suite(("[protocol]", f'[protocol]\nhead = "{head}"')))
    assert user.head.in_features == width
    projection, backbone = weights(user.representation.projection), weights(user.representation.backbone)
    user.fit()
    assert same(projection, weights(user.representation.projection)) == (head == "features")
    assert not same(backbone, weights(user.representation.backbone))


@pytest.mark.parametrize(("projection", "layers"), [("linear", 1), ("mlp", 2)])
def test_the_projection_has_its_layers(write_suite: WriteSuite, projection: str, layers: int) -> None:
    user = program(write_suite(("[protocol]", f'[protocol]\nprojection = "{projection}"')))
    found = [module for module in user.representation.projection.modules() if isinstance(module, nn.Linear)]
    assert len(found) == layers and found[-1].out_features == 16


def test_embeddings_are_unit_rows_and_the_heads_input_is_not_normalised(write_suite: WriteSuite) -> None:
    user = program(write_suite(("[protocol]", '[protocol]\nhead = "embedding"')))
    rows = user.participant.public.rows(torch.arange(8), 0)
    z = user.represent(torch.arange(8))["z"]  # type: ignore[misc]
    assert z.shape == (8, 16) and not z.requires_grad
    assert torch.allclose(z.norm(dim=1), torch.ones(8), atol=1e-5)
    raw = user.representation.projection(user.representation.backbone(rows))
    assert not torch.allclose(raw.norm(dim=1), torch.ones(8), atol=1e-2)
    assert torch.equal(user.outputs(rows), user.head(raw))


def recorded_rates(user: UserProgram, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Learning rates of every group at every step from now on."""
    rates: list[list[float]] = []
    step = user.step

    def record(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        rates.append([group["lr"] for group in optimizer.param_groups])
        step(optimizer, loss)

    monkeypatch.setattr(user, "step", record)
    return rates


def annealing(schedule: str, phases: int, steps: int) -> list[float]:
    """The factor of every step of every phase."""
    done = [phase + step / steps for phase in range(phases) for step in range(steps)]
    if schedule == "cosine":
        return [0.5 * (1 + cos(pi * part / phases)) for part in done]
    return [0.5 * (1 + cos(pi * (part - int(part)))) if schedule == "restarts" else 1.0 for part in done]


@pytest.mark.parametrize("schedule", ["cosine", "constant", "restarts"])
def test_the_schedule_spans_all_local_phases(
    write_suite: WriteSuite, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    user = program(write_suite(("[protocol]", f'[protocol]\nschedule = "{schedule}"'), ("steps = 2", "steps = 4")))
    rates = recorded_rates(user, monkeypatch)
    for _ in range(3):
        user.fit()
    wanted = [2e-3 * factor for factor in annealing(schedule, phases=3, steps=4)]
    assert [rate for (rate,) in rates] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "constant", "restarts"])
@pytest.mark.parametrize(("method", "work"), [("fedmuscle", align), ("simclr", contrast)])
def test_the_schedule_spans_all_alignment_steps(
    write_suite: WriteSuite, monkeypatch: pytest.MonkeyPatch, schedule: str, method: str, work: Any
) -> None:
    path = write_suite(
        ("[protocol]", f'[protocol]\nschedule = "{schedule}"'), ("align = 1e-3", "align = 1e-3\nprojection = 4e-3")
    )
    user = program(path, method)
    rates = recorded_rates(user, monkeypatch)
    work(user, 4)
    factors = annealing(schedule, phases=2, steps=2)
    assert [rate[0] for rate in rates] == pytest.approx([1e-3 * factor for factor in factors], rel=1e-9)
    assert [rate[1] for rate in rates] == pytest.approx([4e-3 * factor for factor in factors], rel=1e-9)


# -- alignment


@pytest.mark.parametrize(("method", "work"), [("fedmuscle", align), ("simclr", contrast)])
@pytest.mark.parametrize("head", ["features", "embedding"])
def test_alignment_never_touches_the_head(write_suite: WriteSuite, method: str, work: Any, head: str) -> None:
    user = program(write_suite(("[protocol]", f'[protocol]\nhead = "{head}"')), method)
    user.fit()  # leaves gradients and optimizer moments that a careless step would apply
    stepped = {id(value) for group in user.align_optimizer.param_groups for value in group["params"]}  # type: ignore[attr-defined]
    assert stepped == {id(value) for value in user.representation.parameters()}
    before, backbone = weights(user.head), weights(user.representation.backbone)
    projection = weights(user.representation.projection)
    work(user, 3)
    assert same(before, weights(user.head))
    assert not same(backbone, weights(user.representation.backbone))
    assert not same(projection, weights(user.representation.projection))


@pytest.mark.parametrize(("method", "work"), [("fedmuscle", align), ("simclr", contrast)])
def test_alignment_leaves_local_training_alone(write_suite: WriteSuite, method: str, work: Any) -> None:
    user = program(write_suite(), method)
    user.fit()
    names = ("fit_optimizer", "fit_generator", "order", "fits")
    before = messages.pack([user.packed()[name] for name in names])
    work(user, 2)
    assert messages.pack([user.packed()[name] for name in names]) == before


def test_an_embedding_depends_on_its_own_row_alone(write_suite: WriteSuite) -> None:
    user = program(write_suite(), "fedmuscle")
    z = user.represent(torch.tensor([3, 1, 30, 7]))["z"]  # type: ignore[misc]
    again = user.represent(torch.tensor([30, 5, 3]))["z"]  # type: ignore[misc]
    assert torch.allclose(again[[2, 0]], z[[0, 2]], atol=1e-5)
    assert not torch.allclose(z[0], z[1], atol=1e-3)


def test_the_alignment_step_is_the_gradient_of_the_loss_on_the_forwarded_rows(write_suite: WriteSuite) -> None:
    user = program(write_suite(), "fedmuscle")
    batch = torch.tensor([4, 9, 2, 17])
    others = nn.functional.normalize(torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1)), dim=-1)
    user.represent(batch)  # type: ignore[misc]
    reply = user.align(others)  # type: ignore[attr-defined]
    gradients = {name: value.grad for name, value in user.representation.named_parameters()}
    fresh = program(write_suite(), "fedmuscle")
    loss = fresh.loss(fresh.embed(batch), others)  # type: ignore[attr-defined]
    loss.backward()
    assert reply == {"loss": float(loss.detach())}
    for name, value in fresh.representation.named_parameters():
        found = gradients[name]
        assert found is not None and value.grad is not None
        assert torch.allclose(found, value.grad, atol=1e-6), name


def test_align_replies_with_the_next_batch_after_its_step(write_suite: WriteSuite) -> None:
    user = program(write_suite(), "fedmuscle")
    others = nn.functional.normalize(torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1)), dim=-1)
    before = user.represent(torch.arange(8))["z"]  # type: ignore[misc]
    reply = user.align(others, torch.arange(8))  # type: ignore[attr-defined]
    assert not torch.equal(reply["z"], before)
    assert torch.equal(reply["z"], user.embed(torch.arange(8)).detach())


def test_align_before_represent_is_refused(write_suite: WriteSuite) -> None:
    user = program(write_suite(), "fedmuscle")
    with pytest.raises(RuntimeError, match="align came before represent"):
        user.align(torch.zeros(2, 8, 16))  # type: ignore[attr-defined]


# -- scoring


@pytest.mark.parametrize("split", ["validation", "test"])
def test_scoring_changes_nothing(write_suite: WriteSuite, split: str) -> None:
    path = write_suite()
    scored, plain = host(path), host(path)
    for user in (scored, plain):
        call(user, "fit")
    before, state = scored.save(), torch.random.get_rng_state()
    first = score(scored, split)
    assert score(scored, split) == first
    assert scored.save() == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert scored.program.representation.training and scored.program.head.training
    for user in (scored, plain):
        call(user, "fit")
    assert scored.save() == plain.save()


def test_a_score_does_not_depend_on_the_evaluation_batch(write_suite: WriteSuite) -> None:
    values = []
    for size in (7, 60, 1000):
        user = host(write_suite(("eval_batch = 50", f"eval_batch = {size}")), name="user2")
        values.append(score(user, "test")["value"])
    assert values[0] == pytest.approx(values[1])
    assert values[1] == pytest.approx(values[2])


def test_test_scores_tell_pairs_seen_and_unseen_apart(write_suite: WriteSuite) -> None:
    path = write_suite(("train = 40\nrates", "train = 60\nrates"))
    user = host(path, name="user2")
    for _ in range(10):
        call(user, "fit")
    scores = score(user, "test")
    assert scores.keys() == {"value", "seen", "unseen"}
    examiner = participant(load(str(path)), discover(), "user2")[1]
    test, known = examiner.test.samples.pairs, examiner.known
    assert test is not None and known is not None
    seen = np.isin(test, known).sum()
    assert 0 < seen < 60
    assert scores["value"] * 60 == pytest.approx(scores["seen"] * seen + scores["unseen"] * (60 - seen))
    assert score(user, "validation").keys() == {"value"}
    assert score(host(write_suite()), "test").keys() == {"value"}  # several concepts an item: no pairs


def test_a_user_program_holds_neither_validation_nor_test_data(write_suite: WriteSuite) -> None:
    path = write_suite()
    user, examiner = host(path).program, participant(load(str(path)), discover())[1]
    sizes = {len(examiner.validation), len(examiner.test)}
    found: list[Any] = [user]
    seen: set[int] = set()
    while found:
        thing = found.pop()
        if id(thing) in seen or isinstance(thing, type | str | bytes | Tensor | np.ndarray):
            continue
        seen.add(id(thing))
        assert not isinstance(thing, Examiner | World)
        assert not (isinstance(thing, Inputs) and len(thing) in sizes)
        inside = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, list | tuple) else ()
        found += [*inside, *getattr(thing, "__dict__", {}).values()]
    assert id(user.participant.train.samples) in seen


# -- state


@pytest.mark.parametrize(
    ("method", "work"), [("local", None), ("local-long", None), ("fedmuscle", align), ("simclr", contrast)]
)
def test_a_restored_user_goes_on_bit_for_bit(write_suite: WriteSuite, method: str, work: Any) -> None:
    path = write_suite()
    hosts = [host(path, method) for _ in range(2)]

    def round_of(user: UserHost) -> None:
        call(user, "fit")
        if work:
            work(user.program, 2)

    round_of(hosts[0])
    state = hosts[0].save()
    hosts[1].restore(state)
    assert hosts[1].save() == state
    for user in hosts:
        round_of(user)
    assert hosts[0].save() == hosts[1].save() != state


class Noisy(UserProgram):
    """A careless user program: uses the global generator, and looks at the mode it is in."""

    @verb
    def noise(self) -> dict[str, Any]:
        return {"noise": torch.rand(4), "training": self.representation.training}

    @verb
    def still(self) -> dict[str, Any]:
        self.set_training(False)
        return {}

    def outputs(self, x: Tensor) -> Tensor:
        return super().outputs(x) + torch.rand(1)


def noisy(path: Path, name: str = "user1", seed: int = 0) -> UserHost:
    suite, registry = load(str(path)), discover()
    person, examiner = participant(suite, registry, name, seed)
    return UserHost(Noisy(person, Method(), suite.protocol, seed), examiner)


def call(user: UserHost, verb: str, **message: Any) -> dict[str, Any]:
    return messages.decode(user.call(verb, messages.encode(message)))


def test_a_verb_that_uses_the_global_generator_is_reproducible_all_the_same(write_suite: WriteSuite) -> None:
    path = write_suite()
    one = noisy(path)
    torch.manual_seed(3)
    twin = noisy(path)
    before = torch.random.get_rng_state()
    first, second = call(one, "noise")["noise"], call(one, "noise")["noise"]
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(4)
    torch.rand(9)
    assert torch.equal(call(twin, "noise")["noise"], first)
    score(twin, "validation")
    assert torch.equal(call(twin, "noise")["noise"], second)
    assert not torch.equal(first, second)
    for other in (noisy(path, seed=1), noisy(path, name="user2")):
        assert not torch.equal(call(other, "noise")["noise"], first)


def test_the_global_generator_of_a_user_is_part_of_its_state(write_suite: WriteSuite) -> None:
    path = write_suite()
    one, twin = noisy(path), noisy(path)
    call(one, "noise")
    twin.restore(one.save())
    assert torch.equal(call(twin, "noise")["noise"], call(one, "noise")["noise"])


def test_scoring_and_resuming_leave_the_mode_that_a_verb_left(write_suite: WriteSuite) -> None:
    path = write_suite()
    one, twin = noisy(path), noisy(path)
    for verb_name, training in (("fit", True), ("still", False)):
        call(one, verb_name)
        call(one, "evaluate", split="validation")
        assert call(one, "noise")["training"] is training
        twin.restore(one.save())
        assert call(twin, "noise")["training"] is training


@pytest.mark.parametrize("name", ["save", "restore", "setup", "packed", "step", "__init__", "nothing", "participant"])
def test_only_verbs_can_be_called(write_suite: WriteSuite, name: str) -> None:
    with pytest.raises(AttributeError, match=f"Noisy has no verb '{name}'"):
        noisy(write_suite()).call(name, messages.encode({}))
