"""What a change of the site costs on a running cluster: judged before it is made, compared afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum

from appliance.config.hostlist import fold
from appliance.config.slurm_files import FOLDER
from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.overlay.overlay import seeds_for
from appliance.operations.preflight import find_instance
from appliance.operations.services.accounts import find_lost_accounts, find_missing_accounts
from appliance.operations.services.faults import (
    find_faults_of_present,
    find_lacking_programs,
    find_lacking_qos,
    find_unreached,
)
from appliance.operations.services.holding import hold, release, update
from appliance.operations.services.munge_key import judge_key
from appliance.operations.services.new_instance import (
    find_faults_of_instance,
    find_moved_address,
    find_silent_since,
    query_network,
)
from appliance.operations.services.node_files import judge_node_files
from appliance.operations.services.present import QUERY_S, last_line, query_present, query_qos, read_recorded
from appliance.operations.services.users import DIRECTORY_CONF, query_known
from appliance.plan.adopt.read_slurm import find_include
from appliance.plan.machine import inside_argv
from appliance.plan.nodes.accounts import GROUP, PASSWD
from appliance.plan.nodes.files import MUNGE_KEY
from appliance.plan.services.admission import read_groups
from appliance.plan.services.associations import find_partition_qos
from appliance.plan.services.by_hand import find_by_hand
from appliance.plan.services.defined import (
    Defined,
    find_described,
    read_defined,
)
from appliance.plan.services.effect import (
    PRESENT,
    PRESENT_BYTES,
    SHOWN,
    Fault,
    Loss,
    Present,
    can_cost,
    count_losses,
    find_failed,
    find_losses,
    find_lowered,
    find_unusable,
    read_present,
    shown_losses,
)
from appliance.plan.services.node_files import JOB_SUBMIT, READ
from appliance.plan.services.preemption import preempts_more
from appliance.plan.services.used_up import begins_to_end
from appliance.shared.records import RecordError
from appliance.text import one_line
from appliance.tools import ext3

Accounts = Mapping[str, bytes]
"""Files of accounts by path."""
COMPARE_S = 20
"""Seconds that the controller may take to answer after a change."""
SETTLE_S = 5
"""Seconds after which nodes have registered with changed settings: a reload makes each of them do so."""
MOST_FILES = 32
"""Of slurm.conf and what it includes in an overlay."""
LOST_USERS = "users with jobs are no longer known"
REMOVED = "partitions, nodes, their resources or limits are removed or changed"
WAYS = (
    "drain the partition or the nodes with `scontrol update`, wait until the jobs have ended (`squeue`), "
    "or change those that wait (`scontrol update JobId=N`), and run this again"
)
STOPPED_WAYS = "start with the site file of before, drain what is to go, then `sms apply` the changed one"
KEPT_WAYS = (
    "its slurm.conf was restored, or changed inside: `sms overlay restore N --path /etc/slurm` takes it from a "
    "snapshot of before"
)


class Answer(Enum):
    """What a verb does where a change costs something."""

    REFUSE = "refuse"
    KEEP = "keep"
    """Nobody is there who could decide: the files of before stay."""
    FORCE = "force"
    """It is reported, and recorded in the history."""
    REPORT = "report"
    """It is reported: the change is forced, and only rehearsed."""

    @property
    def forced(self) -> bool:
        """Whether somebody wants it whatever it costs."""
        return self in (Answer.FORCE, Answer.REPORT)


def find_answer(*, force: bool, rehearsed: bool = False) -> Answer:
    """Return the answer to what a change costs for these options of a verb."""
    return Answer.REFUSE if not force else Answer.REPORT if rehearsed else Answer.FORCE


@dataclass(frozen=True)
class Judged:
    """What a change costs. ``present``: None if the controller does not answer; ``unknown``: why that matters.

    ``faults``: what else goes wrong with it, and what to do about it. ``ways``: what to do about losses.
    ``known``: users with jobs whom the container knows.
    """

    present: Present | None
    old: Defined
    new: Defined
    losses: tuple[Loss, ...] = ()
    unknown: str = ""
    faults: tuple[Fault, ...] = ()
    ways: str = WAYS
    known: frozenset[str] = frozenset()

    @property
    def lines(self) -> list[str]:
        """Why the change is refused; nothing if it is not."""
        lost = [f"it would lose {count_losses(self.losses)}:"] if self.losses else []
        lost += [f"  {line}" for line in shown_losses(self.losses)]
        broken = [one.why for one in self.faults[:SHOWN]]
        broken += [f"and {len(self.faults) - SHOWN} more"] if len(self.faults) > SHOWN else []
        return [*([self.unknown] if self.unknown else []), *lost, *broken]

    @property
    def costly(self) -> bool:
        """Whether partitions, nodes or resources of nodes are removed or others."""
        return can_cost(self.old, self.new)

    @property
    def costs(self) -> frozenset[str]:
        """What it costs, each as a text that is the same as long as the state is."""
        lost = {f"{one.kind} {one.name}" for one in self.losses} | {one.why for one in self.faults}
        return frozenset(lost | ({self.unknown} if self.unknown else set()))

    def refuse(self, verb: str, when: str = "", *, accepted: frozenset[str] = frozenset()) -> None:
        """Refuse the change if it costs anything.

        Args:
            when: of which moment that is, if not of now: the services container does not run.
            accepted: what it may cost, of ``costs``.

        Raises:
            Refused: it does, or that is not known.
        """
        if (lines := self.lines) and not self.costs <= accepted:
            hints = [self.ways] if self.losses or self.unknown else []
            hints += dict.fromkeys(one.hint for one in self.faults)
            hints.append(f"--force: {verb} nevertheless")
            first = f"{verb} is refused" + (f" ({when})" if when else "")
            raise Refused("\n  ".join([first, *lines]), hint="\n  ".join(hints))


@dataclass(frozen=True)
class Cost:
    """What a change has cost, a text for each: ``nodes`` that take no job since, ``jobs`` that failed.

    ``users``: names of those with jobs whom the container no longer knows.
    """

    nodes: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    users: tuple[str, ...] = ()


def judge(cluster: Cluster, host: Host, old: Defined, new: Defined) -> Judged:
    """Return what the running controller would lose with ``new``; ``old``: what its files define now."""
    try:
        present = query_present(cluster, host)
    except CommandError as error:
        judged = Judged(None, old, new, faults=tuple(find_unreached(old, new)))
        unknown = f"the jobs are not known: {last_line(error)}; {REMOVED}"
        return replace(judged, unknown=unknown) if judged.costly else judged
    unknown = f"{present.unread} jobs cannot be read, and {REMOVED}" if present.unread and can_cost(old, new) else ""
    hint = "write it into the site file (`max_time`, `nodes`, `extra`), or repeat it afterwards"
    faults = [Fault(line, hint) for line in find_by_hand(present, old, new)]
    if preempts_more(old, new):
        present = replace(present, qos=query_qos(cluster, host))
    faults += [*find_unreached(old, new), *find_lowered(present, old, new)]
    known = frozenset[str]()
    with suppress(CommandError):
        known = query_known(cluster, host, present.users).names
    return Judged(present, old, new, find_losses(present, old, new), unknown, tuple(faults), known=known)


def settle(cluster: Cluster, host: Host, judged: Judged, verb: str, answer: Answer, *, when: str = "") -> None:
    """Refuse a change that costs anything, or report that, and record it in the history, as ``answer`` says.

    Raises:
        Refused: it is refused.
    """
    if answer is Answer.REFUSE:
        judged.refuse(verb, when)
    elif lines := judged.lines:
        moment = f" ({when})" if when else ""
        cluster.env.progress.warn("\n  ".join([f"{verb} is forced{moment}", *lines]))
        if answer is Answer.FORCE:
            note(cluster, host, verb, "forced", costs=[one.strip() for one in lines])


@contextmanager
def may_fail(cluster: Cluster, verb: str, answer: Answer) -> Iterator[None]:
    """Report that a forced change could not be judged: it goes on."""
    try:
        yield
    except SmsError as error:
        if not answer.forced:
            raise
        cluster.env.progress.warn(f"what it costs to {verb} is not known: {error.message}")


def judge_start(cluster: Cluster, host: Host, answer: Answer, *, image: str = "") -> bool:
    """Judge a start by what the last stop recorded; return whether the overlay gets the site's files.

    Args:
        image: path of the one that is to start; empty: what nodes make of the files is not tried.

    Raises:
        Refused: jobs or reservations would be lost, or it is not known whether there are any.
    """
    if not cluster.find_role("controller"):
        return True
    read = _read_overlay(cluster, host)
    before, after, accounts = _read_conf(read), _read_site(cluster), _read_accounts(cluster, read)
    old, new = (define(files, of) for files, of in zip((before, after), accounts, strict=True))
    judged = Judged(None, old, new, faults=tuple(find_unreached(old, new)), ways=STOPPED_WAYS)
    when = "it does not run"
    try:
        when, present = _read_stopped(cluster, host)
        faults = (*judged.faults, *find_lowered(present, old, new))
        judged = replace(judged, present=present, losses=find_losses(present, old, new), faults=faults)
    except RecordError:  # there is none after a crash
        if judged.costly:
            unknown = f"the jobs are not known, as no stop has recorded those of this state, and {REMOVED}"
            judged = replace(judged, unknown=unknown)
    lacking = [*find_lacking_programs(cluster, old, new)]
    lacking += find_lacking_qos(find_partition_qos(old, new), "may have (it does not run)")
    lacking += find_moved_address(before, after, judged.present or Present())
    if judged.present and begins_to_end(old, new) and not all(job.waits for job in judged.present.jobs):
        why = "AccountingStorageEnforce begins to enforce limits: which running jobs that ends is not known"
        lacking.append(Fault(why, "start with the files of before, then `sms apply`; or add `safe` to it"))
    refused = (*judged.faults, *judge_node_files(cluster, host, image, before, after), *lacking)
    try:
        judged = replace(judged, faults=(*refused, *_judge_secrets(cluster, read, accounts, judged.present)))
    except ConfigError as error:
        if answer is Answer.REFUSE:
            raise
        judged = replace(judged, faults=(*refused, Fault(error.message, error.hint)))
    if answer is not Answer.KEEP:
        settle(cluster, host, judged, "start", answer, when=when)
        return True
    if not judged.lines:
        return True
    cluster.env.progress.warn(
        "it starts with the files of before, not with the changed site file: "
        f"{one_line('; '.join(judged.lines), 300)}; `sms apply` judges it again"
    )
    return False


def judge_kept(cluster: Cluster, host: Host, answer: Answer) -> None:
    """Judge a start with the files of the overlay as they are: somebody inside, or a restore, may have changed them.

    Raises:
        Refused: jobs or reservations of the last stop would be lost, or accounts are.
    """
    if not cluster.find_role("controller"):
        return
    read, when, present = _read_overlay(cluster, host), "", Present()
    with suppress(RecordError):  # there is none after a crash
        when, present = _read_stopped(cluster, host)
    defined = read_defined(_read_conf(read, ()))
    losses, lost = find_losses(present, defined, defined), tuple(find_missing_accounts(cluster, read, present))
    judged = Judged(present, defined, defined, losses, faults=lost, ways=KEPT_WAYS)
    if answer is not Answer.KEEP:
        settle(cluster, host, judged, "start", answer, when=when)
    elif judged.lines:
        what = one_line("; ".join(judged.lines), 300)
        cluster.env.progress.warn(f"files in the overlay are not those of the last stop: {what}")


def may_seed(cluster: Cluster, host: Host, answer: Answer, *, image: str, stays: bool) -> bool:
    """Judge a start; return whether the overlay gets the site's files, unless those that it has are to stay."""
    with may_fail(cluster, "start", answer):
        if not stays:
            return judge_start(cluster, host, answer, image=image)
        judge_kept(cluster, host, answer)
    return True


