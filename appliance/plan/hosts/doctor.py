"""What a machine lacks to carry the appliance: facts about it in, findings with their cure out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

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
    *("setpriv", "unsquashfs"),
)
"""What `sms` and Apptainer call on an admin host."""

FILE_SYSTEMS = {"overlay": "overlay", "squashfs": "squashfs", "ext3": "ext4"}
"""File systems that the kernel must know, and the modules that bring them."""

OLDEST_APPTAINER = (1, 1)
IMAGE_BYTES = 1 << 30
"""Room for an image and the one before it."""


@dataclass(frozen=True)
class Finding:
    """One check. ``mend`` is a command that can be typed; what none does, ``detail`` says in words."""

    what: str
    state: State
    detail: str = ""
    mend: str = ""


def examine(facts: Facts, *, bridges: Mapping[str, str | None], overlay_bytes: int) -> list[Finding]:
    """Everything that a host is looked at for, in the order it is best mended.

    Args:
        bridges: each with the interface that the site file names as its port.
    """
    findings = [check(facts) for check in CHECKS]
    findings += [_schedule(facts)] if bridges else []
    findings += [_bridge(facts, name, port) for name, port in bridges.items()]
    findings.append(_room(facts, "room for images", "images_free", IMAGE_BYTES))
    if not facts.said.get("overlay_there"):
        findings.append(_room(facts, "room for the overlay", "overlay_free", overlay_bytes))
    return findings


def worst(findings: list[Finding]) -> State:
    """The state of the whole."""
    states = {finding.state for finding in findings}
    return "missing" if "missing" in states else "warning" if "warning" in states else "ok"


def _root(facts: Facts) -> Finding:
    if facts.said.get("uid") == "0":
        return Finding("root", "ok")
    return Finding("root", "missing", "Apptainer's networks and mounts take root: run it with sudo")


def _kernel(facts: Facts) -> Finding:
    lacking = [name for name in FILE_SYSTEMS if name not in facts.filesystems | set(facts.words("loadable"))]
    modules = [FILE_SYSTEMS[name] for name in lacking]
    for feature in ("loop", "bridge"):
        if facts.said.get(feature) != "yes":
            lacking.append(feature)
            modules.append(feature)
    detail = ""
    if facts.said.get("netns") != "yes":
        lacking.append("netns")
        detail = "; take a kernel with CONFIG_NET_NS"
    if not lacking:
        return Finding("kernel", "ok", facts.said.get("kernel", ""))
    mend = "modprobe -a " + " ".join(modules) if modules else ""
    return Finding("kernel", "missing", f"without {', '.join(lacking)}{detail}", mend)


def _nftables(facts: Facts) -> Finding:
    if facts.said.get("nft") == "yes":
        return Finding("nftables in the kernel", "ok")
    if "nft" not in facts.words("programs"):
        return Finding("nftables in the kernel", "warning", "nft is not there to ask it", _install(facts, "nft"))
    return Finding("nftables in the kernel", "missing", "the container's NAT needs it", "modprobe nf_tables")


def _programs(facts: Facts) -> Finding:
    lacking = [name for name in PROGRAMS if name not in facts.words("programs")]
    if not lacking:
        return Finding("programs", "ok", f"{len(PROGRAMS)} found")
    return Finding("programs", "missing", f"not installed: {', '.join(lacking)}", _install(facts, *lacking))


def _install(facts: Facts, *programs: str) -> str:
    """The command that installs them; empty where the distribution's is not known."""
    return install_command(programs, facts.family) if facts.family in INSTALL else ""


def _apptainer(facts: Facts) -> Finding:
    said = facts.said.get("apptainer", "")
    found = re.search(r"(\d+)\.(\d+)[\d.]*", said)
    mend = {"redhat": "dnf install epel-release && dnf install apptainer", "suse": "zypper install apptainer"}.get(
        facts.family, f"sms host prepare {facts.host}"
    )
    if not found:
        return Finding(
            "apptainer", "missing", "not installed" if "not found" in said else said or "not installed", mend
        )
    version = (int(found[1]), int(found[2]))
    if version < OLDEST_APPTAINER:
        wanted = ".".join(map(str, OLDEST_APPTAINER))
        return Finding("apptainer", "missing", f"{found[0]} is too old, {wanted} is needed", mend)
    return Finding("apptainer", "ok", found[0])


def _singularity(facts: Facts) -> Finding:
    if "singularity" in facts.words("programs"):
        return Finding("the name singularity", "ok")
    mend = "ln -s apptainer /usr/bin/singularity"
    return Finding("the name singularity", "missing", "the Python library calls Apptainer by it", mend)


def _plugins(facts: Facts) -> Finding:
    lacking = [name for name in ("bridge", "static") if name not in facts.words("cni")]
    if not lacking:
        return Finding("CNI plugins", "ok", facts.said.get("cni_folder", ""))
    elsewhere = facts.said.get("cni_elsewhere")
    if elsewhere:
        mend = f"echo 'cni plugin path = {elsewhere}' >>/etc/apptainer/apptainer.conf"
        return Finding("CNI plugins", "missing", f"they are in {elsewhere}, where Apptainer does not look", mend)
    return Finding("CNI plugins", "missing", f"no {', '.join(lacking)} where Apptainer looks", _install(facts, "cni"))


