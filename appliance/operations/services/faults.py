"""What a change breaks besides jobs: programs, plugins and scripts that are missing, accounts, addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import replace

from appliance.config.hostlist import fold
from appliance.config.slurm_files import FOLDER
from appliance.config.types import is_ipv4
from appliance.errors import ConfigError, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.nodes.files import read_reports
from appliance.operations.overlay.overlay import seeds_for
from appliance.operations.services.present import QUERY_S, last_line, query_present
from appliance.operations.services.reach import see_accepting
from appliance.operations.vm.client import open_api
from appliance.plan.machine import inside_argv
from appliance.plan.nodes.accounts import (
    GROUP,
    MOST_REMOVED,
    PASSWD,
    compare_accounts,
    read_ids,
    too_many_removed,
    without_own,
)
from appliance.plan.nodes.files import last_pulled
from appliance.plan.overlay.names import read_resolved
from appliance.plan.services.defined import (
    AT_START,
    ENFORCING,
    PLUGIN_FOLDER,
    Defined,
    find_new,
    find_plugins,
    read_allowed,
)
from appliance.plan.services.effect import PRESENT_BYTES, SHOWN, Fault, Present, find_moved
from appliance.plan.services.ending import count_allowed
from appliance.plan.services.jobs import JOBS, JOBS_BYTES, read_jobs
from appliance.plan.services.used_up import USAGE, begins_to_end, read_usage
from appliance.text import one_line
from appliance.tools.resolver import resolve
from appliance.tools.scripts import script_argv

JOB_SUBMIT = f"{FOLDER}/job_submit.lua"
MOST_PROBED = 64
LOST_WAYS = "`sms overlay restore N --path /etc/passwd` and `--path /etc/group`, of a snapshot that has them"
LUA_FUNCTIONS = ("slurm_job_submit", "slurm_job_modify")
"""That it has to define (src/plugins/job_submit/lua/job_submit_lua.c)."""


def find_faults(
    cluster: Cluster,
    host: Host,
    defined: tuple[Defined, Defined],
    before: Mapping[str, str | None],
    after: Mapping[str, bytes],
    *,
    same_image: bool = True,
) -> Iterator[Fault]:
    """Yield what a change of files in the running container breaks besides jobs.

    Args:
        defined: what slurm.conf defines before and after.
        before: texts of the files that differ, by path; None if they are secret, or not there.
        after: what they are to be.
        same_image: whether the image that runs now is the one that is to read them.
    """
    old, new = defined
    yield from _find_locked_out(cluster, host, old, new, after)
    for key, path in find_new(old.own, new.own).items():
        program = path.split()[0]
        inside = inside_argv(cluster.site, cluster.services, "test", "-x", program)
        if program not in after and host.run(*inside, ok=None).status:
            yield Fault(
                f"{key}={path}: the container has no such program",
                f"add {program} to `slurm.files`, or its package to `base`",
            )
    if same_image:
        yield from _find_lacking_plugins(cluster, host, old, new)
    if JOB_SUBMIT in before and JOB_SUBMIT in after:
        yield from _judge_lua(cluster, host, after[JOB_SUBMIT])
    yield from find_lacking_programs(cluster, old, new)


def find_lacking_programs(cluster: Cluster, old: Defined, new: Defined) -> Iterator[Fault]:
    """Yield programs of the new configuration that nodes lack, or of which that is not known."""
    for key, path in find_new(old.programs, new.programs).items():
        if lacking := _find_lacking(cluster, new, path):
            fault = f"{key}={path}: {lacking}; a node that lacks it is drained by its first job, or takes none"
            hint = f"`sms files push` brings {path} to the nodes; `sms files report --path {path}` shows who has it"
            if not cluster.site.provisioning:
                hint = f"bring {path} to every node first"
            yield Fault(fault, hint)


def _judge_lua(cluster: Cluster, host: Host, script: bytes) -> Iterator[Fault]:
    """Yield why slurmctld would not start with a job_submit.lua; one that runs goes on with that of before."""
    argv = inside_argv(cluster.site, cluster.services, *script_argv("check-lua"))
    done = host.run(*argv, input=script, ok=None, timeout=QUERY_S)
    why = [one_line((done.stdout or done.stderr).decode(errors="replace"), 200)] if done.stdout or done.status else []
    why += [f"it has no function {name}" for name in LUA_FUNCTIONS if name.encode() not in script]
    for one in why[:1]:
        yield Fault(f"slurmctld would not start with job_submit.lua: {one}", "correct the script in `slurm.files`")


def _find_lacking_plugins(cluster: Cluster, host: Host, old: Defined, new: Defined) -> Iterator[Fault]:
    """Yield plugins that the new configuration loads and the container lacks: its parser does not look for them."""
    wanted = find_plugins(old.plugins, new.plugins)
    if not wanted:
        return
    argv = script_argv("list-plugins", new.plugins.get(PLUGIN_FOLDER, ""))
    there = host.run(*inside_argv(cluster.site, cluster.services, *argv), ok=None, timeout=QUERY_S).text.split()
    if not there:  # the controller did not say where they are, and waits for no change
        return
    for file, setting in wanted.items():
        if file not in there:
            hint = "correct the name, or add its package to `base.packages`, then `sms build` and `sms upgrade`"
            yield Fault(
                f"{setting}: the container has no plugin {file}: the daemons that load it would not start", hint
            )


def find_faults_for_users(
    cluster: Cluster,
    host: Host,
    present: Present | None,
    before: Mapping[str, str | None],
    after: Mapping[str, bytes],
) -> Iterator[Fault]:
    """Yield what changed accounts break; ``present``: what the controller has, if it was asked.

    Raises:
        ConfigError: lines of the accounts are invalid.
    """
    if PASSWD in before and not present and cluster.find_role("controller"):
        with suppress(SmsError):  # without an answer, the limit for all holds
            present = query_present(cluster, host)
    yield from find_lost_accounts(cluster, before, after, present.users if present else frozenset())


def find_faults_of_present(
    cluster: Cluster, host: Host, present: Present, defined: tuple[Defined, Defined]
) -> Iterator[Fault]:
    """Yield what a change breaks for those who have jobs, and for nodes in use."""
    yield from _find_unassociated(cluster, host, present, defined)
    try:
        yield from [*_find_full(cluster, host, defined), *_find_beyond(cluster, host, present, defined)]
    except SmsError as error:
        why = f"what Slurm's new limits cost is not known: {last_line(error)}"
        yield Fault(why, "`sms exec -- scontrol show assoc_mgr` and `squeue` have to answer")
    yield from _find_silent(cluster, host, present, defined)


def _find_locked_out(
    cluster: Cluster, host: Host, old: Defined, new: Defined, after: Mapping[str, bytes]
) -> Iterator[Fault]:
    """Yield that jobs which name no partition are refused from now on, or all users of a partition."""
    if old.default and not new.default and new.partitions:
        hint = "give one `default: true` in the site file"
        yield Fault(f"no partition is the default one, as {old.default} was: jobs that name none are refused", hint)
    had = {group for settings in old.partitions.values() for group in read_allowed(settings)}
    groups = {line.split(":")[0] for line in after.get(GROUP, b"").decode(errors="replace").splitlines()}
    for name, settings in new.partitions.items():
        for group in sorted(read_allowed(settings) - had - groups):
            argv = inside_argv(cluster.site, cluster.services, "getent", "group", group)
            if host.run(*argv, ok=None, timeout=QUERY_S).status:
                yield Fault(
                    f"partition {one_line(name, 60)} allows group {one_line(group, 60)}, which the container does not "
                    "know: nobody of it may submit there",
                    "add it to `accounts.group` of the site file, or correct its name",
                )


def _find_silent(cluster: Cluster, host: Host, present: Present, defined: tuple[Defined, Defined]) -> Iterator[Fault]:
    """Yield nodes in use at whose new address or port nothing accepts connections: their jobs would fail in minutes."""
    old, new = (_find_places(each) for each in defined)
    moved = sorted(name for name in present.usable & old.keys() & new.keys() if old[name] != new[name])[:MOST_PROBED]
    if not moved:
        return
    # What is new the container's hosts file does not have yet.
    names = [new[name][0] for name in moved if not is_ipv4(new[name][0])]
    known = read_resolved(resolve(host, names), names, {}, cluster.site.node_networks) if names else {}
    accept = see_accepting(cluster, host, [(known.get(new[name][0], new[name][0]), new[name][1]) for name in moved])
    if silent := [name for name, accepts in zip(moved, accept, strict=True) if not accepts]:
        where = ", ".join(f"{name} ({':'.join(new[name])})" for name in silent[:SHOWN])
        yield Fault(
            f"nodes get an address or port at which no slurmd answers ({len(silent)}): {one_line(where, 300)}",
            "correct `address` or `port`; if nodes move: drain them first, or change them before this",
        )


def _find_places(defined: Defined) -> dict[str, tuple[str, str]]:
    """Return address and port of each node's slurmd."""
    usual = defined.at_start.get("SlurmdPort", AT_START["SlurmdPort"])
    return {
        name: (one.get("nodeaddr") or one.get("nodehostname") or name, one.get("port", usual))
        for name, one in defined.nodes.items()
    }


