"""Seeds are pure functions of their coordinates: no order of calls, process or global state enters."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbench.seeds import derive, numpy_generator, torch_generator

coordinates = st.lists(st.text() | st.integers(), min_size=1, max_size=4)


def test_seeds_never_change() -> None:
    # Written out, since every committed result depends on them.
    assert derive("fit", "user1", 0) == 5188783089326310307
    assert derive("a") == 1449732060409782514


@given(coordinates)
def test_seeds_fit_every_generator(names: list[str | int]) -> None:
    seed = derive(*names)
    assert 0 <= seed < 2**63
    assert derive(*names) == seed


@given(coordinates, coordinates)
def test_different_coordinates_give_different_seeds(first: list[str | int], second: list[str | int]) -> None:
    assert (derive(*first) == derive(*second)) == (first == second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("a", "b"), ("b", "a")),
        (("ab",), ("a", "b")),
        (("ab", "c"), ("a", "bc")),
        (("a;", "b"), ("a", ";b")),
        (("a",), ("a", "")),
        (("1",), (1,)),
        (("int:1",), (1,)),
        ((1, 2), (12,)),
        ((-1,), (1,)),
        (("a", 0), ("a",)),
        (("x5:int:1;",), ("x", 1)),
    ],
)
def test_no_spelling_collides(first: tuple[str | int, ...], second: tuple[str | int, ...]) -> None:
    assert derive(*first) != derive(*second)


def test_a_seed_needs_a_coordinate() -> None:
    with pytest.raises(ValueError, match="at least one coordinate"):
        derive()


def test_seeds_are_the_same_in_another_process() -> None:
    command = [sys.executable, "-c", "from fedbench.seeds import derive; print(derive('fit', 'user1', 3))"]
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert int(done.stdout) == derive("fit", "user1", 3)


def test_deriving_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from fedbench.seeds import derive; derive('a');"
        "print({'torch', 'numpy'} & set(sys.modules) or 'neither')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "neither\n"


def test_generators_are_fresh_and_repeatable() -> None:
    first = numpy_generator("batches", 1)
    first.random(10)
    assert numpy_generator("batches", 1).random() == numpy_generator("batches", 1).random()
    assert numpy_generator("batches", 1).random() != first.random()
    assert numpy_generator("batches", 1).random() != numpy_generator("batches", 2).random()
    draws = [torch.rand(4, generator=torch_generator("batches", n)) for n in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_generators_leave_the_global_ones_alone() -> None:
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = (random.random(), np.random.rand(), torch.rand(1))
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    torch.rand(3, generator=torch_generator("a"))
    numpy_generator("a").random(3)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


def test_neighbouring_seeds_are_unrelated() -> None:
    draws = np.array([numpy_generator("noise", seed).standard_normal(200) for seed in range(60)])
    correlations = np.corrcoef(draws)[np.triu_indices(60, 1)]
    assert abs(correlations).max() < 0.4
    assert abs(correlations.std() - 200**-0.5) < 0.01
