"""Master files are judged by what the running container and its users would lose, before the VM has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.errors import ConfigError, Refused
from appliance.operations.context import open_cluster
from appliance.operations.history import read_history
from appliance.operations.nodes.files import list_masters, push, put_master, read_content, roll_back
from appliance.operations.nodes.users import Source, SyncOptions, sync
from appliance.operations.services.pushes import Pushes
from appliance.operations.vm.client import open_api
from appliance.plan.machine import inside_argv
from appliance.plan.nodes.files import CONF, MUNGE_KEY, Master, account_master
from appliance.plan.services.effect import PRESENT
from appliance.progress import Silent
from tests.support.env import Reports, fake_env
from tests.support.fake import Fake
from tests.unit.nodes.conftest import Cluster

MANY = "".join(f"u{number}:x:{2000 + number}:100::/home/u:/bin/sh\n" for number in range(30))
ALICE = "alice:x:1500:100::/home/alice:/bin/sh\n"
JOB = "job 7|RUNNING|alice|batch|node1||||||||||||||||".replace("|", "\t") + "\nnow 1"
PROLOG = "/etc/slurm/prolog.sh"


class Container(Fake):
    """An admin host on which the services container runs with these files; ``off``: it does not."""

    def __init__(self) -> None:
        self.inside: dict[str, str] = {}
        self.off = False
        super().__init__({("apptainer", "instance", "list"): self.listed, ("cat", "--"): (1, "")}, name="host-a")

    def listed(self, argv: tuple[str, ...], _: object) -> tuple[int, str]:
        one = {"instance": argv[-1], "pid": 7, "img": "/image"}
        return 0, json.dumps({"instances": [] if self.off else [one]})


class Desk:
    """An administrator with the VM's real service, and a container whose host is simulated."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host, self.shown = folder, Container(), Reports()
        for name, text in (("passwd", MANY + ALICE), ("group", "users:x:3000:\n"), ("munge.key", "k" * 64)):
            self.write(name, text)
        self.change("accounts: {passwd: passwd, group: group}\nsecrets: {munge_key: munge.key}\n")
        self.open()
        inside = inside_argv(self.cluster.site, self.cluster.services)
        self.host.answers[(*inside, "cat", "--")] = self.cat
        self.host.answers[(*inside, *PRESENT)] = (0, JOB)
        self.host.off = True
        self.push()
        self.host.off = False
        self.apply()

    def cat(self, argv: tuple[str, ...], _: object) -> tuple[int, str]:
        return (0, self.host.inside[argv[-1]]) if argv[-1] in self.host.inside else (1, "")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def change(self, more: str) -> None:
        with (self.folder / "sms.yaml").open("a") as site:
            site.write(more)

    def open(self) -> None:
        opened = open_cluster(self.folder / "sms.yaml", None, Silent())
        hosts = dict.fromkeys([one.name for one in opened.site.admin_hosts], self.host)
        self.cluster = replace(opened, env=fake_env(hosts, progress=self.shown))
        self.api = open_api(self.cluster)

    def judge(self, *, force: bool = False) -> Pushes:
        return Pushes(self.cluster, self.api, "files push", force)

    def push(self, *, force: bool = False, dry_run: bool = False) -> dict[str, str]:
        self.open()
        done = push(self.cluster, self.api, self.judge(force=force), wait_s=0, dry_run=dry_run)
        return {one.path: one.what for one in done.differences if one.what != "same"}

    def apply(self) -> None:
        """As `sms apply` does, the container has what the VM has and the site file names."""
        for one in list_masters(self.api):
            data = self.stored(one["path"])
            self.host.inside[one["path"]] = data.decode()

    def stored(self, path: str) -> bytes:
        found = {one["path"]: one["sha256"] for one in list_masters(self.api)}
        return read_content(self.api, found[path]) or b""


@pytest.fixture
def desk(cluster: Cluster) -> Iterator[Desk]:
    yield Desk(cluster.folder)


