"""``sms vm build``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_json, open_site, verb

EXAMPLES = """\
  sms vm build             build, unless an image of the same packages, definitions and code exists
  sms vm build --force     build even if it exists
  sms vm build --dry-run   print the image's key and whether it exists"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "build",
        "build and seal the VM's image",
        "Install Debian packages into a folder, configure it with an Ansible playbook, turn it into a disk that UEFI\n"
        "can boot, and seal it with the site's key. It contains no secrets and nothing of this machine.",
        EXAMPLES,
    )
    parser.add_argument("--force", action="store_true", help="build even if the same image exists")
    parser.add_argument("-n", "--dry-run", action="store_true", help="resolve versions, build nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Build it."""
    from dataclasses import asdict

    from appliance.cli.screen import out, print_json
    from appliance.operations.vm.build import build_vm, is_built, plan_vm

    cluster, shown = open_site(arguments)
    if arguments.dry_run:
        plan = plan_vm(cluster, shown)
        exists = is_built(cluster, plan)
        if arguments.json:
            print_json({"key": plan.key, "built": exists, "versions": dict(plan.versions)})
        else:
            out.print(f"{plan.key[:16]}: {'exists' if exists else 'would be built'}", markup=False)
        return 0
    built = build_vm(cluster, shown, force=arguments.force)
    if arguments.json:
        print_json(asdict(built))
        return 0
    state = "built" if built.fresh else "already exists"
    out.print(f"{built.folder} {state}: {built.bytes >> 20} MiB, {built.packages} packages", markup=False)
    out.print(f"sealed with {built.signer}, manifest sha256:{built.digest}", markup=False)
    return 0
