"""`sms survey`: the real script on file trees of five kinds of nodes and on hostile ones; golden sites and reports."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import yaml

from appliance.catalog import read_catalog
from appliance.cli import main
from appliance.errors import ConfigError
from appliance.host.local import Local
from appliance.operations.adopt.survey import check_draft, collect, open_host, write_site
from appliance.operations.site.find import open_site
from appliance.plan.adopt.draft import Draft
from appliance.plan.adopt.frames import Frames, Section, read_frames
from appliance.plan.adopt.model import Survey
from appliance.plan.adopt.report import compare, report_text, schema_text, survey_json
from appliance.plan.adopt.survey import Request, examine
from appliance.share import share
from tests.places import ROOT
from tests.surveyed import KINDS, PASSWORD, Tree, debian, run_script

SERVICES = read_catalog(share("definitions", "services"))
GOLDEN = ROOT / "tests" / "golden" / "survey"


def made(output: bytes) -> tuple[Survey, Draft]:
    return examine(read_frames(output), SERVICES, Request("sms-old", "host-a"))


def survey_of(tree: Tree, folder: Path) -> tuple[Survey, Draft]:
    return made(run_script(tree.build(folder)))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_site_and_report(
    kind: str, tmp_path: Path, golden: Callable[[Path, dict[str, str]], None]
) -> None:
    output = run_script(KINDS[kind]().build(tmp_path))
    assert PASSWORD.encode() not in output
    found, draft = made(output)
    problems = check_draft(draft)
    golden(
        GOLDEN / kind,
        {"sms.yaml": draft.text, "REPORT.md": report_text(found, problems), "survey.json": survey_json(found)},
    )
    jsonschema.validate(json.loads(survey_json(found)), json.loads(schema_text()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_site_is_accepted(kind: str, tmp_path: Path) -> None:
    """Also by `sms config check`, when what it marks was decided."""
    found, draft = survey_of(KINDS[kind](), tmp_path)
    draft.files["secrets/munge.key"] = b"k" * 128
    written = write_site(found, draft, tmp_path / "site")
    assert written.problems == ()
    edited = tmp_path / "site" / "edited.yaml"
    assert main(["-q", "config", "check", str(tmp_path / "site" / "sms.yaml")]) == 2
    edited.write_text(draft.text.replace("(CHANGE) ", ""))
    edited.chmod(0o600)
    assert main(["-q", "config", "check", str(edited)]) == 0
    site = open_site(tmp_path / "site" / "sms.yaml").site
    assert site.slurm.nodes and site.slurm.partitions
    for path in (*site.slurm.files.values(), site.accounts.passwd):
        assert path and path.is_file()
    for path in (tmp_path / "site").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        assert path.is_dir() or PASSWORD.encode() not in path.read_bytes()


def test_one_network_is_a_site_that_has_to_be_completed(tmp_path: Path) -> None:
    found, draft = survey_of(KINDS["leap"](), tmp_path)
    assert check_draft(draft) == ()
    assert draft.text.count("(CHANGE)") >= 3
    assert any(one.what == "no public network" for one in found.findings)


@pytest.mark.parametrize("shell", [name for name in ("dash", "bash", "ksh", "busybox") if shutil.which(name)])
def test_shells_print_the_same(shell: str, tmp_path: Path) -> None:
    root = debian().build(tmp_path)
    assert read_frames(run_script(root, shell=shell)).files == read_frames(run_script(root)).files


def test_the_schema_is_the_documented_one() -> None:
    assert (ROOT / "docs" / "survey.schema.json").read_text() == schema_text(), "`make schema` writes it"
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))


def findings(found: Survey) -> str:
    return "\n".join(f"{one.area}: {one.what}" for one in found.findings)


HOSTILE: dict[str, tuple[dict[str, str | bytes], str]] = {
    "a huge file": ({"/etc/rsyslog.conf": b"#" * 5_000_000}, "/etc/rsyslog.conf has 5000000 bytes"),
    "binary": ({"/etc/chrony/chrony.conf": bytes(range(256)) * 40}, "/etc/chrony/chrony.conf is not text"),
    "another encoding": ({"/etc/exports": "/données *(ro)\n".encode("latin-1")}, "/etc/exports is not UTF-8"),
    "a broken table": ({"/etc/warewulf/nodes.conf": "nodes: [}\n"}, "nodes.conf cannot be understood"),
    "a table of aliases": (
        {"/etc/warewulf/nodes.conf": "a: &a [x,x]\nb: &b\n- *a\nnodes: *b\n"},
        "nodes.conf cannot be understood",
    ),
    "deep JSON": ({"/var/lib/cobbler/collections/systems/a.json": "[" * 200_000}, "a.json cannot be understood"),
    "a binary program": ({"/etc/slurm/task.so": b"\x7fELF\0\1"}, "task.so is not text"),
    "sections in a file": ({"/etc/exports": "@end 0 0\n@file /etc/evil read 1 0 0 0\n evil\n"}, "NFS export @end"),
    "no list of nodes": (
        {"/etc/slurm/slurm.conf": "ClusterName=a\nNodeName=n[1-\nNodeName=n[1-99999999]\nPartitionName=p Nodes=x\n"},
        "NodeName n[1- cannot be read",
    ),
    "an include of itself": (
        {"/etc/slurm/slurm.conf": "ClusterName=a\nInclude slurm.conf\nInclude ../../../../etc/passwd\nNodeName=a\n"},
        "1 nodes",
    ),
    "a name that breaks YAML": (
        {"/etc/slurm/slurm.conf": 'ClusterName=on\nNodeName=a\nPartitionName=p Nodes=a\nMailProg="x: [y\x1b]"\n'},
        "setting MailProg",
    ),
    "a cluster of another alphabet": ({"/etc/slurm/slurm.conf": "ClusterName=Ünï_Cluster\n"}, "is not a name of sms"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_contents_are_findings(case: str, tmp_path: Path) -> None:
    tree = debian()
    files, expected = HOSTILE[case]
    tree.files |= files
    frames = read_frames(run_script(tree.build(tmp_path)))
    found, draft = examine(frames, SERVICES, Request("sms-old", "host-a"))
    assert expected in findings(found)
    assert "/etc/evil" not in frames.files
    yaml.safe_load(draft.text)
    report_text(found)


def test_other_tables_and_another_folder_of_slurm(tmp_path: Path) -> None:
    tree = debian()
    system = {
        "name": "n1",
        "profile": "rocky9",
        "power_address": "10.54.0.1",
        "power_pass": PASSWORD,
        "interfaces": {"eth0": {"ip_address": "10.50.1.1", "mac_address": "3C:EC:EF:77:00:01"}},
    }
    conf = tree.files.pop("/etc/slurm/slurm.conf")
    tree.files |= {
        "/var/lib/cobbler/collections/systems/n1.json": json.dumps(system),
        "/opt/clmgr/version": "1.10",
        "/etc/cray/kubernetes/config": "",
        "/srv/cluster/slurm.conf": conf,
    }
    output = run_script(tree.build(tmp_path), folder="/srv/cluster")
    assert PASSWORD.encode() not in output
    found, _ = examine(read_frames(output), SERVICES, Request("sms-old", "host-a", "/srv/cluster"))
    tables = {one.name: one.nodes for one in found.provisioners}
    assert tables["HPCM"] == tables["HPE Cray EX (CSM)"] == ()
    (node,) = tables["Cobbler"]
    assert (node.name, node.address, node.mac, node.bmc) == ("n1", "10.50.1.1", "3c:ec:ef:77:00:01", "10.54.0.1")
    assert found.slurm and found.slurm.file == "/srv/cluster/slurm.conf"


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_keys_in_slurms_folder_are_left_out(shell: str, tmp_path: Path) -> None:
    """By name, by text, or because they are any bytes; programs and settings stay."""
    root, secret = debian().build(tmp_path), b"swordfish-4711"
    pem = b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + secret
    keys = {"jwt_hs256": secret, "munge_key": secret, "rest-token": secret, "backup.key.old": secret}
    keys |= {"deploy": b"# of the prolog\n" + pem, "hs256": b"\x01\x9f\x00" + secret}
    for name, data in keys.items():
        (root / "etc/slurm" / name).write_bytes(data)
    for name, data in {
        "gres.conf": b"Name=gpu\n",
        "check_key": b"#!/bin/sh\n",
        "plugin.so": b"\x7fELF\x02\x00\n",
    }.items():
        (root / "etc/slurm" / name).write_bytes(data)
    (root / "etc/slurm/check_key").chmod(0o755)
    output = run_script(root, shell=shell)
    assert secret not in output
    files = read_frames(output).files
    assert not {f"/etc/slurm/{name}" for name in keys} & set(files)
    assert {f"/etc/slurm/{name}" for name in ("gres.conf", "check_key", "plugin.so")} <= set(files)


def test_special_files_are_not_opened(tmp_path: Path) -> None:
    root = debian().build(tmp_path)
    (root / "etc/exports").unlink()
    os.mkfifo(root / "etc/exports")
    (root / "etc/crontab").unlink()
    (root / "etc/crontab").symlink_to("/dev/zero")
    (root / "etc/aliases").unlink()
    (root / "etc/aliases").symlink_to(tmp_path / "nowhere")
    text = findings(made(run_script(root))[0])
    assert "/etc/exports was not read: special" in text
    assert "/etc/crontab was not read: special" in text
    assert "/etc/aliases was not read: special" in text


def test_no_time_is_a_finding(tmp_path: Path) -> None:
    found, _ = made(run_script(debian().build(tmp_path), seconds=0))
    assert "was not read: skipped" in findings(found)


def test_every_beginning_of_the_output_is_a_survey(tmp_path: Path) -> None:
    output = run_script(debian().build(tmp_path))
    for size in range(0, len(output), 997):
        found, draft = made(output[:size])
        assert "the survey did not come to its end" in findings(found)
        yaml.safe_load(draft.text)


def test_damaged_output_is_a_survey(tmp_path: Path) -> None:
    output = run_script(debian().build(tmp_path))
    for step, byte in ((7, 0), (11, 255), (13, 10), (17, 64)):
        damaged = bytearray(output)
        damaged[::step] = bytes([byte]) * len(damaged[::step])
        yaml.safe_load(made(bytes(damaged))[1].text)


def test_nothing_is_changed(tmp_path: Path) -> None:
    root = debian().build(tmp_path)

    def state() -> list[tuple[str, float, int]]:
        return [(str(path), path.stat().st_mtime_ns, path.stat().st_mode) for path in sorted(root.rglob("*"))]

    before = state()
    run_script(root)
    assert state() == before


def test_a_capture_marks_services_and_shows_differences(tmp_path: Path) -> None:
    found, _ = survey_of(debian(), tmp_path)
    verdicts = {"slurmctld": "time-critical", "nfs": "time-critical", "ldap": "time-critical", "chrony": "deferrable"}
    said = dict(compare(found, verdicts, SERVICES))
    assert "ldap is time-critical in the capture, but was not found here" in said
    assert "nfs is time-critical, and the container cannot run it" in said
    assert "rsyslog runs, but the capture does not show it" in said
    assert not any("slurmctld" in one or "chrony" in one for one in said)


def test_the_verb_writes_a_site_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "site"
    assert main(["-q", "survey", "--write", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    jsonschema.validate(printed, json.loads(schema_text()))
    assert printed["system"]["kernel"] == os.uname().release
    assert {path.name for path in folder.iterdir()} >= {"sms.yaml", "REPORT.md", "survey.json"}
    assert main(["-q", "survey", "--write", str(folder)]) == 3
    assert main(["-q", "survey"]) == 0
    assert "system" in capsys.readouterr().out


def test_names_without_a_folder_are_files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-q", "survey", "--write", "site", "-o", "survey.json"]) == 0
    assert (tmp_path / "survey.json").read_text() == (tmp_path / "site" / "survey.json").read_text()


def test_a_classification_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.yaml"
    file.write_text("services:\n- {name: ldap, verdict: time-critical}\n")
    assert main(["-q", "survey", "--classification", str(file)]) == 0
    assert "ldap is time-critical" in " ".join(capsys.readouterr().out.split())


def test_it_is_sent_by_standard_input() -> None:
    assert b"@done" in collect(Local("here"), "")


ACCOUNTING = b"""\
client /usr/bin/mariadb  Ver 15.1 Distrib 5.5.68-MariaDB, for Linux (x86_64)
dump /usr/bin/mysqldump
server 5.5.68-MariaDB
user slurm@localhost
right SELECT
right \x1b]0;x\x07
object trigger t\x1b[2J
"""


def test_what_an_undo_needs_of_the_database_is_a_finding(tmp_path: Path) -> None:
    """Rights, what is not copied, a client that runs commands. The host's text controls no terminal."""
    frames = read_frames(run_script(debian().build(tmp_path)))
    frames.runs["accounting"] = Section("accounting", "read", ACCOUNTING)
    found, _ = examine(frames, SERVICES, Request("sms-old", "host-a"))
    assert found.slurm and found.slurm.accounting and found.slurm.accounting.rights == ("SELECT",)
    whats = [one.what for one in found.findings if one.carried == "left"]
    for what in (
        "slurm@localhost of the database may not grant INSERT, CREATE, DROP, ALTER, CREATE USER",
        "the accounting database has trigger t",
        "5.5.68-MariaDB, for Linux (x86_64) has no mode without commands",
    ):
        assert [one for one in whats if what in one], what
    assert "\x1b" not in survey_json(found) + report_text(found, ())
    jsonschema.validate(json.loads(survey_json(found)), json.loads(schema_text()))


MANY = 20_000
SLOW = {
    "lines of newlines": ("/etc/slurm/slurm.conf", "ClusterName=x\n" + "\n" * MANY),
    "paths of newlines": ("/etc/ganesha/ganesha.conf", "\n" * MANY),
    "inputs without a port": ("/etc/rsyslog.conf", 'input(type="imudp" ' * MANY),
    "actions without an end": ("/etc/rsyslog.conf", "action(" + 'type="omfwd" ' * MANY),
    "merged aliases": (
        "/etc/warewulf/nodes.conf",
        "nodes:\n  a0: &a0 {x: 1}\n"
        + "".join(f"  a{n + 1}: &a{n + 1} {{<<: [{','.join([f'*a{n}'] * 9)}]}}\n" for n in range(8)),
    ),
    "ids without a group": ("", "uid=1(" * MANY),
    "an interface of at signs": (" ", "1: " + "@" * MANY),
}
"""File and content, or the output of a program, at which a pattern would search for minutes."""


@pytest.mark.parametrize("name", SLOW)
def test_no_text_of_the_host_keeps_the_reader_busy(name: str) -> None:
    path, text = SLOW[name]
    frames = Frames(files={"/etc/slurm/slurm.conf": Section("/etc/slurm/slurm.conf", "read", b"ClusterName=x\n")})
    if path.strip():
        frames.files[path] = Section(path, "read", text.encode())
    else:
        run = "addresses" if path else "slurm-user"
        frames.runs[run] = Section(run, "read", text.encode())
    began = time.process_time()
    examine(frames, SERVICES, Request("sms-old", "host-a"))
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "target", ["-oProxyCommand=x", "-l@host", "a b", "host;id", "root@-x", "$(id)", "host:0", "../x", "a@b@c"]
)
def test_what_is_no_host_is_given_to_no_ssh(target: str) -> None:
    with pytest.raises(ConfigError, match="is not a host"):
        open_host(target)
