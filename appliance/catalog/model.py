"""Definition of a service: ``definitions/services/<name>.yaml``.

Strings of ``run``, ``setup``, ``probe`` and ``files`` are Jinja2 templates with ``site`` and
``service``, rendered by the plan.
"""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from appliance.catalog.traffic import OnePort, Section, Traffic

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,30}$")]


def _clean(path: str) -> str:
    if path != posixpath.normpath(path) or path.startswith("//"):
        raise ValueError(f"{path} is not a plain path: write {posixpath.normpath(path).replace('//', '/')}")
    return path


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiled)]
AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]*$"), AfterValidator(_clean)]
Package = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9+._-]{0,99}$")]
Mode = Annotated[str, StringConstraints(pattern=r"^0[0-7]{3,4}$")]
AccountName = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]
Id = Annotated[int, Field(gt=0, lt=65534)]
Argv = Annotated[tuple[str, ...], Field(min_length=1)]
Role = Literal["controller", "accounting", "logging", "clock", "mail", "routing", "files"]
PackageSet = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")]
Capability = Literal[
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "KILL",
    "NET_ADMIN",
    "NET_BIND_SERVICE",
    "NET_RAW",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
]
"""Capabilities (capabilities(7)) that a service may have. None of them reaches beyond the container's namespaces and
files, except that AUDIT_WRITE adds records to the host's audit log."""
SecretName = Literal["jwt_key", "munge_key", "ssh_host_key", "sssd_conf"]
"""Secret files of the site file that services read."""
Sysctl = Annotated[str, StringConstraints(pattern=r"^net\.[a-z0-9_.]+$")]


class Probe(Section):
    """Readiness probe of a service, in its own protocol. Exactly one kind."""

    exec: tuple[Argv, ...] | None = Field(
        None, min_length=1, description="A pipeline of commands; each must exit with status 0."
    )
    expect: Pattern | None = Field(None, description="Regular expression that must match the output of `exec`.")
    ntp: str | None = Field(None, description="Address queried for the time (RFC 5905, client mode).")
    smtp: str | None = Field(None, description="Address whose port 25 must greet with 220 (RFC 5321).")
    syslog: str | None = Field(None, description="Address that a line is sent to (UDP 514); it must appear in `file`.")
    routed: str | None = Field(
        None, description="Address that must answer a ping sent from behind the container, where nodes are."
    )
    http: str | None = Field(None, description="http+unix:/path or http://address:port/path; see `status`.")
    fresh: AbsolutePath | None = Field(None, description="JSON file {state, detail, until}: healthy until that time.")
    file: AbsolutePath | None = Field(None, description="Log file that `syslog` checks.")
    status: int | None = Field(
        None, ge=100, le=599, description="Status that `http` must answer with (default: 2xx or 3xx)."
    )
    timeout_s: float = Field(5, gt=0, le=60, description="Timeout in seconds.")
    outside: bool = Field(False, description="Whether the reply comes from a machine outside the container.")

    @model_validator(mode="after")
    def _one_way(self) -> Probe:
        ways = [self.exec, self.ntp, self.smtp, self.syslog, self.routed, self.http, self.fresh]
        if sum(way is not None for way in ways) != 1:
            raise ValueError("give exactly one of exec, ntp, smtp, syslog, routed, http, fresh")
        if (self.syslog is None) != (self.file is None):
            raise ValueError("syslog and file go together")
        if self.status and not self.http:
            raise ValueError("status is that of http")
        return self


class SeedFile(Section):
    """A file of a fresh overlay."""

    path: AbsolutePath = Field(description="Path in the container.")
    template: str | None = Field(None, description="A template below overlays/.")
    content: str | None = Field(None, description="The template itself, if it is short.")
    owner: AccountName = "root"
    group: AccountName = "root"
    mode: Mode = "0644"
    change: Literal["none", "reload", "restart"] = Field(
        "restart", description="What a changed file needs: nothing, the service's `reload`, or its restart."
    )
    reloaded: Pattern = Field(
        "", description="Regular expression: a reload applies changed lines that match; others need a restart."
    )
    check: tuple[str, ...] = Field(
        (), description="Command of the container that fails if the file is invalid; `{file}` in it is its path."
    )

    @model_validator(mode="after")
    def _one_source(self) -> SeedFile:
        if (self.template is None) == (self.content is None):
            raise ValueError("give either template or content")
        if self.reloaded and self.change != "reload":
            raise ValueError("reloaded needs change: reload")
        return self


