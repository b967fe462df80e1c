"""Package names and install commands of the distributions."""

from __future__ import annotations

import re
from collections.abc import Iterable

FAMILIES = {
    "debian": "debian",
    "ubuntu": "debian",
    "rhel": "redhat",
    "fedora": "redhat",
    "centos": "redhat",
    "suse": "suse",
    "sles": "suse",
    "opensuse": "suse",
}
"""Distribution families by words of ID and ID_LIKE in /etc/os-release."""

INSTALL = {"debian": "apt-get install", "redhat": "dnf install", "suse": "zypper install"}

# Debian, Enterprise Linux, SUSE.
_PACKAGES: dict[str, tuple[str, str, str]] = {
    "mksquashfs": ("squashfs-tools", "squashfs-tools", "squashfs"),
    "unsquashfs": ("squashfs-tools", "squashfs-tools", "squashfs"),
    "e2fsck": ("e2fsprogs", "e2fsprogs", "e2fsprogs"),
    "debugfs": ("e2fsprogs", "e2fsprogs", "e2fsprogs"),
    "arping": ("iputils-arping", "iputils", "iputils"),
    "losetup": ("mount", "util-linux", "util-linux"),
    "flock": ("util-linux", "util-linux-core", "util-linux"),
    "setpriv": ("util-linux", "util-linux", "util-linux"),
    "fsfreeze": ("util-linux", "util-linux", "util-linux"),
    "ip": ("iproute2", "iproute", "iproute2"),
    "tc": ("iproute2", "iproute-tc", "iproute2"),
    "rsync": ("rsync", "rsync", "rsync"),
    "ps": ("procps", "procps-ng", "procps"),
    "nft": ("nftables", "nftables", "nftables"),
    "conntrack": ("conntrack", "conntrack-tools", "conntrack-tools"),
    "iptables": ("iptables", "iptables-nft", "iptables"),
    "cron": ("cron", "cronie", "cronie"),
    "cni": ("containernetworking-plugins", "containernetworking-plugins", "cni-plugins"),
    "debootstrap": ("debootstrap", "debootstrap", "debootstrap"),
    "dnf": ("dnf", "dnf", "dnf"),
    "zypper": ("zypper", "zypper", "zypper"),
    "chrony": ("chrony", "chrony", "chrony"),
    "ssh": ("openssh-client", "openssh-clients", "openssh-clients"),
}


def family(os_release: str) -> str:
    """Return debian, redhat or suse from the text of /etc/os-release; empty for any other."""
    words = re.findall(r'^ID(?:_LIKE)?="?([^"\n]*)"?$', os_release, re.MULTILINE)
    for word in " ".join(words).replace("-", " ").split():
        if word in FAMILIES:
            return FAMILIES[word]
    return ""


def install_command(programs: Iterable[str], of: str) -> str:
    """Return the command that installs the programs' packages on a distribution of that family."""
    names = sorted(programs)
    if of not in INSTALL:
        return f"install {', '.join(names)} from your distribution"
    column = list(INSTALL).index(of)
    return f"{INSTALL[of]} {' '.join(sorted({_PACKAGES[name][column] for name in names}))}"
