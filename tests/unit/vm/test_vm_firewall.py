"""The VM's packet filter as the kernel applies it: two networks, in namespaces, that reach what they may."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from appliance.plan.vm.vm import DHCP, HTTP, HTTPS, TFTP, firewall
from tests.ownnet import own_network
from tests.sites import make_site

pytestmark = pytest.mark.slow

OWN, PUBLIC = "10.0.0.2", "192.0.2.10"
OTHER = 999
TRY = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
def answers(word):
    kind, address, port = word.split("/")
    link = socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    link.settimeout(1.5)
    try:
        link.connect((address, int(port)))
        if kind == "udp":
            link.send(b"x")
            link.recv(9)
        return True
    except OSError:
        return False
words = sys.argv[1:]
with ThreadPoolExecutor(len(words)) as pool:
    print(*(word for word, found in zip(words, pool.map(answers, words)) if found))
"""
"""Prints which of these answer."""


def echo(link: socket.socket) -> None:
    while True:
        try:
            link.sendto(*link.recvfrom(9))
        except OSError:
            return


@pytest.fixture
def outside(tmp_path: Path, need: Callable[[str], str]) -> Iterator[Callable[..., set[str]]]:
    """The VM's network is this thread's; what is returned is run beside it, on both of its networks."""
    site = make_site(tmp_path, public={"address": f"{PUBLIC}/24", "mac": "02:00:c0:00:02:0a"})
    (tmp_path / "nftables.conf").write_text(firewall(site))
    with own_network([]), ExitStack() as stack:
        beside = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep 300"], stdout=subprocess.PIPE)
        stack.callback(beside.wait)
        stack.callback(beside.kill)
        assert beside.stdout and beside.stdout.readline()
        enter = ["nsenter", "-t", str(beside.pid), "-n"]
        lines = [f"link add v{number} type veth peer name v{number} netns {beside.pid}" for number in (1, 2)]
        lines += [f"link set v{number} group {number} up" for number in (1, 2)]
        lines += [f"addr add {OWN}/16 dev v1", f"addr add {PUBLIC}/24 dev v2"]
        subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
        there = ["link set v1 up", "link set v2 up", "addr add 10.0.0.9/16 dev v1", "addr add 192.0.2.9/24 dev v2"]
        subprocess.run([*enter, "ip", "-batch", "-"], input="\n".join(there), text=True, check=True)
        subprocess.run([need("nft"), "-f", str(tmp_path / "nftables.conf")], check=True)
        for port in (HTTP, HTTPS, OTHER):
            stack.enter_context(socket.create_server(("", port)))
        for port in (DHCP, TFTP, OTHER):
            link = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            link.bind(("", port))
            threading.Thread(target=echo, args=(link,), daemon=True).start()

        def run(*argv: str) -> set[str]:
            return {*subprocess.run([*enter, *argv], capture_output=True, text=True, timeout=60).stdout.split()}

        yield run


TARGETS = [f"tcp/{{}}/{port}" for port in (HTTP, HTTPS, OTHER)] + [f"udp/{{}}/{port}" for port in (DHCP, TFTP, OTHER)]


def test_each_network_reaches_what_it_needs(outside: Callable[..., set[str]]) -> None:
    targets = [each.format(address) for each in TARGETS for address in (OWN, PUBLIC)]
    reached = outside("python3", "-c", TRY, *targets)
    of_nodes = {f"tcp/{OWN}/80", f"tcp/{OWN}/8443", f"udp/{OWN}/67", f"udp/{OWN}/69"}
    assert reached == {*of_nodes, f"tcp/{PUBLIC}/8443"}
    assert outside("ping", "-c", "1", "-W", "5", OWN)


def test_an_address_is_reached_through_its_own_card_only(outside: Callable[..., set[str]]) -> None:
    """The kernel accepts packets for any of its addresses on any card."""
    outside("ip", "route", "add", f"{OWN}/32", "dev", "v2", "src", "192.0.2.9")
    outside("ip", "route", "add", f"{PUBLIC}/32", "dev", "v1", "src", "10.0.0.9")
    targets = [each.format(address) for each in TARGETS for address in (OWN, PUBLIC)]
    assert outside("python3", "-c", TRY, *targets) == set()


def test_what_is_served_is_not_tracked(outside: Callable[..., set[str]]) -> None:
    """Nodes could fill the table of connections, which has 4096 entries in a VM of 512 MB."""

    def tracked() -> int:
        lines = Path("/proc/thread-self/net/stat/nf_conntrack").read_text().splitlines()[1:]
        return int(lines[0].split()[0], 16)

    assert outside("python3", "-c", TRY, f"tcp/{OWN}/{HTTP}", f"udp/{OWN}/{DHCP}", f"udp/{OWN}/{TFTP}")
    outside("python3", "-c", TRY, f"tcp/{OWN}/{OTHER}", f"udp/{OWN}/{OTHER}")
    assert tracked() == 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.sendto(b"question", ("10.0.0.9", 53))
    assert tracked() == 1


def test_its_own_requests_are_answered(outside: Callable[..., set[str]], tmp_path: Path) -> None:
    """Such as those to a name server: the answers belong to them."""
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with link:
        link.bind((OWN, 0))
        send = f"link.bind(('10.0.0.9', 53)); link.sendto(b'x', ('{OWN}', {link.getsockname()[1]}))"
        answer = ("python3", "-c", f"import socket; link = socket.socket(type=socket.SOCK_DGRAM); {send}")
        outside(*answer)
        link.settimeout(1)
        with pytest.raises(TimeoutError):
            link.recv(9)
        link.sendto(b"question", ("10.0.0.9", 53))
        outside(*answer)
        assert link.recv(9) == b"x"
