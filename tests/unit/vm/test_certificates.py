"""Renewal of certificates while VM and container run, and the list of revoked ones on every admin host."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ConfigError, SmsError
from appliance.host.base import OnLine, Result, Unreachable
from appliance.host.stream import Stream
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.site import ca
from appliance.operations.site.init import read_profile
from appliance.operations.site.issued import read_revoked, serial_of
from appliance.operations.snapshots.scheduled import run_scheduled
from appliance.operations.snapshots.snapshot import SnapshotOptions
from appliance.operations.vm import certificates, start, status
from appliance.operations.vm.certificates import container_problems
from appliance.operations.vm.revoke import revoke
from appliance.operations.vm.start import VmNote, make_seed, read_note
from appliance.operations.vm.vm import HEALTH
from appliance.plan.vm.vm import VmPlaces
from appliance.progress import Silent
from appliance.shared.lease import Lease
from appliance.shared.records import to_json
from appliance.tools.apptainer import Instance
from appliance.tools.guest import GuestResult
from appliance.tools.scripts import script_argv
from tests.support.env import FakeClock, FakeHosts, with_env
from tests.support.fake import Answer, Fake
from tests.support.instances import LIST, lists
from tests.support.vm import GuestStream, vm_answers

PROVISIONING = '\nprovisioning: {address: 10.77.0.2/24, mac: "02:00:0a:4d:00:02"}\n'
DAY = 86400
NONE = 127, "apptainer: not found"


class Guest:
    """The VM's guest agent: files, and the commands that install certificates."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.hangs = False

    def run(self, argv: Sequence[str], given: bytes) -> GuestResult | None:
        if self.hangs:
            return None
        if argv[0] == "/bin/cat":
            data = self.files.get(argv[1])
            return GuestResult(int(data is None), data or b"", b"")
        if argv[0] == HEALTH:
            return GuestResult(0, b"unit nginx active\nstate 1 9\nhttps 200\n", b"")
        if argv[0] == "/bin/tar":
            self.unpack(given)
        return GuestResult(0, b"", b"")

    def unpack(self, archive: bytes) -> None:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                if (file := tar.extractfile(member)) and member.name.startswith("etc/sms/tls/"):
                    self.files[f"/{member.name}"] = file.read()

    def refused(self) -> set[str]:
        return {line.split()[0].decode() for line in self.files["/etc/sms/tls/revoked.map"].splitlines()}


class Sites:
    """Two admin hosts. ``a`` and ``b``: the site as seen on each, with a folder ``tls/`` of its own."""

    def __init__(self, folder: Path) -> None:
        self.guest, self.vm_on, self.container_on, self.silent = Guest(), "host-b", "host-b", ""
        self.container: dict[str, bytes] = {}
        self.hosts = {name: FakeHost(self, name) for name in ("host-a", "host-b")}
        self.a, self.b = (self.open(folder / name) for name in "ab")

    def open(self, folder: Path) -> Cluster:
        folder.mkdir()
        (folder / "sms.yaml").write_text(read_profile("lab") + PROVISIONING)
        cluster = open_cluster(folder / "sms.yaml", folder.parent / "state", Silent())
        return with_env(cluster, hosts=FakeHosts(self.hosts))

    def start_vm(self, cluster: Cluster) -> None:
        """Start the VM from a machine, on ``vm_on``."""
        self.guest.files.clear()
        self.guest.unpack(make_seed(cluster))
        note = VmNote(issuer_ends=start.issuer_end(cluster))
        self.hosts[self.vm_on].files[str(VmPlaces(cluster.site).note)] = to_json(note)


