"""A suite: what one leaderboard compares, read from TOML, checked, and ready to be planned.

Structure is checked without any plugin by `load`; `check_names` then checks what only plugins know.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedbench import suite_parts as parts
from fedbench.errors import UserError
from fedbench.interfaces import Protocol, UserSpec
from fedbench.specs import MethodSpec
from fedbench.suite_names import Registry, check_names
from fedbench.suite_set import overridden
from fedbench.suite_source import BASE_SCALE, DATA_KEYS, Document, at_scale, find, read, scales_of, shipped
from fedbench.suite_table import Table
from fedbench.toml_lines import show

__all__ = ["BASE_SCALE", "Registry", "Suite", "check_names", "load", "scales", "shipped"]

_WRITTEN = ("protocol", "data", "public", "rates", "user", "method", "loss")


@dataclass(frozen=True)
class Suite:
    """One suite at one scale.

    Args:
        name: a plain word; names the board.
        title: one line; the name where none is written.
        question: what the suite answers; may be empty.
        path: its file, or None for one that was not read from a file.
        scale: `mini` or the name of a `[scale.NAME]` table.
        seeds: distinct, at least 0.
        methods: the rows of the board, plain `local` among them.
        controls: those of the methods that are controls.
        plugins: absolute paths of plugin files.
        protocol: how every method trains.
        data_name, data_options: the world, and the options written for it.
        validation, test: items a task.
        train_views: fixed views of each private training item.
        public_size, public_views: items of the public set, and fixed views of each.
        users: in the order of the file.
        method_options, loss_options: this suite's option values, by name of the plugin.
        reference: published rows: `source`, `columns`, `rows`; empty where none are written.
        tuning: how what was tuned, in words; a key that is the label of one of the methods says that this row was.
        planned: what this scale still lacks; None for one that can run.
        missing: names unknown to the registry, which only a planned scale may have (see `check_names`).
        written: the tables that can change a number, as merged, before defaults.
        lines: where each key is written.
    """

    name: str
    title: str
    question: str
    path: Path | None
    scale: str
    seeds: tuple[int, ...]
    methods: tuple[MethodSpec, ...]
    controls: tuple[MethodSpec, ...]
    plugins: tuple[Path, ...]
    protocol: Protocol
    data_name: str
    data_options: Mapping[str, Any]
    validation: int
    test: int
    train_views: int
    public_size: int
    public_views: int
    users: tuple[UserSpec, ...]
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loss_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reference: Mapping[str, Any] = field(default_factory=dict)
    tuning: Mapping[str, str] = field(default_factory=dict)
    planned: str | None = None
    missing: tuple[str, ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """Where a key such as `user[2].model` is written, or else the nearest table around it, or else the file."""
        while key and key not in self.lines:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return self.lines.get(key, str(self.path or self.name))

    def identity(self) -> dict[str, Any]:
        """What changes the numbers of every cell of this suite, as plain values, however it was spelled.

        The core's own fields come with their defaults filled in, rates by value; options of plugins as written.
        Not in it: seeds, methods and the option tables of methods and losses, which belong to single cells.
        """
        return {
            "protocol": asdict(self.protocol),
            "data": {
                "name": self.data_name,
                "options": copy.deepcopy(dict(self.data_options)),
                "validation": self.validation,
                "views": self.train_views,
                "test": self.test,
            },
            "public": {"size": self.public_size, "views": self.public_views},
            "users": [asdict(user) for user in self.users],
        }

    def with_method(self, method: MethodSpec, *, where: str) -> Suite:
        """This suite with one more row, unless it has it; `where` is what messages call its place (`--method ...`)."""
        if method in self.methods:
            return self
        lines = {**self.lines, f"methods[{len(self.methods)}]": where}
        return replace(self, methods=(*self.methods, method), lines=lines)


def load(path_or_name: str, *, scale: str = BASE_SCALE, overrides: Sequence[str] = ()) -> Suite:
    """Read and check a suite; every scale of the file is checked, one is returned.

    Args:
        path_or_name: a file, or else the name of a shipped suite.
        scale: the scale to return.
        overrides: `--set` texts, `KEY=VALUE`, applied to that scale in order.

    Raises:
        UserError: whatever is wrong with the suite's structure, with its file and line.
    """
    document = read(find(path_or_name))
    parts.check_outline(document)
    chosen = at_scale(document, scale)
    suite = _suite(chosen, scale)
    for other in scales_of(document):
        if other != scale:
            _check_other(document, other)
    for text in overrides:
        chosen = overridden(chosen, text)
    return _suite(chosen, scale) if overrides else suite


def scales(path_or_name: str) -> list[str]:
    """The scales of a suite, `mini` first.

    Raises:
        UserError: the file cannot be read, or its outline is wrong.
    """
    document = read(find(path_or_name))
    parts.check_outline(document)
    return scales_of(document)


def _check_other(document: Document, scale: str) -> None:
    try:
        _suite(at_scale(document, scale), scale)
    except UserError as error:
        what = f"at scale '{scale}': {error.what}"
        raise UserError(what, where=error.where, expected=error.expected) from None


def _suite(document: Document, scale: str) -> Suite:
    root = Table(document)
    name = root.text("name", pattern=parts.PLAIN_WORD, expected=parts.PLAIN_WORD_EXPECTED)
    data = root.table("data")
    public = root.table("public", title="[public] ")
    public.only(("size", "views"))
    protocol, users = parts.protocol_of(root), parts.users_of(root)
    methods, controls = parts.methods_of(root, "methods"), parts.methods_of(root, "controls")
    parts.check_methods(root, methods, controls)
    suite = Suite(
        name=name,
        title=root.text("title", default=name, pattern=r"[^\n]+", expected="one line of text"),
        question=root.text("question", default=""),
        path=Path(document.file).absolute(),
        scale=scale,
        seeds=parts.seeds_of(root),
        methods=methods,
        controls=controls,
        plugins=parts.plugins_of(root),
        protocol=protocol,
        data_name=data.text("name", expected="the name of a data plugin"),
        data_options=data.options(without=DATA_KEYS),
        validation=data.whole("validation", least=1),
        test=data.whole("test", least=1),
        train_views=data.whole("views", least=1, default=1),
        public_size=public.whole("size", least=1),
        public_views=public.whole("views", least=1),
        users=users,
        method_options=parts.options_of(root, "method"),
        loss_options=parts.options_of(root, "loss"),
        reference=parts.reference_of(root),
        tuning=parts.tuning_of(root),
        planned=root.text("planned") if "planned" in root.values else None,
        written=copy.deepcopy({key: root.values[key] for key in _WRITTEN if key in root.values}),
        lines={"": document.file} | {show(key): where for key, where in document.lines.items()},
    )
    parts.check_fit(root, protocol, len(users), suite.public_size)
    return suite
