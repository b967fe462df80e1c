"""Plans of the provisioning VM: disks, seed, network cards, who may start it, its health."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.catalog import read_bases
from appliance.cli.vm.snapshot import elsewhere
from appliance.config.model import ProvisioningNetwork
from appliance.config.read import read_site
from appliance.errors import ConfigError, Refused
from appliance.host.base import CommandError
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.vm import status, vm
from appliance.operations.vm.image import VmImage
from appliance.operations.vm.inside import read_console
from appliance.operations.vm.migrate import _keep_as_snapshot
from appliance.operations.vm.restore import _copy
from appliance.operations.vm.snapshots import NOTE, check_name
from appliance.operations.vm.start import StartedVm, keep_console, prepare_disks
from appliance.operations.vm.vm import DISKS, finish_restore, read_health
from appliance.plan.vm.holder import (
    Holder,
    HostView,
    check_disks_here,
    check_source,
    has_disks,
    may_start,
    read_holder,
    running_host,
)
from appliance.plan.vm.vm import (
    FIRST_DESCRIPTOR,
    Opened,
    VmPlaces,
    cards,
    choose_accel,
    find_account,
    network_units,
    provision_document,
    qemu_machine,
    seed_archive,
)
from appliance.share import share
from appliance.shared.records import RecordError, to_json
from appliance.tools.files import is_locked
from tests.sites import WITH_VM, make_site
from tests.support.env import fake_env
from tests.support.fake import Fake
from tests.support.vm import vm_answers


def blockdevs(argv: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the block devices of a command, by node name."""
    nodes = [json.loads(argv[i + 1]) for i, word in enumerate(argv) if word == "-blockdev"]
    return {node["node-name"]: node for node in nodes}


def test_the_image_is_read_only_and_disks_are_locked(tmp_path: Path) -> None:
    """The backing chain is explicit: backing files named in an overlay are ignored."""
    machine = qemu_machine(make_site(tmp_path), "/images/disk.qcow2", "tcg")
    nodes = blockdevs(machine.argv)
    inherited = {f"/dev/fdset/{number}": one for number, one in enumerate(machine.opened, FIRST_DESCRIPTOR)}
    opened = {name: inherited[node["filename"]] for name, node in nodes.items() if "filename" in node}
    assert nodes["image"]["read-only"] and nodes["image-file"]["read-only"] and nodes["seed"]["read-only"]
    assert opened["image-file"] == Opened("read", "/images/disk.qcow2") and opened["seed-file"].kind == "read"
    assert opened["state-file"].kind == "write" and opened["state-file"].path.endswith("/one/state.qcow2")
    assert nodes["root"]["backing"] == "image" and nodes["state"]["backing"] is None
    assert nodes["state-file"]["locking"] == nodes["root-file"]["locking"] == "on"


def test_qemu_opens_nothing_but_the_firmware_by_name(tmp_path: Path) -> None:
    """Its account owns no file; each descriptor is used once, and files are declared as sets."""
    machine = qemu_machine(make_site(tmp_path), "/images/disk.qcow2", "tcg")
    line = " ".join(machine.argv)
    assert not [one.path for one in machine.opened if one.path.startswith("/") and one.path in line]
    for number, one in enumerate(machine.opened, FIRST_DESCRIPTOR):
        uses = re.findall(rf"(?:fd=|/dev/fdset/){number}\b(?!,set=)", line)
        assert len(uses) == 1, one
        assert (f"fd={number},set={number}" in machine.argv) == (one.kind not in ("socket", "tap"))
    assert "ifname=" not in line and "-sandbox on," in line


