"""What ``kubectl`` and ``nomad`` are called with, and what their replies and errors mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import CommandError, Stuck, Unreachable
from appliance.host.local import Local
from appliance.tools.engine import BOUNDED, Forbidden, run_program
from appliance.tools.kubectl import Kubectl, read_pod
from appliance.tools.nomad import Nomad, read_allocation, read_job, readable_plan
from tests.support.fake import Answer, Fake

KUBECTL = ("kubectl", "--kubeconfig=/k", "--namespace=lab")
NOMAD = ("env", "NOMAD_NAMESPACE=default", "NOMAD_CLI_SHOW_HINTS=false", "nomad")


def kubectl(answers: Mapping[tuple[str, ...], Answer]) -> Kubectl:
    limited = {(*BOUNDED, *KUBECTL, "--request-timeout=30s", *words): answer for words, answer in answers.items()}
    return Kubectl(Fake(limited), "lab", "/k")


def nomad(answers: Mapping[tuple[str, ...], Answer]) -> Nomad:
    return Nomad(Fake({(*BOUNDED, *NOMAD, *words): answer for words, answer in answers.items()}))


def with_program(folder: Path, name: str, script: str) -> Local:
    """A host whose program of that name is a shell script."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return Local(prefix=("env", f"PATH={folder}:/usr/bin:/bin"))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("The connection to the server 10.0.0.1:6443 was refused - did you specify the right host?", Unreachable),
        ("Unable to connect to the server: dial tcp 10.0.0.1:6443: i/o timeout", Unreachable),
        ("Unable to connect to the server: net/http: TLS handshake timeout", Unreachable),
        ("Unable to connect to the server: EOF", Unreachable),
        ("Unable to connect to the server: dial tcp: lookup nope: no such host", ConfigError),
        ("Unable to connect to the server: x509: certificate signed by unknown authority", ConfigError),
        ("error: remote error: tls: bad certificate", ConfigError),
        ("The connection to the server localhost:8080 was refused - did you specify the right host?", ConfigError),
        ("Please enter Username: error: EOF", ConfigError),
        ('Error from server (Forbidden): pods is forbidden: User "x" cannot list resource "pods"', Forbidden),
        ("error: You must be logged in to the server (Unauthorized)", Forbidden),
        ("error: no objects passed to apply", CommandError),
        ("error: stat /nope: no such file or directory", ConfigError),
        ('error: context "nope" does not exist', ConfigError),
    ],
)
def test_errors_of_kubectl(message: str, kind: type[SmsError]) -> None:
    with pytest.raises(kind) as caught:
        kubectl({("get", "pods"): (1, message)}).pods()
    assert caught.value.status == {Forbidden: 3, ConfigError: 2}.get(kind, 1)
    assert caught.value.hint or kind is CommandError


def test_a_missing_program_is_refused() -> None:
    with pytest.raises(Refused, match="lacks the program kubectl") as caught:
        Kubectl(Local(prefix=("env", "PATH=/nowhere")), "lab").pods()
    assert caught.value.hint
    with pytest.raises(Refused, match="lacks the program nomad"):
        nomad({("operator", "api"): (127, "env: nomad: No such file or directory")}).clients()


@pytest.mark.parametrize(
    "text",
    [
        "Error from server: etcdserver: request timed out",
        "Error from server (ServiceUnavailable): the server is currently unable to handle the request",
        "error: http2: client connection lost",
        "Unexpected response code: 500 (No cluster leader)",
    ],
)
def test_an_engine_that_cannot_answer_now(tmp_path: Path, text: str) -> None:
    """A wait goes on after these."""
    with pytest.raises(Unreachable):
        Kubectl(with_program(tmp_path, "kubectl", f"echo '{text}' >&2; exit 1"), "lab").pods()


def test_a_program_that_does_not_end() -> None:
    with pytest.raises(Stuck, match="`nomad` did not end within"):
        run_program(Local(), ("sh", "-c", "sleep 60", "nomad"), timeout=0.2, hint="x")


