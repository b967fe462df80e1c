"""``sms overlay drill --vm``: restore the newest snapshot of the VM's state elsewhere beside production, and check it.

Nothing is mounted or started: the file system is read by e2fsck and debugfs, the inventory by SQLite. Of the running VM
only the inventory is read.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster, need_root
from appliance.operations.snapshots.list import Snapshot
from appliance.operations.snapshots.push import choose_targets
from appliance.operations.upgrade.drill import DrillOptions, DrillResult, check_borg, find_newest, make_fetch
from appliance.operations.upgrade.rehearse_checks import Checks, check_file_system
from appliance.operations.vm.vm import all_hosts, find_running
from appliance.plan.snapshots.offsite import BORG, archive_name
from appliance.plan.vm.vm import STATE, VmPlaces, need_vm
from appliance.tools.guest import open_guest
from appliance.tools.programs import find_missing
from appliance.tools.sha256 import is_digest
from appliance.tools.space import SPARE_BYTES, need_space

INVENTORY = "inventory.db"
SETTLED_S = 300
"""Seconds before the snapshot within which production may have changed something that it lacks: clocks differ."""
QUERY = """\
import json, sqlite3, sys
before = float(sys.argv[1])
db = sqlite3.connect("file:%s?mode=ro" % sys.argv[2], uri=True)
nodes = [one for (one,) in db.execute("SELECT id FROM components WHERE changed < ? ORDER BY id", (before,))]
masters = db.execute(
    "SELECT v.path, v.version, v.sha256, v.details FROM masters m JOIN master_versions v"
    " ON v.path = m.path AND v.version = m.version WHERE v.made < ? ORDER BY v.path", (before,))
print(json.dumps({"nodes": nodes, "masters": [list(one) for one in masters]}))
"""
"""Runs in the VM: what has not changed since a time, in Unix seconds."""


@dataclass
class Inventory:
    """Content of an inventory: nodes by id; master files' digest and details as JSON, by path and version."""

    nodes: set[str] = field(default_factory=set)
    versions: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    current: set[tuple[str, int]] = field(default_factory=set)


def drill_vm(cluster: Cluster, options: DrillOptions) -> DrillResult:
    """Restore a snapshot of the VM's state from elsewhere, and check it. Failed checks are part of the result.

    Args:
        cluster: ``of_vm``.

    Raises:
        Busy: another drill runs.
        ConfigError, Refused: it cannot be started; nothing was created.
    """
    here, targets = _prepare(cluster, options)
    with work_folder(cluster, here) as folder:
        done = DrillResult(here.name)
        tried = Checks(cluster.env.progress, cluster.env.clock, done.checks)
        if BORG in targets:
            check_borg(cluster, here, tried, done)
        found = find_newest(cluster, here, targets, options.snapshot, tried)
        if not found:
            return done
        one = found.snapshot
        done.source, done.snapshot, done.name = found.source, one["number"], archive_name(one)
        done.taken, done.age_s = one["taken"], round(cluster.env.clock.time() - one["taken"], 1)
        # Its chunks, the disk, and the files in it.
        need_space(here, str(folder), 3 * one["used_bytes"] + SPARE_BYTES, "MiB free, %d are needed", hint="")
        image = folder / "state.img"

        def fetch() -> str:
            store, number = make_fetch(cluster, here, found)(folder)
            request = {"store": store, "snapshot": str(number), "target": str(image)}
            restored = cluster.env.agents.call(here, "restore", request, cluster.env.progress)
            return f"{restored['bytes'] >> 20} MiB, every digest verified"

        restored = tried.try_out("it is fetched and restored", fetch, own_progress=True)
        if restored and tried.try_out("e2fsck of the copy", lambda: check_file_system(here, str(image))):
            _check_content(cluster, here, one, Copy(image, folder), tried, done)
    return done


def plan_drill_vm(cluster: Cluster, options: DrillOptions) -> list[str]:
    """Run all checks before a drill; return its steps.

    Raises:
        ConfigError, Refused: as ``drill_vm``.
        SmsError: no snapshot elsewhere can be found.
    """
    here, targets = _prepare(cluster, options)
    tried = Checks(cluster.env.progress, cluster.env.clock)
    found = find_newest(cluster, here, targets, options.snapshot, tried)
    if not found:
        raise SmsError("; ".join(check.seen for check in tried.done))
    return [
        *([f"borg check of {cluster.site.snapshots.borg.repository}"] if cluster.site.snapshots.borg else []),
        f"fetch snapshot {found.snapshot['number']} of the VM's state from {found.source}: "
        f"{found.snapshot['used_bytes'] >> 20} MiB",
        "restore it to a file, check its file system, the inventory and the master files; compare with production",
        "remove everything",
    ]


