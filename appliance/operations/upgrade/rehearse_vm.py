"""A rehearsal without the provisioning VM: its address is there, nobody answers, and who asks for it is counted."""

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
"""Nothing comes back, not even a refusal: who waits for an answer waits for as long as he ever would."""

Link = tuple[str, int, int]
"""Who asked, and for which protocol and port."""


def need_polls(cluster: Cluster) -> None:
    """Refuse where there is no VM that could be switched off.

    Raises:
        Refused: there is none, or the container takes no files from it.
    """
    if cluster.site.provisioning is None:
        raise Refused("the site has no provisioning VM", hint="sms rehearse, without --without-vm")
    if not cluster.find_role("files"):
        raise Refused("the container takes no files from the VM", hint="add filesync to `services`")


@contextmanager
def vm_off(lab: Lab, site: Site, tried: Checks) -> Iterator[None]:
    """The VM's address swallows what comes; at the end it is looked who has sent it anything."""
    assert site.provisioning
    space = in_network(OUTSIDE, f"/run/netns/{lab.layout.namespace(OUTSIDE)}")
    space.run("nft", "-f", "-", input=(DROP % site.provisioning.address.ip).encode())
    with tempfile.TemporaryDirectory(prefix="sms-rehearsal-") as folder:
        capture = Path(folder) / "without-vm.pcap"
        with demo.listening(lab, capture):
            yield
        tried.try_out("nobody needs the provisioning VM", lambda: check_polls(capture, site))


def check_polls(capture: Path, site: Site) -> str:
    """Nobody has asked for the VM but the container's file synchronisation.

    Raises:
        SmsError: somebody has; or it has not either, so that nothing was shown.
    """
    assert site.provisioning
    vm, container = str(site.provisioning.address.ip), str(site.networks.provisioning.address.ip)
    poll = (container, TCP, urlsplit(site.filesync.server or "").port or 443)
    return judge_polls(find_askers(capture, vm), vm, poll)


def find_askers(capture: Path, vm: str) -> Counter[Link]:
    """Packets to the VM's address by who sent them, to which port."""
    reading = read_captures([str(capture)], signatures=())
    hosts = {host.index: host.address for host in reading.hosts()}
    found: Counter[Link] = Counter()
    for link in reading.links():
        if hosts[link.server] == vm:
            found[hosts[link.client], link.protocol, link.port] += link.packets
    return found


def judge_polls(found: Counter[Link], vm: str, poll: Link) -> str:
    """Words on who asked the VM; ``poll`` is what may.

    Raises:
        SmsError: as ``check_polls``.
    """
    others = [f"{who} ({'tcp' if protocol == TCP else protocol}/{port})" for who, protocol, port in found]
    others = [words for words, link in zip(others, found, strict=True) if link != poll]
    if others:
        raise SmsError(f"without the VM these ask for it: {', '.join(others[:10])}")
    if not found[poll]:
        raise SmsError("not even file synchronisation has asked for the VM: nothing is shown")
    return (
        f"nobody has asked for {vm} but the container's file synchronisation, {found[poll]} packets to port {poll[2]}"
    )
