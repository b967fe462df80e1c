"""The command line as a person meets it: what a wrong one says, its help, its completion, its man page."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.cli import VERBS, find_verb, main, make_parser, show_error
from appliance.cli.common import duration, selector
from appliance.cli.edge import guard_standard_streams
from appliance.cli.steps import progress
from appliance.errors import SmsError
from tests.places import ROOT

NEAR = {
    "staus": "status",
    "export podman": "quadlet or compose",
    "lab up --engine k8s": "kubernetes",
    "stat": "status",
    "overlay s": "snapshot or show or schedule",
    "config chek": "check",
    "help config chek": "check",
    "overlay snapshot --method reflnk": "reflink",
    "node boot node1 --mode Legcy": "Legacy",
}
"""Words that are nearly right, and what is meant. What else is wrong is in tests/mistakes.py."""


@pytest.mark.parametrize("text", ["9" * 5000, "²", "٣", "-1", "1.0", "", "newest"])
def test_snapshots_have_short_decimal_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither the number of a snapshot nor latest"):
        selector(text)


@pytest.mark.parametrize("words", NEAR)
def test_a_word_that_is_nearly_right(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    assert f"  hint: did you mean {NEAR[words]}?" in capsys.readouterr().err


def test_no_verb_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: sms")


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


Words = tuple[str, ...]


def each_parser(parser: argparse.ArgumentParser, words: Words = ()) -> Iterator[tuple[Words, argparse.ArgumentParser]]:
    """Every parser with its words."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, part in action.choices.items():
                yield from each_parser(part, (*words, name))


def parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[Words, str]]:
    """Every parser's words and its help."""
    return ((words, part.format_help()) for words, part in each_parser(parser))


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


HEAVY = (
    *("pydantic", "rich", "paramiko", "ansible_runner", "yaml", "jinja2", "scapy", "cryptography", "cyclonedx"),
    *("traceback", "difflib", "platform", "subprocess", "socket", "hashlib"),
)


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["status", "--help"]], ids=" ".join)
def test_help_is_quick(words: list[str]) -> None:
    """Nothing that takes long to import is imported to show help."""
    code = (
        "import atexit, sys; from appliance.cli import main;"
        f"atexit.register(lambda: sys.stderr.write(' '.join(name for name in {HEAVY} if name in sys.modules)));"
        f"main({words})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_help_of_sms_needs_only_the_summaries_of_verbs() -> None:
    assert make_parser(summaries=True).format_help() == make_parser().format_help()


COMPLETIONS = {
    "sms st": ["start", "status", "stop"],
    "sms --sit": ["--site"],
    "sms config ": ["check", "schema", "show"],
    "sms start --ho": ["--host"],
    "sms lab d": ["demo", "down"],
}


def test_help_fits_80_columns_and_describes_every_action(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words, text in parsers(make_parser()):
        assert not text.split("\n\n")[1].startswith(("options:", "positional")), f"no description: {words}"
        long = [line for line in text.splitlines() if len(line) > 80]
        assert not long, words
    assert [words for words, parser in each_parser(make_parser()) if not all(map(described, parser._actions))] == []


def described(action: argparse.Action) -> bool:
    return bool(action.help) or isinstance(action, argparse._SubParsersAction)


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
    for what in ("hosts", "services", "snapshots", "profiles", "starters"):
        assert (f"sms completion {what} 2>/dev/null" if shell == "fish" else f"_sms_words {what})") in text


@pytest.mark.parametrize(
    ("shell", "line"),
    [("bash", "COMP_WORDS=({}) COMP_CWORD={}"), ("zsh", "words=({}) CURRENT=$(({} + 1))")],
)
@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("sms --site /tmp/a.yaml status --host ''", "--site /tmp/a.yaml completion hosts"),
        ("sms status --site '~/a.yaml' --host ''", "--site /home/al/a.yaml completion hosts"),
        ("sms status --host ''", "completion hosts"),
    ],
)
def test_completion_is_of_the_site_on_the_command_line(
    shell: str,
    line: str,
    typed: str,
    asked: str,
    need: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["completion", shell]) == 0
    functions = re.search(r"^_sms_words\(\).*?^_sms_starters[^\n]*", capsys.readouterr().out, re.M | re.S)
    assert functions
    asks = f'sms() {{ echo "$@" >"{tmp_path}/asked"; }}\ncompadd() {{ :; }}\nHOME=/home/al\n'
    script = f"{asks}{functions[0]}\n{line.format(typed, len(typed.split()) - 1)}\n_sms_hosts ''"
    subprocess.run([need(shell), "-c", script], check=False, timeout=60)
    assert (tmp_path / "asked").read_text().strip() == asked


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


def test_zsh_completion_is_one(need: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef sms")
    subprocess.run([need("zsh"), "-n"], input=text, text=True, check=True)


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
    "a full disk below an error": ("--site /nowhere status --json >/dev/full", 2, "/nowhere: cannot be read"),
    "an error without a reader": ("--site /nowhere status --json > >(true)", 2, "/nowhere: cannot be read"),
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


@pytest.mark.parametrize("words", ["--site /nowhere/sms.yaml config check", "--site /nowhere/sms.yaml status"])
def test_debug_adds_the_traceback_and_keeps_the_exit_status(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(words.split())
    plain = capsys.readouterr().err
    assert main(["--debug", *words.split()]) == status > 0
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and shown.endswith(plain)


def test_quiet_keeps_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress(quiet=True)
    with shown.step("check"):
        shown.report("note: a line")
        shown.warn("it is forced")
    assert capsys.readouterr() == ("", "WARNING: it is forced\n")


def test_with_json_an_error_is_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    """What a script reads is JSON whatever the outcome; twice, for one program may run several verbs."""
    for _ in range(2):
        status = main(["--site", "/nowhere/sms.yaml", "status", "--json"])
        captured = capsys.readouterr()
        error = json.loads(captured.out)["error"]
        assert error["status"] == status == 2
        assert captured.err == f"sms: {error['message']}\n  hint: {error['hint']}\n"
    main(["--site", "/nowhere/sms.yaml", "status"])
    assert not capsys.readouterr().out


def test_what_was_printed_before_an_error_stays_the_only_document(capsys: pytest.CaptureFixture[str]) -> None:
    guard_standard_streams()
    print("{}")
    assert show_error(argparse.Namespace(json=True), SmsError("interrupted"), 130) == 130
    assert capsys.readouterr() == ("{}\n", "sms: interrupted\n")
