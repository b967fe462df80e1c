"""A hostile engine against the verbs of an admin host: what root there, or who has its certificate, can answer.

The verbs, `kubectl` and `nomad` are the real ones; the engine is ``tests.hostile.engine``, with TLS of the site's own
authority. It has deployed honestly before it attacks, so that each verb has something to ask. The host is compared
before and after all of it: its files, those of `~/.kube` and temporary ones too, processes, network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.engines.nomad import SLURMD_PORT
from appliance.host.local import ENVIRONMENT, Local
from appliance.lab.engines.programs import find_program
from appliance.operations.site import ca
from appliance.operations.site.keys import create_pair
from appliance.shared.state_lease import StateLease
from appliance.tools import kubectl
from appliance.tools.engine import MAX_MEMORY
from appliance.tools.kubectl import Kubectl
from appliance.tools.nomad import Nomad
from tests import places
from tests.bmcs import Request, answer, serve
from tests.cases import run_verb, sample
from tests.hostile.engine import KEY, TOKEN, Engine, quoting, serve_plain
from tests.hostile.host_state import READ, WALK, HostState, differences
from tests.hostile.vm import CHANGES, FORBIDDEN, HOSTILE, RAW, SLOW, redirect
from tests.ownnet import own_network
from tests.real.engines.conftest import need_engines
from tests.servers import free_port

pytestmark = [pytest.mark.real, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a network of its own")]

NET = "10.77.9"
ENGINE, OTHER, HOST = f"{NET}.2", f"{NET}.3", f"{NET}.4"
PORT, PLAIN = 6443, 8080
ENGINES = ("kubernetes", "nomad")
OTHER_KEY = hashlib.sha512(b"another key of Munge").digest() * 2
FULL = pytest.mark.full


class Site:
    """A site whose engine is hostile: verbs, and what they have printed. ``kind`` is the engine."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.engine = kind, folder, Engine()
        self.tls = folder / "tls"
        self.capfd: pytest.CaptureFixture[str] | None = None

    def sms(self, *words: str) -> tuple[int, str]:
        """Run a verb; return its exit status, and all that it has printed."""
        assert self.capfd
        return run_verb(self.capfd, self.folder / "sms.yaml", *words)

    def write_key(self, key: bytes) -> None:
        """Give the cluster a Munge key, which the next deployment sends to the engine."""
        (self.folder / "munge.key").write_bytes(key)

    def repair(self) -> None:
        """Deploy honestly, with the key of before."""
        self.engine.honest()
        self.write_key(KEY)
        status, shown = self.sms("deploy", "--timeout", "8s")
        assert status == 0, (shown, self.engine.asked[-12:])

    def record(self) -> bytes:
        """What this host knows of the deployment, but for when it was."""
        found = json.loads((self.folder / "state" / "engines" / "lab.json").read_text())
        return json.dumps({name: value for name, value in found.items() if name != "at"}).encode()

    def context(self, *addresses: str) -> ssl.SSLContext:
        """The server's side of TLS, certified by the site's authority for these addresses."""
        pair = ca.issue_server(self.tls, hostname="engine", addresses=list(addresses))
        file = self.folder / "pair.pem"
        file.write_bytes(pair.key + pair.certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context


def write_site(folder: Path) -> None:
    document = yaml.safe_load((places.ROOT / "definitions" / "profiles" / "lab.yaml").read_text())
    document |= {"state": str(folder / "state"), "services": ["slurmctld", "munge"]}
    document["networks"]["provisioning"] |= {"address": f"{NET}.1/24"}
    document["admin_hosts"] = [{"name": socket.gethostname(), "address": HOST}]
    nodes = [{"name": "node[001-004]", "address": f"{NET}.[11-14]"}]
    document["slurm"] = {"nodes": nodes, "partitions": [{"name": "batch", "default": True}]}
    document["secrets"] = {"munge_key": "munge.key"}
    document.pop("provisioning", None)
    image = f"registry.example.org/sms/lab@sha256:{'a' * 64}"
    document["engines"] = {
        "kubernetes": {"address": f"{NET}.20", "kubeconfig": "kubeconfig", "image": image},
        "nomad": {"address": f"{NET}.21", "host": "c1", "api": f"https://{ENGINE}:{PORT}", "token_file": "token"},
    }
    (folder / "sms.yaml").write_text(yaml.safe_dump(document))
    write_kubeconfig(folder)
    for name, data in (("munge.key", KEY), ("token", f"{TOKEN}\n".encode())):
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)


