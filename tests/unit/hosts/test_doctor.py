"""Facts about a machine, and the findings of `sms doctor`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.config.model import Secrets
from appliance.host.base import Unreachable
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.hosts.doctor import _files, _other_machine, collect_facts, diagnose
from appliance.plan.hosts.apptainer import PINS as PINS_FILE
from appliance.plan.hosts.apptainer import pinned_versions, version_key
from appliance.plan.hosts.distro import family, install_command
from appliance.plan.hosts.doctor import (
    CHECKS,
    PROGRAMS,
    Finding,
    State,
    examine,
    examine_addresses,
    examine_users,
    examine_vm_schedule,
    worst,
)
from appliance.plan.hosts.facts import Bridge, Facts, parse_values, read_bridges, read_masters
from appliance.plan.hosts.integrity import examine_integrity
from appliance.progress import Silent
from appliance.share import share
from tests.support.env import FakeHosts, with_env
from tests.support.fake import Fake

Need = Callable[[str], str]
DEBIAN = 'NAME="Debian GNU/Linux"\nID=debian\n'
ROCKY = 'NAME="Rocky Linux"\nID="rocky"\nID_LIKE="rhel centos fedora"\n'
LEAP = 'NAME="openSUSE Leap"\nID="opensuse-leap"\nID_LIKE="suse opensuse"\n'
SLES = 'NAME="SLES"\nID="sles"\nID_LIKE="suse"\n'

FULL = (1 << 41) - 1
FINE = {
    "uid": "0",
    "kernel": "5.14.0-427.el9",
    "caps": f"{FULL:x}",
    "last_cap": "40",
    "loop": "yes",
    "netns": "yes",
    "bridge": "yes",
    "nft": "yes",
    "programs": " ".join([*PROGRAMS, "singularity", "cron"]),
    "apptainer": "apptainer version 1.4.5",
    "cni": "bridge static tuning",
    "cni_folder": "/usr/lib/cni",
    "bridge_nf": "1",
    "bridge_nf_boot": "1",
    "bridge_rules": "br-prov br-pub",
    "bridge_units": "br-pub br-prov",
    "forward_drops": "",
    "addresses": "127.0.0.1@lo 10.77.0.11@br-prov",
    "clock": "yes",
    "modes": "700:/var/lib/sms/images",
    "systemd": "yes",
    "sms": "/usr/local/bin/sms",
    "cron": "yes",
    "schedule": "cron",
    "schedule_sms": "yes",
    "images_free": str(50 << 30),
    "overlay_free": str(50 << 30),
}
BRIDGES = {"br-prov": Bridge(("eth0",)), "br-pub": Bridge(("eth1",))}


def facts(os_release: str = DEBIAN, bridges: dict[str, Bridge] | None = None, **changes: str | None) -> Facts:
    values = {name: value for name, value in {**FINE, **changes}.items() if value is not None}
    kinds = frozenset({"overlay", "squashfs", "ext3", "ext4"})
    return Facts("host-a", os_release, kinds, values, BRIDGES if bridges is None else bridges)


def problems(of: Facts) -> list[Finding]:
    found = examine(of, bridges={"br-prov": "eth0", "br-pub": None}, overlay_bytes=2 << 30)
    return [finding for finding in found if finding.state != "ok"]


@pytest.mark.parametrize("os_release", [DEBIAN, ROCKY, LEAP, SLES])
def test_a_host_with_everything_lacks_nothing(os_release: str) -> None:
    assert problems(facts(os_release)) == []


@pytest.mark.parametrize(
    ("changes", "what", "state", "command", "note"),
    [
        ({"uid": "1000"}, "root", "missing", "", "run it with sudo"),
        ({"loop": "no"}, "kernel", "missing", "modprobe -a loop", ""),
        ({"kernel": "5.3.18-default"}, "kernel", "warning", "", "before 5.6, `sms migrate` from here loses log lines"),
        ({"nft": "no"}, "nftables in the kernel", "missing", "modprobe nf_tables", ""),
        ({"apptainer": "sh: 1: apptainer: not found"}, "apptainer", "missing", "sms host prepare host-a", ""),
        ({"apptainer": "apptainer version 1.0.3-1.el9"}, "apptainer", "missing", "sms host prepare host-a", ""),
        ({"programs": " ".join([*PROGRAMS, "cron"])}, "the name singularity", "missing", "ln -s apptainer", ""),
        ({"cni": None}, "CNI plugins", "missing", "apt-get install containernetworking-plugins", ""),
        (
            {"cni": None, "cni_elsewhere": "/opt/cni/bin"},
            "CNI plugins",
            "missing",
            "cni plugin path = /opt/cni/bin",
            "",
        ),
        ({"cni": "bridge static"}, "CNI plugins", "missing", "containernetworking-plugins", "tuning"),
        ({"cni": "bridge"}, "CNI plugins", "missing", "containernetworking-plugins", ""),
        ({"caps": f"{FULL & ~(1 << 24):x}"}, "capabilities", "missing", "", "--drop-caps CAP_SYS_RESOURCE"),
        ({"caps": None}, "capabilities", "warning", "grep CapPrm /proc/self/status", ""),
        ({"bridge_rules": "br-prov"}, "firewall and bridges", "warning", "sms host prepare host-a", "on br-pub"),
        ({"bridge_nf": "0", "bridge_units": ""}, "firewall and bridges", "warning", "sms host prepare", "after a boot"),
        (
            {"forward_drops": "inet filter forward\tip evil$(reboot) x"},
            "firewall and bridges",
            "warning",
            "nft insert rule inet filter forward iifname br-prov oifname br-prov accept && nft insert rule inet filter",
            "in inet filter forward if",
        ),
        ({"clock": "no"}, "clock", "warning", "chrony", ""),
        ({"clock": None}, "clock", "warning", "chrony", ""),
        ({"modes": "755:/a/images 700:/a/b"}, "state folders", "warning", "chmod 700 /a/images", ""),
        ({"systemd": "no"}, "after a reboot", "warning", "'@reboot /usr/local/bin/sms --quiet", "no systemd"),
        ({"systemd": "no", "sms": None}, "after a reboot", "warning", "", "sms is not in the PATH"),
        ({"netns": "no"}, "kernel", "missing", "", "no support for netns; use a kernel with CONFIG_NET_NS"),
        ({"cron": "no", "schedule": "systemd", "schedule_runs": "yes"}, "cron", "warning", "enable --now cron", ""),
        ({"schedule": None}, "snapshots", "warning", "sms overlay schedule install --host host-a", "not scheduled"),
        ({"schedule_sms": "no"}, "snapshots", "missing", "sms overlay schedule install", "an sms that does not exist"),
        ({"schedule": "systemd"}, "snapshots", "missing", "sms overlay schedule install", "is not active"),
        ({"images_free": str(100 << 20)}, "room for images", "missing", "", "free space"),
        ({"overlay_free": str(1 << 30)}, "room for the overlay", "warning", "", "free space"),
        ({"overlay_free": None}, "room for the overlay", "warning", "df -h", ""),
    ],
)
def test_one_thing_wrong_is_one_finding(
    changes: dict[str, Any], what: str, state: str, command: str, note: str
) -> None:
    (finding,) = problems(facts(**changes))
    assert (finding.what, finding.state) == (what, state)
    assert command in finding.mend if command else not finding.mend
    assert note in finding.detail


@pytest.mark.parametrize(
    "changes",
    [
        {"bridge_nf": None, "bridge_nf_boot": None, "bridge_rules": "", "bridge_units": ""},
        {"bridge_nf": "0", "bridge_nf_boot": "0", "bridge_rules": "", "bridge_units": "", "forward_drops": "ip a b"},
        {"bridge_nf": "0", "bridge_rules": ""},
    ],
)
def test_bridged_packets_that_no_firewall_sees_need_no_rule(changes: dict[str, Any]) -> None:
    assert problems(facts(**changes)) == []


def test_an_address_of_the_container_that_the_host_has() -> None:
    found = examine_addresses(facts(addresses="10.77.0.1@br-prov 10.78.0.2@x;reboot"), ["10.77.0.1", "10.78.0.2"])
    assert [(one.what, one.state, one.mend) for one in found] == [
        ("address 10.77.0.1", "missing", "ip address del 10.77.0.1 dev br-prov"),
        ("address 10.78.0.2", "missing", "ip address del 10.78.0.2 dev 'x;reboot'"),
    ]
    assert examine_addresses(facts(), ["10.77.0.1"]) == []


def test_one_command_installs_apptainer_and_its_wrapper() -> None:
    lacking = facts(caps=f"{FULL & ~(1 << 24):x}", apptainer="sh: 1: apptainer: not found")
    assert [(finding.detail, finding.mend) for finding in problems(lacking)] == [
        ("not installed", "sms host prepare host-a"),
        ("root lacks CAP_SYS_RESOURCE, and Apptainer requests all", "sms host prepare host-a"),
    ]


def test_kernel_modules_that_can_be_loaded_count() -> None:
    bare = replace(facts(), filesystems=frozenset({"ext3"}))
    (finding,) = problems(bare)
    assert finding.detail == "no support for overlay, squashfs"
    assert finding.mend == "modprobe -a overlay squashfs"
    assert problems(replace(bare, values={**bare.values, "loadable": "overlay squashfs"})) == []


def test_a_wrapper_that_drops_what_root_lacks_is_ok() -> None:
    lacking = f"{FULL & ~(1 << 24) & ~(1 << 38):x}"
    assert problems(facts(caps=lacking, wrapper="CAP_SYS_RESOURCE,CAP_PERFMON")) == []
    (finding,) = problems(facts(caps=lacking, wrapper="CAP_SYS_RESOURCE"))
    assert "CAP_PERFMON" in finding.detail


PINS = "# comment\n" + "".join(
    f"{arch} {package} {version} {'a' * 64} {'b' * 40} pool/x.deb\n"
    for arch in ("amd64", "arm64")
    for package, version in (("apptainer", "1.4.5-2"), ("libc6", "2.41-12+deb13u5"))
)
PINNED = "apptainer=1.4.5-2 libc6=2.41-12+deb13u5"
PREPARE = "sms host prepare host-a"


@pytest.mark.parametrize(
    ("record", "package", "lists", "detail", "command"),
    [
        (PINNED, "", "", "", ""),
        (PINNED, "", "1.4.5-2 1.3.9-1", "", ""),
        (None, "", "1.4.6-1", "", ""),  # not Debian's
        ("", "", "", "1.4.5: installed from sid without a record of versions and digests", PREPARE),
        ("apptainer=1.4.4-1 libc6=2.41-12+deb13u5", "", "", "1.4.5: pinned are apptainer 1.4.5-2", PREPARE),
        ("apptainer=1.4.5-2 libc6=2.41-12", "", "", "1.4.5: pinned are libc6 2.41-12+deb13u5", PREPARE),
        ("apptainer=1.4.5-2", "", "", "1.4.5: pinned are libc6 2.41-12+deb13u5", PREPARE),
        ("apptainer=1.4.6-1 libc6=2.41-12", "", "1.4.6-1", "", ""),  # the administrator's own pins
        (
            PINNED,
            "",
            "1.4.5-2 1.4.10-1 1.4.9-3",
            "1.4.5: 1.4.5-2 is installed, the host's package lists have 1.4.10-1: docs/hosts.md describes the upgrade",
            "",
        ),
        (None, "1.4.5-2", "1.4.5-2", "", ""),
        (
            None,
            "1.4.5-2",
            "1.4.6-1 1.4.5-2",
            "1.4.5: 1.4.5-2 is installed, the host's package lists have 1.4.6-1",
            "apt-get install apptainer",
        ),
        # The private folder is of no use any more.
        ("", "1.4.5-2", "", "", ""),
    ],
)
def test_a_newer_apptainer_is_a_warning(
    record: str | None, package: str, lists: str, detail: str, command: str
) -> None:
    values: dict[str, Any] = {"apptainer_record": record, "apptainer_package": package, "apptainer_lists": lists}
    found = problems(replace(facts(apptainer_arch="amd64", **values), pins=PINS))
    assert [(one.what, one.state, one.detail, one.mend) for one in found] == (
        [("apptainer", "warning", detail, command)] if detail else []
    )


def test_without_pins_for_its_architecture_a_host_has_what_it_has() -> None:
    assert problems(replace(facts(apptainer_arch="riscv64", apptainer_record="apptainer=1.4.4-1"), pins=PINS)) == []


VERSIONS = (
    "0",
    "0~",
    "1.0~rc1-1",
    "1.0",
    "1.0-0",
    "1.0-1~bpo12+1",
    "1.0-1",
    "1.0-1+b2",
    "1.0a",
    "1.0+dfsg-1",
    "1.0.1",
    "1.10",
    "1:0.1",
)


def test_versions_sort_as_dpkg_sorts_them(need: Need) -> None:
    need("dpkg")
    for first in VERSIONS:
        for second in VERSIONS:
            newer = subprocess.run(["dpkg", "--compare-versions", first, "gt", second], check=False).returncode == 0
            assert (version_key(first) > version_key(second)) == newer, (first, second)


def test_the_pins_name_every_package_and_digest() -> None:
    pins = share(*PINS_FILE).read_text()
    for architecture in ("amd64", "arm64"):
        assert set(pinned_versions(pins, architecture)) == {"apptainer", "libc6", "libseccomp2", "libsqlite3-0"}
    for line in pins.splitlines():
        assert re.fullmatch(r"#.*|(amd64|arm64) \S+ \S+ [0-9a-f]{64} [0-9a-f]{40} pool/main/\S+\.deb", line)


@pytest.mark.parametrize(
    ("bridge", "state", "detail"),
    [
        (None, "missing", "does not exist"),
        (Bridge(), "missing", "no port that is up: the container would be isolated"),
        (Bridge(("eth0",), stp=True), "warning", "STP is enabled and drops the first announcements of the addresses"),
        (
            Bridge(("eth0",), mtu=1500, larger=(("eth0", 9000),)),
            "warning",
            "its MTU is 1500, eth0 has 9000: the container takes no larger frames",
        ),
    ],
)
def test_bridges(bridge: Bridge | None, state: str, detail: str) -> None:
    bridges = {"br-pub": BRIDGES["br-pub"], **({"br-prov": bridge} if bridge else {})}
    (finding,) = problems(facts(bridges=bridges))
    assert (finding.what, finding.state, finding.detail) == ("bridge br-prov", state, detail)
    assert finding.mend


def test_a_bridge_gets_the_port_that_the_site_file_names() -> None:
    (provisioning, public) = problems(facts(bridges={"br-prov": Bridge(), "br-pub": Bridge()}))
    assert provisioning.mend == "ip link set dev eth0 master br-prov up"
    assert not public.mend
    assert "set `port` in the site file" in public.detail


@pytest.mark.parametrize(
    ("masters", "changes", "expected"),
    [
        ({"eno1": ""}, {}, []),
        ({}, {}, [("interface eno1", "does not exist or is down: the container is attached to it", "")]),
        (
            {"eno1": "br0"},
            {},
            [
                (
                    "interface eno1",
                    "is a port of br0, and so cannot carry the container: set `port` in the site file",
                    "",
                )
            ],
        ),
        (
            {"eno1": ""},
            {"programs": FINE["programs"]},
            [("macvlan", "no tc, which detaches the interface", "dnf install iproute-tc")],
        ),
        (
            {"eno1": ""},
            {"cni": "bridge static tuning"},
            [
                (
                    "macvlan",
                    "no macvlan among the CNI plugins in /usr/lib/cni",
                    "dnf install containernetworking-plugins",
                )
            ],
        ),
    ],
)
def test_interfaces_that_carry_the_container(
    masters: dict[str, str], changes: dict[str, str], expected: list[tuple[str, str, str]]
) -> None:
    able = {"programs": f"{FINE['programs']} tc", "cni": "bridge static tuning macvlan", **changes}
    of = replace(facts(ROCKY, bridges={}, **able), masters=masters)
    found = examine(of, bridges={}, parents=["eno1", "eno1"], overlay_bytes=2 << 30)
    bad = [(one.what, one.detail, one.mend) for one in found if one.state != "ok"]
    assert bad == expected


def test_links_of_a_host() -> None:
    links: list[dict[str, object]] = [
        {"ifname": "eno1", "flags": ["UP"]},
        {"ifname": "eno2", "flags": ["UP"], "master": "bond0"},
        {"ifname": "eno3", "flags": []},
    ]
    assert dict(read_masters(links)) == {"eno1": "", "eno2": "bond0"}


def test_cron_without_systemd_is_started_by_its_name() -> None:
    assert [finding.mend for finding in problems(facts(systemd="no", cron="no"))][-1] == "cron"


def test_cron_that_is_to_take_snapshots_must_run() -> None:
    found = {finding.what: (finding.state, finding.mend) for finding in problems(facts(cron="no"))}
    assert found["snapshots"] == ("missing", "systemctl enable --now cron")


def test_a_machine_that_only_builds_takes_no_snapshots() -> None:
    found = examine(facts(schedule=None), bridges={}, overlay_bytes=1)
    assert "snapshots" not in {finding.what for finding in found}


@pytest.mark.parametrize(
    ("changes", "state"),
    [({"vm_schedule": "yes"}, ["ok"]), ({}, ["warning"]), ({"schedule": None}, [])],
)
def test_the_vms_state_is_in_the_schedule(changes: dict[str, Any], state: list[str]) -> None:
    """Without any schedule, one finding is enough."""
    found = examine_vm_schedule(facts(**changes))
    assert [one.state for one in found] == state
    assert all(one.mend == "sms overlay schedule install --host host-a" for one in found if one.state != "ok")


def test_an_existing_overlay_needs_no_space() -> None:
    assert problems(facts(overlay_free="0", overlay_there="yes")) == []


@pytest.mark.parametrize(
    ("os_release", "command"),
    [
        (DEBIAN, "apt-get install e2fsprogs iputils-arping"),
        (ROCKY, "dnf install e2fsprogs iputils"),
        (LEAP, "zypper install e2fsprogs iputils"),
        (SLES, "zypper install e2fsprogs iputils"),
        ("ID=arch\n", ""),
    ],
)
def test_each_distribution_has_its_own_fix(os_release: str, command: str) -> None:
    lacking = {"arping", "debugfs", "e2fsck"}
    programs = " ".join([*(name for name in PROGRAMS if name not in lacking), "singularity", "cron"])
    (finding,) = problems(facts(os_release, programs=programs))
    assert (finding.mend, finding.detail) == (command, "not installed: arping, debugfs, e2fsck")


def test_every_program_has_a_package_everywhere() -> None:
    for of in map(family, (DEBIAN, ROCKY, LEAP, SLES)):
        assert len(install_command(PROGRAMS, of).split()) > 3


def test_a_machine_without_facts_gives_findings_not_a_crash() -> None:
    found = examine(Facts("mute", "", frozenset(), {}), bridges={"br-prov": None}, overlay_bytes=1)
    assert len(found) == len(CHECKS) + 5
    assert worst(found) == "missing"
    assert all(finding.detail for finding in found if finding.state != "ok")


ODD = (
    "",
    "x",
    "-1",
    "²",
    ":",
    "a:b",
    "755:0",
    "755:0:/x\t9",
    "8:0:/x",
    "9" * 5000,
    f"{'9' * 5000}.{'9' * 5000}",
    "1:2-3.4\t=",
)
APPTAINER = ("apptainer_program", "apptainer_compared", "apptainer_modes", "apptainer_differs", "apptainer_record")
OTHERS = ("apptainer_package", "nft_rules", "nft_tables", "legacy_tables", "wrapper", "overlay_there", "vm_schedule")


@pytest.mark.parametrize("name", [*FINE, *APPTAINER, *OTHERS])
def test_odd_facts_are_findings_not_a_traceback(name: str) -> None:
    """Root of another admin host chooses what its script prints."""
    for odd in ODD:
        values = {**FINE, "apptainer_program": "/usr/bin/apptainer", "apptainer_record": "version=1.4.5", name: odd}
        of = Facts("host-a", DEBIAN, frozenset(), values, BRIDGES)
        examine(of, bridges={"br-prov": "eth0", "br-pub": None}, parents=("eth2",), overlay_bytes=2 << 30)
        assert all(finding.detail for finding in examine_integrity(of, ("br-prov",)))


LINKS: list[dict[str, object]] = [
    {"ifname": "br-prov", "flags": ["UP"], "linkinfo": {"info_kind": "bridge", "info_data": {"stp_state": 1}}},
    {"ifname": "eth0", "flags": ["UP"], "master": "br-prov"},
    {"ifname": "eth1", "flags": [], "master": "br-prov"},
    {"ifname": "bond0", "flags": ["UP"], "linkinfo": {"info_kind": "bond"}},
]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("uid=0\nprograms=ip nft \n", {"uid": "0", "programs": "ip nft"}),
        ("a message of a program\nsms=\n", {"sms": ""}),
        ("modes=700:/a=b\n", {"modes": "700:/a=b"}),
        ("", {}),
    ],
)
def test_facts_are_read_from_the_script(text: str, values: dict[str, str]) -> None:
    assert parse_values(text) == values


def test_bridges_are_read_from_ip() -> None:
    assert dict(read_bridges(LINKS)) == {"br-prov": Bridge(("eth0",), stp=True)}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    path = tmp_path / "sms.yaml"
    path.write_text(share("definitions", "profiles", "lab.yaml").read_text())
    return open_cluster(path, tmp_path / "state", Silent())


def test_a_host_is_queried_once_and_nothing_is_changed(cluster: Cluster) -> None:
    output = "".join(f"{name}={value}\n" for name, value in FINE.items())
    host = Fake({("sh", "-c"): (0, output), ("ip", "-json"): (0, json.dumps(LINKS))}, name="host-a")
    host.files = {"/proc/filesystems": b"nodev\toverlay\n\text3\n\tsquashfs\n", "/etc/os-release": DEBIAN.encode()}
    found = collect_facts(cluster, host, ())
    assert found.values == FINE
    assert found.bridges == {"br-prov": Bridge(("eth0",), stp=True)}
    assert found.family == "debian"
    assert [argv[0] for argv in host.asked] == ["sh", "ip"]


def test_an_unreachable_host_is_one_finding(cluster: Cluster) -> None:
    def refuse(*_: object) -> tuple[int, str]:
        raise Unreachable("host-a: no route to host", hint="is the host up?")

    name = cluster.site.admin_hosts[0].name
    hosts = FakeHosts({name: Fake({(): refuse})})
    assert diagnose(with_env(cluster, hosts=hosts), name) == [
        Finding("SSH", "missing", "host-a: no route to host; is the host up?")
    ]


@pytest.mark.parametrize(("builds", "state"), [(None, "warning"), ("host-b", "warning"), ("builder", "ok")])
def test_a_machine_that_is_no_admin_host_is_told_so(cluster: Cluster, builds: str | None, state: State) -> None:
    """Also one whose host name is not that of the site file: its networks are not checked."""
    build = cluster.site.build.model_copy(update={"host": builds})
    found = _other_machine(cluster.site.model_copy(update={"build": build}), "builder")
    fix = "" if state == "ok" else "sms doctor --host host-a"
    assert found == Finding("admin host", state, found.detail, fix)


def test_files_are_checked_as_by_config_check(cluster: Cluster, tmp_path: Path) -> None:
    for name, mode in (("ca", 0o644), ("munge", 0o644), ("shadow", 0o600), ("sign", 0o644)):
        (tmp_path / name).write_text("x")
        (tmp_path / name).chmod(mode)
    signing = cluster.site.signing.model_copy(
        update={"private_key": tmp_path / "sign", "public_keys": (tmp_path / "public",), "pgp_fingerprint": None}
    )
    secrets = Secrets(
        munge_key=tmp_path / "munge", shadow=tmp_path / "shadow", tls_ca=tmp_path / "ca", tls_key=tmp_path / "gone"
    )
    site = cluster.site.model_copy(update={"signing": signing, "secrets": secrets})
    found = {finding.what: (finding.state, finding.mend) for finding in _files(site)}
    assert found == {
        "signing key": ("missing", f"chmod 600 {tmp_path}/sign"),
        "public key": ("missing", ""),
        "secrets.munge_key": ("missing", f"chmod 600 {tmp_path}/munge"),
        "secrets.shadow": ("ok", ""),
        "secrets.tls_ca": ("ok", ""),
        "secrets.tls_key": ("missing", ""),
    }
    (tmp_path / "sign").unlink()
    assert ("signing key", "sms key create") in [(finding.what, finding.mend) for finding in _files(site)]
    (tmp_path / "public").write_text("x")
    assert "signing key" not in {finding.what for finding in _files(site)}, "it is on the build host"
    pgp = signing.model_copy(update={"pgp_fingerprint": "A" * 40, "public_keys": (tmp_path / "nowhere",)})
    assert not [each for each in _files(site.model_copy(update={"signing": pgp})) if "key" in each.what.split(" ")]


def test_ids_of_accounts_that_the_host_has_too() -> None:
    users = {"slurm": (64030, 64030), "munge": (351, 351)}
    assert examine_users(facts(), users) == []
    found = examine_users(facts(ids_slurm="64030:64030", ids_munge="106:351"), users)
    assert [(one.what, one.state) for one in found] == [("ids of munge", "warning"), ("ids of slurm", "ok")]
    assert "106:351" in found[0].detail and "351:351" in found[0].detail
