"""`sms-filesync`: files from the provisioning VM, in the container and on nodes."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import signal
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.servers import free_port, server_context
from tests.unit.services.conftest import ALICE, OWN_GROUP, OWN_PASSWD, RUNTIME, load, needs_root, write_services


class Store(BaseHTTPRequestHandler):
    """Serves the bytes of a table; 404 for other paths. ``posted``: path and JSON of what clients sent."""

    table: dict[str, bytes]
    asked: list[str]
    posted: list[tuple[str, Any]]

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        data = self.table.get(self.path)
        self.send_response(200 if data is not None else 404)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def do_POST(self) -> None:
        self.posted.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Provisioning:
    """A provisioning node: an HTTPS server with its own CA that authenticates its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.handler: type[Store] = type("Handler", (Store,), {"table": {}, "asked": [], "posted": []})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        context = server_context(folder, folder, clients=ssl.CERT_REQUIRED)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def serve(self, files: dict[str, bytes], *, digests: dict[str, str] | None = None) -> None:
        """Offer files, with the wrong digests in ``digests``."""
        named = {path: (digests or {}).get(path, hashlib.sha256(data).hexdigest()) for path, data in files.items()}
        entries = [{"path": path, "sha256": named[path], "size": len(data)} for path, data in files.items()]
        self.handler.table = {f"/files/{named[path]}": data for path, data in files.items()}
        self.handler.table["/manifest.json"] = json.dumps({"files": entries}).encode()

    def trust(self, root: Path) -> None:
        """Write the certificates of the container."""
        tls = root / "etc/sms/tls"
        for name, source in (("ca.pem", "ca.pem"), ("cert.pem", "services.pem"), ("key.pem", "services.key")):
            (tls / name).write_bytes((self.folder / source).read_bytes())

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def provisioning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provisioning]:
    server = Provisioning(tmp_path_factory.mktemp("provisioning"))
    yield server
    server.close()


