"""Master files of the provisioning VM: those that the site file defines, and how they differ from the VM's."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from appliance.catalog import Service
from appliance.config.model import Site
from appliance.config.slurm_files import CONFIGLESS, CONTROLLER, FOLDER, files_for_nodes
from appliance.plan.nodes.accounts import GROUP, PASSWD, SHADOW
from appliance.plan.overlay.seed import SECRET_PLACES, Seed, slurm_mode

CONF = "/etc/slurm/slurm.conf"
ACCOUNTS = {"passwd": PASSWD, "group": GROUP, "shadow": SHADOW}
MUNGE_KEY, MUNGE_USER, _ = SECRET_PLACES["munge_key"]
JUDGED = frozenset({CONF, MUNGE_KEY, *(f"{FOLDER}/{name}" for name in CONFIGLESS | CONTROLLER)})
"""Files of slurmctld by which jobs or nodes can be lost: ``sms apply`` judges their changes."""
FORBIDDEN = (
    *("/proc", "/sys", "/dev", "/run", "/var/run", "/etc/sms", "/opt/sms"),
    *("/var/lib/sms/filesync", "/var/lib/sms/filesync.json"),
)
"""Paths at or below which nodes accept no file; ``smskept.py`` on the node has the same list."""

What = Literal["add", "change", "remove", "same", "held"]


@dataclass(frozen=True)
class Master:
    """Desired state of a master file; ``data`` may be secret and is not in its repr."""

    path: str
    data: bytes = field(repr=False)
    mode: str = "0644"
    owner: str = "root"
    group: str = "root"
    template: bool = False
    nodes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    services: bool = False
    origin: str = "site"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def secret(self) -> bool:
        """Whether only its owner and group may read it."""
        return not int(self.mode, 8) & 0o004

    def as_body(self) -> dict[str, object]:
        """Return the request body for the VM; the content is uploaded separately."""
        sent = {key: value for key, value in vars(self).items() if key not in ("path", "data")}
        return {"sha256": self.sha256, **sent, "nodes": sorted(set(self.nodes)), "groups": sorted(set(self.groups))}


@dataclass(frozen=True)
class Difference:
    """What a push does with one path, and why."""

    what: What
    path: str
    why: str = ""
    master: Master | None = None

    def as_dict(self) -> dict[str, str]:
        return {"what": self.what, "path": self.path, "why": self.why}


def account_master(path: str, data: bytes, *, origin: str = "site") -> Master:
    """Return the master of an account file; clients merge it with the accounts of their image."""
    if path == ACCOUNTS["shadow"]:
        return Master(path, data, "0640", "root", "shadow", services=True, origin=origin)
    return Master(path, data, services=True, origin=origin)


def desired_masters(site: Site, given: Mapping[str, bytes], seeds: Sequence[Seed]) -> tuple[Master, ...]:
    """Return all master files that the site defines, sorted by path.

    Args:
        given: contents of passwd, group, shadow and munge_key if the site has them, and of ``provisioning.files`` and
            ``slurm.files`` by path.
        seeds: the container's files; slurm.conf comes from these.
    """
    assert site.provisioning
    masters = {path: account_master(path, given[name]) for name, path in ACCOUNTS.items() if name in given}
    if "munge_key" in given:
        masters[MUNGE_KEY] = Master(MUNGE_KEY, given["munge_key"], "0400", MUNGE_USER, MUNGE_USER)
    for seed in seeds:
        if seed.path == CONF:
            masters[CONF] = Master(CONF, seed.data, services=True)
    for path in _slurm_files(site):
        masters[path] = Master(path, given[path], f"0{slurm_mode(given[path]):o}")
    for file in site.provisioning.files:  # explicit files override implicit ones
        masters[file.path] = Master(
            file.path,
            given[file.path],
            f"0{file.mode[-3:]}",
            file.owner,
            file.group,
            template=file.template,
            nodes=file.nodes,
            groups=file.groups,
            services=file.services,
        )
    return tuple(masters[path] for path in sorted(masters))


def _slurm_files(site: Site) -> list[str]:
    """Return the paths of the site's ``slurm.files`` that nodes do not fetch from the controller."""
    return [f"{FOLDER}/{name}" for name in files_for_nodes(site.slurm.files)]


def last_pulled(path: str) -> str:
    """Return where the container keeps its last version of a file from the VM (``definitions/runtime/smskept.py``)."""
    return f"/var/lib/sms/filesync/{hashlib.sha256(path.encode()).hexdigest()}"


def forbidden_at(path: str) -> str:
    """Return the forbidden path that this one is at or below; empty if nodes accept it."""
    clean = posixpath.normpath(path)
    return next((each for each in FORBIDDEN if clean == each or clean.startswith(f"{each}/")), "")


def named_paths(site: Site, services: Sequence[Service]) -> frozenset[str]:
    """Return the paths that ``sms files push`` uploads."""
    accounts = {"passwd": site.accounts.passwd, "group": site.accounts.group, "shadow": site.secrets.shadow}
    paths = {ACCOUNTS[name] for name, source in accounts.items() if source}
    paths |= {MUNGE_KEY} if site.secrets.munge_key else set()
    paths |= {CONF for service in services for file in service.files if file.path == CONF}
    paths |= set(_slurm_files(site))
    paths |= {file.path for file in site.provisioning.files} if site.provisioning else set()
    return frozenset(paths)


def unknown_names(master: Master, inventory: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the nodes and groups (``@name``) of a file that are not in the inventory."""
    nodes = {str(node.get("name")) for node in inventory}
    groups = {str(group) for node in inventory for group in node.get("groups") or ()}
    missing = [name for name in master.nodes if name not in nodes]
    return (*missing, *(f"@{group}" for group in master.groups if group not in groups))


def compare_masters(
    desired: Sequence[Master], there: Sequence[Mapping[str, Any]], *, accounts: bool = False
) -> tuple[Difference, ...]:
    """Compare the desired master files with those in the VM; files that do not come from the site file are kept.

    Args:
        accounts: also replace account files that `sms user sync` wrote.
    """
    now = {each["path"]: each for each in there}
    found = []
    for master in desired:
        old = now.get(master.path)
        if old is None:
            found.append(Difference("add", master.path, f"{len(master.data)} bytes", master))
        elif old.get("origin") == "users" and not accounts:
            found.append(Difference("held", master.path, "comes from `sms user sync`; --accounts replaces it"))
        elif why := _differs(master, old):
            found.append(Difference("change", master.path, why, master))
        else:
            found.append(Difference("same", master.path))
    names = {master.path for master in desired}
    found += [
        Difference("remove", path, "no longer in the site file")
        for path, old in now.items()
        if path not in names and old.get("origin") == "site"
    ]
    return tuple(sorted(found, key=lambda one: one.path))


def _differs(master: Master, old: Mapping[str, Any]) -> str:
    differing = (key for key, value in master.as_body().items() if value != old.get(key))
    return ", ".join("content" if key == "sha256" else key for key in differing)
