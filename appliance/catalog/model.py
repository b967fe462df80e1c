"""One service, described once: what ``definitions/services/<name>.yaml`` holds.

Strings of ``run``, ``setup``, ``probe`` and ``files`` are Jinja2 templates over ``site`` and
``service``; the plan renders them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from appliance.catalog.traffic import OnePort, Section, Traffic

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,30}$")]
AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f]*$")]
Mode = Annotated[str, StringConstraints(pattern=r"^0[0-7]{3,4}$")]
AccountName = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]
Role = Literal["controller", "accounting", "logging", "clock", "mail", "routing", "files"]
PackageSet = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")]


class Probe(Section):
    """How to ask the service, in its own protocol, whether it serves. Exactly one way."""

    exec: tuple[tuple[str, ...], ...] | None = Field(
        None, description="A pipeline of commands; every one must end with status 0."
    )
    expect: str | None = Field(None, description="A regular expression that the output of `exec` must hold.")
    ntp: str | None = Field(None, description="Address asked for the time (RFC 5905, client mode).")
    smtp: str | None = Field(None, description="Address whose port 25 must greet with 220 (RFC 5321).")
    syslog: str | None = Field(None, description="Address that a line is sent to (UDP 514); it must come up in `file`.")
    http: str | None = Field(
        None, description="http+unix:/path or http://address:port/path that must answer below 500."
    )
    fresh: AbsolutePath | None = Field(None, description="A JSON file {state, detail, until}: fine until that time.")
    file: AbsolutePath | None = Field(None, description="Where `syslog` looks.")
    timeout_s: float = Field(5, gt=0, le=60, description="Seconds until no answer is a failure.")
    outside: bool = Field(False, description="Whether it takes a machine beyond the container to answer it.")

    @model_validator(mode="after")
    def _one_way(self) -> Probe:
        ways = [self.exec, self.ntp, self.smtp, self.syslog, self.http, self.fresh]
        if sum(way is not None for way in ways) != 1:
            raise ValueError("give exactly one of exec, ntp, smtp, syslog, http, fresh")
        if (self.syslog is None) != (self.file is None):
            raise ValueError("syslog and file go together")
        return self


class SeedFile(Section):
    """A file of a fresh overlay."""

    path: AbsolutePath = Field(description="Where it lies in the container.")
    template: str | None = Field(None, description="A template below overlays/.")
    content: str | None = Field(None, description="The template itself, where it is short.")
    owner: str = "root"
    group: str = "root"
    mode: Mode = "0644"

    @model_validator(mode="after")
    def _one_source(self) -> SeedFile:
        if (self.template is None) == (self.content is None):
            raise ValueError("give either template or content")
        return self


class Outage(Section):
    """How long compute nodes live without the service."""

    seconds: float = Field(ge=0, description="Seconds until nodes notice.")
    why: str = Field(description="What happens then, and where that is written.")
    pause_s: float | None = Field(
        None, ge=0, description="Seconds that a planned move may take it away for; `seconds` when not given."
    )

    @property
    def budget_s(self) -> float:
        """Seconds that a planned move may take it away for."""
        return self.seconds if self.pause_s is None else self.pause_s


class Accounts(Section):
    """System users and groups whose ids must be the same in every image: an overlay outlives its image.

    Packages number their users as they come; the ids here, below 1000 and above what a package
    would take, are given out before any package is installed.
    """

    users: dict[AccountName, int] = Field({}, description="User, and group of the same name and id.")
    groups: dict[AccountName, int] = Field({}, description="Group alone.")


class Service(Section):
    """A service of the management node."""

    name: Name
    known_as: tuple[str, ...] = Field((), description="Other names of it: its daemons', or those of IANA's registry.")
    summary: str = Field(description="What it is for, in one line.")
    role: Role | None = Field(None, description="Its part in the cluster, by which other parts of sms find it.")
    critical: bool = Field(description="Whether compute nodes need it at every moment.")
    container: bool = Field(True, description="Whether the services container can carry it.")
    default: bool = Field(False, description="Whether a starter site file has it.")
    packages: dict[PackageSet, tuple[str, ...]] = Field({}, description="Packages by package set of the base.")
    accounts: dict[PackageSet, Accounts] = Field({}, description="Accounts by package set of the base.")
    run: tuple[str, ...] = Field((), description="The foreground command.")
    user: str = Field("root", description="Who runs it.")
    setup: str = Field("", description="Shell, run as root before every start; must be idempotent.")
    needs: tuple[Name, ...] = Field((), description="Services whose probe must pass before this one starts.")
    after: tuple[Name, ...] = Field((), description="Services waited for only where the site has them.")
    ports: tuple[OnePort, ...] = Field((), description="Where it listens.")
    traffic: Traffic = Field(Traffic(), description="How it shows on the wire besides its ports.")
    state: tuple[AbsolutePath, ...] = Field((), description="What it writes and must keep.")
    running: AbsolutePath | None = Field(
        None,
        description="A file below `state` that is there while it runs, and stays where it did not end with status 0: "
        "`setup` finds SMS_UNCLEAN set then.",
    )
    state_heads: dict[AbsolutePath, str] = Field(
        {}, description="State files, and the text that each has near its beginning when it is whole."
    )
    dump: str = Field(
        "",
        description="Shell, run as root in the container before a snapshot; puts a dump of its data below `state`, "
        "whole or not at all, mode 0600.",
    )
    dump_wait_s: int = Field(300, ge=1, le=3600, description="Seconds that a dump may take.")
    live: bool = Field(
        False, description="Whether it serves on while the overlay is carried off: it keeps nothing there but `tails`."
    )
    tails: tuple[AbsolutePath, ...] = Field(
        (), description="Files below /var/log that it only appends to; a move brings their last lines after it."
    )
    sync: tuple[AbsolutePath, ...] = Field((), description="Files it takes from the provisioning node.")
    files: tuple[SeedFile, ...] = Field((), description="Files of a fresh overlay.")
    probe: Probe | None = None
    outage: Outage
    advice: str = Field("", description="What to do where nodes need it and the container cannot carry it.")
    stop_signal: Literal["TERM", "INT", "QUIT"] = "TERM"
    stop_wait_s: int = Field(30, ge=1, le=600, description="Seconds it may take to end.")

    @model_validator(mode="after")
    def _runnable(self) -> Service:
        if self.container and not (self.run and self.probe):
            raise ValueError("a service that the container carries needs run and probe")
        return self
