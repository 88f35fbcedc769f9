"""A cell from start to result: the same numbers however it was run, and failures that say what happened."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbench.cache import Cache
from fedbench.discovery import discover
from fedbench.errors import UserError
from fedbench.interfaces import Observer
from fedbench.plan import Cell, make_cells
from fedbench.progress import Progress
from fedbench.registry import Registry
from fedbench.rounds import Surroundings, run_cell
from fedbench.runner import Job, choose, folder_of
from fedbench.runner import run as run_jobs
from fedbench.specs import parse_method
from fedbench.store import Store
from fedbench.suite import load
from fedbench_plugins.metrics.accuracy import Accuracy

sys.path.append(str(Path(__file__).parent))
from command_line import fedbench
from made_up import provenance
from spies import spied, verbs
from tiny import CPU, WriteSuite, cell_of, numbers, run

METHODS = ["local", "local-long", "fedmuscle", "fedmuscle:views=own", "fedmuscle:shuffle=true", "simclr"]

BAD_LOSS = """
import torch, fedbench

class Bad(fedbench.AlignmentLoss):
    '''Fails at its `after`-th call in a process.'''
    calls = 0
    def __init__(self, *, after: int = 1) -> None:
        super().__init__()
        self.after = after
    def forward(self, anchor, others):
        Bad.calls += 1
        if Bad.calls >= self.after:
            raise RuntimeError("no such luck")
        return (anchor - others[0]).square().sum()

@fedbench.hookimpl
def fedbench_losses(register):
    register("bad", Bad)
"""

BAD_METHOD = """
import fedbench

class Server(fedbench.ServerProgram):
    def round(self, r):
        BODY

class Bad(fedbench.Method):
    '''A method that does not keep the rules.'''
    User = fedbench.UserProgram
    Server = Server

@fedbench.hookimpl
def fedbench_methods(register):
    register("bad", Bad)
"""

CAREFUL = """
import torch, fedbench

class Learned(fedbench.AlignmentLoss):
    '''Learns a temperature, and uses the global generator although it should not.'''
    def __init__(self) -> None:
        super().__init__()
        self.log_tau = torch.nn.Parameter(torch.zeros(()))
    def forward(self, anchor, others):
        kept = (torch.rand(anchor.shape) < 0.5).float()
        return (-self.log_tau).exp() * (1 - (kept * anchor * others).sum(-1)).mean() + self.log_tau

class Server(fedbench.ServerProgram):
    '''Keeps a counter between rounds.'''
    total = 0
    def round(self, r):
        self.ask("fit")
        batch, = self.public.draw(1, 4)
        self.ask("represent", batch=batch)
        self.total += 1 + len(self.sample_others("user1", 1)[0])
        self.log("total", {user: self.total for user in self.users})
    def save(self):
        return {"total": self.total}
    def restore(self, state):
        self.total = state["total"]

class Counting(fedbench.Method):
    '''Counts.'''
    User = fedbench.UserProgram
    Server = Server

@fedbench.hookimpl
def fedbench_losses(register):
    register("learned", Learned)

@fedbench.hookimpl
def fedbench_methods(register):
    register("counting", Counting)
"""


def plugin(folder: Path, text: str) -> Path:
    """A plugin file that is this test's own: equal files are one module, which keeps its state."""
    path = folder / "plugin.py"
    path.write_text(text if text is CAREFUL else f"# {folder.name}\n{text}")
    return path


