"""The provisioning VM's server without the VM: sms-provd behind nginx, as definitions/vm has it, on loopback ports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import sqlalchemy as sa

from appliance.operations.site.ca import issue_issuer, issue_server, make_ca
from appliance.provision.store import Store
from appliance.provision.tokens import Tokens
from appliance.tools.provision import Api
from tests.servers import free_port

ROOT = Path(__file__).parents[1]


class Vm:
    """Server, certificates and inventory in a folder, which must have a short name: a Unix socket lies in it.

    ``prefix`` stands before its commands; with it and ``address``, it is in a network namespace, at its own ports.
    ``more`` of its configuration.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nginx: str,
        cluster: str = "test",
        address: str = "",
        prefix: tuple[str, ...] = (),
        more: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.nginx, self.prefix = folder, nginx, prefix
        self.address = address or "127.0.0.1"
        # SMS_VM_PYTHON=/usr/bin/python3: on Debian's own packages, as in the VM.
        self.python = os.environ.get("SMS_VM_PYTHON", sys.executable)
        self.state, self.tls, self.ca = folder / "state", folder / "vmtls", folder / "tls"
        for each in (self.state, self.tls, self.state / "tmp", folder / "run"):
            each.mkdir()
        make_ca(self.ca)
        self.port, self.plain = (8443, 80) if address else (free_port(), free_port())
        self.url = f"https://{self.address}:{self.port}"
        self.database = f"sqlite:///{self.state}/inventory.db"
        self.write_certificates()
        config = {
            "cluster": cluster,
            "address": self.address,
            "prefix": 8,
            "database": self.database,
            "state": str(self.state),
            "tls": str(self.tls),
            "socket": str(folder / "run" / "api.sock"),
            "services": {"address": "127.0.0.9", "hostname": "sms-services"},
            **(more or {}),
        }
        (folder / "provision.json").write_text(json.dumps(config))
        self._configure_nginx()
        self.processes: list[subprocess.Popen[bytes]] = []

    def write_certificates(self) -> None:
        """Issue the server's certificates by the authority in ``ca``; it shows that one, too, as in the VM."""
        server = issue_server(self.ca, hostname="sms-provision", addresses=[self.address])
        for name, pair in (("server", server), ("issuer", issue_issuer(self.ca))):
            (self.tls / f"{name}.pem").write_bytes(pair.certificate)
            (self.tls / f"{name}.key").write_bytes(pair.key)
        authority = (self.ca / "ca.pem").read_bytes()
        (self.tls / "ca.pem").write_bytes(authority)
        (self.tls / "server.pem").write_bytes(server.certificate + authority)

    def _configure_nginx(self) -> None:
        source = (ROOT / "definitions" / "vm" / "nginx.conf.j2").read_text()
        text = jinja2.Template(source).render(vm_web_user="root", ansible_managed="a test")
        places = {
            "/etc/sms/tls": str(self.tls),
            "/run/sms-provision": str(self.folder / "run"),
            "/var/lib/sms-provision": str(self.state),
            "/run/nginx.pid": str(self.folder / "run" / "nginx.pid"),
            "/etc/sms/listen-": f"{self.folder}/listen-",
        }
        for old, new in places.items():
            assert old in text, f"{old} is not in the template any more"
            text = text.replace(old, new)
        (self.folder / "listen-http.conf").write_text(f"listen {self.address}:{self.plain} default_server;\n")
        (self.folder / "listen-https.conf").write_text(f"listen {self.address}:{self.port} ssl default_server;\n")
        text = re.sub(r"worker_processes \w+", "worker_processes 1", text)
        (self.folder / "nginx.conf").write_text("daemon off;\n" + text)

    def start(self, ask: Callable[[], object] | None = None) -> None:
        """Both servers, until they answer the request of ``ask``."""
        ask = ask or (lambda: self.admin.request("GET", "/sms/v1/files"))
        argv = [
            *self.prefix,
            sys.executable,
            "-m",
            "appliance.provision",
            "--config",
            str(self.folder / "provision.json"),
        ]
        log = (self.folder / "provd.log").open("ab")
        self.processes.append(subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log))
        argv = [*self.prefix, self.nginx, "-c", str(self.folder / "nginx.conf"), "-p", str(self.folder)]
        log = (self.folder / "nginx.log").open("ab")
        self.processes.append(subprocess.Popen(argv, stdout=log, stderr=log))
        for _ in range(300):
            try:
                ask()
                return
            except Exception as error:
                last = error
            if any(process.poll() is not None for process in self.processes):
                break
            time.sleep(0.1)
        raise AssertionError(f"the server does not answer: {last}\n{self.said()[-3000:]}")

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def stop(self) -> None:
        """Both servers, as if the power had failed."""
        for process in self.processes:
            # nginx's worker ends with its master only where that may say so.
            process.send_signal(signal.SIGTERM if self.nginx in process.args else signal.SIGKILL)  # type: ignore[operator]
            process.wait(timeout=20)
        self.processes.clear()

    def reload(self) -> None:
        """Let nginx read its files again."""
        for process in self.processes:
            if self.nginx in process.args:  # type: ignore[operator]
                process.send_signal(signal.SIGHUP)

    @property
    def admin(self) -> Api:
        return Api(self.url, self.ca / "ca.pem", self.ca / "admin.pem", self.ca / "admin.key")

    def add_node(self, name: str, address: str, groups: tuple[str, ...] = ()) -> None:
        """A node, straight into the database."""
        Vm.add_nodes(self, {name: address}, groups)

    def add_nodes(self, addresses: dict[str, str], groups: tuple[str, ...] = ()) -> None:
        """Nodes by their names, straight into the database."""
        store = Store(self.database)
        tables = sa.MetaData()
        tables.reflect(store.engine)
        components = tables.tables["components"]
        nodes = [
            {"id": name, "name": name, "address": address, "type": "Node", "enabled": True}
            for name, address in addresses.items()
        ]
        with store.write() as connection:
            connection.execute(components.insert(), [filled(components, node) for node in nodes])
            for label in groups:
                table = tables.tables["groups"]
                if not connection.execute(sa.select(table).where(table.c.label == label)).first():
                    connection.execute(table.insert().values(**filled(table, {"label": label})))
                rows = [{"label": label, "component": name} for name in addresses]
                connection.execute(tables.tables["members"].insert(), rows)
        store.close()

    def make_token(self, node: str, token_s: int = 600) -> str:
        store = Store(self.database)
        try:
            return Tokens(store, token_s=token_s).make(node)
        finally:
            store.close()

    def trust(self, root: Path, folder: str, certificate: bytes, key: bytes) -> None:
        """Give a client below ``root`` the CA and a certificate."""
        for name, data in (("ca.pem", (self.ca / "ca.pem").read_bytes()), ("cert.pem", certificate), ("key.pem", key)):
            path = root / ("etc/sms/tls" if name == "ca.pem" else folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def filled(table: sa.Table, given: dict[str, Any]) -> dict[str, Any]:
    """A row with something in each column that must not be empty."""
    row = dict(given)
    for column in table.columns:
        if column.name not in row and not column.nullable:
            kind = column.type.python_type if not isinstance(column.type, sa.JSON) else dict
            row[column.name] = kind()
    return row


def client_environment(root: Path) -> dict[str, str]:
    return {**os.environ, "SMS_ROOT": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
