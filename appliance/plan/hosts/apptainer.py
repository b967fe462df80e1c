"""Debian's packages of Apptainer on a host, compared with the pins and with the host's package lists."""

from __future__ import annotations

import re
from collections.abc import Mapping

from appliance.plan.hosts.facts import Facts
from appliance.text import whole_number

PINS = ("playbooks", "roles", "apptainer", "files", "apptainer-debian.pins")
"""Path of the pinned packages below the data of ``sms``: architecture, package, version, digests and path in a line."""

Part = list[tuple[tuple[int, ...], int]]
Key = tuple[int, Part, Part]


def pinned_versions(pins: str, architecture: str) -> dict[str, str]:
    """Return the pinned version of each package for an architecture; empty if none is pinned."""
    lines = [line.split() for line in pins.splitlines()]
    return {words[1]: words[2] for words in lines if len(words) == 6 and words[0] == architecture}


def find_newer(facts: Facts) -> tuple[str, str] | None:
    """Return what is newer than the installed Apptainer, and the command that installs it, or ""; None if nothing is.

    Only what the host knows already is read: its record of installed pins, dpkg, and the package lists of its last
    `apt-get update`.
    """
    recorded = dict(word.split("=", 1) for word in facts.words("apptainer_record") if "=" in word)
    packaged = facts.values.get("apptainer_package", "")
    if "apptainer_record" in facts.values and not packaged:
        prepare = f"sms host prepare {facts.host}"
        if not recorded:
            return "installed from sid without a record of versions and digests", prepare
        if newer := _newer(pinned_versions(facts.pins, facts.values.get("apptainer_arch", "")), recorded):
            return f"pinned are {newer}", prepare
    installed = packaged or recorded.get("apptainer", "")
    newest = max(facts.words("apptainer_lists"), key=version_key, default="")
    if not installed or not newest or version_key(newest) <= version_key(installed):
        return None
    detail = f"{installed} is installed, the host's package lists have {newest}"
    return (detail, "apt-get install apptainer") if packaged else (f"{detail}: docs/hosts.md describes the upgrade", "")


def _newer(wanted: Mapping[str, str], installed: Mapping[str, str]) -> str:
    """Return the packages that are wanted in a newer version than the installed one; empty if any is already newer."""
    pairs = {name: (version_key(version), version_key(installed.get(name, ""))) for name, version in wanted.items()}
    if any(has > wants for wants, has in pairs.values()):
        return ""  # the administrator's own pins
    return ", ".join(f"{name} {wanted[name]}" for name, (wants, has) in pairs.items() if wants > has)


def version_key(version: str) -> Key:
    """Return a key that sorts as `dpkg --compare-versions` does."""
    epoch, colon, rest = version.partition(":")
    if not colon:
        epoch, rest = "0", version
    upstream, hyphen, revision = rest.rpartition("-")
    if not hyphen:
        upstream, revision = rest, "0"
    return (whole_number(epoch) or 0, _part_key(upstream), _part_key(revision))


def _part_key(text: str) -> Part:
    # The end of a part sorts after ~ and before letters; letters sort before everything else.
    return [
        ((*(-1 if c == "~" else ord(c) if c.isalpha() else ord(c) + 256 for c in other), 0), int(digits or 0))
        for other, digits in re.findall(r"([^0-9]*)([0-9]{0,15})", text)
    ]
