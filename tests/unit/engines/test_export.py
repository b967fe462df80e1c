"""Exports: golden folders, every service placed, no secret, valid for the schemas of engines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hcl2
import kubernetes_validate
import pytest
import yaml

from appliance.catalog import read_catalog
from appliance.engines.config import make_deployment, set_lines
from appliance.engines.kubernetes import node_port
from appliance.engines.model import Port
from appliance.engines.nomad import probe_ports
from appliance.engines.render import TARGETS, Export, make_bundle, render
from appliance.errors import ConfigError
from appliance.plan.services.confinement import HIDDEN_FILES, HIDDEN_FOLDERS
from appliance.plan.services.jobsync import PROGRAMS
from appliance.share import share
from tests.places import GOLDEN
from tests.unit.engines.attachments import KIND as NETWORK
from tests.unit.engines.attachments import check_attachments
from tests.unit.engines.cases import (
    CASES,
    KUBERNETES,
    NOMAD,
    PODMAN,
    SECRETS,
    SITES,
    SMALL,
    case_input,
    make_input,
)

VERSIONS = ("1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
"""Of which kubernetes-validate has the schemas."""
OLDER_VERSIONS = ("1.29", "1.30", "1.31")


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def made(case: str, tmp_path: Path) -> Export:
    return render(*case_input(tmp_path, case))


def test_what_is_rendered(case: str, made: Export, golden: Callable[[Path, dict[str, str]], None]) -> None:
    """The JSON of jobs is compared with what Nomad makes of their HCL (tests/real/engines)."""
    texts = {name: text for name, text in made.files.items() if not name.startswith("json/")}
    placed = "".join(
        f"{each.engine} {each.service}: {each.place} {each.workload or each.why}\n".lstrip() for each in made.placements
    )
    golden(GOLDEN / "engines" / case, {**texts, "placements": placed})


def test_the_same_input_gives_the_same_bytes(case: str, made: Export, tmp_path: Path) -> None:
    assert dict(render(*case_input(tmp_path, case)).files) == dict(made.files)


def test_every_service_is_placed(case: str, made: Export, tmp_path: Path) -> None:
    """In a workload, or elsewhere with the reason."""
    _, given = case_input(tmp_path, case)
    engines = sorted({each.engine for each in made.placements})
    assert engines == (["kubernetes", "nomad"] if case == "terraform" else [""])
    for engine in engines:
        found = [each.service for each in made.placements if each.engine == engine]
        assert found == [service.name for service in given.services]
    assert [each for each in made.placements if not (each.workload if each.place == "engine" else each.why)] == []


def test_no_file_contains_a_secret(case: str, made: Export) -> None:
    text = "\n".join(made.files.values())
    for path in (SITES / "files").iterdir():
        if path.name not in ("passwd", "group"):
            for line in path.read_text().splitlines():
                assert len(line) < 8 or line not in text, path.name


def objects(made: Export) -> Iterator[dict[str, Any]]:
    for name, text in made.files.items():
        if not name.endswith("kustomization.yaml"):
            yield from yaml.safe_load_all(text)


CATALOG = read_catalog(share("definitions", "services"))
EVERYTHING = [name for name, one in CATALOG.items() if one.container]


@pytest.mark.parametrize("secrets", [True, False])
@pytest.mark.parametrize("target", TARGETS)
def test_every_service_on_every_engine(target: str, secrets: bool, tmp_path: Path) -> None:
    """It is carried, or refused with the reason; without their secret files, logins and tokens are not served."""
    engines = {"kubernetes": KUBERNETES, "nomad": NOMAD, "podman": PODMAN}
    changes = {
        "services": EVERYTHING,
        "engines": engines,
        "secrets": SECRETS if secrets else {"munge_key": SECRETS["munge_key"]},
    }
    found = {each.service: each for each in render(target, make_input(tmp_path, "debian-12", changes)).placements}
    assert found.keys() == set(EVERYTHING)
    left = {name for name, each in found.items() if each.place != "engine"}
    assert left == {"cron", "filesync", "nat", "chrony"} | (set() if secrets else {"sssd", "login", "slurmrestd"})
    assert all(len(found[name].why) > 20 for name in left)
    assert all(found[name].workload for name in found.keys() - left)
    if secrets:
        assert set(found["sssd"].workload.split(", ")) == {"slurmctld", "slurmdbd", "login"}


KUBERNETES_CASES = [name for name in CASES if CASES[name][0] == "kubernetes"]
NOMAD_CASES = [name for name in CASES if CASES[name][0] == "nomad"]


@pytest.mark.parametrize("name", KUBERNETES_CASES)
def test_objects_are_valid(name: str, tmp_path: Path) -> None:
    found = list(objects(render(*case_input(tmp_path, name))))
    assert bool(check_attachments(found)) is (name == "kubernetes-attached")
    for each in found:
        if each["kind"] == NETWORK:
            continue
        # One case with all versions: each takes seconds.
        for version in VERSIONS if name == "kubernetes" else VERSIONS[-1:]:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.full
@pytest.mark.slow
def test_objects_are_valid_for_older_versions(tmp_path: Path) -> None:
    """The newest package has no schemas of these: another one is installed beside it, for this test only."""
    words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    lock = Path(__file__).with_name("schemas.lock")
    subprocess.run([sys.executable, *words, "--target", tmp_path / "older", "-r", lock], check=True)
    found = [each for name in KUBERNETES_CASES for each in objects(render(*case_input(tmp_path, name)))]
    found = [each for each in found if each["kind"] != NETWORK]
    assert len(found) > 20
    program = (
        "import json, sys, kubernetes_validate as k\n"
        "assert k.__file__.startswith(sys.argv[1]), k.__file__\n"
        "for each in json.load(sys.stdin):\n"
        "    for version in sys.argv[2:]:\n"
        "        k.validate(each, version, strict=True)\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "older"), *OLDER_VERSIONS]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "older")}
    done = subprocess.run(argv, input=json.dumps(found), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def containers(made: Export) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pod and container of all services, without what runs before them."""
    for each in objects(made):
        if each["kind"] == "StatefulSet":
            pod = each["spec"]["template"]["spec"]
            listed = [*pod["containers"], *(one for one in pod["initContainers"] if "restartPolicy" in one)]
            yield from ((pod, one) for one in listed)


