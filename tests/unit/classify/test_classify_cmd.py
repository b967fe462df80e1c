"""`sms classify` from the command line to terminal and file, with captures of a simulated cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from analysis.model import Classification
from appliance import __version__
from appliance.catalog import read_catalog
from appliance.cli import main
from appliance.cli.classify.classify import FORMS
from appliance.errors import ConfigError, SmsError
from appliance.operations.classify import classify as flow
from appliance.operations.classify import signatures
from appliance.operations.context import open_cluster
from appliance.operations.site.find import open_site
from appliance.progress import Silent
from appliance.share import share
from tests.captures import files
from tests.captures.cluster import Plan, simulate
from tests.places import ROOT
from tests.unit import classification_example as example
from tests.unit.classify_cases import OWN, own

SCHEMA = json.loads((ROOT / "docs" / "classification.schema.json").read_text())
SHIPPED = read_catalog(share("definitions", "services"))


# The published format


MADE = {"paper": example.paper(), "empty": example.empty(), "many": example.many(), "moved": example.moved()}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_the_schema_accepts_the_output(made: Classification) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    as_json, as_yaml = json.loads(flow.render(made, "json")), yaml.safe_load(flow.render(made, "yaml"))
    assert as_json == as_yaml
    jsonschema.validate(as_json, SCHEMA)


WRONG: list[tuple[str, Any]] = [
    ("verdict", "maybe"),
    ("confidence", 1.1),
    ("initiator", "nodes"),
    ("name", "\x1b[31m"),
    ("packets_each", [1]),
    ("budget_from", "hearsay"),
    ("contacts", -1),
    ("budget_s", None),
    ("surprise", 1),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_the_schema_refuses(key: str, value: Any) -> None:
    data = example.paper().as_dict()
    data["services"][0][key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, SCHEMA)


def test_hostile_text_is_written_and_read_back() -> None:
    made = example.with_text(example.paper(), lambda: example.HOSTILE)
    for form in ("json", "yaml"):
        text = flow.render(made, form)
        assert {letter for letter in text if not letter.isprintable()} == {"\n"}
        assert text.isascii()
    assert json.loads(flow.render(made, "json"))["sms"]["found"] == example.HOSTILE


# Command line arguments

NETWORKS = {
    "10.2.0.0/16": "10.2.0.0/16",
    "10.2.3.4/16": "10.2.0.0/16",
    "10.2.3.4": "10.2.3.4/32",
    "fd00:2::7/64": "fd00:2::/64",
    "10.2": None,
    "10.2.0.0/33": None,
    "0.0.0.0/0": None,
    "::/0": None,
    "node1": None,
}


@pytest.mark.parametrize(("text", "network"), NETWORKS.items())
def test_networks(text: str, network: str | None) -> None:
    if network:
        assert flow.check_network(text) == network
        return
    with pytest.raises(ConfigError, match=r"--nodes: .* (is not a network|contains every address)"):
        flow.check_network(text)


ADDRESSES = {
    "10.0.0.1": "10.0.0.1",
    "FD00::1": "fd00::1",
    "02-00-0A-4D-00-01": "02:00:0a:4d:00:01",
    "02:00:0a:4d:00:01": "02:00:0a:4d:00:01",
    "": "",
    "10.0.0.300": None,
    "10.0.0.1/16": None,
    "node1": None,
    "02:00:0a:4d:00": None,
    "\x1b[31m": None,
}


@pytest.mark.parametrize(("text", "address"), ADDRESSES.items())
def test_addresses(text: str, address: str | None) -> None:
    if address is not None:
        assert flow.check_address(text, "--sms") == address
        return
    with pytest.raises(ConfigError, match=r"--sms: .* is neither an IP address nor a MAC") as caught:
        flow.check_address(text, "--sms")
    assert str(caught.value).isprintable()


OVERRIDES: list[tuple[list[str], dict[str, str] | str]] = [
    ([], {}),
    (["nfs=deferrable", "tcp/4444=time-critical"], {"nfs": "deferrable", "tcp/4444": "time-critical"}),
    (["nfs=deferrable", "nfs=deferrable"], {"nfs": "deferrable"}),
    (["nfs=deferrable", "nfs=time-critical"], "has two verdicts"),
    (["nfs"], "is not NAME=VERDICT"),
    (["=deferrable"], "is not NAME=VERDICT"),
    (["nfs=maybe"], "is not NAME=VERDICT"),
    (["tcp/99999=deferrable"], "tcp/99999 is not a port"),
    (["UDP/0=deferrable"], "UDP/0 is not a port"),
    (["tcp/=deferrable"], "tcp/ is not a port"),
    (["tcp/dynamic=deferrable", "icmp=deferrable"], {"tcp/dynamic": "deferrable", "icmp": "deferrable"}),
]


@pytest.mark.parametrize(("values", "expected"), OVERRIDES, ids=[str(case[0]) for case in OVERRIDES])
def test_overrides(values: list[str], expected: dict[str, str] | str) -> None:
    if isinstance(expected, dict):
        assert flow.parse_overrides(values) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        flow.parse_overrides(values)


CATALOGUE = signatures.open_catalogue(None)
NAMES = {"ntp": "chrony", "tcp/2049": "nfs", "NFSD": "nfs", "NFS": "nfs", "tcp/4444": "tcp/4444", "foo": "foo"}


@pytest.mark.parametrize(("given", "name"), NAMES.items())
def test_a_service_is_found_by_any_of_its_names(given: str, name: str) -> None:
    assert CATALOGUE.find(given) == name


UNUSED: dict[str, str] = {
    "nfs": "",
    "ntp": "",
    "tcp/2049": "",
    "tcp/4444": "tcp/4444 is not in the captures; seen: chrony, ganglia",
    "slrumctld": "did you mean slurmctld?",
    "gmondd": "did you mean gmond?",
    "LDAP": "LDAP is not in the captures; ldap was not seen",
    "foo": "foo is not in the captures; seen: ",
    "\x1b[31m": "\\x1b[31m is not in the captures",
}


@pytest.mark.parametrize(("name", "expected"), UNUSED.items())
def test_an_override_without_effect_is_reported(name: str, expected: str) -> None:
    found = flow.unused_overrides(flow.ClassifyOptions(overrides={name: "deferrable"}), CATALOGUE, example.paper())
    assert len(found) == bool(expected)
    assert expected in "".join(found)


# Files


def test_an_output_is_never_a_capture(tmp_path: Path) -> None:
    capture = tmp_path / "a.pcap"
    capture.write_bytes(b"x")
    (tmp_path / "same").symlink_to(capture)
    os.link(capture, tmp_path / "hard")
    for name in ("a.pcap", "same", "hard"):
        with pytest.raises(ConfigError, match="is one of the captures"):
            flow.check_output(tmp_path / name, ["-", str(capture)])
    with pytest.raises(ConfigError, match="is a folder"):
        flow.check_output(tmp_path, [])
    with pytest.raises(ConfigError, match="is not a folder"):
        flow.check_output(tmp_path / "none" / "x.json", [])
    flow.check_output(tmp_path / "new.json", [str(capture)])


def test_an_output_is_written_atomically(tmp_path: Path) -> None:
    target = tmp_path / "real.json"
    link = tmp_path / "link.json"
    link.symlink_to(target)
    flow.write_output("one", link)
    flow.write_output("two", link)
    assert link.is_symlink()
    assert target.read_text() == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]
    with pytest.raises(SmsError, match="cannot be written: "):
        flow.write_output("x", tmp_path / ("n" * 300))


def test_a_special_file_is_written_to(tmp_path: Path) -> None:
    """A pipe, /dev/stdout, /dev/null: it is not replaced."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    flow.write_output("text", pipe)
    reader.join(5)
    assert read == ["text"]
    assert pipe.is_fifo()


