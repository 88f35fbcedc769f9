"""What a method must do: two rounds with users of different tasks and models, and nothing behind the core's back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedbench.conformance import Check, Failed, Skipped, Subject
from fedbench.conformance.cells import EVALUATE, Course, Evidence, WatchingEngine, cell_of, difference, exchanges, play
from fedbench.conformance.generators import elsewhere
from fedbench.conformance.heldout import spoiled, tripwire
from fedbench.conformance.runs import again, evidence, forked_evidence, local_training, straight, world_of
from fedbench.conformance.twin import differs_elsewhere

FIT = "fit"


def two_rounds(subject: Subject) -> None:
    """It trains and leaves finite numbers behind."""
    course = straight(subject)
    users = [user.name for user in course.cell.suite.users]
    if course.touched != [user for user in users if user in course.touched]:
        what = f"touches() returned {course.touched}, not users of the suite in its order"
        raise Failed(what, at=subject.target.touches)
    for record in course.records:
        for name in ("validation", "train_loss"):
            _finite(f"{name} in round {record['round'] + 1}", record[name])
        for name, values in record["log"].items():
            _finite(f"the logged '{name}' in round {record['round'] + 1}", values)
    _finite("the test score", {user: score["value"] for user, score in course.scores.items()})
    if course.broken:
        raise Failed(f"the weights of {course.broken[0]} are not finite in the end", at=subject.target.User)


def heads(subject: Subject) -> None:
    """No verb but `fit` changes a head, unless the method says that it does."""
    course = straight(subject)
    if subject.kept["method"].trains_heads:
        raise Skipped("it says that it trains heads (trains_heads)")
    for call in exchanges(course.calls):
        if call.verb != FIT and (call.user, "head") in call.changed:
            raise Failed(f"'{call.verb}' changed {call.user}'s head", at=_verb(subject, call.verb))


def other_users(subject: Subject) -> None:
    """A user's verb changes that user."""
    for call in straight(subject).calls:
        for user, part in sorted(call.changed):
            if user != call.user:
                raise Failed(f"'{call.verb}' of {call.user} changed {user}'s {part}", at=_verb(subject, call.verb))


def untouched_users(subject: Subject) -> str:
    """Whom the method does not touch trains as with local training, to the last bit."""
    course = straight(subject)
    users = [user.name for user in course.cell.suite.users if user.name not in course.touched]
    if not users:
        raise Skipped("it touches everyone")
    local = local_training(course.cell.suite.scale)
    for user in users:
        if differs := difference(_trained(course, user), _trained(local, user)):
            what = f"{user} is not among those it touches, but its {differs} is not that of local training"
            raise Failed(what, at=subject.target.touches)
    return f"as with local training: {', '.join(users)}"


def honest_bytes(subject: Subject) -> str:
    """What was metered is what the engine carried."""
    course, method = straight(subject), subject.target
    for record in course.records:
        for user, metered in record["users"].items():
            calls = [call for call in exchanges(course.calls) if (call.round, call.user) == (record["round"], user)]
            for column, size in enumerate(metered):
                crossed = sum(call.sizes[column] for call in calls)
                if size != crossed:
                    what = f"round {record['round'] + 1}, {user}: {crossed} bytes went {('up', 'down')[column % 2]}"
                    raise Failed(f"{what}, {size} were metered", at=method.Server.round)
    suite = course.cell.suite
    rounds = suite.protocol.rounds
    tensors = sum(sum(call.sizes[2:]) for call in exchanges(course.calls) if call.round < rounds) // rounds
    return f"{tensors:,} tensor bytes a round"


def same_twice(subject: Subject) -> None:
    """A second run, with the process's own generators elsewhere, gives the same bits."""
    course = straight(subject)
    with elsewhere():
        second = again(subject)
    if differs := difference(course.evidence(), second.evidence()):
        raise Failed(f"a second run differs: {differs}")


def another_process(subject: Subject) -> None:
    """A process with other hash seeds gives the same bits."""
    if differs := differs_elsewhere(subject, straight(subject).evidence(), evidence):
        raise Failed(f"in another process a run differs: {differs}")


def messages_only(subject: Subject) -> None:
    """With every user in a process of its own the bits are the same: nothing crosses but messages."""
    if differs := differs_elsewhere(subject, straight(subject).evidence(), forked_evidence):
        raise Failed(f"with users in processes of their own a run differs: {differs}")


def resumes(subject: Subject) -> None:
    """Stopped after the first round and resumed, a run gives the same bits."""
    course = straight(subject)
    resumed = again(subject, checkpoint=course.checkpoints[1])
    if differs := difference(course.evidence(since=1), resumed.evidence()):
        raise Failed(f"resumed after round 1 a run differs: {differs}", at=subject.target.User.save)


