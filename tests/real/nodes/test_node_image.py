"""What nodes without a disk boot: built, looked into, pushed, and booted by PXE, without the lab."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import ssl
import stat
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.errors import Refused
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.nodes.files import put_master
from appliance.operations.nodes.image import NodeImage, build_node, list_nodes, nodes_folder
from appliance.operations.nodes.push import BASE, Upload, push_node, query_images, rollback_node
from appliance.operations.site.ca import make_ca
from appliance.operations.site.keys import create_pair
from appliance.operations.vm.client import open_api
from appliance.plan.nodes.files import Master
from appliance.progress import Silent
from appliance.tools.sealed import check_seal, digest_file
from tests.conftest import find_tool
from tests.provisioning import Vm
from tests.real.netboot import SITE, Machine, network, served

pytestmark = pytest.mark.real

Need = Callable[[str], str]
MAC = "02:00:0a:4d:00:65"
SLURM = b"""\
ClusterName=t-ni
SlurmctldHost=sms-services(10.77.0.1)
SlurmdSpoolDir=/var/spool/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
NodeName=node1 NodeAddr=10.77.0.101 CPUs=1 RealMemory=200 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES State=UP
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A site of its own in the machine's usual state folder: the archive of packages is kept there between runs."""
    for tool in ("mmdebstrap", "mksquashfs", "unsquashfs", "zstd"):
        find_tool(tool)
    with tempfile.TemporaryDirectory(prefix="sms-ni-") as folder:
        site = Path(folder) / "sms.yaml"
        site.write_text(SITE)
        make_ca(Path(folder) / "tls")
        create_pair(Path(folder) / "keys" / "sign.pem", Path(folder) / "keys" / "sign.pub")
        opened = open_cluster(site, None, Silent())
        shutil.rmtree(nodes_folder(opened), ignore_errors=True)
        yield opened
        shutil.rmtree(nodes_folder(opened), ignore_errors=True)


@pytest.fixture(scope="module")
def image(cluster: Cluster) -> NodeImage:
    return build_node(cluster, "compute")


def test_nothing_is_built_when_nothing_changed(cluster: Cluster, image: NodeImage) -> None:
    assert image.fresh
    again = build_node(cluster, "compute")
    assert (again.digest, again.fresh) == (image.digest, False)
    assert [each.digest for each in list_nodes(cluster)] == [image.digest]
    assert sorted(path.name for path in Path(image.path).iterdir()) == [
        "initrd.img",
        "manifest.json",
        "manifest.sig",
        "root.squashfs",
        "vmlinuz",
    ]
    left = {path.name for path in nodes_folder(cluster).glob("compute/*")} - {".lock", "build.log"}
    assert left == {image.digest, "current"}


def test_no_secret_is_in_it(cluster: Cluster, image: NodeImage, tmp_path: Path) -> None:
    """Anybody gets it from the VM by plain HTTP."""
    root = tmp_path / "root"
    subprocess.run(["unsquashfs", "-q", "-n", "-d", root, Path(image.path) / "root.squashfs"], check=True)
    assert not (root / "etc/munge/munge.key").exists()
    assert not list((root / "etc").glob("ssh/ssh_host_*"))
    assert (root / "etc/machine-id").read_bytes() == b""
    for line in (root / "etc/shadow").read_text().splitlines():
        assert re.fullmatch(r"[!*]*", line.split(":")[1]), f"a password of {line.split(':')[0]}"
    assert (root / "etc/sms/tls/ca.pem").read_bytes() == (cluster.path.parent / "tls/ca.pem").read_bytes()  # type: ignore[union-attr]
    for path in root.rglob("*"):
        # ASN.1 samples of libraries would be in usr/share/doc, which is left out.
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
            assert b"-----BEGIN PRIVATE KEY" not in path.read_bytes(), path
    for path in (root / "opt").rglob("*"):
        assert not path.stat().st_mode & (stat.S_ISUID | stat.S_IWOTH)
    assert {path.name for path in (root / "opt/sms/bin").iterdir()} >= {"sms-enroll", "sms-filesync"}


def test_one_that_was_changed_is_not_pushed(cluster: Cluster, image: NodeImage) -> None:
    kernel = Path(image.path) / "vmlinuz"
    data = kernel.read_bytes()
    try:
        kernel.write_bytes(data[:-1] + b"x")
        with pytest.raises(Refused, match="vmlinuz does not match its digest"):
            push_node(cluster, "compute")
    finally:
        kernel.write_bytes(data)
    check_seal(Path(image.path), cluster.site.signing.public_keys)


@pytest.fixture(scope="module")
def vm(cluster: Cluster, image: NodeImage) -> Iterator[Vm]:
    """A server with the image, the node's entry, and the files that it needs."""
    for tool in ("qemu-system-x86_64", "dnsmasq", "nginx"):
        find_tool(tool)
    assert cluster.path is not None
    tools = {"nginx": find_tool("nginx"), "dnsmasq": find_tool("dnsmasq")}
    with (
        tempfile.TemporaryDirectory(prefix="sms-nb-") as name,
        network(Path(name)) as folder,
        served(folder, cluster.path.parent / "tls", **tools) as server,
    ):
        assert push_node(cluster, "compute").fresh
        assert not push_node(cluster, "compute").fresh
        server.admin.request("PUT", "/sms/v1/nodes/node1", {"macs": [MAC], "address": "10.77.0.101"})
        put_master(server.admin, Master("/etc/slurm/slurm.conf", SLURM))
        key = secrets.token_bytes(128)
        put_master(server.admin, Master("/etc/munge/munge.key", key, mode="0400", owner="munge", group="munge"))
        yield server


