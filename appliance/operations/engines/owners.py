"""Who can have the services and their state: the services container of an admin host, or an engine.

A move of the state uses only what is here, so each direction is the same steps.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from appliance.errors import Refused, SmsError, Unverified
from appliance.host.base import Host, Result
from appliance.host.stream import Stream
from appliance.operations.context import Cluster
from appliance.operations.deployed import STOPPED
from appliance.operations.engines.bundles import find_engine, render_bundle
from appliance.operations.engines.deploy import deploy_locked, stop_locked
from appliance.operations.engines.deployed import find_deployed, set_phase
from appliance.operations.engines.secret_files import compare_secrets
from appliance.plan.migration.state import Tree, Versions, read_tree, read_versions
from appliance.plan.services.controllers import CONTAINER
from appliance.shared.outputs import MAX_OUTPUT
from appliance.shared.state_lease import StateLease, parse_state_lease
from appliance.tools.held import Mark, held_stream, run_held
from appliance.tools.scripts import python_argv

LEASE = "/opt/sms/bin/sms-lease"
CONTROL_S = 30
LIST_S, LIST_BYTES = 3600, 256 << 20
"""Seconds that reading all of the state may take, and bytes of the list: about a million files."""


def script_argv(*words: str) -> tuple[str, ...]:
    """Return a command of ``state-tree``."""
    return python_argv("state-tree", *words)


@dataclass(frozen=True)
class Command:
    """A command, and the host that runs it. ``mark``: of the held command that it runs in a container of an engine."""

    host: Host
    argv: tuple[str, ...]
    mark: Mark | None = None

    def stream(self) -> AbstractContextManager[Stream]:
        """Run it and let the caller stream its output, and its input unless it is held."""
        if self.mark:
            return held_stream(self.host, self.argv, self.mark)
        return self.host.stream(*self.argv)

    def run(self, *, ok: Container[int] | None = (0,), timeout: float = 120, limit: int = MAX_OUTPUT) -> Result:
        """Run it to its end; it has no input. ``timeout`` in seconds, ``limit`` of its output in bytes.

        Raises:
            SmsError: as ``Host.run``, or its output ended too early.
        """
        if self.mark:
            return run_held(self.host, self.argv, self.mark, ok=ok, timeout=timeout, limit=limit)
        return self.host.run(*self.argv, ok=ok, timeout=timeout, limit=limit)


class Owner(ABC):
    """One of them, for one run. ``name`` is as in ``sms migrate --to``; ``where`` is for messages."""

    name: str
    where: str
    lost = False
    """Whether the state is here, and nothing is left that could run the services; see ``check_lost``."""

    def __init__(self, cluster: Cluster, paths: Sequence[str]) -> None:
        """``paths``: of the state, as the services have them."""
        self.cluster = cluster
        self.paths = tuple(paths)

    # Before anything is changed

    @abstractmethod
    def check(self) -> None:
        """Check all that a move needs here, whether from or to here.

        Raises:
            Refused: with what is missing.
        """

    def check_lost(self) -> None:
        """Check that the state here can be moved although the engine does not answer, and no service runs with it.

        Raises:
            Refused: it cannot, or one does.
        """
        raise Refused(
            f"{self.where} does not answer, and without it nobody reaches the state",
            hint="if the state is lost: `sms failover`, which continues from a snapshot, as docs/engines.md says",
        )

    @abstractmethod
    def runs(self) -> bool:
        """Return whether a service that moves runs here, or is to."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the space for the state here; -1 if that is not known before it is used."""

    def lacks(self) -> str:
        """Return what has to be created before commands can run in the image here; empty if there is nothing."""
        return ""

    def open(self) -> None:  # noqa: B027 - most lack nothing
        """Create what commands need to run in the image here, and check it. Called before anything is stopped.

        Raises:
            Refused: as ``check``.
        """

    def versions(self) -> Versions:
        """Return the versions of the programs in the image here."""
        command = self.inside(script_argv("versions"), state=False)
        result = command.run()
        return read_versions((result.stdout + result.stderr).decode(errors="replace"))

    def survey(self) -> Tree:
        """Return size and versions of the state here, which may be in use."""
        return self.brief()

    def brief(self) -> Tree:
        """Return them where nothing runs."""
        return self._query("brief", self.inside(self.tree_argv("brief")))

    # The state

    @abstractmethod
    def inside(self, argv: Sequence[str], *, state: bool = True, copy: bool = False, input: bool = False) -> Command:
        """Return the command that runs ``argv`` in the image here.

        Args:
            state: whether it needs the state.
            copy: it needs that which ``prepare`` has made, and may change it.
            input: it reads its standard input.
        """

    @abstractmethod
    def place(self, path: str, *, copy: bool = False) -> str:
        """Return where a path of the state is for a command that runs ``inside``."""

    def tree_argv(self, command: str, *, copy: bool = False) -> tuple[str, ...]:
        """Return a command of ``state-tree`` for all of the state."""
        return script_argv(command, *(f"{path}={self.place(path, copy=copy)}" for path in self.paths))

    def list(self, *, copy: bool = False) -> Tree:
        """Return every entry of the state here; ``copy``: of that in the place which ``prepare`` has made."""
        return self._query("list", self.inside(self.tree_argv("list", copy=copy), copy=copy))

    def _query(self, what: str, command: Command) -> Tree:
        result = command.run(timeout=LIST_S, limit=LIST_BYTES)
        try:
            return read_tree(json.loads(result.stdout.splitlines()[-1]))
        except (ValueError, IndexError, RecursionError):
            raise SmsError(f"the state of {self.where} could not be read ({what})") from None

    # The steps

    @abstractmethod
    def stop(self) -> None:
        """Stop the services here, and wait until they have ended.

        Raises:
            Refused: nothing was stopped.
        """

    @abstractmethod
    def start(self) -> None:
        """Start the services here, and wait until they are ready. Repeatable.

        Raises:
            SmsError: one is not.
        """

    def reload(self) -> str:
        """Make nodes fetch the configuration with the addresses here; return why that failed, else an empty text.

        They have the other addresses, too, so that this is not needed for running jobs.
        """
        controller = self.cluster.find_role("controller")
        try:
            for argv in controller.reload if controller else ():
                result = self.control(*argv)
                if result.status:
                    return result.stderr.decode(errors="replace").strip()[-200:]
        except SmsError as error:
            return error.message
        return ""

    @abstractmethod
    def control(self, *argv: str) -> Result:
        """Run a command of Slurm beside the controller here; whatever its status."""

    @abstractmethod
    def prepare(self) -> None:
        """Create an empty place for a copy of the state."""

    @abstractmethod
    def lock(self, where: str, *, copy: bool = False) -> None:
        """Keep services from starting with the state here from now on; it is moved to ``where``.

        Raises:
            Refused: one has it.
        """

    @abstractmethod
    def check_locked(self) -> None:
        """Check that nobody has changed what ``lock`` did.

        Raises:
            Refused: somebody has; the state here may be newer than its copy.
        """

    @abstractmethod
    def release(self, generation: int) -> None:
        """Let services start with the state here, with a higher generation than this one. Repeatable."""

    @abstractmethod
    def generation(self) -> int:
        """Return the highest generation that the state here has."""

    @abstractmethod
    def accept(self, generation: int, tree: Tree) -> None:
        """Put the complete copy in place, and keep what was there. The lease still names the source.

        Args:
            tree: what the copy has.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove a copy that was not accepted."""

    @abstractmethod
    def close(self) -> None:
        """End what commands need here that run ``inside``."""


