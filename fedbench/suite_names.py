"""Checking a suite against the plugins that there are: names, and the options that only plugins know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from fedbench.errors import unknown
from fedbench.specs import parse_method
from fedbench.toml_lines import show

if TYPE_CHECKING:
    from fedbench.specs import MethodSpec
    from fedbench.suite import Suite


class Registry(Protocol):
    """What is asked of the registry of plugins."""

    def names(self, kind: str) -> Iterable[str]:
        """The names known of a kind."""

    def check_options(self, kind: str, name: str, options: Mapping[str, Any], where: str) -> None:
        """Raise `UserError` for an option that the plugin does not have, or whose type is wrong."""


def check_names(suite: Suite, registry: Registry) -> Suite:
    """Check every plugin that a suite names, with the options it gives them.

    Returns:
        The suite; at a planned scale with the unknown names in `missing`.

    Raises:
        UserError: an unknown name where the scale is not planned, or an option that its plugin refuses.
    """
    checker = _Checker(suite, registry)
    checker.data()
    checker.users()
    checker.losses()
    checker.methods()
    return replace(suite, missing=tuple(dict.fromkeys(checker.missing)))


class _Checker:
    def __init__(self, suite: Suite, registry: Registry) -> None:
        self._suite, self._registry = suite, registry
        self.missing: list[str] = []

    def data(self) -> None:
        options = dict(self._suite.data_options)
        self._check("data", self._suite.data_name, options, name_at="data.name", options_at="data")

    def users(self) -> None:
        for index, user in enumerate(self._suite.users):
            at = f"user[{index}]"
            self._known("user", user.kind, f"{at}.kind")
            self._known("task", user.task, f"{at}.task")
            name_at = f"{at}.model.name" if f"{at}.model.name" in self._suite.lines else f"{at}.model"
            self._check("model", user.model, user.model_options, name_at=name_at, options_at=f"{at}.model")

    def methods(self) -> None:
        used = set()
        for index, method in enumerate(self._suite.methods):
            at = f"methods[{index}]"
            table = self._suite.method_options.get(method.name, {})
            own = _plain(method)
            # A row of no options of its own can only be wrong in the table.
            options_at = at if own or not table else show(("method", method.name))
            self._check("method", method.name, {**table, **own}, name_at=at, options_at=options_at)
            # A method's default loss is the method's affair: without a named one, its options wait until it is known.
            loss = {**table, **own}.get("loss")
            if isinstance(loss, str):
                self._loss_of_row(method, loss, at if "loss" in own else f"{show(('method', method.name))}.loss", at)
            used |= {method.name}
        for name, options in self._suite.method_options.items():
            rows = parse_method(name)
            if rows.options or name not in used:
                at = show(("method", name))
                self._check("method", rows.name, {**_plain(rows), **options}, name_at=at, options_at=at)

    def losses(self) -> None:
        for name, options in self._suite.loss_options.items():
            at = show(("loss", name))
            self._check("loss", name, options, name_at=at, options_at=at)

    def _loss_of_row(self, method: MethodSpec, loss: str, name_at: str, options_at: str) -> None:
        prefix = "loss."
        own = {key.removeprefix(prefix): value for key, value in method.options.items() if key.startswith(prefix)}
        table = self._suite.loss_options.get(loss, {})
        self._check("loss", loss, {**table, **own}, name_at=name_at, options_at=options_at)

    def _check(self, kind: str, name: str, options: Mapping[str, Any], *, name_at: str, options_at: str) -> None:
        if self._known(kind, name, name_at):
            self._registry.check_options(kind, name, options, self._suite.where(options_at))

    def _known(self, kind: str, name: str, at: str) -> bool:
        names = list(self._registry.names(kind))
        if name in names:
            return True
        if self._suite.planned is None:
            where = self._suite.where(at)
            # The registry's own error comes first: it knows which plugins failed to load.
            self._registry.check_options(kind, name, {}, where)
            raise unknown(kind, name, names, where=where)
        self.missing.append(f"{kind} '{name}'")
        return False


def _plain(method: MethodSpec) -> dict[str, Any]:
    """The method's own options, without those of its parts."""
    return {key: value for key, value in method.options.items() if "." not in key}
