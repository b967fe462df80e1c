"""Evaluate facts about a host: findings on what it lacks to run the services container, with fixes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from appliance.plan.hosts.apptainer import find_newer
from appliance.plan.hosts.distro import INSTALL, install_command
from appliance.plan.hosts.facts import Facts

State = Literal["ok", "warning", "missing"]

PROGRAMS = (
    *(
        "arping",
        "conntrack",
        "debugfs",
        "e2fsck",
        "flock",
        "fsfreeze",
        "ip",
        "iptables",
        "losetup",
        "mksquashfs",
        "nft",
        "ps",
    ),
    *("rsync", "setpriv", "unsquashfs"),
)
"""Programs that `sms` and Apptainer call on an admin host."""

FILE_SYSTEMS = {"overlay": "overlay", "squashfs": "squashfs", "ext3": "ext4"}
"""Required file systems, and their kernel modules."""

OLDEST_KERNEL = (5, 6)
"""The first one with pidfd_getfd(2)."""
OLDEST_APPTAINER = (1, 1)
_CHAIN = re.compile(r"(ip|inet) [A-Za-z0-9_.-]+ [A-Za-z0-9_.-]+")
"""Family, table and name of a chain; other names than these are not repeated in a command."""
IMAGE_BYTES = 1 << 30
"""Space for an image and the previous one."""


@dataclass(frozen=True)
class Finding:
    """Result of a check. ``mend`` is a command that fixes it; without one, ``detail`` describes what to do."""

    what: str
    state: State
    detail: str = ""
    mend: str = ""


def examine(
    facts: Facts, *, bridges: Mapping[str, str | None], parents: Sequence[str] = (), overlay_bytes: int
) -> list[Finding]:
    """Run all checks, in the order in which they should be fixed.

    Args:
        bridges: each with its port as configured in the site file.
        parents: interfaces that carry macvlan interfaces.
    """
    findings = [check(facts) for check in CHECKS]
    findings += [_schedule(facts)] if bridges or parents else []
    findings += [_firewall(facts, list(bridges))] if bridges else []
    findings += [_bridge(facts, name, port) for name, port in bridges.items()]
    findings += [_macvlan(facts)] if parents else []
    findings += [_parent(facts, name) for name in dict.fromkeys(parents)]
    findings.append(_space(facts, "room for images", "images_free", IMAGE_BYTES))
    if not facts.values.get("overlay_there"):
        findings.append(_space(facts, "room for the overlay", "overlay_free", overlay_bytes))
    return findings


def worst(findings: list[Finding]) -> State:
    """Return the worst state of the findings."""
    states = {finding.state for finding in findings}
    return "missing" if "missing" in states else "warning" if "warning" in states else "ok"


def _root(facts: Facts) -> Finding:
    if facts.values.get("uid") == "0":
        return Finding("root", "ok")
    return Finding("root", "missing", "Apptainer's networks and mounts require root: run it with sudo")


def _kernel(facts: Facts) -> Finding:
    lacking = [name for name in FILE_SYSTEMS if name not in facts.filesystems | set(facts.words("loadable"))]
    modules = [FILE_SYSTEMS[name] for name in lacking]
    for feature in ("loop", "bridge"):
        if facts.values.get(feature) != "yes":
            lacking.append(feature)
            modules.append(feature)
    detail = ""
    if facts.values.get("netns") != "yes":
        lacking.append("netns")
        detail = "; use a kernel with CONFIG_NET_NS"
    if not lacking:
        release = facts.values.get("kernel", "")
        found = re.match(r"(\d{1,9})\.(\d{1,9})", release)
        if found and (int(found[1]), int(found[2])) < OLDEST_KERNEL:
            required = ".".join(map(str, OLDEST_KERNEL))
            return Finding(
                "kernel",
                "warning",
                f"{release}: before {required}, `sms migrate` from here loses log lines sent over TCP",
            )
        return Finding("kernel", "ok", release)
    fix = "modprobe -a " + " ".join(modules) if modules else ""
    return Finding("kernel", "missing", f"no support for {', '.join(lacking)}{detail}", fix)


def _nftables(facts: Facts) -> Finding:
    if facts.values.get("nft") == "yes":
        return Finding("nftables in the kernel", "ok")
    if "nft" not in facts.words("programs"):
        return Finding("nftables in the kernel", "warning", "unknown: nft is not installed", install_fix(facts, "nft"))
    return Finding("nftables in the kernel", "missing", "required for the container's NAT", "modprobe nf_tables")


def _programs(facts: Facts) -> Finding:
    lacking = [name for name in PROGRAMS if name not in facts.words("programs")]
    if not lacking:
        return Finding("programs", "ok", f"{len(PROGRAMS)} found")
    return Finding("programs", "missing", f"not installed: {', '.join(lacking)}", install_fix(facts, *lacking))


def install_fix(facts: Facts, *programs: str) -> str:
    """Return the command that installs them; empty for an unknown distribution."""
    return install_command(programs, facts.family) if facts.family in INSTALL else ""


def _apptainer(facts: Facts) -> Finding:
    output = facts.values.get("apptainer", "")
    found = re.search(r"(\d{1,9})\.(\d{1,9})[\d.]*", output)
    fix = {"redhat": "dnf install epel-release && dnf install apptainer", "suse": "zypper install apptainer"}.get(
        facts.family, f"sms host prepare {facts.host}"
    )
    if not found:
        return Finding(
            "apptainer", "missing", "not installed" if "not found" in output else output or "not installed", fix
        )
    version = (int(found[1]), int(found[2]))
    if version < OLDEST_APPTAINER:
        required = ".".join(map(str, OLDEST_APPTAINER))
        return Finding("apptainer", "missing", f"{found[0]} is too old, {required} or newer is required", fix)
    if newer := find_newer(facts):
        return Finding("apptainer", "warning", f"{found[0]}: {newer[0]}", newer[1])
    return Finding("apptainer", "ok", found[0])


def _singularity(facts: Facts) -> Finding:
    if "singularity" in facts.words("programs"):
        return Finding("the name singularity", "ok")
    fix = "ln -s apptainer /usr/bin/singularity"
    return Finding("the name singularity", "missing", "the Python library runs Apptainer by this name", fix)


def _plugins(facts: Facts) -> Finding:
    lacking = [name for name in ("bridge", "static", "tuning") if name not in facts.words("cni")]
    if not lacking:
        return Finding("CNI plugins", "ok", facts.values.get("cni_folder", ""))
    elsewhere = facts.values.get("cni_elsewhere")
    if elsewhere:
        fix = f"echo 'cni plugin path = {elsewhere}' >>/etc/apptainer/apptainer.conf"
        return Finding("CNI plugins", "missing", f"they are in {elsewhere}, not in Apptainer's plugin path", fix)
    detail = f"no {', '.join(lacking)} in Apptainer's plugin path"
    return Finding("CNI plugins", "missing", detail, install_fix(facts, "cni"))


def _capabilities(facts: Facts) -> Finding:
    lacking = facts.lacking_capabilities
    if lacking is None:
        return Finding("capabilities", "warning", "they cannot be read", "grep CapPrm /proc/self/status")
    if not lacking:
        return Finding("capabilities", "ok", "root has all")
    names = ",".join(lacking)
    if set(lacking) <= set(facts.values.get("wrapper", "").split(",")):
        return Finding("capabilities", "ok", f"root lacks {names}; Apptainer's wrapper drops it")
    detail = f"root lacks {names}, and Apptainer requests all"
    if facts.family == "debian" and "version" not in facts.values.get("apptainer", ""):
        # It installs the wrapper together with Apptainer.
        return Finding("capabilities", "missing", detail, f"sms host prepare {facts.host}")
    wrapper = f"a wrapper at /usr/bin/apptainer that adds --drop-caps {names}"
    return Finding("capabilities", "missing", f"{detail}: give root all of them, or install {wrapper}")


def _firewall(facts: Facts, bridges: Sequence[str]) -> Finding:
    """Check that the host's firewall passes packets between ports of the site's bridges, now and after a boot."""
    what, fix = "firewall and bridges", f"sms host prepare {facts.host}"
    now, boot = (facts.values.get(name, "0") != "0" for name in ("bridge_nf", "bridge_nf_boot"))
    if not now and not boot:
        return Finding(what, "ok", "bridged packets bypass the host's firewall")
    if drops := list(filter(_CHAIN.fullmatch, facts.values.get("forward_drops", "").split("\t"))):
        detail = (
            f"the host's firewall sees bridged packets, and drops them in {', '.join(drops)} if no rule passes them"
        )
        rules = [f"nft insert rule {chain} iifname {one} oifname {one} accept" for chain in drops for one in bridges]
        return Finding(what, "warning", f"{detail}; add these to its configuration, too", " && ".join(rules))
    if now and (lacking := set(bridges) - set(facts.words("bridge_rules"))):
        detail = f"the host's firewall sees packets on {', '.join(sorted(lacking))}, and may drop them"
        return Finding(what, "warning", detail, fix)
    if boot and (lacking := set(bridges) - set(facts.words("bridge_units"))):
        detail = f"after a boot the host's firewall sees packets on {', '.join(sorted(lacking))}, and may drop them"
        alone = "" if facts.values.get("systemd") == "yes" else "; without systemd nothing sets the rules then"
        return Finding(what, "warning", detail + alone, fix)
    return Finding(what, "ok", "the host's firewall passes packets between ports of the site's bridges")


def _clock(facts: Facts) -> Finding:
    state = facts.values.get("clock", "")
    if state == "yes":
        return Finding("clock", "ok", "synchronised")
    detail = "not synchronised" if state == "no" else "unknown whether it is synchronised"
    why = f"{detail}; munge rejects credentials that are more than 5 minutes off"
    return Finding(
        "clock", "warning", why, " && ".join(filter(None, [install_fix(facts, "chrony"), "chronyc makestep"]))
    )


def _state(facts: Facts) -> Finding:
    open_folders = [entry.partition(":")[2] for entry in facts.words("modes") if not entry.startswith("700:")]
    if not open_folders:
        return Finding("state folders", "ok", "not accessible to other users, or not created yet")
    return Finding("state folders", "warning", "accessible to other users", "chmod 700 " + " ".join(open_folders))


def _boot(facts: Facts) -> Finding:
    if facts.values.get("systemd") == "yes":
        return Finding("after a reboot", "ok", "systemd restarts the services container")
    detail = "no systemd, so nothing restarts the services container"
    sms = facts.values.get("sms", "")
    if not sms.startswith("/"):
        return Finding("after a reboot", "warning", f"{detail}; and sms is not in the PATH")
    # cron's PATH is /usr/bin and /bin.
    fix = f"(crontab -l; echo '@reboot {sms} --quiet --site /etc/sms/sms.yaml start --boot') | crontab -"
    return Finding("after a reboot", "warning", detail, fix)


def _cron(facts: Facts) -> Finding:
    if facts.values.get("cron") == "yes":
        return Finding("cron", "ok", "running")
    if "cron" not in facts.words("programs") and "crond" not in facts.words("programs"):
        return Finding("cron", "missing", "not installed", install_fix(facts, "cron"))
    name = "cron" if facts.family != "redhat" else "crond"
    # The daemon detaches on its own.
    daemon = "cron" if "cron" in facts.words("programs") else "crond"
    fix = f"systemctl enable --now {name}" if facts.values.get("systemd") == "yes" else daemon
    return Finding("cron", "warning", "installed, but not running", fix)


def _schedule(facts: Facts) -> Finding:
    """Check that scheduled snapshots are taken: the schedule entry alone is not enough."""
    what, install = "snapshots", f"sms overlay schedule install --host {facts.host}"
    kind = facts.values.get("schedule")
    if not kind:
        return Finding(what, "warning", "not scheduled", install)
    if facts.values.get("schedule_sms") != "yes":
        return Finding(what, "missing", f"{kind} would run an sms that does not exist", install)
    if kind == "systemd" and facts.values.get("schedule_runs") != "yes":
        return Finding(what, "missing", "their timer is not active", install)
    if kind == "cron" and facts.values.get("cron") != "yes":
        return Finding(what, "missing", "scheduled with cron, which is not running", _cron(facts).mend)
    return Finding(what, "ok", f"scheduled with {kind}")


def examine_vm_schedule(facts: Facts) -> list[Finding]:
    """Check, for a site with a VM, that the schedule includes its state: one of an earlier version does not."""
    what = "VM snapshots"
    if not facts.values.get("schedule"):
        return []  # `snapshots` says that nothing is scheduled
    if facts.values.get("vm_schedule") == "yes":
        return [Finding(what, "ok", "scheduled")]
    return [Finding(what, "warning", "not scheduled", f"sms overlay schedule install --host {facts.host}")]


def examine_addresses(facts: Facts, addresses: Sequence[str]) -> list[Finding]:
    """Check that the container's addresses are not the host's own: nodes would reach the host."""
    own = dict(one.split("@", 1) for one in facts.words("addresses") if "@" in one)
    return [
        Finding(
            f"address {one}",
            "missing",
            f"it is the host's own on {own[one]}; also remove it from the configuration of the network",
            f"ip address del {one} dev {shlex.quote(own[one])}",
        )
        for one in addresses
        if one in own
    ]


def examine_users(facts: Facts, users: Mapping[str, tuple[int, int]]) -> list[Finding]:
    """Compare the ids of accounts that the host has, too, as nodes installed from the same source have them.

    Args:
        users: uid and gid of system users in the container, by name.
    """
    found = []
    for name, (uid, gid) in sorted(users.items()):
        here = facts.values.get(f"ids_{name}")
        if not here:
            continue
        if here == f"{uid}:{gid}":
            found.append(Finding(f"ids of {name}", "ok", here))
            continue
        detail = (
            f"{here} on this host, {uid}:{gid} in the container; nodes need those of the container, "
            f"or set {name}.user in the site file"
        )
        found.append(Finding(f"ids of {name}", "warning", detail))
    return found


def _bridge(facts: Facts, name: str, port: str | None) -> Finding:
    what = f"bridge {name}"
    bridge = facts.bridges.get(name)
    if not bridge:
        return Finding(what, "missing", "does not exist", f"sms host prepare {facts.host}")
    if not bridge.ports:
        detail = "no port that is up: the container would be isolated"
        if port:
            return Finding(what, "missing", detail, f"ip link set dev {port} master {name} up")
        return Finding(what, "missing", f"{detail}; add one, or set `port` in the site file")
    if bridge.stp:
        fix = f"ip link set dev {name} type bridge stp_state 0 forward_delay 0"
        return Finding(what, "warning", "STP is enabled and drops the first announcements of the addresses", fix)
    if bridge.larger:
        larger = ", ".join(f"{port} has {mtu}" for port, mtu in bridge.larger)
        fix = (
            f"ip link set dev {name} mtu {min(mtu for _, mtu in bridge.larger)}, if the nodes use it; then `sms apply`"
        )
        return Finding(what, "warning", f"its MTU is {bridge.mtu}, {larger}: the container takes no larger frames", fix)
    return Finding(what, "ok", f"ports: {', '.join(bridge.ports)}")


def _macvlan(facts: Facts) -> Finding:
    if "tc" not in facts.words("programs"):
        return Finding("macvlan", "missing", "no tc, which detaches the interface", install_fix(facts, "tc"))
    if facts.values.get("cni_folder") and "macvlan" not in facts.words("cni"):
        detail = f"no macvlan among the CNI plugins in {facts.values['cni_folder']}"
        return Finding("macvlan", "missing", detail, install_fix(facts, "cni"))
    return Finding("macvlan", "ok")


def _parent(facts: Facts, name: str) -> Finding:
    what = f"interface {name}"
    if name not in facts.masters:
        return Finding(what, "missing", "does not exist or is down: the container is attached to it")
    if master := facts.masters[name]:
        return Finding(
            what, "missing", f"is a port of {master}, and so cannot carry the container: set `port` in the site file"
        )
    return Finding(what, "ok", "the container is attached to it; this host does not reach the container there")


def _space(facts: Facts, what: str, key: str, need: int) -> Finding:
    free = facts.number(key)
    if free is None:
        return Finding(what, "warning", "unknown free space", "df -h")
    detail = f"{free >> 20} MiB free"
    if free >= need:
        return Finding(what, "ok", detail)
    # The files are sparse: less may be enough for a while.
    state: State = "warning" if free >= need // 4 else "missing"
    return Finding(what, state, f"{detail}, {need >> 20} MiB required: free space, or set `state:` in the site file")


CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    *(_root, _kernel, _nftables, _programs, _apptainer, _singularity, _plugins, _capabilities),
    *(_clock, _state, _boot, _cron),
)
