"""What a rehearsal tries, each with the evidence that it gives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import SmsError
from appliance.host.base import Host, Result
from appliance.host.local import Local
from appliance.host.netns import Netns
from appliance.lab import Lab, put_up_cables
from appliance.lab.layout import PUBLIC
from appliance.operations.context import Cluster
from appliance.operations.lab import demo
from appliance.operations.upgrade.rehearse_plan import CARRIER, OUTSIDE
from appliance.plan.machine import inside_argv, instance_name
from appliance.progress import Progress
from appliance.tools import apptainer

RESERVATION = "sms-rehearsal"
SETTLED_S = 10
"""A job's folder that was there for so many seconds is of a job that the state file has: a folder is made at once, and
state is saved within 5 seconds of a change (SAVE_MAX_WAIT of src/slurmctld/state_save.h)."""
STATE = """\
mkdir -p "$2" && mount -t ext3 -o loop,ro,noload "$1" "$2" || exit 1
cd "$2/upper$3" 2>/dev/null || exit 0
exec find . -mindepth 2 -maxdepth 2 -path './hash.*/job.*' -printf '%f %T@\\n'
"""
"""Shell, in mounts of its own: the folder of each batch job in state folder $3 of overlay $1, and when it was made."""
TOLERANT = """\
had=$(scontrol show config | sed -n 's/^SlurmdParameters *= *//p')
case $had in "(null)"|"") had= ;; *) had=$had, ;; esac
echo "SlurmdParameters=${had}config_overrides" >>/etc/slurm/slurm.conf && scontrol reconfigure
"""
"""Shell, inside: nodes count as slurm.conf says, whatever they have (slurm.conf(5)): here they share one machine."""


@dataclass(frozen=True)
class Check:
    """One thing that was tried; ``seen`` is the evidence, or what went wrong."""

    what: str
    ok: bool
    seen: str
    seconds: float


@dataclass
class Checks:
    """What was tried so far; a check that fails does not end the rehearsal."""

    progress: Progress
    done: list[Check] = field(default_factory=list)

    def try_out(self, what: str, work: Callable[[], str], *, own_progress: bool = False) -> bool:
        """Try one thing; say whether it works."""
        began = time.monotonic()
        try:
            if own_progress:
                seen = work()
            else:
                with self.progress.step(what) as step:
                    seen = work()
                    step.detail(seen)
            ok = True
        except SmsError as error:
            seen, ok = error.message, False
        self.done.append(Check(what, ok, seen, round(time.monotonic() - began, 2)))
        return ok


def check_file_system(host: Host, overlay: str) -> str:
    """The copy as it came, every part of it looked at.

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
    """No interface of the rehearsal leads anywhere but to another of its own.

    Raises:
        SmsError: one does.
    """
    spaces = {space: Local(space, ("nsenter", f"--net=/run/netns/{space}", "--")) for space in lab.layout.namespaces}
    running = apptainer.find_instance(lab.host(CARRIER), instance_name(cluster.site))
    asked: dict[str, Any] = {space: links_of(host) for space, host in spaces.items()}
    if running:
        inside = ("nsenter", f"--net=/proc/{running.pid}/ns/net", "--")
        asked["the container"] = json.loads(lab.host(CARRIER).run(*inside, "ip", "-json", "-details", "link").stdout)
    cables = count_cables(asked)
    known = Local().run("ip", "-json", "netns", "list-id").stdout
    crossing = {entry.get("name") for entry in json.loads(known or b"[]")} & set(spaces)
    if crossing:
        raise SmsError(f"this machine's own network has a cable into {', '.join(sorted(map(str, crossing)))}")
    return f"{cables} cables, each from one of its {len(asked)} network namespaces to another; none to this machine's"


def links_of(host: Host) -> list[dict[str, Any]]:
    """Interfaces of a network."""
    found: list[dict[str, Any]] = json.loads(host.run("ip", "-json", "-details", "link").stdout or b"[]")
    return found