def _find_unassociated(
    cluster: Cluster, host: Host, present: Present, defined: tuple[Defined, Defined]
) -> Iterator[Fault]:
    """Yield who has jobs and no association, where Slurm is to enforce these from now on."""
    old, new = defined
    if old.enforced & ENFORCING or not new.enforced & ENFORCING:
        return
    argv = ("sacctmgr", "--noheader", "--parsable2", "list", "associations", "format=user")
    shown = host.run(*inside_argv(cluster.site, cluster.services, *argv), ok=None, timeout=QUERY_S)
    lacking = present.users - {*shown.text.split()}
    if lacking:
        why = "have no association" if shown.status == 0 else "may have no association: slurmdbd does not answer"
        yield Fault(
            f"AccountingStorageEnforce: users with jobs {why} ({len(lacking)}): "
            f"{one_line(', '.join(sorted(lacking)), 200)}; their waiting jobs fail",
            "`sacctmgr add user NAME account=ACCOUNT` for each, then apply",
        )


def _find_beyond(cluster: Cluster, host: Host, present: Present, defined: tuple[Defined, Defined]) -> Iterator[Fault]:
    """Yield running jobs that Slurm would end because a limit is used up, where it is to enforce these from now on."""
    running = [job for job in present.jobs if not job.waits]
    if not running or not begins_to_end(*defined):
        return
    argv = inside_argv(cluster.site, cluster.services, *USAGE)
    usage = read_usage(host.run(*argv, timeout=QUERY_S, limit=PRESENT_BYTES).text)
    qos = {name: settings.get("qos", "") for name, settings in defined[1].partitions.items()}
    ended = {job.id: why for job in running if (why := usage.why(job, qos.get("".join(job.partitions[:1]), "")))}
    if ended:
        some = "; ".join(f"{name} ({why})" for name, why in [*ended.items()][:SHOWN])
        yield Fault(
            f"AccountingStorageEnforce: a limit of running jobs is used up ({len(ended)}): {some}",
            "add `safe` to it: then no running job is ended for a limit; or raise the limits first",
        )


