"""`fedbench check`: names and files, exit codes, and plugins that hang, crash or leave."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedbench.check_command import render, summary
from fedbench.conformance import Finding
from fedbench.conformance.apart import Report
from fedbench.conformance.subjects import subjects
from fedbench.errors import UserError

sys.path.append(str(Path(__file__).parent))
from broken_plugins import loss, method
from command_line import fedbench, refused, working_in

SOUND = loss()

TWO = (
    loss("value = value.detach() + others.sum()")
    + """
class Sound(fedbench.AlignmentLoss):
    '''Keeps the rules.'''
    def forward(self, anchor, others):
        return (1 - (anchor * others).sum(-1)).mean()

class Watcher(fedbench.Observer):
    '''Watches.'''

@fedbench.hookimpl(specname="fedbench_losses")
def more(register):
    register("sound", Sound)
    register("lost", "nowhere.at_all:Loss")

@fedbench.hookimpl
def fedbench_observers(register):
    register("watcher", Watcher)
"""
)


def write(folder: Path, text: str, name: str = "plugin.py") -> Path:
    path = folder / name
    path.write_text(f"# {folder.name}\n{text}")
    return path


def line_of(path: Path, text: str) -> int:
    """The number of the first line that holds a text."""
    return next(number for number, line in enumerate(path.read_text().split("\n"), 1) if text in line)


def row(out: str, check: str) -> tuple[str, str, str]:
    """Verdict, where and why, and what to do of a check in the first table that has it."""
    lines = out.split("\n")
    header = next(line for line in lines if line.startswith("check "))
    starts = [header.index(name) for name in ("verdict", "where and why", "what to do")]
    first = next(number for number, line in enumerate(lines) if line.startswith(f"{check}  "))
    last = next(number for number in range(first + 1, len(lines)) if lines[number][:1].strip())
    cells = [
        " ".join(line[start:end].strip() for line in lines[first:last]).strip()
        for start, end in zip(starts, [*starts[1:], None], strict=True)
    ]
    return cells[0], cells[1], cells[2]


# -- what is meant


def test_a_name_may_come_with_kind_and_options() -> None:
    for text, label, options in (
        ("muscle", "loss:muscle", {}),
        ("loss:muscle", "loss:muscle", {}),
        ("gramian:tau=0.5,learn_tau=true", "loss:gramian:learn_tau=true,tau=0.5", {"learn_tau": True, "tau": 0.5}),
        ("loss:gramian:tau=0.5", "loss:gramian:tau=0.5", {"tau": 0.5}),
        ("fedmuscle:loss=gramian", "method:fedmuscle:loss=gramian", {"loss": "gramian"}),
        ("fccl+", "method:fccl+", {}),
        ("method:local", "method:local", {}),
    ):
        (subject,) = subjects(text)
        assert (subject.label, dict(subject.options)) == (label, options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("muscel", "unknown plugin 'muscel' (did you mean 'muscle'?)"),
        ("loss:muscel", "unknown loss 'muscel' (did you mean 'muscle'?)"),
        ("local", "'local' names plugins of several kinds (write method:local or engine:local)"),
        ("muscle:tua=1.0", "unknown option of loss 'muscle' 'tua' (did you mean 'tau'?)"),
        ("muscle:tau", "'muscle:tau' is malformed"),
        ("fedmuscle:los=gramian", "unknown option of method 'fedmuscle' 'los' (did you mean 'loss'?)"),
        ("fedmuscle:loss=gramiam", "unknown loss 'gramiam' (did you mean 'gramian'?)"),
        ("observer:nobody", "unknown observer 'nobody' (known: none)"),
        ("nowhere.py", "there is no such plugin file"),
    ],
)
def test_a_name_that_means_nothing_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with working_in(tmp_path), pytest.raises(UserError) as error:
        subjects(text)
    assert message in str(error.value)


# -- the command


def test_a_sound_plugin_passes(tmp_path: Path) -> None:
    path = write(tmp_path, SOUND)
    with working_in(tmp_path):
        done = fedbench("check", "plugin.py")
    assert (done.code, done.err) == (0, "")
    assert f"loss:broken  [plugin.py:{line_of(path, 'class Broken')}]" in done.out
    assert "10 passed, 1 skipped" in done.out and "failed" not in done.out
    assert "\x1b" not in done.out and max(map(len, done.out.split("\n"))) <= 100


def test_a_file_is_checked_whole_and_says_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path, TWO)
    with working_in(tmp_path):
        done = fedbench("check", "plugin.py")
    assert done.code == 2
    broken, rest = done.out.split("loss:lost", 1)
    assert "1 failed, 10 skipped" in broken
    verdict, why, advice = row(broken, "scalar")
    assert verdict == "failed" and "do not detach it" in advice
    assert why == f"plugin.py:{line_of(path, 'def forward')}: B = 8, M = 1: its value has no gradient"
    assert row(broken, "cost") == ("skipped", "'scalar' did not pass", "")
    assert "cannot be loaded: " in rest and "ModuleNotFoundError" in rest
    assert "loss:sound" in rest and "10 passed, 1 skipped" in rest
    assert "observer:watcher" in rest and "1 passed" in rest
    assert "Traceback" not in done.out + done.err


def test_an_exception_is_shown_in_one_line_and_in_full_on_request(tmp_path: Path) -> None:
    path = write(tmp_path, loss("raise RuntimeError('no such luck')"))
    with working_in(tmp_path):
        short, long = fedbench("check", "plugin.py"), fedbench("check", "plugin.py", "--traceback")
    assert short.code == long.code == 1
    assert row(short.out, "scalar")[1] == f"plugin.py:{line_of(path, 'no such luck')}: RuntimeError: no such luck"
    assert "Traceback" not in short.out and "--traceback" in short.out
    assert "Traceback (most recent call last)" in long.out and "in forward" in long.out


def test_a_plugin_with_nothing_to_check_fails(tmp_path: Path) -> None:
    write(tmp_path, method(method="def touches(self, users):\n    return []"))
    with working_in(tmp_path):
        done = fedbench("check", "plugin.py")
    assert done.code == 1
    assert "11 skipped: a plugin of which nothing was checked fails" in done.out
    assert row(done.out, "two rounds")[1].startswith("it touches nobody")


@pytest.mark.parametrize(
    ("forward", "cause"),
    [
        ("while True: pass", "it did not end within 4 s"),
        ("import ctypes; ctypes.PyDLL(None).pause()", "it did not end within 4 s"),  # holds Python's lock
        ("import ctypes; ctypes.string_at(0)", "the process died: SIGSEGV"),
        ("import os; os._exit(0)", "the process died: exit code 0"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
    ids=["loop", "lock", "segfault", "exit", "SystemExit"],
)
def test_a_plugin_that_hangs_or_dies_fails_its_check_and_the_rest_goes_on(
    forward: str, cause: str, tmp_path: Path
) -> None:
    path = write(tmp_path, loss(f"if len(anchor) == 64:\n    {forward}"))
    with working_in(tmp_path):
        done = fedbench("check", "plugin.py", "--timeout", 4)
    assert done.code == 1, done
    assert "9 passed, 1 failed, 1 skipped" in done.out
    # os._exit leaves no trace of where.
    line = line_of(path, "class Broken" if "os._exit" in forward else forward)
    verdict, why, advice = row(done.out, "sizes")
    assert (verdict, why) == ("failed", f"plugin.py:{line}: {cause}")
    assert "did not end" not in why or advice == "make it end, or give it more time with --timeout"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise RuntimeError('not today')", "not today"),
        ("import time; time.sleep(60)", "it cannot be loaded: it did not end within 1 s"),
        ("import os; os._exit(3)", "it cannot be loaded: the process died: exit code 3"),
        ("x =", "SyntaxError"),
        ("", "this plugin registers nothing"),
    ],
    ids=["raises", "hangs", "exits", "syntax", "empty"],
)
def test_a_file_that_cannot_be_loaded_is_refused(text: str, cause: str, tmp_path: Path) -> None:
    write(tmp_path, text)
    with working_in(tmp_path):
        message = refused(fedbench("check", "plugin.py", "--timeout", 1))
    assert cause in message and "plugin.py" in message


def test_a_name_that_is_not_there_is_refused() -> None:
    assert refused(fedbench("check", "muscel")) == "unknown plugin 'muscel' (did you mean 'muscle'?)"
    assert "Invalid value for '--timeout'" in refused(fedbench("check", "muscle", "--timeout", 0))


# -- the table


def test_the_table_is_coloured_on_a_terminal_and_folds() -> None:
    report = Report("loss:own", "my.py:3")
    report.findings = [
        Finding("loss:own", "scalar", "passed", cause="a note"),
        Finding("loss:own", "sizes", "failed", "my.py:7", "x" * 90, "do \x1b[31mthis"),
        Finding("loss:own", "cost", "skipped", cause="'scalar' did not pass"),
    ]
    plain, colored = render(report, width=60), render(report, width=60, color=True)
    assert "\x1b" not in plain and "\x1b[1;31mfailed" in colored and "\x1b[32mpassed" in colored
    assert max(map(len, plain.split("\n"))) <= 60
    assert plain.replace("\n", "").replace(" ", "").count("x") >= 90
    assert summary(report) == "1 passed, 1 failed, 1 skipped" and report.code == 1
    assert summary(Report("loss:own")) == "nothing was checked: a plugin of which nothing was checked fails"
