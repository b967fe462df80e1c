"""What running nodes need: they open connections and expect an answer, or what they send is lost."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import count
from random import Random

from tests.captures import packets as p
from tests.captures.cluster import EPILOG, EXIT, GANGLIA, LAUNCH, LAUNCHED, PING, RC, REGISTRATION
from tests.captures.clusters.leases import exchange, terms
from tests.captures.clusters.stage import CRITICAL, READY_S, Stage, activity
from tests.captures.clusters.tape import Box
from tests.captures.packets import ip_bytes, mac_bytes

QUEUE = 2003
"""REQUEST_JOB_INFO, squeue's."""
TLS_HELLO = b"\x16\3\1\2\0\1\0\1\xfc\3\3"
TLS_ANSWER = b"\x16\3\3\0\x7a"

RESERVED = [port for port in range(665, 1024) if port not in (774, 921, 993, 995)]
"""Ports of clients below 1024 (nfs(5), min_resvport), without those that bindresvport(3) leaves out."""


def reserved(rng: Random) -> int:
    """Return a port of a client that runs as root."""
    return rng.choice(RESERVED)


# Batch systems.


@activity(
    CRITICAL, "nodes register and report the end of jobs", names="slurmctld", ports="tcp/6817 tcp/6818 tcp/dynamic"
)
def slurm(stage: Stage, number: int, rng: Random) -> None:
    """Pings every 100 s, a registration every 2,000 s, jobs (src/slurmctld/ping_nodes.c)."""
    node, sms = stage.nodes[number], stage.sms

    def message(time_s: float, client: Box, server: Box, port: int, kind: int, size: int) -> None:
        stage.call(time_s, client, server, port, p.slurm(kind, bytes(size)), p.slurm(RC, bytes(8)), rng)

    if number < stage.logins:
        for time_s in stage.random_times(number, 300, rng):
            message(time_s, node, sms, 6817, QUEUE, 40)
        return
    if number in stage.boots and stage.ready_s(number) < stage.end_s:
        message(stage.ready_s(number), node, sms, 6817, REGISTRATION, 600)
    for time_s in stage.times(number, 100, rng, jitter=0.005):
        message(time_s, sms, node, 6818, PING, 8)
    for time_s in stage.times(number, 2000, rng):
        message(time_s, node, sms, 6817, REGISTRATION, 600)
    for time_s in stage.random_times(number, 900, rng):
        srun, run_s = sms.next_port(), rng.uniform(1, 60)
        message(time_s, sms, node, 6818, LAUNCH, 1800)
        message(time_s + 0.05, node, sms, srun, LAUNCHED, 60)
        message(time_s + run_s, node, sms, srun, EXIT, 40)
        message(time_s + run_s + 0.2, node, sms, 6817, EPILOG, 40)


@activity(CRITICAL, "sacct and sacctmgr of login nodes query it", names="slurmdbd", ports="tcp/6819")
def accounting(stage: Stage, number: int, rng: Random) -> None:
    """One node is a login node."""
    if number == 0:
        for time_s in stage.random_times(number, 600, rng):
            stage.call(time_s, stage.nodes[0], stage.sms, 6819, p.slurm(1400, bytes(80)), bytes(900), rng)


@activity(CRITICAL, "pbs_mom reports its state and the end of jobs", names="pbs", ports="tcp/15001 tcp/15002 tcp/15003")
def torque(stage: Stage, number: int, rng: Random) -> None:
    """Torque: pbs_mom reports every 45 s (momctl(8), $status_update_time), from ports below 1024."""
    node, sms = stage.nodes[number], stage.sms
    if number < stage.logins:
        commands(stage, number, rng)
        return
    for time_s in stage.times(number, 45, rng):
        stage.call(time_s, node, sms, 15001, b"+2+1" + bytes(300), b"+2+10", rng, own=reserved(rng))
    for time_s in stage.random_times(number, 900, rng):
        stage.call(time_s, sms, node, 15002, b"+2+12+15Scheduler" + bytes(900), b"+2+1", rng)
        ended = time_s + rng.uniform(5, 90)
        stage.call(ended, node, sms, 15001, b"+2+12+22" + bytes(200), b"+2+1", rng, own=reserved(rng))


@activity(CRITICAL, "the moms' connection to pbs_comm; they report the end of jobs over it", names="pbs")
def openpbs(stage: Stage, number: int, rng: Random) -> None:
    """OpenPBS: a connection of each mom to pbs_comm (17001), with a keep-alive a minute; jobs from the server."""
    node, sms = stage.nodes[number], stage.sms
    if number < stage.logins:
        commands(stage, number, rng)
        return
    stage.stay(number, 17001, stage.times(number, 60, rng), b"TPP" + bytes(60), bytes(40), rng)
    for time_s in stage.random_times(number, 900, rng):
        stage.call(time_s, node, sms, 15001, b"+2+1" + bytes(120), b"+2+10", rng, own=reserved(rng))


