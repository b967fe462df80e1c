"""Templates, rendered in a sandbox; an undefined name is an error."""

from __future__ import annotations

import json
from pathlib import Path

from appliance.errors import ConfigError


class Templates:
    """Renders texts, and templates below ``folder``, with the given values."""

    def __init__(self, folder: Path, **values: object) -> None:
        # Most verbs render nothing, and importing jinja2 takes a tenth of their CPU time.
        from jinja2 import FileSystemLoader, StrictUndefined, TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._wrong = TemplateError
        self._environment = ImmutableSandboxedEnvironment(
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
            return self._environment.from_string(source).render(**values)
        except self._wrong as error:
            raise ConfigError(f"template: {error.message}: {source[:120]!r}") from error

    def file(self, name: str, **values: object) -> str:
        """Render a template file."""
        try:
            return self._environment.get_template(name).render(**values)
        except self._wrong as error:
            raise ConfigError(f"template {name}: {error.message or error}") from error
