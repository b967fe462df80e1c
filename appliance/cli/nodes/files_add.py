"""``sms files add``."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from appliance.cli.common import verb
from appliance.cli.nodes.files_common import add_later, add_wait, audience, finish, open_vm

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
        "Make a file the newest version of a master file, and wake its clients. Of one that is there, what is not\n"
        "named stays as it is: mode, owner, for whom. Files that belong to the site stand better in the site file\n"
        "(`provisioning.files`), from where `sms files push` brings them."
    )
    parser = verb(actions, "add", "add a master file, or a new version of one", text, EXAMPLES)
    parser.add_argument("path", metavar="PATH", help="where it is on the clients")
    parser.add_argument("source", metavar="FILE", help="what is in it; - is standard input")
    parser.add_argument("--mode", metavar="MODE", help="its permissions (default: as before, 0644 for a new one)")
    parser.add_argument(
        "--owner", metavar="USER[:GROUP]", help="whose it is (default: as before, root:root for a new one)"
    )
    two = argparse.BooleanOptionalAction
    parser.add_argument("--template", action=two, help="it is a Jinja template, or is none: docs/files.md")
    parser.add_argument("--node", action="append", metavar="NODES", help="for these nodes: node[001-010]")
    parser.add_argument("--group", action="append", metavar="LABEL", help="for nodes of this group")
    parser.add_argument("--all-nodes", action="store_true", help="for all nodes, as a new one is anyway")
    parser.add_argument("--services", action=two, help="for the services container as well, or not any more")
    parser.add_argument("--force", action="store_true", help="although the inventory knows no such node or group")
    add_later(parser)
    add_wait(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Add it."""
    from appliance.cli.screen import out
    from appliance.operations.nodes.files import (
        find_master,
        is_pushed,
        make_master,
        need_known,
        put_master,
        read_source,
    )

    wishes = _wishes(arguments)
    make_master(arguments.path, b"", wishes, None)  # a path that nodes do not take is told before anybody is asked
    data = sys.stdin.buffer.read() if arguments.source == "-" else read_source(Path(arguments.source))
    cluster, api, shown = open_vm(arguments)
    before = find_master(api, arguments.path)
    master = make_master(arguments.path, data, wishes, before)
    if "nodes" in wishes and not arguments.force:  # nodes that were taken out since hold up no new version
        need_known(cluster, api, master)
    done = put_master(api, master)
    words = f"version {done['version']}" if done["changed"] else f"nothing new, it is version {done['version']} already"
    facts = f"{done['mode']} {done['owner']}:{done['group']}, for {audience(done)}"
    out.print(f"{arguments.path}: {words}: {facts}", markup=False)
    if is_pushed(cluster, arguments.path, done):
        out.print("  the site file names it, too: the next `sms files push` brings that one again", markup=False)
    return finish(arguments, cluster, api, shown) if done["changed"] else 0


def _wishes(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is named of it; None is not named."""
    from appliance.config.hostlist import HostListError, expand
    from appliance.errors import ConfigError

    wishes: dict[str, Any] = {"template": arguments.template, "services": arguments.services}
    if arguments.mode is not None:
        if not re.fullmatch(r"0?[0-7]{3}", arguments.mode):
            raise ConfigError(f"--mode: {arguments.mode} is no mode of a file", hint="write it as 0644")
        wishes["mode"] = f"0{arguments.mode[-3:]}"
    if arguments.owner is not None:
        owner, _, group = arguments.owner.partition(":")
        wishes |= {"owner": owner, "group": group or owner}
    if arguments.all_nodes and (arguments.node or arguments.group):
        raise ConfigError("--all-nodes goes with neither --node nor --group")
    if arguments.all_nodes or arguments.node or arguments.group:
        try:
            nodes = [name for words in arguments.node or () for name in expand(words)]
        except HostListError as error:
            raise ConfigError(f"--node {error}", hint="write node[001-450]") from None
        wishes |= {"nodes": nodes, "groups": arguments.group or []}
    return wishes