class SiteFiles(Section):
    """A folder for files of the site, those of ``slurm.files``."""

    path: AbsolutePath = Field(description="The folder.")
    reloaded: Pattern = Field(
        description="Regular expression: names of files that a reload applies; others need a restart."
    )


class Outage(Section):
    """Tolerated outage of the service."""

    seconds: float = Field(ge=0, description="Outage that compute nodes tolerate, in seconds.")
    why: str = Field(description="What happens after that, with the source.")
    pause_s: float | None = Field(
        None, ge=0, description="Outage budget of a planned migration, in seconds (default: `seconds`)."
    )

    @property
    def budget_s(self) -> float:
        """Outage budget of a planned migration, in seconds."""
        return self.seconds if self.pause_s is None else self.pause_s


class Accounts(Section):
    """System users and groups whose ids must be the same in every image: an overlay outlives its image.

    Packages allocate ids in the order of installation. The ids here are below 1000, above those that
    packages allocate, and are created before any package is installed.
    """

    users: dict[AccountName, Id] = Field({}, description="Users, each with a group of the same name and id.")
    groups: dict[AccountName, Id] = Field({}, description="Groups without a user.")


class Engines(Section):
    """How other engines than the services container run it: Kubernetes, Nomad, Podman."""

    place: Literal["one", "gateway", "none"] = Field(
        "one",
        description="one: once in the cluster. gateway: it stays in the services container on an admin host. "
        "none: the engine has its own way.",
    )
    why: str = Field("", description="Why it is not `one`.")
    reads: tuple[Name, ...] = Field((), description="Services whose files it reads, too.")
    settings: dict[AbsolutePath, Pattern] = Field(
        {}, description="Of their files only these, and of each the lines that match: others may change beside it."
    )
    lease: AbsolutePath | None = Field(
        None,
        description="Folder of `state` that two at once would destroy: a task starts with it only as its one writer.",
    )
    outlived: bool = Field(
        False, description="Whether what it has started runs on when it stops, on the node itself: jobs of slurmd."
    )
    scratch: tuple[AbsolutePath, ...] = Field(
        (), description="Folders that it writes to and that may be lost; those of `state` may be among them."
    )
    memory_mb: int = Field(128, ge=16, description="Memory that it is given, in MiB.")
    starts_long: bool = Field(
        False, description="Whether a start may take hours, as it recovers or converts its data: no deadline ends it."
    )
    run: tuple[str, ...] = Field((), description="Its command there, if it is another one.")
    ports: tuple[OnePort, ...] = Field((), description="Its ports there, if it has others.")
    probe: Probe | None = Field(None, description="Its readiness probe there, if it is another one.")
    needs_secrets: tuple[SecretName, ...] = Field((), description="Secret files without which it does not run there.")
    users: bool = Field(False, description="Whether its ports are for users outside of the nodes' networks, too.")

    @model_validator(mode="after")
    def _reasoned(self) -> Engines:
        if (self.place == "one") != (not self.why):
            raise ValueError("give `why` for every place but one")
        return self


