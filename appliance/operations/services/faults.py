"""What a change breaks besides jobs: programs, plugins and scripts that are missing, accounts, addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace

from appliance.config.hostlist import fold
from appliance.config.slurm_files import FOLDER, find_unrunnable, is_called, is_pattern
from appliance.config.types import is_ipv4
from appliance.errors import ConfigError, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.nodes.files import read_reports
from appliance.operations.overlay.names import answers_names, find_missing
from appliance.operations.overlay.overlay import seeds_for
from appliance.operations.services.present import QUERY_S, last_line, query_present
from appliance.operations.services.reach import inspect_inside, see_accepting
from appliance.operations.services.users import find_without_directory
from appliance.operations.vm.client import open_api
from appliance.plan.image.definition import fixed_accounts
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
from appliance.plan.nodes.files import last_pulled, named_paths
from appliance.plan.overlay.names import read_resolved
from appliance.plan.overlay.seed import node_addresses
from appliance.plan.services.admission import read_groups
from appliance.plan.services.apply import FileChange
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
from appliance.plan.services.network import INTERFACES, find_cut_off, read_network, running_network
from appliance.plan.services.used_up import USAGE, begins_to_end, read_usage
from appliance.text import one_line
from appliance.tools.resolver import resolve
from appliance.tools.scripts import script_argv

MOST_PROBED = 64
LOST_WAYS = "`sms overlay restore N --path /etc/passwd` and `--path /etc/group`, of a snapshot that has them"
OF_NODES = (INTERFACES[0], "routes")
"""Of ``running_network``, what leads to nodes."""


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


def find_lost_accounts(
    cluster: Cluster,
    before: Mapping[str, str | None],
    after: Mapping[str, bytes],
    present: Present | None = None,
    most_removed: float = MOST_REMOVED,
) -> Iterator[Fault]:
    """Yield that too many users or groups would go, or users with jobs, or all users of a reservation.

    Args:
        present: what the controller has, if that is known.
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
        removed = changes[PASSWD].removed if PASSWD in changes else ()
        names = f": {one_line(', '.join(removed), 200)}" if removed else ""
        yield Fault(f"{refusal}{names}", "is the new file complete?")
    present = present or Present()
    ids = [read_ids(side.get(PASSWD, "")) for side in (old, new)]
    groups = [read_groups(side.get(PASSWD, ""), side.get(GROUP, "")) for side in (old, new)]
    gone = ids[0].keys() - ids[1].keys()
    if lost := sorted(one.name for one in present.reservations if one.loses_all(gone, groups[0], groups[1])):
        yield Fault(
            f"reservations lose all of their users ({len(lost)}): {one_line(', '.join(lost), 200)}; slurmctld deletes "
            "them when it reads its files again, and holds their jobs",
            "`scontrol update ReservationName=NAME Users=OTHERS` first, or delete them",
        )
    if lost := sorted(name for name in present.users & ids[0].keys() if ids[0][name] != ids[1].get(name)):
        yield Fault(
            f"users with jobs are removed, or get another id ({len(lost)}): {one_line(', '.join(lost), 200)}; their "
            "waiting jobs never start",
            "remove a user when the jobs have ended: `squeue --user NAME`",
        )


def find_waits(
    cluster: Cluster, host: Host, resolved: Cluster, changes: Sequence[FileChange], *, switch: bool
) -> Iterator[Fault]:
    """Yield what slurmctld would wait for, for minutes: names of nodes that it cannot ask for.

    Args:
        resolved: of ``resolve_running``.
        switch: a second instance is started, which is isolated.
    """
    missing = find_missing(resolved)
    asks = bool(missing and cluster.site.networks.dns)  # without a name server nothing waits
    if not asks or not (switch or any(one.path.startswith(f"{FOLDER}/") for one in changes)):
        return
    if switch or not answers_names(cluster, host, missing[0]):
        yield Fault(
            f"slurmctld would wait for name servers: {host.name} finds no address of the nodes "
            f"{one_line(fold(missing), 120)}{', and a second instance reaches no name server' * switch}",
            "give nodes an `address`, or names that resolve: `sms config check --resolve`",
        )


def query_network(cluster: Cluster, host: Host) -> dict[str, str]:
    """Return the network that the running instance was started with, as ``running_network`` does of the site's.

    Raises:
        CommandError: the container does not answer.
    """
    script = inside_argv(cluster.site, cluster.services, *script_argv("running-network"))
    return read_network(host.run(*script, timeout=QUERY_S).text)


