"""The table of attackers names tests and verbs that exist, and says why a cell is empty."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from itertools import product

import pytest

from appliance.cli import make_parser
from tests.hostile.container import KINDS
from tests.hostile.table import ATTACKERS, EMPTY, ROWS
from tests.places import ROOT

LEAST = 2
"""Attacks of a kind."""


@cache
def functions(path: str) -> set[str]:
    """Names of the functions of a file of tests."""
    return {one.name for one in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(one, ast.FunctionDef)}


@pytest.mark.parametrize("cell", list(product(ATTACKERS, KINDS)), ids=", ".join)
def test_each_cell_has_attacks_or_a_reason(cell: tuple[str, str]) -> None:
    found = {row.attack for row in ROWS if (row.attacker, row.kind) == cell}
    assert len(found) >= LEAST if cell not in EMPTY else EMPTY[cell] and not found


def test_each_attack_is_there_once_with_a_test_that_exists() -> None:
    assert [one for one, count in Counter((row.attacker, row.attack) for row in ROWS).items() if count > 1] == []
    assert {(row.attacker, row.kind) for row in ROWS} <= set(product(ATTACKERS, KINDS))
    for row in ROWS:
        path, _, name = row.test.partition("::")
        assert name in functions(path), row


def test_verbs_are_those_of_sms() -> None:
    for words in {words for row in ROWS for words in row.verbs}:
        parser = make_parser()
        for word in words.split():
            choices = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
            parser = next(found[word] for found in choices if word in found)