def _read_stopped(cluster: Cluster, host: Host) -> tuple[str, Present]:
    """Return when that was, as a text, and what the last stop recorded.

    Raises:
        RecordError: it recorded nothing.
    """
    age, present = read_recorded(cluster, host)
    return f"as recorded by the last stop, {age} ago", present


def _read_overlay(cluster: Cluster, host: Host) -> Callable[[str], bytes]:
    """Return what reads a file of the overlay, which is not in use; empty if it is not there."""
    return lambda path: ext3.read_inside(host, str(cluster.places.overlay), f"/upper{path}")


def query_old_jobs(old: Host, user: str) -> Present | None:
    """Return what the controller of an old node has; None if it does not answer. ``user``: SlurmUser."""
    try:
        return read_present(old.run(*PRESENT, timeout=QUERY_S, limit=PRESENT_BYTES).text, user)
    except SmsError:
        return None


def judge_old(cluster: Cluster, old: Host, conf: str, user: str) -> tuple[Loss, ...]:
    """Return what the controller of an old node would lose with the files of the site.

    Nothing if it does not answer: the rehearsal of an adoption compares the jobs in its state.

    Args:
        conf: path of its slurm.conf. Files elsewhere that this includes are left out.
        user: SlurmUser.
    """
    folder, present = conf.rpartition("/")[0], query_old_jobs(old, user)
    if present is None:
        return ()

    def read(path: str) -> bytes:
        return old.run("cat", "--", folder + path.removeprefix(FOLDER), ok=None, timeout=QUERY_S).stdout

    before, after = read_defined(_read_conf(read)), read_defined(_read_site(cluster))
    return find_losses(present, before, after)