def test_a_difference_is_one_only_with_text(tmp_path: Path) -> None:
    assert Kubectl(with_program(tmp_path, "kubectl", "exit 0"), "lab").diff(b"{}") == ""
    assert Kubectl(with_program(tmp_path, "kubectl", "echo -a; exit 1"), "lab").diff(b"{}") == "-a\n"
    with pytest.raises(CommandError):
        Kubectl(with_program(tmp_path, "kubectl", "echo broken >&2; exit 1"), "lab").diff(b"{}")


def test_values_of_secrets_are_in_standard_input_only() -> None:
    given: list[bytes | None] = []

    def take(argv: tuple[str, ...], input: bytes | None) -> tuple[int, str]:
        assert "c2VjcmV0" not in " ".join(argv)
        given.append(input)
        return 0, ""

    kubectl({("apply",): take}).put_secret("munge-key", {"munge.key": b"secret"}, {})
    nomad({("var", "put"): take}).put_variable("nomad/jobs/slurm-ctl", {"munge_key": "c2VjcmV0"}, {})
    assert [b"c2VjcmV0" in (each or b"") for each in given] == [True, True]


@pytest.mark.parametrize(
    ("status", "reply"),
    [
        (0, "rpc error: {}"),
        (0, '{{"Items": {}'),
        (0, "Permission denied: {}"),
        (0, "No cluster leader: {}"),
        (0, "<{}>"),
        (1, "{}"),
        (1, "connection refused: {}"),
        (1, "x509: {}"),
        (1, "Forbidden: {} (Forbidden)"),
    ],
)
def test_no_reply_to_a_request_for_a_secret_is_shown(status: int, reply: str) -> None:
    key = "c2VjcmV0IG9mIGEgY2x1c3Rlcg=="
    answer = (status, reply.format(key))
    for read in (
        lambda: nomad({("operator", "api", "-X", "GET", "/v1/var/a"): answer}).variable("a"),
        lambda: kubectl({("get", "secret", "x", "--ignore-not-found"): answer}).get("secret", "x"),
    ):
        with pytest.raises(SmsError) as caught:
            read()
        assert key not in f"{caught.value} {caught.value.hint}" and "[output withheld" in str(caught.value)


def test_a_token_is_no_argument() -> None:
    argv = Nomad(Local(), token_file="/etc/nomad.token", api="https://nomad:4646").argv("job", "run", "-")
    assert argv[:5] == ("sh", "-c", 'NOMAD_TOKEN=$(cat -- "$1") && export NOMAD_TOKEN && shift && exec "$@"', "token",
                        "/etc/nomad.token")  # fmt: skip
    assert "NOMAD_ADDR=https://nomad:4646" in argv


@pytest.mark.parametrize(
    ("status", "text", "change"),
    [
        (1, '+ Job: "x"\n+ Task Group: "x" (1 create)\n', "create"),
        (1, '+/- Job: "x"\n+/- Task Group: "x"\n', "change"),
        (0, '+/- Job: "x"\n+/- Task Group: "x" (1 in-place update)\n', "change"),
        (0, 'Job: "x"\nTask Group: "x" (1 in-place update)\n', "unchanged"),
    ],
)
def test_plans(tmp_path: Path, status: int, text: str, change: str) -> None:
    (tmp_path / "text").write_text(text)
    plan = Nomad(with_program(tmp_path, "nomad", f"cat {tmp_path}/text; exit {status}")).plan("job {}")
    assert (plan.change, plan.restarts) == (change, status == 1)


