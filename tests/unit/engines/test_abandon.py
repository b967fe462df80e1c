"""`sms failover --i-have-fenced` of an engine: only one that does not answer counts as off."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from appliance.errors import ConfigError, Refused
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.engines import abandon
from tests.support.nomad import WithNomad, on_nomad

HERE = 'Get "http://127.0.0.1:4646/v1/nodes": dial tcp 127.0.0.1:4646: connect: connection refused'


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", ""),
        ("dial tcp 10.0.0.1:4646: connect: connection refused", ""),
        ("runs", "nomad answers and runs ctl"),
        ("broken", "nomad answers, and it is not known what it runs"),
        ("not JSON", "nomad answers, and it is not known what it runs: .*the reply is not JSON"),
        ("ACL token not found", "not permitted"),
        ("x509: certificate signed by unknown authority", "`nomad` cannot use its configuration"),
    ],
)
def test_what_counts_as_off(cluster: Cluster, tmp_path: Path, answer: str, message: str) -> None:
    host, cluster = WithNomad("host-a"), on_nomad(cluster, tmp_path)
    if answer == "runs":
        host.has_job("slurm-ctl", allocation="ctl")
    elif answer == "not JSON":
        host.text = "{"
    else:
        host.error = answer
    with pytest.raises((Refused, ConfigError), match=message) if message else nullcontext() as caught:
        abandon.refuse_running(cluster, host, "nomad")
    assert not message or (caught and caught.value.status == (2 if "certificate" in answer else 3))


@pytest.mark.parametrize("given", ["", "http://127.0.0.1:4646"])
def test_that_the_own_agent_is_off_says_nothing_about_the_servers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    """`nomad` asks it where nothing names the servers, which may run the services elsewhere."""
    program = tmp_path / "nomad"
    program.write_text(f"#!/bin/sh\necho '{HERE}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.delenv("NOMAD_ADDR", raising=False)
    words = ("env", f"PATH={tmp_path}:/usr/bin:/bin", *([f"NOMAD_ADDR={given}"] if given else []))
    cluster = on_nomad(cluster, tmp_path)
    with nullcontext() if given else pytest.raises(ConfigError, match="only the agent of host-a was asked") as caught:
        abandon.refuse_running(cluster, Local("host-a", prefix=words), "nomad")
    assert given or "NOMAD_ADDR" in str(caught and caught.value.hint)
