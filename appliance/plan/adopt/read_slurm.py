"""Slurm in a survey: slurm.conf with what it includes, its state, its files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from appliance.config.model import line_settings
from appliance.plan.adopt.accounting import read_accounting
from appliance.plan.adopt.frames import Frames, Section
from appliance.plan.adopt.model import Entry, Slurm
from appliance.text import printable, whole_number

FOLDERS = ("/etc/slurm", "/etc/slurm-llnl", "/opt/slurm/etc", "/usr/local/etc/slurm", "/usr/local/etc")
NODE_KEY, PARTITION_KEY = "nodename", "partitionname"
REPEATED = ("nodeset", "downnodes", "frontendname")
"""Keys of lines that a file has several times, besides nodes and partitions."""
OWN = {
    *("clustername", "slurmctldhost", "controlmachine", "controladdr", "backupcontroller", "backupaddr", "include"),
    *("slurmuser", "slurmctldpidfile", "slurmctldlogfile", "statesavelocation", "slurmctldport", "maxnodecount"),
    *("accountingstoragehost", "accountingstoragebackuphost", "accountingstorageport", "accountingstoragepass"),
    *("slurmschedlogfile", "slurmschedloglevel"),
    *("accountingstorageuser", "accountingstoragetype", "jobcomppass", "authtype", "authinfo", "slurmctldsyslogdebug"),
}
"""Settings that concern the old node, or that sms sets."""
COMPLETED = {"jobcomptype", "jobcomploc"}
"""Settings of a text file of completed jobs, which a site cannot have."""
MOST_LINES = 100_000
"""Of slurm.conf and all that it includes."""
LONGEST_ID = 4096
"""Characters of the output of id(1) that are read."""
LONGEST_DEFAULTS = 1024
"""Characters of all defaults of nodes, or of partitions."""
DEEPEST = 5
"""Levels of includes; the script of the survey reads four."""


def find_conf(frames: Frames, folder: str = "") -> str:
    """Return the path of slurm.conf; empty if the host has none."""
    return next((f"{one}/slurm.conf" for one in (folder, *FOLDERS) if f"{one}/slurm.conf" in frames.files), "")


@dataclass
class Included:
    """What ``read_lines`` has read: each file once, in the order of their first lines.

    ``left``: why files were not read, or not to their end.
    """

    files: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    lines: int = 0
    seen: set[str] = field(default_factory=set)


def find_include(line: str, path: str) -> str:
    """Return the path of the file that a line of the file at ``path`` includes; empty if it includes none."""
    found = re.match(r"\s*include\s+(\S+)\s*$", line, re.IGNORECASE)
    name = found[1] if found else ""
    return name if not name or name.startswith("/") else f"{path.rpartition('/')[0]}/{name}"


def read_lines(frames: Frames, path: str, done: Included | None = None, *, depth: int = 0) -> Iterator[str]:
    """Yield the lines of a file of Slurm and of those it includes: without comments, continued ones joined.

    A file that is included again is left out: files that include one another would have no end.
    """
    done = Included() if done is None else done
    done.files.append(path)
    done.seen.add(path)
    text = frames.files[path].text.replace("\r", "").replace("\\\n", " ")
    for raw in text.split("\n"):
        done.lines += 1
        if done.lines > MOST_LINES:
            done.left.append(f"{path}, with more than {MOST_LINES} lines in all of them")
            return
        line = raw.partition("#")[0].strip()
        other = find_include(line, path)
        if not other:
            if line:
                yield re.sub(r"\s+", " ", line)
            continue
        if other in done.seen:
            done.left.append(f"{other}, which {path} includes again")
        elif other in frames.files and depth == DEEPEST:
            done.left.append(f"{other}, which is included more than {DEEPEST} levels deep")
        elif other in frames.files:
            yield from read_lines(frames, other, done, depth=depth + 1)


def find_included(frames: Frames, folder: str = "") -> Included:
    """Return what slurm.conf includes, and what of it was left out."""
    done, file = Included(), find_conf(frames, folder)
    if file:
        read_entries(frames, file, done)
    return done


def read_slurm(frames: Frames, folder: str = "") -> Slurm | None:
    """Return the controller's configuration; None if the host has none."""
    file = find_conf(frames, folder)
    if not file:
        return None
    nodes, partitions = read_entries(frames, file)
    single: dict[str, str] = {}
    hosts: list[str] = []
    lines: dict[str, str] = {}
    for line in read_lines(frames, file):
        settings = line_settings(line)
        key = settings[0][0] if settings else ""
        if key == "slurmctldhost":
            hosts.append(settings[0][1])
        elif key and key not in (NODE_KEY, PARTITION_KEY):
            single[key] = settings[0][1].strip('"')
            lines[line if key in REPEATED else key] = line
    hosts = hosts or [single[key] for key in ("controlmachine", "backupcontroller") if key in single]
    etc = file.rpartition("/")[0]
    read = set(find_included(frames, folder).files)
    included = [one for one in frames.files if one != file and one in read]
    user = single.get("slurmuser", "slurm")
    uid, gid = find_ids(frames, user, "slurm-user")
    location = single.get("statesavelocation", "")
    daemon = frames.files.get(f"{etc}/slurmdbd.conf")
    left = OWN | (COMPLETED if single.get("jobcomptype", "").lower().endswith("filetxt") else set())
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
        settings=tuple(line for key, line in lines.items() if key not in left),
        files=tuple(one.name for one in kept_files(frames, file, included)),
        state=location,
        state_kb=_kilobytes(frames, "state-size"),
        state_versions=_versions(frames),
        database=daemon is not None,
        database_host=single.get("accountingstoragehost", ""),
        database_kb=_kilobytes(frames, "database-size"),
        accounting=read_accounting(frames.runs.get("accounting")),
    )


