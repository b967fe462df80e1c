"""What only clusters have: ports of schedulers, of file systems, and of boots over the network."""

from __future__ import annotations

from analysis.signatures import TCP, UDP

Places = frozenset[tuple[int, int]]
"""(IP protocol, port)."""


def _tcp(*ports: int) -> Places:
    return frozenset((TCP, port) for port in ports)


CONTROLLERS = _tcp(6817, 15001, 17001, 6444, 9618, 6878)
"""Where a scheduler serves nodes: slurmctld; PBS's server and pbs_comm; Grid Engine's qmaster, HTCondor's collector,
LSF's mbatchd (defaults of their documentation)."""
NODE_DAEMONS: Places = _tcp(6818, 15002, 15003, 6445, 6882) | {(UDP, 15003)}
"""Where a scheduler's daemon on a node listens: slurmd, pbs_mom, sge_execd, LSF's sbatchd."""
GMOND: Places = _tcp(8649)
"""Where the management node reads a node's measurements (gmond.conf(5), tcp_accept_channel)."""
EXECUTION: Places = _tcp(17001)
"""What only execution nodes open at the management node: pbs_mom keeps a connection to pbs_comm (pbs_comm(8))."""
SCHEDULERS: Places = CONTROLLERS | NODE_DAEMONS | _tcp(6819, 15004)
"""Also slurmdbd, and PBS's scheduler."""
FILE_SYSTEMS: dict[tuple[int, int], str] = {
    (TCP, 988): "lustre",
    **{(protocol, port): "beegfs" for protocol in (TCP, UDP) for port in (8003, 8004, 8005, 8008)},
    (TCP, 1191): "gpfs",
    (TCP, 3300): "ceph",
    (TCP, 6789): "ceph",
    (TCP, 24007): "gluster",
}
"""File systems that the catalogue does not have, by the port of their servers (defaults of their documentation)."""
STORAGE: Places = frozenset({*FILE_SYSTEMS, (TCP, 2049), (UDP, 2049), (TCP, 3260)})
"""These, NFS and iSCSI."""
DHCP = (UDP, 67)
DHCP_SERVERS: Places = frozenset({DHCP, (UDP, 547)})
"""RFC 2131, 4.1; RFC 8415, 7.2."""
BOOTS: Places = frozenset({(UDP, 69), (UDP, 4011)})
"""Boots over the network: TFTP, and PXE's boot server (PXE 2.1, 2.2.3). DHCP alone is in any network."""
