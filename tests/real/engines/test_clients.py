"""`kubectl` and `nomad` themselves: which server they will ask, and what a server quotes of a request.

tests/unit/engines/test_clients.py has the tables. Adds: what the programs read, and how they print a quoted request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ConfigError, SmsError
from appliance.host.local import Local
from appliance.lab.engines.programs import find_program
from appliance.operations.engines.clients import find_kubectl
from appliance.tools.kubectl import Kubectl
from appliance.tools.nomad import Nomad
from tests.real.engines.conftest import need_engines
from tests.unit.engines.test_clients import site

pytestmark = pytest.mark.real

KEY = hashlib.sha512(b"a key of Munge").digest() * 2
SCHEMA = {
    "openapi": "3.0.0",
    "info": {"title": "x", "version": "1"},
    "paths": {
        "/api/v1/namespaces/{namespace}/secrets/{name}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "responses": {},
                "x-kubernetes-group-version-kind": {"group": "", "version": "v1", "kind": "Secret"},
            }
        }
    },
}
DISCOVERY: dict[str, dict[str, Any]] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {
                "name": "secrets",
                "singularName": "secret",
                "namespaced": True,
                "kind": "Secret",
                "verbs": ["patch", "get"],
            }
        ],
    },
    "/openapi/v3": {"paths": {"api/v1": {"serverRelativeURL": "/openapi/v3/api/v1"}}},
    "/openapi/v3/api/v1": SCHEMA,
}
"""What kubectl reads before it sends an object."""


class Quoting(BaseHTTPRequestHandler):
    """An API server whose webhook denies everything, and quotes what it has got."""

    seen: bytes = b""

    def _reply(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if self.command == "GET" and path in DISCOVERY:
            status, reply = 200, json.dumps(DISCOVERY[path])
        elif self.command == "GET" and path.startswith("/v1/"):
            status, reply = 404, "no such variable"
        else:
            Quoting.seen += body
            text = f"admission webhook denied: {body.decode()} ... {base64.b64encode(body).decode()[:600]} ... {body!r}"
            status = 500
            reply = (
                text
                if path.startswith("/v1/")
                else json.dumps(
                    {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": text, "code": 500}
                )
            )
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply.encode())))
        self.end_headers()
        self.wfile.write(reply.encode())

    do_GET = do_PATCH = do_PUT = do_POST = _reply  # noqa: N815 - http.server's names

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def host(tmp_path: Path) -> Local:
    need_engines("kubectl", "nomad")
    folders = ":".join(str(find_program(name).parent) for name in ("kubectl", "nomad"))
    return Local(prefix=("env", f"PATH={folders}:/usr/bin:/bin", f"KUBECACHEDIR={tmp_path}"))


@pytest.fixture
def url() -> Iterator[str]:
    Quoting.seen = b""
    with ThreadingHTTPServer(("127.0.0.1", 0), Quoting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def kubeconfig(path: Path, **clusters: dict[str, Any]) -> Path:
    names = list(clusters)
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": name, "cluster": cluster} for name, cluster in clusters.items()],
                "users": [{"name": "u", "user": {"token": "a-token-of-an-account"}}],
                "contexts": [{"name": name, "context": {"cluster": name, "user": "u"}} for name in names],
                "current-context": names[0],
            }
        )
    )
    return path


def test_a_quoted_request_shows_no_key(host: Local, url: str, tmp_path: Path) -> None:
    config = kubeconfig(tmp_path / "config", here={"server": url})
    encoded = base64.b64encode(KEY).decode()
    errors = []
    with pytest.raises(SmsError) as caught:
        Kubectl(host, "lab", str(config)).put_secret("munge-key", {"munge.key": KEY}, {})
    errors.append(caught.value)
    assert encoded.encode() in Quoting.seen, f"it was not sent: {caught.value.message}"
    Quoting.seen = b""
    with pytest.raises(SmsError) as caught:
        Nomad(host, api=url).put_variable("nomad/jobs/a", {"munge_key": encoded}, {"by": "sms"})
    errors.append(caught.value)
    assert encoded.encode() in Quoting.seen, f"it was not sent: {caught.value.message}"
    for error in errors:
        assert "[redacted]" in error.message, error.message
        again = base64.b64encode(encoded.encode()).decode()
        for form in (encoded, again, again[1:-1], again[2:-2]):
            assert not any(form[at : at + 12] in error.message for at in range(len(form) - 11)), error.message


def test_the_server_of_each_configuration(host: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of KUBECONFIG, of several files, of another context, of none; nothing is sent there."""
    monkeypatch.delenv("KUBERNETES_MASTER", raising=False)
    near, far = {"server": "https://10.0.0.1:6443"}, {"server": "http://10.0.0.1:8080"}
    skipping = {**near, "insecure-skip-tls-verify": True}
    both = kubeconfig(tmp_path / "both", good=near, bad=far, blind=skipping)
    monkeypatch.setenv("KUBECONFIG", str(both))
    found = {name: Kubectl(host, "lab", context=name).server() for name in ("good", "bad", "blind")}
    assert [(one.url, one.verified) for one in found.values()] == [
        (near["server"], True),
        (far["server"], True),
        (near["server"], False),
    ]
    first = kubeconfig(tmp_path / "first", bad=far)
    monkeypatch.setenv("KUBECONFIG", f"{first}:{both}")
    assert Kubectl(host, "lab").server().url == far["server"]
    assert Kubectl(host, "lab", str(both)).server().url == near["server"]
    wanted = site()
    kubernetes = wanted.engines.kubernetes.model_copy(update={"kubeconfig": None})
    wanted = wanted.model_copy(update={"engines": wanted.engines.model_copy(update={"kubernetes": kubernetes})})
    with pytest.raises(ConfigError, match="unencrypted"):
        find_kubectl(wanted, host)
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert Kubectl(host, "lab").server().url == "http://localhost:8080"
    monkeypatch.setenv("KUBERNETES_MASTER", "http://10.0.0.1:8080")
    with pytest.raises(ConfigError, match="KUBERNETES_MASTER"):
        find_kubectl(wanted, host)
