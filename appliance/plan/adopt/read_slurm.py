"""Slurm in a survey: slurm.conf with what it includes, its state, its files."""

from __future__ import annotations

import re
from collections.abc import Iterator

from appliance.config.model import line_settings
from appliance.plan.adopt.accounting import read_accounting
from appliance.plan.adopt.frames import Frames, Section
from appliance.plan.adopt.model import Entry, Slurm
from appliance.text import printable

FOLDERS = ("/etc/slurm", "/etc/slurm-llnl", "/opt/slurm/etc", "/usr/local/etc/slurm", "/usr/local/etc")
NODE_KEY, PARTITION_KEY = "nodename", "partitionname"
REPEATED = ("nodeset", "downnodes", "frontendname")
"""Keys of lines that a file has several times, besides nodes and partitions."""
OWN = {
    *("clustername", "slurmctldhost", "controlmachine", "controladdr", "backupcontroller", "backupaddr", "include"),
    *("slurmuser", "slurmctldpidfile", "slurmctldlogfile", "statesavelocation", "slurmctldport", "maxnodecount"),
    *("accountingstoragehost", "accountingstoragebackuphost", "accountingstorageport", "accountingstoragepass"),
    *("accountingstorageuser", "accountingstoragetype", "jobcomppass", "authtype", "authinfo", "slurmctldsyslogdebug"),
}
"""Settings that concern the old node, or that sms sets."""
MOST_LINES = 20_000


def find_conf(frames: Frames, folder: str = "") -> str:
    """Return the path of slurm.conf; empty if the host has none."""
    return next((f"{one}/slurm.conf" for one in (folder, *FOLDERS) if f"{one}/slurm.conf" in frames.files), "")


def read_lines(frames: Frames, path: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the lines of a file of Slurm and of those it includes: without comments, continued ones joined."""
    section = frames.files.get(path)
    if section is None or path in seen or len(seen) > 5:
        return
    text = section.text.replace("\r", "").replace("\\\n", " ")
    for raw in text.split("\n")[:MOST_LINES]:
        line = raw.partition("#")[0].strip()
        if included := re.match(r"include\s+(\S+)$", line, re.IGNORECASE):
            other = included[1] if included[1].startswith("/") else f"{path.rpartition('/')[0]}/{included[1]}"
            yield from read_lines(frames, other, seen | {path})
        elif line:
            yield re.sub(r"\s+", " ", line)


def read_slurm(frames: Frames, folder: str = "") -> Slurm | None:
    """Return the controller's configuration; None if the host has none."""
    file = find_conf(frames, folder)
    if not file:
        return None
    nodes: list[Entry] = []
    partitions: list[Entry] = []
    single: dict[str, str] = {}
    hosts: list[str] = []
    lines: dict[str, str] = {}
    defaults: dict[str, dict[str, str]] = {NODE_KEY: {}, PARTITION_KEY: {}}
    for line in read_lines(frames, file):
        settings = line_settings(line)
        key = settings[0][0] if settings else ""
        if key in defaults:
            name, given = settings[0][1], _named(line)
            if name.upper() == "DEFAULT":
                defaults[key].update(given)
            else:
                # Keys of Slurm are case-insensitive.
                merged = {one.lower(): (one, value) for one, value in (*defaults[key].items(), *given.items())}
                entry = Entry(name=name, settings=dict(merged.values()))
                (nodes if key == NODE_KEY else partitions).append(entry)
        elif key == "slurmctldhost":
            hosts.append(settings[0][1])
        elif key:
            single[key] = settings[0][1].strip('"')
            lines[line if key in REPEATED else key] = line
    hosts = hosts or [single[key] for key in ("controlmachine", "backupcontroller") if key in single]
    etc = file.rpartition("/")[0]
    included = [one for one in frames.files if one != file and one in _included(frames, file)]
    user = single.get("slurmuser", "slurm")
    uid, gid = find_ids(frames, user, "slurm-user")
    location = single.get("statesavelocation", "")
    daemon = frames.files.get(f"{etc}/slurmdbd.conf")
    return Slurm(
        file=file,
        included=tuple(included),
        cluster=printable(single.get("clustername", ""), 64),
        controllers=tuple(hosts[:16]),
        version=next(iter(re.findall(r"slurm(?:-wlm)? (\d+\.\d+\S*)", " ".join(frames.output("slurm-version")))), ""),
        user=user,
        uid=uid,
        gid=gid,
        nodes=tuple(nodes),
        partitions=tuple(partitions),
        settings=tuple(line for key, line in lines.items() if key not in OWN),
        files=tuple(one.name for one in kept_files(frames, file, included)),
        state=location,
        state_kb=_kilobytes(frames, "state-size"),
        state_versions=_versions(frames),
        database=daemon is not None,
        database_host=single.get("accountingstoragehost", ""),
        database_kb=_kilobytes(frames, "database-size"),
        accounting=read_accounting(frames.runs.get("accounting")),
    )


def single_setting(frames: Frames, file: str, key: str) -> str:
    """Return the last value of a setting, which the settings of ``Slurm`` leave out."""
    values = [value for line in read_lines(frames, file) for name, value in line_settings(line)[:1] if name == key]
    return values[-1].strip('"') if values else ""


def kept_files(frames: Frames, file: str, included: list[str]) -> list[Section]:
    """Return the further files of Slurm's folder, and programs of the controller that are elsewhere."""
    etc = file.rpartition("/")[0]
    found = [one for one in frames.below(etc) if one.name.rpartition("/")[2] not in ("slurm.conf", "slurmdbd.conf")]
    programs = [
        value.strip('"')
        for line in read_lines(frames, file)
        for key, value in line_settings(line)[:1]
        if key in ("prologslurmctld", "epilogslurmctld")
    ]
    found += [frames.files[one] for one in programs if one in frames.files and frames.files[one] not in found]
    return [one for one in found if one.name not in included]


def _named(line: str) -> dict[str, str]:
    """Return the settings of a line, with the keys as they are written, but the first."""
    found = re.findall(r'(?:^|\s)([A-Za-z]+)\s*=\s*((?:"[^"]*"|[^\s"])*)', line)
    return dict(found[1:])


def _included(frames: Frames, file: str) -> set[str]:
    found: set[str] = set()
    todo = [file]
    while todo:
        path = todo.pop()
        section = frames.files.get(path)
        for one in re.findall(r"^[ \t]*include[ \t]+(\S+)", section.text, re.IGNORECASE | re.M) if section else ():
            other = one if one.startswith("/") else f"{path.rpartition('/')[0]}/{one}"
            if other not in found:
                found.add(other)
                todo.append(other)
    return found


def find_ids(frames: Frames, name: str, run: str = "") -> tuple[int | None, int | None]:
    """Return the user and group id of an account; None if the host does not know it."""
    if found := re.search(r"uid=([0-9]{1,10})\(.*?gid=([0-9]{1,10})", " ".join(frames.output(run))[:1000]):
        return int(found[1]), int(found[2])
    for line in (*frames.output("passwd"), *frames.text("/etc/passwd").split("\n")):
        words = line.split(":")
        if words[0] == name and len(words) >= 4 and words[2].isdigit() and words[3].isdigit():
            return int(words[2][:10]), int(words[3][:10])
    return None, None


def _kilobytes(frames: Frames, run: str) -> int | None:
    words = " ".join(frames.output(run)).split()
    done = run in frames.runs and frames.runs[run].ended != 124
    return int(words[0]) if done and words and words[0].isdigit() else None


def _versions(frames: Frames) -> dict[str, int]:
    """Return the protocol version in the head of each state file: its name, then two bytes."""
    found = {}
    for name, section in frames.runs.items():
        if name.startswith("state-") and name != "state-size":
            data = bytes(int(word, 16) for word in section.text.split() if re.fullmatch(r"[0-9a-f]{2}", word))
            _, mark, rest = data.partition(b"PROTOCOL_VERSION\0")
            if mark and len(rest) >= 2:
                found[name.removeprefix("state-")] = int.from_bytes(rest[:2], "big")
    return found