class Stop:
    """A listener that presses Ctrl-C when it hears of a round."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.events: list[tuple[str, Mapping[str, Any]]] = []

    def __call__(self, event: str, details: Mapping[str, Any]) -> None:
        self.events.append((event, dict(details)))
        if event == "round" and details["round"] == self.at:
            raise KeyboardInterrupt

    def heard(self, event: str) -> list[Mapping[str, Any]]:
        return [details for name, details in self.events if name == event]


STRAIGHT: dict[str, dict[str, Any]] = {}


def straight(cell: Cell, registry: Registry, folder: Path) -> dict[str, Any]:
    """The numbers of a cell that ran undisturbed, computed once for all tests."""
    if cell.key not in STRAIGHT:
        STRAIGHT[cell.key] = numbers(run(cell, registry, folder / "straight"))
    return STRAIGHT[cell.key]


# -- the same numbers


@pytest.mark.parametrize("method", METHODS)
def test_a_cell_gives_the_same_bits_twice(write_suite: WriteSuite, tmp_path: Path, method: str) -> None:
    cell, registry = cell_of(write_suite(), method)
    first = straight(cell, registry, tmp_path)
    np.random.seed(1)
    result = run(cell, registry, tmp_path / "again")
    assert numbers(result) == first
    assert len(result["rounds"]) == 3
    assert all(0 <= row["test"] <= 100 and 0 <= row["validation"] <= 100 for row in result["users"])
    assert result["rounds"][-1]["validation"] == {row["name"]: row["validation"] for row in result["users"]}


def test_another_seed_gives_other_numbers(write_suite: WriteSuite, tmp_path: Path) -> None:
    path = write_suite()
    results = [run(*cell_of(path, seed=seed), tmp_path) for seed in (0, 1)]
    assert results[0]["rounds"][0]["train_loss"] != results[1]["rounds"][0]["train_loss"]


@pytest.mark.parametrize(
    ("method", "at"),
    [*((method, 1) for method in (*METHODS, "fedmuscle:loss=learned", "counting")), ("local", 2), ("fedmuscle", 2)],
)
def test_a_resumed_cell_gives_the_same_bits(write_suite: WriteSuite, tmp_path: Path, method: str, at: int) -> None:
    cell, registry = cell_of(write_suite(), method, plugins=[plugin(tmp_path, CAREFUL)])
    stop = Stop(at)
    with pytest.raises(KeyboardInterrupt):
        run(cell, registry, tmp_path / "resumed", notify=stop)
    folder = folder_of(Store(tmp_path / "resumed"), cell)
    assert folder.checkpoint_path.exists() and folder.read() is None
    again = Stop(at=-1)
    resumed = run(cell, registry, tmp_path / "resumed", notify=again)
    assert numbers(resumed) == straight(cell, registry, tmp_path)
    assert again.heard("resumed") == [{"rounds": at}]
    assert [record["round"] for record in again.heard("round")] == list(range(at, 3))
    assert not folder.checkpoint_path.exists()


def test_an_interruption_before_the_first_checkpoint_loses_nothing_but_time(
    write_suite: WriteSuite, tmp_path: Path
) -> None:
    cell, registry = cell_of(write_suite(), "fedmuscle")
    with pytest.raises(KeyboardInterrupt):
        run(cell, registry, tmp_path, notify=Stop(0))
    stop = Stop(-1)
    assert numbers(run(cell, registry, tmp_path, notify=stop)) == straight(cell, registry, tmp_path)
    assert not stop.heard("resumed")


def request(path: Path, results: Path, plugins: Sequence[Path] = ()) -> dict[str, Any]:
    return {
        "suite": str(path),
        "scale": "mini",
        "overrides": [],
        "plugins": [str(plugin) for plugin in plugins],
        "device": "cpu",
        "results": str(results),
        "provenance": provenance(),
    }


def test_one_process_and_worker_processes_give_the_same_bits(write_suite: WriteSuite, tmp_path: Path) -> None:
    path, bad = write_suite(), plugin(tmp_path, BAD_LOSS)
    suite, registry = load(str(path)), discover([bad])
    specs = [parse_method(text) for text in ("local", "fedmuscle:loss=bad", "fedmuscle", "simclr")]
    cells = make_cells(suite, registry, methods=specs, seeds=[0])
    found = []
    for jobs in (1, 2):
        store = Store(tmp_path / str(jobs))
        pending = choose(cells, store, "missing", Progress())
        assert len(pending) == 4
        outcome = run_jobs(pending, request(path, store.root, [bad]), jobs, Progress())
        assert (outcome.ran, outcome.failed) == (4, ["fedmuscle:loss=bad seed 0"])
        results = [folder_of(store, cell).read() for cell in cells]
        found.append([numbers(result) for result in results if result and result["status"] == "done"])
        errors = [result["error"] for result in results if result and result["error"]]
        assert [(error["user"], error["message"]) for error in errors] == [
            ("user1", "align: RuntimeError: no such luck")
        ]
        assert choose(cells, store, "missing", Progress()) == []
    assert len(found[0]) == 3 and found[0] == found[1]


def test_users_may_be_built_in_any_order(write_suite: WriteSuite, tmp_path: Path) -> None:
    cell, registry = cell_of(write_suite(), "fedmuscle")
    folder = folder_of(Store(tmp_path), cell)
    with folder.lock():
        run_cell(cell, folder, Surroundings(registry, Cache(), CPU, provenance(), reverse=True))
    result = folder.read()
    assert result is not None
    assert numbers(result) == straight(cell, registry, tmp_path)
    assert [row["name"] for row in result["users"]] == ["user1", "user2", "user3"]


def test_a_cell_computes_with_the_threads_of_its_suite(write_suite: WriteSuite, tmp_path: Path) -> None:
    threads: list[int] = []

    def listen(event: str, details: Mapping[str, Any]) -> None:
        threads.append(torch.get_num_threads())

    try:
        for wanted in (2, 1):
            path = write_suite(("[protocol]", f"[protocol]\nthreads = {wanted}"))
            run(*cell_of(path), tmp_path, notify=listen)
            assert set(threads) == {wanted}
            assert torch.tensor(1e-310, dtype=torch.float64).mul(1.0) != 0  # what a cell sets ends with it
            threads.clear()
    finally:
        torch.set_num_threads(1)


# -- what is scored, and when


def test_the_test_set_is_looked_at_once(write_suite: WriteSuite, tmp_path: Path) -> None:
    cell, registry = cell_of(write_suite(), "fedmuscle")
    memory = spied(registry)
    result = run(cell, registry, tmp_path)
    splits = [exchange.sent["user1"]["split"] for exchange in memory if exchange.verb == "evaluate"]
    assert splits == ["validation"] * 3 + ["test"]
    assert verbs(memory).count("fit") == 3
    last = memory[-1].replies
    assert {row["name"]: row["test"] for row in result["users"]} == {user: last[user]["value"] for user in last}


def test_a_result_is_complete(write_suite: WriteSuite, tmp_path: Path) -> None:
    cell, registry = cell_of(write_suite(), "fedmuscle")
    result = run(cell, registry, tmp_path)
    assert result["options"] == {"loss": "muscle"}
    assert result["resolved"] == {
        "loss": {"tau": 0.2, "tau_prev": 0.15},
        "views": "plain",
        "shuffle": False,
        "rate": 1.0,
    }
    assert result["versions"] == dict(cell.versions)
    assert [row["metric"] for row in result["users"]] == ["mAP", "accuracy", "accuracy"]
    assert set(result["users"][1]["subsets"]) == {"seen", "unseen"}
    assert result["seconds"]["total"] > result["seconds"]["fit"] > 0
    assert result["faults"] == []
    assert {"fit", "represent", "align", "evaluate"} <= set(result["seconds"])


# -- failures


def test_a_score_that_is_no_number_is_a_failure_of_its_user(
    write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accuracy, "__call__", lambda self, scores, targets: float("nan"))
    cell, registry = cell_of(write_suite(), "fedmuscle")
    result = run(cell, registry, tmp_path)
    assert result["status"] == "failed"
    error = result["error"]
    assert (error["user"], error["kind"]) == ("user2", "diverged")
    assert error["message"] == "the validation score is nan in round 1"


def test_a_loss_that_is_no_number_is_a_failure_of_its_user(write_suite: WriteSuite, tmp_path: Path) -> None:
    path = write_suite(("fit = 2e-3", "fit = 1e30"))
    done = fedbench(
        "run", path, "--jobs", 1, "--device", "cpu", "--results", tmp_path, "--seeds", 0, "--method", "local"
    )
    assert done.code == 1 and re.search(r"local seed 0: FAILED: user1: the loss is (nan|inf) in round 1", done.err)


def test_a_user_that_diverges_is_left_out_where_the_protocol_says_skip(
    write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accuracy, "__call__", lambda self, scores, targets: float("nan"))
    cell, registry = cell_of(write_suite(("[protocol]", '[protocol]\non_failure = "skip"\nquorum = 1')), "local")
    result = run(cell, registry, tmp_path)
    assert result["status"] == "done"
    assert [row["test"] is None for row in result["users"]] == [False, True, True]
    assert [fault["user"] for fault in result["faults"]] == ["user2", "user3"]


def test_a_message_size_out_of_range_is_a_failure_of_its_method(write_suite: WriteSuite, tmp_path: Path) -> None:
    text = BAD_METHOD.replace("BODY", "self.ask('fit')") + "\nBad.paper_bytes = lambda self, protocol, users: 10**400\n"
    cell, registry = cell_of(write_suite(), "bad", plugins=[plugin(tmp_path, text)])
    error = run(cell, registry, tmp_path)["error"]
    assert (
        "paper_bytes is 1000" in error["message"] and "below 2^63" in error["message"] and len(error["message"]) < 200
    )


def test_a_failure_names_the_user_and_keeps_the_remote_trace(write_suite: WriteSuite, tmp_path: Path) -> None:
    cell, registry = cell_of(write_suite(), "fedmuscle:loss=bad", plugins=[plugin(tmp_path, BAD_LOSS)])
    result = run(cell, registry, tmp_path)
    assert result["status"] == "failed"
    error = result["error"]
    assert (error["user"], error["kind"]) == ("user1", "raised")
    assert "align" in error["message"] and "RuntimeError: no such luck" in error["message"]
    assert 'raise RuntimeError("no such luck")' in error["trace"] and "plugin.py" in error["trace"]
    folder = folder_of(Store(tmp_path), cell)
    text = folder.error_path.read_text()
    assert "user: user1" in text and "no such luck" in text
    assert result["rounds"] == [] and all(row["test"] is None for row in result["users"])


def test_a_failure_keeps_the_rounds_before_it(write_suite: WriteSuite, tmp_path: Path) -> None:
    method = "fedmuscle:loss=bad,loss.after=8"  # six calls a round
    cell, registry = cell_of(write_suite(), method, plugins=[plugin(tmp_path, BAD_LOSS)])
    result = run(cell, registry, tmp_path)
    assert result["error"]["user"] == "user2"
    assert [record["round"] for record in result["rounds"]] == [0]


def test_one_failed_cell_stops_no_other_and_the_exit_code_says_so(write_suite: WriteSuite, tmp_path: Path) -> None:
    path = write_suite(
        ('methods = ["local", "fedmuscle:loss=muscle",', 'methods = ["local", "fedmuscle:loss=bad",'),
        ('"fedmuscle:shuffle=true"]\ncontrols', '"fedmuscle:loss=bad,shuffle=true"]\ncontrols'),
        ('controls = ["local-long", "fedmuscle:shuffle=true"]', "controls = []"),
    )
    bad = plugin(tmp_path, BAD_LOSS)
    command = ["run", path, "--plugin", bad, "--device", "cpu", "--results", tmp_path / "runs", "--seeds", 0]
    command += ["--jobs", 1]
    done = fedbench(*command)
    assert done.code == 1
    assert "fedmuscle:loss=bad seed 0: FAILED: user1: align: RuntimeError: no such luck" in done.err
    assert "Traceback" not in done.err
    assert "no such luck" in done.out  # the cause is on the board
    states = {}
    suite = load(str(path))
    for cell in make_cells(suite, discover([bad]), seeds=[0]):
        states[cell.method.label] = folder_of(Store(tmp_path / "runs"), cell).state
    assert states == {
        "local": "done",
        "fedmuscle:loss=bad": "failed",
        "simclr": "done",
        "local-long": "done",
        "fedmuscle:loss=bad,shuffle=true": "failed",
    }
    again = fedbench(*command)
    assert again.code == 1 and "started" not in again.err and "--overwrite failed" in again.err


def test_a_failed_cell_goes_on_from_its_checkpoint_when_asked(write_suite: WriteSuite, tmp_path: Path) -> None:
    bad = plugin(tmp_path, BAD_LOSS)
    cell, registry = cell_of(write_suite(), "fedmuscle:loss=bad,loss.after=8", plugins=[bad])
    broken = registry.resolve("loss", "bad")
    assert run(cell, registry, tmp_path / "runs")["status"] == "failed"
    broken.calls = -1000
    stop = Stop(-1)
    resumed = run(cell, registry, tmp_path / "runs", notify=stop)
    assert stop.heard("resumed") == [{"rounds": 1}]
    broken.calls = -1000
    assert numbers(resumed) == numbers(run(cell, registry, tmp_path / "straight"))
    assert not folder_of(Store(tmp_path / "runs"), cell).error_path.exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "never asked for 'fit'"),
        ("self.ask('represent', batch=self.public.draw(1, 4)[0])", "never asked for 'fit'"),
        ("self.ask('fit', users=[])", "never asked for 'fit' of user1"),
        ("self.ask('fit', users=self.users[:2])", "never asked for 'fit' of user3"),
        ("self.ask('fit'); self.ask('fit')", "'fit' was asked of user1 twice"),
        ("self.ask('fit'); self.ask('evaluate', split='test')", "'evaluate' belongs to the core"),
        ("self.ask('fit', users=['user9'])", "no such users: user9"),
        ("self.ask('fit'); self.ask('packed')", "user1.*has no verb 'packed'"),
        ("self.ask('fit'); 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_method_that_breaks_the_rules_fails_with_its_reason(
    write_suite: WriteSuite, tmp_path: Path, body: str, message: str
) -> None:
    cell, registry = cell_of(write_suite(), "bad", plugins=[plugin(tmp_path, BAD_METHOD.replace("BODY", body))])
    result = run(cell, registry, tmp_path)
    assert result["status"] == "failed"
    error = f"{result['error']['user']}: {result['error']['message']}"
    assert re.search(message, error), error
    assert result["error"]["trace"]


def test_a_skipped_user_is_missing_and_named(write_suite: WriteSuite, tmp_path: Path) -> None:
    path = write_suite(("[protocol]", '[protocol]\non_failure = "skip"\nquorum = 2'))
    bad = plugin(tmp_path, BAD_LOSS.replace("Bad.calls >= self.after", "Bad.calls == self.after"))
    cell, registry = cell_of(path, "fedmuscle:loss=bad", plugins=[bad])
    stop = Stop(-1)
    result = run(cell, registry, tmp_path, notify=stop)
    assert result["status"] == "done"
    assert [row["test"] is None for row in result["users"]] == [True, False, False]
    assert [sorted(record["validation"]) for record in result["rounds"]] == [
        ["user1", "user2", "user3"],
        ["user2", "user3"],
        ["user2", "user3"],
    ]
    (fault,) = result["faults"]
    assert (fault["user"], fault["verb"], fault["kind"]) == ("user1", "align", "raised")
    assert "plugin.py" in fault["trace"]
    (note,) = stop.heard("note")
    assert note["text"].startswith("user1 raised in 'align'") and "no such luck" in note["text"]


def test_a_skipped_user_stays_skipped_after_resuming(write_suite: WriteSuite, tmp_path: Path) -> None:
    path = write_suite(("[protocol]", '[protocol]\non_failure = "skip"'))
    bad = plugin(tmp_path, BAD_LOSS.replace("Bad.calls >= self.after", "Bad.calls == self.after"))
    cell, registry = cell_of(path, "fedmuscle:loss=bad", plugins=[bad])
    with pytest.raises(KeyboardInterrupt):
        run(cell, registry, tmp_path / "resumed", notify=Stop(1))
    resumed = run(cell, registry, tmp_path / "resumed")
    registry.resolve("loss", "bad").calls = 0
    assert numbers(resumed) == numbers(run(cell, registry, tmp_path / "straight"))
    assert [fault["user"] for fault in resumed["faults"]] == ["user1"]


def test_too_few_users_are_a_failure(write_suite: WriteSuite, tmp_path: Path) -> None:
    path = write_suite(("[protocol]", '[protocol]\non_failure = "skip"\nquorum = 3'))
    cell, registry = cell_of(path, "fedmuscle:loss=bad", plugins=[plugin(tmp_path, BAD_LOSS)])
    result = run(cell, registry, tmp_path)
    assert (result["status"], result["error"]["user"]) == ("failed", "user1")


def test_an_observer_hears_everything_and_costs_nothing_when_it_breaks(write_suite: WriteSuite, tmp_path: Path) -> None:
    heard: list[tuple[str, Any]] = []

    class Watcher(Observer):
        def cell_started(self, cell: Mapping[str, Any]) -> None:
            heard.append(("started", cell["method"]))

        def round_finished(self, cell: Mapping[str, Any], record: Mapping[str, Any]) -> None:
            heard.append(("round", record["round"]))

        def cell_finished(self, cell: Mapping[str, Any], result: Mapping[str, Any]) -> None:
            heard.append(("finished", result["status"]))

    class Broken(Watcher):
        def cell_started(self, cell: Mapping[str, Any]) -> None:
            raise RuntimeError("no connection")

        round_finished = cell_finished = lambda self, *details: self.cell_started({})  # type: ignore[assignment]

    cell, registry = cell_of(write_suite())
    stop = Stop(-1)
    watched = run(cell, registry, tmp_path / "one", notify=stop, observers=[Broken(), Watcher()])
    assert heard == [("started", "local"), ("round", 0), ("round", 1), ("round", 2), ("finished", "done")]
    assert numbers(watched) == straight(cell, registry, tmp_path)
    notes = [details["text"] for details in stop.heard("note")]
    assert len(notes) == 5 and all("observer Broken failed" in note and "no connection" in note for note in notes)


# -- checkpoints


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def one_bit(data: bytes) -> bytes:
    """A single bit of some weight: nothing but a checksum can tell."""
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("damage", [cut, one_bit, lambda data: b"", lambda data: b"noise" * 100], ids=range(4))
def test_a_damaged_checkpoint_is_set_aside_and_the_cell_starts_anew(
    write_suite: WriteSuite, tmp_path: Path, damage: Any
) -> None:
    cell, registry = cell_of(write_suite(), "fedmuscle")
    with pytest.raises(KeyboardInterrupt):
        run(cell, registry, tmp_path, notify=Stop(2))
    folder = folder_of(Store(tmp_path), cell)
    broken = damage(folder.checkpoint_path.read_bytes())
    folder.checkpoint_path.write_bytes(broken)
    stop = Stop(-1)
    result = run(cell, registry, tmp_path, notify=stop)
    assert numbers(result) == straight(cell, registry, tmp_path)
    aside = folder.path / "checkpoint.safetensors.damaged-1"
    assert aside.read_bytes() == broken
    (note,) = stop.heard("note")
    assert "damaged checkpoint set aside as checkpoint.safetensors.damaged-1" in note["text"]
    assert not stop.heard("resumed") and [record["round"] for record in stop.heard("round")] == [0, 1, 2]


def test_a_checkpoint_of_another_cell_is_not_used(write_suite: WriteSuite, tmp_path: Path) -> None:
    path = write_suite()
    other, registry = cell_of(path, "fedmuscle", seed=1)
    cell, _ = cell_of(path, "fedmuscle", seed=0)
    with pytest.raises(KeyboardInterrupt):
        run(other, registry, tmp_path, notify=Stop(1))
    mine, theirs = (folder_of(Store(tmp_path), one) for one in (cell, other))
    mine.path.mkdir(parents=True)
    mine.checkpoint_path.write_bytes(theirs.checkpoint_path.read_bytes())
    stop = Stop(-1)
    result = run(cell, registry, tmp_path, notify=stop)
    assert "belongs to another cell" in stop.heard("note")[0]["text"]
    assert numbers(result) == straight(cell, registry, tmp_path)


def test_a_finished_result_is_not_overwritten(write_suite: WriteSuite, tmp_path: Path) -> None:
    cell, registry = cell_of(write_suite())
    first = run(cell, registry, tmp_path)
    with pytest.raises(UserError, match="a finished result is already there"):
        run(cell, registry, tmp_path)
    assert folder_of(Store(tmp_path), cell).read() == first


# -- which cells run


def test_the_overwrite_rules(write_suite: WriteSuite, tmp_path: Path) -> None:
    path = write_suite()
    bad = plugin(tmp_path, BAD_LOSS)
    registry = discover([bad])
    specs = [parse_method(text) for text in ("local", "fedmuscle:loss=bad", "simclr", "local-long")]
    cells = make_cells(load(str(path)), registry, methods=specs, seeds=[0])
    store = Store(tmp_path / "runs")
    for cell in cells[:3]:
        run(cell, registry, store.root)
    damaged = folder_of(store, cells[2])
    damaged.result_path.write_bytes(damaged.result_path.read_bytes()[:-30])

    def chosen(rule: str) -> list[str]:
        return [job.cell.method.name for job in choose(cells, store, rule, Progress())]

    assert chosen("never") == []
    assert chosen("missing") == ["simclr", "local-long"]
    assert [path.name for path in damaged.path.glob("*damaged*")] == ["result.json.damaged-1"]
    assert chosen("failed") == ["fedmuscle", "simclr", "local-long"]
    assert chosen("always") == ["local", "fedmuscle", "simclr", "local-long"]
    kept = folder_of(store, cells[0])
    first = kept.read()
    assert kept.state == "done"  # until its replacement is there
    jobs = choose(cells[:1], store, "always", Progress())
    outcome = run_jobs(jobs, {**request(path, store.root, [bad]), "overwrite": "always"}, 1, Progress())
    assert outcome.failed == [] and (kept.path / "result.json.old-1").exists()
    assert first is not None and numbers(kept.read() or {}) == numbers(first)


def test_a_suite_that_changed_meanwhile_is_refused(write_suite: WriteSuite, tmp_path: Path) -> None:
    path = write_suite()
    cell, _ = cell_of(path)
    job = Job(cell, folder_of(Store(tmp_path), cell))
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 1"))
    outcome = run_jobs([job], request(path, tmp_path), 1, Progress())
    assert outcome.failed == ["local seed 0"]
    assert job.folder.state == "missing"


NOBODY = """
import fedbench

