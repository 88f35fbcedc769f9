"""`fedbench list` and `fedbench plugins`: what is registered and by whom, read without importing it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fedbench.discovery import discover
from fedbench.interfaces import KINDS
from fedbench.registry import Registry


def show_list(kind: str | None, files: Sequence[Path], strict: bool) -> None:
    """Print name, source and summary of everything of one kind, or of every kind."""
    registry = discover(files, strict=strict)
    for shown in [kind] if kind else KINDS:
        names = registry.names(shown)
        click.secho(f"{shown} ({len(names)})", bold=True)
        width = max((len(name) for name in names), default=0)
        for name in names:
            entry = registry.entry(shown, name)
            click.echo(f"  {name:<{width}}  {registry.declared(shown, name).summary}  [{entry.source}]")
    _warn(registry)


def show_plugins(files: Sequence[Path], trace: bool, strict: bool) -> int:
    """Print every plugin and what it registers, then the broken ones; the exit code is 1 where one is broken."""
    registry = discover(files, strict=strict)
    for source in registry.sources:
        click.secho(
            f"{source.name} {source.version}".strip() + f"  [{source.door}{' ' + source.path if source.path else ''}]",
            bold=True,
        )
        for kind in KINDS:
            names = sorted(entry.name for entry in registry.of_source(source) if entry.kind == kind)
            if names:
                click.echo(f"  {kind}: {', '.join(names)}")
        if watching := [name for owner, name in registry.observer_names if owner == source]:
            click.echo(f"  observer: {', '.join(watching)}")
    for failure in registry.failures:
        click.secho(f"{failure.source}: failed to load: {failure.message}", fg="red")
        if trace:
            click.echo(failure.trace)
    return 1 if registry.failures else 0


def _warn(registry: Registry) -> None:
    for failure in registry.failures:
        click.echo(f"warning: {failure.source} failed to load: {failure.message} (see fedbench plugins)", err=True)
