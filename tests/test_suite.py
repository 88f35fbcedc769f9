"""Suites: what a file becomes, inheritance, scales, positions and identity."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedbench import suite_source
from fedbench.errors import UserError
from fedbench.interfaces import Protocol, UserSpec
from fedbench.specs import parse_method
from fedbench.suite import Suite, load, scales, shipped

BASE = (Path(__file__).parent / "suites" / "base.toml").read_text()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def line_of(fragment: str, text: str = BASE) -> int:
    return text[: text.index(fragment)].count("\n") + 1


def extend(base: Path, text: str, name: str = "child") -> Suite:
    path = base.with_name(f"{name}.toml")
    path.write_text(f'name = "{name}"\nextends = "base.toml"\n{text}')
    return load(str(path))


def test_reads_every_section(base: Path) -> None:
    suite = load(str(base))
    assert (suite.name, suite.title, suite.question) == ("base", "A small suite", "Does it load?")
    assert (suite.scale, suite.planned, suite.missing, suite.seeds) == ("mini", None, (), (0, 1))
    assert suite.path == base
    assert suite.methods == tuple(map(parse_method, ["local", "fedmuscle:loss=muscle", "local-long"]))
    assert suite.controls == (parse_method("local-long"),)
    assert suite.protocol == Protocol(rounds=2, batch=16, others=2)
    assert (suite.data_name, suite.data_options, suite.validation, suite.test) == ("shapes", {"pixels": 32}, 10, 20)
    assert (suite.public_size, suite.public_views) == (64, 2)
    assert suite.users[0] == UserSpec("user1", "mlc", "small-convnet", 40, 3e-4, 5e-5, 5e-5, data={"style": "filled"})
    assert (suite.users[1].model, suite.users[1].model_options) == ("small-resnet", {"width": 8})
    assert suite.method_options == {"fedmuscle": {"shuffle": False}}
    assert suite.loss_options == {"muscle": {"tau": 0.2}}
    assert suite.reference == {
        "source": "Table 1",
        "columns": ["user1", "mean"],
        "rows": {"Local Training": [37.9, 1]},
    }
    assert suite.tuning == {"text": "by hand, on validation"}


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    text = BASE[: BASE.index("[method.fedmuscle]")]
    for line in ('title = "A small suite"\n', 'question = "Does it load?"\n', 'controls = ["local-long"]\n'):
        text = text.replace(line, "")
    (tmp_path / "s.toml").write_text(text)
    suite = load(str(tmp_path / "s.toml"))
    assert (suite.title, suite.question, suite.controls, suite.reference, suite.tuning) == ("base", "", (), {}, {})
    assert scales(str(tmp_path / "s.toml")) == ["mini"]


def test_a_scale_overrides_tables_and_replaces_users(base: Path) -> None:
    suite = load(str(base), scale="paper")
    assert scales(str(base)) == ["mini", "paper"]
    assert suite.scale == "paper"
    assert suite.planned == "needs the published data"
    assert suite.protocol == Protocol(rounds=100, batch=16, others=2)
    assert [user.name for user in suite.users] == ["a", "b", "c"]
    assert suite.users[0].fit_rate == 3e-4
    assert suite.seeds == (0,)


def test_an_unknown_scale_names_the_nearest(base: Path) -> None:
    with pytest.raises(UserError, match=r"unknown scale 'papr' \(did you mean 'paper'\?\)"):
        load(str(base), scale="papr")


def test_extending_merges_tables_and_replaces_lists(base: Path) -> None:
    suite = extend(
        base, 'seeds = [7]\nprotocol.rounds = 3\n[loss.muscle]\nsmoothing = 0.1\n[reference.rows]\nX = [1, "-"]'
    )
    assert (suite.name, suite.title, suite.seeds) == ("child", "A small suite", (7,))
    assert suite.protocol == Protocol(rounds=3, batch=16, others=2)
    assert suite.loss_options == {"muscle": {"tau": 0.2, "smoothing": 0.1}}
    assert list(suite.reference["rows"]) == ["Local Training", "X"]
    assert len(suite.users) == 3


def test_extending_replaces_users_whole(base: Path) -> None:
    user = '[[user]]\nname="{}"\ntask="ic10"\nmodel="m"\ntrain=9\nrates="strong"\n'
    suite = extend(base, "protocol.others = 1\n" + user.format("p") + user.format("q") + "[scale.paper]\nseeds=[5]")
    assert [(user.name, user.data) for user in suite.users] == [("p", {}), ("q", {})]
    paper = load(str(suite.path), scale="paper")
    assert (paper.seeds, paper.protocol.rounds, len(paper.users)) == ((5,), 100, 3)


def test_another_world_drops_the_options_of_the_former(base: Path) -> None:
    assert extend(base, '[data]\nname = "emoji"').data_options == {}
    assert extend(base, '[data]\nname = "shapes"\ncolours = 3').data_options == {"pixels": 32, "colours": 3}
    assert extend(base, '[data]\nname = "emoji"').validation == 10
    suite = extend(base, '[scale.paper.data]\nname = "coco"\nyear = 2017')
    assert load(str(suite.path), scale="paper").data_options == {"year": 2017}


def test_a_suite_may_extend_one_that_extends_one(base: Path) -> None:
    extend(base, "seeds = [4]", "middle")
    path = base.with_name("leaf.toml")
    path.write_text('name = "leaf"\nextends = "middle.toml"\nprotocol.rounds = 9')
    suite = load(str(path))
    assert (suite.name, suite.seeds, suite.protocol.rounds) == ("leaf", (4,), 9)


def test_positions_lead_to_the_file_that_writes_the_key(base: Path) -> None:
    suite = extend(base, "\n[protocol]\nrounds = 3")
    child = suite.path
    assert suite.where("protocol.rounds") == f"{child}:5"
    assert suite.where("protocol.batch") == f"{base}:{line_of('batch =')}"
    assert suite.where("user[1].model") == f"{base}:{line_of('model = {')}"
    assert suite.where("user[2].kind") == f"{base}:{line_of('[[user]]' + chr(10) + 'name = ' + chr(34) + 'user3')}"
    assert suite.where("methods[1]") == f"{base}:{line_of('fedmuscle:loss')}"
    assert suite.where("nothing.at.all") == str(child)
    paper = load(str(child), scale="paper")
    assert paper.where("protocol.rounds") == f"{base}:{line_of('rounds = 100')}"
    assert paper.where("user[0].train") == f"{base}:{line_of('train = 4000')}"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "a.toml"}, r"a\.toml:2: the suite extends itself: a\.toml -> a\.toml"),
        ({"a": "b.toml", "b": "./a.toml"}, r"b\.toml:2: the suite extends itself: a\.toml -> b\.toml -> a\.toml"),
        ({"a": "nowhere.toml"}, r"a\.toml:2: there is no suite 'nowhere\.toml'"),
        ({"a": "."}, r"a\.toml:2: '\.' is a folder, not a suite"),
    ],
)
def test_refuses_bad_inheritance(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, other in files.items():
        (tmp_path / f"{name}.toml").write_text(f'name = "{name}"\nextends = "{other}"\n')
    with pytest.raises(UserError, match=message):
        load(str(tmp_path / "a.toml"))


def test_a_link_to_itself_is_still_itself(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('name = "a"\nextends = "link.toml"\n')
    os.symlink("a.toml", tmp_path / "link.toml")
    with pytest.raises(UserError, match="extends itself"):
        load(str(tmp_path / "a.toml"))


def test_every_file_names_itself(base: Path) -> None:
    path = base.with_name("c.toml")
    path.write_text('extends = "base.toml"')
    with pytest.raises(UserError, match=r"c\.toml: name is missing"):
        load(str(path))


def test_shipped_suites_go_by_name_and_files_come_first(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "setup9.toml").write_text(BASE.replace('"base"', '"setup9"'))
    monkeypatch.setattr(suite_source, "_shipped_folder", lambda: folder)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    assert shipped() == ["setup9"]
    assert load("setup9").name == load("setup9.toml").name == "setup9"
    (work / "setup9").mkdir()
    assert load("setup9").name == "setup9"
    (work / "own.toml").write_text('name = "own"\nextends = "setup9"\nseeds = [3]')
    assert load("own.toml").seeds == (3,)
    assert load("own.toml").where("seeds") == "own.toml:3"
    (work / "setup9.toml").write_text(BASE)
    assert load("setup9.toml").name == "base"
    with pytest.raises(UserError, match=r"there is no suite 'suites/setup8.toml' \(did you mean 'setup9'\?\)"):
        load("suites/setup8.toml")
    with pytest.raises(UserError, match=r"there is no suite 'qqq' \(a \.toml file, or one of setup9\)"):
        load("qqq")


def test_every_shipped_suite_loads_at_every_scale() -> None:
    for name in shipped():
        for scale in scales(name):
            assert load(name, scale=scale).name == name


def test_identity_is_what_changes_numbers_and_nothing_else(base: Path) -> None:
    first = load(str(base)).identity()
    renamed = BASE.replace('"strong"', '"big"').replace("rates.strong", "rates.big").replace("A small", "Another")
    renamed = renamed.replace("seeds = [0, 1]", "seeds = [5]").replace("3e-4", "0.0003").replace("by hand", "well")
    renamed = renamed.replace('"base"', '"other"').replace(
        "rounds = 2\n", "rounds = 2\nsteps = 30\nweight_decay = 1e-2\n"
    )
    other = base.with_name("elsewhere.toml")
    other.write_text(renamed)
    assert load(str(other)).identity() == first
    assert json.loads(json.dumps(first)) == first
    assert str(base.parent) not in json.dumps([first, load(str(base)).written])
    for change in ("rounds=3", "data.pixels=33", "test=21", "public.size=65", "user.user2.model.width=9"):
        key = "data." + change if change.startswith("test") else change
        assert load(str(base), overrides=[key]).identity() != first
    assert load(str(base), scale="paper").identity() != first


def test_written_holds_the_merged_tables_before_defaults(base: Path) -> None:
    written = load(str(base), scale="paper", overrides=["batch=8"]).written
    assert set(written) == {"protocol", "data", "public", "rates", "user", "method", "loss"}
    assert written["protocol"] == {"rounds": 100, "batch": 8, "others": 2}


def test_a_row_can_be_added(base: Path) -> None:
    suite = load(str(base))
    added = suite.with_method(parse_method("simclr"), where="--method simclr")
    assert added.methods == (*suite.methods, parse_method("simclr"))
    assert added.where("methods[3]") == "--method simclr"
    assert suite.with_method(parse_method("local"), where="--method local") is suite


def test_plugins_are_relative_to_the_file_that_names_them(base: Path) -> None:
    folder = base.parent / "sub"
    folder.mkdir()
    (folder / "my_loss.py").write_text("")
    (folder / "middle.toml").write_text('name = "middle"\nextends = "../base.toml"\nplugins = ["my_loss.py"]')
    (base.parent / "top.toml").write_text('name = "top"\nextends = "sub/middle.toml"')
    assert load(str(base.parent / "top.toml")).plugins == ((folder / "my_loss.py").resolve(),)


def test_needs_no_torch() -> None:
    code = "import sys, fedbench.suite; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