def judge_running(cluster: Cluster, host: Host) -> Judged:
    """Return what the running container would lose with the files of the site as they are now.

    Raises:
        ConfigError: lines of the accounts are invalid.
    """
    release(cluster, host)  # else its own doing would count as somebody's
    read = _read_inside(cluster, host)
    before, after, accounts = _read_conf(read), _read_site(cluster), _read_accounts(cluster, read)
    judged = judge(cluster, host, define(before, accounts[0]), define(after, accounts[1]))
    running = find_instance(cluster, host)
    refused = judge_node_files(cluster, host, running.image if running else "", before, after)
    besides = [*find_lacking_programs(cluster, judged.old, judged.new)]
    if judged.present:
        besides += find_faults_of_present(cluster, host, judged.present, (judged.old, judged.new))
    differs = _has_other_directory(cluster, read)
    besides += find_faults_of_instance(cluster, host, judged.present, query_network(cluster, host), differs=differs)
    besides += _judge_secrets(cluster, read, accounts, judged.present)
    return replace(judged, faults=(*judged.faults, *refused, *besides))


def _has_other_directory(cluster: Cluster, read: Callable[[str], bytes]) -> bool:
    """Return whether the site has another way to its directory than ``read`` returns."""
    site = next((seed.data for seed in seeds_for(cluster) if seed.path == DIRECTORY_CONF), None)
    return site is not None and site != read(DIRECTORY_CONF)


