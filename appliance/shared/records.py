"""Typed records: dataclasses stored as JSON, written by one run and read by another one or by another host."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")
UNIONS = (Union, getattr(types, "UnionType", Union))
"""Union[A, B] and, from Python 3.10 on, A | B."""


class RecordError(ValueError):
    """The data is not a valid record; the text names the invalid field."""


def to_json(record: Any) -> bytes:
    """Return the content of a record's file."""
    return (json.dumps(dataclasses.asdict(record), indent=1) + "\n").encode()


def from_json(kind: type[Record], data: bytes) -> Record:
    """Return the record in a file's content. Fields unknown to ``kind`` are ignored: a newer version wrote them.

    Raises:
        RecordError: the bytes are not JSON, a field without a default is missing, or a value has another type.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"it is not JSON: {error}") from None
    return from_value(kind, value)


def from_value(kind: type[Record], value: Any, where: str = "") -> Record:
    """Return the record in a parsed JSON object; ``where`` is the object's location, for error messages.

    Raises:
        RecordError: as ``from_json``.
    """
    if not isinstance(value, dict):
        raise RecordError(f"{where or 'it'} is not an object")
    hints = _hints(kind)  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        place = f"{where}.{field.name}" if where else field.name
        if field.name in value:
            found[field.name] = _checked(hints[field.name], value[field.name], place)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{place} is missing")
    return kind(**found)


def check_value(hint: Any, value: Any, where: str = "") -> Any:
    """Return parsed JSON as ``hint``: a record, a TypedDict (other keys are kept), or a list or mapping of them.

    Raises:
        RecordError: it is not of this type; the text names the place.
    """
    return _checked(hint, value, where)


@functools.lru_cache(maxsize=None)
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _checked(hint: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return value
    if hasattr(hint, "__total__"):
        return _checked_keys(hint, value, where)
    if dataclasses.is_dataclass(hint):
        return from_value(hint, value, where)  # type: ignore[arg-type]
    if origin in UNIONS:
        return _checked_any(inner, value, where)
    if origin in (list, tuple, Sequence) and isinstance(value, list):
        items: list[Any] = [_checked(inner[0], one, f"{where}[{at}]") for at, one in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _checked(inner[1], one, f"{where}.{key}") for key, one in value.items()}
    if hint is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:  # not NaN
        return float(value)
    # A larger number than any that we write: it could not be calculated with.
    if hint is int and type(value) is int and value.bit_length() > 63:
        raise RecordError(f"{where or 'it'} is out of range")
    if origin is None and type(value) is hint and hint is not float:
        return value
    raise RecordError(f"{where or 'it'} is not a {(origin or hint).__name__}")


def _checked_any(kinds: Sequence[Any], value: Any, where: str) -> Any:
    """Return the value as the first type that it has; None only if that is one of them."""
    if value is None and type(None) in kinds:
        return None
    *others, last = [kind for kind in kinds if kind is not type(None)]
    for kind in others:
        try:
            return _checked(kind, value, where)
        except RecordError:
            continue
    return _checked(last, value, where)


def _checked_keys(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise RecordError(f"{where or 'it'} is not an object")
    found = dict(value)
    for key, (hint, needed) in _keys(kind).items():
        place = f"{where}.{key}" if where else key
        if key in value:
            found[key] = _checked(hint, value[key], place)
        elif needed:
            raise RecordError(f"{place} is missing")
    return found


@functools.lru_cache(maxsize=None)
def _keys(kind: Any) -> Mapping[str, tuple[Any, bool]]:
    """Return the type of each key of a TypedDict, and whether it must be there."""
    # Python does not know which keys are required if their types are text, as in modules with `annotations`.
    marked = get_type_hints(kind, include_extras=True)
    return {
        key: (hint, kind.__total__ and not str(get_origin(marked[key])).endswith("NotRequired"))
        for key, hint in _hints(kind).items()
    }
