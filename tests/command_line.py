"""The command line as a function, for the tests that use it."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Done:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


def fedbench(*arguments: object) -> Done:
    """Run `fedbench ARGUMENTS` in this process, exactly as its entry point does."""
    from fedbench.cli import main

    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["fedbench", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as exit_:
                assert exit_.code is None or isinstance(exit_.code, int)
                code = exit_.code or 0
    finally:
        sys.argv = before
    return Done(code, out.getvalue(), err.getvalue())


def refused(done: Done) -> str:
    """The one line of a command that was refused: exit code 2, nothing else said, no traceback."""
    assert done.code == 2, done
    lines = done.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("Error: "), done.err
    assert "Traceback" not in done.err + done.out
    return lines[0].removeprefix("Error: ")


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Be in a folder, then back."""
    with contextlib.chdir(folder):
        yield
