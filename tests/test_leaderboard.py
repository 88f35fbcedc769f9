"""The board: nothing vanishes, nothing mixes, and the numbers are those of the result files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedbench.errors import UserError
from fedbench.leaderboard import Board, Row, board, provisional
from fedbench.report import render
from fedbench.results import Damaged
from fedbench.store import Store

sys.path.append(str(Path(__file__).parent))
from made_up import folder_of, result, user_row

LOCAL: tuple[str, dict[str, Any]] = ("local", {})
OTHER = hashlib.sha256(b"other protocol").hexdigest()


def row(shown: Board, method: str) -> Row:
    (found,) = [one for one in shown.rows if one.method == method]
    return found


def locals_of(*seeds: int) -> list[Any]:
    return [result("local", [40.0, 20.0], seed=seed) for seed in seeds]


def test_rows_are_ranked_with_the_values_of_the_files() -> None:
    results = [
        *locals_of(0, 1),
        result("simclr", [42.0, 21.0], seed=0),  # +5, +5
        result("simclr", [44.0, 21.0], seed=1),  # +10, +5
        result("worse", [36.0, 22.0], seed=0),  # -10, +10
        result("worse", [36.0, 20.0], seed=1),  # -10, 0
    ]
    shown = board(results, [LOCAL, ("worse", {}), ("simclr", {})], [0, 1])
    assert [(one.rank, one.method, one.status) for one in shown.rows] == [
        (1, "simclr", "done"),
        (2, "local", "done"),
        (3, "worse", "done"),
    ]
    simclr, worse = row(shown, "simclr"), row(shown, "worse")
    assert simclr.delta_mean == pytest.approx(6.25)
    assert simclr.delta_low == pytest.approx(6.25 - 12.7062047 * 1.25, abs=1e-5)
    assert simclr.users["user1"] == {
        "task": "mlc",
        "metric": "mAP",
        "higher_is_better": True,
        "value": pytest.approx(43.0),
        "std": pytest.approx(2**0.5),
        "delta": pytest.approx(7.5),
        "subsets": {},
    }
    assert simclr.tasks == pytest.approx({"mlc": 7.5, "ic100": 5.0})
    assert worse.users_harmed == 1
    assert worse.worst_user_delta == pytest.approx(-10.0)
    assert (simclr.bytes_up, simclr.bytes_down, simclr.bytes_paper, simclr.seconds) == (1000.0, 2000.0, None, 10.0)
    assert simclr.mean_rank == 1.125 + 0.125  # second by user2 in seed 0, else first
    assert row(shown, "local").delta_mean == 0.0 and row(shown, "local").users_harmed == 0
    assert shown.complete and shown.notes == []


def test_the_fields_that_others_script() -> None:
    (only,) = [one.as_dict() for one in board(locals_of(0), [LOCAL], [0]).rows]
    assert list(only)[:15] == [
        "method",
        "options",
        "delta_mean",
        "delta_low",
        "delta_high",
        "seeds_done",
        "seeds_total",
        "status",
        "users",
        "tasks",
        "users_harmed",
        "worst_user_delta",
        "bytes_up",
        "bytes_down",
        "bytes_paper",
    ]
    assert {"seconds", "cause", "rank", "geometric_mean", "mean_rank"} <= set(only)
    assert json.loads(json.dumps(only, allow_nan=False)) == only


def test_missing_failed_and_damaged_rows_stay_with_their_cause(tmp_path: Path) -> None:
    broken = result("broken", [1.0, 2.0])
    damaged = Damaged(folder_of(tmp_path, broken) / "result.json", "cut at byte 3")
    results = [
        *locals_of(0, 1),
        result("half", [80.0, 40.0], seed=0),
        result("half", failed="loss is NaN\nmore", seed=1),
        result("failed", failed="no memory", seed=0),
        result("good", [41.0, 20.0], seed=0),
        result("good", [41.0, 20.0], seed=1),
        damaged,
    ]
    planned = [LOCAL, ("absent", {}), ("half", {}), ("failed", {}), ("good", {}), ("broken", {})]
    shown = board(results, planned, [0, 1])
    assert [(one.method, one.status, f"{one.seeds_done}/{one.seeds_total}") for one in shown.rows] == [
        ("good", "done", "2/2"),
        ("local", "done", "2/2"),
        ("half", "partial", "1/2"),  # best by far, but not before the complete rows
        ("absent", "missing", "0/2"),
        ("broken", "damaged", "0/2"),
        ("failed", "failed", "0/2"),
    ]
    assert row(shown, "half").cause == "seed 1: failed: user2: loss is NaN"
    assert row(shown, "half").delta_mean == pytest.approx(100.0)
    assert row(shown, "absent").cause == "seeds 0, 1: not run"
    assert row(shown, "broken").cause == "seed 0: damaged: cut at byte 3; seed 1: not run"
    assert row(shown, "failed").cause == "seed 0: failed: user2: no memory; seed 1: not run"
    assert [one.rank for one in shown.rows] == [1, 2, None, None, None, None]
    assert shown.damaged == [damaged] and not shown.complete


def test_a_damaged_file_of_an_unknown_method_has_a_row_too(tmp_path: Path) -> None:
    stray = Damaged(tmp_path / "toy" / "mini" / "stranger-loss=x" / "seed1.json", "cut")
    shown = board([*locals_of(0, 1), stray], [LOCAL], [0, 1])
    assert row(shown, "stranger-loss=x").status == "damaged"


def test_a_good_result_wins_over_a_damaged_file_of_the_same_seed(tmp_path: Path) -> None:
    old = Damaged(tmp_path / "toy" / "mini" / "local" / "seed0-0123456789ab" / "result.json", "cut")
    shown = board([*locals_of(0), old], [LOCAL], [0])
    assert row(shown, "local").status == "done" and shown.damaged == [old] and not shown.complete


def test_only_seeds_with_local_training_are_compared() -> None:
    results = [*locals_of(0), *(result("simclr", [44.0, 22.0 + 2 * seed], seed=seed) for seed in (0, 1))]
    one = row(board(results, [LOCAL, ("simclr", {})], [0, 1]), "simclr")
    assert one.delta_mean == pytest.approx(10.0)
    assert (one.delta_low, one.seeds_compared) == (None, [0])
    assert (one.status, one.seeds_done, one.cause) == (
        "partial",
        2,
        "seed 1: local training of this seed is missing",
    )


def test_without_local_training_there_are_values_but_no_delta() -> None:
    shown = board([result("simclr", [44.0, 22.0])], [("simclr", {})], [0])
    assert row(shown, "simclr").delta_mean is None and row(shown, "simclr").users["user1"]["value"] == 44.0
    assert shown.notes == ["there is no local training to compare with: no row has a Δ%"]


def test_an_undefined_delta_is_told() -> None:
    results = [result("local", [0.0, 20.0]), result("simclr", [44.0, 22.0])]
    shown = board(results, [LOCAL, ("simclr", {})], [0])
    one = row(shown, "simclr")
    assert (one.delta_mean, one.status, one.rank) == (None, "done", None)
    assert one.cause == "seed 0: local training of user1 scores 0: Δ% is undefined (mlc mAP)"
    assert row(shown, "local").delta_mean == 0.0


def test_options_make_rows_and_the_plainest_local_is_the_reference() -> None:
    results = [
        *locals_of(0),
        result("local", [44.0, 22.0], options={"steps": 60}),
        result("fedmuscle", [48.0, 24.0], options={"loss": "muscle"}),
        result("fedmuscle", [46.0, 23.0], options={"loss": "gramian"}),
    ]
    shown = board(results, seeds=[0])
    assert [(one.method, one.options) for one in shown.rows] == [
        ("fedmuscle", {"loss": "muscle"}),
        ("fedmuscle", {"loss": "gramian"}),
        ("local", {"steps": 60}),
        ("local", {}),
    ]
    assert [one.delta_mean for one in shown.rows] == pytest.approx([20.0, 15.0, 10.0, 0.0])
    other = board(results, seeds=[0], reference=("local", {"steps": 60}))
    assert [one.delta_mean for one in other.rows][2] == 0.0


def test_protocols_never_mix() -> None:
    old = [*locals_of(0), result("simclr", [44.0, 22.0])]
    new = [
        result("local", [50.0, 20.0], protocol_key=OTHER, time="2026-02-02T00:00:00Z"),
        result("simclr", [60.0, 24.0], protocol_key=OTHER, time="2026-02-02T00:00:00Z"),
    ]
    newest = board([*new, *old], [LOCAL], [0])
    assert newest.protocol_key == OTHER and row(newest, "simclr").delta_mean == pytest.approx(20.0)
    assert newest.notes == [f"not shown: 2 results of another protocol ({old[0]['protocol_key'][:12]})"]
    asked = board([*new, *old], [LOCAL], [0], protocol_key=old[0]["protocol_key"])
    assert row(asked, "simclr").delta_mean == pytest.approx(10.0) and OTHER[:12] in asked.notes[0]
    absent = board(old, [LOCAL, ("simclr", {})], [0], protocol_key="f" * 64)
    assert [one.status for one in absent.rows] == ["missing", "missing"]


def test_suites_and_scales_never_mix() -> None:
    with pytest.raises(UserError, match="several suites or scales"):
        board([*locals_of(0), result("local", [1.0, 2.0], scale="paper")])


def test_results_of_an_older_plugin_are_stale() -> None:
    results = [*locals_of(0), result("fedmuscle", [44.0, 22.0], versions={"loss:muscle": "1"})]
    planned = [LOCAL, ("fedmuscle", {})]
    assert row(board(results, planned, [0], versions={"loss:muscle": "1"}), "fedmuscle").status == "done"
    one = row(board(results, planned, [0], versions={"loss:muscle": "2"}), "fedmuscle")
    assert (one.status, one.rank) == ("stale", None)
    assert one.cause == "seed 0: stale: loss:muscle was 1, is 2"
    assert one.delta_mean == pytest.approx(10.0)


def test_versions_of_a_plugin_never_mix_in_a_row() -> None:
    def of(version: str, seed: int, score: float, time: str) -> Any:
        return result("fedmuscle", [score, 22.0], seed=seed, versions={"loss:muscle": version}, time=time)

    old = [of("1", seed, 80.0, "2026-03-01T00:00:00Z") for seed in (0, 1)]
    new = [of("2", 0, 44.0, "2026-02-01T00:00:00Z")]
    planned = [LOCAL, ("fedmuscle", {})]
    one = row(board([*locals_of(0, 1), *old, *new], planned, [0, 1], versions={"loss:muscle": "2"}), "fedmuscle")
    assert (one.status, one.seeds_done, one.users["user1"]["value"]) == ("partial", 1, 44.0)
    assert one.cause == "seed 1: not run (there is a result of another plugin version)"
    newest = row(board([*locals_of(0, 1), *old, *new], planned, [0, 1]), "fedmuscle")
    assert (newest.status, newest.users["user1"]["value"]) == ("done", 80.0)


def test_duplicates_and_unplanned_seeds_are_noted() -> None:
    twice = [result("local", [40.0, 20.0], time=f"2026-01-0{day}T00:00:00Z") for day in (1, 2)]
    shown = board([*twice, result("local", [1.0, 1.0], seed=7)], [LOCAL], [0])
    assert shown.notes == [
        "not shown: results of seeds that are not planned: 7",
        "local seed 0 has several results: the newest is shown",
    ]
    assert row(shown, "local").seeds_total == 1


def test_several_tasks_of_a_user_stand_apart() -> None:
    def of(method: str, first: float, second: float) -> Any:
        scores = [("pair", "retrieval", "i2t R@1", first), ("pair", "retrieval", "t2i R@1", second)]
        return result(method, users=[user_row(*score) for score in scores])

    shown = board([of("local", 20.0, 10.0), of("creamfl", 22.0, 12.0)], [LOCAL], [0])
    user = row(shown, "creamfl").users["pair"]
    assert (user["task"], user["metric"], user["value"]) == ("retrieval", "i2t R@1 + t2i R@1", None)
    assert user["delta"] == pytest.approx(15.0)
    assert [(part["value"], part["delta"]) for part in user["parts"]] == [
        (22.0, pytest.approx(10.0)),
        (12.0, pytest.approx(20.0)),
    ]
    assert shown.users == {"pair": [("retrieval", "i2t R@1", True), ("retrieval", "t2i R@1", True)]}


def test_subsets_are_means_over_seeds() -> None:
    def of(seed: int, seen: float) -> Any:
        return result("local", users=[user_row("user1", "mlc", "mAP", 30.0, subsets={"seen": seen})], seed=seed)

    one = row(board([of(0, 40.0), of(1, 50.0)], [LOCAL], [0, 1]), "local")
    assert one.users["user1"]["subsets"] == {"seen": 45.0}


def test_ties_go_by_name_and_no_order_of_files_changes_the_board() -> None:
    results = [*locals_of(0), *(result(name, [40.0, 20.0]) for name in ("b", "a", "c"))]
    shown = board(results, seeds=[0])
    assert [one.method for one in shown.rows] == ["a", "b", "c", "local"]
    assert board(results[::-1], seeds=[0]).rows == shown.rows


def test_an_empty_board_shows_what_is_planned() -> None:
    shown = board([], [LOCAL, ("simclr", {})], [0, 1])
    assert [(one.method, one.status, one.seeds_total) for one in shown.rows] == [
        ("local", "missing", 2),
        ("simclr", "missing", 2),
    ]
    assert board([], []).rows == []


def test_the_provisional_delta_is_of_the_last_common_round() -> None:
    def record(number: int, **scores: float | None) -> dict[str, Any]:
        return {"round": number, "validation": scores}

    local = [record(0, a=10.0, b=20.0), record(1, a=20.0, b=40.0), record(2, a=30.0, b=50.0)]
    running = [record(0, a=10.0, b=20.0), record(1, a=22.0, b=50.0)]
    found = provisional(running, local)
    assert found is not None and found.round == 1
    assert found.mean == pytest.approx(17.5)
    assert found.users == pytest.approx({"a": 10.0, "b": 25.0})
    lower = provisional(running, local, {"b": False})
    assert lower is not None and lower.users["b"] == pytest.approx(-25.0)
    assert provisional([], local) is None
    assert provisional([record(0, a=10.0)], local) is None  # not every user is scored yet
    early = provisional([*running, record(2, a=None, b=1.0)], local)
    assert early is not None and early.round == 1


def test_a_board_needs_neither_torch_nor_numpy_and_is_quick(tmp_path: Path) -> None:
    rounds = [{"round": number, "validation": {"user1": 1.0, "user2": 2.0}} for number in range(9)]
    for method in ("local", "a", "b", "c", "d", "e", "f", "g"):
        for seed in range(3):
            entry = result(method, [40.0 + len(method), 20.0], seed=seed, rounds=rounds)
            names = ("suite", "scale", "method", "options", "seed", "key")
            Store(tmp_path).cell(*(entry[name] for name in names)).write(entry)
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from pathlib import Path\n"
        "from fedbench.leaderboard import board\nfrom fedbench.report import render\nfrom fedbench.store import Store\n"
        "text = render(board(Store(Path(sys.argv[1])).results('toy', 'mini')))\n"
        "assert text.count('3/3') == 8, text\n"
        "heavy = {'torch', 'numpy', 'pandas', 'scipy', 'matplotlib', 'fedbench_plugins'} & set(sys.modules)\n"
        "assert not heavy, heavy\nprint(time.perf_counter() - start)"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(times) < 0.3


def test_a_method_that_touches_nobody_is_named_below_the_table() -> None:
    why = "not applicable (0 of 2 users)"
    nobody = [
        result("lonely", seed=seed, status="not applicable", error={"kind": "not applicable", "message": why})
        for seed in (0, 1)
    ]
    shown = board([*locals_of(0, 1), *nobody], [("local", {}), ("lonely", {})], [0, 1])
    lonely = row(shown, "lonely")
    assert (lonely.status, lonely.cause, lonely.rank) == ("not applicable", why, None)
    assert shown.complete
    text = render(shown, "table")
    assert text.count("lonely") == 1 and f"lonely: {why}" in text
    assert json.loads(render(shown, "json"))[-1]["status"] == "not applicable"
