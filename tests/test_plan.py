"""Cells and their keys: everything that changes a number changes the key, and nothing else does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import fedbench_baselines.simclr
import fedbench_plugins.losses.muscle
from fedbench import plan
from fedbench.discovery import discover
from fedbench.errors import UserError
from fedbench.plan import Cell, check_method, make_cell, make_cells, validate
from fedbench.registry import Entry, Registry, Source
from fedbench.specs import parse_loss, parse_method
from fedbench.suite import load
from fedbench.version import PROTOCOL

sys.path.append(str(Path(__file__).parent))
from tiny import WriteSuite

ROWS = '[method."fedmuscle:loss=gramian"]\nrate = 0.5'
MUSCLE = "fedmuscle:loss=muscle"

LOSS = """
import fedbench

class {name}(fedbench.AlignmentLoss):
    \"\"\"A stranger's loss.\"\"\"
    def __init__(self, *, scale: float = {scale}) -> None:
        super().__init__()
        self.scale = scale
    def forward(self, anchor, others):
        return self.scale * (anchor * others).sum()

@fedbench.hookimpl
def fedbench_losses(register):
    register("{name}", {name})
"""


def cell(
    path: Path, method: str = MUSCLE, seed: int = 0, device: str = "cpu", registry: Registry | None = None
) -> Cell:
    return make_cell(load(str(path)), registry or discover(), parse_method(method), seed, device)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rounds = 2", "rounds = 3"),
        ("steps = 2", "steps = 3"),
        ("fit_batch = 8", "fit_batch = 9"),
        ("iterations = 2", "iterations = 3"),
        ("\nbatch = 8", "\nbatch = 9"),
        ("others = 2", "others = 1"),
        ("dimension = 16", "dimension = 17"),
        ("eval_batch = 50", "eval_batch = 51"),
        ("[protocol]", '[protocol]\nhead = "embedding"'),
        ("[protocol]", '[protocol]\nprojection = "linear"'),
        ("[protocol]", '[protocol]\nschedule = "constant"'),
        ("[protocol]", '[protocol]\nschedule = "restarts"'),
        ("[protocol]", "[protocol]\nweight_decay = 0.1"),
        ("[protocol]", "[protocol]\nthreads = 2"),
        ("[protocol]", '[protocol]\non_failure = "skip"'),
        ("[protocol]", "[protocol]\nquorum = 2"),
        ("pixels = 16", "pixels = 17"),
        ("validation = 30", "validation = 31"),
        ("test = 60", "test = 61"),
        ("pixels = 16", "pixels = 16\nviews = 2"),
        ("size = 32", "size = 33"),
        ("size = 32\nviews = 2", "size = 32\nviews = 3"),
        ('name = "user1"', 'name = "user9"'),
        ('task = "mlc"', 'task = "ic10"'),
        ('name = "small-convnet"', 'name = "small-resnet"'),
        ("width = 8", "width = 16"),
        ("train = 40", "train = 41"),
        ('style = "filled"', 'style = "outlined"'),
        ('style = "filled"', 'style = "filled", coverage = 0.5'),
        ("fit = 2e-3", "fit = 3e-3"),
        ("align = 1e-3", "align = 2e-3"),
        ("align = 1e-3", "align = 1e-3\nprojection = 2e-3"),
    ],
)
def test_every_field_of_the_protocol_and_the_users_is_in_the_key(write_suite: WriteSuite, old: str, new: str) -> None:
    before = cell(write_suite())
    after = cell(write_suite((old, new)))
    assert after.key != before.key
    assert after.protocol_key != before.protocol_key


@pytest.mark.parametrize(
    ("table", "method"),
    [
        ("[loss.muscle]\ntau = 0.3", MUSCLE),
        ("[method.simclr]\ntau = 0.3", "simclr"),
        ('[method.fedmuscle]\nloss = "pairwise"', "fedmuscle"),
    ],
)
def test_options_in_the_suite_are_in_the_key_of_the_cells_they_touch(
    write_suite: WriteSuite, table: str, method: str
) -> None:
    before, local = cell(write_suite(), method), cell(write_suite(), "local")
    changed = write_suite(("[public]", f"{table}\n\n[public]"))
    assert cell(changed, method).key != before.key
    assert cell(changed, method).protocol_key == before.protocol_key
    assert cell(changed, "local").key == local.key


def test_options_of_the_method_and_its_loss_are_in_the_key(write_suite: WriteSuite) -> None:
    path = write_suite()
    specs = [
        "local",
        "local-long",
        "simclr",
        "simclr:tau=0.3",
        MUSCLE,
        "fedmuscle:loss=pairwise",
        "fedmuscle:shuffle=true",
        "fedmuscle:views=own",
        "fedmuscle:loss.tau=0.3",
        "fedmuscle:loss=muscle,loss.tau=0.3,shuffle=true",
    ]
    cells = [cell(path, spec) for spec in specs]
    assert len({one.key for one in cells}) == len(specs)
    assert len({one.protocol_key for one in cells}) == 1


def test_seed_device_and_torch_are_in_the_key(write_suite: WriteSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_suite()
    first = cell(path)
    seed, device = cell(path, seed=1), cell(path, device="cuda Some GPU")
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "torch" else real(name))
    torch = cell(path)
    monkeypatch.setattr(plan, "PROTOCOL", PROTOCOL + 1)
    protocol = cell(path)
    assert len({one.key for one in (first, seed, device, torch, protocol)}) == 5
    assert seed.protocol_key == first.protocol_key
    assert len({one.protocol_key for one in (first, device, torch, protocol)}) == 4


def revised(source: str, folder: Path, kind: str, name: str, attribute: str) -> Registry:
    """The built-ins, one of them with its revision raised and nothing else changed."""
    text = Path(source).read_text()
    assert text.count("revision: ClassVar[int] = 1") == 1
    path = folder / f"{name}_revised.py"
    path.write_text(text.replace("revision: ClassVar[int] = 1", "revision: ClassVar[int] = 2"))
    spec = importlib.util.spec_from_file_location(f"revised_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    registry = discover()
    registry.entries[kind, name] = Entry(kind, name, f"{spec.name}:{attribute}", Source("x", "built-in"))
    return registry


def test_a_raised_revision_changes_the_cells_that_use_it(write_suite: WriteSuite, tmp_path: Path) -> None:
    path = write_suite()
    loss = revised(fedbench_plugins.losses.muscle.__file__, tmp_path, "loss", "muscle", "Muscle")
    method = revised(fedbench_baselines.simclr.__file__, tmp_path, "method", "simclr", "SimCLR")
    assert cell(path, registry=loss).key != cell(path).key
    assert cell(path, "fedmuscle:loss=pairwise", registry=loss).key == cell(path, "fedmuscle:loss=pairwise").key
    assert cell(path, "simclr", registry=method).key != cell(path, "simclr").key
    assert cell(path, registry=method).key == cell(path).key
    assert cell(path, registry=loss).versions["loss:muscle"] == "2"


@pytest.mark.parametrize("kind", ["user:single", "task:mlc", "model:small-convnet", "data:shapes", "metric:accuracy"])
def test_a_raised_revision_of_what_all_cells_use_changes_all(
    write_suite: WriteSuite, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = write_suite()
    before = cell(path, "local")
    real = Registry.version
    monkeypatch.setattr(
        Registry, "version", lambda self, of, name: "new" if f"{of}:{name}" == kind else real(self, of, name)
    )
    after = cell(path, "local")
    assert after.key != before.key and after.protocol_key != before.protocol_key
    assert after.versions[kind] == "new"


def test_a_changed_plugin_file_changes_the_cells_that_use_it_alone(write_suite: WriteSuite, tmp_path: Path) -> None:
    path, plugin = write_suite(), tmp_path / "mine.py"
    plugin.write_text(LOSS.format(name="mine", scale=1.0))
    first = discover([plugin])
    keys = {cell(path, "fedmuscle:loss=mine", registry=first).key}
    assert cell(path, registry=first).key == cell(path).key
    plugin.write_text(LOSS.format(name="mine", scale=1.0) + "# another byte\n")
    keys.add(cell(path, "fedmuscle:loss=mine", registry=discover([plugin])).key)
    moved = tmp_path / "elsewhere.py"
    moved.write_text(plugin.read_text())
    keys.add(cell(path, "fedmuscle:loss=mine", registry=discover([moved])).key)
    assert len(keys) == 2


def test_a_strangers_metric_changes_no_cell_that_does_not_use_it(write_suite: WriteSuite, tmp_path: Path) -> None:
    plugin = tmp_path / "metric.py"
    plugin.write_text(
        "import fedbench\nclass Mine(fedbench.Metric):\n    label = 'mine'\n    def __call__(self, s, t): return 0.0\n"
        "@fedbench.hookimpl\ndef fedbench_metrics(register): register('mine', Mine)\n"
    )
    path = write_suite()
    assert cell(path, registry=discover([plugin])).key == cell(path).key


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seeds = [0, 1]", "seeds = [1, 0, 2]"),
        (
            'methods = ["local", "fedmuscle:loss=muscle", "simclr",',
            'methods = ["simclr", "fedmuscle:loss=muscle", "local",',
        ),
        ('controls = ["local-long", "fedmuscle:shuffle=true"]', "controls = []"),
        ('title = "Three users on the shapes world"', 'title = "Something else"'),
        ('name = "tiny"', 'name = "small"'),
        ("[public]", '[tuning]\nrates = "by hand"\n\n[public]'),
        ("[public]", '[reference]\nsource = "x"\ncolumns = ["a"]\n[reference.rows]\nLocal = [1.0]\n\n[public]'),
        ("[public]", "[loss.pairwise]\ntau = 0.5\n\n[public]"),
        ("[protocol]", "[protocol]\nweight_decay = 0.01\nthreads = 1"),
        ("[data]", "\n\n# a remark\n[data]"),
    ],
)
def test_what_changes_no_number_changes_no_key(write_suite: WriteSuite, old: str, new: str) -> None:
    before = cell(write_suite())
    after = cell(write_suite((old, new)))
    assert (after.key, after.protocol_key) == (before.key, before.protocol_key)


def test_names_of_rates_and_the_place_of_the_file_do_not_count(write_suite: WriteSuite, tmp_path: Path) -> None:
    path = write_suite()
    before = cell(path)
    other = tmp_path / "deep" / "other.toml"
    other.parent.mkdir()
    other.write_text(
        path.read_text().replace('rates = "small"', 'rates = "quick"').replace("rates.small", "rates.quick")
    )
    assert cell(other).key == before.key


def test_one_cell_has_one_key_and_one_name_however_it_is_spelled(write_suite: WriteSuite) -> None:
    suite, registry = load(str(write_suite())), discover()
    spellings = [
        parse_method("fedmuscle"),
        parse_method("fedmuscle:loss=muscle"),
        parse_method("fedmuscle:shuffle=false"),
        parse_method("fedmuscle:loss.tau=0.2,loss=muscle"),
        parse_loss("muscle"),
    ]
    cells = [make_cell(suite, registry, spec, 0, "cpu") for spec in spellings]
    assert len({one.key for one in cells}) == 1
    assert {one.method.label for one in cells} == {MUSCLE}
    assert len(make_cells(suite, registry, methods=spellings, seeds=[0])) == 1


def test_the_number_one_is_one_however_it_is_written(write_suite: WriteSuite) -> None:
    path = write_suite(("[public]", "[method.simclr]\ntau = 1.0\n\n[public]"))
    assert cell(path, "simclr:tau=1").key == cell(path, "simclr").key
    assert cell(path, "simclr:tau=1").method.label == "simclr"


@pytest.mark.parametrize(
    ("table", "written", "label"),
    [
        ("", "fedmuscle", MUSCLE),
        ("", "fedmuscle:shuffle=true", "fedmuscle:loss=muscle,shuffle=true"),
        ("", "fedmuscle:loss=pairwise,loss.tau=0.5", "fedmuscle:loss=pairwise,loss.tau=0.5"),
        ("", "simclr:tau=0.2", "simclr"),
        ("", "simclr:tau=0.5", "simclr:tau=0.5"),
        ("", "local", "local"),
        ("[method.fedmuscle]\nshuffle = true", "fedmuscle", MUSCLE),
        ("[method.fedmuscle]\nshuffle = true", "fedmuscle:shuffle=false", "fedmuscle:loss=muscle,shuffle=false"),
        ('[method.fedmuscle]\nloss = "pairwise"', "fedmuscle", "fedmuscle:loss=pairwise"),
        ("[loss.muscle]\ntau = 0.5", "fedmuscle:loss.tau=0.5", MUSCLE),
        (ROWS, "fedmuscle", MUSCLE),
        (ROWS, "fedmuscle:rate=0.5", "fedmuscle:loss=muscle,rate=0.5"),
        (ROWS, "fedmuscle:loss=gramian", "fedmuscle:loss=gramian"),
        (ROWS, "fedmuscle:loss=gramian,rate=0.5", "fedmuscle:loss=gramian"),
        (ROWS, "fedmuscle:loss=gramian,rate=1.0", "fedmuscle:loss=gramian,rate=1.0"),
        ("[loss.muscle]\ntau = 0.5", "fedmuscle:loss.tau=0.2", "fedmuscle:loss=muscle,loss.tau=0.2"),
    ],
)
def test_the_name_shown_is_enough_to_make_the_cell_again(
    write_suite: WriteSuite, table: str, written: str, label: str
) -> None:
    path = write_suite(("[public]", f"{table}\n\n[public]"))
    made = cell(path, written)
    assert made.method.label == label
    again = cell(path, made.method.label)
    assert (again.key, again.method.label) == (made.key, label)


def test_a_table_of_rows_holds_for_these_rows_alone(write_suite: WriteSuite) -> None:
    path = write_suite(("[public]", f"{ROWS}\n\n[public]"))
    rates = {loss: cell(path, f"fedmuscle:loss={loss}").resolved["rate"] for loss in ("muscle", "gramian", "pairwise")}
    assert rates == {"muscle": 1.0, "gramian": 0.5, "pairwise": 1.0}
    assert cell(path, "fedmuscle:loss=gramian,shuffle=true").resolved["rate"] == 0.5


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            '[method."fedmuscle:loss=gramian"]\nrat = 0.5',
            "tiny.toml:24: unknown option of method 'fedmuscle' 'rat'.*rate",
        ),
        ('[method."fedmuscle:los=gramian"]\nrate = 0.5', "'los'.*did you mean 'loss'"),
        ('[method."fedmusle:loss=gramian"]\nrate = 0.5', "fedmusle.*fedmuscle"),
        ('[method."fedmuscle:"]\nrate = 0.5', "no options after the colon"),
    ],
)
def test_a_bad_table_of_rows_is_refused(write_suite: WriteSuite, table: str, message: str) -> None:
    path = write_suite(("[public]", f"{table}\n\n[public]"))
    with pytest.raises(UserError, match=message):
        validate(load(str(path)), discover())


def test_all_options_are_resolved_beside_the_key(write_suite: WriteSuite) -> None:
    made = cell(write_suite(("[public]", "[loss.muscle]\ntau = 0.5\n\n[public]")), "fedmuscle:loss.tau_prev=0.1")
    assert made.resolved == {"loss": "muscle", "views": "plain", "shuffle": False, "rate": 1.0}
    assert made.parts["loss"].options == {"tau": 0.5, "tau_prev": 0.1}


def test_a_method_inherits_the_options_of_another_file(write_suite: WriteSuite, tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import fedbench\nfrom fedbench_baselines.fedmuscle import FedMuscle as Base\n"
        "class Mine(Base):\n    '''FedMuscle, changed.'''\n"
        "@fedbench.hookimpl\ndef fedbench_methods(register): register('mine', Mine)\n"
    )
    made = cell(write_suite(), "mine", registry=discover([plugin]))
    assert made.method.label == "mine:loss=muscle"
    assert made.parts["loss"].options == {"tau": 0.2, "tau_prev": 0.15}


def test_a_default_that_cannot_be_read_without_importing_is_refused(write_suite: WriteSuite, tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import fedbench\nfrom fedbench_baselines.fedmuscle import FedMuscle\nUSUAL = 'muscle'\n"
        "class Mine(fedbench.Method):\n    'Mine.'\n    User, Server = FedMuscle.User, FedMuscle.Server\n"
        "    def __init__(self, *, loss: str = USUAL) -> None:\n        self.loss, self.shuffle = loss, False\n"
        "@fedbench.hookimpl\ndef fedbench_methods(register): register('mine', Mine)\n"
    )
    suite, registry = load(str(write_suite())), discover([plugin])
    with pytest.raises(UserError, match=r"'loss' of method 'mine' names no loss.*must be written as a string"):
        check_method(suite, registry, parse_method("mine"), "--method")
    check_method(suite, registry, parse_method("mine:loss=muscle"), "--method")


def labels(cells: Sequence[Cell]) -> list[str]:
    return [one.label for one in cells]


def test_local_and_then_the_first_method_of_the_first_seed_come_first(write_suite: WriteSuite) -> None:
    listed = 'methods = ["local", "fedmuscle:loss=muscle", "simclr", "local-long",'
    path = write_suite((listed, 'methods = ["simclr", "local-long", "fedmuscle:loss=muscle", "local",'))
    assert labels(make_cells(load(str(path)), discover())) == [
        f"{method} seed {seed}"
        for seed in (0, 1)
        for method in ("local", "simclr", "local-long", MUSCLE, "fedmuscle:loss=muscle,shuffle=true")
    ]


def test_planning_imports_neither_torch_nor_a_plugin(write_suite: WriteSuite) -> None:
    code = (
        "import sys\nfrom fedbench.suite import load\nfrom fedbench.discovery import discover\n"
        "from fedbench.plan import make_cells\n"
        f"cells = make_cells(load({str(write_suite())!r}), discover())\n"
        "heavy = 'torch', 'numpy', 'pandas', 'fedbench_plugins.losses.muscle', 'fedbench_baselines.fedmuscle'\n"
        "print(len(cells), [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "10 []"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('task = "mlc"', 'task = "mlx"', "unknown task 'mlx'.*'mlc'"),
        ('task = "mlc"', 'task = "mlc"\nkind = "doubel"', "unknown user 'doubel'"),
        ("pixels = 16", "pixel = 16", "'pixel'.*did you mean 'pixels'"),
        ("pixels = 16", "pixels = 1.5", "'pixels'.*expected int"),
        ('style = "filled"', "style = 3", "'style'.*expected str"),
        ('style = "filled"', 'sytle = "filled"', "'sytle'.*did you mean 'style'"),
    ],
)
def test_a_wrong_name_or_option_says_where(write_suite: WriteSuite, old: str, new: str, message: str) -> None:
    path = write_suite((old, new))
    with pytest.raises(UserError, match=message) as caught:
        validate(load(str(path)), discover())
    assert f"{path}:" in str(caught.value)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fedmuscel", "did you mean 'fedmuscle'"),
        ("fedmuscle:los=muscle", "did you mean 'loss'"),
        ("fedmuscle:loss=muscel", "did you mean 'muscle'"),
        ("fedmuscle:shuffle=1", "'shuffle'.*expected bool"),
        ("fedmuscle:loss.tua=1", "did you mean 'tau'"),
        ("fedmuscle:loss.tau=hot", "'tau'.*expected float"),
        ("fedmuscle:loss.tau=0.1", "tau_prev below tau"),
        ("fedmuscle:model.width=1", "'fedmuscle' has no option 'model.width'"),
        ("local:loss.tau=1", "'local' has no option 'loss.tau'"),
        ("simclr:tau=0", "tau"),
    ],
)
def test_a_wrong_method_is_refused_before_it_runs(write_suite: WriteSuite, method: str, message: str) -> None:
    suite = load(str(write_suite()))
    with pytest.raises(UserError, match=message) as caught:
        check_method(suite, discover(), parse_method(method), "--method")
    assert str(caught.value).startswith("--method: ")
