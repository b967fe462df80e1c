"""What files that ``sms files`` and ``sms user sync`` give to clients would cost: judged before they are uploaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster, read_given
from appliance.operations.nodes.files import read_content
from appliance.operations.preflight import find_instance
from appliance.operations.services.accounts import find_lost_accounts
from appliance.operations.services.effect import Answer, Judged, settle
from appliance.operations.services.present import QUERY_S, query_present, read_recorded
from appliance.plan.machine import inside_argv
from appliance.plan.nodes.accounts import MOST_REMOVED, SHADOW, compare_lines, too_many_removed
from appliance.plan.nodes.files import ACCOUNTS, CONF, JUDGED, MUNGE_KEY, Difference, Master
from appliance.plan.overlay.seed import slurm_sources
from appliance.plan.services.defined import Defined, read_defined
from appliance.plan.services.effect import Fault, Present
from appliance.provision.payloads import FileVersion
from appliance.shared.records import RecordError
from appliance.tools.provision import Api

HELD = ("`sms apply` changes it there, then push again", "`sms apply` changes it there and on nodes at once")


@dataclass
class Pushes:
    """Judges what a verb uploads, by the services container that runs, and by the VM's present files.

    ``verb``: its name. ``force``: whatever it costs. ``most_removed``: percentage of the accounts that may go.
    """

    cluster: Cluster
    api: Api
    verb: str
    force: bool = False
    most_removed: float = MOST_REMOVED

    @cached_property
    def _found(self) -> tuple[Host | None, str]:
        """The host on which the services container runs; if there is none, an admin host that does not answer."""
        silent = ""
        for admin in self.cluster.site.admin_hosts:
            try:
                host = self.cluster.host(admin.name)
                if find_instance(self.cluster, host):
                    return host, ""
            except SmsError:
                silent = silent or admin.name
        return None, silent

    def why_held(self, one: Difference) -> str:
        """Return why a file is left out: the running container has another one, or needs nodes to have it; else empty.

        A munged has one key, and slurm.conf may cost jobs: ``sms apply`` changes both there, and judges that before.
        """
        if one.what not in ("add", "change", "remove"):
            return ""
        if one.path not in JUDGED and one.what != "remove":
            return ""
        host, silent = self._found
        if not host:
            unknown = silent and one.path in JUDGED and one.what != "add"  # a new VM may serve before the container
            return f"whether the services container runs is not known: {silent} does not answer" if unknown else ""
        if one.path not in JUDGED:
            programs = read_defined({CONF: self._read(CONF)}).programs.values()
            named = one.path in {path.split()[0] for path in programs if path}
            return f"the slurm.conf of {host.name} names it; `sms apply` first, then push again" if named else ""
        there = self._read(one.path)
        if not one.master:
            return f"{host.name} runs with it" if there else ""
        data, own = one.master.data, read_given(slurm_sources(self.cluster.site))
        applied = one.path in (CONF, MUNGE_KEY) or own.get(one.path) == data  # else it is only for nodes
        if not applied or there == data or (one.path == MUNGE_KEY and not there):
            return ""
        return f"{host.name} runs with another one; {HELD[one.path == MUNGE_KEY]}"

    def judge(self, masters: Sequence[Master], there: Sequence[FileVersion], *, dry_run: bool) -> tuple[str, ...]:
        """Return what new files of accounts would cost, as lines; refuse them, or report and record that.

        Args:
            there: the VM's present files.

        Raises:
            Refused: users or groups would go, and it is neither forced nor a dry run.
            ConfigError: lines of them are invalid.
        """
        accounts = [one for one in masters if one.path in ACCOUNTS.values()]
        if not accounts:
            return ()
        faults = {one.why: one for one in self._find_lost(accounts, there)}
        judged = Judged(None, Defined(), Defined(), faults=tuple(faults.values()))
        if not dry_run:
            host = self._found[0]
            forced = Answer.FORCE if host else Answer.REPORT  # the history is that of the container's host
            settle(self.cluster, host or Local(), judged, self.verb, forced if self.force else Answer.REFUSE)
        return tuple(judged.lines)

    def _find_lost(self, masters: Sequence[Master], there: Sequence[FileVersion]) -> Iterator[Fault]:
        """Yield what clients lose: nodes have the VM's files, and the container may have later ones."""
        for one in masters:
            if one.template:
                yield Fault(f"{one.path}: which accounts a template makes is not known", "write it without a template")
        after = {one.path: one.data for one in masters if not one.template}
        stored = {one["path"]: read_content(self.api, one["sha256"]) for one in there if one["path"] in after}
        sides: list[Mapping[str, bytes | None]] = [stored]
        if self._found[0]:
            sides.append({path: self._read(path) for path in after if path != SHADOW})
        for side in sides:
            before = {path: data.decode(errors="surrogateescape") for path, data in side.items() if data}
            yield from find_lost_accounts(self.cluster, before, after, self._present, self.most_removed)
        if SHADOW in after and (old := stored.get(SHADOW)):
            texts = (data.decode(errors="surrogateescape") for data in (old, after[SHADOW]))
            if refusal := too_many_removed({SHADOW: compare_lines(*texts)}, self.most_removed):
                yield Fault(refusal, "is the new file complete?")

    @cached_property
    def _present(self) -> Present:
        """What the controller has, or had when it stopped. Without an answer the limit for all accounts holds."""
        host = self._found[0]
        if host and self.cluster.find_role("controller"):
            with suppress(SmsError):
                return query_present(self.cluster, host)
        for admin in () if host else self.cluster.site.admin_hosts:
            with suppress(SmsError, RecordError):
                return read_recorded(self.cluster, self.cluster.host(admin.name))[1]
        return Present()

    def _read(self, path: str) -> bytes:
        """Return a file of the running container, which may be secret; empty if it is not there."""
        host = self._found[0]
        assert host
        argv = inside_argv(self.cluster.site, self.cluster.services, "cat", "--", path)
        return host.run(*argv, ok=None, timeout=QUERY_S).stdout
