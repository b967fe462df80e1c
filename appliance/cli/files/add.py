"""``sms files add``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from appliance.cli.common import verb
from appliance.cli.files.common import add_later, add_wait, finish, open_vm

EXAMPLES = """\
  sms files add /etc/motd motd                                  for all nodes
  sms files add /etc/motd motd --services                       for the services container as well
  sms files add /etc/gres.conf gres.conf --group gpu            for nodes of a group
  sms files add /etc/issue issue.j2 --template                  {{ node.name }} is in it
  sms files add /etc/secret key --mode 0600 --owner root:root   with other permissions
  generate | sms files add /etc/generated -                     from standard input"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    text = (
        "Make a file the newest version of a master file, and wake its clients. Files that belong to the site stand\n"
        "better in the site file (`provisioning.files`), from where `sms files push` brings them."
    )
    parser = verb(actions, "add", "add a master file, or a new version of one", text, EXAMPLES)
    parser.add_argument("path", metavar="PATH", help="where it is on the clients")
    parser.add_argument("source", metavar="FILE", help="what is in it; - is standard input")
    parser.add_argument("--mode", default="0644", metavar="MODE", help="its permissions (default: 0644)")
    parser.add_argument("--owner", default="root:root", metavar="USER[:GROUP]", help="whose it is (default: root:root)")
    parser.add_argument("--template", action="store_true", help="it is a Jinja template: docs/files.md")
    parser.add_argument("--node", action="append", default=[], metavar="NODES", help="for these nodes: node[001-010]")
    parser.add_argument("--group", action="append", default=[], metavar="LABEL", help="for nodes of this group")
    parser.add_argument("--services", action="store_true", help="for the services container as well")
    add_later(parser)
    add_wait(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Add it."""
    from appliance.cli.screen import out
    from appliance.config.hostlist import expand
    from appliance.errors import ConfigError
    from appliance.flow.files import make_master, put_master

    owner, _, group = arguments.owner.partition(":")
    try:
        mode = int(arguments.mode, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise ConfigError(f"--mode: {arguments.mode} is no mode of a file", hint="write it as 0644")
    data = sys.stdin.buffer.read() if arguments.source == "-" else Path(arguments.source).read_bytes()
    master = make_master(
        arguments.path,
        data,
        mode=f"0{mode:03o}",
        owner=owner,
        group=group or owner,
        template=arguments.template,
        nodes=[name for words in arguments.node for name in expand(words)],
        groups=arguments.group,
        services=arguments.services,
    )
    cluster, api, shown = open_vm(arguments)
    done = put_master(api, master)
    words = f"version {done['version']}" if done["changed"] else f"nothing new, it is version {done['version']} already"
    out.print(f"{arguments.path}: {words}", markup=False)
    return finish(arguments, cluster, api, shown) if done["changed"] else 0
