"""Where keys and tokens are sent: one rule for every way to name a server; and what is shown of them in errors.

tests/real/engines/test_clients.py does the same with `kubectl` and `nomad` themselves.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
import yaml

from appliance.config.model import Site
from appliance.errors import ConfigError, SmsError
from appliance.lab import render
from appliance.lab.layout import Layout
from appliance.operations.engines.clients import find_kubectl, find_nomad
from appliance.plan.endpoint import check_endpoint
from appliance.tools.kubectl import Kubectl
from appliance.tools.nomad import Nomad
from appliance.tools.smd import StateManager
from tests.unit.engines.test_programs import with_program

KEY = hashlib.sha512(b"a key of Munge").digest() * 2
QUOTES = "cat >&2; exit 1"
"""A program that quotes its request in its error, as a webhook makes kubectl do."""


@pytest.mark.parametrize(
    ("url", "verified", "why"),
    [
        ("https://10.0.0.1:6443", True, ""),
        ("HTTPS://api.example.org", True, ""),
        ("https://10.0.0.1:6443", False, "not verified"),
        ("http://10.0.0.1:4646", True, "unencrypted"),
        ("HTTP://nomad.example.org", True, "unencrypted"),
        ("10.0.0.1:8080", True, "unencrypted"),
        ("//10.0.0.1", True, "unencrypted"),
        ("http://127.0.0.1.example.org", True, "unencrypted"),
        ("http://localhost.example.org", True, "unencrypted"),
        ("http://127.0.0.1@10.0.0.1:4646", True, "unencrypted"),
        ("http://[::1", True, "unencrypted"),
        ("http://127.0.0.1:4646", False, ""),
        ("http://127.8.9.10", True, ""),
        ("http://[::1]:4646", True, ""),
        ("http://[::ffff:127.0.0.1]:4646", True, ""),
        ("http://localhost:8080", True, ""),
        ("localhost:8080", True, ""),
        ("unix:///run/nomad.sock", True, ""),
    ],
)
def test_keys_are_sent_only_where_nobody_else_reads_them(url: str, verified: bool, why: str) -> None:
    if not why:
        check_endpoint(url, "a setting", verified=verified)
        return
    with pytest.raises(ConfigError, match=why) as caught:
        check_endpoint(url, "a setting", verified=verified)
    assert caught.value.message.startswith("a setting: ") and caught.value.hint


def site(**nomad: str) -> Site:
    given = yaml.safe_load(render.site_file(Layout("x", 2, engines=("nomad", "kubernetes"))))
    given["engines"]["nomad"].pop("api")
    given["engines"]["nomad"] |= nomad
    return Site.model_validate(given)


@pytest.mark.parametrize(
    ("given", "variables", "why"),
    [
        ("", {}, ""),
        ("http://10.0.0.1:4646", {}, r"`engines\.nomad\.api`.*unencrypted"),
        ("https://10.0.0.1:4646", {"NOMAD_ADDR": "http://10.0.0.1:4646"}, ""),
        ("", {"NOMAD_ADDR": "http://10.0.0.1:4646"}, "NOMAD_ADDR.*unencrypted"),
        ("", {"NOMAD_ADDR": "10.0.0.1:4646"}, "NOMAD_ADDR.*unencrypted"),
        ("", {"NOMAD_ADDR": "https://10.0.0.1:4646"}, ""),
        ("", {"NOMAD_ADDR": "https://10.0.0.1:4646", "NOMAD_SKIP_VERIFY": "true"}, "not verified"),
        ("https://10.0.0.1:4646", {"NOMAD_SKIP_VERIFY": "1"}, r"`engines\.nomad\.api`.*not verified"),
        ("https://10.0.0.1:4646", {"NOMAD_SKIP_VERIFY": "false"}, ""),
        ("", {"NOMAD_ADDR": "http://127.0.0.1:4646", "NOMAD_SKIP_VERIFY": "true"}, ""),
    ],
)
def test_the_servers_of_nomad(given: str, variables: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.host.local import Local

    for name in ("NOMAD_ADDR", "NOMAD_SKIP_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for token in ({}, {"token_file": "/etc/nomad.token"}):
        wanted = site(**({"api": given} if given else {}), **token)
        if not why:
            assert find_nomad(wanted, Local()).api == given
            continue
        with pytest.raises(ConfigError, match=why):
            find_nomad(wanted, Local())


@pytest.mark.parametrize(
    ("shown", "master", "why"),
    [
        ('{"clusters": [{"cluster": {"server": "https://10.0.0.1:6443"}}]}', "", ""),
        ('{"clusters": [{"cluster": {"server": "http://10.0.0.1:8080"}}]}', "", "kubeconfig.*unencrypted"),
        ('{"clusters": [{"cluster": {"server": "10.0.0.1:8080"}}]}', "", "kubeconfig.*unencrypted"),
        ('{"clusters": [{"cluster": {"server": "http://127.0.0.1:8080"}}]}', "", ""),
        (
            '{"clusters": [{"cluster": {"server": "https://10.0.0.1", "insecure-skip-tls-verify": true}}]}',
            "",
            "kubeconfig.*not verified",
        ),
        ("", "", ""),
        ("", "http://10.0.0.1:8080", "KUBERNETES_MASTER.*unencrypted"),
        ('{"clusters": null}', "http://10.0.0.1:8080", "KUBERNETES_MASTER.*unencrypted"),
    ],
)
def test_the_server_of_kubernetes(
    shown: str, master: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_MASTER", master)
    (tmp_path / "shown").write_text(shown)
    host = with_program(tmp_path, "kubectl", f"test -s {tmp_path}/shown && exec cat {tmp_path}/shown; exit 1")
    if not why:
        find_kubectl(site(), host)
        return
    with pytest.raises(ConfigError, match=why):
        find_kubectl(site(), host)


def test_a_token_of_the_state_manager() -> None:
    with pytest.raises(ConfigError, match="unencrypted"):
        StateManager("http://api-gw/apis/smd", "token")
    assert StateManager("http://127.0.0.1:27779", "token").token and not StateManager("http://api-gw/apis/smd").token


@pytest.mark.parametrize("quotes", [QUOTES, "cat; exit 1", "base64 -w 64 >&2; exit 1", "head -c 300 >&2; exit 1"])
def test_no_error_of_an_engine_shows_a_secret(tmp_path: Path, quotes: str) -> None:
    """D1: the whole key of Munge was printed."""
    encoded = base64.b64encode(KEY).decode()
    with pytest.raises(SmsError) as caught:
        Kubectl(with_program(tmp_path, "kubectl", quotes), "lab").put_secret("munge-key", {"munge.key": KEY}, {})
    with pytest.raises(SmsError) as second:
        Nomad(with_program(tmp_path, "nomad", quotes)).put_variable(
            "nomad/jobs/a", {"munge_key": encoded}, {"by": "sms"}
        )
    for error in (caught.value, second.value):
        text = f"{error.message}{error.hint}{error!r}{error.__cause__!r}"
        again = base64.b64encode(encoded.encode()).decode()
        for form in (encoded, again, again[1:], KEY.hex()):
            assert not any(form[at : at + 10] in text for at in range(len(form) - 9)), text
        assert "[redacted]" in text, text


@pytest.mark.parametrize(
    "reply", ['{"Items": {"munge_key": "c2VjcmV0LXNlY3JldA=="}', '{"data": {"munge.key": "c2VjcmV0LXN']
)
def test_half_a_reply_with_a_secret_is_not_shown(tmp_path: Path, reply: str) -> None:
    for get in (
        lambda: Nomad(with_program(tmp_path, "nomad", f"echo '{reply}'")).variable("nomad/jobs/a"),
        lambda: Kubectl(with_program(tmp_path, "kubectl", f"echo '{reply}'"), "lab").get("secret", "munge-key"),
    ):
        with pytest.raises(SmsError, match="not JSON") as caught:
            get()
        assert "c2VjcmV0" not in caught.value.message
