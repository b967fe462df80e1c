"""Shared by the actions of ``sms vm``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from appliance.cli.common import filled, open_site

if TYPE_CHECKING:
    from appliance.host.base import Host
    from appliance.operations.context import Cluster


def add_vm_host(parser: argparse.ArgumentParser) -> None:
    """Add ``--host``: the admin host that has the VM."""
    parser.add_argument("--host", type=filled, metavar="NAME", help="the admin host (default: the one that has the VM)")


def open_vm(arguments: argparse.Namespace) -> tuple[Cluster, Host]:
    """Return the site's cluster, and the admin host that has the VM."""
    from appliance.operations.vm.vm import find_vm

    cluster = open_site(arguments)
    return cluster, find_vm(cluster, arguments.host)
