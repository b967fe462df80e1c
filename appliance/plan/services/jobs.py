"""Jobs known to Slurm's controller: the command that lists them, and the parser of its output."""

from __future__ import annotations

JOBS = ("squeue", "--all", "--array", "--states=all", "--noheader", "--format=%i %T")
"""Lists every job: also in hidden partitions, finished ones, and each task of an array."""

JOBS_BYTES = 64 << 20
"""Maximum size of that list: about two million tasks."""

ASK_NODES = ("sh", "-c", "sinfo --noheader --dead --format=%n | grep -q . && exec timeout 15 scontrol reconfigure")
"""Makes the controller query its nodes at once if some count as not responding.

A controller that started without reaching its nodes queries them again only after a third of SlurmdTimeout
(slurm.conf(5)), and starts no job until then.
"""


def read_jobs(output: str) -> dict[str, str]:
    """Return job states by id from the output of ``JOBS``; other lines are messages of squeue and are ignored."""
    pairs = (line.split() for line in output.splitlines())
    return {words[0]: words[1] for words in pairs if len(words) == 2}
