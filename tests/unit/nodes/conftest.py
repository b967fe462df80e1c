"""A site with the real service of its VM behind TLS, and real servers as controllers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.cli import main
from appliance.progress import Silent
from appliance.tools.provision import Api
from tests import places
from tests.bmcs import PASSWORD, ROOT, Answer, Machine, serve, tree
from tests.front import Front, front
from tests.ownnet import own_network
from tests.provd import Provd, make_config, running
from tests.servers import free_port, server_context

NET = "10.77.7"
"""Network in a namespace of its own: no packet leaves it."""
VM = f"{NET}.2"
HOST = f"{NET}.3"
BMCS = [f"{NET}.{number}" for number in range(100, 110)]
SYSTEM = f"{ROOT}/Systems/1"


def mac(number: int) -> str:
    return f"02:00:0a:4d:00:{number:02x}"


@dataclass
class Cluster:
    """A site with a VM and controllers."""

    folder: Path
    vm: Front
    port: int
    capsys: pytest.CaptureFixture[str]
    stack: ExitStack
    provd: Provd
    machines: dict[str, Machine] = field(default_factory=dict)

    def bmc(self, number: int, behave: Answer | None = None, **more: Any) -> Machine | None:
        """Start a controller at this address; without ``behave`` it works and controls a machine."""
        address = BMCS[number]
        made = None if behave else Machine(tree({"1": [mac(number)]}, **more))
        self.start(address, behave or made)
        if made:
            self.machines[address] = made
        return made

    def start(self, address: str, behave: Any) -> None:
        context = server_context(self.vm.tls, self.folder, [address]) if behave is not SILENT else None
        self.stack.enter_context(serve(address, self.port, context, behave))

    def sms(self, *words: str, status: int = 0) -> str:
        """Run a verb and return its standard output; ``stderr`` has standard error."""
        self.capsys.readouterr()
        try:
            found = main(["-q", "--site", str(self.folder / "sms.yaml"), "node", *words])
        except SystemExit as end:
            found = int(end.code or 0)
        out, self.stderr = self.capsys.readouterr()
        assert found == status, f"{found}: {out}{self.stderr}"
        assert PASSWORD not in out + self.stderr
        return out

    stderr: str = ""

    def discover(self, *words: str, status: int = 0) -> dict[str, Any]:
        found = self.sms("discover", "--port", str(self.port), "--json", *words, status=status)
        report = dict(json.loads(found))
        assert "error" in report or bool(report["problems"]) == (status == 4), report
        return report

    def inventory(self, method: str, path: str, body: Any) -> None:
        """Change the inventory as root in the VM can."""
        tls = self.vm.tls
        Api(f"https://{VM}:8443", tls / "ca.pem", tls / "admin.pem", tls / "admin.key").request(method, path, body)

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["name"]: node for node in json.loads(self.sms("list", "--json"))}


SILENT = object()


class Terminal(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


class Impatient(Silent):
    """Simulates Ctrl-C at a step that waits."""

    @contextmanager
    def step(self, text: str) -> Iterator[Silent]:
        if text.startswith("wait"):
            raise KeyboardInterrupt
        yield self


def write_site(folder: Path) -> None:
    document = yaml.safe_load((places.ROOT / "definitions" / "profiles" / "lab.yaml").read_text())
    document["state"] = str(folder / "state")
    document["networks"]["provisioning"] |= {"address": f"{NET}.1/24"}
    document["admin_hosts"][0]["address"] = HOST
    nodes = [{"name": "node[001-004]", "address": f"{NET}.[11-14]"}]
    document["slurm"] = {"nodes": nodes, "partitions": [{"name": "batch", "default": True}]}
    document["provisioning"] = {
        "address": f"{VM}/24",
        "mac": "02:00:0a:4d:00:02",
        "profiles": {"compute": {}, "gpu": {"groups": ["gpu"]}},
        "bmc": {
            "user": "root",
            "password_file": "bmc.password",
            "networks": [f"{NET}.0/24", "127.0.0.1/32"],
            "ca": "tls/ca.pem",
        },
    }
    (folder / "sms.yaml").write_text(yaml.safe_dump(document))
    (folder / "bmc.password").write_text(f"{PASSWORD}\n")
    (folder / "bmc.password").chmod(0o600)


@pytest.fixture
def cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name in ("SMS_SITE", "SMS_BMC_USER", "SMS_BMC_PASSWORD", "SMS_SMD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    write_site(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(own_network([f"{VM}/24", f"{NET}.11/24", *(f"{bmc}/24" for bmc in BMCS)]))
        (tmp_path / "vm").mkdir()
        services = {"address": f"{NET}.1", "hostname": "sms-services"}
        config = make_config(tmp_path / "vm", address=VM, gateway="", services=services, pool=None, busy_s=5)
        service = stack.enter_context(running(config))
        vm = stack.enter_context(front(tmp_path, VM, service.port))
        yield Cluster(tmp_path, vm, free_port(BMCS), capsys, stack, service)
