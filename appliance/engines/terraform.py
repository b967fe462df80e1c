"""Terraform modules in front of the other exports: one for each workload, in the order of what they need.

They read files of those exports, which are beside them; no secret is in them, and so none in a state or a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.engines.hcl import Block, Expression, Raw, Value, write
from appliance.engines.model import Deployment

HEADER = "# Written by `sms export terraform`. Changes belong into the site file.\n"
PROVIDERS: Mapping[str, tuple[str, str]] = {
    "kubernetes": ("hashicorp/kubernetes", ">= 2.30"),
    "nomad": ("hashicorp/nomad", ">= 2.4"),
}
"""Source and version of each provider."""


def terraform_files(
    engine: str, modules: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return root module and modules by path.

    Args:
        engine: ``kubernetes`` or ``nomad``.
        modules: files that each module reads, relative to the root.
        after: modules that each depends on.
    """
    source, version = PROVIDERS[engine]
    required: dict[str, Value] = {engine: {"source": source, "version": version}}
    needs = Block("terraform", (), {}, (Block("required_providers", (), required),))
    root = [needs]
    for name, files in modules.items():
        fields: dict[str, Value] = {"source": f"./modules/{name}"}
        fields["files"] = [Raw(f"${{path.root}}/{file}") for file in files]
        if after.get(name):
            # Created after what it needs, and destroyed before.
            fields["depends_on"] = [Expression(f"module.{other}") for other in after[name]]
        root.append(Block("module", (name,), fields))
    made = {"main.tf": HEADER + write(root)}
    variable = Block(
        "variable", ("files",), {"type": Expression("list(string)"), "description": "Files of the workload."}
    )
    for name in modules:
        made[f"modules/{name}/main.tf"] = HEADER + write([needs, variable, _resource(engine)])
    return made


def _resource(engine: str) -> Block:
    if engine == "nomad":
        fields: dict[str, Value] = {
            "for_each": Expression("toset(var.files)"),
            "jobspec": Expression("file(each.value)"),
            "detach": False,
        }
        return Block("resource", ("nomad_job", "this"), fields)
    documents = (
        'merge([for path in var.files : { for text in split("\\n---\\n", file(path)) : '
        '"${yamldecode(text).kind}/${yamldecode(text).metadata.name}" => yamldecode(text) }]...)'
    )
    return Block(
        "resource",
        ("kubernetes_manifest", "this"),
        {"for_each": Expression(documents), "manifest": Expression("each.value")},
    )


def order(deployment: Deployment, names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the modules that each depends on. ``names``: module by workload."""
    return {names[one.name]: [names[other] for other in one.after if other in names] for one in deployment.workloads}
