"""The command line as a person meets it: what a wrong one says, its help, its completion, its man page."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.cli import VERBS, find_verb, main, make_parser
from appliance.cli.common import duration
from tests.places import ROOT

Case = tuple[list[str], int, str, str]

CASES: dict[str, Case] = {
    "no verb": ([], 2, "", ""),
    "a verb nearly right": (["staus"], 2, "sms: argument VERB: invalid choice: 'staus'", "did you mean status?"),
    "a verb that is none": (["frobnicate"], 2, "sms: argument VERB: invalid choice: 'frobnicate'", "sms --help"),
    "an unknown option": (["status", "--jsn"], 2, "sms status: unrecognized arguments: --jsn", "sms status --help"),
    "an unknown option of an action": (
        ["files", "remove", "/etc/x", "--nothing"],
        2,
        "sms files remove: unrecognized arguments",
        "sms files remove --help",
    ),
    "no images kept": (
        ["image", "prune", "--nodes", "--keep", "0"],
        2,
        "sms image prune: argument --keep: '0' is not a number of at least 1",
        "",
    ),
    "less than none": (["image", "push", "compute", "--keep=-3"], 2, "sms image push: argument --keep: '-3'", ""),
    "more than all": (
        ["user", "sync", "--sssd", "--most-removed", "101"],
        2,
        "sms user sync: argument --most-removed: '101' is not a percentage",
        "",
    ),
    "bounds the wrong way": (
        ["user", "sync", "--sssd", "--uid-min", "3000", "--uid-max", "2000"],
        2,
        "sms: --uid-min 3000 is more than --uid-max 2000",
        "",
    ),
    "no path": (["files", "add", "motd", "sms.lab.yaml"], 2, "sms: motd is not an absolute path", "such as /etc/motd"),
    "no path of nodes": (["files", "add", "/proc/x", "sms.lab.yaml"], 2, "sms: /proc/x: nodes accept no files", ""),
    "no file": (["files", "add", "/etc/x", "nothing"], 2, "sms: nothing: cannot be read: no such file", ""),
    "a folder, not a file": (["files", "add", "/etc/x", "."], 2, "sms: .: cannot be read: is a directory", ""),
    "an option without its value": (["start", "--host"], 2, "sms start: argument --host: expected one", "sms start --"),
    "not a number": (
        ["start", "--wait", "soon"],
        2,
        "sms start: argument --wait: 'soon' is not a number of seconds",
        "",
    ),
    "a UUID without a repository": (["overlay", "prune", "--uuid", "1234"], 2, "sms: --uuid needs --at borg", ""),
    "no UUID": (["overlay", "prune", "--at", "borg", "--uuid", "12"], 2, "sms: invalid UUID '12'", "at least 4"),
    "a flag without its UUID": (["overlay", "identity", "--without-remote"], 2, "sms: --without-remote needs a", ""),
    "no action": (["config"], 2, "sms config: the following arguments are required: ACTION", "sms config --help"),
    "no such shell": (["completion", "csh"], 2, "sms completion: argument SHELL: invalid choice: 'csh'", ""),
    "no help of that": (["help", "nonsense"], 2, "sms: argument VERB: invalid choice: 'nonsense'", "sms --help"),
    "no help of that action": (["help", "config", "chek"], 2, "sms config: argument ACTION: invalid", "check?"),
    "state that is a file": (
        ["--site", "sms.lab.yaml", "image", "list", "--state", "slip.yaml"],
        2,
        "sms: --state: slip.yaml is not a folder",
        "the folder of images",
    ),
    "init into a missing folder": (
        ["init", "--profile", "lab", "-o", "none/sms.yaml"],
        2,
        "sms: there is no folder none",
        "--parents",
    ),
    "a log without an end as JSON": (
        ["--site", "sms.lab.yaml", "logs", "-f", "--json"],
        2,
        "sms: --json prints one document",
        "omit one",
    ),
    "no site file": (
        ["status"],
        2,
        "sms: no site file: --site and $SMS_SITE are not set",
        "`sms init --profile lab`",
    ),
    "a missing site file": (
        ["--site", "nope.yaml", "status"],
        2,
        "sms: nope.yaml: cannot be read: no such file or directory",
        "check the path",
    ),
    "a site file with a slip": (
        ["--site", "slip.yaml", "config", "check"],
        2,
        "sms: slip.yaml:7: clustr: unknown key",
        "did you mean cluster?",
    ),
    "a site file that is no YAML": (["--site", "torn.yaml", "build"], 2, "sms: torn.yaml:2: while parsing", ""),
    "init without a profile": (["init"], 2, "sms: no --profile", "--profile cray-ex, lab, openhpc"),
    "a profile nearly right": (["init", "--profile", "openhpcc"], 2, "sms: unknown profile openhpcc", "openhpc?"),
    "init over a file": (
        ["init", "--profile", "lab", "-o", "sms.lab.yaml"],
        3,
        "sms: sms.lab.yaml already exists",
        "--force",
    ),
    "a key where one is": (
        ["--site", "sms.lab.yaml", "key", "create"],
        3,
        "/keys/sign.pem already exists",
        "would no longer start",
    ),
    "an unknown host": (
        ["--site", "sms.lab.yaml", "status", "--host", "host-c"],
        2,
        "sms: no admin host named host-c",
        "the site has: host-a, host-b",
    ),
    "not an admin host": (
        ["--site", "sms.lab.yaml", "stop"],
        3,
        "is not an admin host of the site",
        "--host host-a, host-b",
    ),
    "nothing to run": (["--site", "sms.lab.yaml", "exec", "--host", "host-a"], 2, "sms: no command", "sms exec -- sq"),
    "no image": (["--site", "sms.lab.yaml", "image", "sbom"], 3, "sms: there is no current image", "`sms build`"),
    "no image with that key": (
        ["--site", "sms.lab.yaml", "image", "manifest", "ab"],
        3,
        "sms: 0 images have a key",
        "",
    ),
    "no snapshot's number": (
        ["--site", "sms.lab.yaml", "overlay", "show"],
        2,
        "sms overlay show: the following arguments are required: NUMBER",
        "sms overlay show --help",
    ),
    "no method": (
        ["overlay", "snapshot", "--method", "reflnk"],
        2,
        "sms overlay snapshot: argument --method: invalid choice: 'reflnk'",
        "did you mean reflink?",
    ),
    "a freeze without an end": (
        ["overlay", "snapshot", "--freeze-limit", "1h"],
        2,
        "sms overlay snapshot: argument --freeze-limit: '1h' is longer than 60 s",
        "",
    ),
    "a reason of cron's": (
        ["overlay", "snapshot", "--scheduled", "--reason", "x"],
        2,
        "sms overlay snapshot: argument --reason: not allowed with argument --scheduled",
        "",
    ),
    "an empty name": (["overlay", "restore", "1", "--as", ""], 2, "sms overlay restore: argument --as: is empty", ""),
    "all, and one": (["overlay", "verify", "--all", "7"], 2, "sms overlay verify: argument NUMBER: not allowed", ""),
    "no lab": (["lab", "exec", "--name", "t-none", "node1", "true"], 1, "sms: there is no lab t-none", "sms lab up"),
    "no name of a lab": (["lab", "up", "--name", "A/B"], 2, "sms: invalid lab name 'A/B'", "use up to 20"),
    "too many nodes": (
        ["lab", "up", "--name", "t-none", "--nodes", "1000"],
        2,
        "sms: invalid number of nodes",
        "0 to 100",
    ),
}
"""Command line, exit status, what the message begins with or holds, what the hint holds."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with site files; no site file of this machine's counts."""
    if Path("/etc/sms/sms.yaml").exists():
        pytest.skip("this machine has a site file of its own")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SMS_SITE", raising=False)
    text = (ROOT / "definitions" / "profiles" / "lab.yaml").read_text()
    text += f"state: {tmp_path / 'state'}\n"
    (tmp_path / "sms.lab.yaml").write_text(text)
    (tmp_path / "slip.yaml").write_text(text.replace("cluster: lab", "clustr: lab"))
    (tmp_path / "torn.yaml").write_text("cluster: [lab\n")
    assert main(["-q", "--site", "sms.lab.yaml", "key", "create"]) == 0
    yield tmp_path


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and standard error."""
    capsys.readouterr()
    try:
        status = main(words)
    except SystemExit as end:
        status = int(end.code or 0)
    return status, capsys.readouterr().err


@pytest.mark.parametrize("name", CASES)
def test_mistakes(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, status, message, hint = CASES[name]
    found, said = run(words, capsys)
    lines = said.splitlines() or [""]
    if "slip" in name:
        # Three problems: what is missing comes first, and this one is among them.
        said = "sms: " + said.removeprefix("sms: ")
        assert "clustr: unknown key" in said
        assert "cluster: is missing" in said
    else:
        assert message in lines[0]
    assert hint in said
    assert found == status
    assert "Traceback" not in said
    left = {path.name for path in folder.iterdir()}
    assert left == {"sms.lab.yaml", "slip.yaml", "torn.yaml", "keys"}, "a mistake leaves nothing behind"


@pytest.mark.parametrize("words", [["build"], ["start", "--host", "here"], ["stop", "--host", "here"]])
def test_needs_root(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's number is made up: a real other user can read neither every checkout nor its environment."""
    here = os.uname().nodename
    text = (ROOT / "definitions" / "profiles" / "lab.yaml").read_text().replace("host-a", here)
    (tmp_path / "sms.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SMS_SITE", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert main([here if word == "here" else word for word in words]) == 3
    assert "sms: this needs root\n  hint: run it with sudo\n" in capsys.readouterr().err


def parsers(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every parser's words and its help."""
    yield words, parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, part in action.choices.items():
                yield from parsers(part, (*words, name))


def test_every_verb_shows_an_example() -> None:
    texts = dict(parsers(make_parser()))
    assert [name for name in VERBS if f"sms {name}" not in texts[(name,)].partition("examples:")[2]] == []


@pytest.mark.parametrize("words", [words for words, _ in parsers(make_parser())], ids=" ".join)
def test_help_ends_well(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert not end.value.code
    assert capsys.readouterr().out.startswith(f"usage: {' '.join(('sms', *words))}")


def test_examples_can_be_parsed() -> None:
    """What the help says one can type is taken by the parser."""
    wrong = []
    parser = make_parser()
    for words, text in parsers(parser):
        for line in text.partition("examples:")[2].splitlines():
            found = re.match(r"  sms (.*?)(?:  +.*| >.*)?$", line)
            if not found:
                continue
            try:
                parser.parse_args(found[1].split())
            except SystemExit:
                wrong.append(f"{words}: {line}")
    assert wrong == []


def test_help_is_quick() -> None:
    """No library that takes long to load is loaded to show help."""
    heavy = ["pydantic", "rich", "paramiko", "ansible_runner", "yaml", "jinja2", "scapy", "cryptography", "cyclonedx"]
    code = (
        "import sys; from appliance.cli import make_parser; make_parser().format_help();"
        f"print(*(name for name in {heavy} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == []


COMPLETIONS = {
    "sms st": ["start", "status", "stop"],
    "sms --sit": ["--site"],
    "sms config ": ["check", "schema", "show"],
    "sms start --ho": ["--host"],
    "sms lab d": ["demo", "down"],
}


def test_help_fits_80_columns_and_describes_every_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of an example may be longer: it must stay one line to be copied."""
    monkeypatch.setenv("COLUMNS", "80")
    for words, text in parsers(make_parser()):
        assert not text.split("\n\n")[1].startswith(("options:", "positional")), f"no description: {words}"
        long = [line for line in text.splitlines() if len(line) > 80]
        assert not [line for line in long if not line.startswith("  sms ")], words
        assert not [line for line in long if re.search(r"\S {2,}\S", line)], "its comment belongs on the next line"


@pytest.mark.parametrize("line", ["-q status", "status -q", "config -q check", "config check --quiet"])
def test_global_options_before_and_after_the_verb(line: str) -> None:
    arguments = make_parser().parse_args(line.split())
    assert arguments.quiet
    assert arguments.site is None
    assert not arguments.debug


def test_the_command_of_exec_keeps_its_options() -> None:
    arguments = make_parser().parse_args(["exec", "--site", "a.yaml", "squeue", "-q", "--debug"])
    assert (arguments.command, arguments.quiet, str(arguments.site)) == (["squeue", "-q", "--debug"], False, "a.yaml")


def test_help_is_that_of_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for argv in (["help", "overlay", "list"], ["overlay", "list", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.split()[0] == "sms"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_asks_for_the_words_of_the_site(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for what in ("hosts", "services", "snapshots", "profiles"):
        assert f"sms completion {what} 2>/dev/null" in text


@pytest.mark.parametrize("line", COMPLETIONS)
def test_bash_completes(
    line: str, need: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "sms.bash").write_text(capsys.readouterr().out)
    script = """
        . "$1"
        read -r _ _ <<<"" ; set -f
        COMP_LINE=$2 COMP_POINT=${#2}
        read -ra COMP_WORDS <<<"$2"
        case $2 in *' ') COMP_WORDS+=('') ;; esac
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        function=$(complete -p sms | sed -n 's/.*-F \\([^ ]*\\) .*/\\1/p')
        "$function" sms "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    bash = [need("bash"), "--norc", "-c", script, "complete", str(tmp_path / "sms.bash"), line]
    done = subprocess.run(bash, capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.split()) == COMPLETIONS[line], done.stderr


def test_zsh_completion_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef sms")
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=text, text=True, check=True)


def test_man_page_is_up_to_date(tmp_path: Path) -> None:
    """`make man` writes it from the parsers."""
    target = tmp_path / "sms.1"
    subprocess.run(
        ["make", "-s", "-o", "setup", "man", f"MAN={target}", f"PYTHON={sys.executable}"], cwd=ROOT, check=True
    )
    assert target.read_text() == (ROOT / "docs" / "man" / "sms.1").read_text(), "`make man` updates it"
    for name in VERBS:
        assert f"COMMAND \\fI\\,'sms {name}'" in target.read_text()


STREAMS: dict[str, tuple[str, int, str]] = {
    "help into a full disk": ("--help >/dev/full", 1, "sms: standard output: no space left on device\n"),
    "a short help into a full disk": ("key --help >/dev/full", 1, "sms: standard output: no space left on device\n"),
    "no verb into a full disk": (">/dev/full", 1, "sms: standard output: no space left on device\n"),
    "help to nobody": ("--help | true", 0, ""),
    "no standard output": ("--help >&-", 0, ""),
    "no standard streams": ("--version <&- >&- 2>&-", 0, ""),
    "no standard error": ("frobnicate 2>&-", 2, ""),
    "no standard input": ("classify - <&-", 1, "standard input is empty"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_standard_streams(name: str, tmp_path: Path) -> None:
    """Closed, full, or without a reader: a message at most, never a traceback."""
    words, status, message = STREAMS[name]
    code = "import sys; from appliance.cli import main; sys.exit(main(sys.argv[1:]))"
    command = ["bash", "-c", f'"$0" -c "$1" {words}', sys.executable, code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("words", "verb"),
    [
        (["status", "--json"], "status"),
        (["--site", "start", "-q", "overlay", "list"], "overlay"),
        (["--site=x", "stop"], "stop"),
        (["--sit", "x", "stop"], None),  # argparse takes it
        (["strat"], None),
        (["-q", "--help", "start"], None),
        (["--version"], None),
        (["--site"], None),
        ([], None),
    ],
)
def test_the_verb_that_arguments_are_for(words: list[str], verb: str | None) -> None:
    assert find_verb(words) == verb


def test_a_verbs_own_parser_is_as_among_all() -> None:
    every = dict(parsers(make_parser()))
    for name in VERBS:
        own = {words: text for words, text in parsers(make_parser(name)) if words}
        assert own == {words: text for words, text in every.items() if words[:1] == (name,)}


SPANS = {
    "90": 90,
    "90s": 90,
    "10m": 600,
    "1h30m": 5400,
    "2d": 172800,
    "1d1h1m1s": 90061,
    "1.5h": 5400,
    "0.5s": 0.5,
    "365d": 365 * 86400,
}
NO_SPANS = (
    *("", "s", "m", "m5", "10x", "-1", "-5", "-5s", "1h30", "10m5", "10 m", "1e9", "nan", "inf", "0", "0s"),
    *("367d", "400d", "99999999999", "9" * 40, "1٣m", "٣s"),
)


@pytest.mark.parametrize(("text", "seconds"), SPANS.items())
def test_spans(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", NO_SPANS)
def test_no_spans(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="invalid duration"):
        duration(text)
