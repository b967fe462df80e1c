"""Counts where tests replace a name of our own modules, by any means. Pure: it reads their text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

OWN = ("appliance", "analysis")
PATCHERS = ("setattr", "delattr", "object", "multiple", "patch")
OF_MAPPINGS = ("setitem", "delitem", "dict")
"""Methods of monkeypatch and of mock.patch that replace something; the latter in a mapping, as ``sys.modules``."""


@dataclass
class Names:
    """What the names of a file stand for."""

    own: set[str] = field(default_factory=set)
    """Imported from our own packages."""
    others: set[str] = field(default_factory=set)
    """Imported from elsewhere: the standard library, other packages, helpers of the tests."""
    helpers: dict[str, int] = field(default_factory=dict)
    """Functions that replace a name of what they are given, and how many such parameters they have."""


@dataclass(frozen=True)
class Patch:
    """A place that replaces names; ``count``: how many."""

    path: str
    line: int
    count: int = 1


def find_patches(root: Path) -> list[Patch]:
    """Return all of a folder of tests."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    helpers = {name for tree in trees.values() for name in find_helpers(tree)}
    return [patch for path, tree in trees.items() for patch in find_in(tree, str(path.relative_to(root)), helpers)]


def find_in(tree: ast.AST, path: str, helpers: set[str]) -> Iterator[Patch]:
    """Yield those of a file, and of programs of which it has the text; in a loop over a literal, one for each turn."""
    names = read_names(tree)
    turns = {
        id(inner): len(rows)
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and (rows := rows_of(node.iter))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (count := count_call(node, names, helpers)):
            yield Patch(path, node.lineno, count * turns.get(id(node), 1))
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else node.targets
            if count := sum(is_own_attribute(target, names) for target in targets):
                yield Patch(path, node.lineno, count)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            yield from (Patch(path, node.lineno, one.count) for one in find_in_text(node.value, helpers))


def rows_of(value: ast.expr) -> list[ast.expr]:
    """Return what a loop over a literal goes through; nothing of any other."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Dict):
        value = value.func.value  # {...}.items()
    if isinstance(value, ast.Dict):
        return [key for key in value.keys if key]
    return list(value.elts) if isinstance(value, ast.Tuple | ast.List | ast.Set) else []


def find_in_text(text: str, helpers: set[str]) -> Iterator[Patch]:
    """Yield those of a program; text that is none has none."""
    if any(name in text for name in OWN):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return
        yield from find_in(tree, "", helpers)


def read_names(tree: ast.AST) -> Names:
    """Return what is imported in a file, at any depth."""
    found = Names()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                place = found.own if one.name.split(".")[0] in OWN else found.others
                place.add((one.asname or one.name).split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            place = found.own if (node.module or "").split(".")[0] in OWN else found.others
            place |= {one.asname or one.name for one in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_own(node.value, found):
            found.own |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def is_own(value: ast.expr, names: Names) -> bool:
    """Whether an expression is a module of our packages, or something in one, without a call of it."""
    if isinstance(value, ast.Attribute | ast.Name):
        return is_rooted(value, names.own)
    if isinstance(value, ast.Subscript):
        return ast.unparse(value.value) == "sys.modules" and is_own_name(value.slice)
    if isinstance(value, ast.Call) and value.args and ast.unparse(value.func).endswith("import_module"):
        return is_own_name(value.args[0])
    return False


def is_own_name(value: ast.expr) -> bool:
    """Whether an expression is the text of a name of our packages, as far as it can be read."""
    return not isinstance(value, ast.Constant) or str(value.value).split(".")[0] in OWN


def find_helpers(tree: ast.AST) -> Iterator[str]:
    """Yield the functions that replace an attribute of one of their parameters: each call of them is a patch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("test_"):
            arguments = node.args
            parameters = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and is_patcher(call) and call.args:
                    target = call.args[0]
                    if isinstance(target, ast.Name) and target.id in parameters - {"monkeypatch", "self"}:
                        yield node.name
                        break


def is_patcher(call: ast.Call) -> bool:
    """Whether a call is one of monkeypatch or mock.patch, or the built-in function for an attribute."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in ("setattr", "delattr", "patch")
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in OF_MAPPINGS:
        return bool(call.args)
    return function.attr in PATCHERS


def count_call(call: ast.Call, names: Names, helpers: set[str]) -> int:
    """Return how many names a call replaces."""
    function = call.func
    if isinstance(function, ast.Name) and function.id in helpers:
        return max(1, len(call.keywords))
    if not is_patcher(call) or not call.args:
        return 0
    target = call.args[0]
    if isinstance(target, ast.Constant | ast.JoinedStr):
        text = ast.unparse(target)
        return int(any(f"{name}." in text for name in OWN))
    if isinstance(function, ast.Attribute) and function.attr in OF_MAPPINGS:
        # A module that is deleted there is loaded again.
        of_modules = ast.unparse(target) == "sys.modules" and function.attr != "delitem"
        return int(of_modules or is_rooted(target, names.own))
    if isinstance(function, ast.Name) and function.id in ("setattr", "delattr") and not is_rooted(target, names.own):
        return 0  # of an object of the test
    if is_rooted(target, names.others):
        return 0
    many = isinstance(function, ast.Attribute) and function.attr == "multiple"
    return max(1, len(call.keywords)) if many else 1


def is_rooted(target: ast.expr, names: set[str]) -> bool:
    """Whether an expression begins with one of the names."""
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return isinstance(target, ast.Name) and target.id in names


def is_own_attribute(target: ast.expr, names: Names) -> bool:
    """Whether an assignment sets an attribute of what is from our packages, or a module of these."""
    if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "sys.modules":
        return is_own_name(target.slice)
    return isinstance(target, ast.Attribute) and (is_rooted(target, names.own) or is_own(target.value, names))
