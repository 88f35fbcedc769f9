"""Reference boards: finished results copied out of a run's store, never edited, only superseded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.cache import atomic_file
from fedbench.errors import UserError
from fedbench.results import Damaged, Result, canonical, dump, read, read_placed, safe, seal, slug

if TYPE_CHECKING:
    from fedbench.store import Store


@dataclass(frozen=True)
class Promotion:
    """What `promote` did: files written, files moved to `superseded/`, and files that were there already."""

    written: list[Path] = field(default_factory=list)
    superseded: list[Path] = field(default_factory=list)
    unchanged: list[Path] = field(default_factory=list)


def reference_results(folder: Path) -> list[Result | Damaged]:
    """The results of a reference board, `folder` = results/SUITE/SCALE, in the order of their paths."""
    return [read_placed(path) for path in sorted(folder.glob("*/seed*.json"))]


def promote(store: Store, target_root: Path, keys: Iterable[str], *, supersede: bool = False) -> Promotion:
    """Copy finished results to the reference boards, `target_root/SUITE/SCALE/METHOD/seedK.json`.

    A board holds results of one protocol key. With `supersede`, files that the new ones replace and files of
    another protocol key move to `superseded/PROTOCOL/`, and a new file names the digest of the one it replaces.
    All is checked before anything changes; done again after an interruption, it completes.

    Raises:
        UserError: a result is not finished, boards would mix, or a file would be replaced without `supersede`.
        Damaged: a result, new or old, cannot be trusted.
    """
    boards: dict[Path, list[Result]] = {}
    for key in dict.fromkeys(keys):
        result = store.find(key)
        boards.setdefault(target_root / safe(result["suite"]) / safe(result["scale"]), []).append(result)
    for folder, results in boards.items():
        _refuse_conflicts(folder, results, supersede)
    done = Promotion()
    for folder, results in boards.items():
        for result in results:
            _place(folder, result, done)
        protocol = results[0]["protocol_key"]
        for path, old in _board(folder):
            if old["protocol_key"] != protocol:
                _copy_away(folder, path, old, done)
                path.unlink()
    return done


def _refuse_conflicts(folder: Path, results: list[Result], supersede: bool) -> None:
    protocols = sorted({result["protocol_key"] for result in results})
    if len(protocols) > 1:
        raise UserError(
            f"results of {len(protocols)} protocols cannot share a board", where=str(folder), expected=_list(protocols)
        )
    targets: dict[Path, Result] = {}
    for result in results:
        if targets.setdefault(_target(folder, result), result) is not result:
            raise UserError("two results are of the same cell", where=str(_target(folder, result)))
    for path, old in _board(folder):
        if supersede:
            continue
        if old["protocol_key"] != protocols[0]:
            raise UserError(
                f"the board is of protocol {old['protocol_key'][:12]}, the new results of {protocols[0][:12]}",
                where=str(folder),
                expected="supersede the board to replace it",
            )
        if path in targets and not _same(old, targets[path]):
            raise UserError("another result is there", where=str(path), expected="supersede it to replace it")


def _place(folder: Path, result: Result, done: Promotion) -> None:
    path = _target(folder, result)
    if path.exists():
        old = read(path)
        if _same(old, result):
            done.unchanged.append(path)
            return
        _copy_away(folder, path, old, done)
        result = seal({**result, "supersedes": old["digest"]})
    _copy(result, path)
    done.written.append(path)


def _copy_away(folder: Path, path: Path, old: Result, done: Promotion) -> None:
    target = folder / "superseded" / old["protocol_key"][:12] / path.parent.name / path.name
    if target.exists() and read(target)["digest"] != old["digest"]:
        target = target.with_name(f"{target.stem}-{old['digest'][:12]}.json")
    _copy(old, target)
    done.superseded.append(target)


def _copy(result: Result, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as handle:
            handle.write(dump(result))
    except OSError as error:
        raise UserError(f"the result cannot be written: {error.strerror}", where=str(path)) from None


def _board(folder: Path) -> list[tuple[Path, Result]]:
    found = []
    for path in sorted(folder.glob("*/seed*.json")):
        result = read_placed(path)
        if isinstance(result, Damaged):
            raise result
        found.append((path, result))
    return found


def _target(folder: Path, result: Result) -> Path:
    return folder / slug(result["method"], result["options"]) / f"seed{result['seed']}.json"


def _same(old: Result, new: Result) -> bool:
    """Whether the promoted file holds the new result; it may also name what it superseded."""
    return all(canonical(old.get(name)) == canonical(new.get(name)) for name in {*old, *new} - {"digest", "supersedes"})


def _list(keys: Iterable[str]) -> str:
    return "found " + ", ".join(key[:12] for key in keys)
