"""``sms image build, push, rollback, profiles``: images of diskless nodes."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_json, open_site, positive, print_result


def add(actions: Verbs) -> None:
    """Add the parsers to ``sms image``."""
    built = actions.add_parser("build", help="build and seal the image of a profile")
    _add_profile(built)
    built.add_argument("--force", action="store_true", help="build even if the same image exists")
    built.add_argument("-n", "--dry-run", action="store_true", help="print its inputs and its key, and build nothing")
    built.set_defaults(run=run_build)
    pushed = actions.add_parser("push", help="upload a node image to the provisioning VM")
    _add_profile(pushed)
    pushed.add_argument(
        "--keep", type=positive, default=3, metavar="N", help="number of its images to keep in the VM (3)"
    )
    pushed.set_defaults(run=run_push)
    back = actions.add_parser("rollback", help="let nodes boot the previous image again")
    _add_profile(back)
    back.set_defaults(run=run_rollback)
    shown = actions.add_parser("profiles", help="list the site's node images and the groups that boot them")
    add_json(shown)
    shown.set_defaults(run=run_profiles)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", metavar="PROFILE", help="node profile, see `sms image profiles`")
    add_json(parser)


def run_build(arguments: argparse.Namespace) -> int:
    """Build a node image."""
    from appliance.operations.nodes.image import build_node, plan_image

    cluster = open_site(arguments)
    if arguments.dry_run:
        plan = plan_image(cluster, arguments.profile)
        packages = (f"{name} {version}" for name, version in sorted(plan.inputs.versions.items()))
        lines = [f"# key: {plan.key}", f"# arguments: {plan.arguments}", *packages]
        print_result(arguments, {"key": plan.key, **plan.about}, lines)
        return 0
    image = build_node(cluster, arguments.profile, force=arguments.force)
    lines = [
        f"{'built' if image.fresh else 'up to date:'} {image.path}",
        f"  {image.packages} packages, {image.bytes >> 20} MiB; `sms image push {image.profile}`",
    ]
    print_result(arguments, image, lines)
    return 0


def run_push(arguments: argparse.Namespace) -> int:
    """Upload the current node image to the VM."""
    from appliance.operations.nodes.push import push_node

    cluster = open_site(arguments)
    pushed = push_node(cluster, arguments.profile, keep=arguments.keep)
    what = f"{pushed.sent_bytes >> 20} MiB sent" if pushed.fresh else "it already existed"
    lines = [f"nodes of {pushed.profile} boot {pushed.digest[:12]} from now on: {what}"]
    if pushed.removed:
        lines.append(f"  removed from the VM: {', '.join(one[:12] for one in pushed.removed)}")
    print_result(arguments, pushed, lines)
    return 0


def run_rollback(arguments: argparse.Namespace) -> int:
    """Let the VM serve the previous image."""
    from appliance.operations.nodes.push import rollback_node

    cluster = open_site(arguments)
    reply = rollback_node(cluster, arguments.profile)
    text = f"nodes of {arguments.profile} boot {reply['current'][:12]} again, not {reply['previous'][:12]}"
    print_result(arguments, reply, [f"{text}; running nodes keep theirs until they reboot"])
    return 0


def run_profiles(arguments: argparse.Namespace) -> int:
    """List the site's profiles."""
    from appliance.operations.nodes.image import list_profiles

    profiles = list_profiles(open_site(arguments))
    lines = []
    for each in profiles:
        groups = ", ".join(each.groups) or "all others"
        state = each.current[:12] if each.current else "not built"
        lines.append(f"{each.profile:<16} {state:<12}  {each.kernel:<7}  {groups}")
    print_result(arguments, profiles, lines)
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """List node images of this host, and of the VM if it answers."""
    from appliance.operations.nodes.image import list_nodes
    from appliance.operations.nodes.push import query_images
    from appliance.units import format_time

    cluster = open_site(arguments)
    images, (there, why) = list_nodes(cluster), query_images(cluster)
    lines = ["node images on this host"]
    for image in images:
        facts = f"{image.digest[:12]}  {format_time(image.built)}  {image.bytes >> 20:>5} MiB"
        lines.append(f"{'*' if image.current else ' '} {image.profile:<16} {facts}")
    if not images:
        lines.append("  none; `sms image build PROFILE` builds one")
    lines.append(f"node images in the provisioning VM{f': {why}' if why else ''}")
    for each in there:
        mark = "*" if each["current"] else "-" if each["previous"] else " "
        lines.append(f"{mark} {each['profile']:<16} {each['digest'][:12]}  {each['bytes'] >> 20:>5} MiB")
    print_result(arguments, {"here": images, "vm": there, "vm_error": why}, lines)
    return 0


def run_prune(arguments: argparse.Namespace) -> int:
    """Remove old node images of this host."""
    from appliance.operations.nodes.image import prune_nodes

    word = "would remove" if arguments.dry_run else "removed"
    images = list(prune_nodes(open_site(arguments), arguments.keep, dry_run=arguments.dry_run))
    lines = [f"{word} {image.profile} {image.digest[:12]}, {image.bytes >> 20} MiB" for image in images]
    print_result(arguments, images, lines or ["nothing to remove"])
    return 0
