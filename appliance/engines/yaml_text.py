"""YAML that every parser reads alike: versions 1.1 and 1.2 disagree about plain words such as 1e3, on and 0o17."""

from __future__ import annotations

import re
from collections.abc import Iterable

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9._/-]*")
"""Text that needs no quotes unless it is one of the words."""
WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"))


def dump(documents: Iterable[object]) -> str:
    """Return the documents as YAML, in the order of their keys; other text than plain words is quoted.

    Raises:
        TypeError: a value is not of JSON's types.
    """
    from yaml import SafeDumper, dump_all
    from yaml.nodes import ScalarNode

    class Dumper(SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

        def represent_text(self, text: str) -> ScalarNode:
            style = '"'
            if PLAIN.fullmatch(text) and text.lower() not in WORDS:
                style = ""
            elif "\n" in text[:-1] and is_block(text):
                style = "|"
            return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, Dumper.represent_text)
    return dump_all(
        documents, Dumper=Dumper, sort_keys=False, allow_unicode=False, width=10**6, default_flow_style=False
    )


def is_block(text: str) -> bool:
    """Return whether the text can be a literal block: printable ASCII, and no white space that a reader may lose."""
    lines = text.split("\n")
    return (
        text.endswith("\n")
        and not text.endswith("\n\n")
        and all(line.isascii() and (not line or line.isprintable()) and line == line.rstrip() for line in lines)
        and bool(lines[0])
        and not lines[0].startswith(" ")
    )
