"""The command line. One file per verb; each adds its parser and imports its operation when it runs."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from appliance import __version__
from appliance.cli.common import HelpFormatter, standard_output
from appliance.cli.edge import guard_standard_streams
from appliance.errors import SmsError, disk_hint

GROUPS: dict[str, tuple[str, ...]] = {
    "classification": ("classify.classify", "adopt.survey"),
    "site and hosts": ("site.init", "site.config", "site.key", "hosts.host", "hosts.doctor"),
    "image": ("image.build", "image.verify", "image.image"),
    "services container": (
        *("services.start", "services.stop", "services.apply", "services.restart", "services.status"),
        *("services.logs", "services.exec", "services.shell"),
    ),
    "overlay and snapshots": ("overlay.overlay",),
    "migration and upgrade": (
        *("migration.migrate", "migration.failover", "adopt.adopt", "services.guard"),
        *("upgrade.rehearse", "upgrade.upgrade", "services.journal"),
    ),
    "other engines": ("engines.export", "engines.deploy"),
    "provisioning VM and nodes": ("vm.vm", "nodes.node", "nodes.files", "nodes.user"),
    "lab and tools": ("lab.lab", "completion", "help", "version"),
}
"""Modules of this package in the order of the help; each is named like its verb."""
VERBS = {module.rpartition(".")[2]: module for modules in GROUPS.values() for module in modules}
"""Module by verb."""

CHANGING = (
    *("failover", "migrate", "rehearse", "upgrade", "build", "start", "restart", "host", "lab", "image", "overlay"),
    *("apply", "vm", "node", "files", "user", "deploy", "adopt"),
)
"""Verbs that may be interrupted in the middle of a change."""

DESCRIPTION = """\
Decouple an HPC cluster's management node: the services that compute nodes need at every moment
run in a small, signed, read-only container; everything else can be switched off at any time."""

EPILOG = """\
examples:
  sms init --profile openhpc -o sms.yaml            write a commented site file
  sms config check                                  every problem in it, with its line
  sms build                                         build, sign and verify the image
  sms start --host host-a                           start it there and wait until it serves
  sms status                                        probe every service in its own protocol
  sms lab demo                                      try everything on a single machine

exit status: 0 success, 1 failed, 2 usage or configuration error, 3 refused before anything was
changed, 4 done but unhealthy, 5 rolled back, 130 interrupted