def find_dropped(
    cluster: Cluster, host: Host, present: Present | None = None, wait_s: float = QUERY_S
) -> tuple[str, ...]:
    """Return changes by ``scontrol update`` that the next start of the controller drops; none without an answer.

    Args:
        present: what it has, if that is known already.
        wait_s: how long each query may take.
    """
    if not cluster.find_role("controller"):
        return ()
    try:
        present = present or query_present(cluster, host)
        now = read_defined(_read_conf(_read_inside(cluster, host, wait_s), ()))
    except SmsError:
        return ()
    return tuple(find_by_hand(present, now, now))


def _read_accounts(cluster: Cluster, read: Callable[[str], bytes]) -> tuple[Accounts, Accounts]:
    """Return those that ``read`` returns, and those of the site; none where the site has none."""
    after = {seed.path: seed.data for seed in seeds_for(cluster) if seed.path in (PASSWD, GROUP)}
    return {path: read(path) for path in after}, after


def define(files: Mapping[str, bytes], accounts: Accounts) -> Defined:
    """Return what files of Slurm define, with the groups of the container where both files of accounts are known."""
    texts = [accounts.get(path, b"").decode(errors="surrogateescape") for path in (PASSWD, GROUP)]
    return replace(read_defined(files), groups=read_groups(*texts) if all(texts) else None)


