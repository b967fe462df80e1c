"""``sms vm exec``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, duration, verb
from appliance.cli.vm.common import add_vm_host

EXAMPLES = """\
  sms vm exec -- journalctl -b -u sms-provd    run a command; sms exits with its status
  sms vm exec --input -- tee /tmp/x <file      with standard input, at most 4 MiB
  sms vm exec --timeout 10m -- apt-get update"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "exec",
        "run a command in the VM",
        "Run a command in the VM, as root, through its guest agent. Its output is printed when it has ended.",
        EXAMPLES,
    )
    add_vm_host(parser)
    parser.add_argument("--input", action="store_true", help="pass standard input to it")
    parser.add_argument("--timeout", type=duration, default=60.0, metavar="SPAN", help="how long it may take (60s)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command and its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    import sys

    from appliance.cli.screen import err
    from appliance.cli.vm.common import open_vm
    from appliance.errors import ConfigError
    from appliance.operations.vm.inside import run_in_vm

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ConfigError("no command", hint="sms vm exec -- journalctl -b")
    cluster, host = open_vm(arguments)
    given = sys.stdin.buffer.read() if arguments.input else None
    ran = run_in_vm(cluster, host, command, input=given, timeout_s=arguments.timeout)
    sys.stdout.buffer.write(ran.stdout)
    sys.stdout.buffer.flush()
    sys.stderr.buffer.write(ran.stderr)
    sys.stderr.buffer.flush()
    if ran.cut:
        err.print("warning: output is truncated: it is larger than the guest agent keeps", markup=False)
    return ran.status
