"""A board as text: every format holds every row, escapes what it must, and fits where it is shown."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fedbench.errors import UserError
from fedbench.leaderboard import Board, board
from fedbench.report import FORMATS, curves, label_of, render, signed, size
from fedbench.results import Damaged

sys.path.append(str(Path(__file__).parent))
from made_up import result, user_row

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("local", {}),
    ("fedmuscle", {"loss": "muscle"}),
    ("fedmuscle", {"loss": "gramian"}),
    ("fedmuscle", {"loss": "pairwise", "loss.tau": 0.1}),
    ("fedmuscle", {"loss": "muscle", "shuffle": True}),
    ("cofed", {}),
    ("simclr", {}),
    ("fedhenn", {}),
]
TASKS = [("mlc", "mAP")] * 3 + [("ic100", "accuracy")] * 2 + [("ic10", "accuracy")] * 7
NASTY = r"a|b_c*d`e<f>[g]#h&i%j$k{l}m~n^o\p"


def results_of(users: int, *, seeds: int = 3) -> list[Any]:
    draw = random.Random(0)
    entries = []
    for number, (method, options) in enumerate(METHODS):
        for seed in range(seeds):
            scores = [
                user_row(f"user{index + 1}", *TASKS[index], 20.0 + 3 * index + draw.uniform(0, 1 + number))
                for index in range(users)
            ]
            rounds = [
                {"round": r, "validation": {row["name"]: row["test"] * (r + 1) / 5 for row in scores}} for r in range(5)
            ]
            entries.append(result(method, users=scores, seed=seed, options=options, rounds=rounds))
    return entries


def full(users: int = 6) -> Board:
    return board(results_of(users), METHODS, [0, 1, 2])


def troubled() -> Board:
    damaged = Damaged(Path("runs/toy/mini/simclr/seed0-0123456789ab/result.json"), "cut at byte 3")
    entries: list[Any] = [result("local", [40.0, 20.0]), result("cofed", failed="no \x1b[31mmemory"), damaged]
    return board(entries, [("local", {}), ("cofed", {}), ("simclr", {}), ("absent", {})], [0, 1])


@pytest.mark.parametrize("users", [1, 6, 12])
def test_the_table_fits_a_hundred_columns_and_loses_nothing(users: int) -> None:
    shown = full(users)
    text = render(shown, width=100, title="toy · mini")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in lines)
    assert "…" not in text  # nothing is cut off
    for row in shown.rows:
        assert signed(row.delta_mean) in text
        for user in row.users.values():
            assert f"{user['value']:.2f} " in text and signed(user["delta"], 1) in text
        for value in row.options.values():
            assert str(value).lower() in text
    for name in shown.users:
        assert re.search(rf"\b{name}\b", text)
    assert text.count("3/3") == 8


def test_the_rows_of_the_table_are_in_the_order_of_the_board() -> None:
    shown = full(2)
    ranks = re.findall(r"^(\d+)  (\w+)", render(shown), re.MULTILINE)
    assert ranks == [(str(number), row.method) for number, row in enumerate(shown.rows, 1)]


def test_a_narrow_terminal_still_shows_all_values() -> None:
    shown = full(6)
    text = render(shown, width=60)
    for row in shown.rows:
        for user in row.users.values():
            assert f"{user['value']:.2f} " in text


def test_colour_says_gain_and_harm() -> None:
    entries = [
        result("local", [40.0, 20.0]),
        result("up", [44.0, 22.0]),
        result("down", [36.0, 18.0]),
    ]
    text = render(board(entries, seeds=[0]), color=True)
    assert "\x1b[1;32m+10.00\x1b[0m" in text and "\x1b[1;31m-10.00\x1b[0m" in text
    assert "\x1b[32m+10.0\x1b[0m" in text and "\x1b[31m-10.0\x1b[0m" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert [line.rstrip() for line in plain.splitlines()] == render(board(entries, seeds=[0])).splitlines()


@pytest.mark.parametrize("form", ["table", "markdown", "latex", "csv", "json"])
def test_incomplete_rows_are_in_every_format_with_their_cause(form: str) -> None:
    text = render(troubled(), form, width=200)
    for part in ("cofed", "simclr", "absent", "failed", "damaged", "missing", "not run", "cut at byte 3"):
        assert part in text
    if form in ("table", "markdown", "latex"):
        assert "1/2" in text and "0/2" in text
    if form != "json":
        assert ("\x1b" in text) == (form == "csv")  # data keep it, nothing printed for reading does


def test_the_table_names_a_damaged_file_and_what_is_committed_does_not() -> None:
    path = "runs/toy/mini/simclr/seed0-0123456789ab/result.json"
    assert path in render(troubled(), width=200)
    assert path not in render(troubled(), "markdown") and path not in render(troubled(), "latex")


def test_json_is_the_rows_best_first() -> None:
    shown = full(6)
    rows = json.loads(render(shown, "json"))
    assert rows == [row.as_dict() for row in shown.rows]
    assert rows[0]["delta_mean"] == max(row["delta_mean"] for row in rows)


def test_csv_has_a_line_for_every_row_with_its_users() -> None:
    shown = full(6)
    rows = list(csv.DictReader(io.StringIO(render(shown, "csv"))))
    assert [row["method"] for row in rows] == [row.method for row in shown.rows]
    for text, row in zip(rows, shown.rows, strict=True):
        assert json.loads(text["options"]) == row.options
        assert float(text["delta_mean"]) == row.delta_mean
        assert float(text["user1_mlc_mAP"]) == row.users["user1"]["value"]
        assert float(text["user4_delta"]) == row.users["user4"]["delta"]
        assert float(text["task_ic100_delta"]) == row.tasks["ic100"]


def nasty_board() -> Board:
    users = [user_row("u|1", "t_1", "m%", 40.0), user_row("u2", "t&2", "m#", 20.0, higher=False)]
    return board([result("local", users=users), result("m_x", users=users, options={"o": NASTY})], seeds=[0])


def test_markdown_escapes_and_keeps_its_columns() -> None:
    text = render(nasty_board(), "markdown", title="a_b|c")
    table = [line for line in text.splitlines() if line.startswith("|")]
    bars = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in table}
    assert len(table) == 4 and len(bars) == 1
    assert r"a\|b\_c\*d\`e\<f\>\[g\]\#h" in text and r"## a\_b\|c" in text and r"u\|1 t\_1 m%" in text


def test_latex_escapes_and_keeps_its_columns() -> None:
    text = render(nasty_board(), "latex", title="100 % of a_b & c")
    assert r"a\textbar{}b\_c*d`e\textless{}f\textgreater{}[g]\#h\&i\%j\$k\{l\}m\textasciitilde{}n" in text
    assert r"\caption{100 \% of a\_b \& c}" in text
    (spec,) = re.findall(r"\\begin\{tabular\}\{(\w+)\}", text)
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in lines} == {len(spec)}
    for rule in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert text.count(rule) == 1


def test_latex_sets_minus_signs_as_such() -> None:
    entries = [result("local", [40.0, 20.0]), result("down", [36.0, 18.0])]
    text = render(board(entries, seeds=[0]), "latex")
    assert r"$-$10.00" in text and r"36.00 ($-$10.0)" in text and "-10" not in text.replace("$-$10", "")


def test_a_reference_has_no_rank_and_says_what_it_is() -> None:
    entries = [
        result("local", [40.0, 20.0]),
        result("pooled", [60.0, 40.0], reference=True, touched=["user1", "user2"]),
        result("simclr", [44.0, 20.0], touched=["user1"]),
    ]
    shown = board(entries, [("local", {}), ("pooled", {}), ("simclr", {})])
    assert [(row.method, row.rank) for row in shown.rows] == [("pooled", None), ("simclr", 1), ("local", 2)]
    text = render(shown, width=160)
    assert "pooled ‡" in text and "‡: a reference that pools all data, no federated method" in text
    assert "‡" not in render(board(entries[:1]), width=160)
    assert r"\textdaggerdbl{}" in render(shown, "latex")


def test_what_stands_beside_the_mean() -> None:
    entries = [result("local", [40.0, 20.0]), result("simclr", [80.0, 10.0], touched=["user1"])]
    shown = board(entries, [("local", {}), ("simclr", {})])
    shown.rows[0].settings = "tuned"
    best = json.loads(render(shown, "json"))[0]
    assert (best["method"], best["settings"], best["users_touched"]) == ("simclr", "tuned", 1)
    # Twice as good for one and half as good for the other: Δ% says +25, the geometric mean that nothing is gained.
    assert best["delta_mean"] == 25.0 and best["geometric_mean"] == pytest.approx(1.0) and best["mean_rank"] == 1.5
    line = next(line for line in render(shown, "markdown").splitlines() if "simclr" in line)
    assert "| 1.000 | 1.5 | 1 | tuned |" in line
    table = render(shown, width=100)
    assert "geo. mean" in table and "settings" in table and "tuned" in table


def test_controls_are_marked_and_explained() -> None:
    text = render(full(2), controls={"fedmuscle:loss=muscle,shuffle=true", "local"}, width=160)
    assert text.count("shuffle=true †") == 3 and text.count("local †") == 3 and "†: a control" in text
    assert "†" not in render(full(2))


@pytest.mark.parametrize("form", ["table", "markdown", "latex"])
def test_published_numbers_stand_apart_for_orientation(form: str) -> None:
    published: dict[str, dict[str, Any]] = {
        "Local": {"user 1": 42.17, "Δ%": "0.00"},
        "FedMuscle": {"user 1": 46.33, "user 6": 66.57},
    }
    text = render(full(2), form, published=published)
    head, beneath = text.split("published (other data, for orientation)")
    assert "66.57" in beneath and "66.57" not in head
    assert "66.57" not in render(full(2), "json", published=published)


def test_facts_stand_under_the_title() -> None:
    lines = render(full(2), title="toy · mini", facts={"rounds": 8, "batch": 32}).splitlines()
    assert lines[:2] == ["toy · mini", "rounds 8 · batch 32"]


def test_lower_is_better_is_marked() -> None:
    assert "m# ↓" in render(nasty_board()) and r"m\# $\downarrow$" in render(nasty_board(), "latex")


def test_an_unknown_format_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'markdown'"):
        render(full(1), "markdwon")


@pytest.mark.parametrize("form", FORMATS)
def test_an_empty_board_is_rendered(form: str) -> None:
    assert render(board([]), form).endswith("\n")


def test_labels_are_written_as_they_are_given() -> None:
    assert [label_of(row) for row in full(1).rows if row.method == "local"] == ["local"]
    assert "fedmuscle:loss=pairwise,loss.tau=0.1" in [label_of(row) for row in full(1).rows]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (98304, "98.3 kB"),
        (999_600, "1.00 MB"),
        (5e12, "5 TB"),
    ],
)
def test_sizes_have_the_unit_that_fits(value: float | None, text: str) -> None:
    assert size(value) == text


def test_no_number_is_a_negative_zero() -> None:
    assert [signed(value) for value in (-0.001, 0.0, 0.005, -0.01, None)] == ["0.00", "0.00", "+0.01", "-0.01", "–"]


@pytest.mark.parametrize("users", [1, 2, 6])
def test_curves_are_a_picture(users: int, tmp_path: Path) -> None:
    path = curves([*results_of(users), Damaged(Path("x"), "cut")], tmp_path / "new" / "curves.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [left.name for left in path.parent.iterdir()] == ["curves.png"]


def test_curves_without_anything_to_draw_are_refused(tmp_path: Path) -> None:
    for entries in ([], [result("local", failed="no memory")], [result("local", [1.0, 2.0])]):
        with pytest.raises(UserError, match="validation scores by round"):
            curves(entries, tmp_path / "curves.png")
    assert not list(tmp_path.iterdir())
