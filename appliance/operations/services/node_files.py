"""Tries what Slurm makes of changed files before it gets them, by the programs of the image: slurmd, and Lua."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from appliance.config.hostlist import fold
from appliance.config.slurm_files import FOLDER
from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.preflight import prepare_confinement
from appliance.operations.services.present import last_line
from appliance.plan.overlay.seed import Seed, seed_archive
from appliance.plan.services.defined import GRES_CONF, read_defined
from appliance.plan.services.effect import Fault
from appliance.plan.services.node_files import (
    JOB_SUBMIT,
    LUA_FUNCTIONS,
    find_kinds,
    find_unlisted,
    judge_tried,
    read_tried,
    reads_other,
    runs_other,
)
from appliance.plan.services.runs import Once, once_run
from appliance.text import one_line
from appliance.tools.apptainer import run_container
from appliance.tools.scripts import script_argv

TRY_S = 120
"""Seconds that all kinds of nodes may take: each needs less than one."""
LACKS = "no slurmd"
SLURMDBD_CONF = f"{FOLDER}/slurmdbd.conf"
"""It has a password, and slurmd does not read it."""
HINT = "correct the file in `slurm.files`, or the nodes' `gres`: nodes read them as soon as slurmctld has them"


def judge_node_files(
    cluster: Cluster, host: Host, image: str, before: Mapping[str, bytes], after: Mapping[str, bytes]
) -> tuple[Fault, ...]:
    """Return what slurmd on the nodes, or slurmctld of its job_submit.lua, would refuse of changed files.

    Args:
        image: path of the verified image whose programs try it; empty: nothing is tried.
        before, after: files of Slurm by path.
    """
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    old, new = read_defined(before), read_defined(after)
    faults = []
    if unlisted := find_unlisted(new) - find_unlisted(old):
        names = one_line(fold(sorted(unlisted)), 120)
        faults.append(
            Fault(f"the topology does not list {names}: no job starts there", "add them to a switch or block")
        )
    if image and reads_other(changed, old, new):
        faults += _find_refusals(cluster, host, image, before, after)
    if image and JOB_SUBMIT in after and runs_other(changed, old, new):
        faults += _judge_lua(cluster, host, image, after[JOB_SUBMIT])
    return tuple(faults)


def _judge_lua(cluster: Cluster, host: Host, image: str, script: bytes) -> Iterator[Fault]:
    """Yield why slurmctld would not start with a job_submit.lua; one that runs goes on with that of before."""
    why = [f"it has no function {name}" for name in LUA_FUNCTIONS if name.encode() not in script]
    once = Once("query", script_argv("check-lua"))
    try:
        argv = once_run(cluster.site, prepare_confinement(cluster, host), image, once)
        printed = run_container(host, *argv, input=script, timeout=TRY_S).text
        why[:0] = [one_line(printed.strip(), 200)] if printed.strip() else []
    except SmsError as error:
        why[:0] = [f"whether Lua can load it is not known: {last_line(error)}"]
    for one in why[:1]:
        yield Fault(f"slurmctld would not start with job_submit.lua: {one}", "correct the script in `slurm.files`")


def _find_refusals(
    cluster: Cluster, host: Host, image: str, before: Mapping[str, bytes], after: Mapping[str, bytes]
) -> Iterator[Fault]:
    """Yield what slurmd on the nodes would refuse of Slurm's files, unless it refuses it now, too.

    Args:
        image: path of a verified image on the host.
        before: files of Slurm by path, as nodes have them now.
        after: those that they are to get.
    """
    try:
        found = _try(cluster, host, image, after)
        known = _try(cluster, host, image, before) if found and before != after else []
    except SmsError as error:
        yield Fault(f"what slurmd on the nodes makes of these files is not known: {last_line(error)}", HINT)
        return
    for why in found:
        if why not in known:
            yield Fault(why, HINT)
        else:
            cluster.env.progress.report(f"note: {why}; it is so with the files of before, too")


def _try(cluster: Cluster, host: Host, image: str, files: Mapping[str, bytes]) -> list[str]:
    """Return why nodes would take no job any more with these files.

    Raises:
        SmsError: the image could not be run.
    """
    defined, gres = read_defined(files), files.get(GRES_CONF, b"").decode(errors="replace")
    kinds = find_kinds(defined, gres)
    if not kinds:
        return []
    once = Once("slurmd", script_argv("check-slurmd", *kinds))
    argv = once_run(cluster.site, prepare_confinement(cluster, host), image, once)
    archive = seed_archive([Seed(path, data) for path, data in files.items() if path != SLURMDBD_CONF])
    output = run_container(host, *argv, input=archive, timeout=TRY_S).text
    if output.strip() == LACKS:
        cluster.env.progress.warn(
            "the image has no slurmd: what nodes make of these files is not known; `sms build` adds it"
        )
        return []
    return list(judge_tried(read_tried(output), kinds, defined, gres))
