"""``sms node import | export``: the whole inventory as a document; import from a State Manager."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError, Problem, Refused, SmsError
from appliance.operations.context import Cluster, read_password
from appliance.operations.nodes.convert import LISTS, Converted, Smd, from_smd, read_document
from appliance.operations.nodes.inventory import node_network, open_inventory, reserved_addresses
from appliance.plan.nodes.scan import check_pattern
from appliance.provision.names import DEFAULTS
from appliance.tools.smd import StateManager

TOKEN = "SMS_SMD_TOKEN"  # noqa: S105 - the name of a variable
LARGEST_B = 256 << 20
NID_PATTERN = "nid%06d"
COLLECTIONS = (
    ("components", "/State/Components", "Components"),
    ("interfaces", "/Inventory/EthernetInterfaces", ""),
    ("endpoints", "/Inventory/RedfishEndpoints", "RedfishEndpoints"),
    ("component_endpoints", "/Inventory/ComponentEndpoints", "ComponentEndpoints"),
    ("groups", "/groups", ""),
)
"""Our name, the path below /hsm/v2, and the key of the list in the answer."""
NODE_KEYS = ("name", *DEFAULTS, "interfaces", "details")
OPTIONAL = ("component_endpoints",)


@dataclass
class ImportChanges:
    """What an import changes: the numbers of new, changed and same entries of each list, and the removed entries."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)


def read_file(path: Path) -> Converted:
    """Read an import document from a file; ``-`` is standard input.

    Raises:
        ConfigError: it cannot be read, is not an inventory, or has unknown keys; names all of them.
    """
    try:
        if str(path) == "-":
            text = sys.stdin.buffer.read(LARGEST_B + 1)
        else:
            with path.open("rb") as file:
                text = file.read(LARGEST_B + 1)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", hint="`sms node export -o FILE` writes one"
        ) from error
    if len(text) > LARGEST_B:
        raise ConfigError(f"{path} is larger than {LARGEST_B >> 20} MiB", hint="is it an export?")
    try:
        document = read_document(text)
    except SmsError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from error
    _check_keys(path, document)
    return Converted(document)


def _check_keys(path: Path, document: Mapping[str, Any]) -> None:
    """Raise ConfigError that names each unknown key of a node."""
    problems = []
    for node in document.get("nodes") or []:
        for word in map(str, node):
            if word in NODE_KEYS:
                continue
            near = get_close_matches(word, NODE_KEYS, 1)
            meant = f"; did you mean {near[0]}?" if near else f": it has {', '.join(NODE_KEYS)}"
            problems.append(Problem(str(path), 0, str(node["name"])[:63], f"a node has no {word[:60]!r}{meant}"))
    if problems:
        raise ConfigError(problems=problems[:20])


def read_smd(cluster: Cluster, url: str, token_file: Path | None, ca: Path | None, pattern: str) -> Converted:
    """Read the inventory of a State Manager.

    Raises:
        ConfigError: the URL or the pattern is invalid, or the token cannot be read or can be read by others.
        Refused: the token is rejected.
        SmsError: the answer is not that of an SMD.
    """
    pattern = check_pattern(pattern or NID_PATTERN)
    token = os.environ.get(TOKEN, "").strip()
    if token_file:
        try:
            token = read_password(token_file)
        except Refused as error:
            hint = f"chmod 600 {token_file}" if token_file.is_file() else f"--token-file FILE, or ${TOKEN}"
            raise ConfigError(error.message, hint=hint) from None
    manager = StateManager(url, token, ca)
    found: dict[str, list[Mapping[str, object]]] = {}
    with cluster.env.progress.step(f"read {url}") as step:
        for name, path, key in COLLECTIONS:

            def seen(size: int, name: str = name) -> None:
                step.detail(f"{name}: {size >> 10} KiB")

            try:
                found[name] = manager.collection(path, key, seen)
            except Refused:
                raise
            except SmsError:
                if name not in OPTIONAL:
                    raise
                found[name] = []
        step.detail(", ".join(f"{len(listed)} {name}" for name, listed in found.items()))
    return from_smd(Smd(**found), pattern=pattern, network=node_network(cluster), reserved=reserved_addresses(cluster))


def compare(cluster: Cluster, converted: Converted, *, replace: bool) -> ImportChanges:
    """Return what the import would change.

    Raises:
        VmUnreachable: the VM does not answer.
    """
    has = open_inventory(cluster).export()
    changes = ImportChanges(notes=list(converted.notes))
    for name, key in LISTS.items():
        before: dict[str, Mapping[str, Any]] = {key(one): one for one in has.get(name) or []}
        given: dict[str, Mapping[str, Any]] = {key(one): one for one in converted.document.get(name) or []}
        if name == "nodes" and not replace:
            # A State Manager's nodes without a NID are named by their xnames.
            known = {one["xname"]: one for one in before.values() if one.get("xname")}
            renamed = {at: known[at] for at in given if at not in before and at in known}
            changes.notes += [f"{one['name']} is renamed {at}" for at, one in renamed.items()]
            before |= renamed
        kinds = Counter(_kind(name, one, before.get(at), replace=replace) for at, one in given.items())
        if kinds:
            changes.counts[name] = dict(kinds)
        if replace:
            changes.gone += [f"{name}: {at}" for at in before if at not in given]
    return changes


def _kind(name: str, one: Mapping[str, Any], before: Mapping[str, Any] | None, *, replace: bool) -> str:
    """Return ``new``, ``same`` or ``changed``. Without ``replace``, the import keeps keys that are not given."""
    if before is None:
        return "new"
    for key, value in one.items():
        if name == "groups" and key == "members" and not replace:
            if not set(value) <= set(before[key]):
                return "changed"
        elif before.get(key) != value:
            return "changed"
    return "changed" if replace and any(_is_cleared(name, key, value, one) for key, value in before.items()) else "same"


def _is_cleared(name: str, key: str, value: Any, one: Mapping[str, Any]) -> bool:
    """Return whether a replacing import clears this key of an entry, because the entry does not have it."""
    if key in one or name in ("components", "interfaces") or (name, key) == ("nodes", "details"):
        return False
    if name != "nodes":
        return value not in ("", [], {}, True)
    if key in ("macs", "interfaces"):
        return bool(value) and "macs" not in one and "interfaces" not in one
    # Members can also be listed in the document's groups; those are compared there.
    return key != "groups" and value != DEFAULTS.get(key)


def import_document(cluster: Cluster, converted: Converted, *, replace: bool) -> int:
    """Import the document in one transaction. Returns the number of its nodes.

    Raises:
        Refused: the document is invalid or conflicts with the inventory; nothing was changed.
    """
    inventory = open_inventory(cluster)
    with cluster.env.progress.step("import into the inventory"):
        count = inventory.import_document(converted.document, replace=replace)
        inventory.refresh()
    return count


def as_yaml(document: Mapping[str, Any]) -> str:
    """Return a document as YAML, in its own order."""
    import yaml

    dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    # Without aliases: the import rejects them.
    dumper = type("Plain", (dumper,), {"ignore_aliases": lambda *_: True})
    return str(yaml.dump(dict(document), Dumper=dumper, sort_keys=False, allow_unicode=True, width=120))


def write_private(text: str, path: Path) -> None:
    """Write a file atomically, readable only by its owner: cloud-init data may contain secrets.

    Raises:
        Refused: the path is a folder.
    """
    from appliance.host.local import Local

    if path.is_dir():
        raise Refused(f"{path} is a folder", hint="give a file in it")
    Local().write(str(path), text.encode(), mode=0o600)
