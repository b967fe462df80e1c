"""``sms shell``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_host, open_serving, verb


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "shell",
        "open a shell in the services container",
        "Open a shell in the running services container. Changes are kept in its overlay.",
        "  sms shell\n  sms shell --host host-a",
    )
    add_host(parser, serving=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Open the shell."""
    from appliance.operations.services.inside import run_inside

    cluster, host = open_serving(arguments)
    return run_inside(cluster, host, ("bash", "-l"))
