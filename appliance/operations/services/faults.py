"""What a change breaks besides jobs: programs, plugins and scripts that are missing, accounts, addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from appliance.config.hostlist import fold
from appliance.config.slurm_files import find_unrunnable, is_called, is_pattern
from appliance.config.types import is_ipv4
from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.nodes.files import read_reports
from appliance.operations.services.accounts import find_lost_accounts
from appliance.operations.services.present import QUERY_S, last_line, query_present
from appliance.operations.services.reach import see_accepting
from appliance.operations.vm.client import open_api
from appliance.plan.machine import inside_argv
from appliance.plan.nodes.accounts import (
    GROUP,
    PASSWD,
)
from appliance.plan.nodes.files import named_paths
from appliance.plan.overlay.names import read_resolved
from appliance.plan.services.associations import (
    Rows,
    find_enforced,
    find_partition_qos,
    find_unassociated,
    find_without_qos,
    list_argv,
    read_rows,
)
from appliance.plan.services.defined import (
    AT_START,
    OWN_PROGRAMS,
    PLUGIN_FOLDER,
    PROGRAMS,
    Defined,
    find_new,
    find_plugins,
    read_allowed,
)
from appliance.plan.services.effect import PRESENT_BYTES, SHOWN, Fault, Present, find_moved
from appliance.plan.services.used_up import USAGE, begins_to_end, read_usage
from appliance.text import one_line
from appliance.tools.resolver import resolve
from appliance.tools.scripts import script_argv

MOST_PROBED = 64


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
    called = {key: path for key, path in (*new.own.items(), *new.programs.items()) if key in (*OWN_PROGRAMS, *PROGRAMS)}
    fresh = find_new({**old.own, **old.programs}, called)
    for key, program in called.items():
        for path in sorted(one for one in after if is_called(one, program.split()[0])):
            if (path in before or key in fresh) and (wrong := find_unrunnable(after[path])):
                yield Fault(f"{key}: {path} does not run as a program: {wrong[0]}", wrong[1])
    yield from find_lacking_programs(cluster, old, new)


def find_lacking_programs(cluster: Cluster, old: Defined, new: Defined) -> Iterator[Fault]:
    """Yield programs of the new configuration that nodes lack, or of which that is not known."""
    for key, path in find_new(old.programs, new.programs).items():
        if lacking := _find_lacking(cluster, new, path.split()[0]):
            fault = f"{key}={path}: {lacking}; a node that lacks it is drained by its first job, or takes none"
            hint = f"`sms files push` brings {path} to the nodes; `sms files report --path {path}` shows who has it"
            if not cluster.site.provisioning:
                hint = f"bring {path} to every node first"
            yield Fault(fault, hint)


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
    if {PASSWD, GROUP} & before.keys() and not present and cluster.find_role("controller"):
        with suppress(SmsError):  # without an answer, the limit for all holds
            present = query_present(cluster, host)
    yield from find_lost_accounts(cluster, before, after, present)


def find_faults_of_present(
    cluster: Cluster, host: Host, present: Present, defined: tuple[Defined, Defined]
) -> Iterator[Fault]:
    """Yield what a change breaks for those who have jobs, and for nodes in use."""
    yield from _find_unassociated(cluster, host, present, defined)
    try:
        yield from list(_find_beyond(cluster, host, present, defined))
    except SmsError as error:
        why = f"what Slurm's new limits cost is not known: {last_line(error)}"
        yield Fault(why, "`sms exec -- scontrol show assoc_mgr` has to answer")
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
    """Yield jobs and users that Slurm's database does not know enough of, where that is enforced from now on."""
    begins = find_enforced(defined[1]) - find_enforced(defined[0])
    if begins & {"associations", "qos"}:
        rows, why = _list(cluster, host, list_argv("associations", "user,account,qos", cluster.site.cluster))
        lacking = sorted(find_unassociated(present.jobs, rows))
        held = [job.id for job in find_without_qos(present.jobs, rows)] if "qos" in begins else []
        shown = {
            "association": [f"{name} ({account})" if account else name for name, account in lacking],
            "association with their QOS": held,
        }
        for what, names in shown.items():
            if names:
                yield Fault(
                    f"AccountingStorageEnforce: users or jobs {why or 'have'} no {what} in cluster "
                    f"{cluster.site.cluster} ({len(names)}): {one_line(', '.join(names), 200)}; none of these starts",
                    "`sacctmgr add user NAME account=ACCOUNT`, or `sacctmgr modify user NAME set qos+=QOS`, then apply",
                )
    if "wckeys" in begins:
        rows, why = _list(cluster, host, list_argv("wckeys", "user", cluster.site.cluster))
        if lacking_keys := present.users - {row[0] for row in rows}:
            yield Fault(
                f"AccountingStorageEnforce: users with jobs {why or 'have'} no wckey ({len(lacking_keys)}): "
                f"{one_line(', '.join(sorted(lacking_keys)), 200)}; they cannot submit",
                "`sacctmgr add user NAME wckey=KEY` for each, then apply",
            )
    if wanted := find_partition_qos(*defined):
        rows, why = _list(cluster, host, list_argv("qos", "name"))
        there = {row[0] for row in rows}
        yield from find_lacking_qos({name: qos for name, qos in wanted.items() if qos not in there}, why)


