"""The database under the provisioning VM's service: versions, transactions, and what happens when it fails."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.operations import Operations

from appliance.errors import Refused, SmsError
from appliance.provision import migrations, tables
from appliance.provision.model import Boot, Component, Endpoint, Group, Interface, Inventory
from appliance.provision.problem import HttpProblem
from appliance.provision.store import Store
from appliance.provision.world import World
from tests.conftest import find_tool
from tests.places import ROOT
from tests.provd import find_postgresql, make_config, postgresql, running

Need = Callable[[str], str]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    programs = find_postgresql()
    if programs is None:
        find_tool("initdb")
        return
    with postgresql(programs) as url:
        yield url


def admin_engine(pattern: str) -> sa.engine.Engine:
    url = pattern.format("template1").replace("postgresql:", "postgresql+psycopg2:")
    return sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/inventory.db"
    pattern = str(request.getfixturevalue("server"))
    name = f"t{abs(hash(request.node.name))}"
    engine = admin_engine(pattern)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine.dispose()
    return pattern.format(name)


@pytest.fixture
def world(url: str, tmp_path: Path) -> Iterator[World]:
    made = World(make_config(tmp_path, database=url))
    yield made
    made.store.close()


def test_a_commit_is_on_the_disk(tmp_path: Path) -> None:
    """Not with synchronous=NORMAL: a power failure takes the last commits away, and a used token is valid again."""
    store = Store(f"sqlite:///{tmp_path}/inventory.db")
    with store.read() as reader, store.write() as writer:
        for connection in (reader, writer):
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    store.close()


FULL = Inventory(
    components={
        "x1000c0s0b0": Component("x1000c0s0b0", type="NodeBMC", role="", arch="Other"),
        "x1000c0s0b0n0": Component(
            "x1000c0s0b0n0",
            name="n1",
            xname="x1000c0s0b0n0",
            nid=1,
            address="10.77.0.151",
            details={"firmware": ["1.2", {"é": None}]},
        ),
        "n2": Component("n2", name="n2", enabled=False),
    },
    interfaces={
        "02:00:0a:4d:00:97": Interface("02:00:0a:4d:00:97", "x1000c0s0b0n0", 0, "first", (("192.0.2.1", "HSN"),), 5.0),
        "02:00:0a:4d:00:98": Interface("02:00:0a:4d:00:98", changed=6.0),
    },
    groups={"compute": Group("compute", "all", "kind", ("a", "b"), ("n2", "x1000c0s0b0n0"))},
    endpoints={"x1000c0s0b0": Endpoint("x1000c0s0b0", fqdn="b0.example.org", details={"UUID": "1"})},
    boot={("host", "Default"): Boot("host", "Default", "http://k", "", "a=b", {"user-data": {"x": 1}})},
)


def test_load_returns_what_was_saved_and_only_differences_are_written(world: World) -> None:
    with world.store.write() as connection:
        tables.save(connection, Inventory(), FULL)
    with world.store.read() as connection:
        back = tables.load(connection)
    assert back.components == FULL.components
    assert back.groups == FULL.groups and back.endpoints == FULL.endpoints and back.boot == FULL.boot
    assert back.interfaces["02:00:0a:4d:00:97"].addresses == (("192.0.2.1", "HSN"),)
    with world.store.write() as connection:
        statements: list[str] = []
        sa.event.listen(connection, "before_cursor_execute", lambda *words: statements.append(words[2]))
        tables.save(connection, back, back)
    assert statements == []


def test_transactions_are_atomic(world: World) -> None:
    with pytest.raises(RuntimeError), world.store.write() as connection:
        tables.save(connection, Inventory(), FULL)
        raise RuntimeError("the power is gone")
    with world.store.read() as connection:
        assert tables.load(connection) == Inventory()


def test_the_database_enforces_unique_values(world: World) -> None:
    with world.store.write() as connection:
        tables.save(connection, Inventory(), FULL)
    with pytest.raises(HttpProblem) as caught, world.store.write() as connection:
        thief = Component("thief", name="thief", address="10.77.0.151")
        tables.save(connection, Inventory(), Inventory(components={"thief": thief}))
    assert caught.value.status == 409


@pytest.mark.slow
def test_writers_wait_for_each_other(url: str, tmp_path: Path) -> None:
    """Two processes increment one number, a hundred times each."""
    script = """if True:
        import sqlalchemy as sa, sys
        from appliance.provision.store import Store
        store = Store(sys.argv[1], busy_s=60)
        for _ in range(100):
            with store.write() as connection:
                seen = connection.execute(sa.text("SELECT description FROM groups WHERE label='n'")).scalar()
                update = sa.text("UPDATE groups SET description=:d WHERE label='n'")
                connection.execute(update, {"d": str(int(seen) + 1)})
    """
    store = Store(url)
    with store.write() as connection:
        tables.save(connection, Inventory(), Inventory(groups={"n": Group("n", "0")}))
    running_ones = [subprocess.Popen([sys.executable, "-c", script, url], cwd=ROOT) for _ in range(2)]
    assert [one.wait(timeout=120) for one in running_ones] == [0, 0]
    with store.read() as connection:
        assert tables.load(connection).groups["n"].description == "200"
    store.close()


@pytest.mark.slow
def test_two_that_start_at_once_make_one_schema(url: str) -> None:
    script = "import sys; from appliance.provision.store import Store; print(Store(sys.argv[1], busy_s=60).version)"
    argv = [sys.executable, "-c", script, url]
    ones = [subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    outputs = [one.communicate(timeout=120) for one in ones]
    assert {out.strip() for out, _ in outputs} == {str(len(migrations.MIGRATIONS)).encode()}, outputs


def test_migrations_run_in_order(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database of the first release is migrated by later ones."""
    now, insert = list(migrations.MIGRATIONS), tables._insert
    first = tables._table("components", " ".join(each.name for each in tables.COMPONENTS.c if each.name != "uuid"))

    def insert_first(connection: Any, table: Any, rows: Any) -> None:
        insert(connection, table, [{key: value for key, value in row.items() if key != "uuid"} for row in rows])

    monkeypatch.setattr(migrations, "MIGRATIONS", now[:1])
    store = Store(url)
    with monkeypatch.context() as patched, store.write() as connection:
        patched.setattr(tables, "COMPONENTS", first)
        patched.setattr(tables, "_insert", insert_first)
        tables.save(connection, Inventory(), FULL)
    store.close()

    def later(op: Operations) -> None:
        op.add_column("components", sa.Column("colour", sa.String(8), server_default="red"))

    monkeypatch.setattr(migrations, "MIGRATIONS", [*now, later])
    store = Store(url)
    assert store.version == len(now) + 1
    with store.read() as connection:
        assert tables.load(connection).components == FULL.components
        assert connection.execute(sa.text("SELECT DISTINCT colour FROM components")).scalar() == "red"
    store.close()