def test_a_plan_shows_the_lines_that_differ() -> None:
    plan = """\
+/- Job: "x"
      +/- Template {
        +/- EmbeddedTmpl: "a\\n\\"b\\"\\nc\\n" => "a\\n\\"d\\"\\nc\\n" (forces create/destroy update)
            Perms:        "0444"
        }
      + Template {
        + EmbeddedTmpl: "one\\ntwo\\n"
          Other:        "one\\ntwo\\n"
          Bell:         "\\a\\n"
        }

Scheduler dry-run:
- All tasks successfully allocated.

Job Modify Index: 34
To submit the job with version verification run:

nomad job run -check-index 34 -
"""
    assert readable_plan(plan).rstrip().splitlines() == [
        '+/- Job: "x"',
        "      +/- Template {",
        "        +/- EmbeddedTmpl: (forces create/destroy update)",
        "            @@ -1,3 +1,3 @@",
        "             a",
        '            -"b"',
        '            +"d"',
        "             c",
        '            Perms:        "0444"',
        "        }",
        "      + Template {",
        "        + EmbeddedTmpl:",
        "            +one",
        "            +two",
        "          Other: 2 lines",
        '          Bell:         "\\a\\n"',
        "        }",
        "",
        "Scheduler dry-run:",
        "- All tasks successfully allocated.",
    ]


def test_a_plan_that_failed_is_no_plan() -> None:
    with pytest.raises(CommandError):
        nomad({("job", "plan"): (255, "Error during plan: Unexpected response code: 500")}).plan("job {}")
    with pytest.raises(Unreachable):
        nomad({("job", "plan"): (255, "write tcp 10.0.0.1:1: use of closed network connection")}).plan("job {}")
    with pytest.raises(Unreachable):
        nomad({("job", "plan"): (255, "Put http://127.0.0.1:4646: dial tcp: connect: connection refused")}).plan("")


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("Permission denied", Forbidden),
        ("ACL token not found", Forbidden),
        ("No cluster leader", Unreachable),
        ("rpc error: No cluster leader", Unreachable),
        ("no servers", Unreachable),
        ("No path to region", Unreachable),
        ("rpc error: failed to get conn: dial tcp 10.0.0.1:4647: connect: connection refused", Unreachable),
        ("failed to parse the query", SmsError),
        ("rpc error: 1 error occurred: invalid", SmsError),
        ("<!DOCTYPE HTML>\n<p>File not found</p>\n</html>", ConfigError),
        ("404 page not found", ConfigError),
        ("something else", SmsError),
        ("{broken", SmsError),
    ],
)
def test_replies_of_the_api_that_are_errors(reply: str, kind: type[SmsError]) -> None:
    with pytest.raises(kind) as caught:
        nomad({("operator", "api", "-X", "GET", "/v1/nodes"): (0, reply)}).clients()
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ('Get "http://10.0.0.1:4646/v1/nodes": dial tcp 10.0.0.1:4646: connect: connection refused', Unreachable),
        ('Get "http://nope:4646/v1/nodes": dial tcp: lookup nope: no such host', ConfigError),
        ('Get "https://10.0.0.1:4646/v1/nodes": tls: first record does not look like a TLS handshake', ConfigError),
        ('Get "http:///v1/nodes": http: no Host in request URL', ConfigError),
        ("Error initializing client: Error loading CA File: open /nope: no such file or directory", ConfigError),
    ],
)
def test_errors_of_nomad(message: str, kind: type[SmsError]) -> None:
    """Only a server that does not answer is off: a wrong address does not tell whether it does."""
    with pytest.raises(kind) as caught:
        nomad({("operator", "api", "-X", "GET", "/v1/nodes"): (1, f"Error performing request: {message}")}).clients()
    assert type(caught.value) is kind and "NOMAD_ADDR" in str(caught.value.hint)


def test_what_is_not_there() -> None:
    there = nomad({("operator", "api", "-X", "GET", "/v1/job/a%2Fb"): (0, "job not found")})
    assert there.job("a/b") is None
    off = nomad({("operator", "api", "-X", "GET", "/v1/client/allocation/a/checks"): (0, "No path to node")})
    assert off.checks("a") == []
    assert kubectl({("get", "secret", "x", "--ignore-not-found"): (0, "")}).get("secret", "x") is None


