"""What verbs write: the site's files, keys and certificates, overlays as a whole, images, and the VM's disks."""

from __future__ import annotations

import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.errors import SmsError
from appliance.host.base import Host, Result
from appliance.host.local import ENVIRONMENT, Local
from appliance.operations.context import Cluster
from appliance.operations.env import Env
from appliance.operations.image.build import make_current
from appliance.operations.image.copy import HostFile, copy_file
from appliance.operations.nodes import image as nodes_image
from appliance.operations.nodes.controllers import confirm_controllers, read_confirmed
from appliance.operations.overlay import grow, overlay
from appliance.operations.overlay.generation import mark_overlay, query_overlay, retire_overlay
from appliance.operations.services.unfinished import read_last_upgrade, write_phase
from appliance.operations.site import ca
from appliance.operations.site.init import write_site
from appliance.operations.site.issued import add_revoked, read_issued, read_revoked, serial_of
from appliance.operations.site.keys import create_pair, fingerprint
from appliance.operations.snapshots import vm_restore as vm_from
from appliance.operations.vm import image as vm_image
from appliance.operations.vm import migrate as vm_migrate
from appliance.operations.vm import restore as vm_restore
from appliance.operations.vm import snapshot as vm_snapshot
from appliance.operations.vm.snapshots import VmSnapshot, list_folder
from appliance.operations.vm.vm import finish_restore
from appliance.plan.upgrade.upgrade import DONE, LAYING, STARTING, STOPPING, SWITCHING, Side, Upgrade
from appliance.plan.vm.holder import Holder, read_holder
from appliance.plan.vm.vm import VmPlaces
from appliance.progress import Silent
from appliance.shared.records import to_json
from appliance.tools import files
from appliance.tools.scripts import read_script, script_argv
from appliance.tools.sealed import check_seal, seal
from appliance.tools.sha256 import find_digest
from tests.conftest import find_tool
from tests.crash.workload import HERE, Mark, Marks, Workload, cluster_in, nothing

# The site file and the key that signs images: appliance/operations/site/init.py, keys.py


def run_site(root: Path, mark: Mark) -> None:
    folder = root / "etc" / "sms"
    for number in (1, 2):
        write_site(f"version {number}\n", folder / "sms.yaml", force=True, parents=True)
        mark(str(number))


def check_site(root: Path, marks: Marks) -> None:
    path = root / "etc" / "sms" / "sms.yaml"
    found = path.read_text() if path.exists() else ""
    assert found in ["", "version 1\n", "version 2\n"][len(marks) :]


def run_key(root: Path, mark: Mark) -> None:
    create_pair(root / "etc" / "key.pem", root / "etc" / "key.pub")
    mark("key")


def check_key(root: Path, marks: Marks) -> None:
    """No file is truncated; what is left of an interrupted run can be moved away, as the hint says."""
    private, public = root / "etc" / "key.pem", root / "etc" / "key.pub"
    assert (private.exists() and public.exists()) or not marks
    assert not private.exists() or private.read_bytes().endswith(b"-----END PRIVATE KEY-----\n")
    assert not public.exists() or fingerprint(public)
    for path in (private, public):
        path.unlink(missing_ok=True)
    create_pair(private, public)


# The site's certificates: appliance/operations/site/ca.py, issued.py


def run_authority(root: Path, mark: Mark) -> None:
    folder = root / "tls"
    if not (folder / "ca.pem").exists():
        ca.make_ca(folder)
    mark("created")


def check_authority(root: Path, marks: Marks) -> None:
    """It is complete if its certificate is there; else the next run creates it."""
    folder = root / "tls"
    assert (folder / "ca.pem").exists() or not marks
    if not (folder / "ca.pem").exists():
        ca.make_ca(folder)
    check_pairs(folder)


def check_pairs(folder: Path) -> None:
    ca._read_root(folder)
    logged = {one.serial for one in read_issued(folder)}
    for name in ca.CLIENTS:
        pair = ca.read_pair(folder, name)
        assert pair and serial_of(ca._load(pair.certificate)) in logged