# The whole command


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An hour of eight nodes, one of them booting."""
    path = tmp_path_factory.mktemp("captures") / "sms.pcap"
    path.write_bytes(files.pcap(simulate(Plan()).packets()))
    return path


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SMS_SITE", raising=False)
    yield


TIME_CRITICAL = {"slurmctld", "rsyslog", "chrony", "postfix", "nat", "nfs", "ganglia"}
DEFERRABLE = {"provisioning", "warewulf", "ssh"}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        status = main([str(each) for each in arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_table(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "classify", capture)
    assert status == 0, err
    above, below = out.split("SMS-mgmt: deferrable")
    for name in TIME_CRITICAL:
        assert re.search(rf"^{name} ", above, re.MULTILINE), out
    for name in DEFERRABLE:
        assert re.search(rf"^{name} ", below, re.MULTILINE), out
    assert "\x1b" not in out + err
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    assert re.search(r"^not seen .*\biscsi\b", out, re.MULTILINE)
    assert "read the captures" in err


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output and -o are the same."""
    status, out, err = run(capsys, "-q", "classify", capture, "--format", form)
    assert (status, err) == (0, "")
    file = Path(f"out.{form}")
    assert run(capsys, "-q", "classify", capture, "--format", form, "-o", file)[0] == 0
    written = file.read_text()
    assert written == out
    if form == "table":
        assert "SMS-services: time-critical" in written
        return
    if form == "html":
        assert out.startswith("<!DOCTYPE html>") or out.lower().startswith("<!doctype html>")
        return
    data = json.loads(out) if form == "json" else yaml.safe_load(out)
    jsonschema.validate(data, SCHEMA)
    assert data["made"] == {"version": __version__, "shape": 1, "options": {}}
    assert {each["name"] for each in data["services"] if each["verdict"] == "time-critical"} == TIME_CRITICAL


