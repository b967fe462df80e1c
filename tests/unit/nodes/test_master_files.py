"""Master files in the VM's service: versions, templates, tokens; comparison of the site's files with the VM's."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sqlalchemy as sa

from appliance.cli.nodes.files_list import rows
from appliance.config.read import read_site_text
from appliance.errors import ConfigError, SmsError
from appliance.operations.nodes.files import MasterOptions, PushResult, make_master, offline_before
from appliance.operations.site.init import read_profile
from appliance.plan.nodes.files import (
    FORBIDDEN,
    Master,
    compare_masters,
    desired_masters,
    forbidden_at,
    named_paths,
    unknown_names,
)
from appliance.plan.overlay.seed import Seed
from appliance.provision.blobs import Blobs
from appliance.provision.config import Config
from appliance.provision.files import VERSIONS_KEPT, Client, Files
from appliance.provision.payloads import FileReports, FileVersion, MasterFile
from appliance.provision.problem import HttpProblem
from appliance.provision.store import Store
from appliance.provision.sync_tables import Node
from appliance.provision.tokens import RateLimit, Tokens
from tests.places import ROOT
from tests.provisioning import Vm

NODE = Client(Node("node1", "10.77.0.101", ("gpu",)))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    store = Store(f"sqlite:///{tmp_path}/inventory.db")
    Vm.add_node(SimpleNamespace(database=f"sqlite:///{tmp_path}/inventory.db"), "node1", "10.77.0.101", ("gpu",))  # type: ignore[arg-type]
    config = Config(address="10.77.0.2", cluster="test", services_address="10.77.0.1", services_hostname="sms-services")
    yield Files(store, config, Blobs(tmp_path / "files", reserve_b=0))
    store.close()


async def blocks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def put(files: Files, path: str, data: bytes, **details: Any) -> FileVersion:
    digest = hashlib.sha256(data).hexdigest()
    asyncio.run(files.blobs.store(digest, len(data), blocks(data)))
    return files.put(path, cast("MasterFile", {"sha256": digest, **details}))


def seen(files: Files, client: Client = NODE) -> dict[str, str]:
    with files.store.read() as connection:
        view = files.view(connection, client)
        found = {entry["path"]: files.content(connection, client, entry["sha256"]).decode() for entry in view.entries}
        return {**found, **dict.fromkeys(view.held, "held")}


def test_versions_of_version_519381b(files: Files) -> None:
    """As that version stored them."""
    digest = hashlib.sha256(b"x").hexdigest()
    details = (
        '{"mode": "0600", "owner": "munge", "group": "munge", "template": false, "nodes": ["node1"], "groups": [], '
        '"services": true, "origin": "site"}'
    )
    with files.store.write() as connection:
        row = {"path": "/etc/motd", "version": 3, "sha256": digest, "size": 1, "details": details, "made": 5.5}
        names = ", ".join(row)
        values = ", ".join(f":{name}" for name in row)
        connection.execute(sa.text(f"INSERT INTO master_versions ({names}) VALUES ({values})"), row)
        connection.execute(sa.text("INSERT INTO masters (path, version) VALUES ('/etc/motd', 3)"))
        connection.execute(sa.text("UPDATE counters SET value = value + 1 WHERE name = 'files'"))
    shown = {"path": "/etc/motd", "version": 3, "sha256": digest, "size": 1, "made": 5.5, **json.loads(details)}
    assert files.show("/etc/motd") == {"path": "/etc/motd", "current": 3, "versions": [shown]}
    spec = {key: shown[key] for key in ("mode", "owner", "group", "nodes", "services", "origin")}
    put(files, "/etc/motd", b"x", **spec)
    put(files, "/etc/motd", b"y", **spec)
    with files.store.read() as connection:
        stored = connection.execute(sa.text("SELECT details FROM master_versions")).scalars().all()
    assert stored == [details, details]


def test_versions_are_kept_and_rolled_back(files: Files) -> None:
    for number in range(8):
        put(files, "/etc/motd", b"%d" % number)
    assert put(files, "/etc/motd", b"7")["changed"] is False
    shown = files.show("/etc/motd")
    assert shown["current"] == 8
    assert [each["version"] for each in shown["versions"]] == [8, 7, 6, 5, 4][:VERSIONS_KEPT]
    assert files.roll_back("/etc/motd")["version"] == 7
    assert files.roll_back("/etc/motd")["version"] == 6
    assert seen(files) == {"/etc/motd": "5"}
    files.remove("/etc/motd")
    assert seen(files) == {}
    assert files.roll_back("/etc/motd")["version"] == 8
    assert put(files, "/etc/motd", b"new")["version"] == 9
    assert files.roll_back("/etc/motd", 6)["version"] == 6
    for version in (1, 99):
        with pytest.raises(HttpProblem, match="no such older version"):
            files.roll_back("/etc/motd", version)
    with pytest.raises(HttpProblem, match="there is no master file"):
        files.roll_back("/etc/nothing")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ node.nmae }}", "nmae"),
        ("{% for %}", "line 1"),
        ("{{ node.__class__.__mro__ }}", "unsafe"),
        ("{% for x in range(999999999) %}x{% endfor %}", "Range too big"),
        ("{{ 'x' * 9999999 }}", "too large"),
        ("{{ 1 / 0 }}", "division"),
        ("{% include '/etc/shadow' %}", "no loader"),
    ],
)
def test_a_failing_template_is_rejected(files: Files, text: str, words: str) -> None:
    put(files, "/etc/motd", b"good")
    with pytest.raises(HttpProblem, match=words):
        put(files, "/etc/motd", text.encode(), template=True)
    assert seen(files) == {"/etc/motd": "good"}


def test_a_template_that_fails_for_a_later_node_is_held_back(files: Files) -> None:
    put(
        files,
        "/etc/motd",
        b"{{ [1][node.groups.index('gpu')] }}{{ node.name }}",
        template=True,
        nodes=["node1", "node2"],
    )
    assert seen(files) == {"/etc/motd": "1node1"}
    assert seen(files, Client(Node("node2", "10.77.0.102", ()))) == {"/etc/motd": "held"}


def test_which_clients_get_which_files(files: Files) -> None:
    put(files, "/a", b"all")
    put(files, "/b", b"gpu", groups=["gpu"])
    put(files, "/c", b"named", nodes=["node2"])
    put(files, "/d", b"both", nodes=["node2"], groups=["gpu"], services=True)
    assert set(seen(files)) == {"/a", "/b", "/d"}
    assert set(seen(files, Client(Node("node2", "", ())))) == {"/a", "/c", "/d"}
    assert set(seen(files, Client(Node("sms-services", "", ()), services=True))) == {"/d"}
    with pytest.raises(HttpProblem, match="cannot both be files"):
        put(files, "/a/below", b"x")


def test_incomplete_or_wrong_uploads_are_discarded(files: Files) -> None:
    digest = hashlib.sha256(b"whole").hexdigest()
    for parts in ([b"who"], [b"whole", b"more"], [b"other"]):
        with pytest.raises(HttpProblem):
            asyncio.run(files.blobs.store(digest, 5, blocks(*parts)))
    assert files.blobs.read(digest) is None
    assert [path for path in files.blobs.folder.rglob("*") if path.is_file()] == []
    with pytest.raises(HttpProblem, match="the content is missing"):
        files.put("/etc/motd", {"sha256": digest})
    put(files, "/etc/motd", b"whole")
    files.blobs.path(digest).write_bytes(b"damaged")
    with pytest.raises(HttpProblem, match="missing or damaged"):
        seen(files)


def test_a_rollback_cannot_turn_a_folder_into_a_file(files: Files) -> None:
    put(files, "/etc/a", b"file")
    files.remove("/etc/a")
    put(files, "/etc/a/b", b"below")
    with pytest.raises(HttpProblem, match="cannot both be files"):
        files.roll_back("/etc/a")
    assert seen(files) == {"/etc/a/b": "below"}


def test_concurrent_changes_do_not_leave_a_stale_cache(files: Files) -> None:
    """A view of an older state is never cached as that of a newer one."""
    changed: list[int] = []

    def change() -> None:
        put(files, "/etc/motd", b"new")
        with files.store.read() as connection:
            changed.append(len(files.masters(connection)))

    class Slow(Files):
        def _current(self, connection: Any) -> Any:
            found = super()._current(connection)
            if not changed:
                files._masters, files._views = self._masters, self._views
                thread = Thread(target=change)
                thread.start()
                thread.join()
                self._masters = files._masters
            return found

    put(files, "/etc/motd", b"old")
    slow = Slow(files.store, files.config, files.blobs)
    with files.store.read() as connection:
        slow.view(connection, NODE)
    assert changed and seen(slow) == {"/etc/motd": "new"}


def test_tokens_are_valid_once_from_one_address(files: Files) -> None:
    now = [1000.0]
    tokens = Tokens(files.store, token_s=600, clock=lambda: now[0])
    first, second = tokens.make("node1"), tokens.make("node1")
    assert tokens.use(first, "10.77.0.101") == "", "a newer one has made it void"
    assert tokens.use(second, "10.77.0.102") == ""
    assert tokens.use(second + "\n", "10.77.0.101") == ""
    assert tokens.use(second, "10.77.0.101") == "node1"
    assert tokens.use(second, "10.77.0.101") == ""
    late = tokens.make("node1")
    now[0] += 601
    assert tokens.use(late, "10.77.0.101") == ""
    with pytest.raises(SmsError, match="no node"):
        tokens.make("node9")


def test_attempts_per_address_are_limited() -> None:
    now = [0.0]
    bound = RateLimit(attempts=3, period_s=60, clock=lambda: now[0])
    assert [bound.wait_s("a") for _ in range(4)] == [0, 0, 0, 61]
    assert bound.wait_s("b") == 0
    now[0] += 61
    assert bound.wait_s("a") == 0
    for number in range(10000):
        bound.wait_s(str(number))
    assert len(bound.seen) <= 4096


def test_master_files_of_a_site(tmp_path: Path) -> None:
    text = read_profile("lab") + (
        'provisioning:\n  address: 10.77.0.2/24\n  mac: "02:00:0a:4d:00:02"\n'
        '  files:\n    - {path: /etc/x, source: x, mode: "600", groups: [gpu]}\n'
        "    - {path: /etc/munge/munge.key, source: y}\n"
    )
    site, _ = read_site_text(text, "sms.yaml", folder=tmp_path)
    given = {"passwd": b"p", "shadow": b"s", "munge_key": b"m", "/etc/x": b"x", "/etc/munge/munge.key": b"own"}
    seeds = [Seed("/etc/slurm/slurm.conf", b"conf"), Seed("/etc/other", b"other")]
    found = {each.path: each for each in desired_masters(site, given, seeds)}
    assert list(found) == [
        "/etc/munge/munge.key",
        "/etc/passwd",
        "/etc/shadow",
        "/etc/slurm/slurm.conf",
        "/etc/x",
    ]
    assert found["/etc/munge/munge.key"].data == b"own", "explicit files override implicit ones"
    assert (found["/etc/x"].mode, found["/etc/x"].groups, found["/etc/x"].secret) == ("0600", ("gpu",), True)
    assert (found["/etc/shadow"].mode, found["/etc/shadow"].services) == ("0640", True)
    assert named_paths(site, ()) == {"/etc/munge/munge.key", "/etc/x"}
    assert "conf" not in repr(found["/etc/slurm/slurm.conf"]).replace("slurm.conf", "")


def test_compare_masters() -> None:
    same, changed, new = Master("/a", b"a"), Master("/b", b"b", services=True), Master("/c", b"c")
    users = Master("/etc/passwd", b"site's")

    def there(master: Master, **other: Any) -> dict[str, Any]:
        return {"path": master.path, "version": 1, "size": 1, "made": 0, **master.as_body(), **other}

    now = [
        there(same),
        there(changed, services=False),
        there(users, origin="users", sha256="0" * 64),
        there(Master("/gone", b"")),
        there(Master("/by-hand", b"", origin="admin")),
    ]
    desired = [same, changed, new, users]
    assert {one.path: (one.what, one.why) for one in compare_masters(desired, now)} == {
        "/a": ("same", ""),
        "/b": ("change", "services"),
        "/c": ("add", "1 bytes"),
        "/etc/passwd": ("held", "comes from `sms user sync`; --accounts replaces it"),
        "/gone": ("remove", "no longer in the site file"),
    }
    replaced = {one.path: one.what for one in compare_masters(desired, now, accounts=True)}
    assert replaced["/etc/passwd"] == "change"
    assert PushResult(compare_masters(desired, now)).summary() == (
        "5 files: 2 uploaded, 1 removed, 1 skipped, 1 unchanged"
    )
    assert PushResult(compare_masters([same], now[:1])).summary() == "all 1 files are up to date, nothing changed"


def test_options_that_are_not_given_keep_their_values() -> None:
    before: Any = {
        "version": 3,
        "mode": "0600",
        "owner": "munge",
        "group": "munge",
        "nodes": ["a"],
        "groups": [],
        "x": 1,
    }
    options = MasterOptions(services=True)
    master = make_master("/etc/x", b"new", options, before | {"template": True, "services": False})
    assert (master.mode, master.owner, master.nodes, master.template, master.services) == (
        *("0600", "munge", ("a",)),
        *(True, True),
    )
    new = make_master("/etc/x", b"new", options, None)
    assert (new.mode, new.owner, new.nodes, new.template) == ("0644", "root", (), False)
    everywhere = make_master("/etc/x", b"new", MasterOptions(nodes=[], groups=[]), before)
    assert (everywhere.nodes, everywhere.mode) == ((), "0600")


@pytest.mark.parametrize("path", ["/proc/x", "/etc/sms/tls/ca.pem", "/run", "/etc//sms/x", "/etc/x/../sms/y", "etc/x"])
def test_forbidden_paths(path: str) -> None:
    with pytest.raises(ConfigError):
        make_master(path, b"", MasterOptions(), None)


def test_nodes_forbid_the_same_paths() -> None:
    text = (ROOT / "definitions" / "runtime" / "smskept.py").read_text()
    there: dict[str, Any] = {}
    exec("\n".join(line for line in text.splitlines() if line.startswith(("GOOD", "RECORD", "FORBIDDEN"))), there)
    assert set(there["FORBIDDEN"]) == set(FORBIDDEN)
    assert forbidden_at("/etc/smsx") == ""


def test_unknown_nodes_and_groups() -> None:
    master = Master("/x", b"", nodes=("a", "b"), groups=("gpu", "cpu"))
    assert unknown_names(master, [{"name": "a", "groups": ["gpu"]}]) == ("b", "@cpu")


def test_the_list_has_one_line_per_file() -> None:
    path = "/etc/" + "x" * 200
    body = {**Master(path, b"", nodes=("a1", "a2")).as_body(), "path": path, "version": 1, "size": 2, "made": 0.0}
    head, line = rows([body])
    assert line.startswith(f"{path}  1  2 B   0644 root:root  19")
    assert line.endswith("  a[1-2]")
    assert head.endswith("for")


@pytest.mark.parametrize(
    ("answer", "old"),
    [
        ({"began": 0, "heard": None}, 900),  # it has run for long
        ({"began": 990, "heard": 700}, 600),  # it was off for nearly 300 s, without any contact
        ({"began": 990, "heard": None}, 890),  # no contact before
        ({}, 900),  # answer of an older image
    ],
)
def test_offline_before(answer: dict[str, Any], old: float) -> None:
    assert offline_before(cast("FileReports", {"now": 1000, **answer}), 100) == old


def test_last_contact_survives_a_restart_of_the_service(files: Files) -> None:
    with files.store.write() as connection:
        files.report(connection, NODE, {"push": 1, "files": [], "failed": {}})
    after = Files(files.store, files.config, files.blobs)
    with files.store.read() as connection:
        assert files.reports(connection)["heard"] is None
        answer = after.reports(connection)
        assert answer["heard"] == next(each["at"] for each in answer["clients"] if each["client"] == "node1")


def test_slurm_files_that_nodes_do_not_fetch_from_the_controller(tmp_path: Path) -> None:
    """Programs, and no configuration file."""
    text = read_profile("lab") + 'provisioning:\n  address: 10.77.0.2/24\n  mac: "02:00:0a:4d:00:02"\n'
    site, _ = read_site_text(text, "sms.yaml", folder=tmp_path)
    names = ("gres.conf", "job_submit.lua", "prolog.sh", "task.sh", "words")
    slurm = site.slurm.model_copy(
        update={
            "files": {name: tmp_path / name for name in names},
        }
    )
    site = site.model_copy(update={"slurm": slurm})
    given = {f"/etc/slurm/{name}": b"#!/bin/sh\n" if name.endswith(".sh") else b"a" for name in names}
    found = {each.path: each for each in desired_masters(site, given, [])}
    modes = {path: each.mode for path, each in found.items()}
    assert modes == {
        "/etc/slurm/prolog.sh": "0755",
        "/etc/slurm/task.sh": "0755",
        "/etc/slurm/words": "0644",
    }
    assert set(found) <= named_paths(site, ())
