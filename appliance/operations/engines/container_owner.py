"""The services container of an admin host, as one that can have the services' state."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.errors import Refused, SmsError
from appliance.host.base import Host, Result
from appliance.operations.context import Cluster
from appliance.operations.engines.owners import CONTROL_S, Command, Owner, script_argv
from appliance.operations.image.deliver import Image, deliver, trust
from appliance.operations.overlay.mirrored import opened
from appliance.operations.overlay.overlay import ready_overlay
from appliance.operations.preflight import (
    check_networks,
    check_programs,
    find_instance,
    prepare_confinement,
    try_confinement,
)
from appliance.operations.services.start import StartOptions, start
from appliance.operations.services.stop import stop, stop_gateway
from appliance.plan.machine import inside_argv
from appliance.plan.migration.state import Tree
from appliance.plan.services.controllers import CONTAINER
from appliance.plan.services.runs import ROOT, Once, once_run
from appliance.tools import ext3, files
from appliance.tools.scripts import read_script
from appliance.tools.scripts import script_argv as shell_argv
from appliance.tools.space import query_space

COPY_S = 3600
"""Seconds that a copy of the overlay may take."""


class ContainerOwner(Owner):
    """The services container on ``host``. A copy is made beside its overlay, which it replaces when it is complete."""

    name = CONTAINER

    def __init__(self, cluster: Cluster, host: Host, paths: Sequence[str]) -> None:
        super().__init__(cluster, paths)
        self.host = host
        self.where = f"the services container on {host.name}"
        self._image: Image | None = None

    @property
    def image(self) -> Image:
        """The image that runs, or that a start would use."""
        if self._image is None:
            running = find_instance(self.cluster, self.host)
            found = (running.image, "") if running else self._deliver()
            self._image = trust(self.cluster, self.host, *found)
        return self._image

    def _deliver(self) -> tuple[str, str]:
        try:
            return deliver(self.cluster, self.host, None)
        except Refused as error:
            raise Refused(
                f"{self.where} does not run, and cannot be started: {error.message}",
                hint=f"{error.hint}, `sms start` starts it; `sms deploy --engine ENGINE` begins without its state",
            ) from error

    @property
    def overlay(self) -> str:
        """Path of the overlay itself, also where it is on a mirror."""
        path = str(self.cluster.places.overlay)
        return self.host.run("readlink", "-f", path, ok=None).text or path

    @property
    def moving(self) -> str:
        """Path of the copy."""
        return f"{self.overlay}.moving"

    def check(self) -> None:
        check_programs(self.host)
        check_networks(self.cluster, self.host)
        where = self.cluster.places
        files.make_folders(self.host, *map(str, (where.images, where.overlay.parent, where.journal, where.public_keys)))
        try_confinement(self.cluster, self.host, self.image.path)

    def runs(self) -> bool:
        return find_instance(self.cluster, self.host) is not None

    def free_bytes(self) -> int:
        """Return the space for the state in a copy of the overlay, and for that copy beside it: the lower of both."""
        with opened(self.cluster, self.host):
            overlay = self.overlay
            there = query_space(self.host, overlay.rpartition("/")[0]).free
            if not self.host.works("test", "-f", overlay):
                return min(there, self.cluster.site.overlay.size_mb << 20)
            replaced = self.survey(opened_already=True).bytes
            inside = ext3.free_bytes(self.host, overlay) + replaced
            return max(0, min(there - ext3.sizes_of(self.host, overlay)[2] + replaced, inside))

    def survey(self, *, opened_already: bool = False) -> Tree:
        if opened_already:
            return super().survey()
        if self.runs():
            tree = script_argv("brief", *(f"{path}={path}" for path in self.paths))
            argv = inside_argv(self.cluster.site, self.cluster.services, *tree)
            return self._query("brief", Command(self.host, argv))
        with opened(self.cluster, self.host):
            return self.brief()

    def inside(self, argv: Sequence[str], *, state: bool = True, copy: bool = False, input: bool = False) -> Command:
        overlay = (self.moving if copy else self.overlay) if state else ""
        once = Once("write" if copy else "read" if state else "query", tuple(argv), overlay, writable=copy)
        return self.run_once(once)

    def load_database(self, setup: str) -> Command:
        """Return the command that loads a dump, its standard input, into the copy; ``setup``: of mariadb."""
        argv = shell_argv("database-load", ROOT, setup, read_script("load-dump"))
        return self.run_once(Once("database", argv, self.moving, writable=True, scratch=("/var/log",)))

    def run_once(self, once: Once) -> Command:
        """Return the command of a one-shot run of the image."""
        confinement = prepare_confinement(self.cluster, self.host)
        return Command(self.host, once_run(self.cluster.site, confinement, self.image.path, once))

    def place(self, path: str, *, copy: bool = False) -> str:
        return f"{ROOT}/.{path}"

    def stop(self) -> None:
        stop(self.cluster, self.host, keep_lease=True)
        ext3.check(self.host, self.overlay)

    def start(self) -> None:
        for admin in self.cluster.site.admin_hosts:  # they have all answered
            there = self.host if admin.name == self.host.name else self.cluster.host(admin.name)
            if there is not self.host and stop_gateway(self.cluster, there):
                self.cluster.env.progress.report(
                    f"note: what stayed on {admin.name} was stopped: {self.where} has the addresses"
                )
        started = start(self.cluster, self.host, StartOptions(judged=True))
        if started and (missing := started.missing(self.cluster.services)):
            raise SmsError(
                f"{self.where}: no answer from {', '.join(missing)}", hint="`sms status` probes every service"
            )

    def control(self, *argv: str) -> Result:
        return self.host.run(*inside_argv(self.cluster.site, self.cluster.services, *argv), ok=None, timeout=CONTROL_S)

    def prepare(self) -> None:
        self.discard()
        ready_overlay(self.cluster, self.host, self.image, filled=True)
        files.copy_sparse(self.host, self.overlay, self.moving, timeout=COPY_S)

    # The lease of the admin hosts covers its state.

    def lock(self, where: str, *, copy: bool = False) -> None:
        pass

    def check_locked(self) -> None:
        pass

    def release(self, generation: int) -> None:
        pass

    def generation(self) -> int:
        return 0

    def accept(self, generation: int, tree: Tree) -> None:
        """The overlay of before stays as a second name of its file until the copy has replaced the first one."""
        kept, number = f"{self.overlay}.before-{generation}", 0
        while self.host.works("test", "-e", kept):  # of an attempt that was killed
            number += 1
            kept = f"{self.overlay}.before-{generation}.{number}"
        self.host.run("ln", "--", self.overlay, kept)
        ext3.check(self.host, self.moving)
        files.place(self.host, self.moving, self.overlay)
        self.cluster.env.progress.report(f"note: the overlay of before is kept as {kept}")

    def discard(self) -> None:
        self.host.remove(self.moving)

    def close(self) -> None:
        pass  # each of them is a container of its own
