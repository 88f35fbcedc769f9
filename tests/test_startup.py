"""What runs nothing imports nothing heavy: help, lists and boards are there at once, torch or no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from made_up import folder_of, result

from fedbench.results import dump

HEAVY = ("torch", "torchvision", "transformers", "timm", "numpy", "pandas", "scipy", "matplotlib", "PIL", "safetensors")
FOUND = f"print('\\nheavy:', [name for name in {HEAVY!r} if name in sys.modules])"
RUN = f"""
import sys
from fedbench.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
{FOUND}
"""


def heavy_after(code: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rsplit("\nheavy: ", 1)[1].strip()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["list"],
        ["list", "loss"],
        ["plugins"],
        ["validate", "--help"],
        ["check", "--help"],
        ["clean"],
    ],
    ids=" ".join,
)
def test_commands_that_compute_nothing_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    assert heavy_after(RUN, *arguments, cwd=tmp_path) == "[]"


@pytest.mark.parametrize("form", ["table", "json", "latex"])
@pytest.mark.parametrize("what", ["smoke", "runs"])
def test_a_board_needs_nothing_heavy(what: str, form: str, tmp_path: Path) -> None:
    for seed in (0, 1):
        for method, gain in (("local", 1.0), ("simclr", 1.1 + seed / 10)):
            entry = result(method, [40.0 * gain, 20.0], seed=seed, suite="smoke")
            path = folder_of(tmp_path / "runs", entry)
            path.mkdir(parents=True)
            (path / "result.json").write_bytes(dump(entry))
    assert heavy_after(RUN, "leaderboard", what, "--format", form, cwd=tmp_path) == "[]"


@pytest.mark.parametrize("module", ["fedbench", "fedbench.cli", "fedbench_plugins", "fedbench_baselines"])
def test_imports_are_light(module: str, tmp_path: Path) -> None:
    assert heavy_after(f"import sys, {module}\n{FOUND}", cwd=tmp_path) == "[]"


def test_torch_comes_with_the_first_loss(tmp_path: Path) -> None:
    code = f"import sys, fedbench\nassert 'torch' not in sys.modules\nfedbench.AlignmentLoss\n{FOUND}"
    assert "'torch'" in heavy_after(code, cwd=tmp_path)
