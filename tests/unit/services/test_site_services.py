"""Services of the site's own, ``services.d/NAME.yaml``: what is read, and what `config check` refuses with its line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.catalog import select
from appliance.errors import ConfigError
from appliance.operations.classify.signatures import make_signatures, open_catalogue
from appliance.operations.context import open_cluster
from appliance.operations.overlay.overlay import seeds_for
from appliance.operations.services.inside import OTHER_LOGS
from appliance.operations.site.config import check_config
from appliance.operations.site.find import open_site
from appliance.operations.site.locate import services_folder
from appliance.progress import Silent
from tests.sites import GOOD

ECHO = """\
name: echo
summary: answers every line
critical: false
packages: {debian: [socat]}
run: [socat, "TCP-LISTEN:7007,fork,bind={{ site.networks.provisioning.address.ip }}", EXEC:cat]
user: nobody
ports: [tcp/7007]
traffic: {first: [{port: tcp/any, starts: ECHO}]}
files:
  - {path: /etc/echo/echo.conf, template: echo/echo.conf.j2}
  - {path: /etc/echo/motd, content: "{{ site.cluster }}"}
probe: {exec: [[nc, -z, 127.0.0.1, "7007"]]}
outage: {seconds: 60, why: the test waits}
"""
TEMPLATE = "cluster = {{ site.cluster }}\n{% for name in services %}{{ name }}\n{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a valid service, beside a site file that selects it."""
    (tmp_path / "sms.yaml").write_text(GOOD.replace("[slurmctld, munge]", "[slurmctld, munge, echo]"))
    made = tmp_path / "services.d"
    (made / "echo").mkdir(parents=True)
    (made / "echo.yaml").write_text(ECHO)
    (made / "echo" / "echo.conf.j2").write_text(TEMPLATE)
    return made


def test_it_is_a_service_as_any_other(folder: Path) -> None:
    site = folder.with_name("sms.yaml")
    loaded = check_config(site)
    assert "echo" in loaded.catalog and "chrony" in loaded.catalog
    cluster = open_cluster(site, None, Silent())
    assert [service.name for service in cluster.services][-1] != "" and "echo" in {s.name for s in cluster.services}
    seeds = {seed.path: seed.data.decode() for seed in seeds_for(cluster)}
    assert seeds["/etc/echo/motd"] == "lab"
    assert seeds["/etc/echo/echo.conf"].startswith("cluster = lab\n") and "echo\n" in seeds["/etc/echo/echo.conf"]
    assert "bind=10.77.0.1" in seeds["/etc/sms/services.json"]


def test_classify_recognises_it(folder: Path) -> None:
    """As a service that the container can run, by its own ports and patterns."""
    found = services_folder(folder.with_name("sms.yaml"))
    assert found == folder
    (own,) = (each for each in make_signatures(open_catalogue(found)) if each.name == "echo")
    assert own.carried and not own.critical and own.ports and own.first
    (folder / "echo.yaml").write_text(ECHO + "container: false\n")
    (own,) = (each for each in make_signatures(open_catalogue(found)) if each.name == "echo")
    assert not own.carried
    (folder / "echo.yaml").unlink()
    assert services_folder(folder.with_name("sms.yaml")) is None


def test_it_may_need_others(folder: Path) -> None:
    (folder / "echo.yaml").write_text(ECHO + "needs: [second]\n")
    second = ECHO.replace("echo\n", "second\n", 1).replace("7007", "7008").replace("/etc/echo", "/etc/second")
    (folder / "second.yaml").write_text(second)
    names = [service.name for service in select(open_site(folder.with_name("sms.yaml")).catalog, ["echo"])]
    assert names == ["second", "echo"]


