"""Jobs that a lost one takes with it: those that depend on it, and the other components of a heterogeneous job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from appliance.plan.services.jobs import Job
from appliance.text import one_line

SUCCEEDS = {"afterok", "aftercorr"}
"""Dependencies that a job which fails never satisfies. One that never starts satisfies none."""


class _Name(NamedTuple):
    """``12``, ``12_3``, ``12_[4-9]`` or ``12+1``: the job's number, and task or component."""

    number: str
    task: str = ""
    component: str = ""


def _split(name: str) -> _Name:
    found = re.match(r"([^_+]*)(?:_([^+]*))?(?:\+(.*))?", name)
    return _Name(*(part or "" for part in found.groups())) if found else _Name(name)


def _named(job: Job) -> Iterator[tuple[str, _Name]]:
    """Yield the jobs on which one depends, each with the kind of that; none where one of several is enough."""
    if not job.waits or "?" in job.depends:
        return
    for rule in job.depends.split(","):
        kind, *names = rule.split(":")
        yield from ((kind, _split(re.sub(r"\(.*", "", one))) for one in names)


def find_dependents(jobs: Iterable[Job], lost: Iterable[str]) -> dict[str, str]:
    """Return why each further job is lost, by id; ``lost``: ids of those that are in any case."""
    gone, whys = {*lost}, dict[str, str]()
    running: set[str] = set()
    tied: dict[str, list[tuple[Job, str, _Name]]] = {}
    for job in jobs:
        if not job.waits:
            running.add(job.id)
        own = _split(job.id)
        if job.id in gone:
            continue
        if own.component:
            tied.setdefault(own.number, []).append((job, "", own))
        for kind, named in _named(job):
            tied.setdefault(named.number, []).append((job, kind, named))
    left = sorted(gone)
    while left:
        name = left.pop()
        for job, kind, named in tied.get(_split(name).number, ()):
            why = _why(name, kind, named, runs=name in running)
            if why and job.id not in whys:
                whys[job.id] = why
                left.append(job.id)
    return whys


def _why(lost: str, kind: str, named: _Name, *, runs: bool) -> str:
    """Return why a job is lost that depends in this kind on ``named``, or is that component of it."""
    if not kind:
        return f"it is a component of job {named.number}, as {lost} is"
    if (kind in SUCCEEDS or not runs) and _is_of(_split(lost), named):
        return f"it depends on job {lost} ({one_line(kind, 30)})"
    return ""


def _is_of(job: _Name, named: _Name) -> bool:
    """Return whether a job is one that a dependency names: an array by its number, or as ``12_*``."""
    return named.task in ("", "*", job.task) or "[" in job.task
