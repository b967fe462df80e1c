"""What Slurm's database has to know of jobs once associations, QOS or wckeys are enforced: else they never start.

slurmctld looks for an association of a job's user and account in its own cluster (``assoc_mgr_fill_in_assoc``), and
for the job's QOS in that (``_determine_and_validate_qos`` of src/slurmctld/job_mgr.c); a submission needs a wckey. With
``qos``, it does not start at all if the database lacks the QOS of a partition (``_build_single_partitionline_info`` of
read_config.c).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from appliance.plan.services.defined import ENFORCING, Defined
from appliance.plan.services.jobs import Job

Rows = Sequence[Sequence[str]]


def list_argv(kind: str, fields: str, cluster: str = "") -> tuple[str, ...]:
    """Return the command that lists such records of the database; of one cluster, if they belong to one."""
    argv = ("sacctmgr", "--noheader", "--parsable2", "list", kind, f"format={fields}")
    return (*argv, f"cluster={cluster}") if cluster else argv


def read_rows(output: str) -> Rows:
    """Parse the output of ``list_argv``, in lower case, as Slurm compares names."""
    return [line.lower().split("|") for line in output.splitlines() if line]


def find_enforced(defined: Defined) -> frozenset[str]:
    """Return which of ``associations``, ``qos`` and ``wckeys`` are enforced."""
    words = defined.enforced
    whole = frozenset({"associations"} if words & ENFORCING else ())
    return whole | {one for one in ("qos", "wckeys") if {one, "all"} & words}


def find_partition_qos(old: Defined, new: Defined) -> Mapping[str, str]:
    """Return the QOS of partitions that only the new configuration has to find in the database, in lower case."""
    if "qos" not in find_enforced(new):
        return {}
    before = {one.get("qos", "").lower() for one in old.partitions.values()} if "qos" in find_enforced(old) else set()
    named = {name: one.get("qos", "").strip('"').lower() for name, one in new.partitions.items()}
    return {name: qos for name, qos in named.items() if qos and qos not in before}


def find_unassociated(jobs: Sequence[Job], rows: Rows) -> Set[tuple[str, str]]:
    """Return user and account of jobs without an association; one without an account takes that of its user.

    Args:
        rows: user and account of each association of the cluster; the user is empty in those of accounts.
    """
    pairs = {(row[0], row[1]) for row in rows if len(row) >= 2}
    users = {name for name, _ in pairs}
    return {
        (job.user, job.account)
        for job in jobs
        if ((job.user.lower(), job.account.lower()) not in pairs if job.account else job.user.lower() not in users)
    }


def find_without_qos(jobs: Sequence[Job], rows: Rows) -> Iterator[Job]:
    """Yield the waiting jobs whose QOS their association does not have; ``rows``: with its QOS as a list."""
    allowed: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        if len(row) >= 3:
            allowed.setdefault((row[0], row[1]), set()).update(row[2].split(","))
    for job in jobs:
        of_job = allowed.get((job.user.lower(), job.account.lower()))
        if job.waits and job.qos and of_job is not None and job.qos.lower() not in of_job:
            yield job