class FakeHost(Fake):
    """An admin host, with its site file; the container's files if it runs there."""

    def __init__(self, sites: Sites, name: str) -> None:
        answers: dict[tuple[str, ...], Answer] = {
            ("unshare",): self.inside,
            ("logger",): (0, ""),
            LIST: lambda argv, _: (
                lists([Instance("sms-lab", 9, "/i")])(argv, None) if name == sites.container_on else NONE
            ),
            **vm_answers("lab", lambda: name == sites.vm_on),
        }
        super().__init__(answers, name=name)
        self.sites = sites
        self.files["/etc/sms/sms.yaml"] = b"cluster: lab\n"

    def inside(self, argv: Sequence[str], given: bytes | None) -> tuple[int, str]:
        if "head" in argv:
            return 0, self.sites.container["cert.pem"].decode()
        key, mark, certificate = (given or b"").partition(b"-----BEGIN CERTIFICATE-----")
        self.sites.container = {"key.pem": key, "cert.pem": mark + certificate}
        return 0, ""

    def run(self, *argv: str, **options: Any) -> Result:
        if self.name == self.sites.silent:
            raise Unreachable(f"{self.name} does not answer")
        return super().run(*argv, **options)

    def read(self, path: str) -> bytes | None:
        if self.name == self.sites.silent:
            raise Unreachable(f"{self.name} does not answer")
        return super().read(path)

    @contextmanager
    def stream(self, *argv: str, on_line: OnLine | None = None) -> Iterator[Stream]:
        assert str(VmPlaces(self.sites.a.site).guest) in argv
        yield GuestStream(self.name, argv, self.sites.guest.run)


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sites:
    """Authority and container's certificate are on both, the authority's key on host-a only."""
    with monkeypatch.context() as short:
        short.setattr(ca, "CLIENT_DAYS", 30)
        short.setattr(ca, "ISSUER_DAYS", 30)
        short.setattr(ca, "SOON_DAYS", 0)
        sites = Sites(tmp_path)
        ca.make_ca(tmp_path / "a/tls")
        sites.start_vm(sites.a)
    shutil.copytree(tmp_path / "a/tls", tmp_path / "b/tls")
    (tmp_path / "b/tls/ca.key").unlink()
    sites.container = {
        "cert.pem": (tmp_path / "a/tls/services.pem").read_bytes(),
        "key.pem": (tmp_path / "a/tls/services.key").read_bytes(),
    }
    for path in (tmp_path / "b/tls").iterdir():
        sites.hosts["host-b"].files[f"/etc/sms/tls/{path.name}"] = path.read_bytes()
    return sites


def serial(data: bytes) -> str:
    return serial_of(ca._load(data))


def run_as_standby(cluster: Cluster) -> None:
    """Run the schedule on host-a, while host-b holds the lease."""
    host = cluster.host("host-a")
    host.write(str(cluster.places.lease), Lease("lab", 2, "host-b", 5.0).text())
    assert run_scheduled(cluster, host, SnapshotOptions(), follow_names=lambda report: None) is None


def test_the_schedule_renews_what_runs(sites: Sites, tmp_path: Path) -> None:
    """The machine with the authority's key renews; VM and container run on another host, and keep running."""
    before, inside = dict(sites.guest.files), dict(sites.container)
    theirs = dict(sites.hosts["host-b"].files)
    run_as_standby(sites.a)
    after, there = sites.guest.files, sites.hosts["host-b"].files
    for name in ("server.pem", "server.key", "issuer.pem", "issuer.key"):
        assert after[f"/etc/sms/tls/{name}"] != before[f"/etc/sms/tls/{name}"], name
    # iPXE has the digest of the authority only, and needs its certificate.
    assert after["/etc/sms/tls/server.pem"].endswith((tmp_path / "a/tls/ca.pem").read_bytes())
    assert start.issuer_days(read_note(sites.a, sites.a.host("host-b")), time.time()) > 80
    assert ca.days_left(inside["cert.pem"]) == 29 and ca.days_left(sites.container["cert.pem"]) == 89
    assert ca.matches(sites.container["cert.pem"], sites.container["key.pem"])
    for name in ("admin", "services", "vm-issuer"):
        assert there[f"/etc/sms/tls/{name}.pem"] != theirs[f"/etc/sms/tls/{name}.pem"], name
        assert there[f"/etc/sms/tls/{name}.pem"] == (tmp_path / f"a/tls/{name}.pem").read_bytes()
        assert there[f"/etc/sms/tls/{name}.key"] == (tmp_path / f"a/tls/{name}.key").read_bytes()
    state = dict(after), dict(sites.container), {name: dict(host.files) for name, host in sites.hosts.items()}
    run_as_standby(sites.a)
    assert state == (after, sites.container, {name: host.files for name, host in sites.hosts.items()}), "a second run"