def test_replies_of_other_types_are_empty_not_errors() -> None:
    statuses = {"containerStatuses": [None, {"name": 5}]}
    replies: tuple[Any, ...] = (None, 5, [], {"metadata": 5, "status": []}, {"status": statuses})
    for hostile in replies:
        assert read_pod(hostile).name == ""
        assert read_allocation(hostile).tasks == ()
        assert read_job(hostile).counts == {}
    pod = read_pod({"spec": {"nodeName": "a\x1b[31mb"}})
    assert pod.node == "a [31mb"


@pytest.mark.parametrize("name", ["--server=http://10.0.0.1", "-address=x", "a b", "../a", "", "a\x1b", "a" * 254])
def test_what_is_no_name_is_no_word_of_a_command(name: str) -> None:
    items = [{"metadata": {"name": each}} for each in (name, "a-0")]
    listed = json.dumps({"items": items})
    assert [one.name for one in kubectl({("get", "pods", "-o", "json"): (0, listed)}).pods()] == ["a-0"]
    for path, list_of in (("nodes", Nomad.clients), ("job/a/allocations", lambda one: one.allocations("a"))):
        listed = json.dumps([{"ID": name}, {"ID": "0a-1"}])
        found = list_of(nomad({("operator", "api", "-X", "GET", f"/v1/{path}"): (0, listed)}))
        assert [one.id for one in found] == ["0a-1"]


def test_a_pod() -> None:
    pod = read_pod(
        {
            "metadata": {"name": "slurmctld-0", "uid": "u", "ownerReferences": [{"name": "slurmctld"}]},
            "spec": {"nodeName": "n1"},
            "status": {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
                "initContainerStatuses": [
                    {"name": "place", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
                    {"name": "munge", "ready": True, "restartCount": 2, "state": {"running": {}}},
                ],
                "containerStatuses": [
                    {
                        "name": "slurmctld",
                        "restartCount": 3,
                        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                        "lastState": {"terminated": {"reason": "Error", "exitCode": 1}},
                    }
                ],
            },
        }
    )
    assert (pod.ready, pod.node, pod.owner, pod.restarts) == (True, "n1", "slurmctld", 5)
    assert [one.reason for one in pod.containers] == ["", "", "CrashLoopBackOff, Error"]


def test_an_allocation_and_a_job() -> None:
    given = {
        "ID": "a1",
        "JobID": "slurm-ctl",
        "NodeName": "c1",
        "ClientStatus": "running",
        "DesiredStatus": "run",
        "TaskStates": {"slurmctld": {"State": "running", "Restarts": 1, "Events": [{"DisplayMessage": "Started"}]}},
    }
    (answer,) = nomad(
        {("operator", "api", "-X", "GET", "/v1/job/slurm-ctl/allocations"): (0, json.dumps([given]))}
    ).allocations("slurm-ctl")
    assert (answer.runs, answer.node, answer.tasks[0].restarts, answer.tasks[0].message) == (True, "c1", 1, "Started")
    job = read_job({"ID": "slurm-ctl", "Stop": True, "TaskGroups": [{"Name": "slurmctld", "Count": 0}]})
    assert (job.stopped, job.counts) == (True, {"slurmctld": 0})


@pytest.mark.parametrize(
    ("stderr", "status", "kind", "why"),
    [
        ("fatal error: runtime: out of memory\n\nruntime stack:\n", 2, SmsError, "more than 2 GiB"),
        ("prlimit: failed to execute kubectl: No such file or directory", 127, Refused, "lacks the program kubectl"),
    ],
)
def test_what_bounds_a_program_is_not_in_its_errors(stderr: str, status: int, kind: type[SmsError], why: str) -> None:
    for ok in (range(2), None) if status == 127 else (range(2),):
        with pytest.raises(kind, match=why) as caught:
            run_program(Fake({(*BOUNDED, "kubectl"): (status, stderr)}), ("kubectl", "get"), ok=ok)
        assert type(caught.value) is kind and "prlimit" not in caught.value.message
    with pytest.raises(CommandError) as failed:
        run_program(Fake({(*BOUNDED, "kubectl"): (1, "error: no")}), ("kubectl", "get"))
    assert "`kubectl get`" in failed.value.message
