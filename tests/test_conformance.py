"""The conformance kit: every built-in passes, and for every check there is a plugin that fails it and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fedbench.conformance import Check, Finding, Skipped, Subject, assert_conforms, checks_for, conforms, examine
from fedbench.conformance.subjects import subjects
from fedbench.discovery import discover
from fedbench.errors import UserError
from fedbench.interfaces import KINDS

sys.path.append(str(Path(__file__).parent))
from broken_plugins import BROKEN, loss, method

BUILT_IN = sorted(discover().entries)
torch.set_num_threads(1)


def write(folder: Path, text: str) -> Path:
    """A plugin file that is this test's own: equal files are one module."""
    path = folder / "broken.py"
    path.write_text(f"# {folder.name}\n{text}")
    return path


def examined(path: Path) -> list[Finding]:
    """The findings of the one plugin of a file."""
    (subject,) = subjects(str(path))
    return list(examine(subject))


def failures(findings: list[Finding]) -> list[str]:
    """The names of the checks that failed."""
    return [finding.check for finding in findings if finding.verdict == "failed"]


# -- built-ins


@pytest.mark.parametrize(("kind", "name"), BUILT_IN, ids=[f"{kind}:{name}" for kind, name in BUILT_IN])
def test_built_ins_conform(kind: str, name: str) -> None:
    assert_conforms(kind, name)


def test_learned_parameters_are_checked() -> None:
    findings = assert_conforms("loss", "gramian", options={"learn_tau": True})
    assert {finding.check: finding.cause for finding in findings}["parameters"] == "log_tau"


def test_a_method_is_checked_with_its_loss_and_options() -> None:
    (subject,) = subjects("fedmuscle:loss=gramian,loss.learn_tau=true,views=own")
    findings = list(examine(subject))
    assert conforms(findings) and subject.kept["cell"].method.label == subject.label.partition(":")[2]


# -- broken plugins


@pytest.mark.parametrize(("kind", "check"), BROKEN, ids=[f"{kind}: {check}" for kind, check in BROKEN])
def test_a_broken_plugin_fails_its_check_and_no_other(kind: str, check: str, tmp_path: Path) -> None:
    path = write(tmp_path, BROKEN[kind, check])
    findings = examined(path)
    assert failures(findings) == [check], findings
    assert not conforms(findings)
    (failed,) = (finding for finding in findings if finding.verdict == "failed")
    assert failed.subject == f"{kind}:broken" and failed.cause and failed.advice
    file, _, line = failed.where.rpartition(":")
    assert file == str(path) and 1 < int(line) <= len(path.read_text().split("\n"))


def test_every_check_has_a_broken_plugin() -> None:
    known = {(kind, check.name) for kind in (*KINDS, "observer") for check in checks_for(kind)}
    assert set(BROKEN) == known


ASKING = """
def private_loss(self, x, targets):
    {0}
    return super().private_loss(x, targets) * (1 + secret)
"""


@pytest.mark.parametrize(
    ("user", "server", "cause"),
    [
        (
            "pass",
            "self.ask('fit')\nself._federation.evaluate('validation')",
            "30 scores were asked for, 20 by the core",
        ),
        (
            ASKING.format("secret = fedbench.load('data', 'shapes', pixels=16).test('mlc', size=9).targets.sum()"),
            "self.ask('fit')",
            "it asked the world for validation or test data",
        ),
        (
            # Its caller's caller holds whoever scores it.
            ASKING.format(
                "import sys; frame = sys._getframe()\n"
                "    while not hasattr(frame.f_locals.get('self'), '_examiner'): frame = frame.f_back\n"
                "    secret = int(frame.f_locals['self']._examiner.test.samples.targets.sum())"
            ),
            "self.ask('fit')",
            "with other validation and test data a run differs: what user1 replied to 'fit' in round 1",
        ),
    ],
    ids=["scores", "world", "examiner"],
)
def test_held_out_data_cannot_be_had_by_other_ways(user: str, server: str, cause: str, tmp_path: Path) -> None:
    findings = examined(write(tmp_path, method(user, server)))
    assert failures(findings) == ["held-out data"], findings
    assert cause in {finding.check: finding.cause for finding in findings}["held-out data"]


