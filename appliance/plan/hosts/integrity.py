"""What of a host another program may have changed: Apptainer's files, rules of the packet filter, bridges."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath

from appliance.plan.hosts.doctor import Finding
from appliance.plan.hosts.facts import Facts
from appliance.text import SHORT, one_line

WALK = "docs/security.md, `If keys may have been read`"
SHOWN = 5
"""Of a list, in one finding."""

SET_ID, OTHERS_WRITE = 0o6000, 0o022
SETUID_PROGRAM = "starter-suid"
"""The only program of Apptainer that may change its user (package apptainer-suid)."""

_VERIFIED = re.compile(r"(missing|[A-Z0-9.?]{8,9}) +(?:([acdglmnr]) +)?(/.*)")
"""A line of `dpkg --verify` or `rpm -V`: flags or `missing`, a letter for the kind of file, the path."""
_MODE = re.compile(r"([0-7]{1,6}):(\d{1,10}):(/.*)", re.ASCII)
"""Mode, number of the owner, and path of a file that is not as it should be."""
_DOCUMENTS = ("/usr/share/", "/usr/lib/.build-id/")
"""Below these nothing is executed; minimal installations leave them out."""

COMPARED = {"dpkg": "as in its package", "rpm": "as in its package", "recorded": "as `sms host prepare` installed it"}
RECORD = "/usr/lib/apptainer-private/installed"
MANAGED = re.compile(r"(inet|ip|ip6) firewalld ")
"""Rules of a firewall that names every interface of the host, for the host's own packets."""
PASSES = re.compile(r'ip filter FORWARD: iifname "([^"]+)" oifname "\1" +counter packets \d+ bytes \d+ accept')
"""Rules that ``sms host prepare`` makes."""


def examine_integrity(facts: Facts, ours: Collection[str]) -> list[Finding]:
    """Check Apptainer's files, and what else is attached to the interfaces of the site.

    Args:
        ours: the site's bridges on this host, and the interfaces that carry the container.
    """
    return [*_apptainer(facts), *_filter(facts, ours), *_bridges(facts, ours)]


def _apptainer(facts: Facts) -> Iterator[Finding]:
    """Compare mode, owner and content of Apptainer's files: the container's root runs as them."""
    what, program = "Apptainer's files", facts.values.get("apptainer_program")
    if not program:
        return  # not installed: the finding `apptainer`
    wrong, files = _wrong_modes(facts), _differing(facts)
    if wrong or files:
        detail = f"{_some([*wrong.values(), *files])}; if that was not you: {WALK}"
        modes = f"chmod u-s,g-s,go-w {shlex.join(wrong)}"
        owners = [path for path, words in wrong.items() if "user" in words]
        yield Finding(what, "missing", detail, _reinstall(facts) if files or owners else modes)
        return
    compared = facts.values.get("apptainer_compared", "")
    if compared in COMPARED:
        yield Finding(what, "ok", COMPARED[compared])
    elif compared == "unrecorded":
        detail = "their content cannot be compared: an earlier `sms host prepare` recorded no digests of them"
        yield Finding(what, "warning", f"{detail}; this installs them again", _reinstall(facts))
    else:
        detail = f"their content cannot be compared: {program} belongs to no package; modes and owners are safe"
        yield Finding(what, "warning", detail)


def _wrong_modes(facts: Facts) -> dict[str, str]:
    """Return what others may change or what changes the user, by path."""
    found = {}
    for entry in filter(None, facts.values.get("apptainer_modes", "").split("\t")):
        match = _MODE.fullmatch(entry)
        if not match:
            found[entry] = f"{one_line(entry, SHORT)} is not a mode, a user and a path"
            continue
        digits, user, path = match.groups()
        mode = int(digits, 8)
        expected = PurePosixPath(path).name == SETUID_PROGRAM and mode == 0o4755 and user == "0"
        if not expected:
            found[path] = f"{path} has mode {mode:04o}" if user == "0" else f"{path} belongs to user {user}"
    return found


def _differing(facts: Facts) -> list[str]:
    """Return the programs that differ from their package. Settings may differ, but only root may change them."""
    found = []
    for line in facts.values.get("apptainer_differs", "").split("\t"):
        match = _VERIFIED.fullmatch(line.strip())
        if not match:
            continue
        flags, kind, path = match.groups()
        counts = "MUG" if kind in ("c", "g", "n") else "SM5DLUGP"
        if path.startswith(_DOCUMENTS) or kind in ("d", "l", "r"):
            continue
        if flags == "missing" and kind is None:
            found.append(f"{path} is missing")
        elif flags != "missing" and set(flags) & set(counts):
            found.append(f"{path} differs from its package ({flags})")
    return found


def _reinstall(facts: Facts) -> str:
    """Return the command that installs Apptainer's files again."""
    compared = facts.values.get("apptainer_compared", "")
    if compared in ("recorded", "unrecorded"):
        return f"rm {RECORD} && sms host prepare {facts.host}"
    if compared == "dpkg":
        return "apt-get install --reinstall apptainer"
    if compared == "rpm":
        return "zypper install --force apptainer" if facts.family == "suse" else "dnf reinstall apptainer"
    return ""


def _filter(facts: Facts, ours: Collection[str]) -> Iterator[Finding]:
    """Name rules for the site's interfaces that sms did not make: frames for the container pass them."""
    if not ours or "nft_tables" not in facts.values:
        return  # without nft: the finding `nftables in the kernel`
    what = "rules for the site's interfaces"
    rules = list(filter(None, facts.values.get("nft_rules", "").split("\t")))
    strange = [rule for rule in rules if not (MANAGED.match(rule) or PASSES.fullmatch(rule))]
    if strange:
        detail = f"`sms` made none of these, and they can drop or redirect what nodes send: {_some(strange)}"
        yield Finding(what, "warning", f"{detail}; if they are not yours: {WALK}")
        return
    others = list(filter(None, facts.values["nft_tables"].split("\t")))
    known = [f"tables of others: {', '.join(others)}"] if others else []
    if legacy := facts.words("legacy_tables"):
        known.append(f"not examined: tables of iptables-legacy ({', '.join(legacy)})")
    yield Finding(what, "ok", "; ".join(["none", *known]))


def _bridges(facts: Facts, ours: Collection[str]) -> Iterator[Finding]:
    """Name other bridges; one that a cable joins to a bridge of the site is a way around its networks."""
    others = sorted(facts.bridges.keys() - set(ours))
    if not ours or not others:
        return
    joined = [
        f"{facts.masters[port]} and {facts.masters[peer]} ({port}, {peer})"
        for port, peer in sorted(facts.veths.items())
        if facts.masters.get(port) in ours and facts.masters.get(peer) in others
    ]
    if joined:
        yield Finding("other bridges", "warning", f"joined to the site's: {_some(joined)}; if not by you: {WALK}")
    else:
        yield Finding("other bridges", "ok", f"not of this site: {', '.join(others)}")


def _some(items: Sequence[str]) -> str:
    more = [f"and {len(items) - SHOWN} more"] if len(items) > SHOWN else []
    return "; ".join([*items[:SHOWN], *more])
