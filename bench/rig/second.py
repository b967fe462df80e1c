"""Peer of an adoption: a second server, to which an administrator moves the services of the legacy node by hand."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.host.netns import Netns
from appliance.lab.layout import (
    ALICE,
    ALICE_GROUP,
    CONTAINER_ADDRESSES,
    GATEWAY,
    LEGACY_ADDRESSES,
    LEGACY_NAME,
    PROVISIONING,
    PUBLIC,
    mac,
)
from appliance.lab.root import MANAGEMENT, make_root
from appliance.progress import Progress
from bench.rig.bare import FOLDER, INTERFACES, spawned
from bench.rig.bed import Bed
from bench.rig.measure import find_program

NAME, ROOT = "sms-new", FOLDER / "second"
LENT = "/run/lent"
OWN = {PROVISIONING: "10.77.0.6", PUBLIC: "10.78.0.6"}
OLD_INTERFACES = {PROVISIONING: "prov0", PUBLIC: "pub0"}
UNITS = ("slurmctld", "slurmdbd")
STATE, DATABASE = "/var/lib/slurm/slurmctld", "slurm_acct_db"

# $1 name, $2 address of the controller, $3 address for NAT, $4 and $5 lines of passwd and group. Standard input: the
# configuration of the legacy node. Starts all that keeps no state of Slurm.
PREPARE = """\
tar -xf - -C /
printf '%s\\n' "$4" >>/etc/passwd
printf '%s\\n' "$5" >>/etc/group
echo "127.0.1.1 $1" >>/etc/hosts
sed -i "s/^SlurmctldHost=.*/SlurmctldHost=$1($2)/" /etc/slurm/slurm.conf
sed -i "s/\\"prov0\\"/\\"eth0\\"/; s/\\"pub0\\"/\\"eth1\\"/; s/masquerade/snat to $3/" /etc/nftables.conf
chown mysql: /etc/mysql/slurm.sql
chown slurm: /etc/slurm/slurmdbd.conf
chown munge: /etc/munge/munge.key
install -d -o slurm -g slurm /var/log/slurm /var/lib/slurm /var/lib/slurm/slurmctld
install -d -o munge -g munge -m 755 /run/munge
install -d -o mysql -g mysql -m 755 /run/mysqld
install -d -o _chrony -g _chrony -m 700 /run/chrony
nft -f /etc/nftables.conf
runuser -u munge -- munged
rsyslogd
chronyd -x
setsid mariadbd --user=mysql </dev/null >/dev/null 2>&1 &
until mariadb-admin ping >/dev/null 2>&1; do sleep 0.1; done
"""
STOP = """\
for pid in $(cat /run/slurmctld.pid /run/slurmdbd.pid 2>/dev/null); do
    kill "$pid" 2>/dev/null || continue
    # The first process there waits for no child: what has ended stays as a zombie.
    while grep -qs '^State:[[:space:]]*[^Z[:space:]]' "/proc/$pid/status"; do sleep 0.02; done