def _find_full(cluster: Cluster, host: Host, defined: tuple[Defined, Defined]) -> Iterator[Fault]:
    """Yield that Slurm has more jobs than it may have from now on: nobody could submit one."""
    old, new = (count_allowed(each) for each in defined)
    if new >= old:
        return
    argv = inside_argv(cluster.site, cluster.services, *JOBS)  # each task of an array counts
    there = len(read_jobs(host.run(*argv, timeout=QUERY_S, limit=JOBS_BYTES).text))
    if there + 1 >= new:
        why = f"MaxJobCount={new}: Slurm has {there} jobs, with those that ended in the last minutes"
        yield Fault(f"{why}: nobody could submit one", "set a larger one in `slurm.extra`")


def find_lost_accounts(
    cluster: Cluster,
    before: Mapping[str, str | None],
    after: Mapping[str, bytes],
    users: Set[str] = frozenset(),
    most_removed: float = MOST_REMOVED,
) -> Iterator[Fault]:
    """Yield that too many users or groups would go, or users with jobs.

    Args:
        users: who has jobs.
        most_removed: percentage of the users or groups that may go.

    Raises:
        ConfigError: lines of the accounts are invalid.
    """
    if not {PASSWD, GROUP} & before.keys() & after.keys():
        return
    new = {path: after[path].decode(errors="surrogateescape") for path in (PASSWD, GROUP) if path in after}
    old = {path: new[path] if before.get(path) is None else str(before[path]) for path in new}
    own = {service.user for service in cluster.services}
    old = {path: without_own(text, own) for path, text in old.items()}
    changes, problems = compare_accounts(old, new)
    if problems:
        raise ConfigError(problems=problems)
    if refusal := too_many_removed(changes, most_removed):
        names = one_line(", ".join(changes[PASSWD].removed if PASSWD in changes else ()), 200)
        yield Fault(f"{refusal}: {names}", "is the new file complete?")
    ids = [read_ids(side.get(PASSWD, "")) for side in (old, new)]
    if lost := sorted(name for name in users & ids[0].keys() if ids[0][name] != ids[1].get(name)):
        yield Fault(
            f"users with jobs are removed, or get another id ({len(lost)}): {one_line(', '.join(lost), 200)}; their "
            "waiting jobs never start",
            "remove a user when the jobs have ended: `squeue --user NAME`",
        )


