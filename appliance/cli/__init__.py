"""The command line. One file a verb; each adds its own parser and imports its work when it runs."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from appliance import __version__
from appliance.cli.common import standard_output
from appliance.errors import SmsError

GROUPS: dict[str, tuple[str, ...]] = {
    "what must never stop": ("classify.classify",),
    "the site": ("site.init", "site.config", "site.key", "hosts.host", "hosts.doctor"),
    "the image": ("image.build", "image.verify", "image.image"),
    "the running appliance": tuple(f"services.{name}" for name in ("start", "stop", "status", "logs", "exec", "shell")),
    "what it has written": ("overlay.overlay",),
    "moving it": (
        *("migration.migrate", "migration.failover", "services.guard"),
        *("upgrade.rehearse", "upgrade.upgrade", "services.journal"),
    ),
    "the provisioning VM": ("vm.vm", "nodes.node", "nodes.files", "nodes.user"),
    "trying it out": ("lab.lab", "completion"),
}
"""Modules of this package in the order of the help; each has the name of its verb."""
VERBS = {module.rpartition(".")[2]: module for modules in GROUPS.values() for module in modules}
"""Verb, and its module."""

CHANGING = (
    *("failover", "migrate", "rehearse", "upgrade", "build", "start", "host", "lab", "image", "overlay"),
    *("vm", "node", "files", "user"),
)
"""Verbs that an interruption may meet in the middle of a change."""

DESCRIPTION = """\
Take an HPC cluster's management node apart: what compute nodes need at every moment runs in a
small, signed, read-only container; the rest can be switched off at will."""

EPILOG = """\
examples:
  sms init --profile openhpc -o /etc/sms/sms.yaml   write a commented site file
  sms config check                                  every problem in it, with its line
  sms build                                         build, sign and verify the image
  sms start --host host-a                           start it there and wait until it serves
  sms status                                        ask every service in its own protocol
  sms lab demo                                      all of it on this one machine

exit status: 0 fine, 1 the work failed, 2 usage or configuration, 3 refused before anything was
changed, 4 done but unhealthy, 5 rolled back"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors say where help is."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: {message}\n  hint: {self._nearest(message) or f'{self.prog} --help'}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it; what is unknown is told by the parser of the action that was named."""
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
        """The choice that was meant, where a word is none of them; how a value is written that looks like an option."""
        if given := re.search(r"argument (--group|--mac): expected one argument", message):
            return f"{self.prog} --help; a value that begins with a dash is written {given[1]}=-VALUE"
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = difflib.get_close_matches(found[1], re.findall(r"'([^']+)'", found[2]), 1) if found else []
        return f"did you mean {near[0]}?" if near else ""


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The whole parser; also what completion and the man pages are made from.

    Args:
        only: the one verb that it is for: the parsers of all take as long as `sms status` does.
    """
    parser = Parser(
        prog="sms", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"sms {__version__}")
    parser.add_argument(
        "--site",
        type=Path,
        metavar="FILE",
        help="the site file (default: $SMS_SITE, ./sms.yaml, /etc/sms/sms.yaml)",
    )
    parser.add_argument("--state", type=Path, metavar="DIR", help="where images, overlays and leases lie")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress, errors and results only")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs", parser_class=Parser)
    for name in (only,) if only else VERBS:
        importlib.import_module(f"appliance.cli.{VERBS[name]}").add(verbs)
    return parser


def find_verb(argv: Sequence[str]) -> str | None:
    """The verb that arguments are for; None where that is not plain, and the whole parser is to tell."""
    words = iter(argv)
    for word in words:
        if word in ("--site", "--state"):
            next(words, None)
        elif word in ("-h", "--help", "--version"):
            return None
        elif not word.startswith("-"):
            return word if word in VERBS else None
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; give its exit status."""
    # Nobody plugs anything into our models; looking for who might takes as long as reading the catalogue.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    _open_standard_streams()
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser(find_verb(argv))
    verb, debug = "", "--debug" in argv
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
        verb = arguments.verb
        signal.signal(signal.SIGTERM, _interrupt)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has its way
            signal.signal(signal.SIGHUP, _interrupt)
        status: int = arguments.run(arguments)
        _flush()
    except SmsError as error:
        if debug:
            raise
        _show(error)
        return error.status
    except KeyboardInterrupt as error:
        words = "; what was begun has been undone, or the next run goes on from here" if verb in CHANGING else ""
        sys.stderr.write(f"\nsms: interrupted{f'; {error}' if str(error) else words}\n")
        return 130
    except BrokenPipeError:
        # `sms logs | head`: nobody reads on.
        _give_up_output()
        return 141
    except OSError as error:
        if debug:
            raise
        _give_up_output()
        _show(SmsError(_told(error)))
        return 1
    return status


def _open_standard_streams() -> None:
    """Make sure that there are three: the next file opened would take the place of one that is closed."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale without the sign for micro is no reason to show nothing.
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush() -> None:
    with standard_output():
        pass


def _give_up_output() -> None:
    """Where output goes nowhere, Python would try once more to write it when it ends, and say so."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _told(error: OSError) -> str:
    """An error of the system, with what it was about."""
    reason = (error.strerror or str(error)).lower()
    return f"{error.filename}: {reason}" if error.filename else reason


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _show(error: SmsError) -> None:
    sys.stderr.write(f"sms: {error.message}\n")
    if error.hint:
        sys.stderr.write(f"  hint: {error.hint}\n")