def change_slurm(desk: Desk, old: str, new: str) -> None:
    path = desk.folder / "sms.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_changed_slurm_conf_waits_for_apply(desk: Desk) -> None:
    """Programs that it names go to nodes before it, and leave them after it."""
    desk.write("prolog.sh", "#!/bin/sh\n")
    change_slurm(desk, "slurm:", "slurm:\n  files: {prolog.sh: prolog.sh}\n  extra: [Prolog=/etc/slurm/prolog.sh]")
    before = desk.stored(CONF)
    assert desk.push() == {CONF: "held", PROLOG: "add"}
    assert desk.stored(CONF) == before != b""
    desk.host.inside[CONF] = before.decode() + f"Prolog={PROLOG}\nEpilog=/x\n"
    assert desk.push() == {CONF: "held"}, "another one than before, and not that of the site file"
    desk.host.off = True
    assert desk.push() == {CONF: "change"}, "nothing runs"
    desk.host.off = False
    desk.apply()
    change_slurm(desk, "\n  files: {prolog.sh: prolog.sh}\n  extra: [Prolog=/etc/slurm/prolog.sh]", "")
    assert desk.push() == {CONF: "held", PROLOG: "held"}
    desk.host.inside[CONF] = before.decode()
    assert desk.push() == {CONF: "change", PROLOG: "remove"}


def test_the_key_waits_for_apply_and_is_not_removed(desk: Desk) -> None:
    desk.write("munge.key", "n" * 64)
    assert desk.push() == {MUNGE_KEY: "held"}
    change_slurm(desk, "secrets: {munge_key: munge.key}\n", "")
    assert desk.push() == {MUNGE_KEY: "held"}


def test_what_does_not_answer_is_not_off(desk: Desk) -> None:
    desk.host.answers[("apptainer", "instance", "list")] = (1, "no route to host")
    desk.write("munge.key", "n" * 64)
    assert desk.push() == {MUNGE_KEY: "held"}


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (ALICE + MANY, False),
        (MANY + ALICE + "new:x:1501:100::/home/new:/bin/sh\n", False),
        (MANY, True),  # one of many, but she has a job
        ("", True),
        (ALICE + MANY[: len(MANY) // 2].rpartition("\n")[0] + "\n", True),
    ],
)
def test_accounts_that_a_push_would_take_away(desk: Desk, text: str, refused: bool) -> None:
    before = desk.stored("/etc/passwd")
    desk.write("passwd", text)
    if not refused:
        assert desk.push().get("/etc/passwd", "change") == "change"
        return
    with pytest.raises(Refused):
        desk.push()
    assert desk.stored("/etc/passwd") == before, "nothing is uploaded"
    assert desk.push(dry_run=True) == {"/etc/passwd": "change"}
    desk.push(force=True)
    assert desk.stored("/etc/passwd") == text.encode()
    assert "files push is forced" in desk.shown.lines[-1]
    assert [one["event"] for one in read_history(desk.cluster, desk.host)] == ["forced"]
    with pytest.raises(Refused):  # the container has them still
        put(desk, text)


def put(desk: Desk, text: str) -> None:
    masters = [account_master("/etc/passwd", text.encode())]
    desk.judge().judge(masters, list_masters(desk.api), dry_run=False)


def test_other_ways_to_the_same_accounts(desk: Desk) -> None:
    """A rollback, and a synchronisation, whose limit of 10 % is an option."""
    put_master(desk.api, account_master("/etc/passwd", b""))
    put_master(desk.api, account_master("/etc/passwd", (MANY + ALICE).encode()))
    desk.apply()
    with pytest.raises(Refused):
        roll_back(desk.api, desk.judge(), "/etc/passwd", None)
    assert desk.stored("/etc/passwd") == (MANY + ALICE).encode()
    assert roll_back(desk.api, desk.judge(force=True), "/etc/passwd", None)["size"] == 0
    put_master(desk.api, account_master("/etc/passwd", (MANY + ALICE).encode()))
    with pytest.raises(ConfigError):
        put(desk, "alice:x:1500\n")
    with pytest.raises(Refused):
        desk.judge().judge([Master("/etc/passwd", b"{{ x }}\n", template=True)], list_masters(desk.api), dry_run=False)
    group, half = "users:x:3000:\n", "\n".join((MANY + ALICE).split("\n")[10:])
    for text, most, refused in ((half, 50, False), (half, 10, True), (MANY, 50, True)):
        judge = replace(desk.judge(), most_removed=most)
        done = sync(desk.api, Source(text, group), Silent(), judge, SyncOptions(), dry_run=True)
        assert bool(done.refusal) is refused, done.refusal


@pytest.mark.parametrize("path", [CONF, MUNGE_KEY, "/etc/slurm/gres.conf", "/etc/slurm/topology.conf"])
def test_a_rollback_of_what_slurmctld_has(desk: Desk, path: str) -> None:
    with pytest.raises(Refused) as refused:
        roll_back(desk.api, desk.judge(force=True), path, None)
    assert "sms apply" in refused.value.hint
