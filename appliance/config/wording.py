"""Says in words of an administrator what pydantic found wrong."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from appliance.config.document import Place
from appliance.config.fields import describe, known_keys
from appliance.text import SHORT, printable

Words = tuple[str, str]
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
"""What pydantic's names of kinds mean."""

EXAMPLES: dict[str, str] = {
    "a list": "write it as [a, b], or as one line `- item` for each",
    "a mapping": "write `key: value` lines below it",
    "a whole number": "write digits only, without a unit",
    "a number": "write digits only, without a unit",
    "true or false": "write true or false",
}


@dataclass(frozen=True)
class Mistake:
    """One error of pydantic's, with its place in the document told from its branches of unions."""

    place: Place
    branches: tuple[tuple[int, str], ...]
    kind: str
    value: Any
    context: Mapping[str, Any]
    of_key: bool
    message: str
    kinds: tuple[str, ...] = ()

    def of_kinds(self, place: Place, kinds: tuple[str, ...]) -> Mistake:
        """The same for a value that is none of the kinds that a union allows."""
        return replace(self, place=place, kind=kinds[0], kinds=kinds)


def worded(mistake: Mistake, model: type[BaseModel]) -> Words | None:
    """Message and hint for a mistake; None for one that only follows from another."""
    message, hint = _words(mistake, model)
    if not message:
        return None
    purpose = describe(model, mistake.place)
    if mistake.of_key:
        message = f"the key {message}"
    return message, hint or (f"it is for: {purpose}" if purpose else "")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the known word most like ``word``, or else all of them."""
    names = sorted(set(known))
    close = difflib.get_close_matches(word[:100].lower(), names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known here: {', '.join(names)}" if names else "there are none"


def shown(value: Any) -> str:
    """A value as the file has it, short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    return printable(str(value), SHORT) or '""'


def _words(mistake: Mistake, model: type[BaseModel]) -> Words:
    special = _SPECIAL.get(mistake.kind)
    if special:
        return special(mistake, model)
    if mistake.kind.endswith(("_type", "_parsing", "_from_float")):
        return _wrong_kind(mistake)
    return f"{shown(mistake.value)}: {printable(mistake.message, 160)}", ""


def _missing(mistake: Mistake, model: type[BaseModel]) -> Words:
    purpose = describe(model, mistake.place)
    return "is missing", f"add {mistake.place[-1]}: {purpose}" if purpose else f"add {mistake.place[-1]}"


def _unknown(mistake: Mistake, model: type[BaseModel]) -> Words:
    return "this key is not known", nearest(str(mistake.place[-1]), known_keys(model, mistake.place[:-1]))


def _ours(mistake: Mistake, model: type[BaseModel]) -> Words:
    return f"{shown(mistake.value)} {mistake.context['what']}", str(mistake.context["hint"])


def _wrong_kind(mistake: Mistake) -> Words:
    wanted: list[str] = []
    for kind in mistake.kinds or (mistake.kind,):
        name = kind.removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float")
        wanted.append(KINDS.get(name, name.replace("_", " ")))
    wanted = list(dict.fromkeys(wanted))
    hint = " or ".join(EXAMPLES[kind] for kind in wanted if kind in EXAMPLES)
    if "text" in wanted and isinstance(mistake.value, int | float):
        hint = f'put it in quotes: "{shown(mistake.value)}"'
    if len(wanted) > 1:
        return f"{shown(mistake.value)} is neither {' nor '.join(wanted)}", hint
    return f"{shown(mistake.value)} is not {wanted[0]}", hint


def _too_long(mistake: Mistake, model: type[BaseModel]) -> Words:
    return f"{shown(mistake.value)} is too large", "no such number is of use here"


def _pattern(mistake: Mistake, model: type[BaseModel]) -> Words:
    return f"{shown(mistake.value)} is not of the form it must have", f"it must match {mistake.context['pattern']}"


def _choice(mistake: Mistake, model: type[BaseModel]) -> Words:
    expected = str(mistake.context["expected"])
    choices = list(filter(None, expected.replace("'", "").replace(" or ", ", ").split(", ")))
    return f"{shown(mistake.value)} is none of the choices", nearest(str(mistake.value), choices)


def _count(mistake: Mistake, model: type[BaseModel]) -> Words:
    least = mistake.context.get("min_length")
    if least is None:
        return "has too many items", f"{mistake.context['max_length']} at most"
    # Items that are wrong themselves do not count for pydantic; their own problems are enough.
    if len(mistake.value) >= least:
        return "", ""
    return "has too few items", f"write {least} or more"


def _length(mistake: Mistake, model: type[BaseModel]) -> Words:
    if "min_length" in mistake.context:
        return f"{shown(mistake.value)} is too short", f"{mistake.context['min_length']} characters or more"
    return f"{shown(mistake.value)} is too long", f"{mistake.context['max_length']} characters at most"


def _bound(words: str, limit: str, key: str) -> Callable[[Mistake, type[BaseModel]], Words]:
    def say(mistake: Mistake, model: type[BaseModel]) -> Words:
        bound = mistake.context[key]
        # A field of kind float gives its bound as 0.0, which nobody would write.
        whole = int(bound) if isinstance(bound, float) and bound.is_integer() else bound
        return f"{shown(mistake.value)} {words}", f"use {limit.format(whole)}"

    return say


def _value(mistake: Mistake, model: type[BaseModel]) -> Words:
    return printable(str(mistake.context.get("error", mistake.message)), 200), ""


_SPECIAL: dict[str, Callable[[Mistake, type[BaseModel]], Words]] = {
    "missing": _missing,
    "extra_forbidden": _unknown,
    "worded": _ours,
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