IPXE_SCRIPT = """\
#!ipxe
dhcp
chain https://10.77.0.2:8443/boot.ipxe
"""


@pytest.mark.full
@pytest.mark.skipif("SMS_IPXE" not in os.environ, reason="needs the folder src of iPXE's source in SMS_IPXE")
def test_a_node_boots_by_an_ipxe_that_has_the_sites_authority(cluster: Cluster, vm: Vm) -> None:
    """Built as docs/node-images.md says: script, kernel and initramfs are sent over HTTPS only."""
    assert cluster.path is not None
    script, source, target = vm.folder / "https.ipxe", os.environ["SMS_IPXE"], "bin-x86_64-pcbios/virtio-net.lkrn"
    script.write_text(IPXE_SCRIPT)
    trust = f"TRUST={cluster.path.parent / 'tls/ca.pem'}"
    subprocess.run(["make", "-s", "-C", source, f"EMBED={script}", trust, target], check=True)
    with Machine(vm.folder, "node1", MAC, ipxe=Path(source) / target) as machine:
        said = machine.wait_for("is up after", most_s=600)
    print(said)
    for name in ("boot.ipxe", "vmlinuz", "initrd.img"):
        # Between them may be how much has arrived.
        assert re.search(rf"https://10\.77\.0\.2:8443/\S*{name}\.\.\..* ok", said), name
    # The initramfs fetches the root by HTTP, and verifies its signature.
    assert "http://10.77.0.2" not in said.partition("sms: ")[0]


def test_a_node_boots_to_slurmd(cluster: Cluster, vm: Vm) -> None:
    """By PXE, with a certificate of its own, its key and its slurm.conf from the server."""
    with Machine(vm.folder, "node1", MAC) as machine:
        said = machine.wait_for("slurmd is active")
        assert "node1 has its certificate" in said
        assert "/etc/munge/munge.key changed" in said
        clients = {each["client"]: each for each in vm.admin.request("GET", "/sms/v1/sync/reports")["clients"]}
        (node,) = (each for name, each in clients.items() if name.endswith("node1"))
        assert node["at"] is not None and node["missing"] == []
    print(said[-600:])


def test_an_image_with_a_wrong_digest_is_not_booted(cluster: Cluster, image: NodeImage, vm: Vm) -> None:
    """The node says so, and begins again."""
    there = vm.state / "images" / "compute" / image.digest / "root.squashfs"
    data = there.read_bytes()
    try:
        there.write_bytes(data[: 1 << 20] + b"x" + data[(1 << 20) + 1 :])
        with Machine(vm.folder, "node1", MAC) as machine:
            said = machine.wait_for("is not the image it should be")
            assert "is up after" not in said
    finally:
        there.write_bytes(data)


def test_there_is_nothing_before_the_first_image(cluster: Cluster, vm: Vm) -> None:
    with pytest.raises(Refused, match="compute has no previous image"):
        rollback_node(cluster, "compute")
    images, why = query_images(cluster)
    assert why == "" and [each["current"] for each in images] == [True]


def test_an_image_that_the_site_has_not_signed_is_not_booted(
    cluster: Cluster, image: NodeImage, vm: Vm, tmp_path: Path
) -> None:
    """An attacker who writes to the VM can give it another root and its digests, but not the signature."""
    other = tmp_path / "image"
    shutil.copytree(image.path, other)
    with (other / "root.squashfs").open("ab") as stream:
        stream.write(bytes(4096))  # it can be mounted
    about = json.loads((other / "manifest.json").read_text())
    digest, size = digest_file(other / "root.squashfs")
    about["files"]["root.squashfs"] = {"sha256": digest, "bytes": size}
    (other / "manifest.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")
    place = f"{BASE}/compute/{digest}"
    sizes = {path.name: path.stat().st_size for path in other.iterdir()}
    api = open_api(cluster)
    Upload(api, place, other, sizes, lambda _: None).run()
    api.request("POST", place, {"keep": 3})
    try:
        with Machine(vm.folder, "node1", MAC) as machine:
            said = machine.wait_for("the node starts again in 60 s")
        assert f"/images/compute/{digest}/manifest.json is not signed with a key of this site" in said
        assert "fetching http://10.77.0.2/images/compute/" in said and "root.squashfs" not in said.split("fetching")[-1]
        assert "starting the system of" not in said
    finally:
        rollback_node(cluster, "compute")


def test_an_ipxe_that_verifies_the_server_gets_all_it_fetches_over_https(
    cluster: Cluster, image: NodeImage, vm: Vm
) -> None:
    assert cluster.path is not None
    trust = ssl.create_default_context(cafile=str(cluster.path.parent / "tls" / "ca.pem"))

    def get(url: str) -> bytes:
        assert url.startswith("https://10.77.0.2:8443/")
        with urllib.request.urlopen(url, timeout=20, context=trust) as answer:
            data: bytes = answer.read()
            return data

    first = get("https://10.77.0.2:8443/boot.ipxe").decode()
    (chained,) = re.findall(r"^chain \S+ \S+ (\S+)\?mac=", first, re.MULTILINE)
    script = get(f"{chained}?mac={MAC}").decode()
    for command, name in (("kernel", "vmlinuz"), ("initrd", "initrd.img")):
        (url,) = re.findall(rf"^{command} --name {re.escape(name)} (\S+)", script, re.MULTILINE)
        assert get(url) == (Path(image.path) / name).read_bytes()
    assert "sms.image=http://10.77.0.2/images/" in script