def _judge_secrets(
    cluster: Cluster, read: Callable[[str], bytes], accounts: tuple[Accounts, Accounts], present: Present | None
) -> tuple[Fault, ...]:
    """Judge the site's munge key by that which ``read`` returns, and its accounts; ``present``: None if not known.

    Raises:
        ConfigError: lines of the accounts are invalid.
    """
    key = next((seed.data for seed in seeds_for(cluster) if seed.path == MUNGE_KEY), b"")
    before = {path: data.decode(errors="surrogateescape") or None for path, data in accounts[0].items()}
    return (*judge_key(read, key), *find_lost_accounts(cluster, before, accounts[1], present))


def _read_site(cluster: Cluster) -> dict[str, bytes]:
    """Return the files of Slurm that the site has, by path."""
    return {seed.path: seed.data for seed in seeds_for(cluster) if seed.path.startswith(f"{FOLDER}/")}


def _read_inside(cluster: Cluster, host: Host, wait_s: float = QUERY_S) -> Callable[[str], bytes]:
    """Return what reads a file of the running container; empty if it is not there."""
    inside = inside_argv(cluster.site, cluster.services, "cat", "--")
    return lambda path: host.run(*inside, path, ok=None, timeout=wait_s).stdout


def _read_conf(read: Callable[[str], bytes], besides: Iterable[str] = (*READ, JOB_SUBMIT)) -> dict[str, bytes]:
    """Return a slurm.conf with its includes, and files besides; ``read``: empty if a file is not there."""
    found = {path: read(path) for path in besides}
    wanted = [f"{FOLDER}/slurm.conf"]
    while wanted and len(found) < MOST_FILES:
        path = wanted.pop()
        found[path] = read(path)
        included = (find_include(line, path) for line in found[path].decode(errors="replace").splitlines())
        wanted += [one for one in included if one.startswith(f"{FOLDER}/") and one not in found]
    return {path: data for path, data in found.items() if data}


@contextmanager
def held(
    cluster: Cluster, host: Host, judged: Judged, verb: str, accepted: frozenset[str] = frozenset()
) -> Iterator[None]:
    """Let no job start where it would be lost: what is removed takes none meanwhile. If it fails, all is as before.

    Raises:
        Busy: another run is at work.
        Refused: jobs have begun, or were submitted, since they were judged.
    """
    if judged.present is None or not judged.costly:
        yield
        return
    there = judged.present.partitions  # somebody may have deleted one by hand
    partitions = sorted((judged.old.partitions.keys() - judged.new.partitions.keys()) & there.keys())
    nodes = fold(sorted((judged.old.nodes.keys() - judged.new.nodes.keys()) & judged.present.usable))
    states = {name: there[name].get("State", "UP") for name in partitions}
    with hold(cluster, host, verb, states, nodes) if partitions or nodes else nullcontext():
        now = judge(cluster, host, judged.old, judged.new)
        replace(now, faults=judged.faults).refuse(verb, accepted=accepted)
        yield


