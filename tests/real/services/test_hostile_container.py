"""Root in the services container against the verbs of the host: what it tries at once, leaves behind, and answers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from appliance.host.base import Result
from appliance.operations.lab import demo
from tests.hostile import container as hostile
from tests.hostile.host_state import HostState, differences, read_state
from tests.hostile.supervisor import PROGRAM, REPLIES
from tests.hostile.verbs import run_safely
from tests.real.conftest import Playground, give_image
from tests.real.images import make_variant
from tests.real.labs import build_image, fresh_lab

pytestmark = pytest.mark.real

FULL = pytest.mark.full
NAME = "t-hostile"
HOSTS = ("host-a", "host-b")
CONTENT = "never to be read by the container"
LISTENER = """
import socket, time
one, other = socket.socket(socket.AF_UNIX), socket.socket()
one.bind("\\0sms-canary"); one.listen()
other.bind(("127.0.0.1", 7799)); other.listen()
print("listens", flush=True)
time.sleep(1e6)
"""
"""On the host: an abstract socket and a port of the loopback, as its own services have them."""
STATUSES = (0, 1, 2, 3, 4, 5)
"""Those that are documented: anything else is a crash."""


def put_canaries(play: Playground) -> None:
    for name in HOSTS:
        play.host(name).write(hostile.CANARY, f"{CONTENT}\n".encode(), mode=0o600)


@pytest.fixture(scope="module")
def listening(playground: Playground) -> Iterator[None]:
    put_canaries(playground)
    argv = [*playground.host("host-a").prefix, "python3", "-c", LISTENER]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"listens\n"
        harmless = [name for name, attempt in hostile.ATTEMPTS.items() if attempt.harmless]
        done = playground.host("host-a").run("sh", "-c", hostile.try_all(harmless))
        assert done.text.splitlines() == harmless, "what nobody confines is successful"
        yield
        playground.host("host-a").run("pkill", "-KILL", "-f", "sms-canary")


def test_what_root_inside_tries_at_once(running: Playground, listening: None) -> None:
    """Adds to test_confinement: newer system calls, the host's sockets, ways out of a root folder."""
    assert running.sms("exec", "--", "sh", "-c", hostile.try_all(hostile.ATTEMPTS)).text == ""


def test_it_cannot_signal_the_group_of_its_caller(running: Playground) -> None:
    """A script of the administrator goes on: its process group is not that of the program that it runs inside."""
    script = "sms exec -- sh -c 'kill -TERM 0; sleep 30'; echo goes on"
    assert running.host("host-a").run("sh", "-c", script, ok=None).stdout == b"goes on\n"


@dataclass(frozen=True)
class Stage:
    """A lab of two admin hosts; what they were before the container was hostile."""

    play: Playground
    before: dict[str, HostState]

    def verb(self, *words: str, on: str = "host-a", ok: tuple[int, ...] = STATUSES) -> Result:
        """It ends as documented, and prints neither secrets of the host nor what controls a terminal."""
        done = self.play.sms(*words, on=on, ok=None, timeout=300)
        printed = (done.stdout + done.stderr).decode(errors="replace")
        assert done.status in ok, f"{words}: {printed}"
        assert "Traceback" not in printed and CONTENT not in printed, f"{words}: {printed}"
        assert not [one for one in hostile.FORBIDDEN if one in printed], words
        return done

    def inside(self, script: str, *words: str, on: str = "host-a", ok: tuple[int, ...] | None = (0,)) -> Result:
        return self.play.sms("exec", "--", "bash", "-c", script, "script", *words, on=on, ok=ok)

    def spied(self, on: str) -> set[tuple[str, ...]]:
        """Namespaces in which implanted programs have run: processes, network."""
        lines = self.inside(f"exec /opt/kept/cat {hostile.SPY}", on=on).text.splitlines()
        return {tuple(line.split()[1:]) for line in lines}

    def assert_unchanged(self) -> None:
        """After the container is stopped."""
        for name in HOSTS:
            assert differences(self.before[name], read_state(self.play.host(name))) == []


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with fresh_lab(NAME, 2) as lab:
        play = Playground(lab)
        built = build_image(lab)
        make_variant(built, lab, "good")
        for name in HOSTS:
            give_image(play, built, name)
        put_canaries(play)
        play.sms("-q", "start")
        play.sms("-q", "migrate", "--force", "host-b")
        play.sms("-q", "migrate", "--force", "host-a", on="host-b")
        play.sms("-q", "stop")
        yield Stage(play, {name: read_state(play.host(name)) for name in HOSTS})