@pytest.fixture
def filesync(root: Path, provisioning: Provisioning, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    write_services(root, slurmctld={"sync": ["/etc/site/site.conf"]})
    provisioning.trust(root)
    (root / "var/lib/sms/filesync").mkdir()
    return load("sms-filesync", monkeypatch)


CONF = "/etc/site/site.conf"


def pull(filesync: ModuleType, provisioning: Provisioning) -> list[str]:
    return list(filesync.pull(provisioning.url, *filesync.container_paths()))


@needs_root
def test_filesync_fetches_changed_files(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    site = f"root:x:0:0:evil:/:/bin/sh\n{ALICE}\n".encode()
    provisioning.serve({"/etc/passwd": site, CONF: b"ClusterName=x\n", "/etc/shadow": b"alice:$6$x:1::::::\n"})
    assert pull(filesync, provisioning) == ["/etc/passwd", "/etc/shadow", CONF]
    assert (root / "etc/passwd").read_text() == OWN_PASSWD + ALICE + "\n"
    assert (root / "etc/site/site.conf").read_bytes() == b"ClusterName=x\n"
    assert "root:*:" in (root / "etc/shadow").read_text()
    kept = list((root / "var/lib/sms/filesync").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
    provisioning.handler.asked.clear()
    assert pull(filesync, provisioning) == []
    assert provisioning.handler.asked == ["/manifest.json"], "what is here already is not fetched again"


@needs_root
def test_filesync_merges_again_after_an_image_change(
    filesync: ModuleType, provisioning: Provisioning, root: Path
) -> None:
    provisioning.serve({"/etc/passwd": f"{ALICE}\n".encode()})
    pull(filesync, provisioning)
    newer = OWN_PASSWD + "slurm:x:64030:64030::/:/bin/false\n"
    (root / "opt/sms/accounts/passwd").write_text(newer)
    assert pull(filesync, provisioning) == ["/etc/passwd"]
    assert (root / "etc/passwd").read_text() == newer + ALICE + "\n"


@needs_root
def test_filesync_replaces_files_seeded_by_a_start(
    filesync: ModuleType, provisioning: Provisioning, root: Path
) -> None:
    provisioning.serve({CONF: b"ClusterName=x\n", "/etc/group": b"team:x:2002:alice\n"})
    pull(filesync, provisioning)
    (root / "etc/site/site.conf").write_bytes(b"of the site file")
    (root / "etc/group").write_text(OWN_GROUP)
    provisioning.handler.asked.clear()
    assert pull(filesync, provisioning) == ["/etc/group", CONF]
    assert (root / "etc/site/site.conf").read_bytes() == b"ClusterName=x\n"
    assert (root / "etc/group").read_text() == OWN_GROUP + "team:x:2002:alice\n"
    assert provisioning.handler.asked == ["/manifest.json"]
    assert pull(filesync, provisioning) == []


@needs_root
@pytest.mark.parametrize(
    "path",
    [
        "/etc/sudoers",
        "/etc/site/../sudoers",
        "../../etc/sudoers",
        "/etc/site/site.conf/",
        "//etc/site/site.conf",
        "",
    ],
)
def test_filesync_writes_no_other_path(
    filesync: ModuleType,
    provisioning: Provisioning,
    root: Path,
    path: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(root.rglob("*"))
    provisioning.serve({path: b"evil"})
    assert pull(filesync, provisioning) == []
    assert pull(filesync, provisioning) == []
    assert sorted(root.rglob("*")) == before
    assert capsys.readouterr().out.count("is not a file of ours") == 1, "said once"
    assert set(provisioning.handler.asked) == {"/manifest.json"}


@needs_root
def test_filesync_refuses_a_wrong_digest(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    provisioning.serve({CONF: b"good"})
    pull(filesync, provisioning)
    provisioning.serve({CONF: b"evil"}, digests={CONF: "0" * 64})
    with pytest.raises(ValueError, match="is not what the manifest says"):
        pull(filesync, provisioning)
    assert (root / "etc/site/site.conf").read_bytes() == b"good"


@needs_root
def test_filesync_refuses_large_files(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    provisioning.serve({CONF: bytes(filesync.LARGEST + 1)})
    with pytest.raises(ValueError, match=f"larger than {filesync.LARGEST} bytes"):
        pull(filesync, provisioning)
    assert not (root / "etc/site").exists()
    provisioning.serve({CONF: bytes(filesync.LARGEST)})
    assert pull(filesync, provisioning) == [CONF]


@needs_root
def test_copies_of_similar_paths_are_distinct(
    filesync: ModuleType, provisioning: Provisioning, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original of each is restored regardless of its name, also from copies of an older version."""
    alike = ["/etc/a%b", "/etc/a/b", "/etc/a/b%before", "/etc/a/b/before"]
    assert len({filesync.smskept.good_copy(path) for path in alike}) == len(alike)
    kept = filesync.smskept.Kept()
    for path in alike[:3]:
        (root / path[1:]).parent.mkdir(exist_ok=True)
        (root / path[1:]).write_text(f"own {path}")
        data = path.encode()
        kept.apply({"path": path, "sha256": hashlib.sha256(data).hexdigest()}, data)
    store = root / "var/lib/sms/filesync"
    for path, old in (("/etc/a%b", ""), ("/etc/a/b%before", "etc%a%b%before")):
        for suffix in ("", "%before") if old else ():
            (root / (filesync.smskept.good_copy(path) + suffix)[1:]).rename(store / (old + suffix))
    kept = filesync.smskept.Kept()
    assert not [path.name for path in store.iterdir() if path.name.startswith("etc%")]
    for path in alike[:3]:
        assert kept.remove(path)
        assert (root / path[1:]).read_text() == f"own {path}"


@needs_root
def test_filesync_does_not_take_a_damaged_record_for_an_empty_one(
    filesync: ModuleType, provisioning: Provisioning, root: Path
) -> None:
    """It would keep the server's own version as what was there before."""
    provisioning.serve({CONF: b"one"})
    (root / "etc/site").mkdir()
    (root / CONF[1:]).write_bytes(b"own")
    pull(filesync, provisioning)
    (root / "var/lib/sms/filesync.json").write_bytes(b"")
    provisioning.serve({CONF: b"two"})
    with pytest.raises(ValueError, match=r"^/var/lib/sms/filesync\.json cannot be read: restore it"):
        pull(filesync, provisioning)
    assert (root / CONF[1:]).read_bytes() == b"one"


@needs_root
def test_filesync_restores_the_own_file_after_a_power_failure_in_the_middle(filesync: ModuleType, root: Path) -> None:
    """The file is written, its record is not: it is not mistaken for somebody's own."""
    (root / "etc/site").mkdir()
    (root / CONF[1:]).write_bytes(b"own")
    smskept = filesync.smskept

    class Interrupted(smskept.Kept):  # type: ignore[misc, name-defined]
        def _save(self) -> None:
            if (root / CONF[1:]).read_bytes() == b"one":
                raise RuntimeError("the power is gone")
            super()._save()

    with pytest.raises(RuntimeError):
        Interrupted().apply({"path": CONF, "sha256": hashlib.sha256(b"one").hexdigest()}, b"one")
    kept = smskept.Kept()
    assert kept.apply({"path": CONF, "sha256": hashlib.sha256(b"two").hexdigest()}, b"two")
    assert kept.remove(CONF)
    assert (root / CONF[1:]).read_bytes() == b"own"


@needs_root
def test_failed_removal_does_not_block_other_files(
    filesync: ModuleType, provisioning: Provisioning, root: Path
) -> None:
    """A path that has become a folder is reported; the others are removed, and the report is sent."""
    kept = filesync.smskept.Kept()
    for path in ("/etc/one", "/etc/two"):
        kept.apply({"path": path, "sha256": hashlib.sha256(b"x").hexdigest()}, b"x")
    (root / "etc/two").unlink()
    (root / "etc/two").mkdir()
    manifest = {"files": [], "generation": 2, "push": 3}
    provisioning.handler.table["/manifest.json"] = json.dumps(manifest).encode()
    with pytest.raises(IsADirectoryError):
        pull(filesync, provisioning)
    assert not (root / "etc/one").exists() and (root / "etc/two").is_dir()
    ((path, report),) = provisioning.handler.posted
    assert path == "/report" and list(report["failed"]) == ["/etc/two"]


def test_filesync_presents_its_certificate(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    provisioning.serve({CONF: b"x"})
    (root / "etc/sms/tls/cert.pem").unlink()
    with pytest.raises(OSError):
        pull(filesync, provisioning)
    assert not (root / "etc/site").exists()


@pytest.mark.parametrize(("status", "renewals"), [(401, 1), (403, 1), (400, 1), (404, 0), (503, 0)])
def test_filesync_of_a_node_enrols_again_when_its_certificate_is_refused(
    status: int, renewals: int, filesync: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when it is time to renew it."""
    started: list[list[str]] = []

    def refuse(*_: object) -> list[str]:
        raise filesync.smslink.Said(status, "no")

    def run_quietly(argv: list[str]) -> str:
        started.append(argv)
        return ""

    monkeypatch.setattr(filesync, "run_quietly", run_quietly)
    monkeypatch.setattr(filesync, "pull", refuse)
    (root / "run/sms/tls").mkdir(parents=True)
    (root / "run/sms/tls/renew").write_text(str(int(time.time()) + 10000))
    filesync.renew(False)
    assert started == []
    assert filesync.look({"server": "https://vm", "node": True}, [])[0] != "synced"
    filesync.renew(filesync.pull.refused)
    assert [argv[-1] for argv in started] == ["--renew"] * renewals


def test_filesync_trusts_only_the_ca_of_the_site(
    filesync: ModuleType, provisioning: Provisioning, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Provisioning(tmp_path_factory.mktemp("other"))
    try:
        other.serve({CONF: b"evil"})
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED") as caught:
            pull(filesync, other)
        assert not filesync.is_away(caught.value), "an impostor is not a server that is away"
    finally:
        other.close()


@contextmanager
def running_filesync(root: Path, server: str, interval_s: float = 0.1) -> Iterator[subprocess.Popen[bytes]]:
    (root / "etc/sms/filesync.json").write_text(json.dumps({"server": server, "interval_s": interval_s}))
    environment = {**os.environ, "SMS_ROOT": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, str(RUNTIME / "sms-filesync")], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_state(root: Path, wanted: str, since: float = 0) -> dict[str, Any]:
    path = root / "run/sms/filesync.json"
    for _ in range(500):
        if path.exists():
            status: dict[str, Any] = json.loads(path.read_text())
            if status["state"] == wanted and status["at"] > since:
                return status
        time.sleep(0.02)
    pytest.fail(f"never {wanted}: {path.read_text() if path.exists() else 'no status'}")


@needs_root
def test_filesync_retries_quietly(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    with running_filesync(root, f"https://127.0.0.1:{free_port()}") as process:
        first = wait_state(root, "waiting")
        wait_state(root, "waiting", since=first["at"] + 0.5)
        process.terminate()
        said, errors = process.communicate(timeout=5)
    assert said.count(b"\n") == 1, "said once, not every time"
    assert b"waiting" in said
    assert not errors
    provisioning.serve({"/etc/passwd": ALICE.encode()})
    with running_filesync(root, provisioning.url) as process:
        status = wait_state(root, "synced")
        assert status["until"] > time.time() + 50
        process.send_signal(signal.SIGKILL)
    assert (root / "etc/passwd").read_text() == OWN_PASSWD + ALICE + "\n"


@needs_root
def test_filesync_without_a_server(filesync: ModuleType, root: Path) -> None:
    with running_filesync(root, ""):
        assert wait_state(root, "waiting")["detail"] == "no provisioning node is configured"


@needs_root
@pytest.mark.parametrize(
    "manifest", [b"[" * 100000, b"{}", b"[]", b'{"files": [{}]}', b'{"files": [{"path": []}]}', b"\xff"]
)
def test_filesync_survives_any_manifest(
    filesync: ModuleType, provisioning: Provisioning, root: Path, manifest: bytes
) -> None:
    provisioning.handler.table = {"/manifest.json": manifest}
    with running_filesync(root, provisioning.url) as process:
        first = wait_state(root, "failed")
        wait_state(root, "failed", since=first["at"])
        assert process.poll() is None


@needs_root
def test_filesync_runs_at_once_when_signalled(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    provisioning.serve({"/etc/passwd": ALICE.encode()})
    with running_filesync(root, provisioning.url, interval_s=3600) as process:
        first = wait_state(root, "synced")
        process.send_signal(signal.SIGHUP)
        wait_state(root, "synced", since=first["at"])


@needs_root
def test_the_container_takes_no_file_of_slurmctld(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    """Not even one that an earlier version has fetched: only `sms apply` writes it. It is compared and reported."""
    conf, own = "/etc/slurm/slurm.conf", b"of the site file"
    write_services(root, slurmctld={"sync": [conf]}, other={"sync": [CONF, "/etc/slurm/gres.conf"]})
    kept = filesync.smskept.Kept()
    kept.apply({"path": conf, "sha256": hashlib.sha256(own).hexdigest()}, own)
    for files in ({conf: b"of a VM", "/etc/slurm/gres.conf": b"x", CONF: b"y"}, {CONF: b"y"}):
        provisioning.serve(files)
        manifest = json.loads(provisioning.handler.table["/manifest.json"])
        provisioning.handler.table["/manifest.json"] = json.dumps({**manifest, "generation": 2, "push": 3}).encode()
        pull(filesync, provisioning)
        assert (root / conf[1:]).read_bytes() == own
        assert [path.name for path in (root / "etc/slurm").iterdir()] == ["slurm.conf"]
    assert (root / CONF[1:]).read_bytes() == b"y"
    first, last = ({one["path"]: one["sha256"] for one in report["files"]} for _, report in provisioning.handler.posted)
    assert first[conf] == hashlib.sha256(own).hexdigest() and conf not in last


NODE_PATHS = [
    ("/etc/motd", True),
    ("/etc/slurm/slurm.conf", True),
    ("/opt/site/tool", True),
    ("/", False),
    ("", False),
    ("etc/motd", False),
    ("//etc/motd", False),
    ("/etc/../proc/sysrq-trigger", False),
    ("/etc/motd/", False),
    ("/etc/./motd", False),
    ("/etc/mo td", False),
    ("/etc/motd\n", False),
    ("/proc/sysrq-trigger", False),
    ("/sys/power/state", False),
    ("/dev/sda", False),
    ("/run/x", False),
    ("/var/run/x", False),
    ("/etc/sms/tls/ca.pem", False),
    ("/opt/sms/bin/sms-run", False),
    ("/var/lib/sms/filesync/x", False),
    ("/var/lib/sms/filesync.json", False),
    ("/etc/link/x", False),
    ("/" + "x" * 1000, False),
]


@pytest.mark.parametrize(("path", "allowed"), NODE_PATHS, ids=lambda value: ascii(value)[:30])
def test_paths_that_a_node_allows(filesync: ModuleType, root: Path, path: str, allowed: bool) -> None:
    (root / "proc").mkdir()
    (root / "etc/link").symlink_to(root / "proc")
    assert (path in filesync.smskept.NodePaths()) is allowed
    assert path not in filesync.smskept.NodePaths(["/srv"])
    assert 7 not in filesync.smskept.NodePaths()


@needs_root
def test_owner_and_mode_of_the_master(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    provisioning.serve({CONF: b"x", "/etc/passwd": ALICE.encode()})
    manifest = json.loads(provisioning.handler.table["/manifest.json"])
    manifest["files"][0].update(mode="0640", owner="nobody", group="root")
    provisioning.handler.table["/manifest.json"] = json.dumps(manifest).encode()
    pull(filesync, provisioning)
    state = (root / CONF[1:]).stat()
    assert (stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid) == (0o640, pwd.getpwnam("nobody").pw_uid, 0)
    for wrong in ({"owner": "no-such-user"}, {"mode": "04755"}, {"mode": "x"}):
        manifest["files"][0].update({"mode": "0640", "owner": "root", **wrong})
        provisioning.handler.table["/manifest.json"] = json.dumps(manifest).encode()
        with pytest.raises(ValueError):
            pull(filesync, provisioning)
        assert stat.S_IMODE((root / CONF[1:]).stat().st_mode) == 0o640