BAD: dict[str, tuple[Callable[[str], str], int, str]] = {
    "not YAML": (lambda text: text + "a: [\n", 15, "expected"),
    "unknown key": (lambda text: text + "nane: x\n", 14, "nane: unknown"),
    "a tag": (lambda text: text + "advice: !!python/object/apply:os.system [id]\n", 14, "unsupported tag"),
    "no probe": (lambda text: text.replace("probe:", "#probe:"), 0, "needs run and probe"),
    "other name": (lambda text: text.replace("name: echo", "name: ecco"), 1, "does not match the file's name"),
    "alias of another": (lambda text: text + "known_as: [slurm]\n", 14, "already the service slurmctld"),
    "role": (lambda text: text + "role: controller\n", 14, "is a role of the catalogue"),
    "need": (lambda text: text + "needs: [nothing]\n", 14, "nothing is not a service"),
    "read by engines": (lambda text: text + "engines: {reads: [nothing]}\n", 14, "nothing is not a service"),
    "scratch of engines": (lambda text: text + "engines: {scratch: [/etc/munge]}\n", 14, "folder of sms"),
    "ports of engines": (lambda text: text + "engines: {ports: [tcp/6817]}\n", 14, "already belongs to slurmctld"),
    "ports of another on engines": (lambda text: text.replace("[tcp/7007]", "[tcp/6820]"), 7, "belongs to slurmrestd"),
    "place without why": (lambda text: text + "engines: {place: none}\n", 14, "why"),
    "template for engines": (lambda text: text + 'engines: {run: ["{{ site.claster }}"]}\n', 14, "claster"),
    "secret": (lambda text: text + "secrets: [passwords]\n", 14, "secrets"),
    "port": (lambda text: text.replace("[tcp/7007]", "[tcp/6817]"), 7, "already belongs to slurmctld"),
    "file of another": (lambda text: text.replace("/etc/echo/motd", "/etc/rsyslog.conf"), 11, "belongs to rsyslog"),
    "file twice": (lambda text: text.replace("/etc/echo/motd", "/etc/echo/echo.conf"), 11, "belongs to echo"),
    "passwd": (lambda text: text.replace("/etc/echo/motd", "/etc/passwd"), 11, "belongs to every container"),
    "programs of sms": (lambda text: text.replace("/etc/echo/motd", "/opt/sms/bin/sms-run"), 11, "folder of sms"),
    "munge key": (lambda text: text.replace("/etc/echo/motd", "/etc/munge/munge.key"), 11, "folder of sms"),
    "path upwards": (lambda text: text.replace("/etc/echo/motd", "/etc/echo/../shadow"), 11, "not a plain path"),
    "shell as package": (lambda text: text.replace("[socat]", "['socat; id']"), 4, "wrong format"),
    "shell as program": (lambda text: text.replace("[socat, ", "['so;cat', "), 0, "not the name of a program"),
    "shell as user": (lambda text: text.replace("user: nobody", "user: $(id)"), 6, "wrong format"),
    "absolute template": (lambda text: text.replace("echo/echo.conf.j2", "/etc/passwd"), 10, "is outside of"),
    "template upwards": (lambda text: text.replace("echo/echo.conf.j2", "../sms.yaml"), 10, "is outside of"),
    "no template": (lambda text: text.replace("echo.conf.j2", "gone.j2"), 10, "cannot be read"),
    "template is a folder": (lambda text: text.replace("echo/echo.conf.j2", "echo"), 10, "not a regular file"),
    "syntax of a template": (lambda text: text.replace("{{ site.cluster }}", "{% if %}"), 11, "template"),
    "undefined name": (lambda text: text.replace("{{ site.cluster }}", "{{ site.claster }}"), 11, "claster"),
    "unsafe template": (
        lambda text: text.replace("{{ site.cluster }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        11,
        "template",
    ),
    "division by zero": (lambda text: text.replace("{{ site.cluster }}", "{{ 1 // 0 }}"), 11, "by zero"),
    "type of an operand": (lambda text: text.replace("{{ site.cluster }}", "{{ site.cluster + 1 }}"), 11, "template"),
    "large range": (lambda text: text.replace("{{ site.cluster }}", "{{ range(10**9) | list }}"), 11, "too big"),
    "large text": (lambda text: text.replace("{{ site.cluster }}", "{{ 'x' * 9999999999 }}"), 11, "limit"),
    "template of a probe": (
        lambda text: text.replace('{exec: [[nc, -z, 127.0.0.1, "7007"]]}', '{ntp: "{{ 1 // 0 }}"}'),
        12,
        "by zero",
    ),
    "expression of a probe": (lambda text: text.replace('"7007"]]', '"7007"]], expect: "("'), 12, "regular expression"),
    "expression of a file": (
        lambda text: text.replace("cluster }}", 'cluster }}", change: reload, reloaded: "(') + "reload: [[x]]\n",
        11,
        "regular expression",
    ),
    "state of sms": (lambda text: text + "state: [/var/lib/echo, /var/lib/sms/x]\n", 14, "in a folder of sms"),
    "state above munge's": (lambda text: text + "state: [/etc]\n", 14, "contains /etc/munge"),
    "state is all": (lambda text: text + "state: [/]\n", 14, "contains /dev"),
    "running": (lambda text: text + "running: /run/echo/x\n", 14, "in a folder of sms"),
    "tails": (lambda text: text + "tails: [/opt/sms/log]\n", 14, "in a folder of sms"),
    "folder of slurm.files": (
        lambda text: text + "site_files: {path: /etc/slurm, reloaded: x}\n",
        14,
        "only slurmctld",
    ),
    "sysctl of another": (
        lambda text: text + 'sysctl: {net.ipv4.ip_forward: "0"}\n',
        14,
        "net.ipv4.ip_forward is '1' for nat",
    ),
    "no commands": (lambda text: text.replace('[[nc, -z, 127.0.0.1, "7007"]]', "[]"), 12, "probe.exec"),
    "no command": (lambda text: text.replace('[[nc, -z, 127.0.0.1, "7007"]]', "[[]]"), 12, "probe.exec"),
    "reload without a command": (lambda text: text + "reload: [[]]\n", 14, "reload"),
    "id of root": (lambda text: text + "accounts: {debian: {users: {echo: 0}}}\n", 14, "accounts"),
    "negative id": (lambda text: text + "accounts: {debian: {groups: {echo: -5}}}\n", 14, "accounts"),
    "no package for the base": (lambda text: text.replace("{debian:", "{el:"), 0, "no packages for debian-12"),
    "id of another": (lambda text: text + "accounts: {debian: {users: {echo: 351}}}\n", 0, "already used by"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes(name: str, folder: Path) -> None:
    change, line, words = BAD[name]
    (folder / "echo.yaml").write_text(change(ECHO))
    with pytest.raises(ConfigError) as caught:
        check_config(folder.with_name("sms.yaml"))
    assert caught.value.status == 2
    found = [problem for problem in caught.value.problems if words in problem.message or words in str(problem)]
    assert found, caught.value.message
    if line:
        assert (found[0].line, found[0].file) == (line, str(folder / "echo.yaml"))


@pytest.mark.parametrize("name", ["place", "probe", "namespace", "kustomization", "slurm-cn", "slurm-ctl", "a-nodes"])
def test_names_of_exports(name: str, folder: Path) -> None:
    """Of their own jobs, containers, files and objects."""
    (folder / f"{name}.yaml").write_text(ECHO.replace("name: echo", f"name: {name}").replace("echo/echo", "echo/other"))
    (folder / "echo" / "other.conf.j2").write_text(TEMPLATE)
    (folder / "echo.yaml").unlink()
    with pytest.raises(ConfigError) as caught:
        check_config(folder.with_name("sms.yaml"))
    assert any("sms export" in each.message and each.line == 1 for each in caught.value.problems)


@pytest.mark.parametrize(("service", "secret"), [("sssd", "sssd_conf"), ("login", "ssh_host_key")])
def test_secret_files_that_services_need(service: str, secret: str, folder: Path) -> None:
    site = folder.with_name("sms.yaml")
    site.write_text(GOOD.replace("[slurmctld, munge]", f"[slurmctld, munge, {service}]"))
    with pytest.raises(ConfigError) as caught:
        check_config(site)
    assert [each.message for each in caught.value.problems] == [f"{service} needs `secrets.{secret}`"]


def test_a_shipped_service_is_not_replaced(folder: Path) -> None:
    (folder / "munge.yaml").write_text(ECHO.replace("name: echo", "name: munge").replace("7007", "7009"))
    with pytest.raises(ConfigError, match=r"munge\.yaml:1: name: munge is already the service munge"):
        open_site(folder.with_name("sms.yaml"))


@pytest.mark.parametrize("name", OTHER_LOGS)
def test_names_of_logs(folder: Path, name: str) -> None:
    (folder / f"{name}.yaml").write_text(ECHO.replace("echo\n", f"{name}\n", 1).replace("7007", "7009"))
    with pytest.raises(ConfigError, match=rf"{name}\.yaml:1: name: {name} is the name of another log"):
        open_site(folder.with_name("sms.yaml"))


def test_the_same_sysctl_as_another(folder: Path) -> None:
    (folder / "echo.yaml").write_text(ECHO + 'sysctl: {net.ipv4.ip_forward: "1", net.core.somaxconn: "99"}\n')
    check_config(folder.with_name("sms.yaml"))


@pytest.mark.parametrize("target", ["/etc/passwd", "../sms.yaml", "/dev/zero", "loop.yaml", "/nowhere"])
def test_links_out_of_the_folder(folder: Path, target: str) -> None:
    """As a service, as a template, and as a folder of templates."""
    (folder / "loop.yaml").symlink_to(target)
    with pytest.raises(ConfigError, match=r"loop\.yaml"):
        open_site(folder.with_name("sms.yaml"))
    (folder / "loop.yaml").unlink()
    (folder / "echo" / "echo.conf.j2").unlink()
    (folder / "echo" / "echo.conf.j2").symlink_to(target)
    with pytest.raises(ConfigError, match=r"echo\.yaml:10"):
        open_site(folder.with_name("sms.yaml"))


def test_a_linked_folder_of_templates(folder: Path, tmp_path: Path) -> None:
    (folder / "echo").rename(tmp_path / "elsewhere")
    (folder / "echo").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"echo\.yaml:10.*is outside of"):
        open_site(folder.with_name("sms.yaml"))


def test_large_and_binary_templates(folder: Path) -> None:
    for data in (b"x" * ((1 << 20) + 1), b"\xff\xfe\x00"):
        (folder / "echo" / "echo.conf.j2").write_bytes(data)
        with pytest.raises(ConfigError, match=r"echo\.yaml:10"):
            open_site(folder.with_name("sms.yaml"))


def test_others_may_not_write_to_it(folder: Path) -> None:
    (folder / "echo.yaml").chmod(0o666)
    with pytest.raises(ConfigError, match="others may write to"):
        check_config(folder.with_name("sms.yaml"))


def test_all_mistakes_are_reported(folder: Path) -> None:
    (folder / "one.yaml").write_text("name: 1\n")
    (folder / "two.yaml").write_text("a: [\n")
    (folder / "three.yml").write_text(ECHO)
    (folder / ".hidden.yaml").write_text("a: [\n")
    with pytest.raises(ConfigError) as caught:
        open_site(folder.with_name("sms.yaml"))
    assert {Path(problem.file).name for problem in caught.value.problems} == {"one.yaml", "two.yaml", "three.yml"}


def test_slurm_files(tmp_path: Path) -> None:
    """Validated names; in the container's /etc/slurm, scripts executable; the site's cgroup.conf replaces sms's."""
    document = yaml.safe_load(GOOD)
    names = {"gres.conf": b"NodeName=x\n", "prolog.sh": b"#!/bin/sh\n", "cgroup.conf": b"CgroupPlugin=cgroup/v2\n"}
    for name, data in names.items():
        (tmp_path / name).write_bytes(data)
    document["slurm"]["files"] = {name: name for name in names}
    path = tmp_path / "sms.yaml"
    path.write_text(yaml.safe_dump(document))
    check_config(path)
    seeds = {seed.path: seed for seed in seeds_for(open_cluster(path, None, Silent()))}
    assert {name: seeds[f"/etc/slurm/{name}"].data for name in names} == names
    assert [seeds[f"/etc/slurm/{name}"].mode for name in names] == [0o644, 0o755, 0o644]


@pytest.mark.parametrize(
    ("name", "services", "words"),
    [
        ("grse.conf", "[slurmctld, munge]", "grse.conf is not a file that Slurm reads"),
        ("slurm.conf", "[slurmctld, munge]", "slurm.conf is not a file of the site"),
        ("../../tmp/x", "[slurmctld, munge]", "is not the name of a file"),
        (".hidden", "[slurmctld, munge]", "is not the name of a file"),
        ("a b", "[slurmctld, munge]", "is not the name of a file"),
        ("gres.conf", "[munge]", "no service of the site reads them"),
        ("gone.sh", "[slurmctld, munge]", "gone.sh does not exist"),
    ],
)
def test_mistakes_of_slurm_files(tmp_path: Path, name: str, services: str, words: str) -> None:
    document = yaml.safe_load(GOOD.replace("[slurmctld, munge]", services))
    (tmp_path / "it").write_bytes(b"A=1\n")
    document["slurm"]["files"] = {name: "gone.sh" if name == "gone.sh" else "it"}
    (tmp_path / "sms.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        check_config(tmp_path / "sms.yaml")
    (found,) = [problem for problem in caught.value.problems if words in problem.message]
    assert found.line and found.path.startswith("slurm.files")


@pytest.mark.parametrize(
    ("extra", "files", "place"),
    [
        (["JobSubmitPlugins=lua"], [], "slurm.extra[0]"),
        (["JobSubmitPlugins=lua"], ["job_submit.lua"], ""),
        (["JobSubmitPlugins=require_timelimit,job_submit/lua"], [], "slurm.extra[0]"),
        (["JobSubmitPlugins=lua", "jobsubmitplugins=require_timelimit"], [], ""),  # Slurm takes the last one
        (["JobCompType=jobcomp/lua"], [], "slurm.extra[0]"),
        (["JobCompType=jobcomp/elasticsearch", "JobCompLoc=http://10.0.0.9"], [], ""),
        (["BurstBufferType=burst_buffer/lua"], ["burst_buffer.lua"], ""),
        (["MaxJobCount=9", "TopologyPlugin=topology/tree"], [], "slurm.extra[1]"),
        (["TopologyPlugin=topology/block"], ["topology.yaml"], ""),
        (["TopologyPlugin=topology/default"], [], ""),
        (["NodeFeaturesPlugins=node_features/helpers"], [], "slurm.extra[0]"),
        (["NodeFeaturesPlugins=node_features/knl_generic"], [], ""),
        (["JobContainerType=job_container/tmpfs"], [], "slurm.extra[0]"),
        (["NamespaceType=namespace/linux"], ["namespace.yaml"], ""),
        (["HealthCheckProgram=/etc/slurm/hc.sh -v"], [], "slurm.extra[0]"),
        (["HealthCheckProgram=/usr/sbin/nhc", "PrologFlags=Alloc", "Prolog=/etc/slurm/prolog.d/*"], [], ""),
    ],
)
def test_files_that_settings_need(tmp_path: Path, extra: list[str], files: list[str], place: str) -> None:
    """A controller that runs goes on without; the next start has none."""
    document = yaml.safe_load(GOOD)
    (tmp_path / "it").write_bytes(b"A=1\n")
    document["slurm"] |= {"extra": extra, "files": dict.fromkeys(files, "it")}
    (tmp_path / "sms.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    try:
        open_site(tmp_path / "sms.yaml")
        found = []
    except ConfigError as error:
        found = [problem.path for problem in error.problems]
    assert found == ([place] if place else [])


def wrong_places(path: Path, document: dict[str, Any]) -> list[str]:
    """Where `sms config check` finds mistakes in a site file."""
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    path.chmod(0o644)
    try:
        check_config(path)
    except ConfigError as error:
        return [problem.path for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("data", "runs"),
    [
        (b"#!/bin/sh\nexit 0\n", True),
        (b"#! /usr/bin/env python3\n", True),
        (b"\x7fELF\r\n", True),
        (b"#!/bin/sh\r\nexit 0\r\n", False),
        (b"#!/bin/sh\nexit 0\r\n", False),
        (b"\xef\xbb\xbf#!/bin/sh\n", False),
        (b"\n#!/bin/sh\n", False),
        (b"exit 0\n", False),
        (b"#!\n", False),
        (b"#!sh\n", False),
        (b"", False),
    ],
)
@pytest.mark.parametrize(
    "setting", ["Prolog=/etc/slurm/p.sh", "RebootProgram=/etc/slurm/p.sh now", "Epilog=/etc/slurm/p*"]
)
def test_programs_that_a_node_can_run(tmp_path: Path, setting: str, data: bytes, runs: bool) -> None:
    """Else each node is drained by its first job."""
    document = yaml.safe_load(GOOD)
    (tmp_path / "p.sh").write_bytes(data)
    document["slurm"] |= {"extra": [setting], "files": {"p.sh": "p.sh", "words": "p.sh"}}
    assert wrong_places(tmp_path / "sms.yaml", document) == ([] if runs else ["slurm.files.p.sh"])


VM = {"address": "10.77.0.3/24", "mac": "02:00:00:00:00:03"}


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ({"mode": "0755"}, ""),
        ({}, "provisioning.files[0].mode"),
        ({"mode": "0755", "source": "crlf"}, "provisioning.files[0]"),
        ({"mode": "0755", "source": "crlf", "template": True}, ""),
        ({"path": "/etc/slurm/prolog.d/deeper/10-disk"}, ""),  # the pattern is of one folder
    ],
)
def test_master_files_that_are_programs(tmp_path: Path, file: dict[str, Any], place: str) -> None:
    document = yaml.safe_load(GOOD)
    (tmp_path / "good").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "crlf").write_bytes(b"#!/bin/sh\r\n")
    document["slurm"]["extra"] = ["Prolog=/etc/slurm/prolog.d/*"]
    document["provisioning"] = VM | {"files": [{"path": "/etc/slurm/prolog.d/10-disk", "source": "good"} | file]}
    assert wrong_places(tmp_path / "sms.yaml", document) == ([place] if place else [])