@pytest.mark.parametrize("name", KUBERNETES_CASES)
def test_pods_are_confined(name: str, tmp_path: Path) -> None:
    made = render(*case_input(tmp_path, name))
    for pod, container in containers(made):
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        if security.get("runAsNonRoot") is not True:
            # Postfix's master process and those of sssd are root's; sshd changes to users.
            assert container["name"] in ("postfix", "sssd", "login")
            allowed = set(CATALOG[container["name"]].capabilities)
            assert set(security["capabilities"]["add"]) == allowed
        mounted = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert mounted["/etc"]["readOnly"] is True
        configs = {volume["name"] for volume in pod["volumes"] if "configMap" in volume or "secret" in volume}
        assert not [mount for mount in container["volumeMounts"] if mount["name"] in configs]


STARTS_LONG = {"slurmctld", "slurmdbd", "mariadb"}


def test_memory_of_the_site_file(tmp_path: Path) -> None:
    """N2: Nomad ends a task that uses more."""
    engines = {"nomad": NOMAD, "kubernetes": KUBERNETES, "memory_mb": {"slurmctld": 8192}}
    given = make_input(tmp_path, "debian-12", {"engines": engines})
    tasks = [task for job in jobs(render("nomad", given)).values() for task in job["TaskGroups"][0]["Tasks"]]
    assert {task["Name"]: task["Resources"]["MemoryMB"] for task in tasks}["slurmctld"] == 8192
    requests = {one["name"]: one["resources"]["requests"] for _, one in containers(render("kubernetes", given))}
    assert requests["slurmctld"]["memory"] == "8192Mi" and requests["munge"]["memory"] == "128Mi"


@pytest.mark.parametrize("name", KUBERNETES_CASES)
def test_only_readiness_depends_on_others(name: str, tmp_path: Path) -> None:
    for _, container in containers(render(*case_input(tmp_path, name))):
        assert container["livenessProbe"]["exec"]["command"][1] == "--live"
        assert container["readinessProbe"]["exec"]["command"] == ["/opt/sms/bin/sms-probe", container["name"]]
        tries = container["startupProbe"]["failureThreshold"]
        assert (tries > 10**9) is (container["name"] in STARTS_LONG), "N1, K3: no recovery or conversion is killed"
        sidecar = "restartPolicy" in container
        assert (container["startupProbe"]["exec"]["command"][1] == "--live") is not sidecar


