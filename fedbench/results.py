"""What a result file holds: its fields, its digest, and the check that every reader of one makes."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbench import provenance
from fedbench.errors import UserError

SCHEMA = 1
Result = dict[str, Any]

_PLACE = re.compile(r"seed(\d+)(?:-[0-9a-f]+)?(?:\.json)?")
_PLAIN_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]*")
_PLAIN_KEY = re.compile(r"[a-z][a-z0-9_.]*")
_PLAIN_TEXT = re.compile(r"(?!(?:true|false|null)$)[a-z][a-z0-9_.]*")


class Damaged(UserError):
    """A result file that cannot be trusted: cut, edited, of another schema, or in another cell's place."""

    def __init__(self, path: Path, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(f"damaged result: {why}", where=str(path), expected="set it aside and run the cell again")

    def __reduce__(self) -> tuple[object, ...]:
        return Damaged, (self.path, self.why)

    @property
    def seed(self) -> int | None:
        """The seed that the file's place says it is of, None where it says nothing."""
        found = _PLACE.fullmatch(self._place.name)
        return int(found[1]) if found else None

    @property
    def slug(self) -> str:
        """The folder of the method that the file's place says it is of."""
        return self._place.parent.name

    @property
    def _place(self) -> Path:
        return self.path.parent if self.path.name == "result.json" else self.path


def safe(name: str) -> str:
    """A name as a single file name: others than letters, digits, `_ . -` become `_`, and a hash keeps it distinct."""
    if _PLAIN_NAME.fullmatch(name) and len(name) <= 80:
        return name
    return _hashed(name, name)


def slug(method: str, options: Mapping[str, Any]) -> str:
    """The folder name of a method with its options, e.g. `fedmuscle-loss=gramian`; two methods never share one."""
    plain = bool(_PLAIN_NAME.fullmatch(method))
    parts = [method]
    for key in sorted(options):
        value = options[key]
        plain = plain and bool(_PLAIN_KEY.fullmatch(key))
        if isinstance(value, str):
            plain = plain and bool(_PLAIN_TEXT.fullmatch(value))
        else:
            plain = plain and isinstance(value, bool | int | float)
        parts.append(f"{key}={value if isinstance(value, str) else canonical(value)}")
    text = "-".join(parts)
    return text if plain and len(text) <= 80 else _hashed(text, canonical([method, options]))


def identity(method: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """What tells the rows of a board apart: the method and its options as canonical JSON."""
    return method, canonical(options)


def plain(value: Any, place: str = "result") -> Any:
    """The value as what JSON can hold: tuples become lists, keys text, numbers of numpy built-in ones, NaN None.

    Raises:
        TypeError: a value that no JSON stands for; names its place.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{place} is a {type(value).__name__}, which a result file cannot hold")


def canonical(value: Any) -> str:
    """The one JSON text of a value: keys sorted, no blanks, no NaN."""
    return _text(plain(value))


def seal(result: Mapping[str, Any]) -> Result:
    """The result as plain JSON values, with `schema` and the `digest` of everything else."""
    content: Result = {"schema": SCHEMA, **plain({key: value for key, value in result.items() if key != "digest"})}
    return {**content, "digest": _sha256(canonical(content))}


def dump(result: Mapping[str, Any]) -> bytes:
    """A sealed result as the bytes of its file."""
    return (json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read(path: Path, expect: Mapping[str, Any] | None = None) -> Result:
    """The result in a file, checked.

    Args:
        path: the file.
        expect: values that fields must have, e.g. the key of the cell.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: it cannot be read, is no JSON, lacks a field, or does not match its digest or `expect`.
    """
    try:
        text = path.read_bytes().decode("utf-8")
        result = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(path, f"it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Damaged(path, f"not UTF-8 text at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"not valid JSON: {error}" if text.strip() else "the file is empty") from None
    if why := _fault(result):
        raise Damaged(path, why)
    for field, wanted in (expect or {}).items():
        if canonical(result[field]) != canonical(wanted):
            raise Damaged(path, f"its {field} is {_short(result[field])}, the place is for {_short(wanted)}")
    return result  # type: ignore[no-any-return]


def read_placed(path: Path) -> Result | Damaged:
    """The result at a path, checked against what its folders say."""
    try:
        result = read(path)
    except Damaged as damaged:
        return damaged
    except FileNotFoundError:
        return Damaged(path, "it vanished while it was read")
    place = Damaged(path, "")
    if (slug(result["method"], result["options"]), result["seed"]) != (place.slug, place.seed):
        return Damaged(path, f"it is of {result['method']} seed {result['seed']}, its place is another cell's")
    if path.name == "result.json" and not path.parent.name.endswith(f"-{result['key'][:12]}"):
        return Damaged(path, f"its key is {result['key'][:12]}, its place is another cell's")
    return result


def _fault(result: Any) -> str | None:
    """Why this is not a result, None where it is one."""
    if not isinstance(result, dict):
        return "not a JSON object"
    if type(result.get("schema")) is not int or result["schema"] != SCHEMA:
        return f"its schema is {_short(result.get('schema'))}, this fedbench reads {SCHEMA}"
    done = result.get("status") == "done"
    tables: list[tuple[str, Any, Mapping[str, str]]] = [("", result, _RESULT)]
    if why := _unfit(tables):
        return why
    tables = [(f"users[{i}].", row, _USER) for i, row in enumerate(result["users"])]
    tables += [(f"rounds[{i}].", row, _ROUND) for i, row in enumerate(result["rounds"])]
    tables += [("bytes.", result["bytes"], _BYTES), ("seconds.", result["seconds"], _SECONDS)] if done else []
    tables += [("error.", result["error"], _ERROR)] if not done else []
    if why := _unfit(tables) or provenance.fault(result["provenance"]):
        return why
    if done == (result["error"] is not None):
        return "its error does not fit its status"
    if done and not result["users"]:
        return "it is done but has no users"
    rows = [(row["name"], row["task"], row["metric"]) for row in result["users"]]
    if len(set(rows)) < len(rows):
        return "it scores a user's task twice"
    try:
        digest = _sha256(_text({key: value for key, value in result.items() if key != "digest"}))
    except RecursionError:
        return "it is nested too deeply"
    except ValueError:
        return "it holds a number or a character out of range"
    return None if digest == result["digest"] else "its content does not match its digest (edited or cut)"


def _unfit(tables: list[tuple[str, Any, Mapping[str, str]]]) -> str | None:
    for place, table, fields in tables:
        if not isinstance(table, dict):
            return f"{place.rstrip('.')} is {_short(table)}, expected an object"
        for field, kind in fields.items():
            optional = kind.startswith("?")
            if field not in table:
                if not optional:
                    return f"the field {place}{field} is missing"
            elif not _KINDS[kind.lstrip("?")](table[field]):
                return f"{place}{field} is {_short(table[field])}, expected {kind.lstrip('?')}"
    return None


_MOST = 1e100


def _number(value: Any) -> bool:
    """Finite, and far enough from the largest float that sums and ratios of a board stay finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "a name": lambda value: isinstance(value, str) and bool(value),
    "true or false": lambda value: isinstance(value, bool),
    "an integer from 0": lambda value: type(value) is int and value >= 0,
    "a number or null": lambda value: value is None or _number(value),
    "an object": lambda value: isinstance(value, dict),
    "an object or null": lambda value: value is None or isinstance(value, dict),
    "an object of texts": lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
    "an object of numbers": lambda value: (
        isinstance(value, dict) and all(item is None or _number(item) for item in value.values())
    ),
    "a list": lambda value: isinstance(value, list),
    "64 hexadecimal digits": lambda value: isinstance(value, str) and bool(re.fullmatch(r"[0-9a-f]{64}", value)),
    '"done", "failed" or "not applicable"': lambda value: value in ("done", "failed", "not applicable"),
}
_RESULT = {
    "suite": "a name",
    "scale": "a name",
    "method": "a name",
    "options": "an object",
    "resolved": "an object",
    "seed": "an integer from 0",
    "key": "64 hexadecimal digits",
    "protocol_key": "64 hexadecimal digits",
    "versions": "an object of texts",
    "status": '"done", "failed" or "not applicable"',
    "error": "an object or null",
    "users": "a list",
    "rounds": "a list",
    "bytes": "an object",
    "seconds": "an object",
    "provenance": "an object",
    "touched": "?a list",
    "reference": "?true or false",
    "supersedes": "?64 hexadecimal digits",
    "digest": "64 hexadecimal digits",
}
_USER = {
    "name": "a name",
    "task": "a name",
    "metric": "a name",
    "higher_is_better": "true or false",
    "model": "?text",
    "test": "a number or null",
    "validation": "a number or null",
    "subsets": "?an object of numbers",
    "bytes_up": "?a number or null",
    "bytes_down": "?a number or null",
}
_ROUND = {"round": "an integer from 0", "validation": "?an object of numbers", "train_loss": "?an object of numbers"}
_BYTES = dict.fromkeys(("up", "down", "tensor_up", "tensor_down", "paper"), "a number or null")
_SECONDS = {"total": "a number or null"}
_ERROR = {"kind": "text", "message": "text"}


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hashed(text: str, of: str) -> str:
    return re.sub(r"[^A-Za-z0-9_=.-]", "_", text)[:60].lstrip(".-") + "-" + _sha256(of)[:8]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
