"""What Slurm's controller has, now, and as the last stop has recorded it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.overlay.generation import query_overlay
from appliance.plan.machine import inside_argv
from appliance.plan.services.effect import (
    PRESENT,
    PRESENT_BYTES,
    Present,
    count_losses,
    find_forgotten,
    read_present,
    shown_losses,
)
from appliance.plan.services.jobs import count_jobs, is_active
from appliance.plan.services.preemption import QOS, Qos, read_qos
from appliance.shared.records import RecordError, from_json, to_json
from appliance.text import one_line
from appliance.units import format_age

QUERY_S = 60
STOP_QUERY_S = 15
FORM = 7
"""Of the output of ``PRESENT``."""


@dataclass(frozen=True)
class Recorded:
    """What Slurm had at a Unix time: the output of ``PRESENT``.

    ``generation``: of the overlay then. ``form``: of the output; another one cannot be read.
    """

    at: float
    output: str
    generation: int = 0
    form: int = 0


def last_line(error: SmsError) -> str:
    """Return what the program itself said."""
    return one_line(error.message.splitlines()[-1].strip(), 200)


def query_present(cluster: Cluster, host: Host) -> Present:
    """Return what the running controller has.

    Raises:
        CommandError: it does not answer.
    """
    controller = cluster.find_role("controller")
    return read_present(_print_present(cluster, host, QUERY_S), controller.user) if controller else Present()


def query_qos(cluster: Cluster, host: Host) -> dict[str, Qos] | None:
    """Return the QOS of the accounting database; None if it does not answer, or there is none."""
    try:
        return read_qos(host.run(*inside_argv(cluster.site, cluster.services, *QOS), timeout=QUERY_S).text)
    except CommandError:
        return None


def _print_present(cluster: Cluster, host: Host, timeout_s: float) -> str:
    argv = inside_argv(cluster.site, cluster.services, *PRESENT)
    return host.run(*argv, timeout=timeout_s, limit=PRESENT_BYTES).text


def describe_jobs(cluster: Cluster, host: Host, *, record: bool) -> tuple[str, Present | None]:
    """Return how many jobs of the running controller run and wait, as text, and what it has; empty without one.

    Args:
        record: also what it has, for the next start. Without an answer nothing is, and an older record is removed:
            unknown is not empty.
    """
    if not cluster.find_role("controller"):
        return "", None
    path = str(cluster.places.jobs)
    try:
        if record:
            host.remove(path)
        text = _print_present(cluster, host, STOP_QUERY_S)
        if record:
            generation = query_overlay(cluster, host).generation
            host.write(path, to_json(Recorded(cluster.env.clock.time(), text, generation, FORM)), mode=0o600)
    except SmsError as error:  # a full disk, a controller that hangs, a hostile container: a stop goes on
        return f"not known: {last_line(error)}", None
    present = read_present(text, "")
    return count_jobs({one.id: one.state for one in present.jobs}), present


def read_recorded(cluster: Cluster, host: Host) -> tuple[str, Present]:
    """Return how long ago the last stop was, and what it recorded.

    Raises:
        RecordError: it recorded nothing, as after a crash, or another host has had the services since.
    """
    text = host.run("cat", "--", str(cluster.places.jobs), ok=None, limit=2 * PRESENT_BYTES).stdout
    found = from_json(Recorded, text)
    present = read_present(found.output, "")
    tasks = {state: number for state, number in present.tasks.items() if is_active(state)}  # the others are forgotten
    present = replace(present, now=cluster.env.clock.time(), tasks=tasks)  # time limits go on meanwhile
    if found.form != FORM or present.unread or query_overlay(cluster, host).generation != found.generation:
        raise RecordError("it is not of the last stop")
    return format_age(cluster.env.clock.time() - found.at), present


def judge_restore(cluster: Cluster, host: Host, taken: float, *, force: bool) -> list[str]:
    """Judge a restore of Slurm's state by what the last stop recorded; return what it costs, as lines.

    Without a record, as after a crash, it is not refused: a restore is the way out of one.

    Args:
        taken: when the snapshot was taken, Unix time.

    Raises:
        Refused: the last stop had jobs that the snapshot does not have, and it is not forced.
    """
    if not cluster.find_role("controller"):
        return []
    try:
        age, present = read_recorded(cluster, host)
    except RecordError:
        return ["Slurm forgets the jobs submitted since the snapshot; the last stop did not record how many it had"]
    if not (lost := find_forgotten(present, taken)):
        return []
    lines = [f"Slurm forgets {count_losses(lost)} of the last stop, {age} ago:", *shown_losses(lost)]
    if not force:
        raise Refused(
            "\n  ".join(["restore is refused", *lines]),
            hint="`sms start` goes on with these jobs; --path restores single files, --as NAME writes a second overlay"
            "\n  --force: restore nevertheless: nodes end what runs of these jobs",
        )
    return lines