done
"""


class ByHand:
    """Moves of the services between the legacy node and the second server, without time to type or to log in."""

    def __init__(self, old: Netns, second: Netns) -> None:
        self.old = old
        self.second = second
        self.rsync = find_program("rsync", "rsync")
        lend(self.rsync, old)
        self.arping = find_program("arping", "iputils-arping")
        self.before = self._addresses()

    def move_there(self) -> None:
        """Stop, copy, move the addresses, start on the second server."""
        self.old.run("systemctl", "stop", *UNITS, timeout=120)
        self._copy(self.old, self.second)
        self._change(self.old, [f"address del {address} dev {name}" for name, address in moved(OLD_INTERFACES)])
        self._change(self.second, [f"address add {address} dev {name}" for name, address in moved(INTERFACES)])
        with self._announced(self.second, INTERFACES):
            self.second.run("sh", "-euc", "slurmdbd; slurmctld", timeout=60)

    def move_back(self) -> None:
        """The same in the other direction.

        Raises:
            SmsError: the legacy node has other addresses than before.
        """
        self.second.run("sh", "-euc", STOP, timeout=120)
        self._copy(self.second, self.old)
        self._serve_on_old()
        if (found := self._addresses()) != self.before:
            raise SmsError(f"{self.old.name} has other addresses than before: {found}")

    def restore(self) -> None:
        """Make the legacy node serve from its own state, wherever a move has failed."""
        self.second.run("sh", "-euc", STOP, ok=None, timeout=120)
        self._serve_on_old()

    def _copy(self, source: Netns, target: Netns) -> None:
        places = (f"{ROOT}{STATE}/" if host is self.second else f"env:{STATE}/" for host in (source, target))
        shell = ("-e", shlex.join(self.old.prefix), f"--rsync-path={LENT}/run")
        Local().run(self.rsync, "-a", "--numeric-ids", "--delete", *shell, *places, timeout=120)
        dump = [*source.prefix, "mariadb-dump", "--single-transaction", DATABASE]
        with subprocess.Popen(dump, stdout=subprocess.PIPE) as running:
            load = [*target.prefix, "mariadb", DATABASE]
            subprocess.run(load, stdin=running.stdout, check=True, capture_output=True, timeout=120)
        if running.returncode:
            raise SmsError(f"mariadb-dump on {source.name} ended with status {running.returncode}")

    def _serve_on_old(self) -> None:
        self._change(self.second, [f"address del {address} dev {name}" for name, address in moved(INTERFACES)])
        lines = [f"address add {address} dev {name}" for name, address in moved(OLD_INTERFACES)]
        # Packets and NAT use the first address of a network: it is to be the one that has moved, as before.
        for network, name in OLD_INTERFACES.items():
            own = f"{LEGACY_ADDRESSES[network]}/24 dev {name}"
            lines += [f"address del {own}", f"address add {own}"]
        self._change(self.old, [*lines, f"route replace default via {GATEWAY[PUBLIC]}"])
        with self._announced(self.old, OLD_INTERFACES):
            self.old.run("systemctl", "start", *reversed(UNITS), timeout=120)

    def _change(self, host: Netns, lines: list[str]) -> None:
        """Run all of these commands of ip(8), whatever fails."""
        text = "".join(f"{line}\n" for line in lines)
        host.run("ip", "-force", "-batch", "-", input=text.encode(), ok=None)

    @contextmanager
    def _announced(self, host: Netns, interfaces: dict[str, str]) -> Iterator[None]:
        """Let neighbours know the new MAC address of the addresses; meanwhile, go on. The host may lack arping."""
        words = ["nsenter", "-t", str(host.pid), "-n", "--", self.arping, "-q", "-U", "-c", "1"]
        with ExitStack() as stack:
            for network, name in interfaces.items():
                stack.enter_context(subprocess.Popen([*words, "-I", name, CONTAINER_ADDRESSES[network]]))
            yield

    def _addresses(self) -> list[str]:
        shown = self.old.run("ip", "-o", "-4", "address").text.splitlines()
        return [" ".join(line.split()[1:4]) for line in shown]


def lend(program: str, host: Netns) -> None:
    """Make a program of this machine run on a host of the lab that lacks it: as LENT/run."""
    libraries = re.findall(r"/\S+", Local().run("ldd", program).text)
    for path in (program, *libraries):
        host.write(f"{LENT}/{Path(path).name}", Path(path).read_bytes(), mode=0o755)
    (loader,) = (Path(path).name for path in libraries if Path(path).name.startswith("ld-"))
    script = f'#!/bin/sh\nexec {LENT}/{loader} --library-path {LENT} {LENT}/{Path(program).name} "$@"\n'
    host.write(f"{LENT}/run", script.encode(), mode=0o755)


def moved(interfaces: dict[str, str]) -> list[tuple[str, str]]:
    """Return pairs of an interface and an address that moves."""
    return [(name, f"{CONTAINER_ADDRESSES[network]}/24") for network, name in interfaces.items()]


@contextmanager
def second_server(bed: Bed, progress: Progress) -> Iterator[ByHand]:
    """Create the second server: the same programs and configuration as the legacy node, natively.

    All that keeps no state of Slurm runs there already: NAT, time, logs, munge, an empty MariaDB.
    """
    local, old = Local(), bed.lab.host(LEGACY_NAME)
    changes = bed.lab.layout.disk / "second"
    layers = f"lowerdir={make_root(progress, MANAGEMENT)},upperdir={changes}/upper,workdir={changes}/work"
    with ExitStack() as undo:
        for path in (ROOT, changes / "upper", changes / "work"):
            path.mkdir(parents=True, exist_ok=True)
        local.run("umount", "--lazy", str(ROOT), ok=None)  # left by a killed run
        local.run("mount", "-t", "overlay", "-o", f"{layers},volatile", "overlay", str(ROOT))
        undo.callback(local.run, "umount", "--lazy", str(ROOT), ok=None)
        second = undo.enter_context(spawned(bed, ROOT, NAME, network_commands()))
        addresses = (CONTAINER_ADDRESSES[PROVISIONING], CONTAINER_ADDRESSES[PUBLIC])
        files = (bed.lab.layout.running / LEGACY_NAME / "files.tar").read_bytes()
        argv = ("sh", "-euc", PREPARE, "prepare", NAME, *addresses, ALICE, ALICE_GROUP)
        second.run(*argv, input=files, timeout=120)
        # Else the addresses that stay would be lost with the first one of their network.
        old.run("sh", "-c", "echo 1 >/proc/sys/net/ipv4/conf/all/promote_secondaries")
        yield ByHand(old, second)


def network_commands() -> str:
    """Return shell commands that configure the second server's own addresses."""
    lines = ["ip link set lo up"]
    for network, name in INTERFACES.items():
        own = OWN[network]
        lines += [f"ip link set {name} address {mac(own)} up", f"ip addr add {own}/24 dev {name}"]
    lines.append("echo 1 >/proc/sys/net/ipv4/ip_forward")
    return "\n".join([*lines, f"ip route add default via {GATEWAY[PUBLIC]}"])
