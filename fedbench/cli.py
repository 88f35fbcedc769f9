"""The command line. Each command gathers its arguments and calls one piece of the core; torch is loaded only to run."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fedbench.errors import UserError, one_line
from fedbench.interfaces import KINDS
from fedbench.version import __version__

_SUITE = click.argument("suite")
_SCALE = click.option("--scale", default="mini", show_default=True, help="Scale of the suite: mini, paper, …")
_RESULTS = click.option("--results", type=click.Path(path_type=Path), help="Folder of run results.  [default: runs]")
_SET = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the suite.")
_PLUGIN = click.option(
    "--plugin", "plugins", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="Load a plugin file."
)
_STRICT = click.option("--strict", is_flag=True, help="Make every broken plugin an error.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="fedbench")
def cli() -> None:
    """Benchmark federated multi-task learning: every user has its own task, model and data."""


@cli.command()
@_SUITE
@_SCALE
@click.option("--method", "methods", multiple=True, metavar="NAME[:k=v,…]", help="Run only this and local. Repeatable.")
@click.option("--loss", "losses", multiple=True, metavar="NAME", help="Short for --method fedmuscle:loss=NAME.")
@click.option("--seeds", metavar="0,1,2", help="Run these seeds instead of the suite's.")
@_PLUGIN
@click.option("--jobs", type=click.IntRange(1), help="Cells at a time.  [default: the cores it may use]")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:i.")
@_RESULTS
@click.option(
    "--overwrite",
    default="missing",
    show_default=True,
    type=click.Choice(["missing", "failed", "always", "never"]),
    help="Which cells to run: those without a result, also failed ones, all, none.",
)
@_SET
@click.option("--dry-run", is_flag=True, help="Show the cells and their state, run nothing.")
@_STRICT
def run(suite: str, scale: str, **given: Any) -> None:
    """Run a suite's missing cells and show its leaderboard."""
    from fedbench.commands import run_suite

    sys.exit(run_suite(suite, scale, **given))


@cli.command()
@_SUITE
@_SCALE
@click.option("--method", required=True, metavar="NAME[:k=v,…]", help="What to tune; options given stay as given.")
@click.option("--trials", default=8, show_default=True, type=click.IntRange(1), help="Trials, the defaults among them.")
@click.option("--seed", default=100, show_default=True, type=click.IntRange(0), help="A seed that no board uses.")
@_PLUGIN
@click.option("--jobs", type=click.IntRange(1), help="Cells at a time.  [default: the cores it may use]")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:i.")
@click.option("--results", type=click.Path(path_type=Path), help="Folder of the trials.  [default: runs/tuning]")
@_SET
def tune(suite: str, scale: str, **given: Any) -> None:
    """Search a method's declared ranges at random, scored on validation of one seed that the board doesn't use."""
    from fedbench.tuning import tune as run

    sys.exit(run(suite, scale, **given))


@cli.command()
@click.argument("suite_or_folder", metavar="SUITE_OR_DIR")
@_SCALE
@_RESULTS
@click.option("--reference", is_flag=True, help="Show the committed reference board even where you have runs.")
@click.option(
    "--format",
    "form",
    default="table",
    show_default=True,
    type=click.Choice(["table", "json", "csv", "markdown", "latex"]),
)
@click.option(
    "--curves", type=click.Path(path_type=Path), metavar="PNG", help="Also plot validation per round and user."
)
def leaderboard(suite_or_folder: str, scale: str, **given: Any) -> None:
    """Show a board from result files: your runs if there are any, else the committed reference."""
    from fedbench.boards import show_leaderboard

    sys.exit(show_leaderboard(suite_or_folder, scale, **given))


@cli.command()
@_SUITE
@_SCALE
@_RESULTS
@click.option("--to", "target", type=click.Path(path_type=Path), help="Folder of reference boards.  [default: results]")
@click.option("--supersede", is_flag=True, help="Move results of another protocol aside instead of refusing.")
def promote(suite: str, scale: str, **given: Any) -> None:
    """Copy finished cells into the committed reference board, results/SUITE/SCALE/."""
    from fedbench.boards import promote_suite

    sys.exit(promote_suite(suite, scale, **given))