def prepare_certificates(root: Path) -> None:
    ca.make_ca(root / "tls")


def run_certificates(root: Path, mark: Mark) -> None:
    folder = root / "tls"
    ca.renew_clients(folder, ["admin"])
    mark("renewed")
    mark("revoked " + ca.revoke(folder, ["services"])[0].serial)
    ca.vm_pairs(folder, hostname="vm", addresses=["10.0.0.2"])
    mark("VM")


def check_certificates(root: Path, marks: Marks) -> None:
    folder = root / "tls"
    ca.renew_due_clients(folder)  # as the schedule does
    check_pairs(folder)
    revoked = {one.serial for one in read_revoked(folder)}
    words = [mark.split() for mark in marks]
    assert {word[1] for word in words if word[0] == "revoked"} <= revoked
    if any(word[0] == "revoked" for word in words):
        assert serial_of(ca._load((folder / "services.pem").read_bytes())) not in revoked
    assert not add_revoked(folder, read_revoked(folder))
    ca.vm_pairs(folder, hostname="vm", addresses=["10.0.0.2"])
    assert ca.read_pair(folder, ca.SERVER) and ca.read_pair(folder, ca.ISSUER)


def prepare_pair(root: Path) -> None:
    ca.make_ca(root / "tls")
    for folder, days in (("etc", 30), ("new", 60)):
        pair = ca._issue(root / "tls", ca._name("services", ca.CLIENTS["services"]), days, "CLIENT_AUTH")
        (root / folder).mkdir()
        (root / folder / "key.pem").write_bytes(pair.key)
        (root / folder / "cert.pem").write_bytes(pair.certificate)


def run_pair(root: Path, mark: Mark) -> None:
    key, certificate = ((root / "new" / name).read_bytes() for name in ("key.pem", "cert.pem"))
    through = root.with_name(f"{root.name}-bin") / "sed"
    through.parent.mkdir(exist_ok=True)
    # The recorder does not see what sed writes itself: its output passes through cat.
    through.write_text(f'#!/bin/sh\n{find_tool("sed")} "$@" | cat\n')
    through.chmod(0o755)
    argv = ("env", f"PATH={through.parent}:{ENVIRONMENT['PATH']}", *script_argv("install-pair", str(root / "etc")))
    HERE.run(*argv, input=key.rstrip() + b"\n" + certificate)
    mark("installed")


def check_pair(root: Path, marks: Marks) -> None:
    """Both are whole; a certificate that does not match its key is the older one, so the next run installs both."""
    old, new = ((root / folder / "cert.pem").read_bytes() for folder in ("etc", "new"))
    assert old == new or not marks
    if old != new:
        assert ca.supersedes(new, old, set())
        run_pair(root, lambda text: None)
    assert ca.matches((root / "etc" / "cert.pem").read_bytes(), (root / "etc" / "key.pem").read_bytes())
    assert (root / "etc" / "cert.pem").read_bytes() == new


# Confirmed controllers, and the record of an upgrade


def run_controllers(root: Path, mark: Mark) -> None:
    for number in (1, 2):
        confirm_controllers(cluster_in(root), {"n1": f"https://10.0.0.{number}"})
        mark(str(number))


def check_controllers(root: Path, marks: Marks) -> None:
    found = read_confirmed(cluster_in(root)).get("n1", "")
    assert found in ["", "https://10.0.0.1", "https://10.0.0.2"][len(marks) :]


PHASES = (SWITCHING, STOPPING, LAYING, STARTING, DONE)


def run_upgrade(root: Path, mark: Mark) -> None:
    cluster = cluster_in(root)
    side = Side("/image", "key", "digest")
    upgrade = Upgrade(cluster.site.cluster, STOPPING, side, side, 1.0)
    for phase in PHASES:
        upgrade = write_phase(cluster, HERE, upgrade.at(phase))
        mark(phase)


def check_upgrade(root: Path, marks: Marks) -> None:
    cluster = cluster_in(root)
    last, done = (read_last_upgrade(cluster, HERE, done=one) for one in (False, True))
    found = PHASES.index(last.phase) + 1 if last else 0
    assert found in (len(marks), len(marks) + 1)
    assert done or found < len(PHASES), "what `sms upgrade --back` returns to"