def held_out_data(subject: Subject) -> None:
    """Other validation and test data change no weight and no message, and nobody asks for them or for a score."""
    course = straight(subject)
    suite = course.cell.suite
    asked = sum(call.verb == EVALUATE for call in course.calls)
    wanted = len(suite.users) * (suite.protocol.rounds + 2)
    if asked != wanted:
        what = f"{asked} scores were asked for, {wanted} by the core: a method sees no score"
        raise Failed(what, at=subject.target.Server.round)
    for call in course.calls:
        if call.verb == EVALUATE and call.changed:
            raise Failed(f"scoring {call.user} changed its weights", at=subject.target.User.outputs)
    with tripwire(subject.registry.resolve("data", suite.data_name)) as caught:
        other = again(subject, world=spoiled(world_of(subject.registry, course.cell)))
    if caught:
        raise Failed("it asked the world for validation or test data", trace=caught[0])
    if differs := difference(course.evidence(scored=False), other.evidence(scored=False)):
        raise Failed(f"with other validation and test data a run differs: {differs}", at=subject.target.User.outputs)


def failing_user(subject: Subject) -> str:
    """Where the suite says `skip`, a user that fails in any verb is left out, and the others finish."""
    course = straight(subject)
    suite = course.cell.suite
    skipping = replace(suite, protocol=replace(suite.protocol, on_failure="skip"))
    cell = cell_of(subject.registry, course.cell.method, skipping)
    verbs = list(dict.fromkeys(call.verb for call in exchanges(course.calls)))
    for number, verb in enumerate(verbs):
        asked = list(dict.fromkeys(call.user for call in course.calls if call.verb == verb))
        _survives(subject, cell, asked[number % len(asked)], verb)
    return f"in {', '.join(verbs)}"


def _survives(subject: Subject, cell: Any, victim: str, verb: str) -> None:
    after = f"after {victim} failed in '{verb}'"
    world = world_of(subject.registry, cell)
    try:
        left = play(cell, subject.registry, engine=lambda: WatchingEngine(fail=(victim, verb)), world=world)
    except Failed as failure:
        raise Failed(f"{after}: {failure}", trace=failure.trace) from None
    lost = [fault for fault in left.faults if fault.user != victim]
    if lost:
        raise Failed(f"{after}, {lost[0].user} failed in '{lost[0].verb}': {lost[0].message}", trace=lost[0].trace)
    _finite(f"{after} the test score", {name: score["value"] for name, score in left.scores.items()})


def _trained(course: Course, user: str) -> Evidence:
    """What must be as with local training where a user is not touched."""
    fits = [call for call in course.calls if (call.verb, call.user) == (FIT, user)]
    losses = [(f"loss in round {call.round + 1}", call.reply) for call in fits]
    weights = [(part, course.weights[user, part]) for part in ("representation", "head")]
    return [*losses, *weights, ("score", repr(course.scores[user]))]


def _verb(subject: Subject, name: str) -> Any:
    return getattr(subject.target.User, name, None)


def _finite(what: str, values: Mapping[str, float | None]) -> None:
    for user, value in values.items():
        if value is None or not math.isfinite(value):
            raise Failed(f"{what} of {user} is {value}")


CHECKS = (
    Check(
        "two rounds",
        two_rounds,
        "see the trace (--traceback); `fedbench run conformance --method NAME` runs the same federation",
    ),
    Check(
        "heads",
        heads,
        "train with alignment_optimizer(), which leaves the head out; where the paper trains heads, "
        "say trains_heads = True in the Method class",
        needs=("two rounds",),
    ),
    Check(
        "other users",
        other_users,
        "a user program may change its own model only; ask the other user to change its",
        needs=("two rounds",),
    ),
    Check(
        "bytes",
        honest_bytes,
        "send everything through self.ask(...): nothing else is metered",
        needs=("two rounds",),
    ),
    Check(
        "same twice",
        same_twice,
        "draw from seeds.torch_generator(...) kept on the program, never from a global generator or the clock; "
        "keep no state in classes or modules",
        needs=("two rounds",),
    ),
    Check(
        "untouched users",
        untouched_users,
        "name in touches() all that are trained otherwise than with local training, and ask the rest for fit alone",
        needs=("same twice",),
    ),
    Check(
        "another process",
        another_process,
        "use no hash(), no id() and no order of a set; sort, or go by user order",
        needs=("same twice",),
    ),
    Check(
        "messages only",
        messages_only,
        "keep nothing in module globals, classes or the method object: what others must know crosses as a message",
        needs=("another process", "other users"),
    ),
    Check(
        "resume",
        resumes,
        "save() and restore() must hold all that training changes: optimizers, counters, generators, modules",
        needs=("same twice",),
    ),
    Check(
        "held-out data",
        held_out_data,
        "train on self.participant.train and the public set only, and keep nothing of what is scored",
        needs=("same twice",),
    ),
    Check(
        "failing user",
        failing_user,
        "use the replies that came: where users may fail, they vanish between two asks, also the last partner",
        needs=("two rounds",),
    ),
)
