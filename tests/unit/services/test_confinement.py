"""What a container may do: options of Apptainer, the seccomp profile, and the check of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from appliance.catalog import read_catalog, select
from appliance.catalog.model import Capability
from appliance.operations.site.find import open_site
from appliance.plan.machine import PROBE, inside_argv, probe_argv, start_argv, trial_argv
from appliance.plan.services.confinement import (
    NUMBERS,
    SUPERVISOR,
    Confinement,
    capabilities_for,
    find_age,
    find_gaps,
    find_instance_gaps,
    is_unconfined,
)
from appliance.share import share
from tests.confined import INSPECT, confined_output, status_of
from tests.places import DEBIAN_SITE

SITE = open_site(DEBIAN_SITE).site
CATALOG = read_catalog(share("definitions", "services"))
SERVICES = select(CATALOG, SITE.service_names)
CONFINED = Confinement(capabilities_for(SERVICES), "/s/seccomp.json", "/s/empty", ("/proc/sys", "/proc/sys/fs"))


def profile() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(share("definitions", "seccomp.json").read_text())
    return read


def calls(action: str) -> set[str]:
    return {name for rule in profile()["syscalls"] if rule["action"] == action for name in rule["names"]}


def test_a_container_has_the_capabilities_of_its_services_and_of_the_supervisor() -> None:
    few = capabilities_for(select(CATALOG, ["munge"]))
    assert few == tuple(sorted(SUPERVISOR))
    assert set(capabilities_for(SERVICES)) - set(few) == {"AUDIT_WRITE", "NET_ADMIN", "NET_BIND_SERVICE", "SYS_CHROOT"}


def test_every_capability_has_a_number_and_a_reason() -> None:
    assert set(NUMBERS) == set(get_args(Capability))
    reasons = [*SUPERVISOR.values(), *(why for service in CATALOG.values() for why in service.capabilities.values())]
    assert all(len(why) > 10 for why in reasons)


@pytest.mark.parametrize(
    "argv",
    [
        start_argv(SITE, CONFINED, "x.sif"),
        trial_argv(SITE, CONFINED, "x.sif"),
        inside_argv(SITE, SERVICES, "true"),
        probe_argv(SITE, SERVICES, "nat", confined=True),
    ],
    ids=["start", "trial", "inside", "probe"],
)
def test_no_process_gets_more_than_the_instance(argv: tuple[str, ...]) -> None:
    """Also not one that the host starts there: its program may be one that an intruder has replaced."""
    assert "--no-privs" in argv
    added = argv[argv.index("--add-caps") + 1]
    assert added == ",".join(f"CAP_{name}" for name in capabilities_for(SERVICES))
    # One that joins has the filter and the mounts of the instance.
    if not any(word.startswith("instance://") for word in argv):
        assert argv[argv.index("--security") + 1] == "seccomp:/s/seccomp.json"
        read_only, hidden = "--bind=/proc/sys:/proc/sys:ro", "--bind=/s/empty:/proc/sys/fs:ro"
        assert read_only in argv and hidden in argv
        assert argv.index(read_only) < argv.index(hidden), "it would be covered"


def test_only_what_the_host_has_is_hidden() -> None:
    assert not [word for word in CONFINED.options() if "/proc/scsi" in word or "/etc/localtime:" in word]


MOUNTS = """\
922 886 0:21 / /proc rw,nosuid,nodev,relatime master:147 - proc proc rw
1003 922 0:21 /sys /proc/sys ro,nosuid,nodev,relatime master:147 - proc proc rw
1054 922 0:6 /null /proc/keys ro,nosuid,nodev,relatime master:160 - devtmpfs devtmpfs rw,size=12334492k,mode=755
1060 886 254:0 /usr/share/zoneinfo/Etc/UTC /usr/share/zoneinfo/Etc/UTC ro,nosuid - ext4 /dev/vda rw
1074 1003 254:0 /tmp/empty /proc/sys/fs ro,nosuid,nodev,relatime master:124 - ext4 /dev/vda rw
"""
PRESENT = ("/proc/sys/fs", "/proc/keys", "/proc/sys", "/etc/localtime")
STATUS = "Name:\tcat\nCapInh:\t{0}\nCapPrm:\t{0}\nCapEff:\t{0}\nCapBnd:\t{0}\nNoNewPrivs:\t{1}\nSeccomp:\t{2}\n"


@pytest.mark.parametrize(
    ("status", "gaps"),
    [
        (STATUS.format("00000000000000c0", 1, 2), []),
        (STATUS.format("0000000000000000", 1, 2), []),
        (STATUS.format("00000000002000c0", 1, 2), ["CapBnd is 00000000002000c0", "CapPrm is 00000000002000c0"]),
        (STATUS.format("00000000000000c0", 0, 2), ["programs can gain privileges (no_new_privs)"]),
        (STATUS.format("00000000000000c0", 1, 0), ["system calls are not filtered (seccomp)"]),
        ("", ["CapBnd is None", "CapPrm is None", "CapInh is None"]),
    ],
)
def test_gaps_are_found(status: str, gaps: list[str]) -> None:
    found = find_gaps(status + MOUNTS, Confinement(("SETGID", "SETUID"), "", "", PRESENT))
    assert found[: len(gaps)] == gaps and bool(found) == bool(gaps)


@pytest.mark.parametrize(
    ("mounts", "gaps"),
    [
        (MOUNTS, []),
        (MOUNTS.replace("/proc/sys ro,", "/proc/sys rw,"), ["/proc/sys is writable"]),
        (MOUNTS.replace(" /proc/keys ", " /proc/kcore "), ["/proc/keys is not hidden"]),
        (MOUNTS.replace("1074 1003", "x"), ["/proc/sys/fs is not hidden"]),
        (MOUNTS + "1080 1003 0:21 /sys /proc/sys rw,nosuid - proc proc rw\n", ["/proc/sys is writable"]),
        (MOUNTS + "923 886 0:22 / /sys ro,nosuid - sysfs sysfs rw\n", ["/sys is mounted"]),
    ],
)
def test_mounts_that_do_not_confine_are_found(mounts: str, gaps: list[str]) -> None:
    assert find_gaps(STATUS.format("0", 1, 2) + mounts, Confinement((), "", "", PRESENT)) == gaps


def test_mounts_that_are_not_printed_do_not_count_as_confined() -> None:
    assert find_gaps(STATUS.format("0", 1, 2), Confinement((), "", "", ())) == ["its mounts are not known"]


@pytest.mark.parametrize(("new_privs", "seccomp", "unconfined"), [(1, 2, False), (0, 2, True), (0, 0, True)])
def test_an_instance_of_an_earlier_version_is_recognised(new_privs: int, seccomp: int, unconfined: bool) -> None:
    """Also where the host itself runs with a filter of system calls."""
    assert is_unconfined(STATUS.format("0", new_privs, seccomp)) is unconfined


def test_an_instance_of_an_earlier_version_is_probed_with_the_rights_that_its_probes_need() -> None:
    assert "--no-privs" in probe_argv(SITE, SERVICES, "nat", confined=True)
    argv = probe_argv(SITE, SERVICES, "nat", confined=False)
    assert "--no-privs" not in argv and "--add-caps" not in argv and argv[-2:] == (PROBE, "nat")


def test_the_profile_answers_what_it_does_not_list_as_not_implemented() -> None:
    """SCMP_ACT_TRACE without a tracer; a tracer inside could let calls pass, so nobody may trace."""
    assert profile()["defaultAction"] == "SCMP_ACT_TRACE"
    assert {"ptrace", "setns", "mount", "bpf", "init_module"} <= calls("SCMP_ACT_ERRNO")
    assert not calls("SCMP_ACT_ALLOW") & calls("SCMP_ACT_ERRNO")
    assert "clone3" not in calls("SCMP_ACT_ALLOW") | calls("SCMP_ACT_ERRNO"), "the C library tries clone after ENOSYS"


@pytest.mark.parametrize(("call", "more"), [("clone", 0), ("unshare", 0x80)])
def test_no_namespace_can_be_made(call: str, more: int) -> None:
    """CLONE_NEWTIME is a part of the signal of clone."""
    (rule,) = [rule for rule in profile()["syscalls"] if call in rule["names"]]
    (only,) = rule["args"]
    news = more | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
    assert (only["index"], only["value"], only["valueTwo"], only["op"]) == (0, news, 0, "SCMP_CMP_MASKED_EQ")


OPEN = "its first process has a file or device of the host open"
LITTLE = Confinement(("CHOWN", "KILL"), "", "", PRESENT)


def test_an_instance_that_is_confined_has_no_gaps() -> None:
    assert find_instance_gaps(confined_output(LITTLE), LITTLE) == []
    assert find_age(confined_output(LITTLE, joined=False), LITTLE) == []


@pytest.mark.parametrize(
    ("old", "new", "gap"),
    [
        ("own ipc 10\n", "own ipc 1\n", "it is in the host's namespace: ipc"),
        ("own pid 13\n", "", "it is in the host's namespace: pid"),
        ("executable read-only", "executable writable", "it can change Apptainer's programs on the host"),
        ("executable read-only\n", "", "it can change Apptainer's programs on the host"),
        (
            "1 tmpfs file",
            "1 ext2/ext3 file",
            f"{OPEN} (descriptor 1, ext2/ext3)",
        ),
        (
            "1 tmpfs file",
            "1 tmpfs folder",
            f"{OPEN} (descriptor 1, tmpfs)",
        ),
        (
            "1 tmpfs file",
            "0 tmpfs host",
            f"{OPEN} (descriptor 0, tmpfs)",
        ),
        ("/dev/null ro -", "/dev/null rw,nosuid -", "/dev/null is the host's, and can be changed"),
        ("/proc/keys ro,", "/proc/keys rw,", "/proc/keys is not hidden"),
        ("Seccomp:\t2", "Seccomp:\t0", "system calls are not filtered (seccomp)"),
    ],
)
def test_what_an_instance_could_reach_is_a_gap(old: str, new: str, gap: str) -> None:
    shown = confined_output(LITTLE)
    first, _, joined = shown.partition("joined\n")
    assert old in first
    assert find_instance_gaps(f"{first.replace(old, new)}joined\n{joined}", LITTLE) == [gap]
    assert find_age(first.replace(old, new), LITTLE) == [gap]


@pytest.mark.parametrize(
    ("joined", "gap"),
    [
        ("", "it is not known"),
        (status_of(0x21, seccomp=0), "system calls are not filtered (seccomp)"),
        (status_of(0x21, privileges=0), "programs can gain privileges (no_new_privs)"),
        (status_of(0x1021), "CapBnd is 0000000000001021"),
        (f"{status_of(0x21)}unshare permitted\n", "its filter of system calls permits what it should not (seccomp)"),
        (status_of(0x21), "its filter of system calls permits what it should not (seccomp)"),
    ],
)
def test_what_joins_an_instance_is_checked_too(joined: str, gap: str) -> None:
    first = confined_output(LITTLE, joined=False)
    gaps = find_instance_gaps(f"{first}joined\n{joined}", LITTLE)
    assert gaps[0] == f"a program that joins it: {gap}"


JOIN = """
import json, os, sys
held = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)]
kinds = {one: os.readlink("/proc/self/fd/%d" % one)[:5] for one in held}
with open(sys.argv[1], "w") as stream:
    json.dump(kinds, stream)
written = 0
try:
    while written < 32 << 20:
        written += os.write(1, b"x" * 65536)
finally:
    with open(sys.argv[1] + ".written", "w") as stream:
        stream.write(str(written))
"""
"""In the place of the overlay's shell: what it has open, and how much of its output is kept."""


def test_a_program_that_joins_holds_no_file_of_the_host_and_fills_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report"
    argv = [*INSPECT, str(os.getpid()), sys.executable, "-c", JOIN, str(report)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True)
    assert set(json.loads(report.read_text()).values()) == {"pipe:"}
    assert int(Path(f"{report}.written").read_text()) < 1 << 20
    assert b"unshare" not in done.stdout