def _prepare(cluster: Cluster, options: DrillOptions) -> tuple[Host, list[str]]:
    need_root()
    here = cluster.env.hosts.this
    targets = choose_targets(cluster, here.name, [options.source] if options.source else [], option="--from")
    if missing := find_missing(here, "e2fsck", "debugfs", "python3"):
        raise Refused(f"{here.name} lacks {', '.join(missing)}", hint="apt-get install e2fsprogs python3")
    return here, targets


@contextmanager
def work_folder(cluster: Cluster, here: Host) -> Iterator[Path]:
    """Create the folder of the drill, readable by root only, and remove it at the end; also what a killed one left.

    Raises:
        Busy: another drill runs.
    """
    folder = Path(cluster.site.state) / "drills" / cluster.label
    with cluster.env.locks.hold(here, f"/run/sms/{cluster.label}.drill.lock", "another drill of the VM runs"):
        remove = ("rm", "-rf", "--one-file-system", "--", str(folder))
        here.run(*remove, timeout=300)
        here.run("mkdir", "-p", "-m", "0700", str(folder.parent), str(folder))
        try:
            yield folder
        finally:
            here.run(*remove, timeout=300)


def clean_up_vm(cluster: Cluster) -> list[str]:
    """Remove what a killed drill has left; return its name."""
    need_root()
    here = cluster.env.hosts.this
    left = (Path(cluster.site.state) / "drills" / cluster.label).exists()
    with work_folder(cluster, here):
        return [cluster.label] if left else []


@dataclass(frozen=True)
class Copy:
    """The restored disk, and a folder for files of it."""

    image: Path
    folder: Path

    def read(self, here: Host, paths: Mapping[str, str]) -> dict[str, int]:
        """Copy files of the disk into the folder; return the mode of each that exists, by its name there.

        Args:
            paths: path on the disk, by name. Both without spaces.
        """
        commands = []
        for name, path in paths.items():
            commands += [f"stat {path}", f"dump {path} {self.folder / name}"]
        script = self.folder / "debugfs.commands"
        script.write_text("".join(f"{line}\n" for line in commands))
        shown = here.run("debugfs", "-f", str(script), str(self.image), timeout=1800).stdout.decode(errors="replace")
        modes: dict[str, int] = {}
        for part in re.split(r"^debugfs: ", shown, flags=re.MULTILINE):
            said, _, rest = part.partition("\n")
            mode = re.search(r"Type: regular\s+Mode:\s+(\d+)", rest)
            if mode and said.startswith("stat "):
                modes |= {name: int(mode[1], 8) for name, path in paths.items() if said == f"stat {path}"}
        return modes


def _check_content(
    cluster: Cluster, here: Host, snapshot: Snapshot, copy: Copy, tried: Checks, done: DrillResult
) -> None:
    if need_vm(cluster.site).database:
        done.notes.append("the inventory is in a database elsewhere, which the site has to back up: it was not checked")
        return
    inventory = Inventory()
    if not tried.try_out("the inventory", lambda: _check_inventory(here, copy, inventory)):
        return
    tried.try_out("master files", lambda: _check_masters(here, copy, inventory))
    host = _find_running(cluster, here, done)
    if host:
        done.production = host.name
        tried.try_out("compared with production", lambda: _compare(cluster, host, snapshot["taken"], inventory))


