"""`fedbench tune`: the same trials whoever asks, scored on validation of a seed that no board uses, ready to record."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from command_line import fedbench, refused, working_in
from conftest import tiny_suite

from fedbench import delta
from fedbench.discovery import discover
from fedbench.ranges import Choice, LogRange
from fedbench.seeds import numpy_generator
from fedbench.specs import parse_method
from fedbench.suite import load
from fedbench.tuning import draw_specs, key_of

# Three users of one task: with a hundred classes, untrained nets may score 0 and leave Δ% undefined.
SUITE = tiny_suite().replace('task = "ic100"', 'task = "mlc"').replace('task = "ic10"', 'task = "mlc"')
QUICK = ("--jobs", 1, "--set", "rounds=1", "--device", "cpu")


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Path]:
    """A working folder with the tiny suite."""
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "tiny.toml").write_text(SUITE)
    with working_in(tmp_path):
        yield tmp_path


def test_trials_are_ranked_by_validation_and_told_how_to_be_recorded(workplace: Path) -> None:
    done = fedbench("tune", "suites/tiny.toml", "--method", "simclr", "--trials", 3, *QUICK)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "tiny · mini · simclr: 3 trials on validation of seed 100"
    files = list((workplace / "runs" / "tuning").rglob("result.json"))
    results = [json.loads(path.read_text()) for path in files]
    assert {result["seed"] for result in results} == {100} and len(results) == 4  # three trials and local
    local = next(result for result in results if result["method"] == "local")
    gains = {}
    for result in results:
        if result is not local:
            gains[json.dumps(result["options"])] = delta.of_seed(
                result["users"], local["users"], score="validation"
            ).mean
    shown = [float(line.split("Δ ")[1].split(" %")[0]) for line in lines[1:4]]
    assert shown == sorted(shown, reverse=True)
    assert sorted(shown) == pytest.approx(sorted(gains.values()), abs=0.005)
    recorded = tomllib.loads("\n".join(lines[lines.index("To record it in the suite:") + 1 :]))
    assert "--method simclr --trials 3 --seed 100" in recorded["tuning"]["simclr"]
    again = fedbench("tune", "suites/tiny.toml", "--method", "simclr", "--trials", 3, *QUICK)
    assert again.out == done.out, "nothing is drawn or trained twice"


def test_the_first_trial_is_the_suites_own_and_draws_depend_on_names_alone(workplace: Path) -> None:
    suite, registry = load("suites/tiny.toml"), discover()
    base = parse_method("fedmuscle:loss=muscle", where="test")
    specs = draw_specs(suite, registry, base, 3)
    assert specs[0] == base
    draws = numpy_generator("tune", "tiny", "fedmuscle:loss=muscle", 2)
    assert specs[2].options == {"loss": "muscle", "rate": LogRange(0.25, 4.0).draw(draws)}
    assert draw_specs(suite, registry, base, 5)[2] == specs[2], "more trials leave the earlier ones as they are"


def test_options_that_are_given_are_not_drawn(workplace: Path) -> None:
    suite, registry = load("suites/tiny.toml"), discover()
    specs = draw_specs(suite, registry, parse_method("cofed:margin=0.2", where="test"), 4)
    assert {spec.options["margin"] for spec in specs.values()} == {0.2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "simclr", "--seed", 1), "seed 1 is one of the board's"),
        (("--method", "local"), "declares nothing to tune"),
        (("--method", "simcrl"), "simclr"),
    ],
)
def test_what_cannot_be_tuned_is_refused(workplace: Path, arguments: tuple[object, ...], message: str) -> None:
    done = fedbench("tune", "suites/tiny.toml", *arguments)
    assert message in refused(done)


def test_ranges_draw_what_they_say() -> None:
    generator = numpy_generator("test ranges", 0)
    drawn = [LogRange(0.1, 10.0).draw(generator) for _ in range(200)]
    assert all(0.1 <= value <= 10.0 for value in drawn)
    assert 60 < sum(value < 1.0 for value in drawn) < 140, "half of the draws lie below the middle of the logarithm"
    assert {Choice((1, 2, 3)).draw(generator) for _ in range(50)} == {1, 2, 3}
    with pytest.raises(ValueError, match="0 < low < high"):
        LogRange(0.0, 1.0)
    with pytest.raises(ValueError, match="at least one"):
        Choice(())


def test_labels_become_keys() -> None:
    assert key_of("lg-fedavg") == "lg-fedavg"
    assert key_of("fccl+") == '"fccl+"'
    assert key_of("fedmuscle:loss=muscle") == '"fedmuscle:loss=muscle"'
