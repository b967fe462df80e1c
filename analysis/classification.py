"""Reads what ``sms classify`` wrote: which services must never stop, which can wait."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

MAX_CHARACTERS = 8 << 20
MAX_SERVICES = 10_000
VERDICTS = ("time-critical", "deferrable")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/ +-]{0,63}")


class ClassificationError(ValueError):
    """The text is not a classification."""


@dataclass(frozen=True)
class Classified:
    """A service that was seen, and the verdict on it; ``advice`` is what to do where no container can carry it."""

    name: str
    verdict: str
    group: str
    advice: str = ""

    @property
    def time_critical(self) -> bool:
        """Whether compute nodes need it at every moment."""
        return self.verdict == "time-critical"


def read_classification(text: str) -> tuple[Classified, ...]:
    """The services of a classification, YAML or JSON, in its order."""
    if len(text) > MAX_CHARACTERS:
        raise ClassificationError(f"it is larger than {MAX_CHARACTERS >> 20} MiB")
    data = _parse(text)
    services = data.get("services") if isinstance(data, Mapping) else None
    if not isinstance(services, list):
        raise ClassificationError("it has no list `services`")
    if len(services) > MAX_SERVICES:
        raise ClassificationError(f"it has more than {MAX_SERVICES} services")
    found = tuple(_service(entry, index) for index, entry in enumerate(services))
    names = [service.name for service in found]
    if len(set(names)) < len(names):
        again = next(name for index, name in enumerate(names) if name in names[:index])
        raise ClassificationError(f"services: {again} is there twice")
    return found


def _parse(text: str) -> Any:
    try:
        # JSON is YAML too, but its own parser is a hundred times faster.
        return json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ClassificationError(f"it is not YAML, line {line}: {error.problem}") from None
    except json.JSONDecodeError as error:
        raise ClassificationError(f"it is not JSON, line {error.lineno}: {error.msg}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, TypeError, AttributeError, IndexError, KeyError):
        raise ClassificationError("it is neither YAML nor JSON") from None


def _service(entry: Any, index: int) -> Classified:
    if not isinstance(entry, Mapping):
        raise ClassificationError(f"services[{index}] is not a mapping")
    name, verdict = entry.get("name"), entry.get("verdict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ClassificationError(f"services[{index}].name is not the name of a service")
    if verdict not in VERDICTS:
        raise ClassificationError(f"services[{index}].verdict is neither {' nor '.join(VERDICTS)}")
    default = "SMS-services" if verdict == "time-critical" else "SMS-mgmt"
    advice = entry.get("advice")
    return Classified(
        name, verdict, str(entry.get("group") or default)[:64], advice[:1000] if isinstance(advice, str) else ""
    )
