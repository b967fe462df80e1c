"""What Slurm's controller says of jobs: how it is asked, and how its answer is read."""

from __future__ import annotations

JOBS = ("squeue", "--all", "--array", "--states=all", "--noheader", "--format=%i %T")
"""Every job that it knows: those of hidden partitions, those that have ended, the tasks of arrays one by one."""

ASK_NODES = ("sh", "-c", "sinfo --noheader --dead --format=%n | grep -q . && exec timeout 15 scontrol reconfigure")
"""Has the controller ask its nodes at once where some count as not responding.

One that started where no node heard it asks them again after a third of SlurmdTimeout (slurm.conf(5)) only, and begins
no job until then.
"""


def read_jobs(told: str) -> dict[str, str]:
    """State by id, of what ``JOBS`` prints; other lines are somebody's complaints."""
    pairs = (line.split() for line in told.splitlines())
    return {words[0]: words[1] for words in pairs if len(words) == 2}