@pytest.mark.parametrize(
    ("accel", "expected"),
    [("kvm", ("kvm", "host")), ("tcg", ("tcg,thread=multi,tb-size=256", "qemu64,+rdrand,+ssse3"))],
)
def test_exactly_one_accelerator_is_configured(tmp_path: Path, accel: str, expected: tuple[str, str]) -> None:
    """QEMU would fall back only if KVM cannot be opened, not if it cannot run a kernel."""
    machine = qemu_machine(make_site(tmp_path), "i", accel)
    argv = machine.argv
    assert argv.count("-accel") == 1 and machine.kvm == (accel == "kvm")
    assert argv[argv.index("-accel") + 1] == expected[0]
    assert argv[argv.index("-cpu") + 1].startswith(expected[1])


def test_the_target_of_a_live_migration_does_not_run_by_itself(tmp_path: Path) -> None:
    """Its memory comes by a descriptor; it appends to the console's log, which the source still writes."""
    machine = qemu_machine(make_site(tmp_path), "i", "kvm", incoming=True)
    assert machine.argv[machine.argv.index("-incoming") + 1] == "defer" and "-S" in machine.argv
    assert "append" in {one.kind for one in machine.opened}


@pytest.mark.parametrize(
    ("modules", "device", "accel", "why"),
    [
        (["kvm", "kvm_intel"], True, "kvm", ""),
        (["kvm", "kvm_amd"], True, "kvm", ""),
        (["kvm", "kvm_intel"], False, "tcg", "cannot open it"),
        (["kvm", "kvm_intel", "kvm_pvm"], True, "tcg", "kvm_pvm"),
        (["kvm", "kvm_pvm"], True, "tcg", "kvm_pvm"),
        (["kvm"], True, "tcg", "neither"),
        ([], True, "tcg", "neither"),
    ],
)
def test_kvm_is_used_if_it_works(modules: list[str], device: bool, accel: str, why: str) -> None:
    """It is not enough that the device can be opened."""
    found = choose_accel(modules, device)
    assert found[0] == accel
    assert why in found[1]


def test_each_cluster_of_a_host_has_an_account_for_its_machine(tmp_path: Path) -> None:
    """One QEMU must not open the files that another one has open, in /proc, nor stop it."""
    site = make_site(tmp_path)
    others = [site.model_copy(update={"cluster": name}) for name in ("b", "a" * 31, "a" * 30)]
    accounts = [find_account(one) for one in (site, *others)]
    assert len(set(accounts)) == 4 and accounts[0] == find_account(make_site(tmp_path))
    assert all(re.fullmatch(r"[a-z][a-z0-9-]{0,31}", one) for one in accounts)


def test_cards_and_their_networks(tmp_path: Path) -> None:
    """One card: the gateway is the container. Two: the public card has the gateway."""
    (only,) = cards(make_site(tmp_path))
    assert (only.bridge, only.mac, only.address, only.prefix) == ("br-p", "02:00:0a:00:00:02", "10.0.0.2", 16)
    assert only.gateway == "10.0.0.1"
    public = {"address": "192.0.2.10/24", "mac": "02:00:c0:00:02:0a"}
    first, second = cards(make_site(tmp_path, public=public))
    assert (first.gateway, second.gateway, second.bridge) == ("", "192.0.2.254", "br-x")
    assert len({first.tap, second.tap}) == 2
    assert all(len(card.tap) <= 15 for card in (first, second))
    units = list(network_units(make_site(tmp_path, public=public)).values())
    assert "MACAddress=02:00:c0:00:02:0a" in units[1] and "Gateway=192.0.2.254" in units[1]


def test_the_vm_has_the_routes_to_nodes_behind_routers(tmp_path: Path) -> None:
    site = make_site(tmp_path, public={"address": "192.0.2.10/24", "mac": "02:00:c0:00:02:0a"})
    routes = [
        {"network": "10.100.0.0/17", "gateway": "10.0.0.254"},
        {"network": "10.101.0.0/17", "gateway": "10.0.0.3"},
    ]
    network = ProvisioningNetwork.model_validate({**WITH_VM["networks"]["provisioning"], "routes": routes})
    networks = site.networks.model_copy(update={"provisioning": network})
    first, second = network_units(site.model_copy(update={"networks": networks})).values()
    assert first.endswith(
        "\n\n[Route]\nDestination=10.100.0.0/17\nGateway=10.0.0.254\n"
        "\n[Route]\nDestination=10.101.0.0/17\nGateway=10.0.0.3\n"
    )
    assert "[Route]" not in second


