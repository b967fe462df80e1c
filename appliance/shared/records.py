"""Typed records: dataclasses stored as JSON, written by one run and read by another one or by another host."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import types
from collections.abc import Mapping
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


@functools.lru_cache(maxsize=None)
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _checked(hint: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return from_value(hint, value, where)  # type: ignore[arg-type]
    if origin in UNIONS:  # Optional
        return None if value is None else _checked(inner[0], value, where)
    if origin in (list, tuple) and isinstance(value, list):
        items: list[Any] = [_checked(inner[0], one, f"{where}[{at}]") for at, one in enumerate(value)]
        return items if origin is list else tuple(items)
    if origin is dict and isinstance(value, dict):
        return {key: _checked(inner[1], one, f"{where}.{key}") for key, one in value.items()}
    if hint is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:  # not NaN
        return float(value)
    if origin is None and type(value) is hint and hint is not float:
        return value
    raise RecordError(f"{where} is not a {(origin or hint).__name__}")
