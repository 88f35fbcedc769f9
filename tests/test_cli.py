"""The command line from outside: what each command prints, leaves behind, and exits with."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from command_line import Done, fedbench, refused, working_in
from conftest import tiny_suite
from made_up import folder_of, result, user_row

from fedbench.interfaces import KINDS
from fedbench.results import dump
from fedbench.version import __version__

COSINE = '''
import torch, fedbench

class Cosine(fedbench.AlignmentLoss):
    """1 - cosine similarity to the mean of the others."""
    def forward(self, anchor, others):            # (B, d), (M, B, d), unit rows -> scalar
        return (1 - (anchor * torch.nn.functional.normalize(others.mean(0), dim=-1)).sum(-1)).mean()

@fedbench.hookimpl
def fedbench_losses(register):
    register("cosine", Cosine)
'''
METHOD = '''
"""A stranger's method: users send their first public embeddings and get the mean of all back."""
import torch, fedbench

class User(fedbench.UserProgram):
    @fedbench.verb
    def pull(self, mean):
        self.pulled = float(mean.sum())
        return {}

class Server(fedbench.ServerProgram):
    def round(self, r):
        self.ask("fit")
        replies = self.ask("represent", batch=self.public.draw(1, self.protocol.batch)[0])
        mean = torch.stack([reply["z"] for reply in replies.values()]).mean(0)
        self.ask("pull", mean=mean)

class Mean(fedbench.Method):
    """The mean of everyone's embeddings."""
    User, Server = User, Server

@fedbench.hookimpl
def fedbench_methods(register):
    register("mean", Mean)
