"""Peer: the same daemons, started bare on a host, with no container around them."""

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
"""The network namespace; the lab has no host of this name."""
FOLDER = Path("/run/sms-bench")
INTERFACES = {PROVISIONING: "eth0", PUBLIC: "eth1"}

# A host whose root is the unpacked image, writable and on disk as any host's is.
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
    """Shell commands by which a host takes the container's place on both networks."""
    lines = ["ip link set lo up"]
    for network, interface in INTERFACES.items():
        address = CONTAINER_ADDRESSES[network]
        lines += [f"ip link set {interface} address {mac(address)} up", f"ip addr add {address}/24 dev {interface}"]
    return "\n".join([*lines, f"ip route add default via {GATEWAY[PUBLIC]}"])


class Bare:
    """The daemons on one host: started once, stopped once."""

    def __init__(self, host: Netns) -> None:
        self.host = host
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Seconds from the first process to the last service's answer."""
        began = time.monotonic()
        self.process = subprocess.Popen(
            [*self.host.prefix, "/opt/sms/bin/sms-init"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # The supervisor's own folders must be there before anything asks.
        self.host.run("sh", "-c", "until [ -d /run/sms ]; do sleep 0.01; done", timeout=10)
        self.host.run("/opt/sms/bin/sms-probe", "--wait", "60", timeout=90)
        return time.monotonic() - began

    def stop(self) -> float:
        """Seconds until every daemon has ended."""
        assert self.process
        began = time.monotonic()
        self.host.run("sh", "-c", 'kill -TERM "$(cat /run/sms/supervisord.pid)"')
        self.process.wait(180)
        return time.monotonic() - began


@contextmanager
def bare_host(bed: Bed, root: Path) -> Iterator[Bare]:
    """A fresh host in the container's place; the appliance must be stopped."""
    local = Local()
    with ExitStack() as undo:
        undo.callback(remove_bare)
        remove_bare()  # what a killed run left
        local.run("ip", "netns", "add", SPACE)
        for network, interface in INTERFACES.items():
            _cable(bed, network, interface)
        words = {"root": shlex.quote(str(root)), "name": CONTAINER, "network": network_commands()}
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "init.sh").write_text(INIT % words)
        (FOLDER / "log").unlink(missing_ok=True)  # SPAWN looks in it for the host's word
        pid = int(local.run("sh", "-c", SPAWN, "spawn", SPACE, str(FOLDER)).text)
        yield Bare(Netns("bare", pid))


def _cable(bed: Bed, network: str, interface: str) -> None:
    """From the lab's switch to the host."""
    switch = bed.lab.layout.namespace("switch")
    port = f"b-{interface}"
    argv = ("ip", "-n", switch, "link")
    Local().run(*argv, "add", port, "type", "veth", "peer", "name", interface, "netns", SPACE)
    Local().run(*argv, "set", port, "master", BRIDGES[network], "up")


def remove_bare() -> None:
    """End the host, whatever state it is in.

    Its cables go first: the kernel may keep a namespace that has ended for a while, and until then the container's
    address would answer.
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