def commands(stage: Stage, number: int, rng: Random) -> None:
    """qstat and qsub on a login node."""
    for time_s in stage.random_times(number, 300, rng):
        stage.call(time_s, stage.nodes[number], stage.sms, 15001, b"+2+1" + bytes(120), b"+2+10", rng)


# File systems.


@activity(CRITICAL, "homes of users", names="nfs", ports="tcp/2049 tcp/111 udp/111 tcp/20048")
def nfs(stage: Stage, number: int, rng: Random) -> None:
    """A mount: a renewal of its lease a minute, and what jobs read (RFC 7530, 9.5)."""
    numbers = count(rng.randrange(1 << 30))
    read = p.rpc_reply(1, bytes(rng.choice((112, 400, 4000))))
    busy = stage.random_times(number, 120, rng)
    times = iter(sorted([*stage.times(number, 60, rng), *busy]))
    stage.stay(number, 2049, times, p.rpc_call(next(numbers), 1, bytes(40)), read, rng, own=reserved(rng))


@activity(CRITICAL, "the root file system of nodes", names="iscsi", ports="tcp/3260")
def iscsi(stage: Stage, number: int, rng: Random) -> None:
    """A session with a NOP every 5 to 10 s (iscsid.conf, noop_out_interval), and reads."""
    stage.stay(number, 3260, stage.times(number, 10, rng), b"\x40" + bytes(47), b"\x20" + bytes(47), rng)


@activity(CRITICAL, "clients ping the MGS and MDS, and wait for them", ports="tcp/988")
def lustre(stage: Stage, number: int, rng: Random) -> None:
    """MGS and MDS on the management node: a ping every 25 s (obd_timeout / 4), from ports 1021 to 1023 (socklnd)."""
    times = iter(sorted([*stage.times(number, 25, rng), *stage.random_times(number, 90, rng)]))
    stage.stay(number, 988, times, bytes(400), bytes(360), rng, own=1021 + number % 3)


# Accounts, names, time.


@activity(CRITICAL, "users are unknown without it", names="ldap", ports="tcp/389 tcp/636")
def ldap(stage: Stage, number: int, rng: Random) -> None:
    """Look-ups of sssd."""
    port = 636 if stage.random("ldaps").random() < 0.5 else 389
    hello, answer = (TLS_HELLO, TLS_ANSWER) if port == 636 else (b"\x30\x0c\2\1\1", b"\x30\x0c\2\1\1")
    for time_s in stage.random_times(number, 700, rng):
        stage.call(time_s, stage.nodes[number], stage.sms, port, hello + bytes(200), answer + bytes(900), rng)


@activity(CRITICAL, "names of hosts", names="dns", ports="udp/53")
def dns(stage: Stage, number: int, rng: Random) -> None:
    """Look-ups of A and AAAA records."""
    node = stage.nodes[number]
    for time_s in stage.random_times(number, 200, rng):
        stage.ask(time_s, node, node.next_port(), stage.sms, 53, bytes(34), bytes(90), rng)
        stage.ask(time_s + 1e-4, node, node.next_port(), stage.sms, 53, bytes(34), bytes(60), rng)


@activity(CRITICAL, "users and groups", names="nis", ports="udp/dynamic udp/834 tcp/111 udp/111")
def nis(stage: Stage, number: int, rng: Random) -> None:
    """ypserv on a port that rpcbind gave out."""
    node = stage.nodes[number]
    call = p.rpc_call(7, 3, bytes(40), program=100004, version=2)[4:]
    for time_s in stage.random_times(number, 150, rng):
        stage.ask(time_s, node, reserved(rng), stage.sms, 834, call, p.rpc_reply(7, bytes(60))[4:], rng)


@activity(CRITICAL, "tickets for NFS and SSH", names="kerberos", ports="tcp/88 udp/88")
def kerberos(stage: Stage, number: int, rng: Random) -> None:
    """AS and TGS requests."""
    for time_s in stage.random_times(number, 3000, rng):
        stage.call(time_s, stage.nodes[number], stage.sms, 88, b"\0\0\1\0" + bytes(256), bytes(700), rng)


