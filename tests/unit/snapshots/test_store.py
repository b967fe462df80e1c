"""What the store reuses: chunks that are known to be undamaged, or are read again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from appliance.agent import store as module
from appliance.agent.store import CHUNK, Reader, Store, chunk_path, digest_of
from appliance.agent.transfer import PLAIN, put_expected
from tests import stores

ONE, TWO = b"1" * CHUNK, b"2" * CHUNK


def tear(store: Store, data: bytes) -> Path:
    """A chunk as a power failure leaves it: the file has its name and size, but not its content."""
    path = Path(chunk_path(store.root, digest_of(data)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(len(data)))
    return path


def test_a_torn_chunk_that_no_snapshot_names_is_stored_again(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "s"))
    path = tear(store, ONE)
    stores.add_snapshot(store, [ONE, TWO])
    assert path.read_bytes() == ONE
    stores.assert_whole(store)


def test_one_that_only_a_damaged_snapshot_names_is_stored_again(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "s"))
    stores.add_snapshot(store, [ONE])
    stores.add_snapshot(store, [TWO])
    stores.damage(store, 2)
    tear(store, TWO)
    stores.add_snapshot(store, [ONE, TWO])
    stores.assert_whole(store)


def test_chunks_of_a_verified_snapshot_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are others read more than once."""
    store = Store(str(tmp_path / "s"))
    stores.add_snapshot(store, [ONE, TWO])
    read: list[str] = []
    whole = module._digest_of_file

    def digest_of_file(path: str) -> object:
        read.append(path)
        return whole(path)

    monkeypatch.setattr(module, "_digest_of_file", digest_of_file)
    again = Store(store.root)
    stores.add_snapshot(again, [ONE, TWO, ONE, b"3" * CHUNK, b"3" * CHUNK])
    assert again.new_bytes == 0 and read == []
    stores.damage(store, 1)
    stores.damage(store, 2)
    snapshot = stores.add_snapshot(Store(store.root), [ONE, TWO, ONE])
    assert snapshot.manifest.new_bytes == 0 and len(read) == 2


def test_a_replaced_chunk_is_flushed_before_it_gets_its_name(tmp_path: Path) -> None:
    """The next run relies on the verified snapshot that names it."""

    class Noting(Store):
        def write_file(self, path: str, data: bytes, *, flush: bool = False) -> None:
            if flush and "/chunks/" in path:
                flushed.append(Path(path).parent.name + Path(path).name[:62])
            super().write_file(path, data, flush=flush)

    flushed: list[str] = []
    store = Noting(str(tmp_path / "s"))
    stores.add_snapshot(store, [ONE, TWO])
    with store.writing():
        Path(chunk_path(store.root, digest_of(ONE))).write_bytes(b"short")
        store.put(ONE)
        Path(chunk_path(store.root, digest_of(TWO))).unlink()
        store.put(TWO)
        put_expected(store, (PLAIN, ONE), digest_of(ONE))
        store.put(b"new")
    assert flushed == [digest_of(data).hex() for data in (ONE, TWO, ONE)]
    with Reader(store.find("1")) as reader:
        assert [reader.read(0), reader.read(1)] == [ONE, TWO]


CHECKER = """\
import sys
from appliance.agent.store import Store
store = Store(sys.argv[1])
for _ in range(int(sys.argv[2])):
    with store.reading():
        store.set_health(store.list()[0][0], [])
"""


def test_results_of_two_checks_at_once(tmp_path: Path) -> None:
    """Such as `sms overlay verify` beside a scheduled run: none fails, and the snapshot stays a verified one."""
    store = Store(str(tmp_path / "s"))
    stores.add_snapshot(store, [ONE])
    checks = [
        subprocess.Popen([sys.executable, "-c", CHECKER, store.root, "40"], stderr=subprocess.PIPE) for _ in range(2)
    ]
    seen = set[bool]()
    while any(check.poll() is None for check in checks):
        seen |= {one.verified for one in store.list()[0]}
    assert [(check.returncode, check.communicate()[1].decode()) for check in checks] == [(0, "")] * 2
    assert seen == {True}


def test_damage_that_another_check_has_found_meanwhile_stays(tmp_path: Path) -> None:
    """The later result must not hide it; a check that begins afterwards replaces it."""
    store = Store(str(tmp_path / "s"))
    begun = stores.add_snapshot(store, [ONE])
    store.set_health(begun, ["chunk 0 has changed"])
    store.set_health(begun, [])
    assert store.read_health(1)["damage"] == ["chunk 0 has changed"]
    store.set_health(begun, ["chunk 1 is missing"])
    assert store.read_health(1)["damage"] == ["chunk 1 is missing", "chunk 0 has changed"]
    store.set_health(store.list()[0][0], [])
    assert store.list()[0][0].verified
