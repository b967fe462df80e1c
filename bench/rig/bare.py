"""Peer: the same daemons on a host, without container."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.host.netns import Netns
from appliance.lab.layout import BRIDGES, CONTAINER, CONTAINER_ADDRESSES, GATEWAY, PROVISIONING, PUBLIC, mac
from appliance.lab.up import SPAWN
from bench.rig.bed import LAB, Bed

SPACE = f"sms-{LAB}-bare"
"""Network namespace; the lab has no host of this name."""
FOLDER = Path("/run/sms-bench")
INTERFACES = {PROVISIONING: "eth0", PUBLIC: "eth1"}

# A host whose root file system is the unpacked image, writable and on disk.
INIT = """\
set -eu
root=%(root)s
hostname %(name)s
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom tty; do
    : >"dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=1777 tmpfs tmp
pivot_root . mnt
umount -l /mnt
%(network)s
echo entered
exec sleep infinity </dev/null >/dev/null 2>&1
"""


def network_commands() -> str:
    """Return shell commands that configure the container's addresses on both networks."""
    lines = ["ip link set lo up"]
    for network, interface in INTERFACES.items():
        address = CONTAINER_ADDRESSES[network]
        lines += [f"ip link set {interface} address {mac(address)} up", f"ip addr add {address}/24 dev {interface}"]
    # What `sms start` sets for the container, whose own programs cannot.
    lines.append("echo 1 >/proc/sys/net/ipv4/ip_forward")
    return "\n".join([*lines, f"ip route add default via {GATEWAY[PUBLIC]}"])


class Bare:
    """The daemons on one host; start and stop once."""

    def __init__(self, host: Netns) -> None:
        self.host = host
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start the daemons; return the seconds until the last service answers."""
        began = time.monotonic()
        self.process = subprocess.Popen(
            [*self.host.prefix, "/opt/sms/bin/sms-init"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # Probes need the supervisor's folders.
        self.host.run("sh", "-c", "until [ -d /run/sms ]; do sleep 0.01; done", timeout=10)
        self.host.run("/opt/sms/bin/sms-probe", "--wait", "60", timeout=90)
        return time.monotonic() - began

    def stop(self) -> float:
        """Stop the daemons; return the seconds until all have ended."""
        assert self.process
        began = time.monotonic()
        self.host.run("sh", "-c", 'kill -TERM "$(cat /run/sms/supervisord.pid)"')
        self.process.wait(180)
        return time.monotonic() - began


@contextmanager
def bare_host(bed: Bed, root: Path) -> Iterator[Bare]:
    """Create a host with the container's addresses; the services container must be stopped."""
    with spawned(bed, root, CONTAINER, network_commands()) as host:
        yield Bare(host)


@contextmanager
def spawned(bed: Bed, root: Path, name: str, network: str) -> Iterator[Netns]:
    """Create a host on both networks of the lab.

    Args:
        root: its root file system.
        network: shell commands that configure its ``INTERFACES``.
    """
    local = Local()
    with ExitStack() as undo:
        undo.callback(remove_bare)
        remove_bare()  # left by a killed run
        local.run("ip", "netns", "add", SPACE)
        for which, interface in INTERFACES.items():
            _connect(bed, which, interface)
        values = {"root": shlex.quote(str(root)), "name": name, "network": network}
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "init.sh").write_text(INIT % values)
        (FOLDER / "log").unlink(missing_ok=True)  # SPAWN waits for a line in it
        pid = int(local.run("sh", "-c", SPAWN, "spawn", SPACE, str(FOLDER)).text)
        yield Netns(name, pid)


def _connect(bed: Bed, network: str, interface: str) -> None:
    """Connect the host to the lab's switch."""
    switch = bed.lab.layout.namespace("switch")
    port = f"b-{interface}"
    argv = ("ip", "-n", switch, "link")
    Local().run(*argv, "add", port, "type", "veth", "peer", "name", interface, "netns", SPACE)
    Local().run(*argv, "set", port, "master", BRIDGES[network], "up")


def remove_bare() -> None:
    """Remove the host in any state.

    Its interfaces are deleted first: the kernel may keep a dead namespace for a while, and until then it would answer
    for the container's addresses.
    """
    local = Local()
    if not local.works("test", "-e", f"/run/netns/{SPACE}"):
        return
    for interface in INTERFACES.values():
        local.run("ip", "-n", SPACE, "link", "del", interface, ok=None)
    for _ in range(100):
        pids = local.run("ip", "netns", "pids", SPACE).text.split()
        if not pids:
            local.run("ip", "netns", "del", SPACE)
            return
        local.run("kill", "-KILL", *pids, ok=None)
        time.sleep(0.05)
    raise SmsError(f"processes of the bare host do not end: {' '.join(pids)}")