def test_the_seed_is_complete_and_its_keys_are_private(tmp_path: Path) -> None:
    """Names, network and certificates; keys are readable by their users only. The size is a multiple of a sector."""
    names = ("ca.pem", "server.pem", "server.key", "issuer.pem", "issuer.key")
    data = seed_archive(make_site(tmp_path), {name: name.encode() for name in names}, database="postgresql://u:p@h/d")
    assert len(data) % 512 == 0
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        entries = {entry.name: entry for entry in archive.getmembers()}
        document = json.load(archive.extractfile("etc/sms/provision.json"))  # type: ignore[arg-type]
    assert document["database"] == "postgresql://u:p@h/d"
    modes = {name: (entries[f"etc/sms/tls/{name}"].mode, entries[f"etc/sms/tls/{name}"].gname) for name in names}
    assert modes["server.key"] == (0o640, "root") and modes["issuer.key"] == (0o640, "sms-provision")
    assert modes["ca.pem"] == (0o644, "root")
    assert entries["etc/sms/provision.json"].mode == 0o640
    assert not any(entry.name.startswith("/") or ".." in entry.name for entry in entries.values())


def test_the_configuration_document(tmp_path: Path) -> None:
    """provd accepts the document."""
    from appliance.provision.config import parse_config

    pool = {"first": "10.0.9.1", "last": "10.0.9.99"}
    document = provision_document(make_site(tmp_path, pool=pool, unknown="discover"))
    assert document["pool"] == ["10.0.9.1", "10.0.9.99"]
    assert document["services"] == {"address": "10.0.0.1", "hostname": "sms-services"}
    config = parse_config(document)
    assert config.address == "10.0.0.2" and config.unknown == "discover"
    assert "database" in document and "@" not in str(document["database"])


def test_a_site_without_a_vm_is_an_error(tmp_path: Path) -> None:
    """The error explains how to add one."""
    (tmp_path / "sms.yaml").write_text(yaml.safe_dump({key: WITH_VM[key] for key in WITH_VM if key != "provisioning"}))
    site, _ = read_site(tmp_path / "sms.yaml")
    with pytest.raises(ConfigError, match="no provisioning VM"):
        VmPlaces(site)


A, B = HostView("a"), HostView("b")
SILENT = HostView("b", reachable=False)
LEFT = HostView("b", running=True, holder=Holder("a", 2))
"""What an interrupted migration can leave on the source."""


@pytest.mark.parametrize(
    ("views", "options", "outcome"),
    [
        ([A, B], {}, Holder("a", 1)),
        ([HostView("a", holder=Holder("a", 4)), B], {}, Holder("a", 4)),
        ([HostView("a", holder=Holder("a", 1)), SILENT], {}, Holder("a", 1)),
        ([HostView("a", holder=Holder("a", 4)), SILENT], {}, "it may have newer ones"),
        ([HostView("a", holder=Holder("a", 4)), SILENT], {"force": True}, Holder("a", 5)),
        ([HostView("a", holder=Holder("a", 4)), HostView("b", holder=Holder("b", 4))], {}, "a and b both claim"),
        (
            [HostView("a", holder=Holder("a", 4)), HostView("b", holder=Holder("b", 4))],
            {"force": True},
            Holder("a", 5),
        ),
        ([A, SILENT], {}, "is unreachable"),
        ([A, SILENT], {"force": True}, Holder("a", 2)),
        ([A, HostView("b", running=True)], {}, "runs on b already"),
        ([A, HostView("b", running=True)], {"force": True}, "runs on b already"),
        ([HostView("a", holder=Holder("a", 4)), HostView("b", holder=Holder("b", 5))], {}, "disks are on b"),
        (
            [HostView("a", holder=Holder("b", 5)), HostView("b", holder=Holder("b", 5))],
            {"shared": True},
            Holder("a", 6),
        ),
        ([HostView("a", holder=Holder("b", 5)), SILENT], {}, "which is unreachable"),
        ([HostView("a", holder=Holder("b", 5)), SILENT], {"shared": True}, "which is unreachable"),
        ([HostView("a", holder=Holder("b", 5)), SILENT], {"force": True}, Holder("a", 6)),
        ([HostView("a", holder=Holder("c", 5)), B], {}, "which is unreachable"),
        ([HostView("a", holder=Holder("a", 2)), LEFT], {}, "runs on b, and its disks are on a"),
    ],
)
def test_who_may_start_it(views: list[HostView], options: dict[str, bool], outcome: Holder | str) -> None:
    """Never two machines on one state, never an empty state next to an existing one."""
    if isinstance(outcome, Holder):
        assert may_start("a", views, **options) == outcome
    else:
        with pytest.raises(Refused, match=outcome):
            may_start("a", views, **options)


