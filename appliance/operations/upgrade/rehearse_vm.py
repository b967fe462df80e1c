"""A rehearsal without the provisioning VM: traffic to its address is dropped and recorded."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from analysis.reading import read_captures
from appliance.config.model import Site
from appliance.errors import Refused, SmsError
from appliance.lab import Lab
from appliance.lab.capture import in_network
from appliance.operations.context import Cluster
from appliance.operations.lab import demo
from appliance.operations.upgrade.rehearse_checks import Checks
from appliance.operations.upgrade.rehearse_plan import OUTSIDE

TCP = 6
DROP = """\
table inet sms-rehearsal {
    chain in {
        type filter hook input priority 0
        ip daddr %s counter drop
    }
}
"""
"""Drop without a reply, so that clients run into their timeouts as with a VM that is off."""

Link = tuple[str, int, int]
"""Client, protocol and port."""


def need_polls(cluster: Cluster) -> None:
    """Check that there is a VM and that the container polls it.

    Raises:
        Refused: there is no VM, or the container pulls no files from it.
    """
    if cluster.site.provisioning is None:
        raise Refused("the site has no provisioning VM", hint="sms rehearse, without --without-vm")
    if not cluster.find_role("files"):
        raise Refused("the container pulls no files from the VM", hint="add filesync to `services`")


@contextmanager
def vm_off(lab: Lab, site: Site, tried: Checks) -> Iterator[None]:
    """Drop traffic to the VM's address; at the end, check who has sent any."""
    assert site.provisioning
    space = in_network(OUTSIDE, f"/run/netns/{lab.layout.namespace(OUTSIDE)}")
    space.run("nft", "-f", "-", input=(DROP % site.provisioning.address.ip).encode())
    with tempfile.TemporaryDirectory(prefix="sms-rehearsal-") as folder:
        capture = Path(folder) / "without-vm.pcap"
        with demo.listening(lab, capture):
            yield
        tried.try_out("nobody needs the provisioning VM", lambda: check_polls(capture, site))


def check_polls(capture: Path, site: Site) -> str:
    """Check that only the container's file synchronisation has sent packets to the VM.

    Raises:
        SmsError: others have; or it has not either, so that the check is inconclusive.
    """
    assert site.provisioning
    vm, container = str(site.provisioning.address.ip), str(site.networks.provisioning.address.ip)
    poll = (container, TCP, urlsplit(site.filesync.server or "").port or 443)
    return judge_polls(find_clients(capture, vm), vm, poll)


def find_clients(capture: Path, vm: str) -> Counter[Link]:
    """Count packets to the VM's address by client, protocol and port."""
    reading = read_captures([str(capture)], signatures=())
    hosts = {host.index: host.address for host in reading.hosts()}
    found: Counter[Link] = Counter()
    for link in reading.links():
        if hosts[link.server] == vm:
            found[hosts[link.client], link.protocol, link.port] += link.packets
    return found


def judge_polls(found: Counter[Link], vm: str, poll: Link) -> str:
    """Evaluate the clients of the VM; only ``poll`` is allowed.

    Raises:
        SmsError: as ``check_polls``.
    """
    others = [f"{who} ({'tcp' if protocol == TCP else protocol}/{port})" for who, protocol, port in found]
    others = [text for text, link in zip(others, found, strict=True) if link != poll]
    if others:
        raise SmsError(f"other clients try to reach the VM: {', '.join(others[:10])}")
    if not found[poll]:
        raise SmsError("inconclusive: not even file synchronisation has tried to reach the VM")
    return f"only the container's file synchronisation has tried to reach {vm}, {found[poll]} packets to port {poll[2]}"