def write_kubeconfig(folder: Path, **changes: Any) -> None:
    server = {"server": f"https://{ENGINE}:{PORT}", "certificate-authority": str(folder / "tls" / "ca.pem"), **changes}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    (folder / "kubeconfig").chmod(0o600)


PROGRAMS = ("kubectl", "nomad")


def read_machine() -> HostState:
    """This machine's state: in /etc and /boot all files, as others work elsewhere; its processes, network, mounts."""
    files, *rest = json.loads(Local().run("python3", "-c", READ, timeout=120).stdout)
    for folder in ("/etc", "/boot"):
        files.update(json.loads(Local().run("python3", "-c", WALK, folder, timeout=120, limit=1 << 26).stdout))
    return HostState(files, *rest)


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """A network with the engine, another machine and this host; this host is the same before and after all attacks."""
    with own_network([f"{each}/24" for each in (ENGINE, OTHER, HOST)]):
        before = read_machine()
        yield
        assert differences(before, read_machine()) == []


@pytest.fixture(scope="module", params=ENGINES)
def standing(request: pytest.FixtureRequest, network: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site of which an engine, honest until then, has the services."""
    need_engines(*PROGRAMS)
    folder, kind = tmp_path_factory.mktemp("hostile"), request.param
    (folder / "home").mkdir()
    (folder / "work").mkdir()
    ca.make_ca(folder / "tls")
    create_pair(folder / "keys" / "sign.pem", folder / "keys" / "sign.pub")
    write_site(folder)
    made = Site(kind, folder)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in list(os.environ):
            if name.startswith(("NOMAD_", "KUBE", "SMS_SITE")) or name.lower().endswith("_proxy"):
                patch.delenv(name)
        folders = [str(find_program(name).parent) for name in PROGRAMS]
        patch.setitem(ENVIRONMENT, "PATH", ":".join([*folders, ENVIRONMENT["PATH"]]))
        patch.setenv("HOME", str(folder / "home"))
        patch.setenv("TMPDIR", str(folder / "tmp"))
        (folder / "tmp").mkdir()
        patch.setenv("COLUMNS", "200")
        patch.setenv("NOMAD_CACERT", str(folder / "tls" / "ca.pem"))
        patch.chdir(folder / "work")
        stack.enter_context(serve(ENGINE, PORT, made.context(ENGINE), made.engine))
        yield made


@pytest.fixture
def site(standing: Site, capfd: pytest.CaptureFixture[str]) -> Iterator[Site]:
    """The same, honest and deployed before a test; nothing of its attack is left on this host."""
    standing.capfd = capfd
    standing.engine.honest()
    standing.write_key(KEY)
    if not (standing.folder / "state" / "engines" / "lab.json").exists():
        status, shown = standing.sms("deploy", "--engine", standing.kind, "--timeout", "4s")
        assert status == 0, (shown, standing.engine.asked[-12:])
    before = standing.record()
    yield standing
    standing.engine.honest()
    standing.write_key(KEY)
    assert standing.record() == before
    assert list((standing.folder / "tmp").iterdir()) == list((standing.folder / "work").iterdir()) == []
    files = [str(path.relative_to(standing.folder / "home")) for path in (standing.folder / "home").rglob("*")]
    assert [path for path in files if not CACHED.fullmatch(path)] == []
    assert not list(standing.folder.rglob("PWNED*")) and not list(Path("/").glob("PWNED*"))


CACHED = re.compile(
    r"\.apptainer(/.*)?|\.kube(/cache(/http(/\.diskv-temp|/[0-9a-f]{64})?"
    r"|/discovery(/10\.77\.9\.2_6443(/[\w.]+)?(/v1)?(/server\w+\.json)?)?)?)?"
)
"""What `kubectl` keeps: the kinds that a server has, and its schema by digests."""
STATUS, PLAN = ("deploy", "status"), ("deploy", "--dry-run")
OBJECTS = r" /(api|apis/[^/]+)/v1/(namespaces|nodes|persist|statef)| /v1/"
"""Requests for objects; without these, `kubectl` reads only which kinds a server has."""


def check(site: Site, words: tuple[str, ...]) -> tuple[int, str]:
    """Run a verb: it ends with a status of its own, and prints only text that is safe, and no key and no token."""
    site.engine.tried.clear()
    status, shown = site.sms(*words)
    assert status in (0, 1, 2, 3, 4), (words, status, shown)
    assert "Traceback" not in shown, (words, shown[-3000:])
    assert [each for each in FORBIDDEN if each in shown] == [], (words, shown[-3000:])
    assert TOKEN not in shown
    for form in forms_of(KEY):
        assert not any(form[at : at + 12] in shown for at in range(0, len(form) - 11, 3)), (words, shown[-3000:])
    return status, shown


def forms_of(secret: bytes) -> list[str]:
    """How programs print it."""
    encoded = base64.b64encode(secret)
    again = [base64.b64encode(bytes(before) + encoded).decode()[4:-4] for before in range(3)]
    octal = "".join(f"\\{each:03o}" for each in secret)
    return [encoded.decode(), *again, secret.hex(), octal, repr(secret)[2:-1], " ".join(map(str, secret))]


def with_kinds(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return an attack that leaves kinds of objects as they are: `kubectl` itself refuses others."""

    def restore(old: Any, new: Any) -> Any:
        if isinstance(old, dict) and isinstance(new, dict):
            kept = {key: old[key] for key in ("kind", "apiVersion") if key in old}
            return {key: restore(old.get(key), value) for key, value in new.items()} | kept
        if isinstance(old, list) and isinstance(new, list):
            return [restore(*pair) for pair in zip(old, new, strict=False)]
        return new

    return lambda found: restore(found, change(found))


ANSWERS = {**CHANGES, **{f"{name}, with kinds": with_kinds(change) for name, change in CHANGES.items()}}


@pytest.mark.parametrize("name", sample([*ANSWERS, *RAW], "objects for texts, with kinds"))
def test_no_answer_confuses_a_verb(name: str, site: Site) -> None:
    engine = site.engine
    engine.aim, engine.change = OBJECTS, ANSWERS.get(name)
    engine.attack = RAW.get(name)
    for words in (STATUS, PLAN):
        check(site, words)
        assert engine.tried, "nothing was asked"


@FULL
@pytest.mark.parametrize("name", [*CHANGES, *RAW])
def test_no_list_of_kinds_confuses_a_verb(name: str, site: Site) -> None:
    """What `kubectl` reads before all else; for Nomad, with verbs that change something."""
    engine = site.engine
    shutil.rmtree(site.folder / "home", ignore_errors=True)
    engine.aim, engine.change = "", CHANGES.get(name)
    engine.attack = RAW.get(name)
    for words in (
        ("deploy", "--timeout", "1s"),
        ("deploy", "drain", "worker1", "-n"),
        ("deploy", "stop", "-n"),
        ("status",),
    ):
        check(site, words)
        assert engine.tried, "nothing was asked"
    site.repair()


@pytest.mark.parametrize("standing", sample(ENGINES, *ENGINES[:1]), indirect=True)
def test_a_quoted_request_shows_no_key(site: Site) -> None:
    """D1: of a webhook that denies it, in every encoding; the whole of it did reach the engine."""
    site.write_key(new := OTHER_KEY)
    site.engine.attack, site.engine.aim = quoting, r"PATCH .*/secrets/|PUT /v1/var/"
    status, shown = check(site, ("deploy", "--timeout", "2s"))
    assert status == 1 and len(site.engine.tried) == 1
    assert any(base64.b64encode(new) in body for body in site.engine.bodies), "the attacker has it"
    assert "[redacted]" in shown
    for form in forms_of(new):
        assert not any(form[at : at + 10] in shown for at in range(len(form) - 9)), shown
    site.repair()


TARGETS = (f"https://{OTHER}:{PORT}", f"http://{OTHER}:{PLAIN}", "file:///etc/shadow", "//[::1")


@FULL
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("to", TARGETS)
def test_a_redirection_gives_away_nothing_else(to: str, status: int, site: Site) -> None:
    """`kubectl` and `nomad` follow it, with the token: it leads to no file, and only what the engine has is sent on."""
    spy, engine = Engine(), site.engine
    shadow = Path("/etc/shadow").read_text().split(":", 2)[1]
    with serve(OTHER, PORT, site.context(OTHER), spy), serve_plain(OTHER, PLAIN, spy):
        for aim, words in (
            (OBJECTS, STATUS),
            (r"PATCH .*/secrets/|PUT /v1/var/", ("deploy", "--timeout", "1s")),
        ):
            site.write_key(OTHER_KEY)
            engine.attack, engine.aim = redirect(status, to), aim
            _, shown = check(site, words)
            assert engine.tried and "shadow:" not in shown and (len(shadow) < 9 or shadow not in shown)
    sent = {json.dumps(each, sort_keys=True) for each in (*map(read_body, engine.bodies),)}
    assert spy.tokens <= engine.tokens and {json.dumps(read_body(each), sort_keys=True) for each in spy.bodies} <= sent
    site.repair()


def read_body(body: bytes) -> Any:
    """What was sent: as an object, its fields have no order."""
    return yaml.safe_load(body) if body else None


OPTIONS = {
    "-address": f"-address=http://{OTHER}:{PLAIN}",
    "--address": f"--address=http://{OTHER}:{PLAIN}",
    "--server": f"--server=http://{OTHER}:{PLAIN}",
    "--filename": f"--filename=http://{OTHER}:{PLAIN}/PWNED",
    "--cache-dir": "--cache-dir=PWNED",
}
DEPLOY = ("deploy", "--timeout", "1s")


@pytest.mark.parametrize("verb", [STATUS, pytest.param(DEPLOY, marks=FULL)], ids=["status", "deploy"])
@pytest.mark.parametrize("name", sample(OPTIONS, "--filename"))
@pytest.mark.parametrize("standing", sample(ENGINES, *ENGINES[:1]), indirect=True)
def test_names_are_no_options(name: str, verb: tuple[str, ...], site: Site) -> None:
    """A pod or an allocation that is called as an option of `kubectl` or `nomad` would name a server, or a file."""
    spy, engine = Engine(), site.engine
    with serve_plain(OTHER, PLAIN, spy):
        engine.aim, engine.change = OBJECTS, renamed(OPTIONS[name])
        check(site, verb)
    assert engine.tried and spy.asked == []
    if verb == DEPLOY:
        site.repair()


def renamed(word: str) -> Callable[[Any], Any]:
    """Return an attack: pods that are not ready, of an earlier revision, and allocations have this name, too."""

    def change(found: Any) -> Any:
        if isinstance(found, list):
            return [*({**one, "ID": word, "CreateTime": 9} for one in found if "ID" in one), *found]
        for one in list(found.get("items", ())):
            if "ownerReferences" in one["metadata"]:
                old = {**one["metadata"]["labels"], "controller-revision-hash": "old"}
                pod = {**one, "metadata": {**one["metadata"], "name": word, "labels": old}}
                pod["status"] = {**one["status"], "conditions": []}
                found["items"].append(pod)
        return found

    return change


@FULL
@pytest.mark.parametrize("standing", ["kubernetes"], indirect=True)
def test_files_are_written_nowhere_else(site: Site) -> None:
    """`kubectl` keeps the kinds of a server in files, and compares objects in files, whose names the server gives."""
    engine = site.engine
    for up in ("/", "../" * 12):
        place = f"{up}{site.folder}/PWNED"
        group = {"groupVersion": place, "version": place}
        shutil.rmtree(site.folder / "home")
        engine.aim = r" /(apis|api/v1|PWNED|apis/.*PWNED.*)\?"
        engine.change = lambda found, group=group: (
            {**found, "groups": [*found["groups"], {"name": "x", "versions": [group], "preferredVersion": group}]}
            if "groups" in found
            else found
        )
        check(site, PLAN)
        assert engine.tried
        engine.aim, engine.change = "PATCH .*dryRun", names_in(place)
        check(site, PLAN)
        assert engine.tried
        assert not list(site.folder.rglob("PWNED*")), [*engine.asked[-9:]]


def names_in(place: str) -> Callable[[Any], Any]:
    """Return an attack: what a dry run answers is of another name and namespace."""
    return lambda found: {**found, "metadata": {**found["metadata"], "name": place, "namespace": place}, "more": 1}


CERTIFICATES = ("another authority", "another address", "no TLS", "an old name")


@pytest.mark.parametrize("name", sample(CERTIFICATES, "another authority"))
def test_another_machine_gets_no_token(name: str, site: Site) -> None:
    """At the engine's address, which the attacker has taken over, without its key."""
    spy, port = Engine(), free_port([ENGINE])
    other = Site("kubernetes", site.folder / "other")
    if not other.folder.exists():
        ca.make_ca(other.tls)
    context = {"another authority": other.context, "another address": site.context}.get(name, site.context)
    where = OTHER if name in ("another address", "an old name") else ENGINE
    serving = serve_plain(ENGINE, port, spy) if name == "no TLS" else serve(ENGINE, port, context(where), spy)
    with serving, pointed_at(site, f"https://{ENGINE}:{port}"):
        for words in (STATUS, PLAN, ("deploy", "--timeout", "1s")):
            status, _ = check(site, words)
            assert status != 0, words
    assert spy.tokens == set() and spy.asked == []


@contextmanager
def pointed_at(site: Site, url: str) -> Iterator[None]:
    """The site's engine is at another address."""
    path = site.folder / "sms.yaml"
    kept = path.read_text()
    try:
        path.write_text(kept.replace(f"https://{ENGINE}:{PORT}", url))
        write_kubeconfig(site.folder, server=url)
        yield
    finally:
        path.write_text(kept)
        write_kubeconfig(site.folder)


INSIDE: dict[str, tuple[bytes, bytes, int]] = {
    "escape sequences": (HOSTILE.encode() * 9, HOSTILE.encode(), 0),
    "a status that is none": (b"", b"x", 2**40),
    "a negative status": (b"", b"x", -1),
    "signal": (b"", b"", 137),
    "success without an answer": (b"", b"", 0),
    "an answer of another service": (b'{"name": "../../PWNED", "ok": true}\n' * 1000, b"", 0),
    "deep JSON": (b"[" * 200_000 + b"\n", b"", 0),
    "a lease of another": (StateLease(1 << 62, HOSTILE.replace("\0", ""), 1e300, moved="container").text(), b"", 0),
    "a lease of huge numbers": (b'{"generation": ' + b"9" * 5000 + b', "since": -1e308, "holder": []}', b"", 0),
    "megabytes": (b"node1|idle|x\n" * 400_000, b"x" * 100_000, 0),
}
"""Standard output, standard error and status of every command in a container."""


@FULL
@pytest.mark.parametrize("name", INSIDE)
def test_no_output_of_a_container_confuses_a_verb(name: str, site: Site) -> None:
    """Answers of probes, the lease of the state, what Slurm's commands print."""
    asked: list[list[str]] = []

    def reply(words: list[str]) -> tuple[bytes, bytes, int]:
        asked.append(words)
        return INSIDE[name]

    site.engine.exec_reply = reply
    node = "worker1" if site.kind == "kubernetes" else "node1"
    for words in (("deploy", "status", "--json"), ("deploy", "drain", node, "-n"), STATUS):
        _, shown = check(site, words)
        if words[-1] == "--json" and shown.startswith("{"):
            assert json.loads(shown)["healthy"] is False or site.kind == "kubernetes"
    assert len(asked) >= 3


@pytest.mark.parametrize("standing", ["nomad"], indirect=True)
def test_it_chooses_only_where_a_port_is_looked_at(site: Site) -> None:
    """Addresses of compute nodes are Nomad's: port 6818 there is connected to, and nothing is sent."""
    heard: list[bytes] = []
    engine = site.engine
    engine.aim = r"GET /v1/nodes"
    engine.change = lambda found: (
        [
            {**one, "NodePool": "compute", "ID": f"n{number}", "Name": f"n{number}", "Address": address}
            for number, address in enumerate((OTHER, "$(touch PWNED)", "--help", "127.0.0.1; touch PWNED", HOSTILE))
            for one in found[:1]
        ]
        + found
    )
    with socket.create_server((OTHER, SLURMD_PORT)) as listening:
        listening.settimeout(120)

        def hear() -> None:
            with suppress(OSError):
                link, _ = listening.accept()
                heard.append(link.recv(100))

        thread = threading.Thread(target=hear, daemon=True)
        thread.start()
        check(site, PLAN)
        thread.join(120)
    assert heard == [b""]


PEAK = """\
import json, os, resource, sys
from appliance.cli import main
from appliance.host.local import ENVIRONMENT
ENVIRONMENT["PATH"] = sys.argv[1]
sys.stdout = sys.stderr
try:
    status = main(sys.argv[2:])
except SystemExit as end:
    status = int(end.code or 0)
peaks = [resource.getrusage(who).ru_maxrss >> 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
os.write(1, json.dumps([status, *peaks]).encode())
"""
OWN_MB, PROGRAM_MB = 1024, (MAX_MEMORY >> 20) + 700
"""Memory of sms itself, and of a program of an engine: with its text, and what the kernel does not count as data."""
SENT = 3 << 29


def endless(_: Request, link: ssl.SSLSocket) -> None:
    """A list of numbers without an end, or nearly: without a bound `kubectl` needs 4 GB for it."""
    link.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n[")
    for _number in range(SENT >> 16):
        link.sendall(b"0," * 32768)


@cache
def bomb() -> bytes:
    """The same in 1.5 MB."""
    packed = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [packed.compress(b"["), *(packed.compress(b"0," * (1 << 19)) for _ in range(SENT >> 20)), packed.flush()]
    return answer(200, b"".join(parts), "Content-Type: application/json\r\nContent-Encoding: gzip\r\n")


FLOODS: dict[str, Any] = {"an endless body": endless, "a compressed bomb": lambda _, __: bomb()}


@FULL
@pytest.mark.parametrize("name", FLOODS)
def test_memory_is_bounded(name: str, site: Site) -> None:
    """D5: 4 GB of `kubectl` and of `nomad` for 1.5 MB that an engine has sent."""
    site.engine.attack, site.engine.aim = FLOODS[name], r"GET /api/v1/namespaces/lab/pods\?|PUT /v1/job/"
    argv = [sys.executable, "-c", PEAK, ENVIRONMENT["PATH"], "-q", "--site", str(site.folder / "sms.yaml"), *STATUS]
    environment = {**os.environ, "PYTHONPATH": str(places.ROOT)}
    done = subprocess.run(argv, env=environment, capture_output=True, check=True)
    status, own, program = json.loads(done.stdout)
    assert site.engine.tried and status in (1, 4), done.stderr[-500:]
    assert own < OWN_MB and program < PROGRAM_MB, (own, program)
    assert b"Traceback" not in done.stderr, done.stderr[-3000:]


@FULL
@pytest.mark.parametrize("name", [*SLOW])
def test_a_slow_answer_ends(name: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte in time, but never the last one."""
    monkeypatch.setattr(kubectl, "REQUEST_S", 1)
    for function in (Nomad.run, Kubectl.run):
        assert function.__kwdefaults__
        monkeypatch.setitem(function.__kwdefaults__, "timeout", 3)
    site.engine.attack, site.engine.aim = SLOW[name], OBJECTS
    for words in (STATUS, PLAN):
        status, _ = check(site, words)
        assert status == 1 and site.engine.tried
