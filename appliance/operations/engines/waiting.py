"""Waits for workloads on their engine, until they are ready or have ended."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from appliance.engines.deploy import Bundle, Item
from appliance.errors import SmsError, Unverified
from appliance.host.base import Unreachable
from appliance.operations.engines.engine import Engine, WorkloadState
from appliance.operations.env import Clock
from appliance.progress import Progress

POLL_S = 1.0
LOG_LINES = 8
"""Lines of a log that an error shows."""
STEADY_S = 10
"""Seconds without a restart after which a job of compute nodes that was restarted is ready."""
END_S = 30
"""Seconds that workloads may take to end, above those that their services may."""
REPORT_S = 15
"""Seconds after which a wait says what it waits for, and between such lines."""


def wait(
    engine: Engine, bundle: Bundle, items: Sequence[Item], *, clock: Clock, progress: Progress, timeout_s: float
) -> dict[str, float]:
    """Wait until workloads are ready; return the seconds of each.

    Raises:
        Unverified: one is not in time, with the last lines of its log.
    """
    began, done = clock.monotonic(), dict[str, float]()
    said, said_at, restarts = "", began, Restarts(clock)
    names = [one.name for one in items]
    if not names:
        return {}
    part = replace(bundle, items=tuple(items))
    nodes = any(one.kind == "node" for one in items)
    with progress.step(f"wait for {', '.join(names)}") as step:
        while True:
            states = wait_silently(engine, part, probe=nodes)  # no check of the engine asks those of nodes
            states = [restarts.judge(state) for state in states]
            for state in states:
                if state.ready:
                    done.setdefault(state.name, round(clock.monotonic() - began, 1))
                else:
                    done.pop(state.name, None)
                    with suppress(Unreachable):
                        engine.nudge(state)
            waiting = [state for state in states if not state.ready]
            if not waiting:
                step.detail("")
                return done
            why = "; ".join(f"{state.name}: {state.why}" for state in waiting)[:200]
            step.detail(why)
            if why != said and clock.monotonic() - said_at > REPORT_S:  # without a terminal, no step shows its detail
                said, said_at = why, clock.monotonic()
                progress.report(f"note: not ready after {said_at - began:.0f} s: {why}")
            if clock.monotonic() - began > timeout_s:
                raise not_ready(engine, bundle, waiting, timeout_s)
            clock.sleep(POLL_S)


@dataclass
class Restarts:
    """The restarts of jobs on compute nodes while one waits: no check of the engine holds those back.

    Two slurmd on one node stop each other in turn, and each of them answers now and then.
    """

    clock: Clock
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    at: dict[str, float] = field(default_factory=dict)

    def judge(self, state: WorkloadState) -> WorkloadState:
        """Return the state, which is not ready for a while after a restart that was seen."""
        if state.kind != "node":
            return state
        for one in state.instances:
            if one.restarts > self.counts.setdefault((state.name, one.name), one.restarts):
                self.counts[state.name, one.name] = one.restarts
                self.at[state.name] = self.clock.monotonic()
        if state.name not in self.at or self.clock.monotonic() - self.at[state.name] > STEADY_S or not state.ready:
            return state
        return replace(state, problem="it was restarted just now")


def wait_silently(engine: Engine, bundle: Bundle, *, probe: bool = False) -> list[WorkloadState]:
    """Return the states; an engine that does not answer for a moment is not an error while one waits.

    Args:
        probe: whether services are probed once all are ready.
    """
    try:
        states = engine.states(bundle)
        return engine.probe(bundle, states) if probe and all(state.ready for state in states) else states
    except Unreachable as error:
        return [WorkloadState(one.name, one.kind, False, 1, problem=error.message) for one in bundle.items]


def not_ready(engine: Engine, bundle: Bundle, waiting: Sequence[WorkloadState], seconds: float) -> Unverified:
    """Return the error of workloads that are not ready in time."""
    lines = []
    for state in waiting:
        lines.append(f"{state.name} is not ready after {seconds:g} s: {state.why}")
        try:
            lines += [f"    {line}" for line in engine.log(bundle, state, LOG_LINES).splitlines()[-LOG_LINES:]]
        except SmsError:
            lines.append("    its log cannot be read")
    return Unverified(
        "\n".join(lines),
        hint="`sms deploy status` shows more; `sms deploy` goes on, `sms deploy rollback` goes back",
    )


def wait_for_end(engine: Engine, bundle: Bundle, clock: Clock, progress: Progress) -> None:
    """Wait until nothing of the workloads runs.

    Raises:
        Unverified: something does after the time that they may take.
    """
    limit = max(one.stop_s for one in bundle.items) + END_S
    deadline = clock.monotonic() + limit
    with progress.step(f"stop {', '.join(one.name for one in bundle.items)}"):
        while left := _running(engine, bundle):
            if clock.monotonic() > deadline:
                raise Unverified(f"{left} after {limit} s", hint="`sms deploy stop` waits again")
            clock.sleep(POLL_S)


def _running(engine: Engine, bundle: Bundle) -> str:
    """Return what still runs; empty if nothing does. An engine that does not answer may run everything."""
    try:
        left = [f"{one.name} on {one.node}" for state in engine.states(bundle) for one in state.instances]
    except Unreachable as error:
        return f"it is not known what runs: {error.message}"
    return f"{', '.join(left)} did not end" if left else ""
