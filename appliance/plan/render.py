"""Templates, rendered in a sandbox; an undefined name is an error, and so is a text without end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.errors import ConfigError

if TYPE_CHECKING:
    from jinja2.runtime import Context

LARGEST = 64 << 20
"""Characters of a rendered text at most, and elements or bits that an operator may create."""


class Templates:
    """Renders texts, and templates below ``folder``, with the given values."""

    def __init__(self, folder: Path, **values: object) -> None:
        # Most verbs render nothing, and importing jinja2 takes a tenth of their CPU time.
        from jinja2 import FileSystemLoader, StrictUndefined, TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Sandbox(ImmutableSandboxedEnvironment):
            intercepted_binops = frozenset(_SIZES)

            def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
                if (size := _SIZES[operator](left, right)) > LARGEST:
                    raise OverflowError(f"{operator} would create {size} elements or bits; the limit is {LARGEST}")
                return super().call_binop(context, operator, left, right)

        # Besides its own errors, those of the expressions in it.
        self._wrong = (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            SyntaxError,
            TypeError,
            ValueError,
        )
        self._environment = Sandbox(
            loader=FileSystemLoader(folder),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,
        )
        self._environment.policies["json.dumps_function"] = json.dumps
        # The default of tojson escapes characters for HTML (\\u0026).
        self._environment.filters["tojson"] = json.dumps
        self._environment.globals.update(values)

    def text(self, source: str, **values: object) -> str:
        """Render a template given as text."""
        try:
            return _joined(self._environment.from_string(source).generate(**values))
        except self._wrong as error:
            raise ConfigError(f"template: {_why(error)}: {source[:120]!r}") from error

    def file(self, name: str, **values: object) -> str:
        """Render a template file."""
        try:
            return _joined(self._environment.get_template(name).generate(**values))
        except self._wrong as error:
            raise ConfigError(f"template {name}: {_why(error)}") from error


def _product(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    for sequence, number in ((left, right), (right, left)):
        if isinstance(sequence, Sized) and isinstance(number, int):
            return len(sequence) * number
    return 0


def _power(left: Any, right: Any) -> int:
    return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0


def _formatted(left: Any, right: Any) -> int:
    """Return the largest width in a format."""
    return max(map(int, re.findall(r"\d+", left)), default=0) if isinstance(left, str) else 0


_SIZES: dict[str, Callable[[Any, Any], int]] = {"*": _product, "**": _power, "%": _formatted}
"""How large the result of an operator is, of those whose result can be much larger than what it is of."""


def _joined(parts: Iterable[str]) -> str:
    """Return the whole text.

    Raises:
        OverflowError: it is too large.
    """
    found, size = [], 0
    for part in parts:
        found.append(part)
        size += len(part)
        if size > LARGEST:
            raise OverflowError(f"the text is larger than {LARGEST >> 20} MiB")
    return "".join(found)


def _why(error: Exception) -> str:
    return getattr(error, "message", "") or str(error) or type(error).__name__
