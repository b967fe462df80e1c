"""Read the output of ``sms classify``: which services are time-critical, which are deferrable."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

import yaml

from analysis.model import GROUPS, LOW_CONFIDENCE, VERDICTS

MAX_CHARACTERS = 8 << 20
MAX_SERVICES = 10_000
MAX_REMARKS = 20
MAX_NODES = 1000
WHOLE = ("capture", "sms", "nodes", "services", "routed", "unseen", "elsewhere", "unclassified", "bin_s")
"""Keys that the program writes, in this order; a hand-written file has only the services."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/ +-]{0,63}")


class ClassificationError(ValueError):
    """The text is not a classification."""


@dataclass(frozen=True)
class Classified:
    """A service that was seen, and its verdict.

    Attributes:
        advice: what to do if it cannot run in the container.
        confidence: 0..1; 1 if the file does not say, as in a hand-written one.
        overridden: whether the verdict is the site's own.
        budget_s: the tolerated outage in seconds; clients: nodes that used it. None if the file does not say.
    """

    name: str
    verdict: str
    group: str
    advice: str = ""
    confidence: float = 1.0
    overridden: bool = False
    budget_s: float | None = None
    clients: int | None = None

    @property
    def time_critical(self) -> bool:
        """Whether compute nodes need it at any time."""
        return self.verdict == "time-critical"

    @property
    def low_confidence(self) -> bool:
        """Whether the capture has too little evidence for it."""
        return self.confidence < LOW_CONFIDENCE and not self.overridden


@dataclass(frozen=True)
class Report:
    """The parts of a classification that a build and a comparison need.

    Attributes:
        services: in the order of the file.
        undetermined: services that were not seen in a capture too short to decide whether nodes use them.
        damaged: whether the capture was truncated or partly unreadable.
        remarks: limits of the capture, as sentences.
        nodes: IPv4 addresses of compute nodes; count: their number, None if the file does not say.
        whole: whether it was written by the program, not by hand.
        lasted_s: seconds that the capture covers; 0 if the file does not say.
        sms: addresses of the management node.
        version: of the program that wrote it.
    """

    services: tuple[Classified, ...]
    undetermined: tuple[str, ...] = ()
    damaged: bool = False
    remarks: tuple[str, ...] = ()
    nodes: tuple[IPv4Address, ...] = ()
    count: int | None = None
    whole: bool = False
    lasted_s: float = 0.0
    sms: tuple[str, ...] = ()
    version: str = ""


def read_classification(text: str) -> Report:
    """Parse a classification in YAML or JSON, as written by ``sms classify`` or by hand with only `services`.

    Raises:
        ClassificationError: it is not a classification, or it is truncated: truncated YAML is valid YAML.
    """
    if len(text) > MAX_CHARACTERS:
        raise ClassificationError(f"it is larger than {MAX_CHARACTERS >> 20} MiB")
    data = _parse(text)
    services = data.get("services") if isinstance(data, Mapping) else None
    if not isinstance(services, list):
        raise ClassificationError("it has no list `services`")
    missing = [key for key in WHOLE if key not in data]
    if "capture" in data and missing:
        raise ClassificationError(f"it is truncated: {', '.join(missing)} should follow the services")
    if len(services) > MAX_SERVICES:
        raise ClassificationError(f"it has more than {MAX_SERVICES} services")
    found = tuple(_service(entry, index) for index, entry in enumerate(services))
    names = [service.name for service in found]
    if len(set(names)) < len(names):
        again = next(name for index, name in enumerate(names) if name in names[:index])
        raise ClassificationError(f"services: {again} is listed twice")
    capture, nodes, sms, made = (_mapping(data.get(key)) for key in ("capture", "nodes", "sms", "made"))
    damaged = any(capture.get(key) for key in ("truncated", "skipped", "problems"))
    remarks = tuple(text[:1000] for text in _list(capture.get("remarks"))[:MAX_REMARKS] if isinstance(text, str))
    addresses = _list(nodes.get("addresses"))[:MAX_NODES]
    own = [text[:64] for text in _list(sms.get("addresses"))[:MAX_REMARKS] if isinstance(text, str)]
    version = made.get("version")
    return Report(
        found,
        _find_undetermined(capture, _list(data.get("unseen"))),
        damaged,
        remarks,
        tuple(address for each in addresses if (address := _address(each))),
        _count(nodes.get("count")),
        whole="capture" in data,
        lasted_s=_lasted(capture),
        sms=tuple(own),
        version=version[:64] if isinstance(version, str) else "",
    )


def _address(value: Any) -> IPv4Address | None:
    try:
        return IPv4Address(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15 else None


def _lasted(capture: Mapping[Any, Any]) -> float:
    return max(_number(capture.get("covered_s") or capture.get("duration_s"), 0.0), 0.0)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _find_undetermined(capture: Mapping[Any, Any], unseen: list[Any]) -> tuple[str, ...]:
    """Return the services that need a longer capture, or one of all traffic."""
    lasted = _lasted(capture)
    entries = [entry for entry in unseen[:MAX_SERVICES] if isinstance(entry, Mapping)]
    late = [
        entry.get("name")
        for entry in entries
        if entry.get("finding") == "not shown"
        or (entry.get("finding") != "elsewhere" and _number(entry.get("needed_capture_s"), 0.0) > lasted)
    ]
    return tuple(name for name in late if isinstance(name, str) and _NAME.fullmatch(name))


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else default


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
    advice, budget = entry.get("advice"), _number(entry.get("budget_s"), math.nan)
    return Classified(
        name,
        verdict,
        str(entry.get("group") or GROUPS[verdict])[:64],
        advice[:1000] if isinstance(advice, str) else "",
        _number(entry.get("confidence"), 1.0),
        entry.get("overridden") is True,
        None if math.isnan(budget) else budget,
        _count(entry.get("clients")),
    )
