"""What users install: a wheel that holds the whole tree under its own names, and plugin packages beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from conftest import tiny_suite

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "fedbench": "fedbench",
    "plugins": "fedbench_plugins",
    "baselines": "fedbench_baselines",
    "suites": "fedbench_suites",
}
SAMPLE = Path(__file__).parent / "packaging"
MAIN = "from fedbench.cli import main; main()"


def python(*arguments: object, path: Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that sees `path` first and the working folder not at all."""
    environment = {**os.environ, "PYTHONPATH": str(path), "COLUMNS": "100", **more}
    command = [sys.executable, "-P", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def shipped(folder: str) -> list[Path]:
    """The files of a folder of the tree that a user needs."""
    return [
        path
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that no build folder of another day gets in and none is left."""
    pytest.importorskip("setuptools")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    (found,) = out.glob("fedbench_suite-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", target, wheel)
    return target


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample plugin package and a broken variant of it, installed side by side."""
    target = tmp_path_factory.mktemp("samples")
    sources = []
    for name in ("sample", "broken"):
        source = tmp_path_factory.mktemp(name) / name
        shutil.copytree(SAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
        sources.append(source)
    broken = sources[1]
    (broken / "fedbench_sample").rename(broken / "fedbench_broken")
    text = (broken / "pyproject.toml").read_text().replace("fedbench-sample", "fedbench-broken")
    (broken / "pyproject.toml").write_text(text.replace("fedbench_sample", "fedbench_broken").replace("0.3.1", "0.0.9"))
    module = broken / "fedbench_broken" / "__init__.py"
    module.write_text(
        module.read_text().replace("from fedbench import", "import library_of_nobody\nfrom fedbench import")
    )
    pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", target, *sources)
    return target


def only_sample(samples: Path, tmp_path: Path) -> Path:
    """A folder with the sample package alone."""
    target = tmp_path / "site"
    shutil.copytree(samples, target, ignore=shutil.ignore_patterns("fedbench_broken*"))
    return target


# -- the wheel


def test_the_wheel_holds_the_whole_tree(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for path in shipped(folder)
    }
    assert packed == wanted


def test_every_package_says_that_it_is_typed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for package in ("fedbench", "fedbench_plugins", "fedbench_baselines"):
        assert f"{package}/py.typed" in names


def test_the_wheel_works_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = python("-c", "import fedbench; print(fedbench.__file__)", path=installed, cwd=tmp_path)
    assert where.stdout.startswith(str(installed))
    checked = python("-c", MAIN, "validate", "smoke", path=installed, cwd=tmp_path)
    assert checked.returncode == 0 and checked.stdout.startswith("smoke at scale mini is valid"), checked.stderr
    listed = python("-c", MAIN, "list", path=installed, cwd=tmp_path)
    here = subprocess.run([sys.executable, "-c", MAIN, "list"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout == here.stdout and not listed.stderr
    assert (installed / "bin" / "fedbench").is_file()


def test_the_folders_names_reach_no_site(installed: Path, tmp_path: Path) -> None:
    for name in ("plugins", "baselines", "suites"):
        done = python("-c", f"import {name}", path=installed, cwd=tmp_path)
        assert f"No module named '{name}'" in done.stderr
        assert name not in sys.modules, f"a test imported `{name}`, a second copy of fedbench_{name}"


# -- plugin packages


def test_an_installed_package_shows_up(samples: Path, tmp_path: Path) -> None:
    site = only_sample(samples, tmp_path)
    shown = python("-c", MAIN, "plugins", path=site, cwd=tmp_path)
    assert shown.returncode == 0 and not shown.stderr
    assert "fedbench-sample 0.3.1  [package]\n  loss: squared\n  method: centroid\n  observer: diary\n" in shown.stdout
    losses = python("-c", MAIN, "list", "loss", path=site, cwd=tmp_path).stdout
    assert "squared" in losses and "Squared distance to every other user's row.  [fedbench-sample 0.3.1]" in losses
    light = "import sys; from fedbench.discovery import discover; discover(); print('torch' in sys.modules)"
    assert python("-c", light, path=site, cwd=tmp_path).stdout.strip() == "False"


def test_a_packages_loss_method_and_observer_run(samples: Path, tmp_path: Path) -> None:
    site = only_sample(samples, tmp_path)
    (tmp_path / "tiny.toml").write_text(tiny_suite().replace("seeds = [0, 1]", "seeds = [0]"))
    done = python(
        *("-c", MAIN, "run", "tiny.toml", "--jobs", 1, "--device", "cpu", "--strict"),
        *("--method", "centroid", "--loss", "squared:weight=0.5"),
        path=site,
        cwd=tmp_path,
        FEDBENCH_SAMPLE_DIARY=str(tmp_path / "diary.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    assert "centroid" in done.stdout and "loss=squared" in done.stdout
    diary = [json.loads(line) for line in (tmp_path / "diary.jsonl").read_text().splitlines()]
    events = ["started", "round 0", "round 1", "round 2", "done"]
    assert [event for event, method, _ in diary if method == "centroid"] == events
    (path,) = (tmp_path / "runs").glob("tiny/mini/centroid/seed0-*/result.json")
    assert json.loads(path.read_bytes())["versions"]["method:centroid"].startswith("0.3.1+")


def test_a_broken_package_breaks_nothing_else(samples: Path, tmp_path: Path) -> None:
    listed = python("-c", MAIN, "list", "loss", path=samples, cwd=tmp_path)
    assert listed.returncode == 0 and "squared" in listed.stdout and "muscle" in listed.stdout
    assert listed.stderr.startswith("warning: fedbench-broken 0.0.9 failed to load: ModuleNotFoundError")
    shown = python("-c", MAIN, "plugins", path=samples, cwd=tmp_path)
    assert shown.returncode == 1
    assert "fedbench-sample 0.3.1  [package]" in shown.stdout
    assert "fedbench-broken 0.0.9: failed to load" in shown.stdout and "library_of_nobody" in shown.stdout
    assert "Traceback" not in shown.stdout
    traced = python("-c", MAIN, "plugins", "--traceback", path=samples, cwd=tmp_path)
    assert traced.returncode == 1
    assert "Traceback" in traced.stdout and "import library_of_nobody" in traced.stdout


def test_a_broken_package_is_fatal_when_strict_and_named_when_missed(samples: Path, tmp_path: Path) -> None:
    for command in (["plugins"], ["list"], ["validate", "smoke"]):
        strict = python("-c", MAIN, *command, "--strict", path=samples, cwd=tmp_path)
        assert strict.returncode == 2
        assert strict.stderr.startswith("Error: fedbench-broken 0.0.9: ModuleNotFoundError"), strict.stderr
    missed = python("-c", MAIN, "run", "smoke", "--loss", "cubed", "--dry-run", path=samples, cwd=tmp_path)
    assert missed.returncode == 2 and "unknown loss 'cubed'" in missed.stderr
    assert "failed to load: fedbench-broken 0.0.9 (ModuleNotFoundError" in missed.stderr