@pytest.mark.parametrize(
    "board", ["self.method.__dict__", "type(self).__dict__['board']", "BOARD", "messages.__dict__"]
)
def test_nothing_crosses_but_messages(board: str, tmp_path: Path) -> None:
    text = method(
        f"""
        board = {{}}
        @verb
        def post(self, batch):
            words = {board}.get("words", []) if self.name != "user1" else []
            {board}["words"] = [*words, float(self.embed(batch).detach()[0, 0])]
        @verb
        def read(self):
            with torch.no_grad():
                self.representation.projection.weight.mul_(1 + sum({board}["words"]))
        """,
        """
        self.ask("fit")
        batch, = self.public.draw(1, 4)
        self.ask("post", batch=batch)
        self.ask("read")
        """,
    )
    findings = examined(write(tmp_path, text + "\nBOARD = {}\n"))
    assert set(failures(findings)) <= {"messages only", "failing user"}, findings
    assert "messages only" in failures(findings)


def test_a_method_may_say_that_it_trains_heads(tmp_path: Path) -> None:
    text = BROKEN["method", "heads"].replace("    Server = Server", "    Server = Server\n    trains_heads = True")
    findings = examined(write(tmp_path, text))
    assert conforms(findings)
    assert {finding.check: finding.verdict for finding in findings}["heads"] == "skipped"


def test_a_method_for_users_that_are_alike_is_run_on_such(tmp_path: Path) -> None:
    only_alike = "def touches(self, users):\n    names = [user.name for user in users]\n"
    only_alike += "    return names if len({(user.task, user.model) for user in users}) == 1 else []"
    (subject,) = subjects(str(write(tmp_path, method(method=only_alike))))
    assert conforms(list(examine(subject)))
    assert subject.kept["cell"].suite.scale == "alike"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (method(server="self.ask('fit', users=self.users[:-1] if r else None)"), "never asked for 'fit' of user"),
        (method(server="self.ask('fit')\nself.ask('fit')"), "twice in a round"),
        (method(method="def paper_bytes(self, protocol, users):\n    return 1.5"), "paper_bytes is 1.5"),
    ],
    ids=["no local phase", "two local phases", "paper bytes"],
)
def test_what_the_core_refuses_fails_the_two_rounds(text: str, cause: str, tmp_path: Path) -> None:
    findings = examined(write(tmp_path, text))
    assert failures(findings) == ["two rounds"]
    assert cause in {finding.check: finding.cause for finding in findings}["two rounds"]


def test_the_place_of_a_failure_is_the_plugins_own_line(tmp_path: Path) -> None:
    path = write(tmp_path, loss("value = value + torch.zeros(3) @ torch.zeros(4)"))
    first = examined(path)[0]
    line = next(number for number, text in enumerate(path.read_text().split("\n"), 1) if "torch.zeros(3)" in text)
    assert first.where == f"{path}:{line}" and first.cause.startswith("RuntimeError: ")
    assert "Traceback" in first.trace and "torch.zeros(3)" in first.trace


# -- the kit itself


def finding(verdict: str) -> Finding:
    return Finding("loss:own", "check", verdict)  # type: ignore[arg-type]


def test_what_conforms() -> None:
    passed, failed, skipped = map(finding, ("passed", "failed", "skipped"))
    assert conforms([passed, skipped]) and conforms([passed])
    assert not conforms([passed, failed, skipped])
    assert not conforms([skipped, skipped]) and not conforms([])


def test_known_verdicts_are_not_found_again() -> None:
    subject = Subject("metric", "accuracy", {}, discover())
    begun: list[Check] = []
    findings = list(examine(subject, known={"value": "failed", "direction": "passed"}, begin=begun.append))
    assert (
        [check.name for check in begun] == [one.check for one in findings] == ["inputs", "order of items", "no number"]
    )
    assert {one.verdict for one in findings} == {"skipped"}


def test_a_plugins_tests_can_ask_whether_it_conforms(tmp_path: Path) -> None:
    path = write(tmp_path, BROKEN["loss", "scalar"])
    with pytest.raises(AssertionError, match=r"loss:broken does not conform\nscalar failed: .*broken.py:"):
        assert_conforms("loss", "broken", plugins=[path])
    for kind, name in (("loss", "muscle"), ("method", "fedmuscle")):
        with pytest.raises(UserError, match=f"unknown option of {kind} '{name}'"):
            assert_conforms(kind, name, options={"tua": 1.0})
    with pytest.raises(UserError, match="unknown loss 'broken'"):
        assert_conforms("loss", "broken")


def test_all_skipped_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(subject: Subject) -> None:
        raise Skipped("no reason")

    monkeypatch.setattr("fedbench.conformance.checks_for", lambda kind: (Check("one", skip, ""),))
    with pytest.raises(AssertionError, match="one skipped:  no reason"):
        assert_conforms("loss", "muscle")