@pytest.mark.parametrize(
    ("views", "has", "refused"),
    [
        ([A, B], False, ""),
        ([HostView("a", holder=Holder("a", 1)), SILENT], True, ""),
        ([HostView("a", running=True, holder=Holder("a", 1)), B], False, ""),
        # A shared folder: the record is the same, the machine is on the other host.
        (
            [HostView("a", holder=Holder("b", 2)), HostView("b", running=True, holder=Holder("b", 2))],
            False,
            "runs on b already",
        ),
        ([HostView("a", holder=Holder("b", 2)), HostView("b", holder=Holder("b", 2))], False, "disks are on b"),
        ([HostView("a", holder=Holder("b", 2)), SILENT], False, "disks are on b"),
    ],
)
def test_who_may_change_the_disks(views: list[HostView], has: bool, refused: str) -> None:
    """Only the host that has the disks may clean up, take snapshots or restore."""
    assert has_disks("a", views) is has
    if refused:
        with pytest.raises(Refused, match=refused):
            check_disks_here("a", views)
    else:
        check_disks_here("a", views)


def test_a_machine_that_a_migration_left_is_stopped_not_moved() -> None:
    """Its memory is older than the disks."""
    ended = HostView("a", holder=Holder("a", 2))
    for refused in (lambda: may_start("a", [ended, LEFT]), lambda: check_source("b", [ended, LEFT])):
        with pytest.raises(Refused) as found:
            refused()
        assert found.value.hint == "`sms vm stop --host b`"
    with pytest.raises(Refused, match="also runs on b"):
        check_source("a", [replace(ended, running=True), LEFT])
    check_source("a", [replace(ended, running=True), SILENT])
    check_source("a", [ended, SILENT])
    check_source("a", [HostView("a", running=True), B])


def test_of_two_machines_the_one_with_the_disks_counts(tmp_path: Path) -> None:
    """Verbs without --host act on it, and the status is its."""
    both = [LEFT, HostView("a", running=True, holder=Holder("a", 2))]
    assert [running_host(views) for views in (both, both[:1], [A, B], [B, HostView("a", running=True)])] == [
        *("a", "b", "", "a")
    ]
    site = make_site(tmp_path)
    two = tuple(site.admin_hosts[0].model_copy(update={"name": name}) for name in "ab")
    hosts = {name: Fake({**vm_answers("one"), ("python3",): (74, "no agent")}, name=name) for name in "ab"}
    for view in both:
        hosts[view.name].files[str(VmPlaces(site).holder)] = to_json(view.holder)
    base = read_bases(share("definitions", "bases"))["debian-12"]
    cluster = Cluster(site.model_copy(update={"admin_hosts": two}), (), base, env=fake_env(hosts))
    found = status.status_vm(cluster, hosts["b"])
    assert (vm.find_vm(cluster, None).name, found.host, found.running) == ("a", "a", True)


