"""`--set`: keys, values and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedbench.errors import UserError
from fedbench.specs import parse_method
from fedbench.suite import Suite, load

BASE = Path(__file__).parent / "suites" / "base.toml"


def with_set(*overrides: str, scale: str = "mini") -> Suite:
    return load(str(BASE), scale=scale, overrides=overrides)


def test_a_bare_key_is_a_field_of_the_protocol() -> None:
    assert with_set("rounds=1").protocol.rounds == 1
    assert with_set("protocol.rounds = 1", "rounds=5", "batch=8").protocol.rounds == 5
    assert with_set("schedule=constant", 'head="embedding"').protocol.schedule == "constant"


def test_it_is_applied_after_the_scale() -> None:
    assert with_set("rounds=3", scale="paper").protocol.rounds == 3
    assert with_set("user.a.train=7", scale="paper").users[0].train == 7


def test_users_go_by_name() -> None:
    suite = with_set("user.user2.train=7", "user.user2.data.style=outlined", "user.user2.task=mlc")
    assert (suite.users[1].train, suite.users[1].data, suite.users[1].task) == (7, {"style": "outlined"}, "mlc")
    assert suite.users[0] == load(str(BASE)).users[0]
    assert with_set("user.user1={train=3, data={coverage=1}}").users[0].data == {"style": "filled", "coverage": 1}


def test_options_of_a_users_model_and_data() -> None:
    user = with_set("user.user1.model.width=4").users[0]
    assert (user.model, user.model_options) == ("small-convnet", {"width": 4})
    user = with_set("user.user2.model=other").users[1]
    assert (user.model, user.model_options) == ("other", {})
    # An option that happens to be called `name` is not the name of a world.
    assert with_set("user.user1.data.name=x").users[0].data == {"style": "filled", "name": "x"}


def test_tables_merge_and_lists_are_replaced() -> None:
    suite = with_set("protocol={rounds=1, steps=2}", "seeds=[4]", 'methods=["local","x:a=1"]', "controls=[]")
    assert (suite.protocol.rounds, suite.protocol.steps, suite.protocol.batch) == (1, 2, 16)
    assert (suite.seeds, suite.methods) == ((4,), (parse_method("local"), parse_method("x:a=1")))
    assert with_set("rates.strong.fit=1").users[2].fit_rate == 1.0
    assert with_set('method."new-one".tau=0.5').method_options["new-one"] == {"tau": 0.5}
    assert with_set("loss.muscle.tau=1").loss_options == {"muscle": {"tau": 1}}
    assert with_set("data.name=emoji").data_options == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("0.5", 0.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"8"', "8"),
        ("a=b", "a=b"),
        ("", ""),
        ("x\ny=1", "x\ny=1"),
    ],
)
def test_values_are_toml_or_else_text(text: str, value: object) -> None:
    assert with_set(f"data.option={text}").data_options["option"] == value


def test_positions_name_the_option() -> None:
    suite = with_set("user.user2.model.width=9", "rounds=7")
    assert suite.where("user[1].model.width") == "--set user.user2.model.width=9"
    assert suite.where("protocol.rounds") == "--set rounds=7"
    assert suite.where("protocol.batch").endswith("base.toml:14")
    assert suite.where("user[1].train").endswith("base.toml:43")


def test_plugins_are_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert with_set('plugins=["p.py"]').plugins == ((tmp_path / "p.py").resolve(),)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("round=1", "--set round=1: unknown key 'round' (did you mean 'rounds'?)"),
        ("protcol.rounds=1", "unknown key 'protcol.rounds' (did you mean 'protocol'?)"),
        ("protocol.round=1", "--set protocol.round=1: unknown [protocol] key 'round' (did you mean 'rounds'?)"),
        ("public.sise=1", "unknown [public] key 'sise' (did you mean 'size'?)"),
        ("name=x", "unknown key 'name'"),
        ("scale.paper.seeds=[1]", "unknown key 'scale.paper.seeds'"),
        ("user.user9.train=1", "unknown user 'user9' (did you mean"),
        ("user.user1.trian=1", "--set user.user1.trian=1: unknown [[user]] key 'trian' (did you mean 'train'?)"),
        ("user.user1=3", "user.user1 is a table (--set user.user1.KEY=VALUE)"),
        ("user.user1.name=user2", "two users are named 'user2'"),
        ("rates.stong.fit=1", "unknown rates 'stong' (did you mean 'strong'?)"),
        ("rounds=ten", '--set rounds=ten: protocol.rounds is "ten" (a whole number, at least 1)'),
        ("rounds=", 'protocol.rounds is "" (a whole number'),
        ("protocol.rounds.x=1", "--set protocol.rounds.x=1: protocol.rounds is a table (a whole number"),
        ("protocol=3", "--set protocol=3: protocol is 3 (a table)"),
        ("others=3", "--set others=3: protocol.others is 3, but there are 3 users"),
        ("public.size=4", "protocol.batch is 16, but public.size is 4"),
        ("seeds=0", "--set seeds=0: seeds is 0 (a list of whole numbers)"),
        ("seeds=[0,-1]", "--set seeds=[0,-1]: seeds[1] is -1"),
        ("rounds", "--set rounds: malformed (--set KEY=VALUE"),
        ("=1", "malformed (--set KEY=VALUE"),
        ("a b=1", "malformed (--set KEY=VALUE"),
        ("a..b=1", "malformed (--set KEY=VALUE"),
        ("user.user1=[", "user.user1 is a table"),
        ("data.x=" + "[" * 300 + "]" * 300, "nested too deeply (at most 50 levels)"),
        ("data" + ".x" * 300 + "=1", "nested too deeply"),
        ("user.=1", "malformed (--set KEY=VALUE"),
    ],
)
def test_refuses(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        with_set(override)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["user=3", "user.user1.train=1"], "unknown user 'user1' (known: none)"),
        (["user=[1, {}]", "user.user1.train=1"], "unknown user 'user1'"),
        (["user=[1]", 'user."".train=1'], "unknown user ''"),
        (['user=[{name="a"}]', "user.a.model.width=1"], "user.a.task is missing"),
        (["rates=3", "rates.strong.fit=1"], "rates.strong.align is missing"),
    ],
)
def test_one_override_may_break_what_the_next_one_changes(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        with_set(*overrides)
    assert message in str(caught.value)
