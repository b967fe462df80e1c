"""`sms init`, `sms config` and the way from a file to a Site."""

from __future__ import annotations

import argparse
import json
import os
import re
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from analysis.classification import ClassificationError, read_classification
from appliance.catalog import read_catalog
from appliance.cli import Parser
from appliance.cli.site import config as config_cmd
from appliance.cli.site import init as init_cmd
from appliance.config.check import check_site
from appliance.config.model import ServicesFrom
from appliance.config.read import read_site_text
from appliance.errors import ConfigError, Refused
from appliance.operations.site.config import check_config
from appliance.operations.site.find import open_site, resolve
from appliance.operations.site.init import list_profiles, read_profile, write_site
from appliance.operations.site.locate import find_site
from appliance.share import share

# `# key: value` and `#   - item`; what would take the place of `services` stays a comment.
_COMMENTED_OUT = re.compile(r"^( *)# ( *(?:- .*|(?!services|from|also|without)[a-z_]+:(?: .*)?))$", re.MULTILINE)

PROFILES = {"cray-ex": "sles-15", "lab": "debian-12", "openhpc": "openhpc-rocky9"}


def _sms(*argv: str) -> int:
    parser = Parser(prog="sms")
    parser.add_argument("--site", type=Path)
    parser.add_argument("--state", type=Path)
    verbs = parser.add_subparsers()
    init_cmd.add(verbs)
    config_cmd.add(verbs)
    arguments: argparse.Namespace = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty working folder with no site file set elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SMS_SITE", raising=False)
    return tmp_path


@pytest.mark.parametrize(("name", "base"), PROFILES.items())
def test_profiles_are_complete_and_without_mistakes(name: str, base: str) -> None:
    site, document = read_site_text(read_profile(name), name)
    catalog = read_catalog(share("definitions", "services"))
    problems = check_site(site, document, services=catalog, bases=PROFILES.values(), controllers=("slurmctld",))
    assert [each for each in problems if "for documentation" not in each.message] == []
    assert site.base.os == base


@pytest.mark.parametrize("name", PROFILES)
def test_settings_that_are_commented_out_are_right_too(name: str) -> None:
    """The file stays valid when each commented-out setting is enabled."""
    text = _COMMENTED_OUT.sub(r"\1\2", read_profile(name))
    site, _ = read_site_text(text, name)
    if name != "lab":
        assert site.secrets.munge_key
        assert site.mail.relay == "mail.example.org"
        assert site.retention.last == 3


def test_profiles_are_listed_with_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(list_profiles()) == set(PROFILES)
    assert _sms("init", "--list") == 0
    assert "HPE Cray EX" in capsys.readouterr().out


def test_init_writes_the_profile_and_prints_the_next_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _sms("init", "--profile", "lab") == 0
    assert (folder / "sms.yaml").read_text() == read_profile("lab")
    assert sorted(path.name for path in folder.iterdir()) == ["sms.yaml", "tls"]
    said = capsys.readouterr().out
    assert "sms config check" in said
    assert "sms key create" in said
    assert "sms build" in said
    assert _sms("config", "check") == 0
    assert "valid" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "own"), [("openhpc", "172.30.2."), ("cray-ex", "172.30.3.")])