# Overlays: appliance/operations/overlay/

SEEDED = b"seeded" * 400


class WithoutPrograms(Local):
    """This host; what needs Apptainer or mounts stands for itself."""

    def run(self, *argv: str, **options: Any) -> Result:
        if argv[:3] == ("apptainer", "overlay", "create"):
            Path(argv[-1]).write_bytes(b"empty" * 480)
            return Result(self.name, argv, 0, b"", b"")
        if read_script("vm-verify") in argv:
            return Result(self.name, argv, 0, b"", b"")
        return super().run(*argv, **options)


def run_new(root: Path, mark: Mark) -> None:
    cluster = cluster_in(root)
    path = Path(cluster.places.overlay)
    files.make_folders(HERE, str(path.parent))

    def fill(cluster: Cluster, host: Host, image: str, overlay: str, archive: bytes, mark: str) -> dict[str, list[str]]:
        Path(overlay).write_bytes(SEEDED)
        return {}

    overlay._seed = fill
    overlay._create(cluster, WithoutPrograms(HERE.name), "image", str(path), b"", "mark")
    mark_overlay(cluster, HERE, 1)
    mark("created")


def check_new(root: Path, marks: Marks) -> None:
    path = Path(cluster_in(root).places.overlay)
    assert path.read_bytes() == SEEDED if path.exists() else not marks
    assert not marks or query_overlay(cluster_in(root), HERE).generation == 1


def prepare_past(root: Path) -> None:
    cluster = cluster_in(root)
    mark_overlay(cluster, HERE, 4)
    Path(cluster.places.overlay).write_bytes(SEEDED)


def run_past(root: Path, mark: Mark) -> None:
    mark(retire_overlay(cluster_in(root), HERE, 5))


def check_past(root: Path, marks: Marks) -> None:
    """It is kept; with its old name it has its mark, by which a start sees how old it is."""
    cluster = cluster_in(root)
    path = Path(cluster.places.overlay)
    past = path.with_name(path.name + ".past-5")
    assert past.exists() != path.exists() and (past.exists() or not marks)
    assert (past if past.exists() else path).read_bytes() == SEEDED
    assert past.exists() or query_overlay(cluster, HERE).generation == 4


GROWN = 3 << 20


def prepare_grow(root: Path) -> None:
    for name in ("upper", "work"):
        (root / "content" / name).mkdir(parents=True)
    (root / "content" / "jobs").write_bytes(b"42")
    argv = ("mke2fs", "-q", "-t", "ext3", "-b", "1024", "-J", "size=1", "-d", str(root / "content"))
    subprocess.run([*argv, str(root / "c.img"), "1800k"], check=True)


def run_grow(root: Path, mark: Mark) -> None:
    grow._grow_stopped(Local(), str(root / "c.img"), GROWN, Silent())
    mark("grown")


def check_grow(root: Path, marks: Marks) -> None:
    path = root / "c.img"
    assert path.stat().st_size == GROWN or not marks
    assert subprocess.run([find_tool("e2fsck"), "-fp", path], capture_output=True).returncode in (0, 1)
    argv = (find_tool("debugfs"), "-R", "cat /jobs", path)
    assert subprocess.run(argv, capture_output=True, check=True).stdout == b"42"


# Images: appliance/operations/image/copy.py, build.py, vm/image.py


class Elsewhere(Local):
    """Another host: its state is in ``root/other`` instead of ``root/var``."""

    def __init__(self, root: Path) -> None:
        super().__init__("b")
        self.root = root

    def run(self, *argv: str, **options: Any) -> Result:
        return super().run(*self._there(argv), **options)

    def stream(self, *argv: str, **options: Any) -> Any:
        return super().stream(*self._there(argv), **options)

    def _there(self, argv: tuple[str, ...]) -> list[str]:
        return [word.replace(f"{self.root}/var", f"{self.root}/other") for word in argv]


