"""Blocks as HCL2: jobs of Nomad, modules of Terraform. Text cannot leave its string; ``${`` and ``%{`` are escaped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = "str | int | bool | Sequence[Value] | Mapping[str, Value]"


class Raw(str):
    """Text with references that the reader resolves: ``${NOMAD_ALLOC_DIR}``; the rest of it is plain."""


class Expression(str):
    """An expression, without quotes."""


@dataclass(frozen=True)
class Block:
    """A block: ``KIND "LABEL" { fields, blocks }``. A field without a value is left out before."""

    kind: str
    labels: tuple[str, ...] = ()
    fields: Mapping[str, Value] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()


INDENT = "  "


def write(blocks: Sequence[Block]) -> str:
    """Return the blocks as a file."""
    return "\n".join("".join(f"{line}\n" for line in _block(block, "")) for block in blocks)


def _block(block: Block, indent: str) -> Iterator[str]:
    labels = "".join(f" {quote(label)}" for label in block.labels)
    if not block.fields and not block.blocks:
        yield f"{indent}{block.kind}{labels} {{}}"
        return
    yield f"{indent}{block.kind}{labels} {{"
    below = indent + INDENT
    width = max((len(key) for key, value in block.fields.items() if _is_short(value)), default=0)
    for key, value in block.fields.items():
        pad = " " * (width - len(key)) if _is_short(value) else ""
        lines = list(_value(value, below))
        yield f"{below}{key}{pad} = {lines[0]}"
        yield from lines[1:]
    for number, each in enumerate(block.blocks):
        if number or block.fields:
            yield ""
        yield from _block(each, below)
    yield f"{indent}}}"


def _is_short(value: Value) -> bool:
    return not (isinstance(value, Mapping) or (isinstance(value, str) and is_heredoc(value)))


def _value(value: Value, indent: str) -> Iterator[str]:
    """Yield the lines of a value; the first follows its key."""
    if isinstance(value, bool):
        yield "true" if value else "false"
    elif isinstance(value, int | Expression):
        yield str(value)
    elif isinstance(value, str):
        yield from _heredoc(value) if is_heredoc(value) else (quote(value),)
    elif isinstance(value, Mapping):
        yield "{"
        width = max((len(quote(key)) for key, each in value.items() if _is_short(each)), default=0)
        for key, each in value.items():
            lines = list(_value(each, indent + INDENT))
            pad = width if _is_short(each) else 0
            yield f"{indent}{INDENT}{quote(key):<{pad}} = {lines[0]}"
            yield from lines[1:]
        yield f"{indent}}}"
    elif all(isinstance(each, str) and not is_heredoc(each) for each in value) and len(value) > 4:
        yield "["
        yield from (f"{indent}{INDENT}{next(_value(each, ''))}," for each in value)
        yield f"{indent}]"
    else:
        yield f"[{', '.join(_inline(each) for each in value)}]"


def _inline(value: Value) -> str:
    """Return an element of a list; a text with several lines is quoted."""
    if isinstance(value, str) and not isinstance(value, Expression):
        return quote(value)
    return "".join(_value(value, ""))


def is_heredoc(text: str) -> bool:
    """Return whether a text is written as lines: it has several, and nothing that would be read as something else."""
    return (
        text.endswith("\n")
        and "\n" in text[:-1]
        and not any(sequence in text for sequence in ("$${", "%%{"))  # an escape more is read as none
        and all(line.isascii() and (not line or line.isprintable()) for line in text.split("\n"))
    )


def _heredoc(text: str) -> Iterator[str]:
    lines = text.removesuffix("\n").split("\n")
    end = "END"
    while any(line.strip() == end for line in lines):
        end += "_"
    yield f"<<{end}"
    yield from (line.replace("${", "$${").replace("%{", "%%{") for line in lines)
    yield end


def quote(text: str) -> str:
    """Return a text as a quoted string."""
    parts = []
    for letter in text:
        code = ord(letter)
        if letter in '"\\':
            parts.append(f"\\{letter}")
        elif letter in _SHORT:
            parts.append(_SHORT[letter])
        elif letter.isascii() and letter.isprintable():
            parts.append(letter)
        else:
            parts.append(f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    found = "".join(parts)
    if not isinstance(text, Raw):
        found = found.replace("${", "\\u0024{").replace("%{", "\\u0025{")
    return f'"{found}"'


_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
