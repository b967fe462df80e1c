"""`sms failover --i-have-fenced` of an engine: only one that does not answer counts as off."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import CommandError, Result, Unreachable
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.engines import abandon
from appliance.operations.engines.engine import Instance, WorkloadState
from appliance.tools.engine import Forbidden
from tests.unit.engines.deployments import BUNDLE

RUNS = [WorkloadState("a", "service", True, 1, (Instance("ctl", "n1", True, True, ()),))]
HERE = 'Get "http://127.0.0.1:4646/v1/nodes": dial tcp 127.0.0.1:4646: connect: connection refused'


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], ""),
        (Unreachable("dial tcp 10.0.0.1:4646: connect: connection refused"), ""),
        (RUNS, "nomad answers and runs ctl"),
        (CommandError(Result("h", ("nomad",), 1, b"", b"broken")), "nomad answers, and it is not known what it runs"),
        (SmsError("the reply is not JSON"), "nomad answers, and it is not known what it runs: the reply is not JSON"),
        (Forbidden("not permitted"), "not permitted"),
        (ConfigError("a wrong KUBECONFIG"), "a wrong KUBECONFIG"),
    ],
)
def test_what_counts_as_off(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, answer: SmsError | list[WorkloadState], message: str
) -> None:
    def states(*_: object) -> list[WorkloadState]:
        if isinstance(answer, SmsError):
            raise answer
        return answer

    monkeypatch.setattr(abandon, "render_bundle", lambda *_: BUNDLE)
    monkeypatch.setattr(abandon, "find_engine", lambda *_: SimpleNamespace(states=states))
    with pytest.raises((Refused, ConfigError), match=message) if message else nullcontext() as caught:
        abandon.refuse_running(cluster, Local("host-a"), "nomad")
    assert not message or (caught and caught.value.status == (2 if isinstance(answer, ConfigError) else 3))


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
    monkeypatch.setattr(abandon, "render_bundle", lambda *_: BUNDLE)
    with nullcontext() if given else pytest.raises(ConfigError, match="only the agent of host-a was asked") as caught:
        abandon.refuse_running(cluster, Local("host-a", prefix=words), "nomad")
    assert given or "NOMAD_ADDR" in str(caught and caught.value.hint)