@activity(CRITICAL, "clocks", names="chrony", ports="udp/123")
def ntp(stage: Stage, number: int, rng: Random) -> None:
    """NTP with the poll interval of an established client."""
    node, poll = stage.nodes[number], rng.choice((6, 8, 9, 10, 10))
    for time_s in stage.times(number, 2**poll, rng):
        sent = round(time_s * 1e9)
        request = p.ntp(3, stratum=3, poll=poll, sent_ns=sent)
        answer = p.ntp(4, stratum=2, poll=poll, sent_ns=sent + 1000, received_ns=sent, origin=p.ntp_time(sent))
        stage.ask(time_s, node, node.next_port(), stage.sms, 123, request, answer, rng)


# Logs, mail, licences.


@activity(CRITICAL, "messages over UDP are lost", names="rsyslog", ports="udp/514")
def syslog(stage: Stage, number: int, rng: Random) -> None:
    """One socket of each node, no answers."""
    node, own = stage.nodes[number], 32768 + number % 20000
    for time_s in stage.random_times(number, 60, rng):
        stage.ask(time_s, node, own, stage.sms, 514, b"<30>Nov 14 22:13:20 n systemd[1]: Started.", b"", rng)


@activity(CRITICAL, "logs are kept only here", names="rsyslog", ports="tcp/514")
def syslog_tcp(stage: Stage, number: int, rng: Random) -> None:
    """A connection that stays open."""
    stage.stay(number, 514, stage.random_times(number, 60, rng), b"<30>Nov 14 22:13:20 n systemd[1]: x\n", b"", rng)


@activity(CRITICAL, "logs go to Logstash", ports="tcp/5044")
def beats(stage: Stage, number: int, rng: Random) -> None:
    """Filebeat: a connection that stays open; each batch is acknowledged."""
    stage.stay(number, 5044, stage.random_times(number, 30, rng), b"2W" + bytes(400), b"2A" + bytes(4), rng)


@activity(CRITICAL, "nodes deliver the mail of jobs and cron here", names="postfix", ports="tcp/25")
def mail(stage: Stage, number: int, rng: Random) -> None:
    """A message in a while."""
    for time_s in stage.random_times(number, 3600, rng):
        stage.call(
            time_s, stage.nodes[number], stage.sms, 25, b"EHLO n\r\n", b"250 sms\r\n", rng, first=b"220 sms ESMTP\r\n"
        )


@activity(CRITICAL, "programs end without their licence", names="flexlm", ports="tcp/27000")
def licences(stage: Stage, number: int, rng: Random) -> None:
    """Some nodes run a program that holds a licence: a heartbeat every 120 s."""
    if number % 3 == 0:
        stage.stay(number, 27000, stage.times(number, 120, rng), bytes(147), bytes(147), rng)


@activity(CRITICAL, "jobs write their results there", ports="tcp/3306")
def database(stage: Stage, number: int, rng: Random) -> None:
    """Jobs of some nodes use a database."""
    if number % 4 == 0:
        for time_s in stage.random_times(number, 200, rng):
            stage.call(time_s, stage.nodes[number], stage.sms, 3306, bytes(90), bytes(300), rng, first=bytes(78))


@activity(CRITICAL, "jobs fetch their input and container images", names="http", ports="tcp/80 tcp/8080")
def portal(stage: Stage, number: int, rng: Random) -> None:
    """What jobs download."""
    for time_s in stage.random_times(number, 900, rng):
        request = b"GET /data/set-%d.tar HTTP/1.1\r\nHost: sms\r\n\r\n" % rng.randrange(99)
        answer = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(6000)
        stage.call(time_s, stage.nodes[number], stage.sms, 80, request, answer, rng)


@activity(CRITICAL, "jobs pull container images", names="https", ports="tcp/443")
def registry(stage: Stage, number: int, rng: Random) -> None:
    """A registry of containers."""
    for time_s in stage.random_times(number, 900, rng):
        stage.call(time_s, stage.nodes[number], stage.sms, 443, TLS_HELLO + bytes(506), TLS_ANSWER + bytes(9000), rng)


@activity(CRITICAL, "the batch system copies the output of jobs to it", names="ssh", ports="tcp/22")
def stage_out(stage: Stage, number: int, rng: Random) -> None:
    """scp at the end of a job."""
    for time_s in stage.random_times(number, 900, rng):
        stage.call(time_s, stage.nodes[number], stage.sms, 22, bytes(1500), bytes(900), rng, first=b"SSH-2.0-x\r\n")


@activity(CRITICAL, "the way of nodes to the outside", names="nat", ports="tcp/443 udp/123 icmp")
def nat(stage: Stage, number: int, rng: Random) -> None:
    """Connections to outside addresses; their frames go to the management node."""
    outside = [Box(stage.sms.mac, ip_bytes(each)) for each in ("198.51.100.10", "203.0.113.7")]
    for time_s in stage.random_times(number, 400, rng):
        target = rng.choice(outside)
        stage.call(time_s, stage.nodes[number], target, 443, TLS_HELLO + bytes(506), TLS_ANSWER + bytes(3000), rng)


