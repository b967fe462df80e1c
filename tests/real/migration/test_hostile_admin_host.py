"""A hostile admin host: what root there can answer when another admin host runs a verb that asks it.

Root of one admin host is root of the other by its key (docs/security.md); these attacks do without that key. The
other host, which runs the verbs, has the services container: it runs on, its lease and its root file system stay.
Snapshots as another attacker's data are in tests/real/snapshots/test_hostile_store.py: a host that they are pulled
from, or pushed to, is the same machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from appliance.host.base import Result
from appliance.operations.image.build import Built
from tests.cases import sample
from tests.hostile.admin_host import Attacker, Instead, in_json, taken_over
from tests.hostile.host_state import differences, read_state
from tests.hostile.verbs import run_measured
from tests.hostile.vm import CHANGES, FORBIDDEN, HOSTILE
from tests.real.conftest import Playground, begin_on

pytestmark = pytest.mark.real

HERE, THERE = "host-a", "host-b"
FULL = pytest.mark.full
STATE, LEASE = "/var/lib/sms", "/var/lib/sms/overlays/lab.lease"
STATUS = ("status", "--host", THERE)
PLANS = (("migrate", THERE, "--dry-run"), ("failover", THERE, "--dry-run", "--i-have-fenced"))
VERBS: tuple[tuple[str, ...], ...] = (
    ("status",),
    STATUS,
    *PLANS,
    ("doctor", "--host", THERE),
    ("overlay", "list", "--host", THERE),
    ("overlay", "pull", "--from", THERE),
    ("overlay", "verify", "--host", THERE),
    ("overlay", "show", "latest", "--host", THERE),
    ("logs", "--host", THERE),
    ("start", "--host", THERE, "--dry-run"),
    ("stop", "--host", THERE),
    ("apply", "--dry-run"),
    ("upgrade", "--dry-run"),
    ("overlay", "push", "--to", THERE, "--dry-run"),
    ("journal",),
)
"""Each of them asks the other host, or would work there."""
ASKING = VERBS[1:4]


class Hosts(Playground):
    """The lab, whose host-b is hostile."""

    attacker: Attacker

    def check(self, *words: str, asks: bool = True) -> Result:
        """Run a verb on the honest host: it ends with a status of its own, and prints only text that is safe."""
        self.attacker.tried.clear()
        done = self.sms(*words, on=HERE, ok=None, timeout=300)
        shown = (done.stdout + done.stderr).decode(errors="surrogateescape")
        assert done.status in (0, 1, 2, 3, 4), (words, done.status, shown[-3000:])
        assert "Traceback" not in shown, (words, shown[-3000:])
        assert [each for each in FORBIDDEN if each in shown] == [], (words, shown[-3000:])
        assert not asks or self.attacker.tried, (words, "nothing was attacked")
        return done


@pytest.fixture(scope="module")
def standing(playground: Playground, built: Built) -> Iterator[Hosts]:
    """The container runs on host-a, and root of host-b attacks; at the end host-a is as it was."""
    begin_on(playground, HERE)
    playground.sms("-q", "start", "--host", HERE, on="admin")
    made, honest = Hosts(playground.lab), playground.host(HERE)
    with taken_over(playground.host(THERE), playground.lab.layout.disk / THERE) as attacker:
        made.attacker = attacker
        made.check(*STATUS, asks=False)  # what a verb writes for the first time
        state = read_state(honest)
        yield made
    assert differences(state, read_state(honest)) == []


@pytest.fixture
def hosts(standing: Hosts) -> Iterator[Hosts]:
    """The same; the container runs on, and the lease stays."""
    standing.attacker.honest()
    lease, instances = standing.lease(HERE), standing.instances(HERE)
    assert lease["holder"] == HERE and instances
    yield standing
    standing.attacker.honest()
    # Snapshots of this host advance the number of the next one.
    assert {**standing.lease(HERE), "sequence": 0} == {**lease, "sequence": 0}
    assert standing.instances(HERE) == instances
    folders = "/ /root /tmp /var/tmp /run /run/sms /var/lib/sms"
    assert standing.host(HERE).run("sh", "-c", f"find {folders} -maxdepth 2 -name 'PWNED*'", ok=None).text == ""


TEXTS: dict[str, Instead] = {
    "escape sequences": Instead(HOSTILE.encode(errors="surrogateescape"), HOSTILE.encode(), 0),
    "an error with escape sequences": Instead(b"", HOSTILE.encode() * 100, 1),
    "success without output": Instead(),
    "not found": Instead(b"", b"sh: not found", 127),
    "a signal": Instead(b"", b"", 137),
    "deep JSON": Instead(b"[" * 200_000 + b"\n"),
    "numbers": Instead(b"9" * 6000 + b" -1 99999999999999999999\n"),
    "bytes": Instead(bytes(range(256)) * 100),
    "shell": Instead(b"$(touch /PWNED); touch /PWNED\n`touch /PWNED`\n/../../PWNED\n--help\n"),
    "messages of an agent": Instead(
        b'{"kind": "step", "text": 7}\n{"kind": "result", "path": "/etc/shadow", "bytes": -1}\n'
        b'{"kind": "problem", "message": {}, "status": 99}\n{"kind": "rows", "rows": {}}\n'
    ),
    "results of an agent": Instead(b'{"kind": "result"}\n{"kind": "problem", "message": "x", "status": 0}\n'),
    "a lease of another": Instead(b'{"generation": 4611686018427387904, "holder": "host-c", "since": 1e308}\n'),
    "the honest output twice": Instead(b"{}\n", first=True),
}


@pytest.mark.parametrize("name", sample(TEXTS, "escape sequences"))
def test_no_output_confuses_a_verb(name: str, hosts: Hosts) -> None:
    """Whatever was run there: its programs, its shell, the agent, print something else."""
    hosts.attacker.attack = TEXTS[name]
    for words in ASKING:
        hosts.check(*words)


@FULL
def test_each_verb_is_one(hosts: Hosts) -> None:
    """An honest host has what they ask for: no attack is refused because of its words."""
    for words in VERBS:
        assert hosts.check(*words, asks=False).status != 2, words


@FULL
@pytest.mark.parametrize("name", TEXTS)
def test_no_output_confuses_any_verb(name: str, hosts: Hosts) -> None:
    hosts.attacker.attack = TEXTS[name]
    for words in VERBS:
        hosts.check(*words, asks=words in ASKING)


@pytest.mark.parametrize("name", sample(CHANGES))
def test_no_message_confuses_a_verb(name: str, hosts: Hosts) -> None:
    """Leases, messages of the agent, links, instances: everything is changed that is JSON."""
    hosts.attacker.attack = in_json(CHANGES[name])
    for words in ASKING:
        hosts.check(*words)


LEASES: dict[str, bytes] = {
    "of this host, newer": b'{"generation": 999999, "holder": null, "since": 1.0, "last": "host-b"}',
    "of nobody that is known": b'{"generation": 999999, "holder": "host-c", "since": 1.0, "last": "host-c"}',
    "of an engine": b'{"generation": 999999, "holder": "engine:kubernetes", "since": 1.0, "last": ""}',
    "of the host that asks": b'{"generation": 999999, "holder": "host-a", "since": 1e300, "last": ""}',
    "the largest number": b'{"generation": 9223372036854775807, "holder": "host-b", "since": 1.0, "last": ""}',
    "too large": b'{"generation": 1e400, "holder": "host-b"}',
    "escape sequences": json.dumps({"generation": 3, "holder": HOSTILE, "since": 0, "last": HOSTILE}).encode(),
    "other types": b'{"generation": [1], "holder": {"a": 1}, "since": "x", "last": 7}',
    "paths": b'{"generation": 3, "holder": "../../PWNED", "since": 0, "last": "--help"}',
    "half": b'{"generation": 3, "hol',
    "deep": b"[" * 100_000,
    "megabytes": b'{"generation": 3, "holder": "' + b"x" * (40 << 20) + b'"}',
}


@pytest.mark.parametrize("name", sample(LEASES, "of nobody that is known"))
def test_a_lease_is_data(name: str, hosts: Hosts) -> None:
    """It may have a move or a start refused; it stops nothing that runs, and ends no guard here."""
    with replaced(hosts, f"cat >{LEASE}", LEASES[name]):
        for words in (STATUS, PLANS[0]):
            hosts.check(*words, asks=False)
        found = json.loads(hosts.sms("status", "--json", on=HERE, ok=(0, 4)).stdout)
        assert found["running"] and found["healthy"]


@FULL
@pytest.mark.parametrize("name", LEASES)
def test_a_lease_changes_nothing(name: str, hosts: Hosts) -> None:
    """No verb that acts here believes it more than it would an honest one: the container is not stopped."""
    with replaced(hosts, f"cat >{LEASE}", LEASES[name]):
        for words in (("start",), ("apply",), ("restart", "munge"), ("overlay", "snapshot"), PLANS[1]):
            hosts.check(*words, asks=False)
            assert hosts.instances(HERE), words


LINKS = {
    "a FIFO": f"mkfifo {LEASE}",
    "a link to a FIFO": f"mkfifo {STATE}/fifo; ln -s {STATE}/fifo {LEASE}",
    "a link to a device that is endless": f"ln -s /dev/zero {LEASE}",
    "a link to itself": f"ln -s lab.lease {LEASE}",
    "a link to a secret file": f"ln -s /etc/shadow {LEASE}",
    "a folder": f"mkdir {LEASE}",
    "a socket": f"python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"{LEASE}\")'",
    "descriptors of the process that asks": f"ln -s /proc/self/fd/0 {LEASE}",
    "the memory of the process that asks": f"ln -s /proc/self/mem {LEASE}",
}
"""In place of the lease."""


@pytest.mark.parametrize("name", sample(LINKS, "a FIFO"))
def test_what_is_no_file_keeps_no_verb_waiting(name: str, hosts: Hosts) -> None:
    """Also in place of the folders of journal and snapshots, and of the record of a deployment."""
    with replaced(hosts, LINKS[name]):
        for words in (STATUS, PLANS[0]):
            shown = hosts.check(*words, asks=False).stdout.decode()
            assert "root:" not in shown
    if name == "a FIFO":
        return
    for path in ("journal", "snapshots", "engines"):
        kept = f"mv {STATE}/{path} {STATE}/{path}.kept 2>/dev/null || true; "
        other = LINKS[name].replace(LEASE, f"{STATE}/{path}")
        back = f"rm -rf {STATE}/fifo {STATE}/{path}; mv {STATE}/{path}.kept {STATE}/{path} 2>/dev/null || true"
        hosts.host(THERE).run("sh", "-c", f"{kept}{other}")
        try:
            for verb in (STATUS, PLANS[0], VERBS[5]):
                hosts.check(*verb, asks=False)
        finally:
            hosts.host(THERE).run("sh", "-c", back)


class replaced:  # noqa: N801 - a context
    """The lease of the other host is something else."""

    def __init__(self, hosts: Hosts, script: str, data: bytes = b"") -> None:
        self.host, self.script, self.data = hosts.host(THERE), script, data

    def __enter__(self) -> None:
        self.kept = self.host.read(LEASE)
        self.host.run("sh", "-c", f"rm -rf {LEASE}; mkdir -p {STATE}/overlays; {self.script}", input=self.data)

    def __exit__(self, *_: object) -> None:
        self.host.run("sh", "-c", f"rm -rf {LEASE} {STATE}/fifo")
        if self.kept is not None:
            self.host.write(LEASE, self.kept, mode=0o600)


ENDLESS = {
    "output": Instead(b"x" * (1 << 20), times=1 << 12),
    "lines": Instead(b'{"kind": "note", "text": "a line"}\n' * 10_000, times=1 << 12),
    "one line": Instead(b"[" * (1 << 20), times=1 << 12),
    "a lease": Instead(b" " * (1 << 20), times=1 << 12),
}
"""4 GiB."""


@pytest.mark.parametrize("name", sample(ENDLESS, "output"))
def test_what_never_ends_is_not_kept(name: str, hosts: Hosts) -> None:
    """`sms status` had 3.4 GB after ten seconds."""
    hosts.attacker.attack = ENDLESS[name]
    for words in ASKING[:1] if name == "output" else ASKING:
        hosts.attacker.tried.clear()
        done, peak_mb = run_measured(hosts.host(HERE), "sms", *words, timeout=300)
        assert hosts.attacker.tried and done.status in (1, 3, 4) and peak_mb < 600, (words, done.status, peak_mb)


@FULL
@pytest.mark.parametrize("name", [*TEXTS])
def test_a_move_to_it_fails_and_serves_on(name: str, hosts: Hosts) -> None:
    """Its agent, which has passed all checks, answers so once the move has begun: the container stays here."""
    hosts.attacker.attack, hosts.attacker.aim = TEXTS[name], r"agent-\w+\.pyz (?!check|perform|status|list|inspect)"
    done = hosts.check("migrate", THERE, "--force")
    assert done.status != 0
    assert hosts.instances(HERE) and hosts.lease(HERE)["holder"] == HERE
    hosts.attacker.honest()
    assert hosts.status(HERE)["healthy"]


@FULL
def test_another_host_key_gets_nothing(hosts: Hosts) -> None:
    """Of a machine at its address: nothing is asked of it, and no password or key is offered in clear."""
    key = hosts.host(THERE).run("sh", "-c", "grep -i ^HostKey /lab/sshd_config | cut -d' ' -f2").text
    script = f"cp -p {key} {key}.kept; rm {key}; ssh-keygen -q -t ed25519 -N '' -f {key}.new; mv {key}.new {key}"
    restart = "pkill -KILL -f '^sshd: root'; supervisorctl -c /lab/supervisord.conf restart sshd"
    hosts.host(THERE).run("sh", "-c", f"{script}; {restart}")
    try:
        hosts.attacker.attack, asked = TEXTS["success without output"], len(hosts.attacker.asked)
        for words in ASKING:
            done = hosts.check(*words, asks=False)
            assert done.status != 0 and b"host key" in done.stderr + done.stdout
        assert len(hosts.attacker.asked) == asked
    finally:
        hosts.host(THERE).run("sh", "-c", f"mv {key}.kept {key}; rm -f {key}.new.pub; {restart}")