def read_entries(frames: Frames, file: str, done: Included | None = None) -> tuple[list[Entry], list[Entry]]:
    """Return the nodes and the partitions of a slurm.conf with what it includes; each has the defaults before it.

    Defaults that are too long are left out: each entry would have a copy.
    """
    done = Included() if done is None else done
    found: dict[str, list[Entry]] = {NODE_KEY: [], PARTITION_KEY: []}
    defaults: dict[str, dict[str, str]] = {NODE_KEY: {}, PARTITION_KEY: {}}
    for line in read_lines(frames, file, done):
        settings = line_settings(line)
        key = settings[0][0] if settings else ""
        if key not in found:
            continue
        name, given = settings[0][1], _named(line)
        if name.upper() == "DEFAULT":
            more = {**defaults[key], **given}
            if sum(len(one) + len(value) for one, value in more.items()) <= LONGEST_DEFAULTS:
                defaults[key] = more
            else:
                done.left.append(f"defaults of {key} with more than {LONGEST_DEFAULTS} characters")
        else:
            # Keys of Slurm are case-insensitive.
            merged = {one.lower(): (one, value) for one, value in (*defaults[key].items(), *given.items())}
            found[key].append(Entry(name=name, settings=dict(merged.values())))
    return found[NODE_KEY], found[PARTITION_KEY]


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
    sections = {one.name: one for one in found} | {one: frames.files[one] for one in programs if one in frames.files}
    left = set(included)
    return [one for name, one in sections.items() if name not in left]


def _named(line: str) -> dict[str, str]:
    """Return the settings of a line, with the keys as they are written, but the first."""
    found = re.findall(r'(?:^|\s)([A-Za-z]+)\s*=\s*((?:"[^"]*"|[^\s"])*)', line)
    return dict(found[1:])


def find_ids(frames: Frames, name: str, run: str = "") -> tuple[int | None, int | None]:
    """Return the user and group id of an account; None if the host does not know it."""
    if found := re.search(r"uid=([0-9]{1,10})\(.*?gid=([0-9]{1,10})", " ".join(frames.output(run))[:LONGEST_ID]):
        return int(found[1]), int(found[2])
    for line in (*frames.output("passwd"), *frames.text("/etc/passwd").split("\n")):
        words = line.split(":")
        ids = [whole_number(one) for one in words[2:4]] if words[0] == name else []
        if len(ids) == 2 and None not in ids:
            return ids[0], ids[1]
    return None, None


def _kilobytes(frames: Frames, run: str) -> int | None:
    words = " ".join(frames.output(run)).split()
    done = run in frames.runs and frames.runs[run].ended != 124
    return whole_number(words[0]) if done and words else None


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
