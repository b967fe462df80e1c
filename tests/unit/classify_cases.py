"""Hand-made observations for the tests of the verdicts: signatures, hosts, rows, captures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.classify import classify
from analysis.model import Classification, Service, Sms, Verdict
from analysis.observed import Boot, Host, Link, Observation, Role, Row, Sample
from analysis.roles import Roles
from analysis.signatures import TCP, UDP, FirstBytes, Signature

NODE, SMS, OUTSIDE, GROUP, UNKNOWN = Role.NODE, Role.SMS, Role.OUTSIDE, Role.GROUP, Role.UNKNOWN
S = 1_000_000_000
START = 1_700_000_000 * S
SMS_MAC, PUBLIC_MAC, GATEWAY_MAC = "52:54:00:00:00:01", "52:54:00:00:00:02", "52:54:00:ff:00:01"


def starts(port: int, text: bytes) -> FirstBytes:
    return FirstBytes(TCP, port, 0, text, text)


SIGNATURES = (
    Signature(
        "nfs", "files", ((TCP, 2049),), critical=True, every_s=3600, budget_s=60, budget_why="caches", advice="copy"
    ),
    Signature("rsyslog", "logs", ((UDP, 514), (TCP, 514)), critical=True, every_s=600, budget_s=0, carried=True),
    Signature(
        "chrony", "time", ((UDP, 123),), critical=True, every_s=1024, budget_s=1024, budget_why="poll", carried=True
    ),
    Signature(
        "slurmctld",
        "jobs",
        ((TCP, 6817), (TCP, 6818)),
        (FirstBytes(TCP, 0, 0, b"\0\0\0\x10\x1a\0", b"\0\xff\xff\xff\x3f\0"),),
        critical=True,
        sms_opens=True,
        every_s=300,
        budget_s=300,
        budget_why="SlurmdTimeout",
        carried=True,
    ),
    Signature("nat", "routes", routed=True, critical=True, every_s=3600, budget_s=0, carried=True),
    Signature(
        "ganglia",
        "measures",
        ((UDP, 8649), (TCP, 8649)),
        critical=True,
        sms_opens=True,
        every_s=20,
        budget_s=80,
        advice="syslog",
    ),
    Signature("postfix", "mail", ((TCP, 25),), critical=True, every_s=7200, budget_s=432000, carried=True),
    Signature("warewulf", "files", (), (starts(80, b"GET /WW/file"),), poll=True, every_s=300, budget_s=86400),
    Signature(
        "provisioning",
        "boots",
        ((UDP, 67), (UDP, 68), (UDP, 69)),
        (starts(80, b"GET /WW/vnfs"),),
        boot=True,
        every_s=2592000,
        budget_s=2592000,
        budget_why="boot",
    ),
    Signature("ssh", "logins", ((TCP, 22),), sms_opens=True, every_s=86400, budget_s=86400),
    Signature("munge", silent=True, critical=True),
)
KINDS = {"slurmctld": 1, "warewulf": 2, "provisioning": 3}
"""1 + index among all first bytes, in the order of the signatures."""


def make_row(client: Role, server: Role, protocol: int, port: int, **known: Any) -> Row:
    """A row of a service in use: 8 clients and an hour by default.

    ``every`` sets regular intervals and matching contacts.
    """
    every, opened = known.pop("every", 0.0), known.get("opened", 0)
    if every:
        known.setdefault("intervals", ((every, 40.0), (every * 1.02, 40.0)))
    known.setdefault("contacts_steady", 0 if known.get("contacts_boot") else opened)
    known.setdefault("client_hosts", 8 if client == NODE else 1)
    known.setdefault("server_hosts", 8 if server == NODE else 1)
    known.setdefault("client_indexes", tuple(range(1, 1 + known["client_hosts"])) if client == NODE else (0,))
    count = max(opened, known.get("midstream", 0), 1)
    known.setdefault("packets", (5 * count, 4 * count))
    known.setdefault("bytes", (500 * count, 900 * count))
    kind = known.pop("kind", 0)
    return Row(protocol, port, kind, client, server, **{"first_ns": START, "last_ns": START + 3600 * S, **known})


def make_hosts(nodes: int = 8) -> tuple[Host, ...]:
    """The management node, nodes, an outside address (index nodes + 1), broadcast (nodes + 2), 0.0.0.0 (nodes + 3)."""
    hosts = [Host(0, "10.1.0.1", (SMS_MAC,), SMS_MAC, SMS_MAC, 1000, 1000)]
    for n in range(nodes):
        mac = f"52:54:00:01:{n >> 8:02x}:{n & 255:02x}"
        hosts.append(Host(n + 1, f"10.1.{1 + n // 250}.{1 + n % 250}", (mac,), mac, mac, 100, 100))
    hosts.append(Host(nodes + 1, "198.51.100.10", (SMS_MAC,), SMS_MAC, "", 50, 50))
    hosts.append(Host(nodes + 2, "255.255.255.255", (), "ff:ff:ff:ff:ff:ff", "", 0, 4))
    hosts.append(Host(nodes + 3, "0.0.0.0", ("52:54:00:01:00:00",), "", "", 4, 0))
    return tuple(hosts)


def roles_of(nodes: int = 8) -> bytes:
    return bytes([SMS, *[NODE] * nodes, OUTSIDE, GROUP, NODE])


def observe(
    rows: Sequence[Row],
    *,
    nodes: int = 8,
    duration_s: float = 3600,
    boots: Sequence[Boot] = (),
    samples: Sequence[Sample] = (),
    links: Sequence[Link] = (),
    **known: Any,
) -> Observation:
    """An observation; by default its totals are those of its rows."""
    other, beyond = known.get("other", {}), known.get("beyond", (0, 0))
    totals = [
        sum(sum(getattr(row, what)) for row in rows) + sum(one[side] for one in other.values()) + beyond[side]
        for side, what in enumerate(("packets", "bytes"))
    ]
    return Observation(
        ("x.pcap",),
        known.pop("total", totals[0]),
        totals[1],
        START,
        START + int(duration_s * S),
        False,
        make_hosts(nodes),
        tuple(rows),
        links,
        tuple(samples),
        tuple(boots),
        **known,
    )


def run(
    rows: Sequence[Row],
    *,
    signatures: Sequence[Signature] = SIGNATURES,
    nodes: int = 8,
    overrides: Mapping[str, Verdict] | None = None,
    **known: Any,
) -> Classification:
    """The classification of rows."""
    observation = observe(rows, nodes=nodes, **known)
    return classify(observation, Roles(Sms(SMS_MAC, ("10.1.0.1",), "given"), roles_of(nodes)), signatures, overrides)


def service(found: Classification, name: str) -> Service:
    return next(one for one in found.services if one.name == name)


def boot(node: int = 0, *, at: float = 10, settled: float = 130) -> Boot:
    """A boot that began ``at`` seconds into the capture; ``settled`` 0: not before the end."""
    mac = f"52:54:00:01:{node >> 8:02x}:{node & 255:02x}"
    return Boot(mac, START + int(at * S), START + int(settled * S) if settled else 0)


def paper() -> list[Row]:
    """Section 4 of "Decoupled management nodes" (2018): eight kinds of traffic and provisioning, an hour."""
    return [
        make_row(NODE, SMS, TCP, 80, kind=KINDS["warewulf"], opened=96, every=300),
        make_row(NODE, SMS, UDP, 514, opened=8, contacts_steady=640, packets=(700, 0), bytes=(90000, 0), every=45),
        make_row(NODE, SMS, TCP, 2049, opened=1, midstream=7, contacts_steady=900, every=60),
        make_row(NODE, OUTSIDE, TCP, 443, opened=72, server_hosts=3),
        make_row(
            NODE, GROUP, UDP, 8649, opened=8, contacts_steady=1440, every=20, packets=(2900, 0), bytes=(300000, 0)
        ),
        make_row(NODE, SMS, TCP, 6817, opened=40, contacts_boot=1, contacts_steady=39),
        make_row(SMS, NODE, TCP, 6818, opened=320, every=100),
        make_row(NODE, SMS, TCP, 0, kind=KINDS["slurmctld"], opened=60),
        make_row(NODE, SMS, TCP, 25, opened=16),
        make_row(NODE, SMS, UDP, 123, opened=70, every=256),
        make_row(NODE, GROUP, UDP, 67, opened=4, contacts_boot=4, client_hosts=1, client_indexes=(11,)),
        make_row(GROUP, SMS, UDP, 67, packets=(0, 4), bytes=(0, 1400), client_hosts=1),
        make_row(NODE, SMS, UDP, 69, opened=1, contacts_boot=1, client_hosts=1),
        make_row(NODE, SMS, TCP, 80, kind=KINDS["provisioning"], opened=2, contacts_boot=2, client_hosts=1),
        make_row(SMS, NODE, TCP, 22, opened=27),
    ]


OWN = """\
name: licences
summary: licences of our solver
ports: [tcp/1947]
outage: {seconds: 600, why: the solver asks every ten minutes}
"""
"""A service of a site's own."""


def own(folder: Path, **texts: str) -> Path:
    """Make a folder of the site's own services: name and text of each."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder
