"""``sms export``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, filled, open_site, print_result, verb

if TYPE_CHECKING:
    from appliance.engines.model import Placement
    from appliance.operations.engines.export import Exported

TARGETS = {
    "nomad": "jobs for `nomad job plan` and `nomad job run`: HCL, and JSON for the API",
    "kubernetes": "YAML for `kubectl apply -k DIR/site`: a base, and an overlay of the site",
    "terraform": "modules for Kubernetes, for Nomad, or for both",
    "quadlet": "units of Podman 5 for one host",
    "compose": "`compose.yaml` for one host",
}
"""Target, and what is written for it."""

STEPS = {
    "nomad": (
        "sms export nomad -o jobs",
        "nomad job plan jobs/slurm-ctl.nomad.hcl",
        "nomad job run jobs/slurm-ctl.nomad.hcl",
    ),
    "kubernetes": (
        "sms export kubernetes -o k8s",
        "kubectl apply -k k8s/site --dry-run=server",
        "kubectl apply -k k8s/site",
    ),
    "terraform": (
        "sms export terraform -o modules",
        "terraform -chdir=modules/nomad init",
        "terraform -chdir=modules/nomad apply",
    ),
    "quadlet": (
        "sms export quadlet -o quadlets          it prints where to copy them, and what to start",
        "sms export quadlet -o quadlets --check  exit status 1 if another export would differ",
    ),
    "compose": (
        "sms export compose -o compose",
        "podman-compose -f compose/compose.yaml up -d",
    ),
}
"""Examples by target: what is done with it."""

EXAMPLES = """\
  sms export kubernetes -o k8s            StatefulSets, ConfigMaps, Services, policies
  sms export nomad -o jobs                jobs of the services, and of munge and slurmd on nodes
  sms export kubernetes -o k8s --check    exit status 1 if another export would differ
  sms export kubernetes -o k8s --json     also where each service runs, and why"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    text = (
        "Write files with which another engine runs the services of the site. The same site gives the same bytes; no "
        "file contains a secret. A service that the engine cannot run is named with the reason. Files in the folder "
        "that are not of an export, or were changed since, are not overwritten."
    )
    parser = verb(verbs, "export", "write files for other engines", text, EXAMPLES)
    targets = parser.add_subparsers(dest="target", required=True, metavar="TARGET")
    for name, what in TARGETS.items():
        about = f"Write {what}. Existing files of others are not overwritten."
        target = verb(targets, name, what, about, "\n".join(f"  {line}" for line in STEPS[name]))
        target.add_argument("-o", "--output", type=filled, required=True, metavar="DIR", help="folder to write into")
        target.add_argument(
            "--check", action="store_true", help="only compare with the folder; exit status 1 if it differs"
        )
        add_json(target)
        target.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write or compare an export."""
    from appliance.operations.engines.export import export

    cluster = open_site(arguments)
    done = export(cluster, arguments.target, Path(arguments.output), check=arguments.check)
    print_result(arguments, done, _lines(done, check=arguments.check))
    return 1 if arguments.check and not done.same else 0


def _lines(done: Exported, *, check: bool) -> Iterator[str]:
    word, gone = ("would be written", "would be removed") if check else ("written", "removed")
    yield f"{done.path}: {done.target}, {done.files} files, {len(done.written)} {word}, {len(done.removed)} {gone}"
    if check:
        yield from (f"  {name}" for name in (*done.written, *done.removed))
        return
    for each in done.placements:
        if each.place == "engine":
            yield f"  {_where(each)}: {each.workload}"
    for each in done.placements:
        if each.place != "engine":
            where = "stays in the services container" if each.place == "gateway" else "not needed"
            yield f"  {_where(each)}: {where}: {each.why}"
    yield from (f"note: {note}" for note in done.notes)


def _where(each: Placement) -> str:
    return f"{each.engine}: {each.service}" if each.engine else each.service
