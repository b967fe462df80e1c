"""What a change breaks besides jobs: programs, plugins and scripts that are missing, accounts, keys, addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from appliance.config.hostlist import fold
from appliance.config.slurm_files import FOLDER
from appliance.errors import ConfigError, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.nodes.files import read_reports
from appliance.operations.services.present import QUERY_S
from appliance.operations.vm.client import open_api
from appliance.plan.machine import inside_argv
from appliance.plan.nodes.accounts import GROUP, MOST_REMOVED, PASSWD, compare_accounts, too_many_removed
from appliance.plan.overlay.seed import SECRET_PLACES
from appliance.plan.services.defined import PLUGIN_FOLDER, Defined, find_new, find_plugins
from appliance.plan.services.effect import SHOWN, Fault, find_moved
from appliance.text import one_line
from appliance.tools.scripts import script_argv

JOB_SUBMIT = f"{FOLDER}/job_submit.lua"
LUA_FUNCTIONS = ("slurm_job_submit", "slurm_job_modify")
"""That it has to define (src/plugins/job_submit/lua/job_submit_lua.c)."""
MUNGE_KEY, *_ = SECRET_PLACES["munge_key"]


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

    Raises:
        ConfigError: lines of the accounts are invalid.
    """
    old, new = defined
    yield from find_lost_accounts(cluster, before, after)
    if MUNGE_KEY in before and MUNGE_KEY in after:
        yield Fault(
            "the munge key changes: every node refuses the controller, and is refused, until it has the new one",
            "give it to every node and restart its munged in this minute: `sms files push`, or by hand",
        )
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


def find_lost_accounts(
    cluster: Cluster, before: Mapping[str, str | None], after: Mapping[str, bytes]
) -> Iterator[Fault]:
    """Yield that too many users or groups would go.

    Raises:
        ConfigError: lines of the accounts are invalid.
    """
    if not {PASSWD, GROUP} & before.keys() & after.keys():
        return
    new = {path: after[path].decode(errors="surrogateescape") for path in (PASSWD, GROUP) if path in after}
    old = {path: new[path] if before.get(path) is None else str(before[path]) for path in new}
    # Those of the image's packages have any id, such as Debian's slurm.
    own = tuple(f"{service.user}:" for service in cluster.services)
    old = {path: "".join(line for line in old[path].splitlines(True) if not line.startswith(own)) for path in old}
    changes, problems = compare_accounts(old, new)
    if problems:
        raise ConfigError(problems=problems)
    if refusal := too_many_removed(changes, MOST_REMOVED):
        names = one_line(", ".join(changes[PASSWD].removed if PASSWD in changes else ()), 200)
        yield Fault(f"{refusal}: {names}", "is the file in `accounts` of the site file complete?")


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
    for key, value in find_new(old.at_start, new.at_start).items():
        if key in old.at_start:
            yield Fault(
                f"{key}={value}: slurmd reads it only when it starts, and serves with {old.at_start[key]} until then",
                "drain the nodes, apply with --force, then restart slurmd on every node",
            )
