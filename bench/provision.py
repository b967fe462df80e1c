"""Boot scripts of 450 nodes from the provisioning VM's service, compared with nginx serving them as files."""

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
from appliance.provision.payloads import Node
from appliance.provision.rules import find_problems, refuse
from appliance.provision.store import Store
from bench.rig import Rig, Samples, find_program, result

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
    """Measure nginx with sms-provd behind its socket, as in the VM; servers and load share this machine's cores."""
    find_program("nginx", "nginx-light")
    find_program("wrk", "wrk")
    ports = free_ports()
    seen: dict[str, dict[str, Samples]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sms-bench-", dir="/tmp")))
        prepare(folder)
        serve(stack, folder, ports)
        save_files(folder, ports)
        variants = {kind: _variant(folder, kind, ports[kind], seen.setdefault(kind, {})) for kind in ports}
        peer_variant = variants.pop("files")
        failed = rig.interleave(variants, {"files": peer_variant})["files"]
    files = {"rate": failed, "p99": failed} if failed.reason else seen["files"]
    peer = "nginx, the same bytes as files"
    for kind, label in (("scripts", "scripts"), ("token", "scripts with a token")):
        one = seen[kind]
        more = {"p50_ms": one["p50"].median, "p99_ms": one["p99"].median, "connections": CONNECTIONS, "nodes": NODES}
        yield result(f"provision/{label}", one["rate"], peer, files["rate"], above=500, unit="/s", **more)
        yield result(f"provision/{label}, p99", one["p99"], peer, files["p99"], below=50, unit="ms")


def free_ports() -> dict[str, int]:
    """Return a free port for each kind of request."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in KINDS]
        return {kind: one.getsockname()[1] for kind, one in zip(KINDS, sockets, strict=True)}


def _variant(folder: Path, kind: str, port: int, seen: dict[str, Samples]) -> Callable[[], float]:
    def run() -> float:
        script = folder / f"{kind}.lua"
        script.write_text(WRK.format(nodes=NODES, kind=kind, seed=len(seen.get("rate", ())) + 1))
        argv = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{SECONDS}s", "-s", str(script), f"http://127.0.0.1:{port}"]
        output = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=SECONDS + 60).stdout
        line = next(line for line in output.splitlines() if line.startswith("RESULT "))
        requests, duration_us, p50_us, p99_us, bad = map(int, line.split()[1:])
        if bad:
            raise SmsError(f"{bad} of {requests} requests of {kind} failed")
        for name, value in (("rate", requests * 1e6 / duration_us), ("p50", p50_us / 1e3), ("p99", p99_us / 1e3)):
            seen.setdefault(name, Samples()).append(value)
        return duration_us / 1e6

    return run


def prepare(folder: Path) -> None:
    """Create configuration, image, ARP table and inventory."""
    for name in ("tmp", "files", "tls"):
        (folder / name).mkdir()
    rows: list[Node] = [
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
    config: dict[str, Any] = {
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
    nodes.import_document(draft, {"nodes": rows})
    refuse([*draft.findings, *find_problems(read_config(folder / "provision.json"), draft.old, draft.inventory())])
    with store.write() as connection:
        tables.save(connection, draft.old, draft.inventory())
    store.close()


def _make_image(profile: Path) -> None:
    """Create an image of a few bytes: scripts contain only its name."""
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
    """Start both servers and wait until they answer."""
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
        raise SmsError("tokens are missing or issued to others")


def fetch(port: int, number: int) -> bytes:
    """Fetch the script of a node; at the port of tokens as if from the node itself."""
    mac = f"02:00:00:00:{number // 256:02x}:{number % 256:02x}"
    address = f"10.80.{number // 250}.{number % 250 + 1}"
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", f"/boot/v1/bootscript?mac={mac}&arch=x86_64&ts={address}")
        return connection.getresponse().read()
    finally:
        connection.close()


def save_files(folder: Path, ports: dict[str, int]) -> None:
    """Write the peer's files, with the same content."""
    for number in range(NODES):
        (folder / "files" / f"02:00:00:00:{number // 256:02x}:{number % 256:02x}").write_bytes(
            fetch(ports["scripts"], number)
        )
