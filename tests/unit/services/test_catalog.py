"""The catalogue: starting order, errors in its files, and all shipped files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.catalog import Service, read_bases, read_catalog, read_extra_files, select
from appliance.errors import ConfigError
from appliance.plan.image.definition import packages_for
from appliance.share import share

SHIPPED = read_catalog(share("definitions", "services"))
CARRIED = [each for each in SHIPPED.values() if each.container]
BASES = read_bases(share("definitions", "bases"))


def service(name: str, **changes: Any) -> dict[str, Any]:
    """Return a minimal service file."""
    probe = {"exec": [["true"]]}
    outage = {"seconds": 0, "why": "it says so"}
    return {
        "name": name,
        "summary": "a service",
        "critical": True,
        "run": ["true"],
        "probe": probe,
        "outage": outage,
        **changes,
    }


def write(folder: Path, *services: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for each in services:
        (folder / f"{each['name']}.yaml").write_text(yaml.safe_dump(each))
    return folder


def order(folder: Path, *names: str) -> list[str]:
    return [each.name for each in select(read_catalog(folder), names)]


ORDERS: list[tuple[str, list[dict[str, Any]], list[str], list[str]]] = [
    ("alone", [service("a")], ["a"], ["a"]),
    ("by name", [service("b"), service("a")], ["b", "a"], ["a", "b"]),
    ("what is needed comes first", [service("a", needs=["b"]), service("b")], ["a", "b"], ["b", "a"]),
    ("what is needed comes along", [service("a", needs=["b"]), service("b")], ["a"], ["b", "a"]),
    (
        "through others",
        [service("a", needs=["b"]), service("b", needs=["c"]), service("c")],
        ["a"],
        ["c", "b", "a"],
    ),
    (
        "needed by two, once",
        [service("a", needs=["c"]), service("b", needs=["c"]), service("c")],
        ["a", "b"],
        ["c", "a", "b"],
    ),
    ("after does not bring it along", [service("a", after=["b"]), service("b")], ["a"], ["a"]),
    ("after orders where it is wanted", [service("a", after=["b"]), service("b")], ["a", "b"], ["b", "a"]),
    ("named twice", [service("a")], ["a", "a"], ["a"]),
]


@pytest.mark.parametrize(("services", "names", "expected"), [case[1:] for case in ORDERS], ids=[c[0] for c in ORDERS])
def test_starting_order(tmp_path: Path, services: list[dict[str, Any]], names: list[str], expected: list[str]) -> None:
    folder = write(tmp_path / "services", *services)
    assert order(folder, *names) == expected
    assert order(folder, *reversed(names)) == expected, "the order of the names does not count"


WRONG: list[tuple[list[dict[str, Any]], str]] = [
    ([service("a", needs=["a"])], "circular dependency of services: a -> a"),
    ([service("a", needs=["b"]), service("b", needs=["a"])], "circular dependency of services: a -> b -> a"),
    ([service("a", needs=["b"]), service("b", container=False, run=[])], "cannot run b"),
    ([service("b")], "unknown service: a"),
]


@pytest.mark.parametrize(("services", "words"), WRONG)
def test_unresolvable_selections(tmp_path: Path, services: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        order(write(tmp_path / "services", *services), "a")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"needs": ["nowhere"]}, "nowhere is not in the catalogue"),
    ({"after": ["nowhere"]}, "nowhere is not in the catalogue"),
    ({"runs": ["true"]}, "runs"),
    ({"run": []}, "run and probe"),
    ({"probe": None}, "run and probe"),
    ({"probe": {}}, "exactly one of"),
    ({"probe": {"exec": [["true"]], "ntp": "127.0.0.1"}}, "exactly one of"),
    ({"probe": {"syslog": "127.0.0.1"}}, "go together"),
    ({"probe": {"ntp": "127.0.0.1", "file": "/var/log/messages"}}, "go together"),
    ({"probe": {"exec": [["true"]], "timeout_s": 0}}, "timeout_s"),
    ({"ports": ["514"]}, "ports"),
    ({"ports": ["tcp/http"]}, "ports"),
    ({"state": ["var/lib"]}, "state"),
    ({"files": [{"path": "/etc/x"}]}, "either template or content"),
    ({"files": [{"path": "/etc/x", "content": "", "template": "x"}]}, "either template or content"),
    ({"files": [{"path": "/etc/x", "content": "", "mode": "rw"}]}, "mode"),
    ({"outage": {"seconds": -1, "why": "x"}}, "seconds"),
    ({"stop_signal": "KILL"}, "stop_signal"),
    ({"capabilities": {"SYS_ADMIN": "it mounts"}}, "capabilities"),
    ({"capabilities": {"SYS_PTRACE": "it traces"}}, "capabilities"),
    ({"sysctl": {"kernel.core_pattern": "|/bin/sh"}}, "sysctl"),
]


@pytest.mark.parametrize(("changes", "words"), BAD, ids=[str(case[0]) for case in BAD])
def test_errors_are_reported(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_catalog(write(tmp_path / "services", service("a", **changes)))
    assert words in str(caught.value)


def test_all_errors_of_all_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "services", service("a", runs=[]), service("b", portz=[]), service("c"))
    (folder / "other.yaml").write_text(yaml.safe_dump(service("d")))
    with pytest.raises(ConfigError) as caught:
        read_catalog(folder)
    assert [Path(problem.file).name for problem in caught.value.problems] == ["a.yaml", "b.yaml", "other.yaml"]


def test_later_folder_replaces(tmp_path: Path) -> None:
    write(tmp_path / "shipped", service("a"), service("b"))
    write(tmp_path / "own", service("a", summary="the site's own"))
    catalog = read_catalog(tmp_path / "shipped", tmp_path / "own")
    assert (catalog["a"].summary, catalog["b"].summary) == ("the site's own", "a service")


def test_service_outside_the_container_needs_no_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "services", {**service("a", container=False), "run": [], "probe": None})
    assert not read_catalog(folder)["a"].container


# Shipped files


def test_shipped_container_services() -> None:
    wanted = {"slurmctld", "munge", "nat", "rsyslog", "chrony", "postfix", "cron", "filesync"}
    assert {name for name, each in SHIPPED.items() if each.default} == wanted
    assert {"slurmdbd", "mariadb", "slurmrestd"} <= SHIPPED.keys()


@pytest.mark.parametrize("each", CARRIED, ids=lambda each: str(each.name))
def test_shipped_service_has_packages_for_every_base(each: Service) -> None:
    for base in BASES.values():
        assert set(packages_for(base, [each])) > set(base.packages) or each.name == "filesync"
        assert any(key in each.packages for key in base.package_sets), base.name


@pytest.mark.parametrize("base", BASES.values(), ids=lambda base: str(base.name))
def test_package_sets_exist(base: Any) -> None:
    known = {key for each in BASES.values() for key in each.package_sets}
    assert {key for each in SHIPPED.values() for key in each.packages} <= known
    assert set(base.package_sets) <= known


@pytest.mark.parametrize("each", SHIPPED.values(), ids=lambda each: str(each.name))
def test_shipped_service_describes_its_outage(each: Service) -> None:
    assert len(each.outage.why) > 20
    assert each.summary[0].islower() or each.summary[0].isupper()
    assert not each.summary.endswith(".")


def shell_of(each: Service) -> list[str]:
    inline = [each.run[2]] if each.run[:2] == ("sh", "-c") else []
    return [each.setup, *inline]


@pytest.mark.parametrize("each", SHIPPED.values(), ids=lambda each: str(each.name))
def test_shipped_scripts_are_valid_shell(each: Service) -> None:
    for text in shell_of(each):
        assert subprocess.run(["sh", "-n"], input=text.encode(), check=False).returncode == 0


@pytest.mark.parametrize("each", BASES.values(), ids=lambda each: str(each.name))
def test_base_scripts_can_be_indented(each: Any) -> None:
    """The image definition indents it, which would break a here-document."""
    for text in (each.header, each.setup, each.install, each.cleanup):
        assert "<<" not in text


def test_setup_is_idempotent() -> None:
    """Commands must not fail if their result exists, as mkdir and ln without options do."""
    for each in SHIPPED.values():
        for line in each.setup.splitlines():
            command = line.strip()
            assert not re.match(r"mkdir (?!-p)|ln -s (?!-?f)|useradd ", command), f"{each.name}: {command}"


def test_templates_of_services_exist() -> None:
    files = [file for each in SHIPPED.values() for file in each.files]
    files += read_extra_files(share("overlays", "base", "overlay.yaml")).files
    assert all(share("overlays", file.template).is_file() for file in files if file.template)


def test_repository_contains_no_mirror() -> None:
    """The site or the build host configures the mirrors."""
    for path in share("definitions").rglob("*"):
        if path.is_file() and path.suffix in (".yaml", ".j2"):
            hosts = re.findall(r"https?://([a-z0-9.-]+)", path.read_text())
            far = [host for host in hosts if "." in host]  # a name without a dot is that of an upstream in nginx
            assert all(host.endswith(("example.org", "example.com")) or host[0].isdigit() for host in far), path


# Traffic of services

TRAFFIC: list[tuple[dict[str, Any], str]] = [
    ({"ports": ["tcp/any"]}, "would match every service"),
    ({"ports": ["tcp/70000"]}, "is not a port"),
    ({"ports": ["tcp/0"]}, "is not a port"),
    ({"traffic": {"ports": ["udp/any"]}}, "would match every service"),
    ({"traffic": {"port": []}}, "traffic.port"),
    ({"traffic": {"every_s": -1}}, "every_s"),
    ({"traffic": {"first": [{"port": "tcp/80"}]}}, "one of starts, within and low"),
    ({"traffic": {"first": [{"port": "tcp/80", "starts": "GET", "low": "00"}]}}, "one of starts, within and low"),
    ({"traffic": {"first": [{"port": "tcp/80", "starts": "GET", "at": 4}]}}, "go with low"),
    ({"traffic": {"first": [{"port": "tcp/80", "starts": "G\u00e4T"}]}}, "ASCII"),
    ({"traffic": {"first": [{"port": "tcp/80", "within": "/x", "starts": "GET"}]}}, "one of starts, within and low"),
    ({"traffic": {"first": [{"port": "tcp/80", "within": "/x", "at": 4}]}}, "go with low"),
    ({"traffic": {"first": [{"port": "tcp/80", "within": "\u00e4"}]}}, "within must be ASCII"),
    ({"traffic": {"first": [{"port": "tcp/any", "within": "/x"}]}}, "within needs a port"),
    ({"traffic": {"first": [{"port": "tcp/80", "within": "/x", "beside": "tcp/any"}]}}, "would match every service"),
    ({"traffic": {"first": [{"port": "tcp/80", "starts": "x" * 33}]}}, "starts"),
    ({"traffic": {"first": [{"port": "tcp/80", "low": "0"}]}}, "low"),
    ({"traffic": {"first": [{"port": "tcp/80", "low": "00" * 33}]}}, "low"),
    ({"traffic": {"first": [{"port": "tcp/80", "low": "0000", "high": "ff"}]}}, "the same length"),
    ({"traffic": {"first": [{"port": "tcp/80", "low": "02ff", "high": "01ff"}]}}, "no byte of low may exceed"),
    ({"traffic": {"first": [{"port": "tcp/80", "low": "00", "at": 65}]}}, "at"),
]


@pytest.mark.parametrize(("changes", "words"), TRAFFIC, ids=range(len(TRAFFIC)))
def test_errors_in_traffic_are_reported(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_catalog(write(tmp_path / "services", service("a", **changes)))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("first", "low", "high"),
    [
        ({"starts": "GET /"}, b"GET /", b"GET /"),
        ({"port": "tcp/80", "within": "/repodata/"}, b"/repodata/", b"/repodata/"),
        ({"low": "1a00"}, b"\x1a\x00", b"\x1a\x00"),
        ({"low": "001a", "high": "FF3f", "at": 4}, b"\x00\x1a", b"\xff\x3f"),
    ],
)
def test_first_bytes(tmp_path: Path, first: dict[str, Any], low: bytes, high: bytes) -> None:
    changes = {"traffic": {"first": [{"port": "tcp/any", **first}]}}
    (found,) = read_catalog(write(tmp_path / "services", service("a", **changes)))["a"].traffic.first
    assert found.bounds == (low, high)


def test_traffic_identifies_one_service() -> None:
    reported: dict[object, str] = {}
    for each in SHIPPED.values():
        signs = [
            *each.ports,
            *each.traffic.ports,
            *((first.port, first.at, first.bounds) for first in each.traffic.first),
        ]
        for sign in (*signs, each.name, *each.known_as):
            assert reported.setdefault(sign, each.name) == each.name, sign


@pytest.mark.parametrize("each", SHIPPED.values(), ids=lambda each: str(each.name))
def test_shipped_service_can_be_identified(each: Service) -> None:
    """A service has traffic with an interval, or is marked as silent."""
    traffic = each.traffic
    identified = bool(each.ports or traffic.ports or traffic.first or traffic.routed)
    assert identified != traffic.silent
    assert bool(traffic.every_s) != traffic.silent


def test_services_outside_the_container_are_off_and_have_advice() -> None:
    others = [each for each in SHIPPED.values() if not each.container]
    assert {"provisioning", "warewulf", "nfs", "ganglia", "ssh", "dns", "ldap", "http", "https"} <= {
        each.name for each in others
    }
    assert [each.name for each in others if each.default or each.packages or not each.advice] == []
    assert [each.name for each in others if each.run] == ["slurmd"], "an engine starts it on compute nodes"


def test_table_1_of_the_publication() -> None:
    """The defaults of the catalogue agree with "Decoupled management nodes" (2018), table 1."""
    critical = {name for name, each in SHIPPED.items() if each.critical}
    assert {"rsyslog", "nfs", "nat", "ganglia", "slurmctld", "postfix", "chrony"} <= critical
    assert not {"provisioning", "warewulf"} & critical