def _list(cluster: Cluster, host: Host, argv: tuple[str, ...]) -> tuple[Rows, str]:
    """Return records of Slurm's database; without an answer none, and how a message is to say it."""
    done = host.run(*inside_argv(cluster.site, cluster.services, *argv), ok=None, timeout=QUERY_S, limit=PRESENT_BYTES)
    return (read_rows(done.text), "") if done.status == 0 else ((), "may have (slurmdbd does not answer)")


def find_lacking_qos(lacking: Mapping[str, str], why: str = "") -> Iterator[Fault]:
    """Yield that slurmctld would not start for the QOS of partitions; ``why``: if that is not known."""
    if lacking:
        some = one_line(", ".join(f"{name} ({qos})" for name, qos in sorted(lacking.items())), 200)
        yield Fault(
            f"partitions {why or 'have'} a QOS that Slurm's database does not know: {some}; slurmctld would not start",
            "`sacctmgr add qos NAME` first, or correct the name",
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


def _find_lacking(cluster: Cluster, new: Defined, path: str) -> str:
    """Return which nodes do not report that they have a program, or one of a pattern; empty if all do.

    Of a pattern that nothing matches, slurmd runs nothing and goes on.
    """
    if is_pattern(path) and not any(is_called(one, path) for one in named_paths(cluster.site, cluster.services)):
        return ""
    if not cluster.site.provisioning:
        return "whether nodes have it is not known, as there is no provisioning VM that reports it"
    try:
        reports = read_reports(cluster, open_api(cluster))
    except SmsError as error:
        return f"whether nodes have it is not known: {one_line(error.message, 120)}"
    lacking = new.nodes.keys() - {one.client for one in reports if any(is_called(has, path) for has in one.has)}
    return f"{len(lacking)} nodes do not report it: {one_line(fold(sorted(lacking)), 120)}" if lacking else ""


def find_unreached(old: Defined, new: Defined) -> Iterator[Fault]:
    """Yield what slurmctld would not reach: slurmdbd; slurmd of a node, or another one, until people change it."""
    before, after = (one.plugins.get("AccountingStorageType", "") for one in (old, new))
    if before.endswith("/slurmdbd") and new.nodes and not after.endswith("/slurmdbd"):
        yield Fault(
            f"AccountingStorageType={after or 'accounting_storage/none'}: no job is recorded any more, and limits, QOS "
            "and fair share of accounts end",
            "keep slurmdbd in `services`, and AccountingStorageType as it is",
        )
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