@FULL
def test_what_it_leaves_behind_stays_inside(stage: Stage) -> None:
    """Every verb that works with the container or its overlay meets implanted programs, links and files."""
    play, host = stage.play, stage.play.host("host-a")
    site = play.variant(
        "hostile.yaml", lambda document: document["slurm"].update(partitions=[{"name": "normal"}, {"name": "night"}])
    )
    stage.verb("-q", "start", ok=(0,))
    stage.inside(hostile.IMPLANT, hostile.WRAPPER, hostile.SITECUSTOMIZE)
    outside = {
        name: tuple(play.host(name).run("readlink", "/proc/self/ns/pid", "/proc/self/ns/net").text.split())
        for name in HOSTS
    }
    demo.wait_for("nodes", lambda: "yes" if play.host("node1").works("scontrol", "ping") else "")
    with ExitStack() as stack:
        stack.callback(lambda: play.sms("-q", "stop", ok=None))
        for words in (
            ("status",),
            ("logs", "slurmctld"),
            ("exec", "--", "true"),
            ("-q", "overlay", "snapshot"),
            ("overlay", "diff", "latest"),
            ("--site", site, "apply", "-n"),
            ("--site", site, "-q", "apply"),
            ("-q", "restart", "postfix"),
            ("-q", "rehearse", "--nodes", "1"),
        ):
            stage.verb(*words)
        folder = "/tmp/restored"
        for number, path in enumerate(("link", "folder", "pipe", "setuid-sh", "sparse", "--help", "folder/shadow")):
            target = f"{folder}-{number}"
            stage.verb("-q", "overlay", "restore", "latest", "--path", f"/var/spool/{path}", "--to", target)
        modes = host.run("sh", "-c", f"stat -c '%a %u %F' {folder}-* | sort -u").text
        assert modes == "700 0 directory", "programs that run as their owner are within reach of root only"
        assert not host.works("grep", "-rl", CONTENT, *host.run("sh", "-c", f"echo {folder}-*").text.split())
        assert int(host.run("sh", "-c", f"du -sck {folder}-* | tail -1 | cut -f1").text) < 1 << 20, (
            "sparse files stay so"
        )
        seen = stage.spied("host-a")
        stage.verb("-q", "migrate", "host-b", ok=(0,))
        seen |= stage.spied("host-b")
        stage.verb("-q", "migrate", "host-a", on="host-b", ok=(0,))
        stage.verb("-q", "upgrade", "--image", "/etc/sms/good.sif", "--no-rehearsal", ok=(0,))
        seen |= stage.spied("host-a")
        stage.verb("-q", "upgrade", "--undo", ok=(0,))
        # The next start seeds the overlay: from a mark that has no end.
        stage.inside("ln -sfn /dev/zero /etc/sms/seed.mark", ok=None)
        stage.verb("-q", "stop", ok=(0,))
        stage.verb("-q", "start", ok=(0,))
        seen |= stage.spied("host-a")
        stage.verb("-q", "stop", ok=(0,))
        stage.verb("-q", "overlay", "restore", "latest", ok=(0,))
        stage.verb("-q", "start", ok=(0,))
        seen |= stage.spied("host-a")
    assert seen, "no implanted program has run"
    assert not {word for one in seen for word in one} & {word for one in outside.values() for word in one}
    host.run("sh", "-c", f"rm -rf {folder}-*")
    stage.assert_unchanged()


LIED_TO = (
    ("status", "--json"),
    ("apply", "-n"),
    ("-q", "overlay", "snapshot"),
    ("migrate", "host-b", "-n"),
    ("overlay", "list"),
    ("-q", "restart", "chrony"),
)


@pytest.mark.parametrize("lie", hostile.LIES)
@FULL
def test_what_it_answers_is_data(stage: Stage, lie: str) -> None:
    stage.verb("-q", "start", ok=(0,))
    try:
        stage.inside(hostile.LIE, hostile.LIES[lie])
        for words in LIED_TO:
            done = stage.verb(*words)
            if "--json" in words and done.stdout:
                json.loads(done.stdout)
    finally:
        stage.inside(hostile.HONEST, ok=None)
        stage.verb("-q", "stop", ok=(0,))
    stage.assert_unchanged()


REPLACED = """
setsid python3 -I -c "$@" </dev/null >/tmp/replaced 2>&1 &
echo $! >/tmp/pid
until grep -q listens /tmp/replaced; do sleep 0.1; done
"""


@FULL
@pytest.mark.parametrize("reply", ["a text without an end", "single bytes"])
def test_another_program_replies_as_its_supervisor(stage: Stage, reply: str) -> None:
    """A migration fails in time and within its memory; the container stops and starts as before."""
    stage.verb("-q", "start", ok=(0,))
    data = (each.hex() for each in REPLIES[reply])
    stage.inside(REPLACED, PROGRAM, "/run/sms/supervisor.sock", *data)
    argv = ("sms", "-q", "migrate", "--force", "host-b")
    done = run_safely(stage.play.host("host-a"), *argv, ok=(1, 5), secret=CONTENT, memory_mb=300, timeout=300)
    assert b"the container's supervisor" in done.stderr
    stage.inside("kill $(cat /tmp/pid)")
    for verb in ("stop", "start", "stop"):
        stage.verb("-q", verb, ok=(0,))
    stage.assert_unchanged()


@FULL
@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_it_ends_itself_while_a_verb_works(stage: Stage, signal: str) -> None:
    """All its processes are killed, or stopped: verbs end as documented, and the next start serves."""
    stage.verb("-q", "start", ok=(0,))
    argv = [*stage.play.host("host-a").prefix, "sms", "exec", "--", "sh", "-c", f"sleep 1; kill -{signal} -1"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        stage.verb("-q", "overlay", "snapshot")
        stage.verb("status", "--json")
        stage.verb("migrate", "host-b", "-n")
        if signal == "STOP":  # else the stop kills it after the time that all services may take: minutes
            stage.inside("kill -CONT -1")
        stage.verb("-q", "stop", ok=(0,))
        process.wait(60)
    stage.verb("-q", "start", ok=(0,))
    stage.verb("-q", "stop", ok=(0,))
    stage.assert_unchanged()
