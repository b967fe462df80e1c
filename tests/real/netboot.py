"""A network with a provisioning server and machines without disks, in the tests' own namespace: no lab, no VM."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ownnet import own_network
from tests.provisioning import Vm

ADDRESS, SERVICES = "10.77.0.2", "10.77.0.1"
CPU = "qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,-svm"
SITE = """\
cluster: t-ni
admin_hosts: [{name: host-a, address: 10.78.0.11}]
networks:
  provisioning: {bridge: br-prov, address: 10.77.0.1/24, mac: "02:00:0a:4d:00:01"}
  public: {bridge: br-pub, address: 10.78.0.2/24, mac: "02:00:0a:4e:00:02", gateway: 10.78.0.254}
provisioning:
  address: 10.77.0.2/24
  mac: "02:00:0a:4d:00:02"
  profiles: {compute: {kernel: cloud, arguments: mitigations=off}}
slurm:
  nodes: [{name: node1, address: 10.77.0.101, memory_mb: 200}]
  partitions: [{name: batch, default: true}]
signing: {private_key: keys/sign.pem, public_keys: [keys/sign.pub]}
"""


@contextmanager
def network(folder: Path) -> Iterator[Path]:
    """A bridge with the addresses of the VM and of the services container; the folder has a short name."""
    with own_network([]):
        lines = f"link add br0 type bridge stp_state 0 forward_delay 0\naddr add {ADDRESS}/24 dev br0\n"
        lines += f"addr add {SERVICES}/24 dev br0\naddr add fd53:6d73:a4d::2/64 dev br0 nodad\nlink set br0 up\n"
        subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)
        yield folder


@contextmanager
def served(folder: Path, ca: Path, *, nginx: str, dnsmasq: str) -> Iterator[Vm]:
    """sms-provd, nginx and dnsmasq as in the VM, with the site's own CA."""
    more = {"prefix": 24, "services": {"address": SERVICES, "hostname": "sms-services"}}
    vm = Vm(folder, nginx=nginx, cluster="t-ni", address=ADDRESS, more=more)
    vm.ca = ca
    vm.write_certificates()
    tftp = folder / "tftp"
    tftp.mkdir()
    for name in ("undionly.kpxe", "ipxe.efi"):
        shutil.copyfile(f"/usr/lib/ipxe/{name}", tftp / name)
    vm.start()
    for _ in range(100):
        if (configuration := folder / "run" / "dnsmasq.conf").exists():
            break
        time.sleep(0.1)
    text = configuration.read_text().replace("/usr/lib/sms/tftp", str(tftp))
    (folder / "dnsmasq.conf").write_text(f"{text}user=root\n")
    log = (folder / "dnsmasq.log").open("ab")
    dhcp = subprocess.Popen(
        [dnsmasq, "--keep-in-foreground", "--log-facility=-", f"--conf-file={folder / 'dnsmasq.conf'}"],
        stdout=log,
        stderr=log,
    )
    try:
        yield vm
    finally:
        dhcp.terminate()
        dhcp.wait(timeout=20)
        vm.stop()


class Machine:
    """A machine without a disk, of 512 MB. It boots its card's iPXE by PXE, or ``ipxe``, a file of another one."""

    def __init__(self, folder: Path, name: str, mac: str, *, memory_mb: int = 512, ipxe: Path | None = None) -> None:
        self.console = folder / f"{name}.console"
        self.console.unlink(missing_ok=True)
        self._add_tap(name)
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [
                *("qemu-system-x86_64", "-name", name, "-M", "q35", "-accel", "tcg,thread=multi,tb-size=128"),
                *("-cpu", CPU, "-m", str(memory_mb), "-display", "none", "-nodefaults", "-no-reboot"),
                *("-serial", f"file:{self.console}", "-device", "virtio-rng-pci"),
                *("-netdev", f"tap,id=n0,ifname={name},script=no,downscript=no"),
                *("-device", f"virtio-net-pci,netdev=n0,mac={mac}"),
                *(("-kernel", str(ipxe)) if ipxe else ()),
            ]
        )

    def _add_tap(self, name: str) -> None:
        subprocess.run(["ip", "link", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "tuntap", "add", name, "mode", "tap"], check=True)
        subprocess.run(["ip", "link", "set", name, "master", "br0", "up"], check=True)

    def said(self) -> str:
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    def wait_for(self, words: str, *, most_s: float = 400) -> str:
        """All that it said once it has said these words."""
        while words not in self.said():
            assert time.monotonic() - self.began < most_s, f"it never said {words!r}: {self.said()[-3000:]}"
            assert self.process.poll() is None, f"it is off: {self.said()[-3000:]}"
            time.sleep(0.2)
        return self.said()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(timeout=20)
