"""``definitions/provision/openapi.yaml``: the operations, who may call them, and their parameters and bodies.

Extension keys of an operation: ``x-roles``, who may call it (default: admin); ``x-largest``, the maximum size of a body
in bytes (default: 1 MiB). Bodies of a type other than JSON are not read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml
from jsonschema import Draft7Validator, FormatChecker

from appliance.errors import SmsError
from appliance.provision.problem import HttpProblem, bad_request

METHODS = ("get", "put", "post", "patch", "delete", "head")
LARGEST_B = 1 << 20
MAX_PROBLEMS = 50

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def find_contract() -> Path:
    """Return the path of openapi.yaml in a checkout, in the VM, or in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    for top in (package.parent, package / "_share"):
        if (path := top / "definitions" / "provision" / "openapi.yaml").exists():
            return path
    raise SmsError("openapi.yaml is missing", hint="it belongs in definitions/provision of the installation")


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    roles: tuple[str, ...]
    largest_b: int
    json: bool
    """Whether the body is JSON and validated here."""
    required: bool
    body: Draft7Validator | None = None
    """The body's validator."""
    query: Mapping[str, Draft7Validator] = field(default_factory=dict)
    """Validators by query parameter; those in ``many`` are arrays."""
    many: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()


class Contract:
    """All operations, indexed by method and path."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.operations: dict[tuple[str, str], Operation] = {}
        self._plain: dict[str, str] = {}
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        for path, item in document["paths"].items():
            self._add_path(path)
            shared = item.get("parameters", [])
            for method in METHODS:
                if method in item:
                    self.operations[method.upper(), path] = self._operation(item[method], shared)

    @classmethod
    def read(cls, path: Path) -> Contract:
        return cls(yaml.load(path.read_text(), Loader=_SafeLoader))  # noqa: S506

    def _add_path(self, path: str) -> None:
        if "{" not in path:
            self._plain[path] = path
            return
        # A parameter named `path` matches the rest with slashes, like Starlette's {path:path}.
        pattern = re.sub(r"\\{path\\}", r".+", re.escape(path))
        pattern = re.sub(r"\\{\w+\\}", r"[^/]+", pattern)
        self._patterns.append((re.compile(pattern), path))

    def _resolve(self, schema: Any) -> Any:
        while isinstance(schema, dict) and "$ref" in schema:
            node: Any = self.document
            for part in schema["$ref"].removeprefix("#/").split("/"):
                node = node[part]
            schema = node
        return schema

    def _validator(self, schema: Any) -> Any:
        # References point into the whole document; nullable types are written in draft 7 form.
        whole = {"components": self.document.get("components", {}), "allOf": [schema]}
        return Draft7Validator(whole, format_checker=FormatChecker())

    def _operation(self, spec: Mapping[str, Any], shared: list[Any]) -> Operation:
        body = self._resolve(spec.get("requestBody", {}))
        content = body.get("content", {})
        parameters = [self._resolve(each) for each in [*shared, *spec.get("parameters", [])]]
        query = {each["name"]: each for each in parameters if each["in"] == "query"}
        schemas = {name: self._resolve(each["schema"]) for name, each in query.items()}
        return Operation(
            roles=tuple(spec.get("x-roles", ("admin",))),
            largest_b=spec.get("x-largest", LARGEST_B),
            json="application/json" in content,
            required=body.get("required", False),
            body=self._validator(content["application/json"]["schema"]) if "application/json" in content else None,
            query={name: self._validator(schema) for name, schema in schemas.items()},
            many=frozenset(name for name, schema in schemas.items() if schema.get("type") == "array"),
            needed=frozenset(name for name, each in query.items() if each.get("required")),
        )

    def find(self, method: str, path: str) -> Operation | None:
        """Return the operation of a request; None for an unknown path. 405 if the path does not support the method."""
        templates = [self._plain[path]] if path in self._plain else []
        if not templates:
            templates = [template for pattern, template in self._patterns if pattern.fullmatch(path)]
        for template in templates:
            found = self.operations.get((method, template))
            if found is None and method == "HEAD":
                found = self.operations.get(("GET", template))
            if found is not None:
                return found
        if templates:
            raise HttpProblem(405, f"{path} does not support {method}")
        return None


def check_query(operation: Operation, query: str) -> None:
    """Raise 400 with every invalid query parameter. Unknown ones are ignored, as in SMD."""
    if not operation.query:
        return
    given: dict[str, list[str]] = {}
    for name, text in parse_qsl(query, keep_blank_values=True, errors="surrogateescape"):
        given.setdefault(name, []).append(text)
    wrong = [f"{name}: is missing" for name in operation.needed - given.keys()]
    # A route would read the last one, which has not been validated.
    twice = {name for name, texts in given.items() if len(texts) > 1} & (operation.query.keys() - operation.many)
    wrong += [f"{name}: is given more than once" for name in sorted(twice)]
    for name, validator in operation.query.items():
        if name in given:
            value: Any = given[name] if name in operation.many else _typed(given[name][0], validator)
            wrong += [f"{name}: {error.message}" for error in validator.iter_errors(value)]
    if wrong:
        raise bad_request("; ".join(wrong[:3]), problems=wrong[:MAX_PROBLEMS])


def _typed(text: str, validator: Any) -> Any:
    kind = validator.schema["allOf"][0].get("type")
    if kind == "integer" and re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if kind == "number" and re.fullmatch(r"-?[0-9]{1,15}(\.[0-9]{1,9})?", text):
        return float(text)
    if kind == "boolean" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return text


def parse_body(operation: Operation, data: bytes) -> Any:
    """Return the JSON body, validated by the contract; 400 with every error."""
    if not data:
        if operation.required:
            raise bad_request("the request has no body")
        return None
    try:
        document = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
        # Lone surrogates and null bytes are valid JSON, but databases reject them.
        if "\\u" in data.decode("utf-8", "replace") and not _storable(document):
            raise bad_request("the body contains text that cannot be stored")
    except HttpProblem:
        raise
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    assert operation.body is not None
    errors = islice(operation.body.iter_errors(document), MAX_PROBLEMS)
    wrong = [f"{_place(error)}{error.message[:300]}" for error in errors]
    if wrong:
        raise bad_request("; ".join(wrong[:3]), problems=wrong)
    return document


def _place(error: Any) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    return f"{where}: " if where else ""


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _finite(text: str) -> float:
    if (value := float(text)) in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _storable(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, list):
        return all(_storable(each) for each in value)
    if isinstance(value, dict):
        return all(_storable(key) and _storable(each) for key, each in value.items())
    return True
