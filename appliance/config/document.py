"""YAML reader that keeps line numbers and avoids the implicit types of YAML 1.1.

Reads the single document of a file into plain values and records the line of every place in it.
Unquoted scalars are strings, except ``true``, ``false``, ``null`` and decimal numbers. YAML 1.1
would read the MAC address 52:54:00:12:34:56 as a number, the host ``no`` as false and the mode
0600 as 384. Any input gives either a Document or a ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from appliance.errors import ConfigError, Problem
from appliance.text import SHORT, printable

Place = tuple[str | int, ...]
"""Path of a value in the document: ("admin_hosts", 0, "name")."""

MAX_CHARACTERS = 1 << 20
MAX_VALUES = 100_000
MAX_DEPTH = 24
MAX_PROBLEMS = 100

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})\.[0-9]{1,18}")
_WORDS = {"true": True, "True": True, "false": False, "False": False}
_NULLS = ("", "~", "null", "Null", "NULL")
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(_TAG + kind for kind in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value"))


@dataclass(frozen=True)
class Document:
    """The data of a file, with the line of each place."""

    file: str
    data: Any
    lines: Mapping[Place, int]
    marked: Sequence[int] = ()
    """Lines with the mark (CHANGE) of a starter file."""

    def line(self, place: Place) -> int:
        """Return the line of a place, or of the nearest enclosing place that the file has; 0 if there is none."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 0)

    def problem(self, place: Place, message: str, hint: str = "") -> Problem:
        """Return a problem at ``place``."""
        return Problem(self.file, self.line(place), dotted(place), message, hint)


def first_problems(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems in the order of the file, at most ``MAX_PROBLEMS`` and a count of the others."""
    ordered = sorted(problems, key=lambda problem: problem.line)
    if len(ordered) <= MAX_PROBLEMS:
        return ordered
    more = Problem(ordered[0].file, 0, "", f"{len(ordered) - MAX_PROBLEMS} more problems", "fix those above first")
    return [*ordered[:MAX_PROBLEMS], more]


def dotted(place: Place) -> str:
    """Format a place as ``admin_hosts[0].name``."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + printable(part, SHORT)
    return text


def read_document(text: str, file: str) -> Document:
    """Read the YAML in ``text``; ``file`` is the file name used in problems."""
    if len(text) > MAX_CHARACTERS:
        raise _failed(file, 0, f"the file is larger than {MAX_CHARACTERS >> 20} MiB")
    try:
        root = _compose(text.removeprefix("\ufeff"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise _failed(file, mark.line + 1 if mark else 0, printable(what, 200), _syntax_hint(what)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _failed(file, line, "character not allowed in YAML", "remove it; is this a text file?") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, IndexError):
        raise _failed(file, 0, "invalid YAML", "check the indentation and the quotes") from None
    reader = _Reader(file)
    data = reader.value(root, ()) if root else None
    if reader.problems:
        raise ConfigError(problems=first_problems(reader.problems))
    marked = [at for at, line in enumerate(text.split("\n"), 1) if re.search(r"#\s*\(CHANGE\)", line)]
    return Document(file, data, reader.lines, marked)


def _compose(text: str) -> yaml.Node | None:
    """Compose the document with libyaml, which is five times faster; on failure with PyYAML, for its error message."""
    fast = getattr(yaml, "CSafeLoader", None)
    if fast is not None and len(text) <= MAX_CHARACTERS:
        try:
            if _is_shallow(text, fast):
                node: yaml.Node | None = yaml.compose(text, Loader=fast)
                return node
        except (yaml.YAMLError, ValueError, OverflowError, AttributeError, TypeError):
            pass
    slow: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    return slow


def _is_shallow(text: str, loader: Any) -> bool:
    """Return whether the nesting is within the limit: libyaml's composer recurses without one."""
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth >= MAX_DEPTH:
                return False
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return True


class _Loader(yaml.SafeLoader):
    """Loader that only composes nodes and limits the nesting depth."""

    depth = 0

    # PyYAML recurses here: a million brackets must not overflow the stack.
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = self.get_mark()
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} levels deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Reader:
    """Converts composed nodes to values, recording lines and problems."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[Place, int] = {}
        self.problems: list[Problem] = []
        self.seen = 0

    def value(self, node: yaml.Node, place: Place, line: int = 0) -> Any:
        """Return the value of a node; ``line`` is that of its key."""
        self.lines[place] = line or node.start_mark.line + 1
        self.seen += 1
        # Aliases are expanded, so a small file can expand to a huge one, or refer to itself.
        if self.seen > MAX_VALUES or len(place) > MAX_DEPTH:
            raise _failed(
                self.file, self.lines[place], "the document is too large with its aliases expanded", "make it shorter"
            )
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.value(item, (*place, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _PLAIN_TAGS:
            return self._scalar(node, place)
        self._complain(place, f"unsupported tag {printable(node.tag, SHORT)}", "remove the word that begins with !")
        return None

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, object]:
        found: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or not _encodable(key_node.value):
                self._complain(place, "a key must be a scalar", "write it as `key: value`", line)
                continue
            key = key_node.value
            if key == "<<" and not key_node.style:
                self._complain(place, "merge keys (<<) are not supported", "write the keys out", line)
            elif key in found:
                first = self.lines[(*place, key)]
                self._complain(
                    (*place, key), "duplicate key", f"it is already on line {first}; keep one of the two", line
                )
            else:
                found[key] = self.value(value_node, (*place, key), line)
        return found

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> Any:
        text: str = node.value
        if not _encodable(text):
            self._complain(place, "invalid character (a lone surrogate)", "write the character itself")
            return ""
        if node.style:  # quoted, or a block
            return text
        if text in _NULLS:
            return None
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            return int(text)
        return float(text) if _FLOAT.fullmatch(text) else text

    def _complain(self, place: Place, message: str, hint: str, line: int = 0) -> None:
        self.problems.append(Problem(self.file, line or self.lines.get(place, 0), dotted(place), message, hint))


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _failed(file: str, line: int, message: str, hint: str = "") -> ConfigError:
    return ConfigError(problems=[Problem(file, line, "", message, hint)])


def _syntax_hint(what: str) -> str:
    """Return the hint for a message of PyYAML."""
    hints = {
        "'\\t'": "indent with spaces, not tabs",
        "single document": "keep one document: remove the line ---",
        "undefined alias": "a word that begins with * must be in quotes",
        "mapping values are not allowed": "quote a value that contains a colon and a space; check the indentation",
        "expected <block end>": "lines of the same level must start in the same column",
        "could not find expected ':'": "write it as `key: value`, with a space after the colon",
        "quoted scalar": "a quote is not closed",
        "levels deep": "no setting needs so many levels",
    }
    return next(
        (hint for sign, hint in hints.items() if sign in what), "check the indentation and the quotes near this line"
    )
