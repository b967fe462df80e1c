"""Read a YAML file into a pydantic model; every validation error becomes a Problem with a hint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from appliance.config.document import MAX_CHARACTERS, Document, first_problems, read_document
from appliance.config.wording import Mistake, to_message
from appliance.errors import ConfigError, Problem

if TYPE_CHECKING:
    from appliance.config.model import Site

Model = TypeVar("Model", bound=BaseModel)


def read_site(path: Path) -> tuple[Site, Document]:
    """Read a site file; relative paths in it are resolved against its folder."""
    text = read_text(path)
    return read_site_text(text, str(path), folder=path.absolute().parent)


def read_site_text(text: str, file: str, *, folder: Path | None = None) -> tuple[Site, Document]:
    """Read a site file's text; the document has the line of each place."""
    # Building the site's model takes 20 ms, which readers of the catalogue do not need.
    from appliance.config.model import Site

    document = read_document(text, file)
    return validate(document, Site, folder=folder), document


def validate_rest(document: Document, broken: Collection[str], *, folder: Path) -> Site | None:
    """Return the site without the sections ``broken``, in which there are errors; None if the others are not enough."""
    from appliance.config.model import Site

    if "" in broken or "services" in broken:  # the whole file, or what other checks depend on
        return None
    data = {key: value for key, value in document.data.items() if key not in broken}
    if "cluster" in broken:
        data["cluster"] = "cluster"
    try:
        return Site.model_validate(data, context={"folder": folder})
    except ValidationError:
        return None


def read_model(text: str, file: str, model: type[Model]) -> Model:
    """Read YAML text as ``model``, or raise a ConfigError with every problem in it."""
    return validate(read_document(text, file), model)


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, up to the size limit."""
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
        problem = Problem(str(path), line, "", "invalid UTF-8", "save the file as UTF-8; is it a text file?")
        raise ConfigError(problems=[problem]) from None


def validate(document: Document, model: type[Model], *, folder: Path | None = None) -> Model:
    """Validate a document against ``model``.

    Raises:
        ConfigError: with every problem in it.
    """
    if not isinstance(document.data, dict):
        what = "the file is empty" if document.data is None else "the file is not a mapping of keys to values"
        raise ConfigError(problems=[document.problem((), what, "write `key: value` lines")])
    try:
        return model.model_validate(document.data, context={"folder": folder})
    except ValidationError as error:
        raise ConfigError(problems=_problems(error, document, model)) from None


def _problems(error: ValidationError, document: Document, model: type[BaseModel]) -> list[Problem]:
    mistakes = [_located(raw, document.data) for raw in error.errors(include_url=False)]
    found = [(mistake.place, to_message(mistake, model)) for mistake in _one_branch(mistakes)]
    return first_problems([document.problem(place, *message) for place, message in found if message])


def _located(raw: Mapping[str, Any], data: Any) -> Mistake:
    """Separate the keys of the document in pydantic's location from its names of union branches."""
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
    """Keep the errors of one branch of each union.

    pydantic reports errors for every branch; the user meant the one that accepts this kind of value.
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
    """Return whether the whole value is of the wrong type for this branch."""
    return mistake.place == place and mistake.kind.endswith(("_type", "_parsing"))
