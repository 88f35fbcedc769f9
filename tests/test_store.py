"""Result files: written whole, read with suspicion, never lost, and promoted without mixing."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbench import provenance, results
from fedbench.errors import UserError
from fedbench.results import Damaged, Result, seal, slug
from fedbench.store import CellFolder, Store, promote, reference_results

sys.path.append(str(Path(__file__).parent))
from made_up import PROTOCOL, result, user_row


def cell_of(store: Store, entry: Result) -> CellFolder:
    return store.cell(*(entry[name] for name in ("suite", "scale", "method", "options", "seed", "key")))


def put(root: Path, *entries: Result) -> Store:
    store = Store(root)
    for entry in entries:
        cell_of(store, entry).write(entry)
    return store


def test_a_result_reads_back_as_written(tmp_path: Path) -> None:
    entry = result("fedmuscle", [41.5, 20.25], options={"loss": "gramian"})
    cell = cell_of(Store(tmp_path), entry)
    assert (cell.state, cell.read()) == ("missing", None)
    written = cell.write(entry)
    assert cell.read() == written == entry
    assert cell.state == "done"
    assert cell.path == tmp_path / "toy" / "mini" / "fedmuscle-loss=gramian" / f"seed0-{entry['key'][:12]}"
    assert Store(tmp_path).results("toy", "mini") == [entry]
    assert Store(tmp_path).results("toy", "paper") == []


def test_values_of_numpy_and_nan_become_plain_json(tmp_path: Path) -> None:
    users = [user_row("user1", "mlc", "mAP", np.float32(1.5)), user_row("user2", "mlc", "mAP", math.nan)]  # type: ignore[arg-type]
    entry = result("local", users=users, rounds=[{"round": np.int64(0), "validation": {"user1": math.inf}}])
    found = cell_of(Store(tmp_path), entry).write(entry)
    assert [row["test"] for row in found["users"]] == [1.5, None]
    assert found["rounds"] == [{"round": 0, "validation": {"user1": None}}]


def test_a_value_that_json_cannot_hold_is_named() -> None:
    with pytest.raises(TypeError, match=r"users\[0\]\.test is a set"):
        seal({"users": [{"test": {1}}]})


def test_the_state_follows_from_the_files(tmp_path: Path) -> None:
    entry = result("local", [1.0, 2.0])
    cell = cell_of(Store(tmp_path), entry)
    states = [cell.state]
    with cell.lock():
        cell.checkpoint_path.write_bytes(b"half way")
        states.append(cell.state)
    cell.write(result("local", failed="out of memory"))
    states.append(cell.state)
    assert "out of memory" in cell.error_path.read_text() and "Traceback" in cell.error_path.read_text()
    cell.write(entry)  # a failed cell may be done again
    assert not cell.error_path.exists()
    states.append(cell.state)
    cell.result_path.write_text("{")
    states.append(cell.state)
    assert states == ["missing", "running", "failed", "done", "damaged"]


def test_a_finished_result_is_never_overwritten_and_set_aside_on_demand(tmp_path: Path) -> None:
    entry = result("local", [1.0, 2.0])
    cell = cell_of(Store(tmp_path), entry)
    before = cell.write(entry)
    with pytest.raises(UserError, match="a finished result is already there"):
        cell.write(result("local", [3.0, 4.0]))
    assert cell.read() == before
    assert cell.set_aside().name == "result.json.old-1"
    cell.write(result("local", [3.0, 4.0]))
    assert cell.set_aside().name == "result.json.old-2"


def test_a_damaged_result_is_set_aside_not_deleted(tmp_path: Path) -> None:
    entry = result("local", [1.0, 2.0])
    cell = cell_of(Store(tmp_path), entry)
    for number in (1, 2):
        cell.path.mkdir(parents=True, exist_ok=True)
        cell.result_path.write_text(f"cut {number}")
        cell.write(entry)
        assert (cell.path / f"result.json.damaged-{number}").read_text() == f"cut {number}"
        assert cell.state == "done"


def change(**fields: Any) -> Callable[[Result], bytes]:
    return lambda entry: results.dump(seal({**entry, **fields}))


def drop(name: str) -> Callable[[Result], bytes]:
    return lambda entry: results.dump(seal({key: value for key, value in entry.items() if key != name}))


def user(**fields: Any) -> Callable[[Result], bytes]:
    return lambda entry: results.dump(seal({**entry, "users": [{**entry["users"][0], **fields}]}))


DAMAGE: dict[str, tuple[Callable[[Result], bytes], str]] = {
    "empty": (lambda entry: b"", "the file is empty"),
    "cut": (lambda entry: results.dump(entry)[:200], "not valid JSON"),
    "not UTF-8": (lambda entry: b"{\xff}", "not UTF-8 text at byte 1"),
    "binary": (lambda entry: bytes(range(128)), "not valid JSON"),
    "a list": (lambda entry: b"[]", "not a JSON object"),
    "deep": (lambda entry: b"[" * 100_000, "not valid JSON"),
    "NaN": (lambda entry: results.dump(entry).replace(b"41.5", b"NaN"), "NaN is no JSON number"),
    "infinite": (lambda entry: results.dump(entry).replace(b"41.5", b"1e999"), "users[0].test is inf"),
    "infinite elsewhere": (
        lambda entry: results.dump(entry).replace(b'"total": 10.0', b'"total": 10.0, "fit": 1e999'),
        "a number or a character out of range",
    ),
    "half a character": (
        lambda entry: results.dump(entry).replace(b'"small"', rb'"\ud800"'),
        "a number or a character out of range",
    ),
    "twice": (lambda entry: b'{"schema": 1, "schema": 1}', "a key occurs twice"),
    "schema": (lambda entry: results.dump({**entry, "schema": 2}), "its schema is 2"),
    "no schema": (lambda entry: b"{}", "its schema is None"),
    "no users": (drop("users"), "the field users is missing"),
    "no provenance": (drop("provenance"), "the field provenance is missing"),
    "no digest": (
        lambda entry: json.dumps({key: value for key, value in entry.items() if key != "digest"}).encode(),
        "the field digest is missing",
    ),
    "users of another type": (change(users={}), "users is {}, expected a list"),
    "a user of another type": (change(users=[3]), "users[0] is 3, expected an object"),
    "a text score": (user(test="41.5"), "users[0].test is '41.5', expected a number or null"),
    "a true score": (user(test=True), "users[0].test is True, expected a number or null"),
    "a nameless user": (user(name=""), "users[0].name is '', expected a name"),
    "no direction": (user(higher_is_better=1), "users[0].higher_is_better is 1"),
    "a seed of another type": (change(seed="0"), "seed is '0'"),
    "a short key": (change(key="abc"), "key is 'abc', expected 64 hexadecimal digits"),
    "an unknown status": (change(status="fine"), "status is 'fine'"),
    "done without users": (change(users=[]), "it is done but has no users"),
    "done with an error": (change(error={"kind": "raised", "message": "x"}), "its error does not fit its status"),
    "failed without an error": (change(status="failed"), "error is None, expected an object"),
    "bytes of another type": (change(bytes={}), "the field bytes.up is missing"),
    "a round of another type": (change(rounds=[{"round": -1}]), "rounds[0].round is -1"),
    "a user twice": (
        lambda entry: results.dump(seal({**entry, "users": [entry["users"][0]] * 2})),
        "it scores a user's task twice",
    ),
    "provenance without time": (
        lambda entry: results.dump(seal({**entry, "provenance": {**entry["provenance"], "time": "yesterday"}})),
        "provenance.time is 'yesterday', expected an ISO 8601 time",
    ),
    "provenance without protocol": (
        lambda entry: results.dump(
            seal({**entry, "provenance": {k: v for k, v in entry["provenance"].items() if k != "protocol"}})
        ),
        "the field provenance.protocol is missing",
    ),
    "an edited score": (
        lambda entry: results.dump(entry).replace(b"41.5", b"91.5"),
        "its content does not match its digest",
    ),
    "another cell's key": (change(key="0" * 64), "its key is '000000"),
    "another cell's seed": (change(seed=1), "its seed is 1, the place is for 0"),
    "another method's": (change(method="local"), "its method is 'local', the place is for 'fedmuscle'"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_and_told_with_path_and_cause(case: str, tmp_path: Path) -> None:
    entry = result("fedmuscle", [41.5, 20.25])
    store = put(tmp_path, entry)
    cell = cell_of(store, entry)
    damage, why = DAMAGE[case]
    cell.result_path.write_bytes(damage(entry))
    with pytest.raises(Damaged) as caught:
        cell.read()
    assert why in str(caught.value) and str(cell.result_path) in str(caught.value)
    assert isinstance(caught.value, UserError)
    (listed,) = store.results("toy", "mini")
    assert isinstance(listed, Damaged) and (listed.slug, listed.seed) == ("fedmuscle", 0)
    assert str(listed.path) == str(cell.result_path)


def test_a_folder_in_place_of_the_file_is_damage(tmp_path: Path) -> None:
    entry = result("local", [1.0, 2.0])
    cell = cell_of(Store(tmp_path), entry)
    cell.result_path.mkdir(parents=True)
    assert cell.state == "damaged"


def test_damage_survives_the_way_between_processes() -> None:
    damaged = Damaged(Path("a/seed1.json"), "cut")
    again = copy.deepcopy(damaged)  # by the same door as a process pool's exceptions
    assert (type(again), again.path, again.why, str(again)) == (Damaged, damaged.path, damaged.why, str(damaged))


def test_an_interrupted_write_leaves_the_old_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = result("local", failed="first")
    cell = cell_of(Store(tmp_path), failed)
    before = cell.write(failed)

    def cut(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", cut)
    with pytest.raises(UserError, match="No space left on device"):
        cell.write(result("local", [1.0, 2.0]))
    monkeypatch.undo()
    assert cell.read() == before
    assert not list(cell.path.glob(".result.json.*"))


def test_the_lock_excludes_another_process_and_dies_with_it(tmp_path: Path) -> None:
    entry = result("local", [1.0, 2.0])
    cell = cell_of(Store(tmp_path), entry)
    code = (
        "import sys; from pathlib import Path; from fedbench.store import CellFolder\n"
        "cell = CellFolder(Path(sys.argv[1]), 'toy', 'mini', 'local', {}, 0, '')\n"
        "with cell.lock():\n    print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(cell.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"another process \\(pid {other.pid}\\)"), cell.lock():
            pass
        left = cell.path / ".result.json.abc"
        left.write_text("half written")
    finally:
        other.kill()
        other.communicate()
    with cell.lock():
        assert not left.exists()  # what the killed process left is swept


def test_an_unwritable_place_is_refused_up_front(tmp_path: Path) -> None:
    Store(tmp_path / "new" / "runs").ensure_writable()
    assert list((tmp_path / "new" / "runs").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="results cannot be written there"):
        Store(tmp_path / "file").ensure_writable()


def test_a_read_only_folder_below_is_refused_up_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "toy" / "mini"
    locked.mkdir(parents=True)
    # Simulated, since an administrator may write everywhere whatever the permissions say.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != locked)
    with pytest.raises(UserError, match="results cannot be written there"):
        Store(tmp_path).ensure_writable()


def test_slugs_are_readable_file_names_and_never_shared() -> None:
    assert slug("local", {}) == "local"
    assert slug("fedmuscle", {"loss.tau": 0.1, "loss": "gramian"}) == "fedmuscle-loss=gramian-loss.tau=0.1"
    tricky: list[tuple[str, dict[str, Any]]] = [
        ("m", {"a": 1}),
        ("m", {"a": 1.0}),
        ("m", {"a": True}),
        ("m", {"a": "1"}),
        ("m", {"a": "true"}),
        ("m", {"a": None}),
        ("m", {"a": "b-c=d"}),
        ("m", {"a": "b", "c": "d"}),
        ("m-a=1", {}),
        ("m", {"a": "x/y"}),
        ("m", {"a": "x_y"}),
        ("m", {"a": "X_y"}),
        ("m", {"a": [1, 2]}),
        ("m", {"a": "é" * 200}),
        ("m", {"a": "é" * 201}),
        ("..", {}),
        ("../m", {}),
    ]
    names = [slug(*one) for one in tricky]
    assert len({name.lower() for name in names}) == len(names)
    assert all("/" not in name and not name.startswith(".") and len(name.encode()) < 100 for name in names)


def test_provenance_names_no_host_user_or_path(monkeypatch: pytest.MonkeyPatch) -> None:
    found = provenance.collect(["/home/joe/bin/fedbench", "run", "suites/setup1.toml", "--plugin", "/home/joe/x.py"])
    assert found["command"] == ["fedbench", "run", "suites/setup1.toml", "--plugin", "x.py"]
    assert provenance.fault(found) is None
    text = json.dumps(found)
    assert "joe" not in text and str(Path.home()) + "/" not in text and str(Path.cwd()) not in text
    assert os.uname().nodename not in text.replace("-", " ").split()
    assert found["packages"]["torch"] and found["machine"]["cores"] >= 1
    assert found["machine"]["vectors"] in ("amx_tile", "avx512f", "avx2", None)
    monkeypatch.setenv("PATH", "")  # no git: no commit, no error
    assert provenance.collect(["fedbench"])["git"] is None


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        ("--plugin=/home/joe/x.py", "--plugin=x.py"),
        ("/home/joe smith/x.py", "x.py"),
        ("~/x.py", "x.py"),
        ("../../home/joe/x.toml", "x.toml"),
        ('public.folder="/data/joe/voc"', 'public.folder="voc"'),
        ("address=ray://10.0.0.1:33", "address=ray://"),
        ("suites/setup1.toml", "suites/setup1.toml"),
        ("fedmuscle:loss=muscle,loss.tau=0.1", "fedmuscle:loss=muscle,loss.tau=0.1"),
    ],
)
def test_paths_are_cut_to_their_last_part(argument: str, kept: str) -> None:
    assert provenance.strip_paths(["fedbench", argument]) == ["fedbench", kept]


def board_of(target: Path) -> Path:
    return target / "toy" / "mini"


def test_promote_copies_finished_results(tmp_path: Path) -> None:
    entries = [result("local", [1.0, 2.0], seed=seed) for seed in (0, 1)]
    store = put(tmp_path / "runs", *entries)
    done = promote(store, tmp_path / "results", [entry["key"] for entry in entries])
    assert done.written == [board_of(tmp_path / "results") / "local" / f"seed{seed}.json" for seed in (0, 1)]
    assert reference_results(board_of(tmp_path / "results")) == entries
    again = promote(store, tmp_path / "results", [entry["key"] for entry in entries])
    assert (len(again.written), len(again.unchanged)) == (0, 2)


def test_promote_refuses_what_is_not_finished(tmp_path: Path) -> None:
    failed = result("local", failed="no memory")
    store = put(tmp_path / "runs", failed)
    for key in (failed["key"], "f" * 64):
        with pytest.raises(UserError, match="no finished result has the key"):
            promote(store, tmp_path / "results", [key])
    assert not (tmp_path / "results").exists()


def test_promote_refuses_to_mix_protocols_and_supersedes_on_demand(tmp_path: Path) -> None:
    old = [result("local", [1.0, 2.0]), result("simclr", [2.0, 3.0])]
    new = result("local", [1.5, 2.5], protocol_key="a" * 64)
    store = put(tmp_path / "runs", *old, new)
    target, board = tmp_path / "results", board_of(tmp_path / "results")
    with pytest.raises(UserError, match="2 protocols cannot share a board"):
        promote(store, target, [old[0]["key"], new["key"]])
    promote(store, target, [entry["key"] for entry in old])
    with pytest.raises(UserError, match=f"the board is of protocol {PROTOCOL[:12]}, the new results of aaaaaaaaaaaa"):
        promote(store, target, [new["key"]])
    assert reference_results(board) == old
    done = promote(store, target, [new["key"]], supersede=True)
    (shown,) = reference_results(board)
    assert not isinstance(shown, Damaged)
    assert (shown["users"], shown["supersedes"]) == (new["users"], old[0]["digest"])
    away = board / "superseded" / PROTOCOL[:12]
    assert sorted(done.superseded) == [away / "local" / "seed0.json", away / "simclr" / "seed0.json"]
    assert [results.read(path) for path in sorted(done.superseded)] == old
    assert promote(store, target, [new["key"]], supersede=True).written == []


def test_promote_replaces_a_wrong_result_only_on_demand_and_keeps_every_one(tmp_path: Path) -> None:
    target = tmp_path / "results"
    place = board_of(target) / "fedmuscle" / "seed0.json"
    digests = []
    for number in range(3):
        entry = result("fedmuscle", [float(number), 1.0], versions={"loss:muscle": str(number)})
        store = put(tmp_path / f"runs{number}", entry)
        if number:
            with pytest.raises(UserError, match="another result is there"):
                promote(store, target, [entry["key"]])
        promote(store, target, [entry["key"]], supersede=True)
        digests.append(results.read(place)["digest"])
    assert results.read(place)["supersedes"] == digests[1]
    kept = sorted((board_of(target) / "superseded").rglob("*.json"))
    assert sorted(results.read(path)["digest"] for path in kept) == sorted(digests[:2])


def test_promote_changes_nothing_where_a_file_is_damaged(tmp_path: Path) -> None:
    entry = result("local", [1.0, 2.0])
    store = put(tmp_path / "runs", entry)
    place = board_of(tmp_path / "results") / "simclr" / "seed0.json"
    place.parent.mkdir(parents=True)
    place.write_text("cut")
    with pytest.raises(Damaged, match="not valid JSON"):
        promote(store, tmp_path / "results", [entry["key"]], supersede=True)
    assert [path.name for path in (tmp_path / "results").rglob("*.json")] == ["seed0.json"]


def test_a_file_in_another_cells_place_is_damaged(tmp_path: Path) -> None:
    entry = result("local", [1.0, 2.0])
    for name, path in (("seed", "local/seed1.json"), ("method", "simclr/seed0.json")):
        place = tmp_path / name / path
        place.parent.mkdir(parents=True)
        place.write_bytes(results.dump(entry))
        (found,) = reference_results(tmp_path / name)
        assert isinstance(found, Damaged) and "its place is another cell's" in found.why
