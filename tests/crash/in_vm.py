"""What is written in the provisioning VM, to its disks, and in the container."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

from appliance.host.local import Local
from appliance.operations.vm import restore as vm_restore
from appliance.operations.vm import snapshot as vm_snapshot
from appliance.operations.vm import vm as vm_vm
from appliance.plan.vm.holder import Holder, read_holder
from appliance.plan.vm.vm import VmPlaces
from appliance.progress import Silent
from appliance.provision import tables
from appliance.provision.blobs import Blobs
from appliance.provision.images import FILES, Images
from appliance.provision.model import Component, Inventory
from appliance.provision.store import Store as Database
from appliance.provision.sync_tables import TOKENS
from appliance.provision.tokens import Tokens
from appliance.shared.records import to_json
from tests.crash.workload import Mark, Marks, Workload, nothing
from tests.places import ROOT

# The inventory and its tokens: appliance/provision/store.py


def tokens_of(root: Path) -> Tokens:
    return Tokens(Database(f"sqlite:///{root}/inventory.db"), token_s=1000, clock=lambda: 1000.0)


def prepare_database(root: Path) -> None:
    tokens = tokens_of(root)
    with tokens.store.write() as connection:
        nodes = {"n1": Component("n1", name="n1", address="10.0.0.1")}
        tables.save(connection, Inventory(), Inventory(components=nodes))
    tokens.store.close()


def run_database(root: Path, mark: Mark) -> None:
    tokens = tokens_of(root)
    token = tokens.make("n1")
    mark("made " + token)
    assert tokens.use(token, "10.0.0.1") == "n1"
    mark("used " + token)
    mark("made " + tokens.make("n1"))
    tokens.store.close()


def check_database(root: Path, marks: Marks) -> None:
    tokens = tokens_of(root)
    try:
        with tokens.store.read() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
            assert connection.exec_driver_sql("SELECT count(*) FROM components").scalar() == 1
            stored = connection.execute(TOKENS.select()).all()
        words = [mark.split() for mark in marks]
        used = [token for what, token in words if what == "used"]
        made = [token for what, token in words if what == "made"]
        for token in used:
            assert tokens.use(token, "10.0.0.1") == "", "a used token is valid again"
        if made and not used:
            assert len(stored) <= 1  # perhaps it is being used
        if len(made) == 2:
            assert tokens.use(made[1], "10.0.0.1") == "n1"
        assert tokens.use(tokens.make("n1"), "10.0.0.1") == "n1"
    finally:
        tokens.store.close()


def run_new_database(root: Path, mark: Mark) -> None:
    prepare_database(root)
    mark("created")


def check_new_database(root: Path, marks: Marks) -> None:
    store = tokens_of(root).store
    try:
        with store.read() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM components").scalar() in (len(marks), 1)
    finally:
        store.close()


# The VM's files: appliance/provision/blobs.py, images.py

BLOBS = [b"one" * 1000, b"two" * 2000]


def blobs_of(root: Path) -> Blobs:
    return Blobs(root / "blobs" / "sha256", reserve_b=0)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def run_blobs(root: Path, mark: Mark) -> None:
    async def blocks(data: bytes) -> AsyncIterator[bytes]:
        yield data[:100]
        yield data[100:]

    for data in BLOBS:
        asyncio.run(blobs_of(root).store(digest(data), len(data), blocks(data)))
        mark(digest(data))


def check_blobs(root: Path, marks: Marks) -> None:
    for data in BLOBS:
        found = blobs_of(root).read(digest(data))
        assert found == data or (found is None and digest(data) not in marks)


IMAGE = {name: name.encode() * 500 for name in FILES}


def images_of(root: Path) -> Images:
    return Images(root / "images")


def run_images(root: Path, mark: Mark) -> None:
    listed = {name: {"sha256": digest(data), "bytes": len(data)} for name, data in IMAGE.items()}
    manifest = json.dumps({"kind": "node", "profile": "compute", "files": listed}).encode()
    images, name = images_of(root), digest(IMAGE["root.squashfs"])
    for file, data in {"manifest.json": manifest, "manifest.sig": b"signature", **IMAGE}.items():
        if images.has("compute", name):
            break
        with images.receiving("compute", name, file, 0, len(data)) as receiver:
            receiver.write(data)
    images.finish("compute", name)
    mark(name)


def check_images(root: Path, marks: Marks) -> None:
    images = images_of(root)
    found = images.current("compute")
    assert found or not marks
    if found:
        folder = root / "images" / "compute" / found.digest
        assert {name: (folder / name).read_bytes() for name in FILES} == IMAGE
        assert (folder / "manifest.sig").read_bytes() == b"signature"
    shutil.rmtree(root / "images" / ".upload", ignore_errors=True)
    run_images(root, lambda text: None)
    assert images_of(root).current("compute")


# Files of the site in the container: definitions/runtime/smsfiles.py, smskept.py


def kept_of(root: Path) -> tuple[Any, Any]:
    sys.path.insert(0, str(ROOT / "definitions" / "runtime"))
    import smskept

    # That of this module: other tests of the same process import programs that have their own.
    smskept.smsfiles.ROOT = str(root)
    return smskept.smsfiles, smskept.Kept()


def prepare_kept(root: Path) -> None:
    (root / "etc").mkdir()
    (root / "etc" / "motd").write_text("our own")
    (root / "etc" / "motd").chmod(0o600)


def pull(root: Path, version: bytes) -> None:
    """As sms-filesync does; without a version the server has the file no longer."""
    _, kept = kept_of(root)
    entry = {"path": "/etc/motd", "sha256": digest(version)}
    if version:
        kept.apply(entry, version)
    else:
        for path in kept.left({}):
            kept.remove(path)


def run_kept(root: Path, mark: Mark) -> None:
    for version in (b"one", b"two", b""):
        pull(root, version)
        mark(version.decode() or "removed")


def check_kept(root: Path, marks: Marks) -> None:
    motd = root / "etc" / "motd"
    assert motd.read_text() in ["our own", "one", "two", "our own"][len(marks) : len(marks) + 2]
    if len(marks) < 2:
        pull(root, b"two")
        assert motd.read_text() == "two"
    pull(root, b"")
    assert motd.read_text() == "our own"


# The VM's disks: appliance/operations/vm/, definitions/scripts/vm-finish-restore


def vm_of(root: Path) -> tuple[Any, VmPlaces]:
    site = SimpleNamespace(cluster="c", state=PurePosixPath(root), provisioning=SimpleNamespace(directory=None))
    where = VmPlaces(site)  # type: ignore[arg-type]
    return SimpleNamespace(site=site, places=SimpleNamespace(history=root / "history")), where


def prepare_vm(root: Path) -> None:
    _, where = vm_of(root)
    disks = Path(where.disks)
    disks.mkdir(parents=True)
    for name in ("root.qcow2", "state.qcow2", "root.image"):
        (disks / name).write_bytes(b"old " + name.encode() * 300)


def run_vm_snapshot(root: Path, mark: Mark) -> None:
    cluster, _ = vm_of(root)
    vm_snapshot.verify_folder = lambda *_: None
    vm_snapshot.take_locked(cluster, Local(), Silent(), "one", reason="", running=False)
    mark("one")


def check_vm_snapshot(root: Path, marks: Marks) -> None:
    _, where = vm_of(root)
    notes = list(Path(where.snapshots).glob("*/snapshot.json"))
    for note in notes:
        if not note.parent.name.endswith(".part"):
            assert json.loads(note.read_text())["verified"]
            for name in ("root.qcow2", "state.qcow2"):
                assert (note.parent / name).read_bytes() == b"old " + name.encode() * 300
    assert set(marks) <= {note.parent.name for note in notes}


def prepare_vm_restore(root: Path) -> None:
    prepare_vm(root)
    _, where = vm_of(root)
    folder = Path(where.snapshots, "snap")
    folder.mkdir(parents=True)
    for name in ("root.qcow2", "state.qcow2", "root.image"):
        (folder / name).write_bytes(b"new " + name.encode() * 300)


def run_vm_restore(root: Path, mark: Mark) -> None:
    _, where = vm_of(root)
    vm_vm.finish_restore(Local(), where)
    vm_restore._copy(Local(), where, f"{where.snapshots}/snap")
    mark("copied")
    vm_restore._exchange(Local(), where, "kept")
    mark("restored")


def check_vm_restore(root: Path, marks: Marks) -> None:
    """All disks are old or all are new, and the old ones are kept."""
    _, where = vm_of(root)
    vm_vm.finish_restore(Local(), where)
    files = ("root.qcow2", "state.qcow2", "root.image")
    found = {name: Path(where.disks, name).read_bytes() for name in files}
    kinds = {data[:3] for data in found.values()}
    assert len(kinds) == 1 and found == {name: kinds.copy().pop() + b" " + name.encode() * 300 for name in files}
    if kinds == {b"new"}:
        assert "copied" in marks
        for name in files:
            assert Path(where.snapshots, "kept", name).read_bytes() == b"old " + name.encode() * 300
    assert kinds == {b"new"} or "restored" not in marks


def run_vm_holder(root: Path, mark: Mark) -> None:
    for generation in (1, 2):
        Local().write(str(root / "vm" / "holder.json"), to_json(Holder("a", generation)), mode=0o600)
        mark(str(generation))


def check_vm_holder(root: Path, marks: Marks) -> None:
    path = root / "vm" / "holder.json"
    holder = read_holder(path.read_bytes() if path.exists() else None)
    assert (holder.generation if holder else 0) in range(len(marks), 3)


IN_VM = {
    "inventory": Workload(prepare_database, run_database, check_database),
    "new inventory": Workload(nothing, run_new_database, check_new_database, again=False),
    "blobs": Workload(nothing, run_blobs, check_blobs),
    "node images": Workload(nothing, run_images, check_images, again=False),
    "files of the site": Workload(prepare_kept, run_kept, check_kept),
    "VM snapshot": Workload(prepare_vm, run_vm_snapshot, check_vm_snapshot, again=False),
    "VM holder": Workload(nothing, run_vm_holder, check_vm_holder),
    "VM restore": Workload(prepare_vm_restore, run_vm_restore, check_vm_restore, again=False),
}
