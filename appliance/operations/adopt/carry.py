"""Copies Slurm's state and the accounting database from the old node into the prepared overlay, and back."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence

from appliance.errors import SmsError
from appliance.operations.adopt.inspection import Inspected
from appliance.operations.engines.owners import Command, script_argv
from appliance.operations.engines.transfer import transfer
from appliance.operations.migration.agents import LONG_S
from appliance.plan.adopt.accounting import accounting_conf
from appliance.plan.adopt.dump import DumpFilter
from appliance.progress import Step
from appliance.tools.move import Endpoint
from appliance.tools.scripts import script_argv as shell_argv

ROUNDS = 6
"""Maximum passes over changed files while slurmctld runs."""
SETTLED = 64 << 10
"""Bytes of changes from which on another pass would find as much."""
CHANGE_S = 300
NEIGHBOUR = re.compile(r"([0-9.]+) dev (\S+) lladdr ([0-9a-f:]{17})\b")


def copy_state(inspected: Inspected, source: Endpoint, place: str, step: Step) -> int:
    """Copy the state while it is in use; return the bytes.

    Args:
        place: of the state in the container.
    """
    source.send("note")
    noted, _ = source.receive("noted", patience_s=LONG_S)
    read_state(inspected, place, step)
    return int(noted["file_bytes"])


def read_state(inspected: Inspected, place: str, step: Step) -> None:
    """Copy the state as it is now into the prepared overlay; ``place``: of it in the container."""
    plan = inspected.plan
    reader = Command(inspected.old, script_argv("read", f"{place}={plan.state}"))
    argv = script_argv("write", f"{place}={inspected.owner.place(place, copy=True)}")
    writer = inspected.owner.inside(argv, copy=True, input=True)
    transfer(reader, writer, lambda done: step.moved(done, max(done, plan.state_bytes)))


def copy_changes(source: Endpoint, apply: Callable[[bytes], object]) -> int:
    """Copy what has changed since, until little is left; return the bytes.

    Args:
        apply: writes changes into the copy.
    """
    total = 0
    for _ in range(ROUNDS):
        total += (size := copy_round(source, apply))
        if size <= SETTLED:
            break
    return total


def copy_round(source: Endpoint, apply: Callable[[bytes], object]) -> int:
    """Copy what has changed since, once; return the bytes."""
    source.send("round")
    delta, data = source.receive("delta", patience_s=LONG_S)
    if delta["files"]:
        apply(data)
    return len(data)


def apply_changes(
    inspected: Inspected, place: str, data: bytes, *, inside: Sequence[str] = (), then: Sequence[str] = ()
) -> None:
    """Write changes of the state into the overlay.

    Args:
        inside: first words of a command in the instance that runs on the target; empty before there is one.
        then: command that runs after it, in the same place: another one would take as long to begin.
    """
    argv = script_argv("change", f"{place}={place if inside else inspected.owner.place(place, copy=True)}")
    if then:
        argv = ("sh", "-euc", '"$@" && shift $# && ' + shlex.join(then), "change", *argv)
    if inside:
        command = Command(inspected.target, (*inside, *argv))
    else:
        command = inspected.owner.inside(argv, copy=True, input=True)
    command.host.run(*command.argv, input=data, timeout=CHANGE_S)


def neighbours_of(inspected: Inspected) -> list[str]:
    """Return the neighbours of the interfaces from which addresses move, as the container has them.

    An ARP request of the isolated instance gets no answer, and the kernel repeats it only after a second.
    """
    names = {one.name: one.inside for one in inspected.plan.interfaces}
    shown = inspected.old.run("ip", "-4", "neigh", "show", ok=None, timeout=20).text
    found = [NEIGHBOUR.match(line) for line in shown.splitlines()]
    return [f"{one[1]} {names[one[2]]} {one[3]}" for one in found if one and one[2] in names]


def copy_database(inspected: Inspected, setup: str, step: Step) -> None:
    """Copy the accounting database, which nobody writes now, into the prepared overlay.

    Args:
        setup: of the service mariadb.

    Raises:
        SmsError: it cannot be read there, or loaded.
    """
    slurm = inspected.survey.slurm
    assert slurm
    reader = Command(inspected.old, shell_argv("accounting-database", "dump", accounting_conf(slurm.file)))
    writer = inspected.owner.load_database(setup)
    try:
        # Its files say little about the size of a dump.
        transfer(reader, writer, lambda done: step.moved(done, 0), DumpFilter(inspected.old.name))
    except SmsError as error:
        raise SmsError(f"the accounting database cannot be copied: {error.message}", hint=error.hint) from error
