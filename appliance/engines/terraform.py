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


TIMEOUT = "24h"
"""Of a creation or change: a database may recover or be converted for hours. What is late, the next run makes again."""


def terraform_files(engine: str, modules: Mapping[str, str], after: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return root module and modules by path. The root module can be one of another configuration.

    Args:
        engine: ``kubernetes`` or ``nomad``.
        modules: the file that each module reads, relative to the root module.
        after: modules that each depends on.
    """
    source, version = PROVIDERS[engine]
    required: dict[str, Value] = {engine: {"source": source, "version": version}}
    needs = Block("terraform", (), {}, (Block("required_providers", (), required),))
    root = [needs]
    for name, file in modules.items():
        fields: dict[str, Value] = {"source": f"./modules/{name}", "file": Raw(f"${{path.module}}/{file}")}
        if after.get(name):
            # Created after what it needs is ready, and destroyed before.
            fields["depends_on"] = [Expression(f"module.{other}") for other in after[name]]
        root.append(Block("module", (name,), fields))
    made = {"main.tf": HEADER + write(root)}
    variable = Block("variable", ("file",), {"type": Expression("string"), "description": "File of the workload."})
    for name in modules:
        made[f"modules/{name}/main.tf"] = HEADER + write([needs, variable, _resource(engine)])
    return made


def _resource(engine: str) -> Block:
    """Return the resource of a module. It is there when its service is ready."""
    timeouts = Block("timeouts", (), {"create": TIMEOUT, "update": TIMEOUT})
    if engine == "nomad":
        return Block(
            "resource", ("nomad_job", "this"), {"jobspec": Expression("file(var.file)"), "detach": False}, (timeouts,)
        )
    documents = (
        '{ for object in [for text in split("\\n---\\n", file(var.file)) : yamldecode(text)] : '
        '"${object.kind}/${object.metadata.name}" => object }'
    )
    wait = Block(
        "dynamic",
        ("wait",),
        {"for_each": Expression('each.value.kind == "StatefulSet" ? [true] : []')},
        (Block("content", (), {"rollout": Expression("wait.value")}),),
    )
    return Block(
        "resource",
        ("kubernetes_manifest", "this"),
        {"for_each": Expression(documents), "manifest": Expression("each.value")},
        (wait, timeouts),
    )


def order(deployment: Deployment, names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the modules that each depends on. ``names``: module by workload."""
    return {names[one.name]: [names[other] for other in one.after if other in names] for one in deployment.workloads}