def _check_inventory(here: Host, copy: Copy, inventory: Inventory) -> str:
    """Check the database, migrate it where this machine can, and read it into ``inventory``."""
    modes = copy.read(here, {name: f"/{name}" for name in (INVENTORY, f"{INVENTORY}-wal")})
    if INVENTORY not in modes:
        raise SmsError("there is no inventory in the copy")
    if modes[INVENTORY] & 0o007:
        raise SmsError(f"everybody can read the inventory: mode {modes[INVENTORY]:04o}")
    path = copy.folder / INVENTORY
    try:
        with closing(sqlite3.connect(path)) as db:
            if (seen := db.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
                raise SmsError(f"integrity_check: {seen}")
            if wrong := db.execute("PRAGMA foreign_key_check").fetchall():
                raise SmsError(f"foreign_key_check: {len(wrong)} rows refer to others that do not exist")
            before = db.execute("SELECT version FROM sms_schema").fetchone()[0]
        version = _migrate(path)
        with closing(sqlite3.connect(path)) as db:
            _read_inventory(db, inventory)
    except sqlite3.Error as error:
        raise SmsError(f"the inventory cannot be read: {error}") from error
    migrated = f"version {before}" + (f", migrated to {version}" if version else ", not migrated: no SQLAlchemy here")
    return f"integrity_check ok, {migrated}, {len(inventory.nodes)} components"


def _migrate(path: Path) -> int:
    """Migrate the copy as the VM's service does at its start; return its version, 0 where SQLAlchemy is missing."""
    try:
        from appliance.provision.store import Store
    except ImportError:
        return 0
    store = Store(f"sqlite:///{path}")
    store.close()
    return store.version


def _read_inventory(db: sqlite3.Connection, inventory: Inventory) -> None:
    inventory.nodes |= {one for (one,) in db.execute("SELECT id FROM components")}
    for path, version, sha256, details in db.execute("SELECT path, version, sha256, details FROM master_versions"):
        inventory.versions[path, version] = (sha256, details)
    inventory.current |= set(db.execute("SELECT path, version FROM masters"))


def _check_masters(here: Host, copy: Copy, inventory: Inventory) -> str:
    """Check that the content of every master file is there, unchanged and readable by its owner only."""
    secret = 0
    contents: dict[str, str] = {}
    for place in sorted(inventory.current):
        sha256, details = inventory.versions.get(place, ("", "{}"))
        if not is_digest(sha256):
            raise SmsError(f"{place[0]}: version {place[1]} is missing")
        contents[sha256] = place[0]
        secret += not int(json.loads(details)["mode"], 8) & 0o007
    modes = copy.read(here, {sha256: f"/files/{sha256[:2]}/{sha256}" for sha256 in contents})
    for sha256, path in contents.items():
        if sha256 not in modes:
            raise SmsError(f"the content of {path} is missing")
        if modes[sha256] & 0o077:
            raise SmsError(f"others can read the content of {path}: mode {modes[sha256]:04o}")
        with (copy.folder / sha256).open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != sha256:
                raise SmsError(f"the content of {path} has changed")
    return f"{len(inventory.current)}, {secret} of them secret: every digest and mode verified"


def _find_running(cluster: Cluster, here: Host, done: DrillResult) -> Host | None:
    """Return the host that runs the VM; None, with a note, if there is none."""
    silent = []
    names = [admin.name for admin in cluster.site.admin_hosts]
    first = here if here.name not in names else cluster.host(here.name)
    for host in [one for one in all_hosts(cluster, first) if one.name in names]:
        try:
            if find_running(cluster, host):
                return host
        except SmsError:
            silent.append(host.name)
    why = f"; {', '.join(silent)} cannot be reached" if silent else ""
    done.notes.append(f"it was not compared with production: the VM does not run{why}")
    return None


def _compare(cluster: Cluster, host: Host, taken: float, inventory: Inventory) -> str:
    """Compare with what the running VM has had since before the snapshot."""
    with open_guest(host, str(VmPlaces(cluster.site).guest)) as guest:
        argv = ("/usr/bin/python3", "-c", QUERY, str(taken - SETTLED_S), f"{STATE}/{INVENTORY}")
        ran = guest.run(argv, timeout_s=120)
    if ran.status or ran.cut:
        raise SmsError(f"the VM's inventory cannot be read: {ran.stderr.decode(errors='replace').strip()[-300:]}")
    nodes, masters = read_production(ran.stdout)
    if lost := sorted(nodes - inventory.nodes):
        raise SmsError(f"the copy lacks {len(lost)} components of production: {', '.join(lost[:5])}")
    wrong = [path for (path, version), there in masters.items() if inventory.versions.get((path, version)) != there]
    if wrong:
        raise SmsError(f"{len(wrong)} master files differ from those of production: {', '.join(wrong[:5])}")
    return f"on {host.name}: {len(nodes)} components and {len(masters)} master files from before it are in the copy"


def read_production(output: bytes) -> tuple[set[str], dict[tuple[str, int], tuple[str, str]]]:
    """Parse the output of QUERY.

    Raises:
        SmsError: it is invalid.
    """
    try:
        found: Any = json.loads(output)
        nodes = set(found["nodes"])
        masters = {(str(path), int(version)): (str(sha), str(text)) for path, version, sha, text in found["masters"]}
        if not all(isinstance(one, str) for one in nodes):
            raise ValueError("a component is not a text")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SmsError("the VM's inventory cannot be read: invalid reply") from error
    return nodes, masters
