"""Tests give a verb another environment (`tests/support/env.py`); names of our own modules are replaced rarely."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.places import ROOT
from tests.support.patches import find_helpers, find_in, find_patches

LIMIT = 160
"""How many names of our own modules all tests replace at most. It only ever falls: lower it with each that goes."""
MODEL = "unit/migration/model/"

COUNTED = {
    "a module": ("from appliance.x import y\nmonkeypatch.setattr(y, 'z', 1)", 1),
    "its full name": ("monkeypatch.setattr('appliance.x.y.z', 1)", 1),
    "a class": ("from appliance.x import Y\nmonkeypatch.setattr(Y, 'z', 1)", 1),
    "a module that is a parameter": ("def test(module):\n monkeypatch.setattr(module, 'z', 1)", 1),
    "mock": ("from appliance import x\nwith mock.patch.object(x, 'y'): pass", 1),
    "several at once": ("from appliance import x\nmock.patch.multiple(x, y=1, z=2)", 2),
    "by mock's own name": ("mock.patch('analysis.x.y')", 1),
    "an entry of sys.modules": ("monkeypatch.setitem(sys.modules, 'appliance.x', None)", 1),
    "assignment": ("from appliance import x\nx.y = 1", 1),
    "assignment to an alias": ("import appliance.x\ny = appliance.x\ny.z = 1", 1),
    "assignment to a module by its name": ("y = importlib.import_module('appliance.x')\ny.z = 1", 1),
    "assignment of a module": ("sys.modules['appliance.x'] = object()", 1),
    "assignment to an entry of sys.modules": ("sys.modules['appliance.x'].y = 1", 1),
    "assignment in a program": ("PROGRAM = 'from appliance import x\\nx.y = 1'", 1),
    "a helper": ("def put(place, **v):\n monkeypatch.setattr(place, 'a', 1)\nput(x, y=1, z=2)", 3),
    "a loop": ("from appliance import x\nfor name in ('a', 'b'):\n monkeypatch.setattr(x, name, 1)", 2),
    "a mapping": ("from appliance import x\nmonkeypatch.setitem(x.TABLE, 'a', 1)", 1),
    "the standard library": ("import time\nmonkeypatch.setattr(time, 'sleep', 1)", 0),
    "the environment": ("monkeypatch.setenv('x', '1')", 0),
    "an object of the test": ("host = Fake()\nhost.run = 1", 0),
}


@pytest.mark.parametrize(("text", "count"), COUNTED.values(), ids=COUNTED)
def test_what_counts_as_a_patch(text: str, count: int) -> None:
    tree = ast.parse(text)
    assert sum(one.count for one in find_in(tree, "", set(find_helpers(tree)))) == count


def test_own_names_are_replaced_rarely() -> None:
    found = Counter[str]()
    for one in find_patches(ROOT / "tests"):
        found[one.path] += one.count
    del found["unit/test_patches.py"]  # its examples
    total = sum(found.values())
    most = ", ".join(f"{path} {count}" for path, count in found.most_common(8))
    assert total <= LIMIT, f"{total} names are replaced; give the verb another environment. Most are in {most}"
    assert total == LIMIT, f"lower LIMIT to {total}"
    assert not [path for path in found if path.startswith(MODEL) or path == "unit/migration/test_model.py"]