def test_a_machine_without_the_key_replaces_nothing_by_older_ones(sites: Sites) -> None:
    """Host-b has what it was given when it was installed."""
    state = dict(sites.guest.files), dict(sites.container)
    run_as_standby(sites.b)
    assert state == (sites.guest.files, sites.container), "nothing newer is there"
    run_as_standby(sites.a)
    state = dict(sites.guest.files), dict(sites.container)
    run_as_standby(sites.b)
    assert state == (sites.guest.files, sites.container)
    assert not [argv for argv in sites.hosts["host-a"].asked if argv[0] == "logger"]


def test_a_machine_without_the_key_reports_a_vm_whose_certificates_end(sites: Sites) -> None:
    """The machine that has the key would have renewed them before; a mail of the schedule is the only sign."""
    note = str(VmPlaces(sites.b.site).note)
    ends = start.issuer_end(sites.b)
    sites.hosts["host-b"].files[note] = to_json(VmNote(issuer_ends=ends))
    for days, reported in ((22, False), (20, True), (-1, True)):
        there = with_env(sites.b, clock=FakeClock(ends - days * DAY - 60))
        if not reported:
            run_as_standby(there)
            continue
        with pytest.raises(SmsError, match="the VM on host-b: its certificates expire in"):
            certificates.renew_due(there)


