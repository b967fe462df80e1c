"""Translate pydantic's validation errors into messages and hints for administrators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from appliance.config.document import Place
from appliance.config.fields import describe, known_keys
from appliance.text import SHORT, nearest, printable

Message = tuple[str, str]
"""A message and a hint."""

KINDS: dict[str, str] = {
    "tuple": "a list",
    "list": "a list",
    "set": "a list",
    "frozen_set": "a list",
    "model": "a mapping",
    "model_attributes": "a mapping",
    "dict": "a mapping",
    "mapping": "a mapping",
    "string": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "path": "a path",
}
"""Names of types for users, by pydantic's names."""

EXAMPLES: dict[str, str] = {
    "a list": "write it as [a, b], or as one line `- item` for each",
    "a mapping": "write `key: value` lines below it",
    "a whole number": "write digits only, without a unit",
    "a number": "write digits only, without a unit",
    "true or false": "write true or false",
}


@dataclass(frozen=True)
class Mistake:
    """One error of pydantic, with its place in the document separated from its union branches."""

    place: Place
    branches: tuple[tuple[int, str], ...]
    kind: str
    value: Any
    context: Mapping[str, Any]
    of_key: bool
    message: str
    kinds: tuple[str, ...] = ()

    def of_kinds(self, place: Place, kinds: tuple[str, ...]) -> Mistake:
        """Return a copy for a value that is of none of the types that a union allows."""
        return replace(self, place=place, kind=kinds[0], kinds=kinds)


def to_message(mistake: Mistake, model: type[BaseModel]) -> Message | None:
    """Return message and hint for a mistake; None for one that only follows from another."""
    message, hint = _message(mistake, model)
    if not message:
        return None
    purpose = describe(model, mistake.place)
    if mistake.of_key:
        message = f"the key {message}"
    return message, hint or (f"purpose: {purpose}" if purpose else "")


def shown(value: Any) -> str:
    """Format a value as in the file, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    return printable(str(value), SHORT) or '""'


def _message(mistake: Mistake, model: type[BaseModel]) -> Message:
    special = _SPECIAL.get(mistake.kind)
    if special:
        return special(mistake, model)
    if mistake.kind.endswith(("_type", "_parsing", "_from_float")):
        return _wrong_kind(mistake)
    return f"{shown(mistake.value)}: {printable(mistake.message, 160)}", ""


def _missing(mistake: Mistake, model: type[BaseModel]) -> Message:
    purpose = describe(model, mistake.place)
    return "is missing", f"add {mistake.place[-1]}: {purpose}" if purpose else f"add {mistake.place[-1]}"


def _unknown(mistake: Mistake, model: type[BaseModel]) -> Message:
    return "unknown key", nearest(str(mistake.place[-1]), known_keys(model, mistake.place[:-1]))


def _custom(mistake: Mistake, model: type[BaseModel]) -> Message:
    return f"{shown(mistake.value)} {mistake.context['what']}", str(mistake.context["hint"])


def _wrong_kind(mistake: Mistake) -> Message:
    expected: list[str] = []
    for kind in mistake.kinds or (mistake.kind,):
        name = kind.removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float")
        expected.append(KINDS.get(name, name.replace("_", " ")))
    expected = list(dict.fromkeys(expected))
    hint = " or ".join(EXAMPLES[kind] for kind in expected if kind in EXAMPLES)
    if "text" in expected and isinstance(mistake.value, int | float):
        hint = f'put it in quotes: "{shown(mistake.value)}"'
    if len(expected) > 1:
        return f"{shown(mistake.value)} is neither {' nor '.join(expected)}", hint
    return f"{shown(mistake.value)} is not {expected[0]}", hint


def _too_long(mistake: Mistake, model: type[BaseModel]) -> Message:
    return f"{shown(mistake.value)} is too large", "use a smaller number"


def _pattern(mistake: Mistake, model: type[BaseModel]) -> Message:
    return f"{shown(mistake.value)} has the wrong format", f"it must match {mistake.context['pattern']}"


def _choice(mistake: Mistake, model: type[BaseModel]) -> Message:
    expected = str(mistake.context["expected"])
    choices = list(filter(None, expected.replace("'", "").replace(" or ", ", ").split(", ")))
    return f"{shown(mistake.value)} is not a valid choice", nearest(str(mistake.value), choices)


def _count(mistake: Mistake, model: type[BaseModel]) -> Message:
    least = mistake.context.get("min_length")
    if least is None:
        return "has too many items", f"use at most {mistake.context['max_length']}"
    # pydantic does not count invalid items, which have problems of their own.
    if len(mistake.value) >= least:
        return "", ""
    return "has too few items", f"use at least {least}"


def _length(mistake: Mistake, model: type[BaseModel]) -> Message:
    if "min_length" in mistake.context:
        return f"{shown(mistake.value)} is too short", f"use at least {mistake.context['min_length']} characters"
    return f"{shown(mistake.value)} is too long", f"use at most {mistake.context['max_length']} characters"


def _bound(words: str, limit: str, key: str) -> Callable[[Mistake, type[BaseModel]], Message]:
    def to_words(mistake: Mistake, model: type[BaseModel]) -> Message:
        bound = mistake.context[key]
        # The bound of a float field would be printed as 0.0.
        whole = int(bound) if isinstance(bound, float) and bound.is_integer() else bound
        return f"{shown(mistake.value)} {words}", f"use {limit.format(whole)}"

    return to_words


def _value(mistake: Mistake, model: type[BaseModel]) -> Message:
    return printable(str(mistake.context.get("error", mistake.message)), 200), ""


_SPECIAL: dict[str, Callable[[Mistake, type[BaseModel]], Message]] = {
    "missing": _missing,
    "extra_forbidden": _unknown,
    "worded": _custom,
    "int_parsing_size": _too_long,
    "string_pattern_mismatch": _pattern,
    "literal_error": _choice,
    "enum": _choice,
    "too_short": _count,
    "too_long": _count,
    "string_too_short": _length,
    "string_too_long": _length,
    "greater_than_equal": _bound("is too small", "{} or more", "ge"),
    "greater_than": _bound("is too small", "more than {}", "gt"),
    "less_than_equal": _bound("is too large", "{} or less", "le"),
    "less_than": _bound("is too large", "less than {}", "lt"),
    "value_error": _value,
    "assertion_error": _value,
}
