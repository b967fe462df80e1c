"""`sms apply` with the real program of the container: runs that fail or are killed, and what services use then."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.catalog import read_catalog
from appliance.errors import Refused, RolledBack, SmsError
from appliance.host.base import Result
from appliance.operations.context import Cluster, runtime_files
from appliance.operations.image.deliver import Image
from appliance.operations.lease import QUERY
from appliance.operations.services import apply as module
from appliance.operations.services import restart
from appliance.plan.image.definition import runtime_digest
from appliance.plan.machine import PROBE, inside_argv
from appliance.plan.overlay.seed import Seed
from appliance.plan.services.network import running_network
from appliance.share import share
from appliance.tools.apptainer import Instance
from appliance.tools.scripts import script_argv
from tests.pairs import Pair
from tests.sites import open_debian
from tests.support.env import fake_env
from tests.support.fake import Answer, Fake
from tests.support.instances import LIST, lists
from tests.unit.services.conftest import needs_root, run_program

CATALOG = {one.name: one for one in read_catalog(share("definitions", "services")).values() if one.container}
FILES = {"rsyslog": "/etc/rsyslog.conf", "chrony": "/etc/chrony/sms.conf"}


FIND_REBUILD = module._Apply._find_rebuild


class Killed(BaseException):
    """The run ends here."""


def answer(text: str) -> Result:
    return Result("host-a", ("program",), 0, text.encode(), b"")


@dataclass
class World:
    """A container: its files are those below ``root``; a restart reads that of the service.

    ``used``: what each service has read. ``faulty``: services that do not answer after their next restart; ``silent``:
    those that do not answer now. ``killed``: the run ends before, or with ``after``, this command of sms-apply.
    ``rebuild``: settings of which the image was not built. ``links``: what ``collect-links`` prints.
    """

    root: Path
    cluster: Cluster
    seeds: list[Seed] = field(default_factory=list)
    used: dict[str, bytes] = field(default_factory=dict)
    faulty: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    killed: tuple[str, ...] = ()
    after: bool = False
    rebuild: tuple[str, ...] = ()
    links: str = ""

    def run(self, *words: str, input: bytes | None = None, **_: Any) -> Any:
        if "running-network" in words:
            return answer("\n".join(" ".join(one) for one in running_network(self.cluster.site).items()))
        if "restart-service" in words:
            return answer(self.restart(words[-1]))
        if words[0] == PROBE:
            shown = {"name": words[-1], "ok": words[-1] not in self.silent, "detail": "", "ms": 1.0}
            return answer(json.dumps(shown))
        if words[0] != module.APPLY:
            return answer("")  # a reload
        words = words[1:]
        short = words[:1] if words[0] in ("write", "undo") else words
        if short == self.killed and not self.after:
            raise Killed
        done = run_program("sms-apply", self.root, *words, input=input or b"")
        assert not done.returncode, done.stderr
        if short == self.killed:
            raise Killed
        return answer(done.stdout.decode())

    def restart(self, name: str) -> str:
        self.used[name] = self.path(name).read_bytes()
        self.silent = self.silent - {name} | self.faulty & {name}
        self.faulty.discard(name)
        return "7 8"  # the process of before, and the new one

    def path(self, service: str) -> Path:
        return self.root / FILES[service].lstrip("/")

    def files(self) -> dict[str, bytes]:
        return {name: self.path(name).read_bytes() for name in FILES}

    def apply(self, rsyslog: bytes, chrony: bytes, *, killed: tuple[str, ...] = (), after: bool = False) -> Any:
        """Apply a site file with these two; ends as the run does."""
        data = {"rsyslog": rsyslog, "chrony": chrony}
        self.seeds = [Seed(FILES[name], data[name], owner="root", group="root", mode=0o644) for name in FILES]
        self.killed, self.after = killed, after
        return module.apply(self.cluster, Container(self), wait_s=1)[0]


class Container(Fake):
    """The host on which the container runs; its image is of this version of sms, or ``runtime``."""

    def __init__(self, world: World, runtime: str = "") -> None:
        labels = {"sms.runtime": runtime or runtime_digest(runtime_files())}
        answers: dict[tuple[str, ...], Answer] = {
            LIST: lists([Instance("sms-sample", 1, "image")]),
            ("sh", "-c", QUERY): (0, "1 none\n"),
            script_argv("image-metadata"): (0, json.dumps({"data": {"attributes": {"labels": labels}}})),
            ("readlink",): (0, "image"),
            ("stat", "-L"): (0, str(2048 << 20)),
            ("ip",): (0, "[]"),
            ("nsenter",): (0, "[]"),
            script_argv("collect-links", "1"): lambda *_: (0, world.links),
        }
        super().__init__(answers, name="host-a")
        self.world = world
        self.inside = inside_argv(world.cluster.site, world.cluster.services)

    def run(self, *argv: str, input: bytes | None = None, **options: Any) -> Result:
        if argv[: len(self.inside)] != self.inside:
            return super().run(*argv, input=input, **options)
        done: Result = self.world.run(*argv[len(self.inside) :], input=input)
        return done


def catalogue() -> Cluster:
    """A cluster of one host with all services."""
    opened = open_debian()
    admins = [opened.site.admin_hosts[0].model_copy(update={"name": "host-a"})]
    site = opened.site.model_copy(update={"admin_hosts": admins})
    return Cluster(site, tuple(CATALOG.values()), opened.base, env=fake_env())


@pytest.fixture
def world(root: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(root, catalogue())
    monkeypatch.setattr(module._Apply, "_find_image", lambda *_: (Image("image", "k", "s", "signer"), []))
    monkeypatch.setattr(module._Apply, "_find_rebuild", lambda *_: made.rebuild)
    monkeypatch.setattr(module, "seeds_for", lambda _: made.seeds)
    made.apply(b"1\n", b"1\n")
    assert made.files() == made.used == {"rsyslog": b"1\n", "chrony": b"1\n"}
    return made


def left(world: World) -> list[str]:
    return [path.name for path in (world.root / "run/sms").glob("apply*")]


@needs_root
@pytest.mark.parametrize(
    ("container", "port", "set_on"), [(1500, 1500, 2), (1500, 9000, 2), (9000, 1500, 2), (9000, 9000, 0)]
)
def test_an_mtu_is_set_while_all_runs(world: World, container: int, port: int, set_on: int) -> None:
    """Also if only the port has another one, which the status says, too."""
    link: dict[str, Any] = {"flags": ["UP", "LOWER_UP"], "mtu": 9000}
    veth = {**link, "linkinfo": {"info_kind": "veth"}}
    parts = {
        "host": [
            {**link, "ifname": "br-prov", "ifindex": 4, "linkinfo": {"info_kind": "bridge"}},
            {**link, "ifname": "ens1", "ifindex": 5, "master": "br-prov"},
            {**veth, "ifname": "veth7", "ifindex": 7, "link_index": 2, "master": "br-prov", "mtu": port},
        ],
        "inside": [{**veth, "ifname": "eth0", "ifindex": 2, "link_index": 7, "mtu": container}],
        "neighbours": [],
        "routes": [],
    }
    world.links = "".join(f"{name} {json.dumps(value)}\n" for name, value in parts.items())
    host = Container(world)
    done = module.apply(world.cluster, host, wait_s=1)[0]
    assert done.mtus == ({"eth0": 9000} if set_on else {}) and done.current is not bool(set_on)
    changes = [argv for argv in host.asked if argv[-5:-1] == ("set", "mtu", "9000", "dev")]
    assert [(argv[0], argv[-1]) for argv in changes] == [("ip", "veth7"), ("nsenter", "eth0")][:set_on]


@needs_root
def test_a_failure_restores_the_files_of_before(world: World) -> None:
    world.faulty = {"rsyslog"}
    with pytest.raises(RolledBack):
        world.apply(b"2\n", b"2\n")
    assert world.files() == world.used == {"rsyslog": b"1\n", "chrony": b"1\n"} and left(world) == []


@needs_root
@pytest.mark.parametrize("current", [True, False])
def test_a_run_that_was_killed_at_its_end_is_what_the_next_one_restores(world: World, *, current: bool) -> None:
    """``current``: a run in between finds nothing to do."""
    with pytest.raises(Killed):
        world.apply(b"2\n", b"1\n", killed=("finish",))
    if current:
        assert world.apply(b"2\n", b"1\n").current and left(world) == []
    world.faulty = {"chrony"}
    with pytest.raises(RolledBack):
        world.apply(b"2\n", b"2\n")
    assert world.files() == world.used == {"rsyslog": b"2\n", "chrony": b"1\n"} and left(world) == []


@needs_root
def test_a_failure_restores_what_a_killed_run_had_finished(world: World) -> None:
    order = [name for name in CATALOG if name in FILES]
    with pytest.raises(Killed):
        world.apply(b"2\n", b"2\n", killed=("done", order[1]))
    assert world.used == {"rsyslog": b"2\n", "chrony": b"2\n"}
    world.faulty = {order[1]}
    with pytest.raises(RolledBack):
        world.apply(b"2\n", b"2\n")
    assert world.files() == world.used == {"rsyslog": b"1\n", "chrony": b"1\n"} and left(world) == []


@needs_root
@pytest.mark.parametrize("after", [False, True])
def test_the_site_file_of_before_after_a_rollback_that_was_killed(world: World, *, after: bool) -> None:
    world.faulty = {"chrony"}
    with pytest.raises(Killed):
        world.apply(b"2\n", b"2\n", killed=("undo",), after=after)
    assert not world.apply(b"1\n", b"1\n").current
    assert world.files() == world.used == {"rsyslog": b"1\n", "chrony": b"1\n"} and left(world) == []
    assert world.apply(b"1\n", b"1\n").current


@needs_root
def test_settings_that_need_another_image(world: World) -> None:
    """They are reported; everything else is applied, once."""
    settings = ("packages (+socat)", "slurm.user")
    world.rebuild = settings
    done = world.apply(b"1\n", b"1\n")
    assert (done.current, done.rebuild, done.steps, done.switch, left(world)) == (False, settings, [], (), [])
    done = world.apply(b"2\n", b"1\n")
    assert done.rebuild == settings and world.used == {"rsyslog": b"2\n", "chrony": b"1\n"} and left(world) == []


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_an_invalid_description_of_the_image(text: str) -> None:
    host: Any = SimpleNamespace(run=lambda *_, **__: answer(text))
    work = object.__new__(module._Apply)
    cluster: Any = SimpleNamespace(site=SimpleNamespace(cluster="lab"), services=(), base=None)
    work.cluster, work.host = cluster, host
    with pytest.raises(SmsError, match="manifest is invalid"):
        FIND_REBUILD(work)


STEPS: dict[str, Callable[[World], tuple[str, ...]]] = {
    "write": lambda _: ("write",),
    "first done": lambda _: ("done", "rsyslog"),
    "second done": lambda _: ("done", "chrony"),
    "finish": lambda _: ("finish",),
}


@needs_root
@pytest.mark.full
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fails", [False, True])
def test_services_use_the_files_that_are_there(world: World, step: str, *, after: bool, fails: bool) -> None:
    """Killed anywhere; the next run has another site file, and succeeds or fails."""
    with pytest.raises(Killed):
        world.apply(b"2\n", b"2\n", killed=STEPS[step](world), after=after)
    complete = step == "finish" or (after and left(world) and not json.loads(pending(world)))
    if fails:
        world.faulty = {"chrony"}
        with pytest.raises(RolledBack):
            world.apply(b"2\n", b"3\n")
        version = b"2\n" if complete else b"1\n"
        assert world.files() == {"rsyslog": version, "chrony": version}
    else:
        world.apply(b"2\n", b"3\n")
        assert world.files() == {"rsyslog": b"2\n", "chrony": b"3\n"}
    assert world.files() == world.used and left(world) == []


def pending(world: World) -> bytes:
    return (world.root / "run/sms/apply.pending").read_bytes()


# What a hostile container answers

ANSWERS = [
    "",
    "no JSON",
    "[" * 100_000,
    "[]",
    "{}",
    '{"ok": true}',
    '{"ok": 1, "detail": ""}',
    '{"ok": true, "detail": 3}',
]
COMPARED = [
    "",
    "[]",
    "{}",
    '{"pending": 1, "changed": [], "mark": "", "left": ""}',
    '{"pending": {"chrony": []}, "changed": [], "mark": "", "left": ""}',
    '{"pending": {}, "changed": 3, "mark": "", "left": ""}',
    '{"pending": {}, "changed": [1], "mark": "", "left": ""}',
    '{"pending": {}, "changed": [{"path": "/etc/shadow", "edited": false, "text": ""}], "mark": "", "left": ""}',
]


@pytest.mark.parametrize("text", ANSWERS)
def test_an_invalid_answer_of_a_probe(text: str) -> None:
    with pytest.raises(SmsError, match="printed"):
        restart.wait_for_answer(catalogue(), Fake({(): (0, text)}), CATALOG["chrony"], 1)


@needs_root
@pytest.mark.parametrize("text", COMPARED)
def test_an_invalid_comparison(world: World, text: str) -> None:
    world.run = lambda *_, **__: answer(text)  # type: ignore[method-assign]
    with pytest.raises(SmsError) as caught:
        world.apply(b"2\n", b"2\n")
    assert not isinstance(caught.value, Refused)


@needs_root
def test_an_image_whose_apply_is_older_is_refused(world: World) -> None:
    """One that has no field ``left`` is from before rollbacks: the hint is an upgrade, no start of the same image."""
    text = '{"pending": {}, "changed": [], "mark": ""}'
    world.run = lambda *_, **__: answer(text)  # type: ignore[method-assign]
    with pytest.raises(Refused) as caught:
        module.apply(world.cluster, Container(world, "an older one"), wait_s=1)
    assert "sms upgrade" in caught.value.hint


@needs_root
@pytest.mark.parametrize("command", ["write", "done"])
def test_an_invalid_answer_leads_to_a_rollback(world: World, command: str) -> None:
    real, answered = world.run, list[str]()

    def run(*words: str, **options: Any) -> Any:
        done = real(*words, **options)
        if command in words and not answered:
            answered.append(command)
            return answer("[1]")
        return done

    world.run = run  # type: ignore[method-assign]
    with pytest.raises(RolledBack):
        world.apply(b"2\n", b"2\n")
    assert world.files() == world.used == {"rsyslog": b"1\n", "chrony": b"1\n"} and left(world) == []


# Another host has taken over


def test_it_is_refused_once_another_host_has_taken_over(tmp_path: Path) -> None:
    """Its own lease file does not have it yet."""
    pair = Pair(tmp_path, shared=False)
    pair.take("host-a")
    host = pair.hosts["host-a"]
    host.instances.append(Instance("sms-sample", 1, "image"))
    for silent in (False, True):
        pair.hosts["host-b"].cut = silent
        assert restart.plan_restart(pair.cluster, host, ["postfix"])[0].service == "postfix"
    pair.hosts["host-b"].cut = False
    pair.leases("host-b", without=("host-a",)).take(generation_bump=1000)
    assert pair.files()["host-a"][0] == "host-a"
    with pytest.raises(Refused, match="host-b holds the lease"):
        restart.plan_restart(pair.cluster, host, ["postfix"])
    with pytest.raises(Refused, match="host-b holds the lease"):
        list(restart.restart(pair.cluster, host, ["postfix"], wait_s=1))
    with pytest.raises(Refused, match="host-b holds the lease"):
        module.plan_apply(pair.cluster, host)
