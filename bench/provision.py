"""Boot scripts of 450 nodes from the provisioning VM's service, beside nginx with the same bytes as files."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from appliance.errors import SmsError
from appliance.provision import nodes, tables
from appliance.provision.config import read_config
from appliance.provision.draft import Draft
from appliance.provision.model import Inventory
from appliance.provision.rules import find_problems, refuse
from appliance.provision.store import Store
from bench.rig import Rig, Samples, need, result

NODES = 450
CONNECTIONS = 16
SECONDS = 4
KINDS = ("scripts", "token", "files")
ROOT = Path(__file__).parents[1]

NGINX = """\
daemon off; user root; worker_processes auto; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 1024; }}
http {{
    access_log off; sendfile on; tcp_nopush on; keepalive_timeout 65; keepalive_requests 1000000;
    default_type text/plain; client_body_temp_path {folder}/tmp; proxy_temp_path {folder}/tmp;
    upstream provd {{ server unix:{folder}/api.sock; keepalive 16; }}
    proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $http_host;
    proxy_set_header X-SMS-Scheme $scheme; proxy_set_header X-SMS-Verify "NONE"; proxy_set_header X-SMS-Subject "";
    map $server_port $peer {{ {token} $arg_ts; default $remote_addr; }}
    proxy_set_header X-Real-IP $peer;
    server {{ listen 127.0.0.1:{scripts}; listen 127.0.0.1:{token}; location / {{ proxy_pass http://provd; }} }}
    server {{ listen 127.0.0.1:{files}; location / {{ root {folder}/files; }} }}
}}
"""

WRK = """\
local count, kind = {nodes}, "{kind}"
math.randomseed({seed})
request = function()
    local n = math.random(0, count - 1)
    local mac = string.format("02:00:00:00:%02x:%02x", math.floor(n / 256), n % 256)
    if kind == "files" then return wrk.format("GET", "/" .. mac) end
    local path = "/boot/v1/bootscript?mac=" .. mac .. "&arch=x86_64"
    if kind == "token" then path = path .. string.format("&ts=10.80.%d.%d", math.floor(n / 250), n % 250 + 1) end
    return wrk.format("GET", path)
end
done = function(summary, latency, requests)
    local bad = summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.timeout
    print(string.format("RESULT %d %d %d %d %d", summary.requests, summary.duration,
        latency:percentile(50), latency:percentile(99), bad))
end
"""


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """nginx to sms-provd over its socket, as in the VM, with all of it and the load on this machine's cores."""
    need("nginx", "nginx-light")
    need("wrk", "wrk")
    ports = free_ports()
    seen: dict[str, dict[str, Samples]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sms-bench-", dir="/tmp")))
        prepare(folder)
        serve(stack, folder, ports)
        save_files(folder, ports)
        ways = {kind: _way(folder, kind, ports[kind], seen.setdefault(kind, {})) for kind in ports}
        peer_way = ways.pop("files")
        failed = rig.interleave(ways, {"files": peer_way})["files"]
    files = {"rate": failed, "p99": failed} if failed.reason else seen["files"]
    peer = "nginx, the same bytes as files"
    for kind, words in (("scripts", "scripts"), ("token", "scripts with a token")):
        one = seen[kind]
        more = {"p50_ms": one["p50"].median, "p99_ms": one["p99"].median, "connections": CONNECTIONS, "nodes": NODES}
        yield result(f"provision/{words}", one["rate"], peer, files["rate"], above=500, unit="/s", **more)
        yield result(f"provision/{words}, p99", one["p99"], peer, files["p99"], below=50, unit="ms")


def free_ports() -> dict[str, int]:
    """A port for each kind of request that nobody listens on, whoever an earlier run left behind."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in KINDS]
        return {kind: one.getsockname()[1] for kind, one in zip(KINDS, sockets, strict=True)}


def _way(folder: Path, kind: str, port: int, seen: dict[str, Samples]) -> Callable[[], float]:
    def run() -> float:
        script = folder / f"{kind}.lua"
        script.write_text(WRK.format(nodes=NODES, kind=kind, seed=len(seen.get("rate", ())) + 1))
        argv = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{SECONDS}s", "-s", str(script), f"http://127.0.0.1:{port}"]
        said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=SECONDS + 60).stdout
        line = next(line for line in said.splitlines() if line.startswith("RESULT "))
        requests, duration_us, p50_us, p99_us, bad = map(int, line.split()[1:])
        if bad:
            raise SmsError(f"{bad} of {requests} requests of {kind} failed")
        for name, value in (("rate", requests * 1e6 / duration_us), ("p50", p50_us / 1e3), ("p99", p99_us / 1e3)):
            seen.setdefault(name, Samples()).append(value)
        return duration_us / 1e6

    return run


def prepare(folder: Path) -> None:
    """Configuration, an image, the table of neighbours, and the inventory."""
    for name in ("tmp", "files", "tls"):
        (folder / name).mkdir()
    rows = [
        {
            "name": f"nid{number:06d}",
            "xname": f"x{1000 + number // 256}c{number // 32 % 8}s{number // 4 % 8}b{number // 2 % 2}n{number % 2}",
            "nid": number + 1,
            "address": f"10.80.{number // 250}.{number % 250 + 1}",
            "macs": [f"02:00:00:00:{number // 256:02x}:{number % 256:02x}"],
            "groups": ["compute"],
            "profile": "compute",
        }
        for number in range(NODES)
    ]
    arp = ["IP address       HW type     Flags       HW address            Mask     Device"]
    arp += [f"{row['address']:16} 0x1         0x2         {row['macs'][0]}     *        eth0" for row in rows]
    (folder / "arp").write_text("\n".join(arp) + "\n")
    config = {
        "cluster": "bench",
        "address": "10.80.255.2",
        "prefix": 16,
        "database": f"sqlite:///{folder}/inventory.db",
        "state": str(folder),
        "tls": str(folder / "tls"),
        "socket": str(folder / "api.sock"),
        "neighbours": str(folder / "arp"),
    }
    (folder / "provision.json").write_text(json.dumps(config))
    _make_image(folder / "images" / "compute")
    store = Store(config["database"])
    draft = Draft(Inventory())
    nodes.bring(draft, {"nodes": rows})
    refuse([*draft.findings, *find_problems(read_config(folder / "provision.json"), draft.old, draft.inventory())])
    with store.write() as connection:
        tables.save(connection, draft.old, draft.inventory())
    store.close()


def _make_image(profile: Path) -> None:
    """An image of a few bytes: only its names are in scripts."""
    data = {name: name.encode() for name in ("vmlinuz", "initrd.img", "root.squashfs")}
    files = {name: {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)} for name, text in data.items()}
    digest = files["root.squashfs"]["sha256"]
    folder = profile / str(digest)
    folder.mkdir(parents=True)
    manifest = {"kind": "node", "profile": profile.name, "files": files, "arguments": "console=ttyS0 mitigations=off"}
    for name, text in {**data, "manifest.json": json.dumps(manifest).encode(), "manifest.sig": b""}.items():
        (folder / name).write_bytes(text)
    (profile / "current").write_text(str(digest))


def serve(stack: ExitStack, folder: Path, ports: dict[str, int]) -> None:
    """Both servers, until the scripts come."""
    text = NGINX.format(folder=folder, **ports)
    (folder / "nginx.conf").write_text(text)
    provd = os.environ.get("SMS_BENCH_PYTHON", sys.executable)
    for argv in (
        [provd, "-m", "appliance.provision", "--config", str(folder / "provision.json")],
        ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)],
    ):
        with (folder / "servers.log").open("ab") as log:
            process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)
        stack.callback(process.wait, timeout=20)
        stack.callback(process.terminate)
    for _ in range(600):
        try:
            if fetch(ports["scripts"], 0).startswith(b"#!ipxe"):
                break
        except OSError:
            pass
        time.sleep(0.1)
    else:
        logs = [path.read_text(errors="replace") for path in sorted(folder.glob("*.log"))]
        raise SmsError("\n    ".join(["the servers do not answer", *"".join(logs).splitlines()[-12:]]))
    if b"sms.token=" in fetch(ports["scripts"], 0) or b"sms.token=" not in fetch(ports["token"], 0):
        raise SmsError("tokens are not given as they should be")


def fetch(port: int, number: int) -> bytes:
    """The script of a node; at the port of tokens as if it asked itself."""
    mac = f"02:00:00:00:{number // 256:02x}:{number % 256:02x}"
    address = f"10.80.{number // 250}.{number % 250 + 1}"
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", f"/boot/v1/bootscript?mac={mac}&arch=x86_64&ts={address}")
        return connection.getresponse().read()
    finally:
        connection.close()


def save_files(folder: Path, ports: dict[str, int]) -> None:
    """The peer's files: the same bytes."""
    for number in range(NODES):
        (folder / "files" / f"02:00:00:00:{number // 256:02x}:{number % 256:02x}").write_bytes(
            fetch(ports["scripts"], number)
        )