DISK = b"disk" * 50000


def prepare_copy(root: Path) -> None:
    (root / "images").mkdir()
    (root / "image").write_bytes(DISK)


def run_copy(root: Path, mark: Mark) -> None:
    found = HostFile(HERE, str(root / "image"), str(find_digest(HERE, str(root / "image"))))
    copy_file(Env(), found, HERE, str(root / "images" / "copy"), "it")
    mark("copied")


def check_copy(root: Path, marks: Marks) -> None:
    copy = root / "images" / "copy"
    assert copy.read_bytes() == DISK if copy.exists() else not marks
    try:
        run_copy(root, lambda text: None)
    except SmsError as error:
        assert "run it again" in error.hint, "what an interrupted copy has left is damaged"
        run_copy(root, lambda text: None)
    assert copy.read_bytes() == DISK


def prepare_current(root: Path) -> None:
    make_current(root / "c.sif", "one.sif")


def run_current(root: Path, mark: Mark) -> None:
    make_current(root / "c.sif", "two.sif")
    mark("two")


def check_current(root: Path, marks: Marks) -> None:
    assert str((root / "c.sif").readlink()) in ["one.sif", "two.sif"][len(marks) :]


def signed_cluster(root: Path) -> Any:
    cluster = cluster_in(root)
    signing = cluster.site.signing.model_copy(
        update={"private_key": root / "key.pem", "public_keys": (root / "key.pub",)}
    )
    return replace(cluster, site=cluster.site.model_copy(update={"signing": signing}))


def put_vm_image(root: Path, images: Path) -> None:
    """Put a sealed image of the VM with the key ``key`` into a folder of images."""
    create_pair(root / "key.pem", root / "key.pub")
    (images / "key").mkdir(parents=True)
    (images / "key" / vm_image.DISK).write_bytes(DISK)
    seal(images / "key", root / "key.pem", about={"kind": vm_image.KIND, "key": "key"})


def prepare_fetch(root: Path) -> None:
    put_vm_image(root, Path(str(vm_places(root).images).replace("/var/", "/other/")))


def run_fetch(root: Path, mark: Mark) -> None:
    vm_image.fetch_vm(signed_cluster(root), Elsewhere(root), "key")
    mark("fetched")


def check_fetch(root: Path, marks: Marks) -> None:
    """An image that is there is complete: nothing fetches it once more."""
    folder = Path(VmPlaces(cluster_in(root).site).images) / "key"
    assert folder.exists() or not marks
    if not folder.exists():
        try:
            run_fetch(root, lambda text: None)
        except SmsError as error:
            assert "run it again" in error.hint
            run_fetch(root, lambda text: None)
    check_seal(folder, [root / "key.pub"])


def prepare_built(root: Path) -> None:
    create_pair(root / "key.pem", root / "key.pub")
    (root / "work").mkdir()


def run_built(root: Path, mark: Mark) -> None:
    made = root / "work" / "image"
    made.mkdir()
    (made / "root.squashfs").write_bytes(DISK)
    seal(made, root / "key.pem")
    nodes_image._put_in_place(made, root / "digest")
    mark("built")


def check_built(root: Path, marks: Marks) -> None:
    assert (root / "digest").exists() or not marks
    if (root / "digest").exists():
        check_seal(root / "digest", [root / "key.pub"])


# The VM's disks: appliance/operations/vm/, definitions/scripts/vm-finish-restore

DISKS = ("root.qcow2", "state.qcow2", "root.image")
QCOW2 = struct.pack(">4sI", b"QFI\xfb", 3).ljust(112, b"\0")
"""A header that names no other file."""


def vm_places(root: Path) -> VmPlaces:
    return VmPlaces(cluster_in(root).site)


def put_disks(folder: Path, words: bytes) -> None:
    folder.mkdir(parents=True)
    for name in DISKS:
        (folder / name).write_bytes(disk(words, name))


def disk(words: bytes, name: str) -> bytes:
    return QCOW2 + words + name.encode() * 300