def test_a_machine_without_the_key_reports_clients_whose_certificates_end(
    sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that keeps the authority's key elsewhere has three weeks to bring it."""
    note, folder = str(VmPlaces(sites.b.site).note), tmp_path / "b/tls"
    sites.hosts["host-b"].files[note] = to_json(VmNote(issuer_ends=time.time() + 90 * DAY))
    now = ca._now()
    for days, reported in ((8, False), (9, True), (31, True)):  # of 30
        monkeypatch.setattr(ca, "_now", lambda days=days: now + timedelta(days=days))
        if not reported:
            certificates.renew_due(sites.b)
            continue
        left = max(29 - days, 0)
        with pytest.raises(SmsError, match=rf"{folder}/services.pem expires in {left} days: `sms key ca renew`"):
            certificates.renew_due(sites.b)


def test_a_certificate_that_does_not_match_its_key_is_renewed(tmp_path: Path) -> None:
    """A crash between both files; the dates alone would leave it for weeks."""
    folder = tmp_path / "ca"
    ca.make_ca(folder)
    assert ca.renew_due_clients(folder) == ()
    (folder / "admin.key").write_bytes((folder / "services.key").read_bytes())
    assert {path.name for path in ca.renew_due_clients(folder)} == {"admin.key", "admin.pem"}
    assert ca.read_pair(folder, "admin") and ca.renew_due_clients(folder) == ()


def test_another_address_of_the_vm_waits_for_its_next_start(sites: Sites, tmp_path: Path) -> None:
    path = tmp_path / "a/sms.yaml"
    path.write_text(path.read_text().replace("10.77.0.2/24", "10.77.0.9/24"))
    cluster = open_cluster(path, tmp_path / "state", Silent())
    cluster = with_env(cluster, hosts=FakeHosts(dict(sites.hosts)))
    before = dict(sites.guest.files)
    run_as_standby(cluster)
    assert sites.guest.files == before


def test_status_is_unhealthy_before_the_end(sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = sites.hosts["host-b"]
    where = str(VmPlaces(sites.a.site).note)
    for days, healthy in ((15, True), (14, False), (-1, False)):
        host.files[where] = to_json(VmNote(issuer_ends=time.time() + days * DAY))
        assert status.status_vm(sites.a, host).healthy is healthy, days
    del host.files[where]
    assert not status.status_vm(sites.a, host).healthy, "not known"
    assert container_problems(sites.a, host) == []
    for days, words in ((16, ""), (13, "expires in 12 days"), (1, "expires in 0 days")):
        with monkeypatch.context() as short:
            short.setattr(ca, "CLIENT_DAYS", days)
            sites.container["cert.pem"] = ca.issue_client(tmp_path / "a/tls", "services", "services").certificate
        problems = container_problems(sites.a, host)
        assert words in " ".join(problems) and bool(problems) is bool(words)


def test_a_revoked_certificate_is_refused_wherever_the_vm_is_started(sites: Sites, tmp_path: Path) -> None:
    """Host-b has no list of its own; afterwards each has all that was revoked on either."""
    first = {name: serial((tmp_path / f"a/tls/{name}.pem").read_bytes()) for name in ("admin", "services")}
    done = revoke(sites.a, ["admin", "services"]).installed
    assert (done.vm, done.container, done.problems, done.later) == ("host-b", "host-b", [], []) and done.refuses
    assert set(first.values()) == sites.guest.refused()
    sites.start_vm(sites.b)
    assert set(first.values()) == sites.guest.refused(), "started from the other host"
    assert serial(sites.container["cert.pem"]) not in sites.guest.refused(), "the container got another one at once"
    assert serial(sites.hosts["host-b"].files["/etc/sms/tls/admin.pem"]) not in sites.guest.refused()
    other = "ABCD" * 10
    revoke(sites.b, [other])
    shutil.rmtree(tmp_path / "b/tls")
    sites.start_vm(sites.a)
    assert {*first.values(), other} == sites.guest.refused()


def test_a_host_that_was_off_gets_the_list_later(sites: Sites, tmp_path: Path) -> None:
    serial = "ABCD" * 10
    sites.silent, sites.vm_on = "host-b", "host-a"
    sites.start_vm(sites.a)
    done = revoke(sites.a, [serial]).installed
    assert done.later == ["host-b is unreachable"] and not done.problems
    assert sites.guest.refused() == {serial}
    sites.silent, sites.guest.files["/etc/sms/tls/revoked.map"] = "", b""
    run_as_standby(sites.b)
    assert sites.guest.refused() == {serial}
    assert [each.serial for each in read_revoked(tmp_path / "b/tls")] == [serial]


def test_a_vm_that_does_not_answer_gets_it_later(sites: Sites) -> None:
    """While it boots, or hangs, a scheduled run is not a failed one."""
    sites.guest.hangs = True
    done = revoke(sites.a, ["ABCD" * 10]).installed
    assert done.vm == "host-b" and not done.refuses and len(done.later) == 1 and not done.problems
    run_as_standby(sites.a)
    assert not [argv for host in sites.hosts.values() for argv in host.asked if argv[0] == "logger"]
    sites.guest.hangs = False
    run_as_standby(sites.a)
    assert sites.guest.refused() == {"ABCD" * 10}


def test_an_unreadable_list(sites: Sites, tmp_path: Path) -> None:
    """Of another host: it is named, and left as it is. Of this machine: nothing starts without it."""
    path = str(sites.a.places.revoked)
    for garbage in (b"garbage", b'{"revoked": [{"serial": "a; } server {"}]}'):
        sites.hosts["host-a"].files[path] = garbage
        sites.start_vm(sites.a)
        done = revoke(sites.a, ["ABCD" * 10]).installed
        assert len(done.problems) == 1 and f"{path} on host-a" in done.problems[0]
        assert sites.hosts["host-a"].files[path] == garbage
        assert sites.guest.refused() == {"ABCD" * 10}
    (tmp_path / "a/tls/revoked.json").write_text("garbage")
    with pytest.raises(ConfigError, match="cannot read"):
        make_seed(sites.a)


def test_key_and_certificate_are_replaced_together(tmp_path: Path) -> None:
    ca.make_ca(tmp_path / "ca")
    pair = ca.read_pair(tmp_path / "ca", "services")
    assert pair
    inside: Any = tmp_path / "inside"
    inside.mkdir()
    (inside / "key.pem").write_text("old")
    subprocess.run(script_argv("install-pair", str(inside)), input=pair.key + pair.certificate, check=True, timeout=30)
    assert {path.name: path.read_bytes() for path in inside.iterdir()} == {
        "key.pem": pair.key,
        "cert.pem": pair.certificate,
    }
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in inside.iterdir())
