"""Which controller belongs to which node, as confirmed on this admin host.

The inventory is in the VM: root there can name any URL as a node's controller. A URL that was confirmed here, and that
the inventory gives differently now, must be confirmed again before a password is sent there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from appliance.errors import Busy, Refused, SmsError, disk_hint
from appliance.operations.context import Cluster
from appliance.operations.vm.client import tls_folder
from appliance.plan.vm.vm import need_vm
from appliance.provision.payloads import Node
from appliance.shared.files import make_folder, replace_file
from appliance.shared.locks import Locked, hold_lock
from appliance.text import one_line

LOCK_WAIT_S = 10.0
"""Seconds to wait for another run that changes the file."""


def local_path(cluster: Cluster, suffix: str) -> Path:
    """Return the path of a file about the site's nodes on this machine.

    It depends on the site's CA: cluster names may not be unique.
    """
    try:
        identity = (tls_folder(cluster) / "ca.pem").read_bytes()
    except OSError:
        identity = str(need_vm(cluster.site).address).encode()
    name = f"{cluster.site.cluster}-{hashlib.sha256(identity).hexdigest()[:12]}{suffix}"
    return cluster.site.state / "nodes" / name


def confirmed_path(cluster: Cluster) -> Path:
    """Return the path of the confirmed controllers."""
    return local_path(cluster, ".controllers")


def read_confirmed(cluster: Cluster) -> dict[str, str]:
    """Return the confirmed controller of each node, by name; empty if none was confirmed on this machine yet.

    Raises:
        Refused: the file cannot be read.
    """
    path = confirmed_path(cluster)
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or not all(isinstance(url, str) for url in found.values()):
            raise ValueError("it is not a table of URLs")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Refused(
            f"cannot read {path}: {error}",
            hint="it has the confirmed controllers of nodes; if it is lost, remove it and check `sms node list`",
        ) from error
    return found


def confirm_controllers(cluster: Cluster, urls: Mapping[str, str]) -> None:
    """Record these controllers as confirmed; an empty URL removes a node's.

    Raises:
        SmsError: the file cannot be written.
    """
    if _merge(read_confirmed(cluster), urls) is not None:
        with _hold_confirmed(cluster):
            _confirm(cluster, urls)


def _merge(before: Mapping[str, str], urls: Mapping[str, str]) -> dict[str, str] | None:
    """Return the confirmed controllers with these; None if nothing changes."""
    after = {name: url for name, url in {**before, **urls}.items() if url}
    return after if after != before else None


@contextmanager
def _hold_confirmed(cluster: Cluster) -> Iterator[None]:
    """Keep other runs from changing the confirmed controllers within the context, in which they are read and written.

    Raises:
        Busy: another run did not end in time.
        SmsError: the file or its lock cannot be written.
    """
    path = confirmed_path(cluster)
    try:
        make_folder(str(path.parent))
        with hold_lock(f"{path}.lock", wait_s=LOCK_WAIT_S, users=True):
            yield
    except Locked:
        raise Busy(f"another sms changes {path}", hint="run this again") from None
    except OSError as error:
        hint = disk_hint(error.strerror or "") or "this must be run as root"
        raise SmsError(f"cannot write {path}: {error.strerror}", hint=hint) from error


def _confirm(cluster: Cluster, urls: Mapping[str, str]) -> None:
    after = _merge(read_confirmed(cluster), urls)
    if after is not None:
        replace_file(str(confirmed_path(cluster)), json.dumps(after, indent=1, sort_keys=True).encode())


def changed_controllers(cluster: Cluster, nodes: Sequence[Node]) -> dict[str, tuple[str, str]]:
    """Return the nodes whose controller differs from the confirmed one: its URL before, and now."""
    known = read_confirmed(cluster)
    pairs = {node["name"]: (known.get(node["name"], ""), str(node.get("bmc") or "")) for node in nodes}
    return {name: (before, now) for name, (before, now) in pairs.items() if before and now and before != now}


def describe_changes(changed: Mapping[str, tuple[str, str]]) -> str:
    """Return one line that names the changes, at most three of them."""
    some = [f"{name}: {one_line(now)} (before: {before})" for name, (before, now) in list(changed.items())[:3]]
    return "; ".join(some) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")


def check_controllers(cluster: Cluster, nodes: Sequence[Node]) -> None:
    """Check that no controller has changed since it was confirmed; confirm those that are seen for the first time.

    Raises:
        Refused: the inventory names other controllers than those confirmed.
    """
    _refuse_changed(cluster, nodes)
    if _find_new(cluster, nodes):
        with _hold_confirmed(cluster):
            _refuse_changed(cluster, nodes)  # another run may have confirmed them meanwhile
            _confirm(cluster, _find_new(cluster, nodes))


def _find_new(cluster: Cluster, nodes: Sequence[Node]) -> dict[str, str]:
    """Return the controllers of nodes of which none was confirmed yet."""
    known = read_confirmed(cluster)
    pairs = ((node["name"], str(node.get("bmc") or "")) for node in nodes)
    return {name: url for name, url in pairs if url and name not in known}


def _refuse_changed(cluster: Cluster, nodes: Sequence[Node]) -> None:
    if changed := changed_controllers(cluster, nodes):
        name, (_, now) = next(iter(changed.items()))
        raise Refused(
            f"the inventory has another controller for {describe_changes(changed)}",
            # Root in the VM has written it, and an administrator will copy it.
            hint=f"if that is right, confirm it on this machine: sms node edit {name} --bmc {quote(one_line(now))}",
        )