def find_faults_of_instance(
    cluster: Cluster,
    host: Host,
    present: Present | None,
    running: Mapping[str, str],
    *,
    differs: bool,
    same_image: bool = False,
) -> Iterator[Fault]:
    """Yield what a new instance breaks for nodes and users: it may have other addresses, ids, and no directory.

    Args:
        present: what the controller has; None if it does not answer.
        running: of ``query_network``.
        differs: how to reach the directory changes, too.
        same_image: it has the image that runs now.
    """
    if present is None:
        wanted = running_network(cluster.site)
        if cluster.find_role("controller") and any(running.get(one, "") != wanted[one] for one in OF_NODES):
            why = "networks.provisioning changes, and what nodes and jobs lose by it is not known"
            yield Fault(why, "`sms exec -- sinfo` and `squeue` have to answer")
        return
    yield from _find_cut_off(cluster, present, running)
    yield from find_without_directory(cluster, host, present.users, differs=differs)
    if not same_image:
        yield from _find_other_ids(cluster, host, present)


def _find_cut_off(cluster: Cluster, present: Present, running: Mapping[str, str]) -> Iterator[Fault]:
    """Yield what nodes and jobs lose by another address of the container, or without a route to them."""
    wanted = running_network(cluster.site)
    jobs = [job for job in present.jobs if not job.waits]
    used = present.usable.union(*(job.nodes for job in jobs))
    now, becomes = (one.get(OF_NODES[0], " ").partition(" ")[2].partition("/")[0] for one in (running, wanted))
    if used and now != becomes:
        yield Fault(
            f"networks.provisioning.address: nodes in use ({len(used)}) keep {now}, not {becomes}, and so do their "
            f"running jobs ({len(jobs)}): {one_line(fold(sorted(used)), 200)}",
            "wait until the jobs have ended, apply with --force, then give every node the new address and restart its "
            "slurmd",
        )
    by_name = {name: address for address, names in node_addresses(cluster.site) for name in names.split()}
    found = {one.name: by_name.get(one.address, one.address) for one in present.nodes if one.name in used}
    addresses = {name: address for name, address in found.items() if is_ipv4(address)}
    if lost := sorted(find_cut_off(running, cluster.site, addresses)):
        yield Fault(
            f"networks.provisioning no longer leads to nodes in use ({len(lost)}): {one_line(fold(lost), 200)}",
            "keep their network in `routes`; or drain them, wait until their jobs have ended, and remove them first",
        )


def find_silent_since(cluster: Cluster, host: Host, before: Present, names: Set[str]) -> list[str]:
    """Return nodes that were usable before, and at which no slurmd accepts connections of the container now.

    Args:
        names: those that the site has. Of many, some of all are asked.
    """
    nodes = [one for one in before.nodes if one.name in before.usable & names]
    some = nodes[:: len(nodes) // MOST_PROBED + 1]
    accept = see_accepting(cluster, host, [(one.address, str(one.port)) for one in some]) if some else []
    return [one.name for one, accepts in zip(some, accept, strict=True) if not accepts]


def _find_other_ids(cluster: Cluster, host: Host, present: Present) -> Iterator[Fault]:
    """Yield nodes in use that would refuse a controller whose user has another id than in the running container.

    Those that refuse it already may have the new one. Munge's user may differ: its id is nowhere compared.
    """
    controller = cluster.find_role("controller")
    user = controller.user if controller else ""
    accounts = fixed_accounts(cluster.base, cluster.services, cluster.site.system_users)
    wanted = next((str(uid) for _, name, uid in accounts if name == user and uid is not None), "")
    now = host.run(*inside_argv(cluster.site, cluster.services, "id", "-u", user), ok=None, timeout=QUERY_S).text
    if wanted in ("", now):
        return
    if nodes := sorted(present.usable - {*inspect_inside(cluster, host, confined=True).refusing}):
        yield Fault(
            f"{user}.user: its id becomes {wanted}, not {now}: nodes where it is {now} would start and end no job "
            f"({len(nodes)}): {one_line(fold(nodes), 200)}",
            f"`id {user}` on each prints it; once all have {wanted}, and their slurmd was restarted: --force",
        )


def find_missing_accounts(cluster: Cluster, read: Callable[[str], bytes], present: Present) -> Iterator[Fault]:
    """Yield which accounts an overlay lacks of those that were written there last: the site's, or the VM's.

    Args:
        read: returns a file of the overlay; empty if it is not there. Only for one that has the site's files.
        present: what the controller had when it stopped.
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
        faults = [*find_lost_accounts(cluster, before, after, present)]
    except ConfigError as error:
        faults = [Fault(error.message, error.hint)]
    for one in faults:
        yield replace(one, hint=LOST_WAYS)


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
    """Yield by what slurmctld would not find slurmd of a node, or another one, until people change it; or slurmdbd."""
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