def test_an_unedited_starter_file_is_refused(
    folder: Path, name: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its addresses are nobody's: no verb connects to them."""
    text = read_profile(name)
    (folder / "sms.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        _sms("config", "check")
    assert caught.value.problems
    said = {(problem.line, problem.message.removeprefix("is ")) for problem in caught.value.problems}
    assert len(said) == len(caught.value.problems)
    marked = [at for at, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("# (CHANGE)")]
    assert [line for line, message in sorted(said) if message == "still marked (CHANGE)"] == marked and len(marked) > 5
    assert all("documentation" in message for line, message in said if line not in marked)
    edited = re.sub(r"^( *(?:address|gateway): )(?:192\.0\.2|198\.51\.100)\.", rf"\g<1>{own}", text, flags=re.MULTILINE)
    (folder / "sms.yaml").write_text(edited)
    with pytest.raises(ConfigError) as caught:
        _sms("config", "check")
    assert [problem.line for problem in caught.value.problems] == marked
    assert open_site(folder / "sms.yaml").site, "a mark stops no other verb"
    (folder / "sms.yaml").write_text(edited.replace("# (CHANGE) ", "# "))
    assert _sms("config", "check") == 0
    assert "valid" in capsys.readouterr().out


def test_the_starter_for_cray_ex_does_not_take_the_hosts_own_interfaces(folder: Path) -> None:
    """The admin hosts are at their NMN addresses, so no bridge may take the NMN's or the CAN's interface."""
    text = read_profile("cray-ex").replace("198.51.100.", "172.30.3.").replace("(CHANGE) ", "")
    (folder / "sms.yaml").write_text(text)
    assert _sms("config", "check") == 0
    site = open_site(folder / "sms.yaml").site
    admin = IPv4Address(site.admin_hosts[0].address)
    assert admin in site.networks.provisioning.address.network
    for network, port in ((site.networks.provisioning, "bond0.nmn0"), (site.networks.public, "bond0.can0")):
        assert (network.attach, network.bridge, network.uplink("ncn-m001")) == ("macvlan", "", port)
    bridged = re.sub(r"^    attach: macvlan\n(?:    #.*\n)?    port: bond0.nmn0$", VLAN, text, flags=re.MULTILINE)
    assert bridged != text
    (folder / "sms.yaml").write_text(bridged)
    assert _sms("config", "check") == 0, "the other way that its comment shows"


VLAN = "    bridge: br-nmn\n    port: bond0\n    vlan: 20"


def test_init_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _sms("init", "--profile", "openhpc", "-o", "-") == 0
    assert capsys.readouterr().out == read_profile("openhpc")
    assert list(folder.iterdir()) == []


def test_init_replaces_only_with_force(folder: Path) -> None:
    file = folder / "sms.yaml"
    file.write_text("mine")
    with pytest.raises(Refused) as caught:
        _sms("init", "--profile", "lab")
    assert caught.value.status == 3
    assert "--force" in caught.value.hint
    assert file.read_text() == "mine"
    assert _sms("init", "--profile", "lab", "--force") == 0
    assert file.read_text() == read_profile("lab")


def test_init_does_not_follow_a_dangling_link(folder: Path) -> None:
    (folder / "sms.yaml").symlink_to(folder / "elsewhere")
    with pytest.raises(Refused):
        write_site("text", folder / "sms.yaml")
    assert not (folder / "elsewhere").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--profile", "la"], "unknown profile la"),
        (["--profile", "../lab"], "unknown profile ../lab"),
        ([], "no --profile"),
        (["--profile", "lab", "-o", "."], ". is a folder"),
    ],
)
def test_init_with_wrong_words(folder: Path, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _sms("init", *argv)
    assert caught.value.message == message
    assert caught.value.hint
    assert list(folder.iterdir()) == []


def test_where_the_site_file_is_looked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/etc/sms/sms.yaml").exists():
        with pytest.raises(ConfigError) as caught:
            find_site(None)
        for place in ("--site", "$SMS_SITE", "sms.yaml", "/etc/sms/sms.yaml"):
            assert place in caught.value.message
        assert "sms init" in caught.value.hint
    (folder / "sms.yaml").touch()
    assert find_site(None) == Path("sms.yaml")
    monkeypatch.setenv("SMS_SITE", "/x/y.yaml")
    assert find_site(None) == Path("/x/y.yaml")
    assert find_site(Path("z")) == Path("z")


def test_check_reports_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sms.yaml").write_text(read_profile("lab").replace("br-pub", "br-prov"))
    assert _sms("config", "check", "--json") == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["path"] == "networks.public.bridge"
    assert problem["line"] > 0
    with pytest.raises(ConfigError):
        _sms("config", "check")


def test_show_has_every_setting(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sms.yaml").write_text(read_profile("lab"))
    assert _sms("--state", "st", "config", "show", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["admin_hosts"][0]["port"] == 22
    assert shown["state"] == str(folder / "st")


def _site(folder: Path, more: str, services: str = "") -> Path:
    text = read_profile("lab")
    if services:
        text = "\n".join(services if line.startswith("services:") else line for line in text.splitlines())
    (folder / "sms.yaml").write_text(f"{text}\n{more}\n")
    return folder / "sms.yaml"


def test_files_that_the_site_names(folder: Path) -> None:
    modes = {"munge.key": 0o640, "shadow": 0o600, "ca.pem": 0o644, "known_hosts": 0o644, "pass": 0o604}
    for name, mode in modes.items():
        (folder / name).touch()
        (folder / name).chmod(mode)
    (folder / "folder").mkdir()
    more = """\
known_hosts: known_hosts
secrets: {munge_key: munge.key, shadow: shadow, tls_ca: ca.pem, tls_key: none.key}
accounts:
  passwd: folder
snapshots:
  borg: {repository: /backup/a.borg, passphrase: none}
provisioning:
  address: 10.77.0.2/24
  mac: "02:00:0a:00:00:02"
  bmc: {networks: [10.9.0.0/24], password_file: pass, insecure: true}
"""
    with pytest.raises(ConfigError) as caught:
        check_config(_site(folder, more))
    assert [(problem.path, problem.message, problem.hint) for problem in caught.value.problems] == [
        (
            "secrets.munge_key",
            f"{folder}/munge.key can be read by others (mode 0640)",
            f"chmod 600 {folder}/munge.key",
        ),
        ("secrets.tls_key", f"{folder}/none.key does not exist", "check the path, or remove the setting"),
        ("accounts.passwd", f"{folder}/folder is not a regular file", "give the path of a file"),
        ("snapshots.borg.passphrase", f"{folder}/none does not exist", "check the path, or remove the setting"),
        (
            "provisioning.bmc.password_file",
            f"{folder}/pass can be read by others (mode 0604)",
            f"chmod 600 {folder}/pass",
        ),
    ]


@pytest.mark.parametrize(("length", "valid"), [(0, False), (5, False), (31, False), (32, True), (1024, True)])
def test_a_munge_key_that_munged_refuses(folder: Path, length: int, valid: bool) -> None:
    (folder / "munge.key").write_bytes(bytes(length))
    (folder / "munge.key").chmod(0o600)
    path = _site(folder, "secrets: {munge_key: munge.key}")
    if valid:
        check_config(path)
        return
    with pytest.raises(ConfigError) as caught:
        check_config(path)
    assert [problem.path for problem in caught.value.problems] == ["secrets.munge_key"]


def test_a_site_file_that_others_may_change(folder: Path) -> None:
    """Root runs its commands: a user who may write to it is root."""
    path = _site(folder, "")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="others may write to it") as caught:
        check_config(path)
    assert caught.value.problems[0].hint == f"chmod go-w {path}"


def test_a_signing_key_may_come_later_but_not_be_open(folder: Path) -> None:
    path = _site(folder, "")
    check_config(path)
    (folder / "keys").mkdir()
    (folder / "keys/sign.pem").touch(mode=0o644)
    with pytest.raises(ConfigError, match=r"signing\.private_key: .* can be read by others"):
        check_config(path)


CLASSIFICATION = """\
services:
  - {name: slurmctld, verdict: time-critical, group: SMS-services}
  - {name: nfs, verdict: time-critical, group: SMS-services}
  - {name: gmond, verdict: time-critical, group: SMS-services}
  - {name: odd, verdict: time-critical, group: SMS-services}
  - {name: munge, verdict: time-critical, group: SMS-services}
  - {name: ssh, verdict: deferrable, group: SMS-mgmt}
"""


def test_services_of_a_classification(folder: Path) -> None:
    (folder / "c.yaml").write_text(CLASSIFICATION)
    path = _site(folder, "", services="services: {from: c.yaml, also: [chrony], without: [munge, odd, nsf]}")
    loaded = open_site(path)
    assert loaded.site.services == ("slurmctld", "chrony")
    assert loaded.site.service_names == ("slurmctld", "chrony")
    nfs, ganglia, without = loaded.notices
    assert "node image" in nfs
    assert "syslog" in ganglia
    assert without == "services.without: nsf is not in the classification; did you mean nfs?"


def test_notices_name_the_services_that_are_left_out(folder: Path) -> None:
    (folder / "c.yaml").write_text(CLASSIFICATION)
    loaded = open_site(_site(folder, "", services="services: {from: c.yaml}"))
    assert [notice.split()[0] for notice in loaded.notices] == ["nfs", "gmond", "odd"]


def test_an_unknown_service_is_named_and_can_be_left_out(folder: Path) -> None:
    """A service that the catalogue does not know, with advice of the site's own, which may be hostile."""
    advice = '"ask\\e[31m Maria"'
    text = "services:\n  - {name: slurmctld, verdict: time-critical}\n"
    (folder / "c.yaml").write_text(f"{text}  - {{name: tcp/4444, verdict: time-critical, advice: {advice}}}\n")
    (notice,) = open_site(_site(folder, "", services="services: {from: c.yaml}")).notices
    assert "tcp/4444 is time-critical, but the container cannot run it: ask\\x1b[31m Maria; then list" in notice
    loaded = open_site(_site(folder, "", services="services: {from: c.yaml, without: [tcp/4444]}"))
    assert loaded.notices == ()


BAD_CLASSIFICATIONS = {
    "": "it has no list `services`",
    "services: 5": "it has no list `services`",
    "services: [5]": "services[0] is not a mapping",
    "services: [{name: 5}]": "services[0].name is not the name of a service",
    'services: [{name: "a\\e[1m", verdict: deferrable}]': "services[0].name is not the name of a service",
    "services: [{name: a, verdict: maybe}]": "services[0].verdict is neither time-critical nor deferrable",
    "services: [{name: a, verdict: deferrable}, {name: a, verdict: deferrable}]": "services: a is listed twice",
    "capture: {}\nservices: []": "it is truncated: sms, nodes, routed, unseen, elsewhere, unclassified, bin_s should "
    "follow the services",
    "{": "it is not JSON, line 1: Expecting property name enclosed in double quotes",
    "a: b: c": "it is not YAML, line 1: mapping values are not allowed here",
    "a: !!python/none x": "it is not YAML, line 1: could not determine a constructor for the tag "
    "'tag:yaml.org,2002:python/none'",
    "[" * 100_000: "it is neither YAML nor JSON",
    '{"a":' + "[" * 100_000: "it is neither YAML nor JSON",
}


@pytest.mark.parametrize(("text", "message"), BAD_CLASSIFICATIONS.items(), ids=range(len(BAD_CLASSIFICATIONS)))
def test_bad_classification(text: str, message: str) -> None:
    with pytest.raises(ClassificationError) as caught:
        read_classification(text)
    assert str(caught.value) == message


def test_classification_in_json() -> None:
    (service,) = read_classification('{"services": [{"name": "ssh", "verdict": "deferrable"}]}').services
    assert (service.name, service.group, service.time_critical) == ("ssh", "SMS-mgmt", False)


def test_missing_classification_is_a_problem_of_the_site_file(folder: Path) -> None:
    path = _site(folder, "", services="services: {from: none.yaml}")
    with pytest.raises(ConfigError) as caught:
        open_site(path)
    (problem,) = caught.value.problems
    assert problem.path == "services.from"
    assert problem.message == f"{folder}/none.yaml: no such file or directory"
    assert "verdict" in problem.hint


@pytest.mark.parametrize(("name", "words"), [("none.yaml", "no such file"), ("bad.yaml", "it has no list `services`")])
def test_from_on_the_command_line_is_not_the_site_files_fault(name: str, words: str, folder: Path) -> None:
    (folder / "bad.yaml").write_text("a: b")
    with pytest.raises(ConfigError) as caught:
        open_site(_site(folder, ""), None, folder / name)
    assert caught.value.message.startswith(f"--from: {folder / name}: {words}")
    assert "sms classify" in caught.value.hint
    assert not caught.value.problems


WHOLE = """\
capture: {duration_s: 3600, truncated: false, skipped: {}, problems: []}
sms: {}
nodes: {}
services:
- {name: slurmctld, verdict: time-critical, confidence: 0.9}
- {name: rsyslog, verdict: deferrable, confidence: 0.9}
routed: {}
unseen: []
elsewhere: {}
unclassified: {}
bin_s: 1.0
"""
DOUBTS: dict[str, tuple[str, str, list[str]]] = {
    "none": ("", "", []),
    "a verdict of low confidence": ("0.9}\nr", "0.49}\nr", ["low confidence: rsyslog (deferrable, 49 %)"]),
    "the site's own verdict": ("0.9}\nr", "0.49, overridden: true}\nr", []),
    "truncated": ("truncated: false", "truncated: true", ["the capture is truncated"]),
    "damaged": ("skipped: {}", "skipped: {odd: 3}", ["the capture is truncated"]),
    "remarks": (
        "problems: []",
        "problems: [a], remarks: [a hole, a twin]",
        ["the capture: a hole", "the capture: a tw"],
    ),
    "too short for chrony": (
        "unseen: []",
        "unseen: [{name: chrony, needed_capture_s: 3601}, {name: postfix, needed_capture_s: 3599}]",
        ["left out, but the capture is too short to decide whether nodes use it: chrony"],
    ),
    "covered less": ("3600,", "3600, covered_s: 10,", ["left out, but the capture is too short to decide"]),
    "not usual": ("unseen: []", "unseen: [{name: slurmrestd, needed_capture_s: 9e9}]", []),
    "nodes of the site": ("nodes: {}", "nodes: {count: 2, addresses: [10.77.0.101, fe80::1, 5, []]}", []),
    "nodes elsewhere": (
        "nodes: {}",
        "nodes: {count: 3, addresses: [10.77.0.101, 10.100.0.1, 10.100.0.2]}",
        ["the capture has 2 compute nodes in other networks than the site file, such as 10.100.0.1"],
    ),
    "odd nodes": ("nodes: {}", "nodes: [10.100.0.1]", []),
    "odd": ("unseen: []", "unseen: [5, {name: [], needed_capture_s: a}, {name: chrony, needed_capture_s: .nan}]", []),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_doubts_are_reported(name: str, folder: Path) -> None:
    """Reasons of a classification not to rely on it."""
    before, after, expected = DOUBTS[name]
    text = WHOLE if name != "covered less" else WHOLE.replace("[]\nels", "[{name: nat, needed_capture_s: 60}]\nels")
    assert not before or before in text
    (folder / "c.yaml").write_text(text.replace(before, after, 1) if before else text)
    notices = open_site(_site(folder, ""), None, folder / "c.yaml").notices
    assert [notice.startswith(words) for notice, words in zip(notices, expected, strict=True)] == [True] * len(expected)


def test_nodes_behind_a_router_of_the_site_are_its_own(folder: Path) -> None:
    (folder / "c.yaml").write_text(WHOLE.replace("nodes: {}", "nodes: {count: 1, addresses: [10.100.0.1]}"))
    path = _site(folder, "")
    routes = "    routes: [{network: 10.100.0.0/17, gateway: 10.77.0.254}]\n"
    path.write_text(path.read_text().replace("  public:\n", f"{routes}  public:\n", 1))
    assert open_site(path, None, folder / "c.yaml").notices == ()


def test_a_truncated_classification_is_refused() -> None:
    """YAML without its last lines is still YAML: services may be missing."""
    lines = WHOLE.splitlines(keepends=True)
    assert len(read_classification(WHOLE).services) == 2
    for count in range(len(lines)):
        with pytest.raises(ClassificationError):
            read_classification("".join(lines[:count]))


def test_a_classification_of_nothing_the_container_can_run(folder: Path) -> None:
    (folder / "c.yaml").write_text("services: [{name: nfs, verdict: time-critical}]")
    with pytest.raises(ClassificationError, match="no time-critical service that the container can run"):
        resolve(ServicesFrom.model_validate({"from": folder / "c.yaml"}), {"munge"})


MODES = [(0o022, None, 0o644), (0o077, None, 0o600), (0o022, 0o600, 0o600), (0o077, 0o664, 0o664)]


@pytest.mark.parametrize(("umask", "before", "after"), MODES)
def test_a_file_has_the_permissions_that_it_should(umask: int, before: int | None, after: int, tmp_path: Path) -> None:
    """A new file gets the umask's; a replaced file keeps its own."""
    path = tmp_path / "a.yaml"
    if before is not None:
        path.write_text("before")
        path.chmod(before)
    old = os.umask(umask)
    try:
        write_site("after", path, force=True)
    finally:
        os.umask(old)
    assert (path.read_text(), path.stat().st_mode & 0o7777) == ("after", after)
    assert list(tmp_path.iterdir()) == [path]
