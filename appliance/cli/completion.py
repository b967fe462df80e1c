"""``sms completion``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable

from appliance.cli.common import Verbs, verb

EXAMPLES = """\
  sms completion bash >/etc/bash_completion.d/sms
  sms completion zsh  >/usr/share/zsh/site-functions/_sms
  sms completion fish >/etc/fish/completions/sms.fish
  sms completion hosts    the words that the scripts complete after --host"""

SHELLS = ("bash", "zsh", "tcsh", "fish")
WORDS_OF = {
    ("host", "NAME"): "hosts",
    ("host", "HOST"): "hosts",
    ("to", "HOST"): "hosts",
    ("name", "LOG"): "services",
    ("services", "SERVICE"): "services",
    ("snapshot", "NUMBER"): "snapshots",
    ("snapshots", "NUMBER"): "snapshots",
    ("numbers", "NUMBER"): "snapshots",
    ("before", "A"): "snapshots",
    ("after", "B"): "snapshots",
    ("profile", "PROFILE"): "profiles",
    ("profile", "NAME"): "starters",
}
"""What completes an argument, by its destination and metavar."""
# The words are those of the site that the command line names.
SITE = {
    "bash": """\
_sms_words() {
  local i=1 site=()
  while ((i < COMP_CWORD)); do
    if [[ ${COMP_WORDS[i++]} == --site ]]; then
      [[ ${COMP_WORDS[i]} != = ]] || ((i++))
      site=(--site "${COMP_WORDS[i]/#\\~/$HOME}")
    fi
  done
  sms "${site[@]}" completion "$1" 2>/dev/null
}
""",
    "zsh": """\
_sms_words() {
  local i=1 site=()
  while ((i++ < CURRENT - 1)); do
    case $words[i] in
      (--site) site=(--site ${words[i+1]/#\\~/$HOME}) ;;
      (--site=*) site=(${words[i]}) ;;
    esac
  done
  sms $site completion $1 2>/dev/null
}
""",
}
PREAMBLE = {
    "bash": '_sms_{what}() {{ compgen -W "$(_sms_words {what})" -- "$1"; }}\n',
    "zsh": '_sms_{what}() {{ compadd -- ${{(f)"$(_sms_words {what})"}} }}\n',
}
CALL = {"bash": "_sms_{what}", "zsh": "_sms_{what}", "fish": "(sms completion {what} 2>/dev/null)"}


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    text = "Print completion for a shell, or the words of the site that it completes, one a line."
    parser = verb(verbs, "completion", "print completion for a shell", text, EXAMPLES)
    parser.add_argument(
        "shell",
        metavar="SHELL",
        choices=(*SHELLS, *LISTS),
        help=f"{', '.join(SHELLS)}; or {', '.join(LISTS)}",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the completion script, or words."""
    if arguments.shell in LISTS:
        sys.stdout.writelines(f"{word}\n" for word in LISTS[arguments.shell](arguments))
        return 0
    import shtab

    from appliance.cli import make_parser

    parser = make_parser()
    _mark(parser)
    preamble = SITE.get(arguments.shell, "") + "".join(
        PREAMBLE.get(arguments.shell, "").format(what=what) for what in LISTS
    )
    sys.stdout.write(shtab.complete(parser, shell=arguments.shell, preamble=preamble))
    return 0


def _mark(parser: argparse.ArgumentParser) -> None:
    """Name what completes each argument: words of the site, or files and folders."""
    import shtab

    files = {"FILE": shtab.FILE, "CAPTURE": shtab.FILE, "DIR": shtab.DIRECTORY}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                if below.prog.split()[1] != "lab":  # its hosts are not those of a site
                    _mark(below)
        elif what := WORDS_OF.get((action.dest, str(action.metavar))):
            action.complete = {shell: text.format(what=what) for shell, text in CALL.items()}  # type: ignore[attr-defined]
        elif action.metavar in files:
            action.complete = files[str(action.metavar)]  # type: ignore[attr-defined]


def _hosts(arguments: argparse.Namespace) -> Iterable[str]:
    from appliance.cli.common import open_site

    return [host.name for host in open_site(arguments).site.admin_hosts]


def _services(arguments: argparse.Namespace) -> Iterable[str]:
    from appliance.cli.common import open_site
    from appliance.operations.services.inside import OTHER_LOGS

    return [*(service.name for service in open_site(arguments).services), *OTHER_LOGS]


def _snapshots(arguments: argparse.Namespace) -> Iterable[str]:
    from appliance.cli.common import open_site
    from appliance.operations.snapshots.list import list_snapshots

    cluster = open_site(arguments)
    return [str(each["number"]) for each in list_snapshots(cluster, cluster.target(None)).snapshots] + ["latest"]


def _profiles(arguments: argparse.Namespace) -> Iterable[str]:
    from appliance.cli.common import open_site
    from appliance.operations.nodes.image import list_profiles

    return [each.profile for each in list_profiles(open_site(arguments))]


def _starters(arguments: argparse.Namespace) -> Iterable[str]:
    from appliance.operations.site.init import list_profiles

    return list_profiles()


LISTS: dict[str, Callable[[argparse.Namespace], Iterable[str]]] = {
    "hosts": _hosts,
    "services": _services,
    "snapshots": _snapshots,
    "profiles": _profiles,
    "starters": _starters,
}
"""Words of the site, and starter files of `sms init`, by what they are."""
