"""Limits of accounts and QOS that are used up: slurmctld ends running jobs for them once it enforces limits.

The rules are those of ``acct_policy_job_time_out`` (src/slurmctld/acct_policy.c of Slurm). It looks at ``GrpTRESMins``
and ``GrpWall`` of a job's association, of the accounts above it, and of its QOS. Limits of a single job
(``MaxTRESMinsPerJob``) are not known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from appliance.plan.services.defined import Defined
from appliance.plan.services.jobs import Job, read_fields
from appliance.text import one_line

USAGE = ("scontrol", "--oneliner", "show", "assoc_mgr", "flags=assoc,qos")
"""Prints associations and QOS with their limits and usage, a line each (src/scontrol/info_assoc_mgr.c)."""
ROOT = "root"
"""The account above all others, whose limits do not count."""
MOST_LEVELS = 100
"""Of accounts: a hostile list may contain a circle."""


@dataclass(frozen=True)
class UsedUp:
    """What is used up, with the limit as text. ``accounts``: by account and user of it; ``parents``: of accounts."""

    accounts: Mapping[tuple[str, str], str]
    qos: Mapping[str, str]
    parents: Mapping[str, str]

    def why(self, job: Job) -> str:
        """Return which limit of a job is used up; empty if none is."""
        if found := self.qos.get(job.qos):
            return f"QOS {one_line(job.qos, 60)}: {found}"
        account, user = job.account, job.user
        for _ in range(MOST_LEVELS):
            if account in ("", ROOT):
                break
            if found := self.accounts.get((account, user)):
                return f"account {one_line(account, 60)}: {found}"
            account, user = (account, "") if user else (self.parents.get(account, ""), "")
        return ""


def begins_to_end(old: Defined, new: Defined) -> bool:
    """Return whether only the new configuration ends running jobs for such limits: with ``safe`` none is."""
    before, after = ("limits" in one.enforced and not one.enforced & {"safe", "all"} for one in (old, new))
    return after and not before


def read_used_up(output: str) -> UsedUp:
    """Parse the output of ``USAGE``; other lines are ignored."""
    accounts: dict[tuple[str, str], str] = {}
    qos: dict[str, str] = {}
    parents: dict[str, str] = {}
    for line in output.splitlines():
        fields = read_fields(line)
        why = _find_limit(fields)
        if name := _without_id(fields.get("QOS", "")):
            qos |= {name: why} if why else {}
        elif account := fields.get("Account", ""):
            user = _without_id(fields.get("UserName", ""))
            accounts |= {(account, user): why} if why else {}
            if not user:
                parents[account] = _without_id(fields.get("ParentAccount", ""))
    return UsedUp(accounts, qos, parents)


def _without_id(text: str) -> str:
    return text.partition("(")[0]


def _find_limit(fields: Mapping[str, str]) -> str:
    """Return the first limit that is used up, such as ``GrpTRESMins=cpu=100``; empty if none is."""
    each = [f"GrpTRESMins={one}" for one in fields.get("GrpTRESMins", "").split(",")]
    for text in (*each, f"GrpWall={fields.get('GrpWall', '')}"):
        found = re.fullmatch(r"([\w/:.=-]+=(\d{1,18}))\((\d{1,18})(?:\.\d+)?\)", text)
        if found and int(found[3]) >= int(found[2]):
            return found[1]
    return ""