class Server(fedbench.ServerProgram):
    def round(self, r):
        self.ask("fit")

class Nobody(fedbench.Method):
    '''For users that nobody has.'''
    User = fedbench.UserProgram
    Server = Server
    def touches(self, users):
        return [user.name for user in users if user.task == "poetry"]

@fedbench.hookimpl
def fedbench_methods(register):
    register("nobody", Nobody)
"""


def test_a_method_that_touches_nobody_is_not_run(write_suite: WriteSuite, tmp_path: Path) -> None:
    plugin = tmp_path / "nobody.py"
    plugin.write_text(NOBODY)
    cell, registry = cell_of(write_suite(), "nobody", plugins=[plugin])
    result = run(cell, registry, tmp_path / "runs")
    users = len(cell.suite.users)
    assert (result["status"], result["rounds"], result["users"]) == ("not applicable", [], [])
    assert result["error"]["message"] == f"not applicable (0 of {users} users)"
    assert folder_of(Store(tmp_path / "runs"), cell).state == "done"


def test_a_result_says_whom_its_method_touches(write_suite: WriteSuite, tmp_path: Path) -> None:
    cell, registry = cell_of(write_suite(), "local")
    assert run(cell, registry, tmp_path)["touched"] == [user.name for user in cell.suite.users]