class Service(Section):
    """A service of the management node."""

    name: Name
    known_as: tuple[str, ...] = Field((), description="Other names: of its daemons, or in IANA's registry.")
    summary: str = Field(description="Its purpose, in one line.")
    role: Role | None = Field(None, description="Its role in the cluster, by which other parts of sms find it.")
    critical: bool = Field(description="Whether compute nodes need it at all times.")
    container: bool = Field(True, description="Whether the services container can run it.")
    default: bool = Field(False, description="Whether it is enabled by default.")
    packages: dict[PackageSet, tuple[Package, ...]] = Field({}, description="Packages by package set of the base.")
    accounts: dict[PackageSet, Accounts] = Field({}, description="Accounts by package set of the base.")
    run: tuple[str, ...] = Field((), description="The foreground command.")
    user: AccountName = Field("root", description="User that runs it.")
    groups: tuple[AccountName, ...] = Field((), description="Further groups of its user, of those that the image has.")
    capabilities: dict[Capability, str] = Field(
        {}, description="Capabilities that it has, as any user, each with what needs it. No others can be gained."
    )
    sysctl: dict[Sysctl, str] = Field(
        {}, description="Kernel parameters of the container's network; the host sets them before the container starts."
    )
    setup: str = Field("", description="Shell, run as root before every start; must be idempotent.")
    needs: tuple[Name, ...] = Field((), description="Services whose probe must succeed before this one starts.")
    after: tuple[Name, ...] = Field((), description="Services to wait for, half a minute, if the site has them.")
    ports: tuple[OnePort, ...] = Field((), description="Ports that it listens on.")
    resets: tuple[OnePort, ...] = Field(
        (),
        description="Of its TCP ports, those whose clients repeat what was not acknowledged: sessions may be reset.",
    )
    traffic: Traffic = Field(Traffic(), description="How its traffic is recognised besides its ports.")
    state: tuple[AbsolutePath, ...] = Field((), description="Persistent state paths.")
    running: AbsolutePath | None = Field(
        None,
        description="A file below `state` that exists while it runs, and remains if it did not exit with status 0: "
        "`setup` then runs with SMS_UNCLEAN set.",
    )
    saves: AbsolutePath | None = Field(
        None, description="File of `state` that it writes when it stops: if it could not, the stop was not in order."
    )
    unclean: str = Field(
        "", description="Shell, run before its next start then, after `setup`, as root or its user; must be idempotent."
    )
    state_heads: dict[AbsolutePath, str] = Field(
        {}, description="State files, with the text near the beginning of each intact one."
    )
    dump: str = Field(
        "",
        description="Shell, run as root in the container before a snapshot; writes a dump of its data below `state` "
        "atomically, mode 0600.",
    )
    dump_wait_s: int = Field(300, ge=1, le=3600, description="Timeout of a dump, in seconds.")
    live: bool = Field(
        False,
        description="Whether it keeps running while the overlay is copied: all it writes there is `tails`.",
    )
    tails: tuple[AbsolutePath, ...] = Field(
        (), description="Append-only files below /var/log, whose last lines are copied at the end of a migration."
    )
    secrets: tuple[SecretName, ...] = Field((), description="Secret files that it reads, of those that the site has.")
    needs_secrets: tuple[SecretName, ...] = Field((), description="Secret files without which it cannot run.")
    sync: tuple[AbsolutePath, ...] = Field(
        (), description="Files pulled from the provisioning node; not below /etc/slurm."
    )
    files: tuple[SeedFile, ...] = Field((), description="Files of a fresh overlay.")
    site_files: SiteFiles | None = Field(None, description="A folder for files of the site.")
    reload: tuple[Argv, ...] = Field(
        (), description="Commands by which the running service reads its files again; also run after a restart."
    )
    probe: Probe | None = None
    outage: Outage
    engines: Engines = Field(Engines(), description="How other engines run it.")
    advice: str = Field("", description="What to do if nodes need it and the container cannot run it.")
    stop_signal: Literal["TERM", "INT", "QUIT"] = "TERM"
    stop_wait_s: int = Field(30, ge=1, le=600, description="Timeout of its shutdown, in seconds.")
    restart_s: float | None = Field(
        None,
        gt=0,
        le=600,
        description="Predicted outage of a restart, in seconds, until a host has measured one (default: stop_wait_s).",
    )

    @model_validator(mode="after")
    def _runnable(self) -> Service:
        if self.container and not (self.run and self.probe):
            raise ValueError("a service that the container runs needs run and probe")
        # It is a word of a shell command of the image's test.
        if self.run and not re.fullmatch(r"[A-Za-z0-9_./+-]+", self.run[0]):
            raise ValueError(f"{self.run[0]} is not the name of a program")
        if (self.unclean or self.saves) and not self.running:
            raise ValueError("unclean and saves need running")
        if self.engines.lease and self.engines.lease not in self.state:
            raise ValueError("engines.lease is not one of state")
        if any(file.change == "reload" for file in self.files) and not self.reload:
            raise ValueError("change: reload needs reload")
        return self
