"""What a starter file of `sms init` has that is to be edited: marks, and addresses for documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from appliance.config.document import Document, Place
from appliance.errors import Problem

_ADDRESS = re.compile(r"(?<![0-9.])(?:192\.0\.2|198\.51\.100|203\.0\.113)\.[0-9]+")
"""An address of the networks for examples (RFC 5737)."""


def find_documentation(text: str) -> str:
    """Return the first address for documentation in a text; empty if there is none."""
    found = _ADDRESS.search(text)
    return found[0] if found else ""


def documentation_problem(address: str) -> tuple[str, str]:
    """Return message and hint for an address for documentation."""
    return f"{address} is an address for documentation", "replace it by the site's own"


def check_starter(document: Document) -> list[Problem]:
    """Return a problem for each mark (CHANGE) that is left, and for each setting with an address that nobody has."""
    hint = "edit what it is about, then remove the mark"
    problems = [Problem(document.file, line, "", "is still marked (CHANGE)", hint) for line in document.marked]
    for place, text in _texts(document.data, ()):
        if address := find_documentation(text):
            problems.append(document.problem(place, *documentation_problem(address)))
    return problems


def _texts(value: Any, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(below, (*place, key))
