"""What is written in the provisioning VM."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from appliance.provision import tables
from appliance.provision.blobs import Blobs
from appliance.provision.certificates import Certificate, Certificates
from appliance.provision.config import Config
from appliance.provision.files import Files
from appliance.provision.images import FILES, Images
from appliance.provision.model import Component, Inventory
from appliance.provision.store import Store as Database
from appliance.provision.sync_tables import TOKENS
from appliance.provision.tokens import Tokens
from tests.crash.workload import Mark, Marks, Workload, nothing

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


# Master files and certificates of nodes: appliance/provision/files.py, certificates.py

MASTER = {"mode": "0644", "owner": "root", "group": "root"}


def files_of(root: Path) -> Files:
    config = Config("10.0.0.2", 16, state=root)
    return Files(Database(f"sqlite:///{root}/inventory.db"), config, blobs_of(root))


def run_files(root: Path, mark: Mark) -> None:
    files = files_of(root)
    for data in BLOBS:
        run_blobs(root, lambda text: None)
        files.put("/etc/motd", {"sha256": digest(data), **MASTER})  # type: ignore[typeddict-item]
        mark(digest(data))
    files.roll_back("/etc/motd")
    mark(digest(BLOBS[0]))
    files.remove("/etc/motd")
    mark("")
    files.store.close()


def check_files(root: Path, marks: Marks) -> None:
    files = files_of(root)
    try:
        with files.store.read() as connection:
            now = {master.path: master.sha256 for master in files.masters(connection)}.get("/etc/motd", "")
        steps = ["", digest(BLOBS[0]), digest(BLOBS[1]), digest(BLOBS[0]), ""]
        assert now in steps[len(marks) : len(marks) + 2]
        assert not now or files.blobs.read(now)
    finally:
        files.store.close()


def issued(name: str, replaces: str = "") -> Certificate:
    return Certificate(name * 40, "01", "uuid", "n1", "10.0.0.1", "02:00:00:00:00:01", 900.0, 5000.0, replaces)


def certificates_of(root: Path) -> Certificates:
    return Certificates(Database(f"sqlite:///{root}/inventory.db"), clock=lambda: 1000.0)


def run_certificates(root: Path, mark: Mark) -> None:
    certificates = certificates_of(root)
    certificates.add(issued("a"))
    mark("a")
    certificates.add(issued("b", "a" * 40))
    mark("b")
    certificates.record_use(issued("b", "a" * 40))
    mark("a is refused")
    certificates.store.close()


def check_certificates(root: Path, marks: Marks) -> None:
    certificates = certificates_of(root)
    try:
        accepted = {name for name in "ab" if certificates.find("uuid", name * 40)}
        assert accepted in [set(), {"a"}, {"a", "b"}, {"b"}][len(marks) : len(marks) + 2]
    finally:
        certificates.store.close()


IN_VM = {
    "inventory": Workload(prepare_database, run_database, check_database),
    "new inventory": Workload(nothing, run_new_database, check_new_database, again=False),
    "master files": Workload(prepare_database, run_files, check_files),
    "certificates of nodes": Workload(prepare_database, run_certificates, check_certificates, again=False),
    "blobs": Workload(nothing, run_blobs, check_blobs),
    "node images": Workload(nothing, run_images, check_images, again=False),
}