# Measurements that nodes send.


@activity(CRITICAL, "measurements and heartbeats of nodes", names="ganglia", ports="udp/8649")
def ganglia(stage: Stage, number: int, rng: Random) -> None:
    """gmond, by multicast or to the management node (gmond.conf(5))."""
    node, own = stage.nodes[number], 40000 + number % 9000
    multicast = not node.via and stage.random("multicast").random() < 0.5
    target = Box(mac_bytes(GANGLIA[1]), ip_bytes(GANGLIA[0])) if multicast else stage.sms
    head = struct.pack("!II", 133, 5) + b"node1\0\0\0"
    for time_s in stage.times(number, 20, rng, jitter=0.1):
        stage.ask(time_s, node, own, target, 8649, head + bytes(40), b"", rng)


@activity(CRITICAL, "results of checks are lost", names="nagios", ports="tcp/5667")
def nsca(stage: Stage, number: int, rng: Random) -> None:
    """Nodes send the results of their checks (NSCA)."""
    for time_s in stage.times(number, 300, rng, jitter=0.05):
        stage.call(time_s, stage.nodes[number], stage.sms, 5667, bytes(720), b"", rng, first=bytes(132))


@activity(CRITICAL, "measurements of nodes are lost", ports="tcp/8086")
def influx(stage: Stage, number: int, rng: Random) -> None:
    """Telegraf writes every 10 to 60 s."""
    every_s = stage.random("influx").choice((10, 30, 60))
    for time_s in stage.times(number, every_s, rng, jitter=0.1):
        request = b"POST /write?db=telegraf HTTP/1.1\r\n\r\ncpu,host=n usage=3.2\n"
        stage.call(time_s, stage.nodes[number], stage.sms, 8086, request, b"HTTP/1.1 204 No Content\r\n\r\n", rng)


@activity(CRITICAL, "values that active agents send", ports="tcp/10051")
def zabbix_active(stage: Stage, number: int, rng: Random) -> None:
    """Active checks of Zabbix."""
    for time_s in stage.times(number, 60, rng, jitter=0.1):
        stage.call(time_s, stage.nodes[number], stage.sms, 10051, b"ZBXD\1" + bytes(300), b"ZBXD\1" + bytes(60), rng)


@activity(CRITICAL, "a trap that is not received is lost", names="snmp", ports="udp/162")
def traps(stage: Stage, number: int, rng: Random) -> None:
    """Traps of nodes (RFC 3416)."""
    for time_s in stage.random_times(number, 1200, rng, users=False):
        node = stage.nodes[number]
        stage.ask(time_s, node, node.next_port(), stage.sms, 162, b"\x30\x40\2\1\1" + bytes(60), b"", rng)


@activity(CRITICAL, "readings of sensors are lost", ports="tcp/1883")
def mqtt(stage: Stage, number: int, rng: Random) -> None:
    """Sensors publish over a connection that stays open."""
    stage.stay(number, 1883, stage.times(number, 30, rng, jitter=0.1), b"\x30\x20" + bytes(32), b"", rng)


@activity(
    CRITICAL, "nodes renew leases of hours, and lose their addresses without", names="provisioning", ports="udp/67"
)
def renewals(stage: Stage, number: int, rng: Random) -> None:
    """Running nodes renew at half of the lease (RFC 2131, 4.4.5), which a node that boots gets before."""
    node, lease_s = stage.nodes[number], stage.random("lease").choice((3600, 7200, 43200))
    mac, own, options = node.mac.hex(":"), p.ip_text(node.v4), terms(stage, lease_s)
    if number in stage.boots:
        begun = exchange(stage, number, stage.boots[number] + READY_S / 2, b"Linux", lease_s)
        times = repeat_until(begun + lease_s / 2, lease_s / 2, stage.end_s)
    else:
        times = stage.times(number, lease_s / 2, rng, jitter=0.0)
    for time_s in times:
        request = p.bootp(3, mac=mac, xid=number, options=[(60, b"Linux")], own=own)
        answer = p.bootp(5, mac=mac, xid=number, options=options, yours=own, own=own)
        stage.tape.udp(time_s, node, 68, stage.sms, 67, request)
        stage.tape.udp(time_s + 0.001, stage.sms, 67, node, 68, answer)


def repeat_until(time_s: float, every_s: float, end_s: float) -> Iterator[float]:
    """Regular times."""
    while time_s < end_s:
        yield time_s
        time_s += every_s
