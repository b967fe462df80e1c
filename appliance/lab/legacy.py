"""What runs on the lab's legacy node: one server with systemd, as sites have it. Pure.

Its configuration is the files below ``definitions/lab/legacy``, each at its path.
"""

from __future__ import annotations

import hashlib

from appliance.lab.layout import LabHost, Layout
from appliance.share import share

TEMPLATES = "legacy"
"""Their folder among the lab's templates."""
PRIVATE = ("etc/slurm/slurmdbd.conf", "etc/mysql/slurm.sql")
"""Files with the password of the accounting database."""
# sshd logs a connection that says nothing.
_LISTENS = "ss -Hltn sport = :{} | grep -q ."
UNITS = {
    "munge": "munge -n",
    "mariadb": "mariadb-admin ping",
    # What sacctmgr shows has come from the database; slurmctld has registered the cluster when its port is known.
    "slurmdbd": "sacctmgr -nP list cluster format=cluster,controlport | grep -q '|6817$'",
    "slurmctld": "scontrol ping | grep -q 'is UP'",
    "nftables": "nft list table ip nat",
    "rsyslog": _LISTENS.format(514),
    "chrony": "[ -S /run/chrony/chronyd.sock ]",
    "postfix": "[ -S /var/spool/postfix/public/pickup ]",
    "dnsmasq": _LISTENS.format(53),
    "nfs-ganesha": _LISTENS.format(2049),
    "cron": "systemctl is-active cron",
    "ssh": _LISTENS.format(22),
}
"""Debian's units of its services, each with bash that succeeds once it works."""
ENABLED = ("networking", "nftables")
"""Units that Debian's packages do not enable themselves."""
MASKED = (
    # What acts on disks and on the kernel would do so on the whole machine.
    *("fstrim.timer", "e2scrub_all.timer", "e2scrub_reap.service", "systemd-pstore.service"),
    # Version 4 of NFS needs none of them, and not every kernel is a client.
    *("nfs-client.target", "nfs-ganesha-lock.service", "rpcbind.service", "rpcbind.socket"),
    # Nothing of the lab reaches a mirror.
    *("apt-daily.timer", "apt-daily-upgrade.timer"),
    *("getty@tty1.service", "console-getty.service"),
)


def probes() -> dict[str, str]:
    """Return by unit bash that succeeds once it works, or where a condition keeps it from starting (``off``).

    ``sms adopt`` leaves such a condition behind: the unit stays off then, at a boot as well.
    """
    return {unit: f"off {unit} || {{ {probe}; }}" for unit, probe in UNITS.items()}


def templates() -> dict[str, str]:
    """Return the names of its templates, by path in its root file system."""
    folder = share("definitions", "lab", TEMPLATES)
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.j2"))
    return {path.removesuffix(".j2"): f"{TEMPLATES}/{path.removesuffix('.j2')}" for path in paths}


def machine_id(layout: Layout, host: LabHost) -> str:
    """Return an id that stays, so that no boot is the first one: that would enable every unit."""
    return hashlib.sha256(layout.namespace(host.name).encode()).hexdigest()[:32]