--site, --state, --quiet and --debug are valid before the verb and after it."""


GLOBAL_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--site",),
        {"type": Path, "metavar": "FILE", "help": "the site file (default: $SMS_SITE, ./sms.yaml, /etc/sms/sms.yaml)"},
    ),
    (("--state",), {"type": Path, "metavar": "DIR", "help": "folder of images, overlays and leases"}),
    (("-q", "--quiet"), {"action": "store_true", "help": "print only errors, warnings and results, no progress"}),
    (("--debug",), {"action": "store_true", "help": "show the traceback of an error"}),
)
"""Options of every verb: their names, and how argparse reads them."""


MEANT = {"podman": ("quadlet", "compose"), "k8s": ("kubernetes",)}
"""Choices by another name of them."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors have a hint."""

    def error(self, message: str) -> None:  # type: ignore[override]
        hint = self._nearest(message) or f"{self.prog} --help"
        if message.startswith("argument VERB"):
            message = message.partition(" (choose from")[0]  # the list of all verbs hides the hint
        self.exit(2, f"{self.prog}: {message}\n  hint: {hint}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; unknown arguments are reported by the parser of the selected action."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            self._deepest(found).error(f"unrecognized arguments: {' '.join(rest)}")
        return found

    def _deepest(self, found: argparse.Namespace) -> argparse.ArgumentParser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(getattr(found, action.dest, None) or "")
                if isinstance(chosen, Parser):
                    return chosen._deepest(found)
        return self

    def _nearest(self, message: str) -> str:
        """Return a hint: the closest choice for an invalid one, or how to pass a value that looks like an option."""
        if given := re.search(r"argument (--group|--mac): expected one argument", message):
            return f"{self.prog} --help; a value that begins with a dash is written {given[1]}=-VALUE"
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        known = re.findall(r"'([^']+)'", found[2]) if found else []
        begun = [one for one in known if found and found[1] and one.startswith(found[1])]
        begun = begun or [one for one in MEANT.get(found[1] if found else "", ()) if one in known]
        import difflib

        near = begun or (difflib.get_close_matches(found[1], known, 1) if found else [])
        return f"did you mean {' or '.join(near[:3])}?" if near else ""


class _SummaryKnown(Exception):
    """A verb has added its summary; its parser is not needed."""


def _end_at_summary(**options: Any) -> NoReturn:
    raise _SummaryKnown


def make_parser(only: str | None = None, *, summaries: bool = False) -> argparse.ArgumentParser:
    """Return the parser; completion and the man page are generated from it, too.

    Args:
        only: add only this verb: the parsers of all verbs take as long as `sms status`.
        summaries: add only names and summaries of verbs: the parser has the help of `sms` and can parse nothing else.
    """
    parser = Parser(prog="sms", description=DESCRIPTION, epilog=EPILOG, formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=f"sms {__version__}")
    for names, options in GLOBAL_OPTIONS:
        parser.add_argument(*names, **options)
    made: Any = _end_at_summary if summaries else Parser  # called when the summary has been added
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs", parser_class=made)
    for name in (only,) if only else VERBS:
        with suppress(_SummaryKnown):
            importlib.import_module(f"appliance.cli.{VERBS[name]}").add(verbs)
    for below in verbs.choices.values():
        _complete(below)
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Let a verb and its actions accept the global options, which only the help of `sms` lists; describe actions."""
    for names, options in GLOBAL_OPTIONS:
        if free := [name for name in names if name not in parser._option_string_actions]:
            shown = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(*free, dest=names[-1].lstrip("-"), **{**options, **shown})
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, below in action.choices.items():
                below.description = below.description or f"{summaries[name][:1].upper()}{summaries[name][1:]}."
                _complete(below)


def find_verb(argv: Sequence[str]) -> str | None:
    """Return the verb of the arguments; None if it is not obvious and the whole parser is needed."""
    words = iter(argv)
    for word in words:
        if word in ("--site", "--state"):
            next(words, None)
        elif word in ("-h", "--help", "--version"):
            return None
        elif not word.startswith("-"):
            return word if word in VERBS else None
    return None


def _names_no_verb(argv: Sequence[str]) -> bool:
    """Return whether the arguments only ask for the help or the version of `sms` itself."""
    return all(word in ("-h", "--help", "--version", "-q", "--quiet", "--debug") for word in argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit status."""
    # There are no plugins; searching for them takes as long as reading the catalogue.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    _open_standard_streams()
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser(find_verb(argv), summaries=_names_no_verb(argv))
    arguments = argparse.Namespace(verb="", json=False)
    debug = "--debug" in (argv[: argv.index("--")] if "--" in argv else argv)
    try:
        try:
            with standard_output():
                arguments = parser.parse_args(argv)
        except SystemExit:
            _flush()
            raise
        if not arguments.verb:
            with standard_output():
                parser.print_help()
            return 2
        signal.signal(signal.SIGTERM, _interrupt)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # unless started by nohup
            signal.signal(signal.SIGHUP, _interrupt)
        status: int = arguments.run(arguments)
        _flush()
    except SmsError as error:
        if debug:
            _print_traceback()
        return show_error(arguments, error, error.status)
    except KeyboardInterrupt as error:
        changing = arguments.verb in CHANGING
        note = "; what it had begun is completed, rolled back, or resumed by the next run" if changing else ""
        sys.stderr.write("\n")
        return show_error(arguments, SmsError(f"interrupted{f'; {error}' if str(error) else note}"), 130)
    except BrokenPipeError:
        # The output pipe was closed, as in `sms logs | head`.
        _discard_output()
        return 141
    except OSError as error:
        if debug:
            _print_traceback()
        _discard_output()
        hint = getattr(error, "hint", "") or disk_hint(error.strerror or "")
        return show_error(arguments, SmsError(_os_error_text(error), hint=hint), SmsError.status)
    return status


def _print_traceback() -> None:
    import traceback  # takes as long as the parser of a verb

    traceback.print_exc()


def _open_standard_streams() -> None:
    """Open missing standard streams, or the next opened file would take their number; guard them."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Some locales lack characters such as the micro sign.
        sys.stdout.reconfigure(errors="backslashreplace")
    guard_standard_streams()


def _flush() -> None:
    with standard_output():
        pass


def _discard_output() -> None:
    """Redirect a broken standard output to /dev/null, or Python would try to flush it again at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _os_error_text(error: OSError) -> str:
    """Return the text of an error of the system, with the file that it is about."""
    reason = (error.strerror or str(error)).lower()
    return f"{error.filename}: {reason}" if error.filename else reason


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def show_error(arguments: argparse.Namespace, error: SmsError, status: int) -> int:
    """Print an error on standard error, with ``--json`` also as the document of the result; return ``status``."""
    sys.stderr.write(f"sms: {error.message}\n")
    if error.hint:
        sys.stderr.write(f"  hint: {error.hint}\n")
    if getattr(arguments, "json", False) and not getattr(sys.stdout, "used", False):
        from appliance.cli.screen import print_json

        with suppress(OSError):  # standard output may be what failed
            print_json({"error": {"status": status, "message": error.message, "hint": error.hint}})
        _discard_output()
    return status