def count_cables(links: dict[str, list[dict[str, Any]]]) -> int:
    """Cables between networks; links by network as `ip -json -details link` tells them.

    Raises:
        SmsError: an interface that is up is neither a bridge nor the end of a cable whose other end is here.
    """
    ends: dict[tuple[int, int], str] = {}
    for space, found in links.items():
        for link in found:
            kind = link.get("linkinfo", {}).get("info_kind", "")
            if kind == "veth":
                ends.setdefault((link["ifindex"], link.get("link_index", 0)), space)
            elif "UP" in link.get("flags", []) and kind != "bridge" and link.get("link_type") != "loopback":
                raise SmsError(f"{link['ifname']} of {space} is no cable of the rehearsal's: {kind or 'hardware'}")
    total = 0
    for space, found in links.items():
        for link in found:
            if link.get("linkinfo", {}).get("info_kind") != "veth":
                continue
            total += 1
            # The container's own probe stands behind it, in a network that it makes for itself.
            if (link.get("link_index", 0), link["ifindex"]) not in ends and space != "the container":
                raise SmsError(f"nobody here has the other end of {link['ifname']} of {space}")
    return total // 2


def jobs_in_state(overlay: str, folder: str, state: str, taken: float) -> list[int]:
    """Ids of the batch jobs that the state in an overlay has for sure; nobody may use the overlay.

    Args:
        folder: where it can be mounted for a moment.
        state: the controller's state folder, inside.
        taken: when the state was copied, Unix time.
    """
    return read_jobs(Local().run("unshare", "-m", "sh", "-c", STATE, "state", overlay, folder, state).text, taken)


def read_jobs(told: str, taken: float) -> list[int]:
    """What ``STATE`` printed, as ids, without those that came so late that the state may not have them."""
    found = []
    for line in told.splitlines():
        name, _, made = line.partition(" ")
        number = name.removeprefix("job.")
        if number.isdecimal() and float(made or "inf") + SETTLED_S < taken:
            found.append(int(number))
    return sorted(found)


class Inside:
    """The rehearsed container, and commands in it."""

    def __init__(self, cluster: Cluster, host: Netns) -> None:
        self.cluster = cluster
        self.host = host

    def run(self, *argv: str, ok: tuple[int, ...] | None = (0,)) -> Result:
        """Run a command in the container."""
        return self.host.run(*inside_argv(self.cluster.site, *argv), ok=ok, timeout=90)


def check_jobs(inside: Inside, wanted: list[int]) -> str:
    """The controller knows every job that the snapshot's state has.

    Raises:
        SmsError: it has lost some.
    """
    told = inside.run("squeue", "--all", "--array", "--states=all", "--noheader", "--format=%A").text
    # It lets go of old ones that have ended, but says of each that it had it.
    log = inside.run(
        *("sh", "-c", "tac /var/log/sms/slurmctld.log | sed '/slurmctld version .* started/q' | grep Recovered"),
        ok=None,
    ).text
    known = {int(word) for word in told.split() if word.isdecimal()}
    known |= {int(word.partition("=")[2]) for word in log.split() if word.startswith("JobId=") and word[6:].isdecimal()}
    lost = sorted(set(wanted) - known)
    if lost:
        raise SmsError(f"{len(lost)} of {len(wanted)} jobs of the snapshot are lost: {', '.join(map(str, lost[:10]))}")
    return f"{len(wanted)} batch jobs of the snapshot, none lost; the controller knows {len(known)}"


def set_nodes_apart(inside: Inside, nodes: tuple[str, ...], user: str) -> None:
    """Nobody's job but the rehearsal's own runs on its nodes: production's users never notice one.

    Jobs of the snapshot that had these nodes lose them, in this copy alone.
    """
    names = ",".join(nodes)
    inside.run("scontrol", "update", f"nodename={names}", "state=down", f"reason={RESERVATION}")
    inside.run("scontrol", "delete", f"reservation={RESERVATION}", ok=None)
    reservation = (f"reservationname={RESERVATION}", "starttime=now", "duration=infinite", f"users={user}")
    inside.run("scontrol", "create", "reservation", *reservation, f"nodes={names}", "flags=maint,ignore_jobs")
    inside.run("sh", "-c", TOLERANT, "tolerant")


