"""Lines about services on an engine, as ``sms deploy status`` and ``sms status`` show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.operations.engines.deploy_status import DeployStatus
    from appliance.operations.engines.engine import WorkloadState


def status_lines(found: DeployStatus) -> Iterator[str]:
    """Yield the status as lines for the terminal."""
    record = found.record
    good = {"deployed": "healthy", "stopped": "stopped"}.get(record.phase, "healthy so far, and not finished")
    state = good if found.healthy else "UNHEALTHY"
    phase = "" if record.phase in ("deployed", "stopped") else f", {record.phase}"
    yield f"{found.cluster} on {record.engine}: {state}; deployment {record.generation}{phase}"
    signed = f", SIF sha256:{record.sif[:16]}, signed by {record.signer}" if record.sif else ""
    yield f"image     {record.image}{signed}"
    if found.lease:
        yield f"lease     {found.lease}"
    for one in found.workloads:
        yield from _workload_lines(one)
    for each in found.drift:
        yield f"drift of {each.name}:"
        yield from (f"    {line}" for line in each.text.rstrip().splitlines()[:40])
    yield from (f"warning: {text}" for text in found.warnings)


def _workload_lines(one: WorkloadState) -> Iterator[str]:
    volume = f"; volume {one.volume}" if one.volume else ""
    yield f"{one.name}: {'ready' if one.ready else one.why}{volume}"
    for each in one.instances:
        image = f", {each.image}" if each.image else ""
        yield f"    {each.name} on {each.node or 'no node'}, {each.restarts} restarts{image}"
        for part in each.parts:
            yield f"        {part.name}: {'ok' if part.ready else 'FAILED'} {part.detail or part.why}".rstrip()
