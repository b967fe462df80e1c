"""Introspection of pydantic models: the field at a place, and the known keys there."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from appliance.config.document import Place


def describe(model: type[BaseModel], place: Place) -> str:
    """Return the description of the setting at ``place``, or of the nearest enclosing one that has a description."""
    while place:
        info = _field(model, place)
        if info and info.description:
            return info.description
        place = place[:-1]
    return ""


def known_keys(model: type[BaseModel], place: Place) -> list[str]:
    """Return the known keys of the mapping at ``place``."""
    return [key for kind in _kinds_at(model, place) for key, _ in _fields(kind)]


def _field(model: type[BaseModel], place: Place) -> FieldInfo | None:
    for kind in _kinds_at(model, place[:-1]):
        for key, info in _fields(kind):
            if key == place[-1]:
                return info
    return None


def _fields(kind: Any) -> list[tuple[str, FieldInfo]]:
    """Return the keys of a model with their fields; none if ``kind`` is not a model."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return []
    return [(info.alias or name, info) for name, info in kind.model_fields.items()]


def _kinds_at(model: type[BaseModel], place: Place) -> list[Any]:
    """Return the types that a value at ``place`` may have."""
    kinds: list[Any] = [model]
    for key in place:
        kinds = [inner for kind in kinds for step in _step(kind, key) for inner in _alternatives(step)]
    return kinds


def _step(kind: Any, key: str | int) -> Iterator[Any]:
    """Yield the types of the value under ``key`` in a ``kind``."""
    origin, arguments = get_origin(kind), get_args(kind)
    yield from (info.annotation for name, info in _fields(kind) if name == key)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        yield arguments[1]
    elif isinstance(origin, type) and issubclass(origin, Sequence | AbstractSet):
        yield arguments[0]


def _alternatives(kind: Any) -> Iterator[Any]:
    """Yield the types that a union allows, without annotations."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _alternatives(get_args(kind)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(kind):
            yield from _alternatives(part)
    else:
        yield kind
