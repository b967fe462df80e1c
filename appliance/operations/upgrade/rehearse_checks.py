"""Checks of a rehearsal, each of which returns its evidence."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import SmsError
from appliance.host.base import Host, Result
from appliance.host.local import Local
from appliance.host.netns import Netns
from appliance.lab import Lab, put_up_cables
from appliance.lab.layout import PUBLIC
from appliance.operations.context import Cluster
from appliance.operations.env import Clock
from appliance.operations.lab import demo
from appliance.operations.preflight import find_instance
from appliance.operations.upgrade.rehearse_plan import CARRIER, OUTSIDE
from appliance.plan.machine import inside_argv
from appliance.plan.services.jobs import JOBS_BYTES, read_fields
from appliance.progress import Progress
from appliance.tools.ports import Link, list_links
from appliance.tools.scripts import script_argv

RESERVATION = "sms-rehearsal"
SETTLED_S = 10
"""Age of a job's folder in seconds after which the state file must have the job: the folder is created at once, the
state is saved within 5 seconds of a change (SAVE_MAX_WAIT of src/slurmctld/state_save.h)."""


@dataclass(frozen=True)
class Check:
    """Result of a check; ``seen`` is the evidence, or the error."""

    what: str
    ok: bool
    seen: str
    seconds: float


@dataclass
class Checks:
    """Results so far; a failed check does not end the rehearsal."""

    progress: Progress
    clock: Clock
    done: list[Check] = field(default_factory=list)

    def try_out(self, what: str, work: Callable[[], str], *, own_progress: bool = False) -> bool:
        """Run a check; return whether it succeeded."""
        began = self.clock.monotonic()
        try:
            with nullcontext() if own_progress else self.progress.step(what) as step:
                seen, ok = work(), True
                if step:
                    step.detail(seen)
        except SmsError as error:
            seen, ok = error.message, False
        self.done.append(Check(what, ok, seen, round(self.clock.monotonic() - began, 2)))
        return ok


def check_file_system(host: Host, overlay: str) -> str:
    """Check the copy with e2fsck.

    Raises:
        SmsError: it is damaged.
    """
    result = host.run("e2fsck", "-f", "-n", overlay, ok=None, timeout=1800)
    if result.status:
        raise SmsError(f"e2fsck: {_last_line(result)}")
    return _last_line(result).partition(": ")[2]


def _last_line(result: Result) -> str:
    lines = (result.stdout or result.stderr).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"status {result.status}"


def check_isolation(lab: Lab, cluster: Cluster) -> str:
    """Check that interfaces of the rehearsal are only connected to each other.

    Raises:
        SmsError: one has another connection.
    """
    spaces = {space: Local(space, ("nsenter", f"--net=/run/netns/{space}", "--")) for space in lab.layout.namespaces}
    running = find_instance(cluster, lab.host(CARRIER))
    links = {space: list_links(host, details=True) for space, host in spaces.items()}
    if running:
        inside = ("nsenter", f"--net=/proc/{running.pid}/ns/net", "--")
        links["the container"] = list_links(lab.host(CARRIER), *inside, details=True)
    cables = count_cables(links)
    known = Local().run("ip", "-json", "netns", "list-id").parse(list[dict[str, Any]], empty=b"[]")
    crossing = {entry.get("name") for entry in known} & set(spaces)
    if crossing:
        raise SmsError(f"this machine's own network has a cable into {', '.join(sorted(map(str, crossing)))}")
    return f"{cables} cables, each from one of its {len(links)} network namespaces to another; none to this machine's"


def count_cables(links: Mapping[str, Sequence[Link]]) -> int:
    """Count the cables between networks.

    Args:
        links: interfaces with details, by network.

    Raises:
        SmsError: an interface that is up is neither a bridge nor part of a cable within the rehearsal.
    """
    ends: dict[tuple[int, int], str] = {}
    for space, found in links.items():
        for link in found:
            kind = link.get("linkinfo", {}).get("info_kind", "")
            if kind == "veth":
                ends.setdefault((link["ifindex"], link.get("link_index", 0)), space)
            elif "UP" in link.get("flags", []) and kind != "bridge" and link.get("link_type") != "loopback":
                raise SmsError(f"{link['ifname']} of {space} is not a cable of the rehearsal: {kind or 'hardware'}")
    total = 0
    for space, found in links.items():
        for link in found:
            if link.get("linkinfo", {}).get("info_kind") != "veth":
                continue
            total += 1
            # Its peer is in the network namespace of the container's own probe.
            if (link.get("link_index", 0), link["ifindex"]) not in ends and space != "the container":
                raise SmsError(f"the peer of {link['ifname']} of {space} is outside the rehearsal")
    return total // 2


def jobs_in_state(overlay: str, folder: str, state: str, taken: float) -> list[int]:
    """Return the ids of the batch jobs that the state in an overlay must have; the overlay must not be in use.

    Args:
        folder: temporary mount point.
        state: the controller's state folder in the container.
        taken: Unix time when the state was copied.
    """
    return read_jobs(Local().run("unshare", "-m", *script_argv("list-jobs", overlay, folder, state)).text, taken)


def read_jobs(output: str, taken: float) -> list[int]:
    """Parse the output of ``list-jobs`` into ids, without jobs so new that the state may not have them."""
    found = []
    for line in output.splitlines():
        name, _, made = line.partition(" ")
        number = name.removeprefix("job.")
        if number.isdecimal() and made.replace(".", "", 1).isdecimal() and float(made) + SETTLED_S < taken:
            found.append(int(number))
    return sorted(found)


class Inside:
    """Runs commands in the rehearsed container."""

    def __init__(self, cluster: Cluster, host: Netns) -> None:
        self.cluster = cluster
        self.host = host

    def run(self, *argv: str, ok: tuple[int, ...] | None = (0,), input: bytes | None = None) -> Result:
        """Run a command in the container."""
        words = inside_argv(self.cluster.site, self.cluster.services, *argv)
        return self.host.run(*words, ok=ok, input=input, timeout=90, limit=JOBS_BYTES)


def check_jobs(inside: Inside, expected: list[int], known: set[int]) -> str:
    """Check that the controller knows every job of the snapshot's state.

    Args:
        known: gets the ids of all jobs that it knows; of a job array, that of the array, too.

    Raises:
        SmsError: it has lost some.
    """
    listed = inside.run("squeue", "--all", "--array", "--states=all", "--noheader", "--format=%A %F").text
    # It purges old jobs that have ended, but logs that it recovered them.
    controller = inside.cluster.find_role("controller")
    assert controller
    started = f"{controller.run[0]} version .* started"
    log = inside.run("grep", "-E", f"{started}|Recovered", f"/var/log/sms/{controller.name}.log", ok=None).text
    known |= {int(word) for word in listed.split() if word.isdecimal()} | read_recovered(log, started)
    lost = sorted(set(expected) - known)
    if lost:
        ids = ", ".join(map(str, lost[:10]))
        raise SmsError(f"{len(lost)} of {len(expected)} jobs of the snapshot are lost: {ids}")
    return f"{len(expected)} batch jobs of the snapshot, none lost; the controller knows {len(known)}"


QUEUE = ("env", "SLURM_TIME_FORMAT=%s", "squeue", "--all", "--states=all", "--noheader", "--format=%F %V")
"""Id and Unix time of submission of every job; of an array, the id of the array."""


def query_production(cluster: Cluster, host: Host, taken: float) -> frozenset[int]:
    """Return the ids of production's jobs that a snapshot of its state must have; nothing is changed there.

    Args:
        host: where production runs.
        taken: Unix time of the snapshot.

    Raises:
        SmsError: its controller does not answer.
    """
    return read_queue(
        host.run(*inside_argv(cluster.site, cluster.services, *QUEUE), timeout=90, limit=JOBS_BYTES).text, taken
    )


def read_queue(output: str, taken: float) -> frozenset[int]:
    """Parse the output of ``QUEUE``, without jobs so new that the snapshot may not have them."""
    found = set()
    for line in output.splitlines():
        number, _, submitted = line.partition(" ")
        if number.isdecimal() and submitted.isdecimal() and int(submitted) + SETTLED_S < taken:
            found.add(int(number))
    return frozenset(found)


def compare_production(known: set[int], production: frozenset[int]) -> str:
    """Check that the jobs of production are known.

    Raises:
        SmsError: some are not.
    """
    lost = sorted(production - known)
    if lost:
        ids = ", ".join(map(str, lost[:10]))
        raise SmsError(f"{len(lost)} of {len(production)} jobs of production are not in the snapshot: {ids}")
    return f"{len(production)} jobs, none missing"


def read_recovered(log: str, started: str) -> set[int]:
    """Return the jobs that the controller has recovered since its last start, from those lines of its log.

    Args:
        started: pattern of the line that it logs at a start.
    """
    last = re.split(started, log)[-1]
    return {int(number) for number in re.findall(r"\bJobId=(\d+)(?!\S)", last)}


def reserve_nodes(inside: Inside, nodes: tuple[str, ...], user: str) -> None:
    """Reserve the nodes for the rehearsal's own job, so that no job of a user runs on them.

    Jobs of the snapshot on these nodes are lost, but only in this copy.
    """
    names = ",".join(nodes)
    inside.run("scontrol", "update", f"nodename={names}", "state=down", f"reason={RESERVATION}")
    inside.run("scontrol", "delete", f"reservation={RESERVATION}", ok=None)
    reservation = (f"reservationname={RESERVATION}", "starttime=now", "duration=infinite", f"users={user}")
    inside.run("scontrol", "create", "reservation", *reservation, f"nodes={names}", "flags=maint,ignore_jobs")
    tolerant = override_resources(inside.run("scontrol", "show", "config").text)
    inside.run("tee", "--append", "/etc/slurm/slurm.conf", input=tolerant.encode())
    inside.run("scontrol", "reconfigure")


def override_resources(config: str) -> str:
    """Return the line of slurm.conf that makes the controller use the resources named there, not those of the nodes.

    In a rehearsal these share one machine. Other parameters of ``config``, the output of scontrol, are kept.
    """
    had = re.search(r"^SlurmdParameters *= *(?!\(null\))(\S+)", config, re.MULTILINE)
    return f"SlurmdParameters={had[1] + ',' if had else ''}config_overrides\n"


def check_nodes(lab: Lab, inside: Inside, user: str) -> str:
    """Reserve and connect the rehearsal's nodes, and wait until they register with the controller.

    Raises:
        SmsError: one does not.
    """
    reserve_nodes(inside, lab.nodes, user)
    put_up_cables(lab.layout)
    waiting = ""

    def ready() -> str:
        nonlocal waiting
        rows = [read_fields(line) for line in _shown_nodes(inside, lab.nodes)]
        for row in rows:
            state = row.get("State", "")
            if "DOWN" in state and "*" not in state and "NOT_RESPONDING" not in state:
                inside.run("scontrol", "update", f"nodename={row['NodeName']}", "state=resume", ok=None)
        states = {row.get("NodeName", ""): row.get("State", "") for row in rows}
        waiting = ", ".join(f"{name} {state}" for name, state in states.items() if not is_idle(state))
        return "" if waiting else f"{', '.join(lab.nodes)}: slurmd {rows[0].get('Version', '')}"

    try:
        return demo.wait_for("registration of every node", ready, 90)
    except SmsError as error:
        raise SmsError(f"{error.message}: {waiting}") from error


def is_idle(state: str) -> bool:
    """Return whether a node with this state of scontrol accepts jobs."""
    base, *flags = state.split("+")
    bad = {"DRAIN", "NOT_RESPONDING", "INVALID_REG", "DOWN", "POWERED_DOWN", "COMPLETING"}
    return base == "IDLE" and not bad & set(flags)


def _shown_nodes(inside: Inside, nodes: tuple[str, ...]) -> list[str]:
    return inside.run("scontrol", "--oneliner", "show", "node", ",".join(nodes), ok=None).text.splitlines()


def check_job(lab: Lab, inside: Inside, user: str, found: dict[str, str]) -> str:
    """Run a batch job with a step on every node, submitted from one of them; its id is stored in ``found``.

    Raises:
        SmsError: it does not complete.
    """
    rows = {row["NodeName"]: row.get("Partitions", "") for row in map(read_fields, _shown_nodes(inside, lab.nodes))}
    partition = next((names.split(",")[0] for names in rows.values() if names), "")
    if not partition:
        raise SmsError(f"{', '.join(rows)} are in no partition: no job could run there")
    inside.run("scontrol", "update", f"partitionname={partition}", "state=up", ok=None)
    nodes = [name for name, names in rows.items() if partition in names.split(",")]
    first = lab.host(nodes[0])
    where = ("--chdir=/home", "--output=/home/rehearsal-%j.out", f"--nodes={len(nodes)}", "--time=2")
    placement = (f"--reservation={RESERVATION}", f"--partition={partition}", f"--nodelist={','.join(nodes)}")
    mail = ("--mail-type=END", f"--mail-user={user}@example.test")
    first.run("chmod", "1777", "/home")
    argv = ("runuser", "-u", user, "--", "sbatch", "--parsable", *where, *placement, *mail, "--wrap=srun hostname")
    job = first.run(*argv, timeout=90).text.partition(";")[0]
    found["job"] = job

    def ended() -> str:
        row = read_fields(first.run("scontrol", "--oneliner", "show", "job", job).text)
        unfinished = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        found["state"] = f"{row.get('JobState')} {row.get('Reason', '')}"
        return "" if row.get("JobState") in unfinished else row["JobState"]

    try:
        state = demo.wait_for("the end of the job", ended, 90)
    except SmsError as error:
        raise SmsError(f"{error.message}: job {job} is {found['state']}") from error
    output = first.run("cat", f"/home/rehearsal-{job}.out", ok=None).text.split()
    if state != "COMPLETED" or sorted(output) != sorted(nodes):
        raise SmsError(f"job {job} ended as {state} and printed: {' '.join(output)[:200]}")
    return f"job {job} {state}, a step on {', '.join(sorted(output))}"


def check_nat(lab: Lab) -> str:
    """Fetch a page from outside the public network, which contains the client's address.

    Raises:
        SmsError: the request failed, or did not come from the container's address.
    """
    plan = lab.layout.plan
    url = f"http://{plan.gateways[PUBLIC]}/"
    page = lab.host(lab.nodes[0]).run("curl", "-sS", "--fail", "--noproxy", "*", "--max-time", "10", url).text
    if plan.addresses[PUBLIC] not in page.split():
        raise SmsError(f"the request did not come from the container's address: {page[:200]}")
    return page


def check_syslog(lab: Lab, inside: Inside) -> str:
    """Check that a line logged on a node reaches the container, and the site's syslog server if it has one.

    Raises:
        SmsError: it does not.
    """
    word = f"sms-rehearsal-{lab.name}-{time.time_ns()}"
    lab.host(lab.nodes[-1]).run("logger", "--tag", "rehearsal", word)

    def line() -> str:
        return inside.run("grep", "-h", "-m1", word, "/var/log/messages", ok=None).text

    def forwarded() -> str:
        return lab.host(OUTSIDE).run("grep", "-m1", word, "/var/log/remote.log", ok=None).text

    seen = demo.wait_for("the line", line, 30)
    if not inside.cluster.site.syslog_forward:
        return seen
    demo.wait_for("the forwarded line", forwarded, 30)
    return f"{seen}; forwarded to {inside.cluster.site.syslog_forward}"