class EngineOwner(Owner):
    """An engine: each folder that two at once would destroy has a lease of its own (docs/jobsync.md)."""

    timeout_s = 300.0
    """Seconds that each group of workloads may take to be ready."""

    def __init__(self, cluster: Cluster, host: Host, paths: Sequence[str]) -> None:
        """``host`` has the engine's programs."""
        super().__init__(cluster, paths)
        self.host = host
        self.engine = find_engine(cluster, host, self.name)
        self.bundle = render_bundle(cluster, self.name)
        self._locked: dict[str, StateLease] = {}

    @abstractmethod
    def root(self, path: str) -> str:
        """Return the folder of the volume with a path of the state, for a command that runs ``inside``."""

    def place(self, path: str, *, copy: bool = False) -> str:
        return f"{self.root(path)}{'/.moving' if copy else ''}{path}"

    def check(self) -> None:
        self.engine.check(self.cluster, self.bundle)
        if different := compare_secrets(self.cluster, self.bundle, self.engine):
            raise Refused(
                f"{self.where}: {', '.join(different)} is not the secret of the site file: nodes could not be reached",
                hint="write that of the site there, or remove it: `sms deploy` and a move create it",
            )
        self.engine.differences(self.bundle)  # it accepts what it is given
        if not self.lacks():
            self.check_image()

    def check_image(self) -> None:
        """Check that the image here has what a move needs.

        Raises:
            Refused: it does not.
        """
        has = self.inside(("test", "-x", LEASE), state=False)
        if has.run(ok=None).status:
            raise Refused(
                f"an earlier version of sms built the image of {self.where}", hint="`sms build` builds another one"
            )

    def runs(self) -> bool:
        return not self.lost and any(one.instances for one in self.engine.states(self.bundle) if one.kind == "service")

    def stop(self) -> None:
        record = find_deployed(self.cluster, self.host)
        if record is None or record.engine != self.name:
            return
        if self.lost:
            self.lock(CONTAINER)  # refused while a task has it; from now on none starts, also when the engine is back
            set_phase(self.cluster, self.host, record, STOPPED)
            return
        try:
            stop_locked(self.cluster, self.host, record)
        except Refused as error:
            if find_deployed(self.cluster, self.host) == record:
                raise
            raise SmsError(error.message, hint=error.hint) from error  # after the first change

    def start(self) -> None:
        done = deploy_locked(self.cluster, self.host, self.name, timeout_s=self.timeout_s)
        if done.silent:
            raise Unverified(
                f"what stays in the services container does not serve: {done.silent}",
                hint="`sms start` starts it on an admin host",
            )

    def control(self, *argv: str) -> Result:
        return self.engine.control(self.bundle, *argv, timeout=CONTROL_S)

    # Leases of folders

    @property
    def leased(self) -> list[str]:
        """The folders with a lease."""
        found = (one.engines.lease for one in self.cluster.services if one.engines.place == "one")
        return [folder for folder in found if folder in self.paths]

    def lock(self, where: str, *, copy: bool = False) -> None:
        for folder in self.leased:
            found = self._lease(folder, "--moved", where, copy=copy)
            if not copy:
                self._locked[folder] = found

    def check_locked(self) -> None:
        for folder, locked in self._locked.items():
            if self._lease(folder) != locked:
                raise Refused(f"{self.where}: another run has changed the lease of {folder}", hint="see `sms status`")

    def release(self, generation: int) -> None:
        for folder in self.leased:
            found = self._lease(folder)
            if found.moved or (not found.holder and found.generation < generation):
                self._lease(folder, "--free", str(max(generation, found.generation)))

    def generation(self) -> int:
        return max((self._lease(folder).generation for folder in self.leased), default=0)

    def _lease(self, folder: str, *change: str, copy: bool = False) -> StateLease:
        command = self.inside((LEASE, *change, self.place(folder, copy=copy)), copy=copy)
        result = command.run(ok=(0, 3))
        if result.status:
            why = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise Refused(f"{self.where}: {why[0] if why else folder}", hint="do its services still run there?")
        try:
            return parse_state_lease(result.stdout)
        except (ValueError, TypeError) as error:
            raise SmsError(f"the lease of {folder} on {self.where} cannot be read: {error}") from error

    # The place of a copy

    def prepare(self) -> None:
        self._run("prepare", *sorted({self.root(path) for path in self.paths}))
        command = self.inside(("mkdir", "-p", *(self.place(folder, copy=True) for folder in self.leased)), copy=True)
        command.run()
        self.lock("a copy", copy=True)

    def accept(self, generation: int, tree: Tree) -> None:
        copied = [f"{self.root(path)}={path}" for path in self.paths if path in tree.entries]
        absent = [f"{self.root(path)}={path}" for path in self.paths if path not in tree.entries]
        self._run("accept", f".before-{generation}", *copied, *(["without", *absent] if absent else ()))
        self.discard()

    def discard(self) -> None:
        self._run("discard", *sorted({self.root(path) for path in self.paths}))

    def _run(self, *words: str) -> None:
        command = self.inside(script_argv(*words), copy=True)
        command.run(timeout=LIST_S)