def test_a_failed_migration_is_rolled_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(url)
    version = store.version
    store.close()

    def broken(op: Operations) -> None:
        op.create_table("half", sa.Column("id", sa.Integer))
        raise RuntimeError("the power is gone")

    monkeypatch.setattr(migrations, "MIGRATIONS", [*migrations.MIGRATIONS, broken])
    with pytest.raises(RuntimeError):
        Store(url)
    monkeypatch.undo()
    store = Store(url)
    assert store.version == version
    assert "half" not in sa.inspect(store.engine).get_table_names()
    store.close()


def test_a_newer_database_is_refused(url: str) -> None:
    store = Store(url)
    with store.write() as connection:
        connection.execute(sa.text("UPDATE sms_schema SET version = 99"))
    store.close()
    with pytest.raises(Refused, match="version 99"):
        Store(url)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("sqlite:////nowhere/at/all.db", "cannot open the inventory"),
        ("mysql://x/y", "type mysql is not supported|invalid database URL"),
        ("not a url", "invalid database URL"),
        ("postgresql://tester:geheim@/x?host=/nowhere", "cannot open the inventory"),
    ],
)
def test_databases_that_cannot_be_opened(bad: str, message: str) -> None:
    with pytest.raises(SmsError, match=message) as caught:
        Store(bad)
    assert "geheim" not in caught.value.message


def test_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "inventory.db").write_bytes(b"this is a letter" * 4096)
    with pytest.raises(SmsError, match="not a database") as caught:
        World(make_config(tmp_path))
    assert "sms vm restore" in caught.value.hint


def test_a_full_disk(tmp_path: Path) -> None:
    with running(make_config(tmp_path)) as provd:
        provd.good("PUT", "/sms/v1/nodes/n1", {"address": "10.77.0.151"})
        # Simulates SQLite's error on a full file system.
        sa.event.listen(
            provd.world.store.engine,
            "begin",
            lambda connection: connection.exec_driver_sql("PRAGMA max_page_count=1"),
        )
        document = {"nodes": [{"name": f"m{number}", "bmc": "b" * 200} for number in range(2000)]}
        answer = provd.ask("POST", "/sms/v1/import", document)
        assert answer.status == 507 and "full" in answer.detail
        assert [each["name"] for each in provd.good("GET", "/sms/v1/nodes")["nodes"]] == ["n1"]


def test_a_locked_database(tmp_path: Path) -> None:
    with running(make_config(tmp_path)) as provd:
        provd.good("PUT", "/sms/v1/nodes/n1", {})
        other = sqlite3.connect(tmp_path / "inventory.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        answer = provd.ask("PUT", "/sms/v1/nodes/n2", {})
        assert (answer.status, answer.headers["retry-after"]) == (503, "1") and "busy" in answer.detail
        # Readers see the previous state.
        assert len(provd.good("GET", "/sms/v1/nodes")["nodes"]) == 1
        other.execute("ROLLBACK")
        other.close()
        provd.good("PUT", "/sms/v1/nodes/n2", {})


def test_a_database_that_is_damaged_while_in_use(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running(config) as provd:
        document = {"nodes": [{"name": f"n{number}"} for number in range(300)]}
        provd.good("POST", "/sms/v1/import", document)
        with provd.world.store.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        provd.world.store.engine.dispose()
        with (tmp_path / "inventory.db").open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * 65536)
        provd.world.touch()
        for method, path, body in (("GET", "/sms/v1/nodes", None), ("PUT", "/sms/v1/nodes/x", {})):
            answer = provd.ask(method, path, body)
            assert answer.status == 503, answer.data
            assert "malformed" in answer.detail


@pytest.mark.slow
def test_reconnects_to_postgresql(server: str, tmp_path: Path) -> None:
    engine = admin_engine(server)
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE gone")
    with running(make_config(tmp_path, database=server.format("gone"))) as provd:
        provd.good("PUT", "/sms/v1/nodes/n1", {"address": "10.77.0.151"})
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'gone'")
        assert provd.good("GET", "/sms/v1/health")["database"]["kind"] == "postgresql"
        assert provd.good("PUT", "/sms/v1/nodes/n2", {})["name"] == "n2"
