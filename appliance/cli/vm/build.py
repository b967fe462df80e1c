"""``sms vm build``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_json, open_site, print_result, verb

EXAMPLES = """\
  sms vm build             build, unless an image of the same packages, definitions and code exists
  sms vm build --force     build even if it exists
  sms vm build --dry-run   print the image's key and whether it exists"""


def add(actions: Verbs) -> None:
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
    from appliance.operations.vm.build import build_vm, is_built, plan_vm

    cluster = open_site(arguments)
    if arguments.dry_run:
        plan = plan_vm(cluster)
        exists = is_built(cluster, plan)
        text = f"{plan.key[:16]}: {'exists' if exists else 'would be built'}"
        print_result(arguments, {"key": plan.key, "built": exists, "versions": dict(plan.versions)}, [text])
        return 0
    built = build_vm(cluster, force=arguments.force)
    state = "built" if built.fresh else "already exists"
    lines = [
        f"{built.folder} {state}: {built.bytes >> 20} MiB, {built.packages} packages",
        f"sealed with {built.signer}, manifest sha256:{built.digest}",
    ]
    print_result(arguments, built, lines)
    return 0