def find_missing_accounts(cluster: Cluster, read: Callable[[str], bytes], users: Set[str]) -> Iterator[Fault]:
    """Yield which accounts an overlay lacks of those that were written there last: the site's, or the VM's.

    Args:
        read: returns a file of the overlay; empty if it is not there. Only for one that has the site's files.
        users: who has jobs.
    """
    own = {service.user for service in cluster.services}
    seeded = {seed.path: seed.data for seed in seeds_for(cluster)}
    before, after = dict[str, str | None](), dict[str, bytes]()
    for path in (PASSWD, GROUP):
        found = seeded.get(path, b""), read(last_pulled(path)), read(path)
        site, pulled, here = (data.decode(errors="surrogateescape") for data in found)
        here = without_own(here, own)
        if pulled and site and compare_accounts({path: site}, {path: here})[0][path].none:
            continue  # applied after the last pull
        if pulled or site:
            before[path], after[path] = pulled or site, here.encode(errors="surrogateescape")
    try:
        faults = [*find_lost_accounts(cluster, before, after, users)]
    except ConfigError as error:
        faults = [Fault(error.message, error.hint)]
    for one in faults:
        yield replace(one, hint=LOST_WAYS)


def _find_lacking(cluster: Cluster, new: Defined, path: str) -> str:
    """Return which nodes do not report that they have a program; empty if all do."""
    if not cluster.site.provisioning:
        return "whether nodes have it is not known, as there is no provisioning VM that reports it"
    try:
        reports = read_reports(cluster, open_api(cluster))
    except SmsError as error:
        return f"whether nodes have it is not known: {one_line(error.message, 120)}"
    lacking = new.nodes.keys() - {one.client for one in reports if path in one.has}
    return f"{len(lacking)} nodes do not report it: {one_line(fold(sorted(lacking)), 120)}" if lacking else ""


def find_unreached(old: Defined, new: Defined) -> Iterator[Fault]:
    """Yield by what slurmctld would not find slurmd of a node, or another one, until people have changed the node."""
    if moved := find_moved(old, new):
        pairs = one_line(", ".join(f"{name} that of {owner}" for name, owner in sorted(moved.items())[:SHOWN]), 300)
        yield Fault(
            f"nodes get addresses of others: {pairs}: jobs of one would run on the other",
            "drain them, change the addresses of the machines, then apply: `sms node list` shows who has which",
        )
    for key, default in AT_START.items():
        was, becomes = old.at_start.get(key, default), new.at_start.get(key, default)
        if was != becomes and old.nodes:
            yield Fault(
                f"{key}={becomes}: slurmd reads it only when it starts, and serves with {was} until then",
                "drain the nodes, apply with --force, then restart slurmd on every node",
            )
