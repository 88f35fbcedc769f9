"""Names to plugins, and the three doors through which they come."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fedbench
from fedbench.discovery import discover
from fedbench.errors import UserError
from fedbench.interfaces import KINDS
from fedbench.registry import Entry, Registry, Source

COSINE = '''
import torch, fedbench

class Cosine(fedbench.AlignmentLoss):
    """1 - cosine similarity to the mean of the others."""
    def forward(self, anchor, others):
        return (1 - (anchor * torch.nn.functional.normalize(others.mean(0), dim=-1)).sum(-1)).mean()

@fedbench.hookimpl
def fedbench_losses(register):
    register("{name}", Cosine)
'''


def test_every_kind_has_a_built_in_with_summary_and_revision() -> None:
    registry = discover()
    assert not registry.failures
    for kind in KINDS:
        assert registry.names(kind), kind
        for name in registry.names(kind):
            stated = registry.declared(kind, name)
            assert stated.summary, f"{kind} {name} has no summary"
            assert isinstance(stated.revision, int), f"{kind} {name} has no revision"


def test_discovery_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, fedbench, fedbench.cli\nfrom fedbench.discovery import discover\n"
        "r = discover()\n[r.declared(k, n) and r.version(k, n) for k, n in r.entries]\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_file_is_a_whole_plugin(tmp_path: Path) -> None:
    path = tmp_path / "my_loss.py"
    path.write_text(COSINE.format(name="cosine"))
    registry = discover([path])
    loss = registry.create("loss", "cosine")
    import torch

    z = torch.nn.functional.normalize(torch.randn(4, 8), dim=-1)
    assert float(loss(z, z.unsqueeze(0))) == pytest.approx(0.0, abs=1e-6)
    before = registry.version("loss", "cosine")
    path.write_text(COSINE.format(name="cosine") + "# changed\n")
    assert discover([path]).version("loss", "cosine") != before


def test_a_file_that_builds_on_a_built_in_changes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "derived.py"
    path.write_text(COSINE.format(name="derived") + "from fedbench_plugins.losses.muscle import Muscle\n")
    registry = discover([path])
    before = registry.version("loss", "derived")
    assert before.endswith("+loss:muscle=1")
    declared = registry.declared
    monkeypatch.setattr(registry, "declared", lambda kind, name: replace(declared(kind, name), revision=2))
    assert registry.version("loss", "derived") != before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (COSINE.format(name="muscle"), "registered twice.*built-in"),
        ("raise RuntimeError('boom')", "boom.*line 1 of my_loss.py"),
        ("import fedbench\n@fedbench.hookimpl\ndef fedbench_loses(register): ...", "fedbench_losses"),
        ("x = 1", "registers nothing"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "my_loss.py"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        discover([path])
    assert "my_loss.py" in str(caught.value)


def test_a_broken_package_stays_visible_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "broken"
        dist = None

        def load(self) -> object:
            raise ImportError("no such thing")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Point()])
    registry = discover()
    assert [failure.source.name for failure in registry.failures] == ["broken"]
    assert "muscle" in registry.names("loss")
    with pytest.raises(UserError, match=r"unknown loss 'cosine'.*broken.*no such thing"):
        registry.entry("loss", "cosine")
    with pytest.raises(UserError, match="no such thing"):
        discover(strict=True)


def test_a_half_registered_plugin_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    registry.add(Entry("loss", "taken", object, Source("first", "package", "1.0")))
    with pytest.raises(UserError, match=r"second.*already registered by first 1\.0"):
        registry.add(Entry("loss", "taken", object, Source("second", "file", path="second.py")))


def test_built_ins_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBENCH_NO_BUILTINS", "1")
    assert not discover().entries


def test_load_checks_names_and_options() -> None:
    loss = fedbench.load("loss", "muscle", tau=0.2, tau_prev=0.15)
    assert loss.tau == 0.2
    with pytest.raises(UserError, match="did you mean 'muscle'"):
        fedbench.load("loss", "muscel")
    with pytest.raises(UserError, match="did you mean 'tau'"):
        fedbench.load("loss", "muscle", tua=0.2)
    with pytest.raises(UserError, match="expected float"):
        fedbench.load("loss", "muscle", tau="hot")
    with pytest.raises(UserError, match="kind of plugin"):
        fedbench.load("lose", "muscle")
