"""Jobs as the JSON of Nomad's HTTP API: the same blocks, with its names of fields, and times in nanoseconds."""

from __future__ import annotations

import json
import re

from appliance.engines.hcl import Block, Value
from appliance.units import read_duration

LISTS = {
    "check": "Checks",
    "constraint": "Constraints",
    "group": "TaskGroups",
    "network": "Networks",
    "service": "Services",
    "task": "Tasks",
    "template": "Templates",
}
"""Blocks that may occur several times, and the field of their list."""
SINGLE = {"restart": "RestartPolicy", "reschedule": "ReschedulePolicy"}
"""Blocks whose field has another name than they have."""
FIELDS = {
    "check": {"port": "PortLabel"},
    "constraint": {"attribute": "LTarget", "operator": "Operand", "value": "RTarget"},
    "resources": {"cpu": "CPU", "memory": "MemoryMB"},
    "service": {"port": "PortLabel"},
    "template": {"data": "EmbeddedTmpl", "destination": "DestPath"},
}
"""Fields with another name, by block."""
TIMES = frozenset(
    (
        *("delay", "grace", "healthy_deadline", "interval", "kill_timeout", "min_healthy_time", "progress_deadline"),
        *("stop_on_client_after", "timeout"),
    )
)
NANOSECONDS = 10**9


def job_json(job: Block) -> str:
    """Return a job as the body of a request to ``/v1/jobs``, and as a file for ``nomad job run -json``."""
    return json.dumps({"Job": {"ID": job.labels[0], **_object(job)}}, indent=1, ensure_ascii=True) + "\n"


def _object(block: Block) -> dict[str, object]:
    if block.kind == "config":
        return dict(block.fields)
    made: dict[str, object] = {"Name": block.labels[0]} if block.labels else {}
    for key, value in block.fields.items():
        made[FIELDS.get(block.kind, {}).get(key) or _camel(key)] = _time(key, value)
    for each in block.blocks:
        if each.kind == "port":
            ports = made.setdefault("ReservedPorts", [])
            assert isinstance(ports, list)
            ports.append({"Label": each.labels[0], "Value": each.fields["static"]})
        elif each.kind == "volume":
            made["Volumes"] = {each.labels[0]: _object(each)}
        elif each.kind in LISTS:
            listed = made.setdefault(LISTS[each.kind], [])
            assert isinstance(listed, list)
            listed.append(_object(each))
        else:
            made[SINGLE.get(each.kind) or _camel(each.kind)] = _object(each)
    return made


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _time(key: str, value: Value) -> Value:
    if key in TIMES and isinstance(value, str) and re.fullmatch(r"\d+[smh]", value):
        return int(read_duration(value)) * NANOSECONDS
    return value