def test_an_interrupted_restore_loses_no_disk(tmp_path: Path) -> None:
    """At every step: the old disks are completely in the snapshot before they are replaced."""
    finish = share("definitions", "scripts", "vm-finish-restore")
    script = finish.read_text().replace("mv -fT", "step; mv -fT").replace("ln -T", "step; ln -T")
    for cut in range(1, 8):
        disks = tmp_path / str(cut)
        disks.mkdir()
        for disk in DISKS:
            (disks / f"{disk}.qcow2").write_text(f"old {disk}")
            (disks / f"{disk}.restored").write_text(f"new {disk}")
        (disks / "root.image").write_text("old image")
        (disks / "root.image.restored").write_text("new image")
        (disks / "restore.json").write_text("kept")
        # The n-th step kills the script, without cleanup.
        count = f'n=0; step() {{ n=$((n + 1)); [ "$n" -ne {cut} ] || kill -9 $$; }};'
        Local().run("sh", "-c", count + script, "finish", str(disks), ok=None)
        for disk in DISKS:
            kept = disks / "snapshots" / "kept" / f"{disk}.qcow2"
            assert (disks / f"{disk}.qcow2").read_text() == f"old {disk}" or kept.read_text() == f"old {disk}"
        Local().run("sh", str(finish), str(disks))
        for disk in DISKS:
            assert (disks / f"{disk}.qcow2").read_text() == f"new {disk}"
            assert (disks / "snapshots" / "kept" / f"{disk}.qcow2").read_text() == f"old {disk}"
        assert (disks / "root.image").read_text() == "new image"
        assert (disks / "snapshots" / "kept" / "root.image").read_text() == "old image"
        assert not [*disks.glob("*restore*"), *disks.glob("snapshots/*/*.new")]


def test_a_restore_that_cannot_keep_the_old_disk_stops(tmp_path: Path) -> None:
    """Nothing is replaced, and the next run retries."""
    for name in ("root.qcow2", "root.restored"):
        (tmp_path / name).write_text(name)
    (tmp_path / "restore.json").write_text("kept")
    (tmp_path / "snapshots").write_text("no folder")
    with pytest.raises(CommandError):
        Local().run("sh", str(share("definitions", "scripts", "vm-finish-restore")), str(tmp_path))
    assert (tmp_path / "root.qcow2").read_text() == "root.qcow2"
    assert (tmp_path / "root.restored").exists() and (tmp_path / "restore.json").exists()


def test_disks_become_a_snapshot_and_are_copied_back(tmp_path: Path) -> None:
    cluster = Cluster(
        make_site(tmp_path, directory=str(tmp_path / "vm")), (), read_bases(share("definitions", "bases"))["debian-12"]
    )
    where = VmPlaces(cluster.site)
    disks = Path(where.disks)
    assert _keep_as_snapshot(cluster, Local(), "moved", prefix="before", generation=3) == ""
    disks.mkdir(parents=True)
    for path in (where.root, where.state, where.root_image):
        Path(path).write_text(path.name)
    kept = _keep_as_snapshot(cluster, Local(), "moved", prefix="before", generation=3)
    folder = Path(where.snapshots) / kept
    assert {path.name for path in folder.iterdir()} == {"root.image", "root.qcow2", "state.qcow2", NOTE}
    record = json.loads((folder / NOTE).read_bytes())
    assert (record["generation"], record["sequence"], record["verified"]) == (3, 1, False)
    _copy(Local(), where, str(folder))
    copied = {path.name: path.read_text() for path in disks.iterdir() if path.is_file()}
    assert copied == {f"{name}.restored": text for name, text in RESTORED.items()}
    assert finish_restore(Local(), where) == "" and not list(disks.glob("*.restored"))


RESTORED = {"root": "root.qcow2", "state": "state.qcow2", "root.image": "root.image"}