def test_another_configuration_is_another_pod(tmp_path: Path) -> None:
    def digests(**changes: Any) -> dict[str, str]:
        engines = {"engines": {"kubernetes": KUBERNETES}}
        made = render("kubernetes", make_input(tmp_path, "debian-12", {**engines, **changes}))
        found = [each for each in objects(made) if each["kind"] == "StatefulSet"]
        return {
            each["metadata"]["name"]: each["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for each in found
        }

    before, after = digests(), digests(mail={"relay": "other.example.org"})
    assert {name for name in before if before[name] != after[name]} == {"postfix"}


@pytest.mark.parametrize("name", NOMAD_CASES)
def test_jobs_can_be_read(name: str, tmp_path: Path) -> None:
    made = render(*case_input(tmp_path, name))
    hcl = [name for name in made.files if name.endswith(".hcl")]
    assert hcl
    for file in hcl:
        assert hcl2.loads(made.files[file])["job"]
    assert {f"json/{file.removesuffix('.nomad.hcl')}.json" for file in hcl} == {
        file for file in made.files if file.startswith("json/")
    }


def jobs(made: Export) -> dict[str, dict[str, Any]]:
    return {
        document["Job"]["ID"]: document["Job"]
        for document in (json.loads(text) for name, text in made.files.items() if name.startswith("json/"))
    }


@pytest.mark.parametrize("name", NOMAD_CASES)
def test_the_jobs_of_document_000(name: str, tmp_path: Path) -> None:
    """A service job of the controller, system jobs of munge and slurmd; a second writer is never started."""
    made = render(*case_input(tmp_path, name))
    assert [note for note in made.notes if 'compute nodes: max_kill_timeout = "70s"' in note], "munge after slurmd"
    found = jobs(made)
    kinds = {job: found[job]["Type"] for job in ("slurm-ctl", "munge", "slurm-cn")}
    assert kinds == {"slurm-ctl": "service", "munge": "system", "slurm-cn": "system"}
    for job in found.values():
        (group,) = job["TaskGroups"]
        assert [task["Driver"] for task in group["Tasks"]] == ["raw_exec"] * len(group["Tasks"])
        if job["Type"] == "service":
            assert group["Disconnect"]["Replace"] is False
            long = not {task["Name"] for task in group["Tasks"]}.isdisjoint(STARTS_LONG)
            assert group["Update"]["AutoRevert"] is not long
            assert (group["Update"]["HealthyDeadline"] > 3600 * 10**9) is long
            assert group["Constraints"][0]["LTarget"] == "${attr.unique.hostname}"
            ports = [port["Value"] for network in group["Networks"] for port in network["ReservedPorts"]]
            assert len(ports) == len(set(ports))


@pytest.mark.parametrize("name", NOMAD_CASES)
def test_slurmd_waits_for_munge(name: str, tmp_path: Path) -> None:
    """At each start, by the same program as everywhere."""
    found = jobs(render(*case_input(tmp_path, name)))
    for job, service in (("munge", "munge"), ("slurm-cn", "slurmd")):
        (task,) = found[job]["TaskGroups"][0]["Tasks"]
        assert task["Config"]["args"][-2:] == ["--jobsync", service]
        files = {template["DestPath"]: template["EmbeddedTmpl"] for template in task["Templates"]}
        listed = json.loads(files["local/sms/services.json"])["services"]
        assert listed["slurmd"]["jobsync"]["holds"] == ["munge"]
        assert {f"local/sms/{program}" for program in PROGRAMS} <= files.keys()


def test_another_service_changes_no_other_job(tmp_path: Path) -> None:
    """The ports of checks follow from the job itself."""
    made = {}
    for name, changes in (("many", {}), ("few", {"services": [*SMALL, "rsyslog"]})):
        (tmp_path / name).mkdir()
        given = make_input(tmp_path / name, "debian-12", {**changes, "engines": {"nomad": NOMAD}})
        made[name] = probe_ports(make_deployment(given.site, given.services, given.base).workloads)
    assert made["many"]["slurmctld"] == made["few"]["slurmctld"] == 16817
    assert made["many"]["rsyslog"] == made["few"]["rsyslog"]
    assert len(set(made["many"].values())) == len(made["many"]) > 3


def test_units_stop_one_after_the_other(tmp_path: Path) -> None:
    """The engine waits for as long as all of them may take."""
    given = case_input(tmp_path, "nomad")[1]
    workloads = make_deployment(given.site, given.services, given.base).workloads
    waits = {one.name: {unit.name: unit.service.stop_wait_s for unit in one.units} for one in workloads}
    assert waits["slurmdbd"] == {"munge": 30, "mariadb": 120, "slurmdbd": 60}
    assert {one.name: one.stop_s for one in workloads} == {
        name: sum(each.values()) + 10 for name, each in waits.items()
    }


@pytest.mark.parametrize("name", NOMAD_CASES)
def test_nothing_unsigned_runs(name: str, tmp_path: Path) -> None:
    for job in jobs(render(*case_input(tmp_path, name))).values():
        for task in job["TaskGroups"][0]["Tasks"] if job["Type"] == "service" else ():
            assert task["Config"]["command"] == "/bin/sh"
            assert task["Config"]["args"][:2] == ["-eu", "local/verified.sh"]
            names = {template["DestPath"] for template in task["Templates"]}
            assert {"local/verified.sh", "local/keys/0.pub"} <= names


@pytest.mark.parametrize("name", NOMAD_CASES)
def test_tasks_reach_no_more_of_the_host_than_the_container(name: str, tmp_path: Path) -> None:
    hidden = [f"--bind=${{NOMAD_TASK_DIR}}/empty:{path}:ro" for path in HIDDEN_FOLDERS]
    hidden += ["--bind=/proc/sys:/proc/sys:ro", *(f"--bind=/dev/null:{path}:ro" for path in HIDDEN_FILES)]
    for job in jobs(render(*case_input(tmp_path, name))).values():
        for task in job["TaskGroups"][0]["Tasks"] if job["Type"] == "service" else ():
            args = task["Config"]["args"]
            assert {*hidden, "${NOMAD_TASK_DIR}/empty"} <= set(args), task["Name"]
            left_out = {args[place + 1] for place, word in enumerate(args) if word == "--no-mount"}
            assert left_out == {"sys", "/etc/hosts", "/etc/localtime"}, task["Name"]


def test_modules_are_read_and_have_an_order(tmp_path: Path) -> None:
    made = render(*case_input(tmp_path, "terraform"))
    for engine, role in (("kubernetes", "slurmctld"), ("nomad", "slurm-ctl")):
        root = hcl2.loads(made.files[f"{engine}/main.tf"])
        modules = {name.strip('"'): each for part in root["module"] for name, each in part.items()}
        for name, module in modules.items():
            assert hcl2.loads(made.files[f"{engine}/modules/{name}/main.tf"])["resource"]
            # Not of the root: the export can be a module of another configuration.
            (file,) = re.findall(r"path\.module\}/([^\"]+)", str(module["file"]))
            assert f"{engine}/{file}" in made.files
        assert "module.slurmdbd" in str(modules[role]["depends_on"])


@pytest.mark.parametrize("name", ["quadlet", "compose"])
def test_containers_wait_for_what_is_ready(name: str, tmp_path: Path) -> None:
    """Not only started: munge answers, and the files are in place."""
    made = render(*case_input(tmp_path, name))
    if name == "compose":
        compose = yaml.safe_load(made.files["compose.yaml"])
        for container in compose["services"].values():
            for other, how in container.get("depends_on", {}).items():
                ended = other.endswith("-place")
                assert how["condition"] == ("service_completed_successfully" if ended else "service_healthy")
                assert ended or "healthcheck" in compose["services"][other]
        assert "sms-sample-slurmctld-munge" in compose["services"]["sms-sample-slurmctld-slurmctld"]["depends_on"]
        return
    unit = made.files["sms-sample-slurmctld-slurmctld.container"]
    needs = "sms-sample-slurmctld-place.service sms-sample-slurmctld-munge.service"
    assert f"Requires={needs}\nAfter={needs}\n" in unit
    assert "Notify=healthy" in made.files["sms-sample-slurmctld-munge.container"]
    assert "Type=oneshot" in made.files["sms-sample-slurmctld-place.container"]


SLURM = {"nodes": [{"name": "node1"}]}


@pytest.mark.parametrize(
    ("target", "site", "changes", "word"),
    [
        ("kubernetes", "debian-12", {}, "engines.kubernetes.address"),
        ("nomad", "debian-12", {}, "engines.nomad.address"),
        ("quadlet", "debian-12", {}, "engines.podman.address"),
        ("terraform", "debian-12", {}, "engines.nomad.address"),
        ("kubernetes", "openhpc-rocky9", {"engines": {"kubernetes": KUBERNETES}, "slurm": SLURM}, "ids of slurm"),
        ("nomad", "debian-12", {"engines": {"nomad": {**NOMAD, "state": "/srv/a:b"}}}, "/srv/a:b"),
        ("nomad", "debian-12", {"engines": {"nomad": NOMAD}, "signing": {"pgp_fingerprint": "A" * 40}}, "PEM"),
    ],
)
def test_what_cannot_be_rendered(target: str, site: str, changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        render(target, make_input(tmp_path, site, changes))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("data", "word"),
    [(b"\xff\xfe", "is not text"), (b"-----BEGIN PRIVATE KEY-----\n", "private key"), (b"x" * 10**6, "bytes")],
)
def test_files_that_are_refused(data: bytes, word: str, tmp_path: Path) -> None:
    (tmp_path / "prolog.sh").write_bytes(data)
    changes = {
        "services": list(SMALL),
        "slurm": {**SLURM, "files": {"prolog.sh": str(tmp_path / "prolog.sh")}},
        "engines": {"kubernetes": KUBERNETES},
    }
    with pytest.raises(ConfigError, match=word):
        render("kubernetes", make_input(tmp_path, "debian-12", changes))


def test_passwords_of_accounts_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("alice:$6$salt$hash:2001:2001::/home/alice:/bin/sh\n")
    given = make_input(tmp_path, "debian-12", {"engines": {"kubernetes": KUBERNETES}})
    sources = type(given.sources)(given.sources.overlays, {"passwd": (tmp_path / "passwd").read_bytes()})
    made = render("kubernetes", type(given)(given.site, given.services, given.base, sources, given.image))
    text = "\n".join(made.files.values())
    assert "alice:x:2001" in text
    assert "$6$" not in text


@pytest.mark.parametrize(("port", "expected"), [(25, 30025), (514, 30514), (2514, 32514), (6817, 30817), (8735, 32735)])
def test_node_ports(port: int, expected: int) -> None:
    assert node_port(Port("x", "tcp", port)) == expected


def test_a_port_that_nodes_cannot_have() -> None:
    with pytest.raises(ConfigError):
        node_port(Port("x", "tcp", 20000))


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("A=1\nB=2\n", {"A": "3"}, "A=3\nB=2\n"),
        ("A=1\nA=2\n", {"A": "3"}, "A=3\n"),
        ("B=2\n", {"A": "3"}, "B=2\nA=3\n"),
        ("# A=1\n", {}, "# A=1\n"),
    ],
)
def test_lines_are_set(text: str, values: dict[str, str], expected: str) -> None:
    assert set_lines(text, values) == expected


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        ({"partitions": [{"name": "fresh"}]}, False),
        ({"extra": ["SchedulerParameters=defer"]}, False),
        ({"files": {"topology.conf": "topology.conf"}}, False),
        ({"extra": ["AccountingStorageParameters=max_step_records=9"]}, True),
        ({"extra": ["Include topology.conf", "SchedulerParameters=defer"]}, True),  # which may have any setting
    ],
)
@pytest.mark.parametrize("name", ["kubernetes-full", "nomad-full"])
def test_what_restarts_slurmdbd(tmp_path: Path, name: str, more: dict[str, Any], *, changed: bool) -> None:
    """Of slurmctld's files it has only what `sacctmgr` reads; the controller's workload changes in each case."""
    target, site, changes = CASES[name]
    (tmp_path / "topology.conf").write_text("SwitchName=s1 Nodes=node[1-3]\n")
    given = {"nodes": [{"name": "node[1-3]"}]}
    bundles = [
        make_bundle(target, make_input(tmp_path, site, {**changes, "slurm": slurm})) for slurm in (given, given | more)
    ]
    before, after = ({item.name: item for item in one.items} for one in bundles)
    differ = {one for one in before if before[one] != after[one]}
    assert bundles[0].controller in differ and ("slurmdbd" in differ) == changed, differ
