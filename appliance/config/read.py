"""Reads a YAML file into a pydantic model; every mistake becomes a Problem that a person can act on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from appliance.config.document import MAX_CHARACTERS, Document, first_problems, read_document
from appliance.config.wording import Mistake, worded
from appliance.errors import ConfigError, Problem

if TYPE_CHECKING:
    from appliance.config.model import Site

Model = TypeVar("Model", bound=BaseModel)


def read_site(path: Path) -> tuple[Site, Document]:
    """Read a site file; relative paths in it start at its folder."""
    text = read_text(path)
    return read_site_text(text, str(path), folder=path.absolute().parent)


def read_site_text(text: str, file: str, *, folder: Path | None = None) -> tuple[Site, Document]:
    """Read a site file's text; the document tells the line of each place."""
    # Building the site's model takes 20 ms, and who reads the catalogue alone has no use for it.
    from appliance.config.model import Site

    document = read_document(text, file)
    return validate(document, Site, folder=folder), document


def read_model(text: str, file: str, model: type[Model], *, folder: Path | None = None) -> Model:
    """Read YAML text as ``model``, or raise a ConfigError with every problem in it."""
    return validate(read_document(text, file), model, folder=folder)


def read_text(path: Path) -> str:
    """The text of a file that should be UTF-8 and of a size that a person may have written."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(4 * MAX_CHARACTERS + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: cannot be read: {reason}", hint="check the path and its permissions") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problem = Problem(str(path), line, "", "this is not UTF-8 text", "save the file as UTF-8; is it a text file?")
        raise ConfigError(problems=[problem]) from None


def validate(document: Document, model: type[Model], *, folder: Path | None = None) -> Model:
    """Hold a document against ``model``."""
    if not isinstance(document.data, dict):
        what = "the file is empty" if document.data is None else "the file is not a mapping of keys to values"
        raise ConfigError(problems=[document.problem((), what, "write `key: value` lines")])
    try:
        return model.model_validate(document.data, context={"folder": folder})
    except ValidationError as error:
        raise ConfigError(problems=_problems(error, document, model)) from None


def _problems(error: ValidationError, document: Document, model: type[BaseModel]) -> list[Problem]:
    mistakes = [_located(raw, document.data) for raw in error.errors(include_url=False)]
    found = [(mistake.place, worded(mistake, model)) for mistake in _one_branch(mistakes)]
    return first_problems([document.problem(place, *words) for place, words in found if words])


def _located(raw: Mapping[str, Any], data: Any) -> Mistake:
    """Tell the keys of the document in pydantic's location from its names of union branches."""
    place: list[str | int] = []
    branches: list[tuple[int, str]] = []
    of_key = False
    for index, part in enumerate(raw["loc"]):
        last = index == len(raw["loc"]) - 1
        if (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int)):
            data = data[part]
            place.append(part)
        elif last and raw["type"] == "missing":
            place.append(part)
        elif last and part == "[key]":
            of_key = True
        else:
            branches.append((len(place), str(part)))
    return Mistake(tuple(place), tuple(branches), raw["type"], raw["input"], raw.get("ctx", {}), of_key, raw["msg"])


def _one_branch(mistakes: list[Mistake], depth: int = 0) -> list[Mistake]:
    """Keep one branch of each union.

    pydantic reports what is wrong for every branch; the person meant one of them, the one that
    takes this kind of value at all.
    """
    kept = [mistake for mistake in mistakes if len(mistake.branches) <= depth]
    unions: dict[tuple[Any, ...], dict[str, list[Mistake]]] = {}
    for mistake in mistakes:
        if len(mistake.branches) > depth:
            length, branch = mistake.branches[depth]
            unions.setdefault(mistake.place[:length], {}).setdefault(branch, []).append(mistake)
    for place, branches in unions.items():
        fitting = [found for found in branches.values() if not any(_of_kind(one, place) for one in found)]
        if fitting:
            kept += _one_branch(min(fitting, key=len), depth + 1)
        else:
            first = next(iter(branches.values()))[0]
            kinds = tuple(one.kind for found in branches.values() for one in found if _of_kind(one, place))
            kept.append(first.of_kinds(place, kinds))
    return kept


def _of_kind(mistake: Mistake, place: tuple[Any, ...]) -> bool:
    """Whether the value as a whole is of the wrong kind for this branch."""
    return mistake.place == place and mistake.kind.endswith(("_type", "_parsing"))