def test_unreadable_records_are_ignored() -> None:
    """A damaged record does not count as missing: its host may have the newest disks."""
    assert read_holder(to_json(Holder("a", 3))) == Holder("a", 3)
    assert read_holder(None) is None
    for data in (b"", b"{}", b"[]", b'{"holder": 1', b'{"holder": "a"}'):
        with pytest.raises(RecordError):
            read_holder(data)


GOOD = """\
unit sms-seed active
unit sms-provd active
unit nginx active
state 100 2000
https 404
api 200 {"version": "1"}
"""


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (("", ""), ""),
        (("nginx active", "nginx failed"), "nginx: failed"),
        (("state 100 2000\n", ""), "disk: not mounted"),
        (("state 100 2000", "state 100 2000 ro"), "disk: read-only: its file system is damaged"),
        (("https 404", "https 000"), "https: no answer (000)"),
        (("https 404", "https 502"), "https: no answer (502)"),
        (('api 200 {"version": "1"}', "api 000 "), "api: no answer (000)"),
        (("unit nginx active", "unit nginx"), "nginx: unknown"),
    ],
)
def test_health_is_parsed(change: tuple[str, str], wrong: str) -> None:
    """Each service has its own state."""
    health = read_health(GOOD.replace(*change) if change[0] else GOOD)
    assert health.failures == wrong
    assert health.ok == (not wrong)
    assert read_health(GOOD).api == {"version": "1"}
    assert not read_health("").ok


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "x.part", "a b", "x" * 65, "\n"])
def test_invalid_snapshot_names(name: str) -> None:
    """They are used as folder names."""
    with pytest.raises(ConfigError):
        check_name(name)


def test_another_image_needs_a_new_root(tmp_path: Path, need: Callable[[str], str]) -> None:
    """A different build under the same path needs a new root; the same build does not."""
    need("qemu-img")
    need("mke2fs")
    site = make_site(tmp_path, directory=str(tmp_path / "vm"), disk_mb=512)
    cluster = Cluster(site, (), read_bases(share("definitions", "bases"))["debian-12"])
    where = VmPlaces(site)
    Path(where.disks).mkdir(parents=True)
    image = tmp_path / "disk.qcow2"
    Local().run("qemu-img", "create", "-q", "-f", "qcow2", str(image), "64M")
    fresh = []
    for digest in ("one", "one", "two"):
        started = StartedVm("a", "", "", "", "", "", 1)
        prepare_disks(cluster, Local(), VmImage(str(image), "key", digest, "", ""), started, ExitStack())
        fresh.append(started.fresh_root)
    assert fresh == [True, False, True]
    assert Path(where.root_image).read_text() == "two"


def test_the_console_log_of_a_failed_start_is_kept(tmp_path: Path) -> None:
    """It is shown until a later run has output."""
    site = make_site(tmp_path, directory=str(tmp_path / "vm"))
    site = site.model_copy(update={"cluster": "t-console"})
    cluster = Cluster(site, (), read_bases(share("definitions", "bases"))["debian-12"])
    log = Path(VmPlaces(site).console_log)
    log.parent.mkdir(parents=True)
    with pytest.raises(Refused, match="no log"):
        read_console(cluster, Local())
    log.write_text("failed")
    keep_console(cluster, Local())
    assert not log.exists() and read_console(cluster, Local()) == b"failed"
    os.utime(VmPlaces(site).console_failed, (1, 1))
    log.write_text("later")
    assert read_console(cluster, Local()) == b"later"


def test_a_start_in_progress_is_detected(tmp_path: Path) -> None:
    """The lock is neither waited for nor created."""
    lock = tmp_path / "vm.lock"
    assert not is_locked(Local(), str(lock)) and not lock.exists()
    with Local().lock(str(lock)):
        assert is_locked(Local(), str(lock))
    assert not is_locked(Local(), str(lock))


def test_snapshots_of_other_hosts_are_counted() -> None:
    assert elsewhere({}) == ""
    assert elsewhere({"host-a": 5}) == "5 on host-a: sms vm snapshot --list --host host-a"