def compare(cluster: Cluster, host: Host, judged: Judged, *, registers: bool = True, moved: bool = False) -> Cost:
    """Return what a change has cost that was not foreseen: nodes that are no longer usable, jobs that failed, users.

    Args:
        moved: the container may have another network: whether nodes are reached is tried, too.
        registers: whether all nodes register again: slurmctld was restarted, or has sent them files. Otherwise those
            do whose settings changed.
    """
    if judged.present is None:
        return Cost()
    changed = find_described(judged.old, judged.new)
    foreseen = {one.name for one in judged.losses}
    began = cluster.env.clock.monotonic()
    settles = bool((judged.present.usable if registers else changed) & judged.present.usable)
    settled, deadline = began + SETTLE_S * settles, began + COMPARE_S
    with cluster.env.progress.step("compare jobs and nodes with before") as step:
        while True:
            try:
                now = query_present(cluster, host)
            except CommandError as error:
                if cluster.env.clock.monotonic() < deadline:
                    cluster.env.clock.sleep(1)
                    continue
                step.detail("not known")
                cluster.env.progress.warn(f"what it has cost is not known: {last_line(error)}")
                return Cost()
            lost = find_unusable(judged.present, now, judged.new)
            failed = find_failed(judged.present, now, foreseen, changed)
            if lost or failed or cluster.env.clock.monotonic() >= settled:
                break
            cluster.env.clock.sleep(1)
        step.detail(
            f"{len(lost)} of {len(judged.present.usable)} nodes are no longer usable, {len(failed)} jobs failed"
        )
    nodes = [f"{one.name} is {one.state.lower()} ({one.reason or 'no reason is recorded'})" for one in lost]
    try:
        if moved and not nodes:
            silent = find_silent_since(cluster, host, judged.present, judged.new.nodes.keys())
            nodes = [f"{name} accepts no connection of the container" for name in silent]
        users = _find_unknown(cluster, host, judged.known, deadline)
    except CommandError as error:
        cluster.env.progress.warn(f"what it has cost is not known: {last_line(error)}")
        return Cost(tuple(nodes), tuple(failed))
    return Cost(tuple(nodes), tuple(failed), users)


def _find_unknown(cluster: Cluster, host: Host, known: Set[str], deadline: float) -> tuple[str, ...]:
    """Return which users the container no longer knows; what asks a directory may just have been restarted."""
    while True:
        lost = known - query_known(cluster, host, known).names
        if not lost or cluster.env.clock.monotonic() >= deadline:
            return tuple(sorted(lost))
        cluster.env.clock.sleep(1)


def find_stopped(cluster: Cluster, host: Host) -> Present | None:
    """Return what the last stop recorded; None if it recorded nothing, as after a crash."""
    try:
        return _read_stopped(cluster, host)[1] if cluster.find_role("controller") else None
    except RecordError:
        return None


def compare_stopped(cluster: Cluster, host: Host, present: Present) -> Cost:
    """Return what a start with other files of Slurm has cost of what the controller had before it stopped."""
    defined = read_defined(_read_site(cluster))
    losses = find_losses(present, defined, defined)  # a forced start has reported them
    return compare(cluster, host, Judged(present, defined, defined, losses))


def need_no_cost(cluster: Cluster, host: Host, judged: Judged, *, registers: bool) -> None:
    """Check that a change has cost neither node, job nor user; ``registers``: as for ``compare``.

    Raises:
        SmsError: it has.
    """
    cost = compare(cluster, host, judged, registers=registers)
    texts = [
        f"{len(lines)} {what}: {'; '.join(lines[:3])}" + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")
        for lines, what in (
            (cost.nodes, "nodes take no job since"),
            (cost.jobs, "jobs failed"),
            (cost.users, LOST_USERS),
        )
        if lines
    ]
    if texts:
        raise SmsError(
            "\n  ".join(texts),
            hint="do the settings of these nodes fit their hardware? `slurmd -C` on one of them prints it. If "
            "they only need their slurmd restarted, as after a change of Gres: --force keeps the change"
            if cost.nodes or cost.jobs
            else "`sms exec -- getent passwd NAME` asks as the services do",
        )


def resume_nodes(cluster: Cluster, host: Host, judged: Judged) -> None:
    """Resume nodes that a daemon has taken out since the change, which has been taken back."""
    if judged.present is None:
        return
    if lost := find_unusable(judged.present, query_present(cluster, host), judged.old):
        update(cluster, host, f"NodeName={fold(one.name for one in lost)}", "State=RESUME", ok=None)