@cli.command()
@_SUITE
@_SCALE
@_SET
@_PLUGIN
@_STRICT
def validate(suite: str, scale: str, overrides: Sequence[str], plugins: Sequence[Path], strict: bool) -> None:
    """Check a suite file: keys, types, ranges, names and options."""
    from fedbench.commands import validate_suite

    validate_suite(suite, scale, overrides, plugins, strict)


@cli.command("check")
@click.argument("target", metavar="NAME|FILE")
@_PLUGIN
@click.option("--traceback", is_flag=True, help="Show the full trace of every failure.")
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="End a check that takes longer: it failed.",
)
def check_(target: str, **given: Any) -> None:
    """Check a plugin by name ([KIND:]NAME[:k=v,…]), or all that a file registers.

    The exit code is 0 where all is well, 1 where a check failed and 2 where the plugin cannot be loaded.
    """
    from fedbench.check_command import check

    sys.exit(check(target, **given))


@cli.command("list")
@click.argument("kind", required=False, type=click.Choice(KINDS))
@_PLUGIN
@_STRICT
def list_(kind: str | None, plugins: Sequence[Path], strict: bool) -> None:
    """List what can be used, of one KIND or all: user, task, model, loss, data, metric, method, engine."""
    from fedbench.listing import show_list

    show_list(kind, plugins, strict)


@cli.command("plugins")
@_PLUGIN
@click.option("--traceback", is_flag=True, help="Show the traceback of every plugin that failed.")
@_STRICT
def plugins_(plugins: Sequence[Path], traceback: bool, strict: bool) -> None:
    """List the plugins that were found, what they register, and those that failed to load."""
    from fedbench.listing import show_plugins

    sys.exit(show_plugins(plugins, traceback, strict))


@cli.group()
def data() -> None:
    """Look at a suite's data."""


@data.command("show")
@_SUITE
@_SCALE
@_SET
@_PLUGIN
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Whose private data to show.")
@click.option("--out", type=click.Path(path_type=Path), help="The PNG to write.  [default: SUITE-data.png]")
def data_show(suite: str, scale: str, **given: Any) -> None:
    """Write a contact sheet (PNG) of every user's samples and the public set."""
    from fedbench.commands import show_data

    show_data(suite, scale, **given)


@cli.command()
@_RESULTS
@click.option("--all", "everything", is_flag=True, help="Also the cache of renders and frozen features.")
@click.option("--yes", is_flag=True, help="Do it; without this, only say what would go.")
def clean(**given: Any) -> None:
    """Remove what unfinished, damaged or replaced cells left behind. Finished results stay."""
    from fedbench.commands import clean_up

    clean_up(**given)


def main() -> None:
    """Entry point: a mistake of the user is one line and exit code 2, Ctrl-C is 130."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - closed by whoever started this
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Δ gets a question mark, not a traceback
    try:
        code = cli(prog_name="fedbench", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.ClickException as error:
        help_at = f" (see {error.ctx.command_path} --help)" if isinstance(error, click.UsageError) and error.ctx else ""
        _complain(error.format_message() + help_at)
        code = error.exit_code
    except UserError as error:
        _complain(str(error))
        code = 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped. Every finished round is kept: the same command goes on from there.", err=True)
        code = 130
    except BrokenPipeError:
        # The reader (head, less) has gone, and nothing is left to say to it.
        sys.stderr.close()
        code = 1
    except OSError as error:  # a path that no file can have, a folder that may not be read, a disk that is full
        _complain(f"{error.filename or 'output'}: {error.strerror or error}")
        code = 2
        _forget_output()
    except MemoryError:
        _complain("there is not enough memory for this")
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):
        click.echo(f"Error: {one_line(message, 1000)}", err=True)


def _forget_output() -> None:
    """Let the interpreter not try again at its end to write what cannot be written."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
