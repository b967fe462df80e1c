"""The provisioning VM is off: every verb that needs it is refused in the same way, before it changes anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from appliance.cli import main
from appliance.operations.site.ca import make_ca
from appliance.operations.vm import client
from appliance.tools.provision import Api, VmOff, VmUnreachable
from tests.sites import GOOD

VERBS = (
    "node list",
    "node show node1",
    "node add node1 --mac 02:00:00:00:00:09",
    "node edit node1 --group new",
    "node remove node1",
    "node export",
    "node import inventory.yaml",
    "node power status node1",
    "node boot node1 --yes",
    "image rollback compute",
    "files list",
    "files report",
    "files push",
    "files show /etc/motd",
    "files add /etc/motd motd --all-nodes",
    "files remove /etc/motd",
    "files rollback /etc/motd",
    "key ca revoke node1",
)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    """The interface of a VM that is off; its address is one of this machine, on which nothing listens."""
    (tmp_path / "sms.yaml").write_text(GOOD + 'provisioning: {address: 10.77.0.2/24, mac: "02:00:0a:4d:00:02"}\n')
    make_ca(tmp_path / "tls")
    (tmp_path / "motd").write_text("hello\n")
    (tmp_path / "inventory.yaml").write_text("nodes: []\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(client, "_reachable", lambda vm: "127.0.0.1")
    monkeypatch.setattr(client, "HTTPS", port)
    monkeypatch.chdir(tmp_path)
    tls = tmp_path / "tls"
    return Api(f"https://127.0.0.1:{port}", tls / "ca.pem", tls / "admin.pem", tls / "admin.key")


@pytest.mark.parametrize("words", VERBS)
def test_verbs_are_refused(words: str, api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = ["--site", str(tmp_path / "sms.yaml"), "--state", str(tmp_path / "state")]
    status = main([*site, "-q", *words.split()])
    message = capsys.readouterr().err
    assert status == 3, message
    assert "hint:" in message and "sms vm start" in message


def test_once_it_has_answered_something_may_have_been_changed(api: Api) -> None:
    with pytest.raises(VmOff):
        api.request("GET", "/sms/v1/nodes")
    api.connected.append(True)
    with pytest.raises(VmUnreachable) as caught:
        api.request("GET", "/sms/v1/nodes")
    assert not isinstance(caught.value, VmOff) and caught.value.status == 1