def _capabilities(facts: Facts) -> Finding:
    lacking = facts.lacking_capabilities
    if lacking is None:
        return Finding("capabilities", "warning", "they cannot be read", "grep CapPrm /proc/self/status")
    if not lacking:
        return Finding("capabilities", "ok", "root has all")
    names = ",".join(lacking)
    if set(lacking) <= set(facts.said.get("wrapper", "").split(",")):
        return Finding("capabilities", "ok", f"root lacks {names}; Apptainer's wrapper drops it")
    detail = f"root lacks {names}, and Apptainer asks for all"
    if facts.family == "debian" and "version" not in facts.said.get("apptainer", ""):
        # Puts it there together with Apptainer.
        return Finding("capabilities", "missing", detail, f"sms host prepare {facts.host}")
    wrapper = f"a wrapper at /usr/bin/apptainer that adds --drop-caps {names}"
    return Finding("capabilities", "missing", f"{detail}: give root all of them, or put {wrapper}")


def _firewall(facts: Facts) -> Finding:
    if facts.said.get("bridge_nf", "0") == "0":
        return Finding("firewall and bridges", "ok", "bridged packets pass by the host's firewall")
    mend = "sysctl -w net.bridge.bridge-nf-call-iptables=0"
    return Finding(
        "firewall and bridges", "warning", "the host's firewall sees bridged packets, and may drop them", mend
    )


def _clock(facts: Facts) -> Finding:
    said = facts.said.get("clock", "")
    if said == "yes":
        return Finding("clock", "ok", "synchronised")
    detail = "not synchronised" if said == "no" else "nothing tells whether it is synchronised"
    why = f"{detail}; munge refuses what is more than 5 minutes off"
    return Finding("clock", "warning", why, " && ".join(filter(None, [_install(facts, "chrony"), "chronyc makestep"])))


def _state(facts: Facts) -> Finding:
    open_folders = [entry.split(":", 1)[1] for entry in facts.words("modes") if not entry.startswith("700:")]
    if not open_folders:
        return Finding("state folders", "ok", "closed to others, or not made yet")
    return Finding("state folders", "warning", "open to others", "chmod 700 " + " ".join(open_folders))


def _boot(facts: Facts) -> Finding:
    if facts.said.get("systemd") == "yes":
        return Finding("after a reboot", "ok", "systemd starts what ran")
    detail = "no systemd, so nothing starts the appliance"
    sms = facts.said.get("sms", "")
    if not sms.startswith("/"):
        return Finding("after a reboot", "warning", f"{detail}; and sms is not in the PATH there")
    # cron's PATH is /usr/bin and /bin.
    mend = f"(crontab -l; echo '@reboot {sms} --quiet --site /etc/sms/sms.yaml start --boot') | crontab -"
    return Finding("after a reboot", "warning", detail, mend)


def _cron(facts: Facts) -> Finding:
    if facts.said.get("cron") == "yes":
        return Finding("cron", "ok", "runs")
    if "cron" not in facts.words("programs") and "crond" not in facts.words("programs"):
        return Finding("cron", "missing", "not installed", _install(facts, "cron"))
    name = "cron" if facts.family != "redhat" else "crond"
    # Without systemd, the daemon puts itself into the background.
    daemon = "cron" if "cron" in facts.words("programs") else "crond"
    mend = f"systemctl enable --now {name}" if facts.said.get("systemd") == "yes" else daemon
    return Finding("cron", "warning", "installed, but does not run", mend)


def _schedule(facts: Facts) -> Finding:
    """Whether snapshots are taken by themselves: an entry alone takes none."""
    what, install = "snapshots", f"sms overlay schedule install --host {facts.host}"
    kind = facts.said.get("schedule")
    if not kind:
        return Finding(what, "warning", "nothing takes them by itself", install)
    if facts.said.get("schedule_sms") != "yes":
        return Finding(what, "missing", f"{kind} is to take them by an sms that is not there", install)
    if kind == "systemd" and facts.said.get("schedule_runs") != "yes":
        return Finding(what, "missing", "the timer that takes them is not active", install)
    if kind == "cron" and facts.said.get("cron") != "yes":
        return Finding(what, "missing", "cron is to take them, and does not run", _cron(facts).mend)
    return Finding(what, "ok", f"{kind} takes them")


def _bridge(facts: Facts, name: str, port: str | None) -> Finding:
    what = f"bridge {name}"
    bridge = facts.bridges.get(name)
    if not bridge:
        return Finding(what, "missing", "there is none", f"sms host prepare {facts.host}")
    if not bridge.ports:
        detail = "no port that is up: the container would stand alone"
        if port:
            return Finding(what, "missing", detail, f"ip link set dev {port} master {name} up")
        return Finding(what, "missing", f"{detail}; put one in, or name it as `port` in the site file")
    if bridge.stp:
        mend = f"ip link set dev {name} type bridge stp_state 0 forward_delay 0"
        return Finding(what, "warning", "STP is on, it drops the first announcements of the addresses", mend)
    return Finding(what, "ok", f"ports: {', '.join(bridge.ports)}")


def _room(facts: Facts, what: str, key: str, need: int) -> Finding:
    free = facts.number(key)
    if free is None:
        return Finding(what, "warning", "free space cannot be read", "df -h")
    detail = f"{free >> 20} MiB free"
    if free >= need:
        return Finding(what, "ok", detail)
    # What is there is sparse: it may do for a while.
    state: State = "warning" if free >= need // 4 else "missing"
    return Finding(what, state, f"{detail}, {need >> 20} MiB wanted: make room, or set `state:` in the site file")


CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    *(_root, _kernel, _nftables, _programs, _apptainer, _singularity, _plugins, _capabilities),
    *(_firewall, _clock, _state, _boot, _cron),
)