def check_nodes(lab: Lab, inside: Inside, user: str) -> str:
    """The rehearsal's nodes, set apart, then cabled, register with the controller.

    Raises:
        SmsError: one does not.
    """
    set_nodes_apart(inside, lab.nodes, user)
    put_up_cables(lab.layout)
    waiting = ""

    def ready() -> str:
        nonlocal waiting
        rows = [_words(line) for line in _shown_nodes(inside, lab.nodes)]
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
    """Whether a node, in the words of scontrol, would take a job."""
    base, *flags = state.split("+")
    bad = {"DRAIN", "NOT_RESPONDING", "INVALID_REG", "DOWN", "POWERED_DOWN", "COMPLETING"}
    return base == "IDLE" and not bad & set(flags)


def _shown_nodes(inside: Inside, nodes: tuple[str, ...]) -> list[str]:
    return inside.run("scontrol", "--oneliner", "show", "node", ",".join(nodes), ok=None).text.splitlines()


def _words(line: str) -> dict[str, str]:
    """Key and value of each word of an output of scontrol."""
    return dict(word.partition("=")[::2] for word in line.split() if "=" in word)


def check_job(lab: Lab, inside: Inside, user: str, told: dict[str, str]) -> str:
    """A batch job with a step on every node, submitted from one of them; its id goes into ``told``.

    Raises:
        SmsError: it does not complete.
    """
    rows = {row["NodeName"]: row.get("Partitions", "") for row in map(_words, _shown_nodes(inside, lab.nodes))}
    partition = next((names.split(",")[0] for names in rows.values() if names), "")
    if not partition:
        raise SmsError(f"{', '.join(rows)} are in no partition: no job could run there")
    inside.run("scontrol", "update", f"partitionname={partition}", "state=up", ok=None)
    nodes = [name for name, names in rows.items() if partition in names.split(",")]
    first = lab.host(nodes[0])
    where = ("--chdir=/home", "--output=/home/rehearsal-%j.out", f"--nodes={len(nodes)}", "--time=2")
    how = (f"--reservation={RESERVATION}", f"--partition={partition}", f"--nodelist={','.join(nodes)}")
    mail = ("--mail-type=END", f"--mail-user={user}@example.test")
    first.run("sh", "-c", "chmod 1777 /home", "home")
    words = ("runuser", "-u", user, "--", "sbatch", "--parsable", *where, *how, *mail, "--wrap=srun hostname")
    job = first.run(*words, timeout=90).text.partition(";")[0]
    told["job"] = job

    def ended() -> str:
        row = _words(first.run("scontrol", "--oneliner", "show", "job", job).text)
        going = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        told["state"] = f"{row.get('JobState')} {row.get('Reason', '')}"
        return "" if row.get("JobState") in going else row["JobState"]

    try:
        state = demo.wait_for("the end of the job", ended, 90)
    except SmsError as error:
        raise SmsError(f"{error.message}: job {job} is {told['state']}") from error
    said = first.run("cat", f"/home/rehearsal-{job}.out", ok=None).text.split()
    if state != "COMPLETED" or sorted(said) != sorted(nodes):
        raise SmsError(f"job {job} ended as {state} and printed: {' '.join(said)[:200]}")
    return f"job {job} {state}, a step on {', '.join(sorted(said))}"


def check_nat(lab: Lab, cluster: Cluster) -> str:
    """A page from beyond the public network; it says which address it was fetched by.

    Raises:
        SmsError: it does not come, or not through the container.
    """
    page = lab.host(lab.nodes[0]).run("curl", "-sS", "--fail", "--max-time", "10", f"http://{_outside(lab)}/").text
    if lab.layout.plan.addresses[PUBLIC] not in page.split():
        raise SmsError(f"the outside saw somebody else than the container: {page[:200]}")
    return page


def _outside(lab: Lab) -> str:
    return lab.layout.plan.gateways[PUBLIC]


def check_syslog(lab: Lab, inside: Inside) -> str:
    """A line logged on a node is in the container's messages, and at the site's collector where it has one.

    Raises:
        SmsError: it is not.
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
