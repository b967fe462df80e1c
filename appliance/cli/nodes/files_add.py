"""``sms files add``."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, verb
from appliance.cli.nodes.files_common import add_later, add_wait, audience, finish, open_vm

if TYPE_CHECKING:
    from appliance.operations.nodes.files import MasterOptions

EXAMPLES = """\
  sms files add /etc/motd motd                                  for all nodes
  sms files add /etc/motd motd --services                       also for the services container
  sms files add /etc/gres.conf gres.conf --group gpu            for nodes of a group
  sms files add /etc/issue issue.j2 --template                  with {{ node.name }} in it
  sms files add /etc/secret key --mode 0600 --owner root:root   with other permissions
  generate | sms files add /etc/generated -                     from standard input"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    text = (
        "Upload a file as the newest version of a master file, and notify its clients. Options that are not given\n"
        "keep the value of the current version. Files that belong to the site should be in the site file\n"
        "(`provisioning.files`), for `sms files push`. Files that slurmctld has, too, are refused: `sms apply` judges\n"
        "what they cost jobs. Accounts are judged as `sms files push` judges them."
    )
    parser = verb(actions, "add", "add a master file, or a new version of one", text, EXAMPLES)
    parser.add_argument("path", metavar="PATH", help="its path on the clients")
    parser.add_argument("source", metavar="FILE", help="file with the content; - is standard input")
    parser.add_argument("--mode", metavar="MODE", help="permissions (default: unchanged; 0644 for a new file)")
    parser.add_argument("--owner", metavar="USER[:GROUP]", help="owner (default: unchanged; root:root for a new file)")
    two = argparse.BooleanOptionalAction
    parser.add_argument("--template", action=two, help="whether it is a Jinja template: docs/files.md")
    parser.add_argument("--node", action="append", metavar="NODES", help="for these nodes: node[001-010]")
    parser.add_argument("--group", action="append", metavar="LABEL", help="for nodes of this group")
    parser.add_argument("--all-nodes", action="store_true", help="for all nodes, the default of a new file")
    parser.add_argument("--services", action=two, help="whether it is also for the services container")
    parser.add_argument(
        "--force", action="store_true", help="accept unknown nodes and groups; remove any users and groups"
    )
    add_later(parser)
    add_wait(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Add it."""
    from appliance.cli.screen import out
    from appliance.operations.nodes.files import (
        find_master,
        is_pushed,
        list_masters,
        make_master,
        need_known,
        put_master,
        read_source,
        refuse_judged,
    )
    from appliance.operations.services.pushes import Pushes

    options = _options(arguments)
    make_master(arguments.path, b"", options, None)  # reject a forbidden path before the VM is contacted
    refuse_judged(arguments.path)
    data = sys.stdin.buffer.read() if arguments.source == "-" else read_source(Path(arguments.source))
    cluster, api = open_vm(arguments)
    before = find_master(api, arguments.path)
    master = make_master(arguments.path, data, options, before)
    if options.nodes is not None and not arguments.force:  # unchanged lists may contain nodes that were removed since
        need_known(cluster, api, master)
    Pushes(cluster, api, "files add", arguments.force).judge([master], list_masters(api), dry_run=False)
    done = put_master(api, master)
    words = f"version {done['version']}" if done["changed"] else f"unchanged, version {done['version']}"
    facts = f"{done['mode']} {done['owner']}:{done['group']}, for {audience(done)}"
    out.print(f"{arguments.path}: {words}: {facts}", markup=False)
    if is_pushed(cluster, arguments.path, done):
        out.print("  the site file also defines it: the next `sms files push` restores that version", markup=False)
    return finish(arguments, cluster, api) if done["changed"] else 0


def _options(arguments: argparse.Namespace) -> MasterOptions:
    from appliance.config.hostlist import HostListError, expand
    from appliance.errors import ConfigError
    from appliance.operations.nodes.files import MasterOptions

    options = MasterOptions(template=arguments.template, services=arguments.services)
    if arguments.mode is not None:
        if not re.fullmatch(r"0?[0-7]{3}", arguments.mode):
            raise ConfigError(f"--mode: invalid mode {arguments.mode!r}", hint="write it as 0644")
        options = replace(options, mode=f"0{arguments.mode[-3:]}")
    if arguments.owner is not None:
        owner, _, group = arguments.owner.partition(":")
        options = replace(options, owner=owner, group=group or owner)
    if arguments.all_nodes and (arguments.node or arguments.group):
        raise ConfigError("--all-nodes excludes --node and --group", hint="omit one of them")
    if arguments.all_nodes or arguments.node or arguments.group:
        try:
            nodes = [name for words in arguments.node or () for name in expand(words)]
        except HostListError as error:
            raise ConfigError(f"--node {error}", hint="write node[001-450]") from None
        options = replace(options, nodes=nodes, groups=arguments.group or [])
    return options