'''
BREAKS = METHOD.replace("self.pulled = float(mean.sum())", 'raise RuntimeError("the pull broke")').replace(
    '"mean", Mean', '"breaks", Mean'
)
QUICK = ("--jobs", 1, "--seeds", 0, "--set", "rounds=1", "--device", "cpu")
# Three users of one task: with a hundred classes, untrained nets may score 0 and leave Δ% undefined.
SUITE = tiny_suite().replace('task = "ic100"', 'task = "mlc"').replace('task = "ic10"', 'task = "mlc"')


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny suite and its finished runs; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "suites").mkdir()
    (folder / "suites" / "tiny.toml").write_text(SUITE)
    with working_in(folder):
        done = fedbench("run", "suites/tiny.toml", "--jobs", 1, "--device", "cpu", "--method", "fedmuscle:loss=muscle")
    assert done.code == 0, done.err
    (folder / "run.txt").write_text(done.out)
    return folder


@pytest.fixture
def workplace(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the finished folder, as working folder."""
    folder = Path(shutil.copytree(finished, tmp_path / "work"))
    with working_in(folder):
        yield folder


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """A working folder that holds the tiny suite only."""
    (tmp_path / "tiny.toml").write_text(SUITE)
    with working_in(tmp_path):
        yield tmp_path


def results_of(folder: Path, method: str) -> list[Path]:
    return sorted((folder / "runs" / "tiny" / "mini").glob(f"{method}/seed*/result.json"))


def errors(done: Done) -> str:
    assert "Traceback" not in done.err
    return done.err


# -- what is there


def test_version_and_help() -> None:
    assert fedbench("--version").out.strip() == f"fedbench, version {__version__}"
    for arguments in (["--help"], ["run", "-h"], ["data", "show", "--help"]):
        done = fedbench(*arguments)
        assert done.code == 0 and "Usage: fedbench" in done.out and not done.err
    bare = fedbench()
    assert bare.code == 2 and "Usage: fedbench" in bare.err


def test_list_shows_every_kind_or_one() -> None:
    everything = fedbench("list")
    assert everything.code == 0 and not everything.err
    for kind in KINDS:
        assert f"\n{kind} (" in "\n" + everything.out
    losses = fedbench("list", "loss").out
    assert "muscle" in losses and "The Muscle loss" in losses and "[built-in]" in losses
    assert "fedmuscle" not in losses


def test_list_and_plugins_show_a_file(empty: Path) -> None:
    (empty / "my_loss.py").write_text(COSINE)
    listed = fedbench("list", "loss", "--plugin", "my_loss.py").out
    assert "cosine" in listed and "1 - cosine similarity to the mean of the others." in listed
    assert "[my_loss.py]" in listed
    shown = fedbench("plugins", "--plugin", "my_loss.py")
    assert shown.code == 0
    assert "my_loss  [file my_loss.py]\n  loss: cosine" in shown.out
    assert "fedbench_plugins  [built-in]" in shown.out and "method: " in shown.out


def test_validate_says_what_a_suite_holds(empty: Path) -> None:
    done = fedbench("validate", "tiny.toml")
    assert done.code == 0
    assert done.out == "tiny at scale mini is valid: 3 users, 5 methods, 2 seeds, 10 cells\n"
    assert "1 seeds, 5 cells" in fedbench("validate", "tiny.toml", "--set", "seeds=[7]").out
    assert fedbench("validate", "smoke").code == 0  # a shipped one, by name


def test_a_planned_scale_is_valid_but_does_not_run(empty: Path) -> None:
    planned = '[scale.paper]\nplanned = "needs the published data"\nmethods = ["local", "unheard-of"]\ncontrols = []\n'
    (empty / "tiny.toml").write_text(SUITE + planned + '[scale.paper.data]\nname = "coco"\n')
    done = fedbench("validate", "tiny.toml", "--scale", "paper")
    assert done.code == 0, done.err
    assert "cannot run yet: needs the published data" in done.out
    assert "data 'coco'" in done.out and "method 'unheard-of'" in done.out
    message = refused(fedbench("run", "tiny.toml", "--scale", "paper"))
    assert "needs the published data" in message and "data 'coco'" in message and "tiny.toml:" in message


def test_dry_run_runs_nothing(workplace: Path) -> None:
    done = fedbench("run", "suites/tiny.toml", "--dry-run", "--device", "cpu", "--results", "elsewhere")
    assert done.code == 0 and not (workplace / "elsewhere").exists()
    assert done.out.count("missing ") == 10 and "10 cells, 3 users, 2 rounds" in done.out
    states = fedbench("run", "suites/tiny.toml", "--dry-run", "--device", "cpu").out
    assert states.count("done ") == 4 and states.count("missing ") == 6


def test_data_show_writes_a_picture(empty: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    done = fedbench("data", "show", "tiny.toml", "--out", "sheet.png")
    assert done.code == 0 and done.out.startswith("wrote sheet.png"), done.err
    with image.open("sheet.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 100
    assert fedbench("data", "show", "tiny.toml").code == 0
    assert (empty / "tiny-data.png").is_file()


# -- running


def test_a_run_ends_with_its_board(finished: Path) -> None:
    board = (finished / "run.txt").read_text()
    assert board.startswith("tiny · mini · your runs in runs\n")
    assert "rounds 2 · local steps 2 · T 2 · B 8 · M 2 · d 16 · public items 32" in board
    assert "fedmuscle:loss=muscle" in board and "2/2" in board
    assert "simclr" not in board  # only what was asked for, and local
    assert len(results_of(finished, "*")) == 4


def test_a_finished_cell_is_not_run_again(workplace: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in results_of(workplace, "*")}
    done = fedbench("run", "suites/tiny.toml", "--jobs", 1, "--device", "cpu", "--method", "fedmuscle:loss=muscle")
    assert done.code == 0 and "started" not in done.err
    assert done.out == (workplace / "run.txt").read_text()
    assert {path: path.stat().st_mtime_ns for path in results_of(workplace, "*")} == before


def test_overwrite_rules(workplace: Path) -> None:
    command = ("run", "suites/tiny.toml", "--jobs", 1, "--device", "cpu", "--method", "local", "--seeds")
    (path,) = [path for path in results_of(workplace, "local") if path.parent.name.startswith("seed0")]
    first = json.loads(path.read_bytes())
    assert fedbench(*command, 7, "--overwrite", "never").code == 0
    assert len(results_of(workplace, "local")) == 2
    done = fedbench(*command, 0, "--overwrite", "always")
    assert done.code == 0 and "local seed 0: started" in done.err
    again = json.loads(path.read_bytes())
    assert again["users"] == first["users"] and again["provenance"]["time"] >= first["provenance"]["time"]
    (kept,) = path.parent.glob("result.json.old-*")
    assert json.loads(kept.read_bytes()) == first


def test_set_changes_a_value_and_the_cells(workplace: Path) -> None:
    done = fedbench("run", "suites/tiny.toml", *QUICK, "--method", "local", "--set", "user.user1.train=50")
    assert done.code == 0 and "rounds 1 · " in done.out
    assert len(results_of(workplace, "local")) == 3  # another key, beside the earlier results
    assert "results of another protocol" in done.out


def test_one_file_and_one_command_put_a_loss_on_the_board(workplace: Path) -> None:
    (workplace / "my_loss.py").write_text(COSINE)
    done = fedbench("run", "suites/tiny.toml", "--plugin", "my_loss.py", "--loss", "cosine", *QUICK[:4])
    assert done.code == 0, done.err
    assert "local seed 0: started" not in done.err  # its reference was there already
    assert "fedmuscle:loss=cosine" in done.out
    (path,) = results_of(workplace, "fedmuscle-loss=cosine")
    stored = json.loads(path.read_bytes())
    assert stored["status"] == "done" and len(stored["versions"]["loss:cosine"]) == 16
    later = fedbench("leaderboard", "suites/tiny.toml").out  # which needs no plugin file
    assert "fedmuscle:loss=cosine" in later


def test_a_suite_names_its_plugins(empty: Path) -> None:
    (empty / "my_loss.py").write_text(COSINE)
    text = SUITE.replace('"simclr"', '"fedmuscle:loss=cosine"').replace(
        "\n[protocol]", 'plugins = ["my_loss.py"]\n[protocol]'
    )
    (empty / "tiny.toml").write_text(text)
    done = fedbench("run", "tiny.toml", *QUICK, "--method", "fedmuscle:loss=cosine")
    assert done.code == 0, done.err
    board = fedbench("leaderboard", "tiny.toml").out
    assert "fedmuscle:loss=cosine" in board and "versions not compared" not in board


def test_a_strangers_method_runs(empty: Path) -> None:
    (empty / "mean.py").write_text(METHOD)
    done = fedbench("run", "tiny.toml", "--plugin", "mean.py", "--method", "mean", *QUICK)
    assert done.code == 0, done.err
    (path,) = results_of(empty, "mean")
    stored = json.loads(path.read_bytes())
    assert stored["bytes"]["up"] > 3 * 8 * 16 * 4  # three users' float32 embeddings, encoded
    assert len(stored["versions"]["method:mean"]) == 16 and all(row["test"] > 0 for row in stored["users"])


def test_a_failed_cell_stops_no_other_and_stays_visible(empty: Path) -> None:
    (empty / "breaks.py").write_text(BREAKS)
    command = ("run", "tiny.toml", "--plugin", "breaks.py", "--method", "breaks", "--method", "simclr", *QUICK)
    done = fedbench(*command)
    assert done.code == 1
    assert "the pull broke" in errors(done) and "simclr seed 0: done" in done.err
    assert "failed" in done.out and "the pull broke" in done.out
    again = fedbench(*command)
    assert again.code == 1 and "started" not in again.err and "--overwrite failed" in again.err
    (empty / "breaks.py").write_text(METHOD.replace('"mean", Mean', '"breaks", Mean'))  # mended: another key
    assert fedbench(*command).code == 0


def test_overwrite_failed_runs_failed_cells_again(empty: Path) -> None:
    flaky = BREAKS.replace('raise RuntimeError("the pull broke")', 'open("absent.txt")')
    (empty / "breaks.py").write_text(flaky)
    command = ("run", "tiny.toml", "--plugin", "breaks.py", "--method", "breaks", *QUICK)
    assert fedbench(*command).code == 1
    (empty / "absent.txt").write_text("here now")
    assert fedbench(*command).code == 1
    done = fedbench(*command, "--overwrite", "failed")
    assert done.code == 0 and "local seed 0: started" not in done.err


def test_a_row_of_an_earlier_run_is_no_failure_of_this_one(workplace: Path) -> None:
    command = ("run", "suites/tiny.toml", "--jobs", 1, "--device", "cpu", "--method")
    assert fedbench(*command, "simclr", "--seeds", 0).code == 0
    done = fedbench(*command, "fedmuscle:loss=muscle")  # simclr has one of its two seeds
    assert "partial" in done.out and done.code == 0 and "--overwrite failed" not in done.err


def test_an_observer_that_raises_is_noted_and_costs_nothing(empty: Path) -> None:
    (empty / "watch.py").write_text(
        "import fedbench\n"
        "class Watch(fedbench.Observer):\n"
        "    def cell_started(self, cell): raise OSError('tracker is down')\n"
        "@fedbench.hookimpl\n"
        "def fedbench_observers(register): register('watch', Watch)\n"
    )
    done = fedbench("run", "tiny.toml", "--plugin", "watch.py", "--method", "local", *QUICK)
    assert done.code == 0 and "Watch" in done.err and "tracker is down" in errors(done)


def test_a_damaged_result_is_named_set_aside_and_run_again(workplace: Path) -> None:
    path = results_of(workplace, "fedmuscle-loss=muscle")[0]
    sound = json.loads(path.read_bytes())
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1', 1))
    board = fedbench("leaderboard", "suites/tiny.toml")
    assert board.code == 1 and "damaged" in board.out and path.parent.name in board.out
    done = fedbench("run", "suites/tiny.toml", "--jobs", 1, "--device", "cpu", "--method", "fedmuscle:loss=muscle")
    assert done.code == 0
    assert "damaged result" in done.err and "set aside as result.json.damaged-1" in done.err
    assert json.loads(path.read_bytes())["users"] == sound["users"]
    assert (path.parent / "result.json.damaged-1").is_file()
    assert fedbench("leaderboard", "suites/tiny.toml").code == 0


# -- boards


def test_the_board_says_whose_results_it_shows(workplace: Path) -> None:
    assert refused(fedbench("leaderboard", "suites/tiny.toml", "--reference")).startswith("runs and ")
    (workplace / "results").mkdir()
    done = fedbench("promote", "suites/tiny.toml")
    assert done.code == 0 and done.out.startswith("promoted 4 cells") and "4 of 10 cells" in done.out, done.err
    assert len(list((workplace / "results" / "tiny" / "mini").glob("*/seed*.json"))) == 4
    assert "promoted 0 cells, 4 were there already" in fedbench("promote", "suites/tiny.toml").out
    assert "your runs in runs" in fedbench("leaderboard", "suites/tiny.toml").out.splitlines()[0]
    assert "committed reference" in fedbench("leaderboard", "suites/tiny.toml", "--reference").out.splitlines()[0]
    shutil.rmtree("runs")
    reference = fedbench("leaderboard", "suites/tiny.toml")
    assert reference.code == 0 and "committed reference" in reference.out.splitlines()[0]
    assert "fedmuscle:loss=muscle" in reference.out and "rounds 2 · " in reference.out
    missing = refused(fedbench("leaderboard", "suites/tiny.toml", "--results", "nowhere"))
    assert missing.startswith("nowhere: there are no results of tiny")


def test_promoting_nothing_is_an_error(empty: Path) -> None:
    assert "no finished cell" in refused(fedbench("promote", "tiny.toml"))


def test_a_suite_outside_suites_keeps_its_reference_below_the_working_folder(empty: Path) -> None:
    (empty / "work").mkdir()
    (empty / "results").mkdir()
    with working_in(empty / "work"):
        assert "runs and results/tiny/mini" in refused(fedbench("leaderboard", "../tiny.toml"))


@pytest.fixture
def made_up(empty: Path) -> Path:
    """Results that nobody computed, below `runs`: two methods, two seeds."""
    for seed in (0, 1):
        for method, gain in (("local", 1.0), ("better", 1.1 + seed / 10)):
            users = [user_row(name, "mlc", "mAP", 20.0 * gain) for name in ("user1", "user2", "user3")]
            entry = result(method, users=users, seed=seed, suite="tiny")
            path = folder_of(Path("runs"), entry)
            path.mkdir(parents=True)
            (path / "result.json").write_bytes(dump(entry))
    return empty


def test_formats(made_up: Path) -> None:
    shown: Callable[[str], Done] = lambda form: fedbench("leaderboard", "runs/tiny/mini", "--format", form)  # noqa: E731
    table = shown("table")
    assert table.code == 0 and table.out.startswith("tiny · mini · runs/tiny/mini\n")
    rows = json.loads(shown("json").out)
    assert [row["method"] for row in rows] == ["better", "local"]
    assert rows[0]["delta_mean"] == pytest.approx(15.0) and rows[0]["seeds_done"] == 2
    lines = list(csv.DictReader(io.StringIO(shown("csv").out)))
    assert [line["method"] for line in lines] == ["better", "local"] and float(lines[0]["delta_mean"]) > 14
    assert shown("markdown").out.startswith("## tiny") and "| better | +15.00 |" in shown("markdown").out
    assert r"\begin{tabular}" in shown("latex").out and "better" in shown("latex").out
    assert all(not shown(form).err for form in ("table", "markdown", "latex"))


def test_what_a_plugin_prints_goes_to_standard_error(empty: Path) -> None:
    loud = COSINE.replace("import torch, fedbench", "import torch, fedbench; print('loud import')").replace(
        'register("cosine"', 'print("loud hook"); register("cosine"'
    )
    (empty / "loud.py").write_text(loud)
    done = fedbench("list", "loss", "--plugin", "loud.py")
    assert done.code == 0 and "cosine" in done.out and "loud" not in done.out.replace("loud.py", "")
    assert "loud import" in done.err and "loud hook" in done.err


@pytest.mark.parametrize(
    ("redirection", "code"), [(">&-", 0), ("> /dev/full", 2), (">&- 2>&-", 0), ("| head -c 1 > /dev/null", 0)]
)
def test_an_output_that_takes_nothing_costs_no_traceback(made_up: Path, redirection: str, code: int) -> None:
    """Through a shell, since it is the process's own standard output."""
    for command in ("leaderboard runs/tiny/mini", "leaderboard runs/tiny/mini --format json", "list", "--help"):
        text = f"{sys.executable} -m fedbench {command} {redirection}"
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
        assert "Traceback" not in done.stderr and done.returncode == code, (command, done)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_without_greek_gets_its_board(made_up: Path, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "fedbench", "leaderboard", "runs/tiny/mini"]
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 0 and done.stderr == b"" and b"better" in done.stdout


def test_clean_names_what_it_cannot_remove(workplace: Path) -> None:
    cell = results_of(workplace, "local")[0].parent
    (cell / "result.json.old-1").mkdir()
    (cell / "result.json.old-2").write_text("old")
    done = fedbench("clean", "--yes")
    assert done.code == 2 and "result.json.old-1 stays: Is a directory" in errors(done)
    assert not (cell / "result.json.old-2").exists()


def test_machine_formats_print_nothing_else_on_standard_output(made_up: Path) -> None:
    done = fedbench("leaderboard", "tiny.toml", "--format", "json")
    rows = json.loads(done.out)
    assert {row["method"] for row in rows} >= {"local", "better", "fedmuscle", "simclr"}
    assert "earlier protocol" in done.err and done.code == 0
    next(Path("runs").rglob("result.json")).write_text("{")
    done = fedbench("leaderboard", "tiny.toml", "--format", "json")
    assert done.code == 1 and json.loads(done.out) and "damaged: runs/tiny/mini/" in done.err
    assert "\x1b" not in fedbench("leaderboard", "tiny.toml").out


def test_the_facts_of_the_suite_are_not_those_of_older_results(made_up: Path) -> None:
    assert "rounds 2 · " not in fedbench("leaderboard", "tiny.toml").out


def test_published_numbers_stand_below_the_board(made_up: Path) -> None:
    published = '[reference]\nsource = "Table 1 of the paper"\ncolumns = ["user1", "mean"]\n'
    (made_up / "tiny.toml").write_text(SUITE + published + '[reference.rows]\n"Local Training" = [37.9, 41.5]\n')
    board = fedbench("leaderboard", "tiny.toml").out
    assert "published (other data, for orientation)" in board and "Table 1 of the paper" in board
    assert "Local Training" in board and "37.9" in board and "41.5" in board


def test_curves(workplace: Path) -> None:
    pytest.importorskip("matplotlib")
    done = fedbench("leaderboard", "suites/tiny.toml", "--curves", "curves.png")
    assert done.code == 0 and (workplace / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_terminal_gets_its_width_and_colours(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedbench import boards

    seen: list[tuple[int, bool]] = []

    def render(*arguments: object, width: int, color: bool, **others: object) -> str:
        seen.append((width, color))
        return ""

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(boards, "render", render)
    monkeypatch.setattr(sys, "stdout", Screen())
    monkeypatch.setenv("COLUMNS", "133")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show = lambda: boards.show_leaderboard(  # noqa: E731
        "runs", "mini", results=None, reference=False, form="table", curves=None
    )
    show()
    monkeypatch.setenv("NO_COLOR", "1")
    show()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    show()
    assert seen == [(133, True), (133, False), (100, False)]


# -- cleaning


def test_clean_asks_first_and_keeps_results(workplace: Path) -> None:
    results = results_of(workplace, "*")
    leftovers = [
        results[0].parent / "checkpoint.safetensors",
        results[1].parent / "result.json.damaged-1",
        results[2].parent / ".result.json.abc123",
    ]
    for path in leftovers:
        path.write_bytes(b"x" * 1000)
    asked = fedbench("clean")
    assert asked.code == 0 and "would remove" in asked.out and "3 files" in asked.out
    assert all(path.exists() for path in leftovers)
    assert "removed: 3 files" in fedbench("clean", "--yes").out
    assert not any(path.exists() for path in leftovers) and all(path.exists() for path in results)
    assert "0 files" in fedbench("clean", "--results", "nowhere").out


def test_clean_leaves_running_cells_alone(workplace: Path) -> None:
    cell = workplace / "runs" / "s" / "mini" / "local" / "seed0-abc"
    cell.mkdir(parents=True)
    (cell / "checkpoint.safetensors").write_bytes(b"x")
    with open(cell / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert "1 cells are running" in fedbench("clean", "--yes").out
        assert (cell / "checkpoint.safetensors").exists()
    fedbench("clean", "--yes")
    assert not (cell / "checkpoint.safetensors").exists()


def test_clean_can_empty_the_cache(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = empty / "cache"
    cache.mkdir()
    for name in ("a.npy", "a.json", "a.lock", "notes.txt"):
        (cache / name).write_bytes(b"x")
    monkeypatch.setenv("FEDBENCH_CACHE", str(cache))
    assert "0 files" in fedbench("clean", "--yes").out
    assert "3 files" in fedbench("clean", "--all", "--yes").out
    assert [path.name for path in cache.iterdir()] == ["notes.txt"]
