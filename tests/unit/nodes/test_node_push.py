"""Upload of node images to the VM: sms-provd behind nginx on loopback ports, with real folders."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import Refused
from appliance.operations.nodes.push import Upload, check_ca
from appliance.operations.site.keys import create_pair
from appliance.provision.images import FILES, Images
from appliance.provision.problem import HttpProblem
from appliance.tools.provision import VmUnreachable
from appliance.tools.sealed import MANIFEST, SIGNATURE, digest_file, seal
from tests.provisioning import Vm
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    create_pair(folder / "sign.pem", folder / "sign.pub")
    return folder / "sign.pem"


def make_image(folder: Path, key: Path, word: str = "one", *, size: int = 3 << 20, **about: Any) -> Path:
    """Create a sealed folder as `sms image build` does; its root is ``word`` repeated."""
    made = folder / f"made-{word}"
    made.mkdir(parents=True)
    for name in FILES:
        (made / name).write_bytes((f"{word} {name} ".encode() * size)[: size if name == "root.squashfs" else 4000])
    seal(made, key, about={"kind": "node", "profile": "compute", "arguments": "quiet", "packages": {}, **about})
    return made.rename(folder / digest_file(made / "root.squashfs")[0])


def put(images: Images, image: Path, name: str, *, data: bytes | None = None, offset: int = 0) -> None:
    data = (image / name).read_bytes()[offset:] if data is None else data
    with images.receiving("compute", image.name, name, offset, len(data)) as receiver:
        receiver.write(data)


def put_all(images: Images, image: Path, *, keep: int = 2) -> list[str]:
    for name in (MANIFEST, SIGNATURE, *FILES):
        put(images, image, name)
    return images.finish("compute", image.name, keep=keep)


def test_complete_images_become_current_and_are_rolled_back(tmp_path: Path, key: Path) -> None:
    images = Images(tmp_path / "images")
    one, two = make_image(tmp_path, key, "one"), make_image(tmp_path, key, "two", groups=["gpu"])
    assert images.current("compute") is None
    put_all(images, one)
    assert images.current("compute").digest == one.name  # type: ignore[union-attr]
    put_all(images, two)
    found = images.current("compute")
    assert found is not None and (found.digest, found.arguments, found.groups) == (two.name, "quiet", ("gpu",))
    assert images.rollback("compute") == (one.name, two.name)
    assert images.rollback("compute") == (two.name, one.name), "and once more: the one that was left"
    # Another process, after a restart.
    assert Images(tmp_path / "images").current("compute").digest == two.name  # type: ignore[union-attr]


def test_an_image_with_another_ca_is_not_pushed(tmp_path: Path, key: Path) -> None:
    (tmp_path / "ca.pem").write_text("the site's")
    own = hashlib.sha256(b"the site's").hexdigest()
    for word, ca in (("one", own), ("old", "")):
        check_ca(make_image(tmp_path, key, word, ca=ca), tmp_path / "ca.pem", "compute")
    other = make_image(tmp_path, key, "other", ca="0" * 64)
    with pytest.raises(Refused, match="built with another CA") as caught:
        check_ca(other, tmp_path / "ca.pem", "compute")
    assert caught.value.hint == "sms image build compute"


def test_concurrent_readers_do_not_cache_a_stale_pointer(tmp_path: Path, key: Path) -> None:
    """A reader that read the pointer before a rollback must not cache it."""

    class Slow(Images):
        meanwhile: Callable[[], object] | None = None

        def pointer(self, profile: str, name: str) -> str | None:
            found = super().pointer(profile, name)
            meanwhile, self.meanwhile = self.meanwhile, None
            if meanwhile:
                meanwhile()
            return found

    images = Slow(tmp_path / "images")
    one, two = make_image(tmp_path, key, "one", groups=["old"]), make_image(tmp_path, key, "two", groups=["new"])
    put_all(images, one)
    put_all(images, two)
    images.meanwhile = lambda: images.rollback("compute")
    images.current("compute")
    assert images.current("compute").digest == one.name  # type: ignore[union-attr]
    images.rollback("compute")
    images.meanwhile = lambda: images.rollback("compute")
    images.profile_for(["old"])
    assert images.profile_for(["old"]) == "compute" and images.profile_for(["new"]) == ""


def test_a_node_without_a_profile_boots_that_of_its_group(tmp_path: Path, key: Path) -> None:
    images = Images(tmp_path / "images")
    put_all(images, make_image(tmp_path, key, "one", groups=["gpu", "big"]))
    assert images.profile_for(["odd", "big"]) == "compute"
    assert images.profile_for(["odd"]) == ""
    put_all(images, make_image(tmp_path, key, "two"))
    assert images.profile_for(["odd"]) == images.profile_for([]) == "compute"


def test_half_an_upload_never_becomes_current(tmp_path: Path, key: Path) -> None:
    images, one, two = Images(tmp_path / "images"), make_image(tmp_path, key, "one"), make_image(tmp_path, key, "two")
    put_all(images, one)
    with pytest.raises(HttpProblem, match="the manifest is missing"):
        put(images, two, "root.squashfs")
    put(images, two, MANIFEST)
    put(images, two, SIGNATURE)
    put(images, two, "root.squashfs", data=(two / "root.squashfs").read_bytes()[:1000])
    with pytest.raises(HttpProblem, match="not uploaded yet"):
        images.finish("compute", two.name)
    for name in ("vmlinuz", "initrd.img"):
        put(images, two, name)
    with pytest.raises(HttpProblem, match="1000 of 3145728 bytes"):
        images.finish("compute", two.name)
    assert images.current("compute").digest == one.name  # type: ignore[union-attr]
    assert images.received("compute", two.name)["root.squashfs"] == 1000
    with pytest.raises(HttpProblem, match=r"1000 bytes of root\.squashfs were received, not 500"):
        put(images, two, "root.squashfs", offset=500)
    put(images, two, "root.squashfs", offset=1000)
    images.finish("compute", two.name)
    assert images.current("compute").digest == two.name  # type: ignore[union-attr]


def test_corrupt_files_are_reported_and_discarded(tmp_path: Path, key: Path) -> None:
    images, one = Images(tmp_path / "images"), make_image(tmp_path, key, "one")
    for name in (MANIFEST, SIGNATURE, "vmlinuz", "initrd.img"):
        put(images, one, name)
    put(images, one, "root.squashfs", data=b"x" * (3 << 20))
    with pytest.raises(HttpProblem, match=r"root\.squashfs does not match its digest") as caught:
        images.finish("compute", one.name)
    assert caught.value.status == 422
    assert "root.squashfs" not in images.received("compute", one.name), "it is sent again"
    assert images.current("compute") is None


def test_a_file_that_changed_on_disk_can_be_uploaded_again(tmp_path: Path, key: Path) -> None:
    images, one = Images(tmp_path / "images"), make_image(tmp_path, key, "one")
    put_all(images, one)
    (images.folder / "compute" / one.name / "root.squashfs").write_bytes(b"x" * (3 << 20))
    with pytest.raises(HttpProblem, match="on the VM's disk"):
        images.finish("compute", one.name)
    assert images.current("compute") is None
    put(images, one, "root.squashfs")
    images.finish("compute", one.name)
    assert images.current("compute").digest == one.name  # type: ignore[union-attr]


def change(**what: Any) -> Callable[[dict[str, Any]], None]:
    return lambda about: about.update(what)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (change(profile="gpu"), "not that of compute"),
        (change(kind="vm"), "not that of a node image"),
        (change(files={}), "not that of a node image"),
        (change(files=3), "not the manifest"),
        (change(arguments="quiet\n#!ipxe"), "control characters"),
        (lambda about: about["files"]["vmlinuz"].update(bytes=-1), "not that of a node image"),
        (lambda about: about["files"]["vmlinuz"].update(bytes=1 << 60), "not that of a node image"),
        (lambda about: about["files"].update({"../../x": about["files"]["vmlinuz"]}), "not that of a node image"),
    ],
)
def test_invalid_manifests(edit: Callable[[dict[str, Any]], None], words: str, tmp_path: Path, key: Path) -> None:
    images, one = Images(tmp_path / "images"), make_image(tmp_path, key, "one")
    about = json.loads((one / MANIFEST).read_text())
    edit(about)
    put(images, one, MANIFEST, data=json.dumps(about).encode())
    with pytest.raises(HttpProblem, match=words):
        put(images, one, "vmlinuz")


@pytest.mark.parametrize("name", ["../x", "shadow", "manifest.json/..", ""])
def test_unlisted_files_are_rejected(name: str, tmp_path: Path, key: Path) -> None:
    images, one = Images(tmp_path / "images"), make_image(tmp_path, key, "one")
    put(images, one, MANIFEST)
    with pytest.raises(HttpProblem) as caught:
        put(images, one, name, data=b"x")
    assert caught.value.status == 404


def test_uploads_are_limited_to_the_manifest_size(tmp_path: Path, key: Path) -> None:
    images, one = Images(tmp_path / "images"), make_image(tmp_path, key, "one")
    put(images, one, MANIFEST)
    with pytest.raises(HttpProblem, match="has at most 4000 bytes, not 4001"):
        put(images, one, "vmlinuz", data=b"x" * 4001)
    with (
        pytest.raises(HttpProblem, match="more bytes received"),
        images.receiving("compute", one.name, "vmlinuz", 0, 4000) as receiver,
    ):
        receiver.write(b"x" * 5000)


def test_old_images_are_removed_unless_in_use(tmp_path: Path, key: Path) -> None:
    images = Images(tmp_path / "images")
    made = [make_image(tmp_path, key, word) for word in ("one", "two", "three", "four")]
    for number, image in enumerate(made):
        put_all(images, image)
        os.utime(images.folder / "compute" / image.name, (number, number))
    assert sorted(each.digest for each, _, _ in images.all()) == sorted(each.name for each in made[2:])
    with pytest.raises(HttpProblem, match="is the previous image"):
        images.remove("compute", made[2].name)
    with pytest.raises(HttpProblem, match="is the current image"):
        images.remove("compute", made[3].name)
    put_all(images, made[0], keep=5)
    with pytest.raises(HttpProblem, match="boot parameters reference"):
        images.remove("compute", made[2].name, used=frozenset([made[2].name]))
    assert images.finish("compute", made[0].name, keep=1, used=frozenset([made[2].name])) == []


@pytest.mark.real
def test_a_full_disk_rejects_uploads_and_keeps_the_current_image(tmp_path: Path, key: Path) -> None:
    if os.geteuid():
        pytest.skip("mounts a tmpfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", disk], check=True)
    try:
        images, one = Images(disk / "images"), make_image(tmp_path, key, "one")
        put_all(images, one)
        big = make_image(tmp_path, key, "big", size=20 << 20)
        put(images, big, MANIFEST)
        with pytest.raises(HttpProblem, match="20 MiB do not fit") as caught:
            put(images, big, "root.squashfs")
        assert caught.value.status == 507 and "prov" in caught.value.hint
        # Another writer fills the disk during an upload: the upload is removed again.
        with (
            pytest.raises(HttpProblem) as caught,
            images.receiving("compute", big.name, "root.squashfs", 0, 9 << 20) as receiver,
        ):
            (disk / "other").write_bytes(b"x" * (70 << 20))
            for _ in range(9):
                receiver.write(b"x" * (1 << 20))
        assert caught.value.status == 507
        assert images.received("compute", big.name) == {}
        assert images.current("compute").digest == one.name  # type: ignore[union-attr]
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.fixture(scope="module")
def vm(key: Path) -> Iterator[Vm]:
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    if not Path(nginx).exists() or os.geteuid():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("nginx and root are needed")
    with tempfile.TemporaryDirectory(prefix="sms-i-") as folder:
        server = Vm(Path(folder), nginx=nginx)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def upload(vm: Vm, image: Path) -> Upload:
    files = {each.name: each.stat().st_size for each in image.iterdir()}
    return Upload(vm.admin, f"/sms/v1/images/compute/{image.name}", image, files, lambda done: None)


def test_push_and_rollback_over_http(vm: Vm, tmp_path: Path, key: Path) -> None:
    one, two = make_image(tmp_path, key, "one"), make_image(tmp_path, key, "two")
    for image in (one, two):
        job = upload(vm, image)
        assert job.run() > 3 << 20
        assert vm.admin.request("POST", job.place, {"keep": 3})["current"] == image.name
        assert vm.admin.request("GET", job.place)["whole"] is True
    assert vm.admin.request("POST", "/sms/v1/images/compute/rollback") == {"current": one.name, "previous": two.name}
    rows = vm.admin.request("GET", "/sms/v1/images")["images"]
    assert {row["digest"]: (row["current"], row["previous"]) for row in rows} == {
        one.name: (True, False),
        two.name: (False, True),
    }
    with pytest.raises(Refused, match="is the current image"):
        vm.admin.request("DELETE", f"/sms/v1/images/compute/{one.name}")


def test_an_interrupted_upload_is_resumed(vm: Vm, tmp_path: Path, key: Path) -> None:
    image = make_image(tmp_path, key, "broken")
    job = upload(vm, image)
    for name in (MANIFEST, SIGNATURE):
        job._send(name, 0, job.files[name], 0)

    def wait_until_some_came() -> None:
        def arrived() -> object:
            return vm.admin.request("GET", job.place)["arrived"].get("root.squashfs")

        wait_until(arrived, "a received byte is kept", 30)

    class Breaks:
        """A stream that fails after some bytes were received: nginx may drop what it has not passed on."""

        left = 2

        def read(self, size: int) -> bytes:
            self.left -= 1
            if self.left < 0:
                wait_until_some_came()
                raise OSError("connection broke")
            return (image / "root.squashfs").read_bytes()[(1 - self.left) << 20 :][: 1 << 20]

    with pytest.raises(VmUnreachable):
        vm.admin.send(f"{job.place}/root.squashfs?offset=0", Breaks(), 3 << 20)  # type: ignore[arg-type]
    wait_until_some_came()
    with pytest.raises(Refused, match="not uploaded yet"):
        vm.admin.request("POST", job.place, {})
    assert job.run() < 3 << 20
    assert vm.admin.request("POST", job.place, {})["current"] == image.name


@pytest.mark.parametrize(
    "path", ["/sms/v1/images/..%2f..%2fx/rollback", "/sms/v1/images/compute/x", "/sms/v1/images/a/b/c"]
)
def test_invalid_image_paths(vm: Vm, path: str) -> None:
    with pytest.raises(Refused):
        vm.admin.request("POST", path, {})