def prepare_vm(root: Path) -> None:
    where = vm_places(root)
    put_disks(Path(where.disks), b"old ")
    HERE.write(str(where.holder), to_json(Holder("a", 3, cluster_uuid="u")), mode=0o600)


def run_vm_snapshot(root: Path, mark: Mark) -> None:
    vm_snapshot.take_locked(cluster_in(root), WithoutPrograms(HERE.name), "one", reason="", running=False)
    mark("one")


def check_vm_snapshot(root: Path, marks: Marks) -> None:
    where = vm_places(root)
    found = list_folder(HERE, where)
    assert [one.name for one in found] in [[], ["one"]][len(marks) :]
    for one in found:
        assert one.verified and one.generation == 3 and one.cluster_uuid == "u"
        for name in DISKS[:2]:
            assert Path(where.snapshots, one.name, name).read_bytes() == disk(b"old ", name)
    holder = read_holder(Path(where.holder).read_bytes())
    assert holder and holder.generation == 3 and holder.sequence >= max([0, *(one.sequence for one in found)])


def prepare_vm_restore(root: Path) -> None:
    prepare_vm(root)
    put_disks(Path(vm_places(root).snapshots, "snap"), b"new ")


def run_vm_restore(root: Path, mark: Mark) -> None:
    where = vm_places(root)
    finish_restore(HERE, where)
    vm_restore._copy(HERE, where, f"{where.snapshots}/snap")
    mark("copied")
    vm_restore._exchange(HERE, where, VmSnapshot("kept", 1.0, generation=3, sequence=1))
    mark("restored")


def check_vm_restore(root: Path, marks: Marks) -> None:
    """All disks are old or all are new, and the old ones are kept."""
    where = vm_places(root)
    finish_restore(HERE, where)
    found = {name: Path(where.disks, name).read_bytes() for name in DISKS}
    kinds = {data.removeprefix(QCOW2)[:3] for data in found.values()}
    assert len(kinds) == 1 and found == {name: disk(kinds.copy().pop() + b" ", name) for name in DISKS}
    if kinds == {b"new"}:
        assert "copied" in marks
        for name in DISKS:
            assert Path(where.snapshots, "kept", name).read_bytes() == disk(b"old ", name)
        assert "kept" in [one.name for one in list_folder(HERE, where)]
    assert kinds == {b"new"} or "restored" not in marks


RAW = b"restored" * 1024
"""A state disk of a snapshot: whole sectors."""


def prepare_vm_from(root: Path) -> None:
    prepare_vm(root)
    (root / "state.raw").write_bytes(RAW)


def prepare_vm_lost(root: Path) -> None:
    """All disks of the VM are lost."""
    (root / "state.raw").write_bytes(RAW)


def run_vm_from(root: Path, mark: Mark) -> None:
    where = vm_places(root)
    finish_restore(HERE, where)
    vm_from._exchange(cluster_in(root), HERE, str(root / "state.raw"))
    mark("restored")


def read_disk(path: Path) -> bytes:
    argv = (find_tool("qemu-img"), "convert", "-f", "qcow2", "-O", "raw", path, path.with_name("read"))
    subprocess.run(argv, check=True, capture_output=True)
    return path.with_name("read").read_bytes()


def check_vm_from(root: Path, marks: Marks) -> None:
    """The state disk is the old one or the restored one, whole; the old ones are kept."""
    where = vm_places(root)
    finish_restore(HERE, where)
    state, old = Path(where.state), disk(b"old ", "state.qcow2")
    if state.exists() and state.read_bytes() == old:
        assert not marks
        assert Path(where.root).read_bytes() == disk(b"old ", "root.qcow2")
        return
    assert read_disk(state) == RAW
    kept = [one.name for one in list_folder(HERE, where)]
    assert len(kept) == 1
    assert Path(where.snapshots, kept[0], "state.qcow2").read_bytes() == old
    for folder in (Path(where.disks), Path(where.snapshots, kept[0])):
        assert (folder / "root.qcow2").read_bytes() == disk(b"old ", "root.qcow2")


