"""A check of network attachments, by hand, from the public documents: no package has their schemas.

- The object: the custom resource definition of "Kubernetes Network Custom Resource Definition De-facto Standard",
  version 1.3, 3.1 (Network Plumbing Working Group, github.com/k8snetworkplumbingwg/multi-net-spec), as Multus installs
  it (github.com/k8snetworkplumbingwg/multus-cni, deployments/multus-daemonset.yml).
- The annotation: 4.1.2, the JSON list; its keys: 4.1.2.1.
- The configuration: a list of plugins (CNI specification, section 1), with the fields that the documents of the
  reference plugins have (cni.dev/plugins/current/main/macvlan, main/bridge, ipam/static).
"""

from __future__ import annotations

import json
from ipaddress import ip_interface, ip_network
from typing import Any

import jsonschema

ANNOTATION = "k8s.v1.cni.cncf.io/networks"
VERSION, KIND = "k8s.cni.cncf.io/v1", "NetworkAttachmentDefinition"


def exact(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """Schema of an object with these fields and no others."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **optional},
        "additionalProperties": False,
    }


TEXT, YES_OR_NO, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
LINK = {"type": "string", "pattern": r"^(?!\.{1,2}$)[^/:\s\u0000-\u001f]{1,15}$"}
"""What Linux accepts as the name of an interface (dev_valid_name in net/core/dev.c)."""
MAC = {"type": "string", "pattern": r"^[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}$"}
FILLED = {"type": "array", "minItems": 1}

DEFINITION = exact(
    {
        "apiVersion": {"const": VERSION},
        "kind": {"const": KIND},
        "metadata": exact({"name": NAME}, namespace=NAME, labels=TEXTS, annotations=TEXTS),
    },
    spec=exact({}, config=TEXT),
)
SELECTION = {
    **FILLED,
    "items": {
        **exact(
            {"name": NAME},
            namespace=NAME,
            ips={**FILLED, "items": TEXT},
            mac=MAC,
            interface=LINK,
            **{"cni-args": {"type": "object"}, "portMappings": FILLED, "bandwidth": {"type": "object"}},
            **{"default-route": {**FILLED, "items": TEXT}, "infiniband-guid": TEXT},
        ),
        "patternProperties": {r"\.": {}},  # keys of others have a full stop
    },
}
STATIC = exact(
    {"type": {"const": "static"}},
    addresses={**FILLED, "items": exact({"address": TEXT}, gateway=TEXT)},
    routes={**FILLED, "items": exact({"dst": TEXT}, gw=TEXT)},
    dns={"type": "object"},
)
COMMON = {"capabilities": {"type": "object", "additionalProperties": YES_OR_NO}, "ipam": STATIC, "mtu": COUNT}
MACVLAN = exact(
    {"type": {"const": "macvlan"}, "master": LINK},
    mode={"enum": ["bridge", "private", "vepa", "passthru"]},
    mac=MAC,
    linkInContainer=YES_OR_NO,
    **COMMON,
)
BRIDGE = exact(
    {"type": {"const": "bridge"}, "bridge": LINK},
    vlan={**COUNT, "maximum": 4094},
    **dict.fromkeys(
        ("isGateway", "isDefaultGateway", "forceAddress", "ipMasq", "hairpinMode", "promiscMode", "macspoofchk"),
        YES_OR_NO,
    ),
    **COMMON,
)
CONFIGURATION = exact(
    {
        "cniVersion": {"enum": ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]},
        "name": {"type": "string", "pattern": r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$"},
        "plugins": {**FILLED, "items": {"oneOf": [MACVLAN, BRIDGE]}},
    },
    disableCheck=YES_OR_NO,
)


def check_definition(value: dict[str, Any]) -> dict[str, Any]:
    """Check a NetworkAttachmentDefinition, strictly; return its configuration.

    Raises:
        jsonschema.ValidationError, ValueError: it is invalid.
    """
    jsonschema.validate(value, DEFINITION)
    found: dict[str, Any] = json.loads(value["spec"]["config"])
    jsonschema.validate(found, CONFIGURATION)
    if found["name"] != value["metadata"]["name"]:
        raise ValueError("3.4.3: name of the object and of the network differ")
    for plugin in found["plugins"]:
        for route in plugin["ipam"].get("routes", ()):
            ip_network(route["dst"])
            ip_interface(route["gw"])
    return found


def check_selection(text: str) -> list[dict[str, Any]]:
    """Check the value of a pod's annotation, strictly; return the selected networks.

    Raises:
        jsonschema.ValidationError, ValueError: it is invalid.
    """
    found: list[dict[str, Any]] = json.loads(text)
    jsonschema.validate(found, SELECTION)
    for one in found:
        for address in one.get("ips", ()):
            ip_interface(address)
    return found


def check_attachments(objects: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Check all objects of an export; return the networks that each workload's pod selects, by its name.

    Each is defined in the same namespace, and its plugins have what the pod requests (4.1.2.1.3.2, 4.1.2.1.4.2).
    """
    networks = {one["metadata"]["name"]: check_definition(one) for one in objects if one["kind"] == KIND}
    chosen = {}
    for one in objects:
        annotations = one.get("spec", {}).get("template", {}).get("metadata", {}).get("annotations", {})
        if ANNOTATION in annotations:
            chosen[one["metadata"]["name"]] = check_selection(annotations[ANNOTATION])
    for each in (network for listed in chosen.values() for network in listed):
        plugins = networks[each["name"]]["plugins"]
        for key in {"ips", "mac"} & each.keys():
            if not any(plugin.get("capabilities", {}).get(key) for plugin in plugins):
                raise ValueError(f"no plugin of {each['name']} accepts {key}")
    return chosen
