"""Fixtures: a tiny suite on the shapes world, and a cache that is the test run's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

USERS = [("user1", "mlc", "small-convnet"), ("user2", "ic100", "small-resnet"), ("user3", "ic10", "small-convnet")]

HEAD = """
name = "tiny"
title = "Three users on the shapes world"
seeds = [0, 1]
methods = ["local", "fedmuscle:loss=muscle", "simclr", "local-long", "fedmuscle:shuffle=true"]
controls = ["local-long", "fedmuscle:shuffle=true"]

[protocol]
rounds = 2
steps = 2
fit_batch = 8
iterations = 2
batch = 8
others = 2
dimension = 16
eval_batch = 50

[data]
name = "shapes"
validation = 30
test = 60
pixels = 16

[public]
size = 32
views = 2

[rates.small]
fit = 2e-3
align = 1e-3
"""

USER = """
[[user]]
name = "{name}"
task = "{task}"
model = {{ name = "{model}", width = 8 }}
train = 40
rates = "small"
data = {{ style = "filled" }}
"""


def tiny_suite(head: str = HEAD) -> str:
    """The text of the tiny suite."""
    return head + "".join(USER.format(name=name, task=task, model=model) for name, task, model in USERS)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the user's own cache out of the tests, for this process and those it starts."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDBENCH_CACHE", str(folder))
        yield folder


@pytest.fixture
def write_suite(tmp_path: Path) -> Callable[..., Path]:
    """Write the tiny suite, with text replaced, and return its path."""

    def write(*replacements: tuple[str, str]) -> Path:
        text = tiny_suite()
        for old, new in replacements:
            assert old in text, f"the tiny suite does not contain {old!r}"
            text = text.replace(old, new, 1)
        path = tmp_path / "tiny.toml"
        path.write_text(text)
        return path

    return write
