"""Mistakes in a suite: each is refused with its place and what was expected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedbench.errors import UserError
from fedbench.suite import load

BASE = (Path(__file__).parent / "suites" / "base.toml").read_text()


def refused(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "s.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        load(str(path))
    return str(caught.value).replace(f"{tmp_path}/", "")


def changed(old: str, new: str) -> str:
    assert old in BASE
    return BASE.replace(old, new, 1)


CASES = {
    # unknown keys and sections
    "section": ("[public]", "[pubic]", "s.toml:23: unknown key 'pubic' (did you mean 'public'?)"),
    "top key": ("seeds", "seed", "s.toml:4: unknown key 'seed' (did you mean 'seeds'?)"),
    "protocol key": ("rounds", "round", "s.toml:13: unknown [protocol] key 'round' (did you mean 'rounds'?)"),
    "strayed key": (
        "seeds =",
        "rounds = 1\nseeds =",
        "s.toml:4: unknown key 'rounds' (did you mean 'protocol.rounds'?)",
    ),
    "public key": ("views", "view", "s.toml:25: unknown [public] key 'view' (did you mean 'views'?)"),
    "rates key": ("align", "aling", "s.toml:29: unknown [rates.strong] key 'aling' (did you mean 'align'?)"),
    "user key": ("train", "trian", "s.toml:35: unknown [[user]] key 'trian' (did you mean 'train'?)"),
    "reference key": ("columns", "colums", "s.toml:61: unknown [reference] key 'colums' (did you mean 'columns'?)"),
    "scale section": ("[scale.paper.protocol]", "[scale.paper.protocoll]", "s.toml:73: unknown [scale.paper] key"),
    "key in scale": ("rounds = 100", "round = 100", "s.toml:74: at scale 'paper': unknown [protocol] key 'round'"),
    "planned mini": ("seeds =", 'planned = "x"\nseeds =', "s.toml:4: unknown key 'planned'"),
    "name in scale": ("seeds = [0]\n", 'name = "x"\n', "s.toml:71: scale.paper has its own name (none in a scale)"),
    "scale mini": ("[scale.paper]", "[scale.mini]\n[scale.paper]", "s.toml:69: 'mini' is the base scale"),
    "scale name": ("[scale.paper]", '[scale."../x"]\n[scale.paper]', "s.toml:69: a scale is named '../x' (lower-case"),
    "reference inf": ("[37.9, 1]", "[inf, 1]", 'reference.rows."Local Training" is [Infinity, 1] (a list of numbers'),
    "no scale": ('planned = "needs the published data"', "x = 1", "s.toml:70: unknown [scale.paper] key 'x'"),
    # types and ranges
    "name": ('"base"', '"../Base"', "s.toml:1: name is \"../Base\" (lower-case letters, digits and '-')"),
    "title": ('"A small suite"', '"two\\nlines"', "s.toml:2: title is"),
    "rounds type": ("rounds = 2", 'rounds = "2"', 's.toml:13: protocol.rounds is "2" (a whole number, at least 1)'),
    "rounds bool": ("rounds = 2", "rounds = true", "protocol.rounds is true (a whole number, at least 1)"),
    "rounds float": ("rounds = 2", "rounds = 2.0", "protocol.rounds is 2.0 (a whole number, at least 1)"),
    "rounds range": ("rounds = 2", "rounds = 0", "protocol.rounds is 0 (a whole number, at least 1)"),
    "batch range": ("batch = 16", "batch = 1", "protocol.batch is 1 (a whole number, at least 2)"),
    "decay": ("batch = 16", "weight_decay = -0.1", "protocol.weight_decay is -0.1 (a number, at least 0)"),
    "decay nan": ("batch = 16", "weight_decay = nan", "protocol.weight_decay is NaN (a number, at least 0)"),
    "head": ("batch = 16", 'head = "feature"', "unknown protocol.head 'feature' (did you mean 'features'?)"),
    "schedule": (
        "batch = 16",
        'schedule = "step"',
        "unknown protocol.schedule 'step' (known: constant, cosine, restarts)",
    ),
    "projection": ("batch = 16", "projection = 2", "protocol.projection is 2 (one of linear, mlp)"),
    "rate": ("fit = 3e-4", "fit = 0", "s.toml:28: rates.strong.fit is 0 (a number above 0)"),
    "rate missing": ("fit = 3e-4\n", "", "s.toml:27: rates.strong.fit is missing (a number above 0)"),
    "rate inf": ("fit = 3e-4", "fit = inf", "rates.strong.fit is Infinity (a number above 0)"),
    "table": ("size = 64", "size.x = 64", "public.size is a table (a whole number"),
    "data name": ('name = "shapes"\n', "", "s.toml:17: data.name is missing (the name of a data plugin)"),
    "data option": ("pixels = 32", "pixels = 1979-05-27", 'data.pixels is "1979-05-27" (text, true or false,'),
    "data list": ("pixels = 32", "pixels = [1, inf]", "data.pixels is [1, Infinity] (text, true or false,"),
    "views": ("views = 2", "views = 0", "public.views is 0 (a whole number, at least 1)"),
    # seeds and methods
    "seeds": ("seeds = [0, 1]", "seeds = 3", "s.toml:4: seeds is 3 (a list of whole numbers)"),
    "no seeds": ("seeds = [0, 1]", "seeds = []", "s.toml:4: the suite has no seeds"),
    "seeds missing": ("seeds = [0, 1]", "", "s.toml: seeds is missing (a list of whole numbers)"),
    "negative seed": ("seeds = [0, 1]", "seeds = [0, -1]", "seeds[1] is -1 (seeds of at least 0, below 2^32)"),
    "double seed": ("seeds = [0, 1]", "seeds = [1, 1]", "the seed 1 stands twice"),
    "seed bool": ("seeds = [0, 1]", "seeds = [true]", "seeds[0] is true (a list of whole numbers)"),
    "method form": ('"local-long",', '"local-long:",', "s.toml:8: 'local-long:' has no options after the colon"),
    "method type": ('"local-long",', "3,", "s.toml:8: methods[2] is 3 (a list of text)"),
    "method twice": (
        '"local-long",',
        '"fedmuscle: loss = muscle",',
        "s.toml:8: methods has 'fedmuscle:loss=muscle' twice",
    ),
    "no local": ('    "local",\n', "", "s.toml:5: methods has no 'local' (Δ% is measured against local training)"),
    "control": (
        'controls = ["local-long"]',
        'controls = ["local-lang"]',
        "s.toml:10: unknown method among the controls 'local-lang' (did you mean 'local-long'?)",
    ),
    "plugin": ("[protocol]", 'plugins = ["no.py"]\n[protocol]', "s.toml:12: there is no plugin file"),
    "dotted option": ("shuffle = false", '"loss.tau" = 1', 's.toml:54: method.fedmuscle."loss.tau" is no option'),
    "no table": ("[loss.muscle]\ntau = 0.2", "[loss]\nmuscle = 1", "s.toml:57: loss.muscle is 1 (a table)"),
    # users
    "user name": ('"user1"', '"user 1"', "s.toml:32: user[0].name is \"user 1\" (letters, digits, '-' and '_')"),
    "user twice": ('"user2"', '"user1"', "s.toml:40: two users are named 'user1'"),
    "no train": ("train = 40\n", "", "s.toml:31: user 'user1' has no data: train is missing"),
    "train": ("train = 40", "train = 0", "s.toml:35: user.user1.train is 0 (a whole number, at least 1)"),
    "no task": ('task = "mlc"\n', "", "s.toml:31: user.user1.task is missing (the name of a task)"),
    "model": ('model = "small-convnet"', "model = 3", "s.toml:34: user.user1.model is 3 (the name of a model, or"),
    "model table": ('name = "small-resnet", ', "", "s.toml:42: user.user2.model.name is missing"),
    "user data": ('data = { style = "filled" }', "data = 1", "s.toml:37: user.user1.data is 1 (a table)"),
    "user rates": ('rates = "strong"', 'rates = "stong"', "s.toml:36: unknown rates 'stong' (did you mean 'strong'?)"),
    "single": ('[[user]]\nname = "user1"', '[user]\nname = "user1"', "s.toml:39: not TOML: "),
    "scale user": ("train = 4000", "train = -1", "s.toml:80: at scale 'paper': user.a.train is -1"),
    # what has to fit
    "others": ("others = 2", "others = 3", "s.toml:15: protocol.others is 3, but there are 3 users (at most 2:"),
    "batch": ("batch = 16", "batch = 65", "s.toml:14: protocol.batch is 65, but public.size is 64"),
    "default batch": ("batch = 16\n", "", None),
    "quorum": ("batch = 16", "quorum = 4", "s.toml:14: protocol.quorum is 4, but there are 3 users (at most 3)"),
    "reference width": ("[37.9, 1]", "[37.9]", 'reference.rows."Local Training" has 1 values for 2 columns'),
    "reference cell": (
        "[37.9, 1]",
        "[37.9, true]",
        's.toml:64: reference.rows."Local Training" is [37.9, true] (a list',
    ),
    "tuning": ('"by hand, on validation"', "1", "s.toml:67: tuning.text is 1 (text)"),
}


@pytest.mark.parametrize(("old", "new", "message"), CASES.values(), ids=CASES.keys())
def test_refuses(tmp_path: Path, old: str, new: str, message: str | None) -> None:
    if message is None:
        (tmp_path / "s.toml").write_text(changed(old, new))
        load(str(tmp_path / "s.toml"))
        return
    assert message in refused(tmp_path, changed(old, new))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (re.sub(r"\[\[user\]\]\n(?:[^\n]+\n)*", "", BASE), "s.toml: the suite has no users ([[user]], one for each"),
        (re.sub(r"\[\[user\]\]\n(?:[^\n]+\n)*", "", BASE) + "[user]\na = 1", "user is a table ([[user]], one for each"),
        ("user = [1]\n" + re.sub(r"\[\[user\]\]\n(?:[^\n]+\n)*", "", BASE), "s.toml:1: user[0] is 1 (a table)"),
        (BASE + "[scale.x]\nprotocol = 3", "at scale 'x': protocol is 3 (a table)"),
        ("scale = 3\n" + BASE[: BASE.index("[scale")], "s.toml:1: scale is 3 (a table)"),
        (BASE.replace("[scale.paper]", "[scale]\nbig = 3\n[scale.paper]"), "s.toml:70: scale.big is 3 (a table)"),
        ("extends = 3\n" + BASE, "s.toml:1: extends is not text (a path or the name of a shipped suite)"),
    ],
)
def test_refuses_wrong_shapes(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_a_mistake_in_a_base_is_reported_there(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(changed("rounds = 2", "round = 2"))
    message = refused(tmp_path, 'name = "child"\nextends = "base.toml"\n')
    assert message.startswith("base.toml:13: unknown [protocol] key 'round'")


def test_a_mistake_common_to_all_scales_is_reported_plainly(tmp_path: Path) -> None:
    assert "at scale" not in refused(tmp_path, changed("fit = 3e-4", "fit = -1"))


def test_others_are_checked_against_the_users_of_the_scale(tmp_path: Path) -> None:
    two_users = BASE[: BASE.rindex("[[scale.paper.user]]")]
    assert "at scale 'paper': protocol.others is 2, but there are 2 users" in refused(tmp_path, two_users)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "a"\nseeds = [0,\n\n[protocol', r"s\.toml:4: not TOML: "),
        ('name = "a"\nname = "b"', r"s\.toml:2: not TOML: Cannot overwrite a value"),
        ('name = "a"\nx = """never closed\n\n', r"s\.toml:\d: not TOML: "),
        ("x = " + "9" * 5000, r"s\.toml: not TOML: "),
        ("x = " + "[" * 100_000, r"s\.toml: nested too deeply \(at most 50 levels\)"),
        ('name = "a"\nx = ' + "[" * 300 + "]" * 300, r"s\.toml:2: nested too deeply \(at most 50 levels\)"),
        (b'name = "a"\ntitle = "\xff"', r"s\.toml:2: not UTF-8: byte 0xff at offset 20 \(text saved as UTF-8\)"),
        ("", r"s\.toml: name is missing"),
    ],
)
def test_refuses_files_that_are_no_toml(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert re.match(message, refused(tmp_path, text))


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load(str(tmp_path / "s.toml")).name == "base"


@pytest.mark.parametrize("name", ["", "no such\0name", "x" * 5000, "/"])
def test_refuses_what_is_no_file(name: str) -> None:
    with pytest.raises(UserError, match=r"there is no suite|is a folder, not a suite"):
        load(name)


def test_refuses_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder, not a suite \(a \.toml file\)"):
        load(str(tmp_path))