@pytest.mark.parametrize("output", ["-", "/dev/stdout"])
def test_standard_output_by_name(output: str, capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "-q", "classify", capture, "--json", "-o", output)
    assert (status, err) == (0, "")
    assert json.loads(out)["nodes"]["count"] == 8
    assert list(Path().iterdir()) == []


def test_an_encoding_that_lacks_a_letter(capture: Path) -> None:
    """The page is UTF-8 whatever the locale; the table escapes what the locale lacks."""
    for arguments in (["--why", "chrony"], ["--format", "html"]):
        script = "from appliance.cli import main; main()"
        command = [sys.executable, "-c", script, "-q", "classify", str(capture), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
        assert (done.stderr, done.returncode) == (b"", 0)
        text = done.stdout.decode("utf-8" if "html" in arguments else "ascii")
        assert ("\\xb5s" in text) == ("html" not in arguments)


OPTIONS: dict[str, tuple[list[str], dict[str, str]]] = {
    "none": ([], {}),
    "sms": (["--sms", "52-54-00-00-00-01"], {"sms": "52:54:00:00:00:01"}),
    "nodes": (["--nodes", "10.1.7.7/16"], {"nodes": "10.1.0.0/16"}),
    "override": (["--override", "ntp=deferrable"], {"override": "ntp=deferrable"}),
    "services": (["--services", "own"], {"services": "own"}),
    "output only": (["-v", "-q"], {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_affect_the_result_are_in_it(name: str, capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, options = OPTIONS[name]
    own(Path("own"), licences=OWN)
    status, out, err = run(capsys, "classify", capture, "--json", *arguments)
    assert status == 0, err
    assert json.loads(out)["made"]["options"] == options


WHY: dict[str, tuple[list[str], int, str, str]] = {
    "by another name": (["ntp"], 0, "chrony: time-critical", ""),
    "by its port": (["tcp/2049"], 0, "nfs: time-critical", ""),
    "not seen": (["ldap"], 0, "ldap: not seen\n  why  if a node uses it", ""),
    "silent": (["munge"], 0, "munge: not seen\n  why  it has no traffic of its own", ""),
    "several": (["ssh", "ntp"], 0, "ssh: deferrable", ""),
    "nearly right": (["slrumctld"], 2, "", "did you mean slurmctld?"),
    "what is not there": (["foo"], 2, "", "seen: chrony, "),
    "empty": ([""], 2, "", "argument --why: is empty"),
    "no port": (["tcp/99999"], 2, "", "tcp/99999 is not a port"),
}


@pytest.mark.parametrize("name", WHY)
def test_why(name: str, capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, expected, shown, message = WHY[name]
    status, out, err = run(capsys, "classify", "-q", capture, *(f"--why={each}" for each in names))
    assert status == expected
    assert shown in out
    assert message in err
    assert "SMS-mgmt: deferrable" not in out
    assert bool(out) == (status == 0)


@pytest.mark.parametrize(
    ("name", "begins"), [("a.json", "{"), ("a.yml", "capture:"), ("a.html", "<"), ("a.txt", "capture ")]
)
def test_the_format_follows_the_file_name(
    name: str, begins: str, capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "classify", capture, "-o", name)
    assert (status, out) == (0, "")
    assert Path(name).read_text().startswith(begins)
    assert f"wrote {name}" in err
    assert re.search(r"deferrable: +.*provisioning", err)


def test_the_verdict_of_the_site(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--override", "nfsd=deferrable", "--override", "slrumctld=deferrable", "--json")
    status, out, err = run(capsys, "-q", "classify", capture, *arguments)
    assert status == 0
    services = {each["name"]: each for each in json.loads(out)["services"]}
    assert (services["nfs"]["verdict"], services["nfs"]["overridden"]) == ("deferrable", True)
    assert not services["chrony"]["overridden"]
    assert err == "--override: slrumctld is not in the captures; did you mean slurmctld?\n"


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_compare(form: str, capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its own output nothing moves; with another verdict, that service does. The file may be replaced by -o."""
    file = Path(f"before.{form}")
    assert run(capsys, "-q", "classify", capture, "-o", file)[0] == 0
    status, out, _ = run(capsys, "-q", "classify", capture, "--compare", file)
    assert status == 0
    assert f"compared  with {file}\nsame      10 services: same verdict, similar numbers\n" in out
    arguments = ("--compare", file, "--override", "nfs=deferrable")
    status, out, _ = run(capsys, "-q", "classify", capture, *arguments, "--json")
    data = json.loads(out)
    jsonschema.validate(data, SCHEMA)
    assert data["compared"]["file"] == str(file)
    assert data["compared"]["changes"] == [
        {
            "name": "nfs",
            "kind": "verdict",
            "before": "time-critical",
            "after": "deferrable",
            "details": ["now set by the site"],
        }
    ]
    assert data["made"]["options"]["compare"] == str(file)
    status, out, _ = run(capsys, "-q", "classify", capture, *arguments, "--why", "ntp")
    assert "moved     nfs: deferrable, was time-critical; now set by the site\n" in out
    assert "SMS-mgmt" not in out
    status, out, err = run(capsys, "classify", capture, *arguments, "-o", file)
    assert (status, "moved:         nfs, compared with" in err) == (0, True)
    assert b"What moved" in flow.render(example.moved(), "html").encode()


MISTAKES: dict[str, tuple[list[str], int, str, str]] = {
    "nothing": ([], 2, "no capture given", "--live"),
    "both": (["a.pcap", "--live", "lo"], 2, "are mutually exclusive", ""),
    "no such file": (["none.pcap"], 2, "none.pcap: cannot be read: no such file", "check the path"),
    "a folder": (["."], 2, ". is a folder", "*.pcap"),
    "standard input twice": (["-", "-"], 2, "standard input (-) can be read only once", ""),
    "no address": (["CAPTURE", "--sms", "head"], 2, "--sms: head is neither an IP address nor a MAC", "10.0.0.1"),
    "no node": (["CAPTURE", "--node", "n1"], 2, "--node: n1 is neither", ""),
    "another sms": (["CAPTURE", "--sms", "10.99.99.99"], 1, "10.99.99.99", "10.1.0.1"),
    "no verdict": (["CAPTURE", "--override", "nfs=deferable"], 2, "is not NAME=VERDICT", "did you mean deferrable?"),
    "no services": (["CAPTURE", "--services", "none"], 2, "none is not a folder", ""),
    "a duration alone": (["CAPTURE", "--duration", "5m"], 2, "--duration requires --live", "--live br-prov"),
    "no duration": (["--live", "lo", "--duration", "long"], 2, "duration 'long'", "1h30m"),
    "a duration cut short": (["--live", "lo", "--duration", "1h30"], 2, "duration '1h30'", ""),
    "another node": (["CAPTURE", "--node", "10.9.9.9"], 1, "10.9.9.9 is not in the capture", "without --node"),
    "a network of no nodes": (["CAPTURE", "--nodes", "10.99.0.0/16"], 1, "10.99.0.0/16", ""),
    "twice": (["CAPTURE", "CAPTURE"], 2, "is given twice", "name every file once"),
    "an empty sms": (["CAPTURE", "--sms", ""], 2, "argument --sms: is empty", ""),
    "an empty node": (["CAPTURE", "--node", ""], 2, "argument --node: is empty", ""),
    "empty nodes": (["CAPTURE", "--nodes", " "], 2, "argument --nodes: is empty", ""),
    "an empty output": (["CAPTURE", "-o", ""], 2, "argument -o/--output: is empty", ""),
    "no network": (["CAPTURE", "--nodes", "10.1"], 2, "--nodes: 10.1 is not a network", "10.2.0.0/16"),
    "why with json": (["CAPTURE", "--why", "nfs", "--json"], 2, "--why requires the table format", "reasons"),
    "a zero in a name": (["a\0b"], 2, "cannot be read", ""),
    "no earlier result": (["CAPTURE", "--compare", "nope"], 2, "nope: cannot be read: no such file", "check the path"),
    "compared with a text": (["CAPTURE", "--compare", "text.pcap"], 2, "it has no list `services`", "-o FILE.yaml"),
    "an empty comparison": (["CAPTURE", "--compare", ""], 2, "argument --compare: is empty", ""),
    "compared with a capture": (
        ["CAPTURE", "--compare", "binary.pcap"],
        2,
        "binary.pcap: it is not text",
        "-o FILE.yaml",
    ),
    "an empty name": ([""], 2, "argument CAPTURE: is empty: is a shell variable not set?", ""),
    "an empty override": (["CAPTURE", "--override", ""], 2, "argument --override: is empty", ""),
    "no form": (["CAPTURE", "--format", "xml"], 2, "invalid choice: 'xml'", ""),
    "over the capture": (["CAPTURE", "-o", "CAPTURE"], 2, "is one of the captures", "another file"),
    "into no folder": (["CAPTURE", "-o", "no/x.json"], 2, "no is not a folder", ""),
    "no capture": (["text.pcap"], 1, "text.pcap", "tcpdump"),
    "nothing in it": (["nothing.pcap"], 1, "nothing.pcap", ""),
    "no packets": (["empty.pcap"], 1, "no packet", ""),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, status, message, hint = MISTAKES[name]
    Path("text.pcap").write_text("this is a text, not a capture at all\n" * 9)
    Path("nothing.pcap").write_bytes(b"")
    Path("empty.pcap").write_bytes(files.pcap([]))
    Path("binary.pcap").write_bytes(b"\xd4\xc3\xb2\xa1")
    before = capture.read_bytes()
    found, out, err = run(capsys, "-q", "classify", *(capture if each == "CAPTURE" else each for each in arguments))
    assert (found, out) == (status, ""), err
    assert message in err
    assert hint in err
    assert "Traceback" not in err
    assert capture.read_bytes() == before


# Into a build

SITE = ROOT / "tests" / "golden" / "sites" / "debian-12.yaml"


def test_build_accepts_the_output_of_classify(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`sms classify -o FILE`, then `sms build --from FILE`: services of the container, and notices on the others."""
    assert run(capsys, "classify", capture, "-o", "found.yaml")[0] == 0
    cluster = open_cluster(SITE, None, Silent(), classification=Path("found.yaml"))
    carried = {name for name in TIME_CRITICAL if SHIPPED[name].container}
    assert {service.name for service in cluster.services} == carried | {"munge"}
    notices = open_site(SITE, None, Path("found.yaml")).notices
    assert sorted(notice.split()[0] for notice in notices) == ["ganglia", "nfs", "the"]
    assert all(SHIPPED[notice.split()[0]].advice in notice for notice in notices[:-1])
    assert "networks.provisioning.routes" in notices[-1], "the capture is of another site"


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_a_classification_made_by_hand_is_accepted(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"c.{form}"
    path.write_text(flow.render(example.paper(), form))
    loaded = open_site(SITE, None, path)
    assert set(loaded.site.service_names) == {"slurmctld", "rsyslog", "nat", "postfix", "chrony"}
    assert [notice.split()[0] for notice in loaded.notices] == ["nfs", "ganglia", "the", "the"]
    assert loaded.notices[-2] == f"the capture: {example.paper().capture.remarks[0]}"
