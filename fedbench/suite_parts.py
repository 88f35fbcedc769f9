"""The sections of a suite, each checked for structure: keys, types, ranges and what has to fit together."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedbench.errors import UserError, unknown
from fedbench.interfaces import Protocol, UserSpec
from fedbench.specs import MethodSpec, parse_method
from fedbench.suite_source import BASE_SCALE, PROTOCOL_KEYS, Document
from fedbench.suite_table import MOST, Table, finite, shown

SECTIONS = (
    "name",
    "title",
    "question",
    "seeds",
    "methods",
    "controls",
    "plugins",
    "protocol",
    "data",
    "public",
    "rates",
    "user",
    "method",
    "loss",
    "reference",
    "tuning",
)
"""The keys of a suite, once `extends` and `scale` are resolved."""
NOT_IN_A_SCALE = ("name", "extends", "scale")
PLAIN_WORD = r"[a-z0-9][a-z0-9-]*"
PLAIN_WORD_EXPECTED = "lower-case letters, digits and '-'"
LOCAL = MethodSpec("local")
"""The method that every suite has: Δ% is measured against it."""

SEEDS_BELOW = 2**32
_USER_KEYS = ("name", "kind", "task", "model", "train", "rates", "data")
_USER_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"
_LEAST = {"batch": 2}
_MOST = {"threads": 1024, "dimension": 65536}
_CHOICES = {
    "head": ("features", "embedding"),
    "projection": ("linear", "mlp"),
    "schedule": ("constant", "cosine", "restarts"),
    "on_failure": ("stop", "skip"),
}


def check_outline(document: Document) -> None:
    """Refuse unknown sections, also in the scales, before scales are merged.

    Raises:
        UserError: a section is unknown, or `scale` holds something else than scales.
    """
    root = Table(document)
    _only_sections(root, (*SECTIONS, "extends", "scale"))
    scales = root.table("scale", title="[scale] ")
    for name in scales.values:
        if name == BASE_SCALE:
            expected = "its tables stand outside [scale.NAME]"
            raise UserError(f"'{name}' is the base scale", where=scales.where(name), expected=expected)
        if not re.fullmatch(PLAIN_WORD, name):
            raise UserError(f"a scale is named '{name}'", where=scales.where(name), expected=PLAIN_WORD_EXPECTED)
        scale = scales.table(name, title=f"[scale.{name}] ")
        for key in NOT_IN_A_SCALE:
            if key in scale.values:
                raise UserError(f"scale.{name} has its own {key}", where=scale.where(key), expected="none in a scale")
        _only_sections(scale, (*(key for key in SECTIONS if key not in NOT_IN_A_SCALE), "planned"))


def _only_sections(table: Table, known: tuple[str, ...]) -> None:
    for key in table.values:
        if key in PROTOCOL_KEYS:
            expected = f"did you mean 'protocol.{key}'?"
            raise UserError(f"unknown key '{key}'", where=table.where(key), expected=expected)
    table.only(known)


def protocol_of(root: Table) -> Protocol:
    """`[protocol]`: every field of `Protocol`, its type taken from its default."""
    table = root.table("protocol", title="[protocol] ")
    table.only(PROTOCOL_KEYS)
    values: dict[str, Any] = {}
    for item in fields(Protocol):
        if isinstance(item.default, int):
            values[item.name] = table.whole(
                item.name, least=_LEAST.get(item.name, 1), most=_MOST.get(item.name, MOST), default=item.default
            )
        elif isinstance(item.default, float):
            values[item.name] = table.number(item.name, positive=False, default=item.default)
        else:
            values[item.name] = table.choice(item.name, _CHOICES[item.name], default=str(item.default))
    return Protocol(**values)


def users_of(root: Table) -> tuple[UserSpec, ...]:
    """`[[user]]` tables, with the rates that they name."""
    rates = _rates_of(root)
    written = root.values.get("user", [])
    if not isinstance(written, list):
        raise UserError(f"user is {shown(written)}", where=root.where("user"), expected="[[user]], one for each user")
    if not written:
        raise UserError("the suite has no users", where=root.where("user"), expected="[[user]], one for each user")
    users: list[UserSpec] = []
    for index in range(len(written)):
        user = _user_of(root, index, rates)
        if user.name in (other.name for other in users):
            raise UserError(f"two users are named '{user.name}'", where=root.where("user", index, "name"))
        users.append(user)
    return tuple(users)


def _rates_of(root: Table) -> dict[str, tuple[float, float, float]]:
    table = root.table("rates")
    rates = {}
    for name in table.values:
        rate = table.table(name, title=f"[rates.{name}] ")
        rate.only(("fit", "align", "projection"))
        align = rate.number("align", positive=True)
        projection = rate.number("projection", positive=True, default=align)
        rates[name] = (rate.number("fit", positive=True), align, projection)
    return rates


def _user_of(root: Table, index: int, rates: dict[str, tuple[float, float, float]]) -> UserSpec:
    name = root.item("user", index).text("name", pattern=_USER_NAME, expected="letters, digits, '-' and '_'")
    table = root.item("user", index, label=f"user.{name}", title="[[user]] ")
    table.only(_USER_KEYS)
    kind = table.text("kind", default=UserSpec.kind, expected="the name of a kind of user")
    task = table.text("task", expected="the name of a task")
    model, model_options = _model_of(table)
    if "train" not in table.values:
        raise UserError(f"user '{name}' has no data: train is missing", where=table.where(), expected="train = 400")
    train = table.whole("train", least=1)
    rate = table.text("rates", expected="one of " + (", ".join(rates) or "[rates.NAME], of which there is none"))
    if rate not in rates:
        raise unknown("rates", rate, rates, where=table.where("rates"))
    fit_rate, align_rate, projection_rate = rates[rate]
    data = table.table("data").options()
    return UserSpec(name, task, model, train, fit_rate, align_rate, projection_rate, kind, model_options, data)


def _model_of(user: Table) -> tuple[str, dict[str, Any]]:
    expected = "the name of a model, or a table with its name and options"
    if not isinstance(user.values.get("model"), dict):
        return user.text("model", expected=expected), {}
    table = user.table("model")
    return table.text("name", expected="the name of a model"), table.options(without=("name",))


def seeds_of(root: Table) -> tuple[int, ...]:
    """`seeds`: distinct, none negative, at least one."""
    seeds = root.wholes("seeds")
    if not seeds:
        raise UserError("the suite has no seeds", where=root.where("seeds"), expected="e.g. seeds = [0, 1, 2]")
    for index, seed in enumerate(seeds):
        if not 0 <= seed < SEEDS_BELOW:
            raise root.wrong("seeds", "seeds of at least 0, below 2^32", index)
        if seed in seeds[:index]:
            raise UserError(f"the seed {seed} stands twice", where=root.where("seeds", index))
    return tuple(seeds)


def methods_of(root: Table, key: str) -> tuple[MethodSpec, ...]:
    """`methods` or `controls`: specs, each once however it is spelled."""
    texts = root.texts(key) if key == "methods" else root.texts(key, default=[])
    methods: list[MethodSpec] = []
    for index, text in enumerate(texts):
        method = parse_method(text, where=root.where(key, index))
        if method in methods:
            raise UserError(f"{key} has '{method}' twice", where=root.where(key, index))
        methods.append(method)
    return tuple(methods)


def check_methods(root: Table, methods: tuple[MethodSpec, ...], controls: tuple[MethodSpec, ...]) -> None:
    """Refuse a suite without plain `local`, and controls that are not among the methods.

    Raises:
        UserError: as said.
    """
    if LOCAL not in methods:
        expected = "Δ% is measured against local training"
        raise UserError(f"methods has no '{LOCAL}'", where=root.where("methods"), expected=expected)
    for index, control in enumerate(controls):
        if control not in methods:
            labels = [method.label for method in methods]
            raise unknown("method among the controls", control.label, labels, where=root.where("controls", index))


def plugins_of(root: Table) -> tuple[Path, ...]:
    """`plugins`: existing files."""
    paths = [Path(text) for text in root.texts("plugins", default=[])]
    for index, path in enumerate(paths):
        if not path.is_file():
            expected = "a path relative to the suite's file"
            raise UserError(f"there is no plugin file '{path}'", where=root.where("plugins", index), expected=expected)
    return tuple(paths)


def options_of(root: Table, key: str) -> dict[str, dict[str, Any]]:
    """`[method.NAME]`, `[loss.NAME]`, or `[method."NAME:option=value"]` of some rows: options by name."""
    tables = root.table(key)
    options: dict[str, dict[str, Any]] = {}
    for name in tables.values:
        table = tables.table(name)
        said = parse_method(name, where=table.where()).options if key == "method" else {}
        options[name] = table.options()
        for option in options[name]:
            if option in said:
                what = f"{table.label(option)} stands in the table's own name already"
                raise UserError(what, where=table.where(option), expected="what the rows of that name have besides")
            if "." in option:
                what = f"{table.label(option)} is no option"
                raise UserError(what, where=table.where(option), expected="options of a loss stand in [loss.NAME]")
    return options


def reference_of(root: Table) -> dict[str, Any]:
    """`[reference]`: published numbers to show beside the board, as many in a row as there are columns."""
    table = root.table("reference", title="[reference] ")
    if not table.values:
        return {}
    table.only(("source", "columns", "rows"))
    source, columns = table.text("source"), table.texts("columns")
    rows = table.table("rows")
    for name, row in rows.values.items():
        if not isinstance(row, list) or not all(_cell(cell) for cell in row):
            raise rows.wrong(name, "a list of numbers or text")
        if len(row) != len(columns):
            what = f"{rows.label(name)} has {len(row)} values for {len(columns)} columns"
            raise UserError(what, where=rows.where(name))
    return {"source": source, "columns": columns, "rows": {name: list(row) for name, row in rows.values.items()}}


def _cell(value: Any) -> bool:
    return isinstance(value, str) or finite(value) is not None


def tuning_of(root: Table) -> dict[str, str]:
    """`[tuning]`: how what was tuned, in words."""
    table = root.table("tuning")
    return {name: table.text(name) for name in table.values}


def check_fit(root: Table, protocol: Protocol, users: int, public_size: int) -> None:
    """Refuse numbers that cannot go together.

    Raises:
        UserError: M others need M + 1 users, a batch needs as many public rows, a quorum as many users.
    """
    if protocol.others >= users:
        raise UserError(
            f"protocol.others is {protocol.others}, but there are {users} users",
            where=root.where("protocol", "others"),
            expected=f"at most {users - 1}: a user is none of its own others" if users > 1 else "at least 2 users",
        )
    if protocol.batch > public_size:
        raise UserError(
            f"protocol.batch is {protocol.batch}, but public.size is {public_size}",
            where=root.where("protocol", "batch"),
            expected="a batch of distinct public items",
        )
    if protocol.quorum > users:
        raise UserError(
            f"protocol.quorum is {protocol.quorum}, but there are {users} users",
            where=root.where("protocol", "quorum"),
            expected=f"at most {users}",
        )
