"""``sms vm console``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, open_site, verb
from appliance.cli.vm.common import add_vm_host

EXAMPLES = """\
  sms vm console          attach to the serial console; Ctrl-] detaches
  sms vm console --log    print its output since the last boot, or of the last failed start"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "console",
        "the VM's serial console",
        "Attach the terminal to the VM's serial console, as root. Ctrl-] detaches; the VM keeps running.",
        EXAMPLES,
    )
    add_vm_host(parser)
    parser.add_argument("--log", action="store_true", help="print its output since the last boot")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Attach to it, or print its log."""
    from appliance.cli.edge import write_data
    from appliance.cli.screen import err
    from appliance.operations.vm.inside import attach_console, find_console, need_running, read_console
    from appliance.operations.vm.vm import find_vm

    cluster = open_site(arguments)
    if arguments.log:
        write_data(read_console(cluster, find_console(cluster, arguments.host)))
        return 0
    host = find_vm(cluster, arguments.host)
    need_running(cluster, host)
    err.print("Ctrl-] detaches from the console; Enter shows a prompt", markup=False)
    return attach_console(cluster, host)
