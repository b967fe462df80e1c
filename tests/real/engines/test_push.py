"""`sms image oci --push`: the image is in a registry under the same digest; real registry, TLS, account."""

from __future__ import annotations

import crypt
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from appliance.lab.engines.pki import Authority
from appliance.operations.context import Cluster
from tests.servers import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.real

USER, PASSWORD = "pusher", "correct horse battery"
CONFIG = """\
version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http:
  addr: 127.0.0.1:{port}
  secret: lab
  tls: {{certificate: {certificate}, key: {key}}}
auth: {{htpasswd: {{realm: lab, path: {folder}/htpasswd}}}}
"""


@dataclass(frozen=True)
class Registry:
    """A registry on this machine; ``variables``: with which programs trust its certificate, and find the account."""

    folder: Path
    name: str
    variables: dict[str, str]

    def skopeo(self, *words: str, password: str = "") -> str:
        argv = ("skopeo", *words)
        done = subprocess.run(argv, capture_output=True, text=True, input=password, env=self.variables, check=True)
        return done.stdout

    def login(self, password: str) -> None:
        """Keep an account, as `skopeo login` does; that verifies it, so a wrong one is written by hand."""
        if password == PASSWORD:
            host = self.name.partition("/")[0]
            self.skopeo("login", "--username", USER, "--password-stdin", host, password=password)
            return
        path = Path(self.variables["REGISTRY_AUTH_FILE"])
        text = path.read_text()
        (entry,) = json.loads(text)["auths"].values()
        path.write_text(text.replace(entry["auth"], "cHVzaGVyOndyb25n"))


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Debian's docker-registry with TLS and an account."""
    folder, port = tmp_path_factory.mktemp("registry"), free_port()
    authority = Authority(folder / "pki")
    pair = authority.issue("registry", "registry", addresses=("127.0.0.1",))
    hashed = crypt.crypt(PASSWORD, crypt.mksalt(crypt.METHOD_BLOWFISH, rounds=16))
    (folder / "htpasswd").write_text(f"{USER}:{hashed}\n")
    (folder / "config.yml").write_text(
        CONFIG.format(folder=folder, port=port, certificate=pair.certificate, key=pair.key)
    )
    variables = {
        **os.environ,
        "SSL_CERT_FILE": str(authority.certificate),
        "REGISTRY_AUTH_FILE": str(folder / "auth.json"),
    }
    found = Registry(folder, f"127.0.0.1:{port}/sms/lab", variables)
    with (folder / "log").open("wb") as log:
        argv = ("docker-registry", "serve", str(folder / "config.yml"))
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(port, authority.certificate), "the registry answers", 30)
        yield found
    finally:
        process.kill()
        process.wait()


def answers(port: int, certificate: Path) -> bool:
    argv = ("curl", "-s", "--noproxy", "*", "--cacert", str(certificate), f"https://127.0.0.1:{port}/v2/")
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def push(site: Cluster, registry: Registry, image: str, out: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """`sms image oci --push` with this name of the image in the site file."""
    assert site.path
    document = yaml.safe_load(site.path.read_text())
    document.setdefault("engines", {})["kubernetes"] = {"address": "10.77.0.40", "image": image}
    file = site.path.with_name("push.yaml")
    file.write_text(yaml.safe_dump(document))
    argv = (sys.executable, "-m", "appliance", "--site", str(file), "image", "oci", "-o", str(out), "--push", "--json")
    done = subprocess.run(argv, capture_output=True, text=True, env=registry.variables, check=False, timeout=300)
    print(done.stdout, done.stderr)
    assert done.returncode == status, done.stderr
    return done


def test_it_is_pushed_with_its_digest(site: Cluster, signed_image: Path, registry: Registry, tmp_path: Path) -> None:
    out = tmp_path / "image"
    refused = push(site, registry, registry.name, out, 1)
    login = f"hint: `skopeo login {registry.name.partition('/')[0]}` gives it an account"
    assert login in refused.stderr, "without an account"
    registry.login(PASSWORD)
    registry_text = Path(registry.variables["REGISTRY_AUTH_FILE"]).read_text()
    made = json.loads(push(site, registry, registry.name, out).stdout)
    assert made["pushed"] == f"{registry.name}@{made['digest']}"
    kept = json.loads(registry.skopeo("inspect", f"docker://{made['pushed']}"))
    assert kept["Digest"] == made["digest"] and kept["Labels"]["sms.sif"] == f"sha256:{made['sif']}"
    again = json.loads(push(site, registry, made["pushed"], out).stdout)
    assert again == {**made, "fresh": False}
    other = f"{registry.name}@sha256:{'0' * 64}"
    assert "the image is sha256:" in push(site, registry, other, out, 3).stderr

    registry.login("wrong")
    assert Path(registry.variables["REGISTRY_AUTH_FILE"]).read_text() != registry_text
    refused = push(site, registry, registry.name, out, 1)
    assert "unauthorized: authentication required" in refused.stderr and login in refused.stderr
    for secret in (PASSWORD, "cHVzaGVyOndyb25n"):
        assert secret not in refused.stderr + refused.stdout