def check_vm_lost(root: Path, marks: Marks) -> None:
    """There is no state disk, or the restored one, whole."""
    where = vm_places(root)
    finish_restore(HERE, where)
    assert Path(where.state).exists() or not marks
    assert not Path(where.state).exists() or read_disk(Path(where.state)) == RAW


def prepare_vm_move(root: Path) -> None:
    """The disks of host b move to this one, which has some of an earlier generation, and the image."""
    prepare_vm(root)
    put_vm_image(root, Path(vm_places(root).images))
    other = Path(str(vm_places(root).disks).replace("/var/", "/other/"))
    put_disks(other, b"new ")
    Elsewhere(root).write(str(vm_places(root).holder), to_json(Holder("b", 4)), mode=0o600)


def run_vm_move(root: Path, mark: Mark) -> None:
    plan = vm_migrate.MovePlan("b", "a", False, False, False, 0, 0, image="key")
    vm_migrate._transfer_disks(signed_cluster(root), Elsewhere(root), HERE, plan, Holder("a", 5))
    mark("moved")


def check_vm_move(root: Path, marks: Marks) -> None:
    """The host with the newest record has all of the newest disks; the older ones are kept.

    The next start uses the image that was delivered, if the migration came to its end.
    """
    current = Path(vm_places(root).current)
    assert str(current.readlink()) == "key" if current.is_symlink() else not marks
    places = {name: Path(str(vm_places(root).disks).replace("/var/", f"/{name}/")) for name in ("var", "other")}
    holders = {name: read_holder((folder / "holder.json").read_bytes()) for name, folder in places.items()}
    newest = max(holders, key=lambda name: holders[name].generation)  # type: ignore[union-attr]
    assert newest == "var" or not marks
    assert {name: (places[newest] / name).read_bytes() for name in DISKS} == {
        name: disk(b"new ", name) for name in DISKS
    }
    for name in DISKS[:2]:
        there = [path.read_bytes() for path in root.rglob(name)]
        assert disk(b"old ", name) in there


def run_vm_holder(root: Path, mark: Mark) -> None:
    for generation in (1, 2):
        Local().write(str(root / "vm" / "holder.json"), to_json(Holder("a", generation)), mode=0o600)
        mark(str(generation))


def check_vm_holder(root: Path, marks: Marks) -> None:
    path = root / "vm" / "holder.json"
    holder = read_holder(path.read_bytes() if path.exists() else None)
    assert (holder.generation if holder else 0) in range(len(marks), 3)


ADMIN = {
    "site file": Workload(nothing, run_site, check_site),
    "signing key": Workload(nothing, run_key, check_key),
    "authority": Workload(nothing, run_authority, check_authority),
    "certificates": Workload(prepare_certificates, run_certificates, check_certificates, again=False),
    "certificate in the container": Workload(prepare_pair, run_pair, check_pair),
    "controllers": Workload(nothing, run_controllers, check_controllers),
    "record of an upgrade": Workload(nothing, run_upgrade, check_upgrade),
    "new overlay": Workload(nothing, run_new, check_new),
    "retired overlay": Workload(prepare_past, run_past, check_past, again=False),
    "grown overlay": Workload(prepare_grow, run_grow, check_grow),
    "copy of an image": Workload(prepare_copy, run_copy, check_copy),
    "current image": Workload(prepare_current, run_current, check_current),
    "image of the VM": Workload(prepare_fetch, run_fetch, check_fetch),
    "built image of nodes": Workload(prepare_built, run_built, check_built, again=False),
    "VM snapshot": Workload(prepare_vm, run_vm_snapshot, check_vm_snapshot, again=False),
    "VM restore": Workload(prepare_vm_restore, run_vm_restore, check_vm_restore, again=False),
    "VM restore from elsewhere": Workload(prepare_vm_from, run_vm_from, check_vm_from, again=False),
    "VM restore of lost disks": Workload(prepare_vm_lost, run_vm_from, check_vm_lost),
    "VM moved": Workload(prepare_vm_move, run_vm_move, check_vm_move, again=False),
    "VM holder": Workload(nothing, run_vm_holder, check_vm_holder),
}
