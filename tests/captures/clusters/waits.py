"""What can wait: the administrator's own connections, boots, updates; and machines that serve the management node."""

from __future__ import annotations

import struct
from random import Random

from tests.captures import packets as p
from tests.captures.clusters.leases import DAY_S, exchange
from tests.captures.clusters.needed import TLS_ANSWER, TLS_HELLO, reserved
from tests.captures.clusters.stage import DEFERRABLE, Stage, activity, box
from tests.captures.clusters.tape import Box, Stream

OK = b"HTTP/1.1 200 OK\r\n\r\n"

# Provisioning.


def boot_loader(stage: Stage, number: int, time_s: float, name: bytes, rng: Random) -> float:
    """A file by TFTP (RFC 1350); return the time after it."""
    node, own, theirs = stage.nodes[number], stage.nodes[number].next_port(), rng.randrange(32768, 60999)
    stage.tape.udp(time_s, node, own, stage.sms, 69, b"\0\1" + name + b"\0octet\0blksize\0001456\0")
    for block in range(1, 6):
        time_s += 0.002
        size = 1456 if block < 5 else 300
        stage.tape.udp(time_s, stage.sms, theirs, node, own, struct.pack("!HH", 3, block) + bytes(size))
        stage.tape.udp(time_s + 0.001, node, own, stage.sms, theirs, struct.pack("!HH", 4, block))
    return time_s + 0.1


def boot_by_http(stage: Stage, number: int, rng: Random, port: int, loader: bytes, paths: tuple[bytes, ...]) -> None:
    """PXE, a boot loader, then the image by HTTP; paths hold the node's link address."""
    if number not in stage.boots:
        return
    time_s = exchange(stage, number, stage.boots[number], b"PXEClient:Arch:00007:UNDI:003016", 14 * DAY_S)
    time_s = boot_loader(stage, number, time_s, loader, rng)
    time_s = exchange(stage, number, time_s + 2, b"iPXE", 14 * DAY_S)
    for path in paths:
        mac = stage.nodes[number].mac.hex(":").encode()
        request = b"GET " + path.replace(b"MAC", mac) + b" HTTP/1.1\r\nHost: 10.1.0.1\r\n\r\n"
        time_s = stage.call(time_s + 2, stage.nodes[number], stage.sms, port, request, OK + bytes(15000), rng)


BOOT = "only a node that boots needs it, when the administrator says"
BOOT_PORTS = "udp/67 udp/68 udp/69 udp/dynamic tcp/80"


@activity(DEFERRABLE, BOOT, names="provisioning", ports=BOOT_PORTS)
def warewulf3_boot(stage: Stage, number: int, rng: Random) -> None:
    """Warewulf 3: iPXE, bootstrap, VNFS."""
    paths = b"/WW/ipxe/cfg/MAC", b"/WW/bootstrap/7?hwaddr=MAC", b"/WW/vnfs?hwaddr=MAC"
    boot_by_http(stage, number, rng, 80, b"warewulf/ipxe/bin-x86_64-efi/ipxe.efi", paths)


@activity(DEFERRABLE, "nodes fetch changed files only", names="warewulf", ports="tcp/80")
def warewulf3_files(stage: Stage, number: int, rng: Random) -> None:
    """wwgetfiles, every five minutes by cron."""
    for time_s in stage.times(number, 300, rng):
        request = b"GET /WW/file?hwaddr=%s&timestamp=0 HTTP/1.1\r\n\r\n" % stage.nodes[number].mac.hex(":").encode()
        stage.call(time_s, stage.nodes[number], stage.sms, 80, request, OK + bytes(400), rng)


@activity(DEFERRABLE, BOOT, names="provisioning warewulf", ports="udp/67 udp/68 udp/69 udp/dynamic tcp/9873")
def warewulf4_boot(stage: Stage, number: int, rng: Random) -> None:
    """Warewulf 4: the stages of warewulfd."""
    stages = (b"ipxe", b"kernel", b"image", b"system")
    paths = tuple(b"/%s/MAC?assetkey=&uuid=1" % each for each in stages)
    boot_by_http(stage, number, rng, 9873, b"warewulf/x86_64.efi", paths)


@activity(DEFERRABLE, "nodes fetch changed files only", names="warewulf", ports="tcp/9873")
def warewulf4_files(stage: Stage, number: int, rng: Random) -> None:
    """wwclient, every minute by default in 4.x."""
    for time_s in stage.times(number, 60, rng):
        request = b"GET /runtime/%s?stage=runtime HTTP/1.1\r\n\r\n" % stage.nodes[number].mac.hex(":").encode()
        stage.call(time_s, stage.nodes[number], stage.sms, 9873, request, OK + bytes(1200), rng, own=900 + number % 100)


@activity(DEFERRABLE, BOOT, names="provisioning http", ports=BOOT_PORTS + " tcp/3001 tcp/3002")
def xcat_boot(stage: Stage, number: int, rng: Random) -> None:
    """xCAT, stateless: xnba, kernel, initrd, root image by HTTP; then credentials and the state by xcatd."""
    image = b"/install/netboot/rocky9.4/x86_64/compute"
    paths = (
        b"/tftpboot/xcat/xnba/nodes/n1.uefi",
        b"/tftpboot/xcat/osimage/compute/kernel",
        b"/tftpboot/xcat/osimage/compute/initrd-stateless.gz",
        image + b"/rootimg.cpio.gz",
        b"/install/postscripts/xcatdsklspost",
    )
    boot_by_http(stage, number, rng, 80, b"xcat/xnba.efi", paths)
    if number in stage.boots:
        node, time_s = stage.nodes[number], stage.boots[number] + 30
        for step in range(3):
            stage.call(time_s + step, node, stage.sms, 3001, TLS_HELLO + bytes(400), TLS_ANSWER + bytes(2000), rng)
        for text in (b"installstatus netbooting", b"installstatus booted"):
            time_s += 8
            stage.call(time_s, node, stage.sms, 3002, text + b"\n", b"done\n", rng, first=b"ready\n")


# The administrator's connections to nodes.


@activity(DEFERRABLE, "the administrator's commands", names="ssh", ports="tcp/22")
def ssh(stage: Stage, number: int, rng: Random) -> None:
    """pdsh, Ansible, a shell now and then."""
    for time_s in stage.random_times(number, 1500, rng):
        stage.call(time_s, stage.sms, stage.nodes[number], 22, bytes(1500), bytes(900), rng, first=b"SSH-2.0-x\r\n")


@activity(DEFERRABLE, "the administrator's commands", names="rsh", ports="tcp/514")
def rsh(stage: Stage, number: int, rng: Random) -> None:
    """rcmd(3) from a port below 1024."""
    for time_s in stage.random_times(number, 1500, rng):
        node, own = stage.nodes[number], reserved(rng)
        stage.call(time_s, stage.sms, node, 514, b"1022\0root\0root\0uptime\0", b"\0up\n", rng, own=own)


@activity(DEFERRABLE, "power and consoles", names="ipmi", ports="udp/623")
def ipmi(stage: Stage, number: int, rng: Random) -> None:
    """BMCs of nodes in the same network."""
    bmc = box(number, f"10.1.{128 + number // 250}.{1 + number % 250}", vendor=3)
    for time_s in stage.times(number, 300, rng):
        stage.ask(time_s, stage.sms, stage.sms.next_port(), bmc, 623, b"\6\0\xff\7" + bytes(20), bytes(36), rng)


@activity(DEFERRABLE, "health of the hardware, read by the management node", ports="tcp/443", names="https")
def redfish(stage: Stage, number: int, rng: Random) -> None:
    """Redfish over TLS to BMCs."""
    bmc = box(number, f"10.1.{128 + number // 250}.{1 + number % 250}", vendor=3)
    for time_s in stage.times(number, 600, rng):
        stage.call(time_s, stage.sms, bmc, 443, TLS_HELLO + bytes(506), TLS_ANSWER + bytes(2500), rng)


@activity(
    DEFERRABLE, "values that the management node reads: a gap in the curves", names="prometheus", ports="tcp/9100"
)
def exporter(stage: Stage, number: int, rng: Random) -> None:
    """Prometheus: one connection to each node that stays open."""
    stream = Stream(stage.tape, stage.sms, stage.nodes[number], 9100)
    if number in stage.boots and stage.ready_s(number) < stage.end_s:
        stream.open(stage.ready_s(number))
    for time_s in stage.times(number, stage.random("scrape").choice((15, 30, 60)), rng):
        stream.send(time_s, b"GET /metrics HTTP/1.1\r\n\r\n")
        stream.send(time_s + 0.02, OK + bytes(3000), back=True)


@activity(DEFERRABLE, "values that the management node reads", ports="tcp/9400")
def exporter_gpu(stage: Stage, number: int, rng: Random) -> None:
    """An exporter on a port that the catalogue does not know; a new connection each time."""
    for time_s in stage.times(number, 60, rng):
        stage.call(time_s, stage.sms, stage.nodes[number], 9400, b"GET /metrics HTTP/1.1\r\n\r\n", bytes(2000), rng)


@activity(DEFERRABLE, "gmetad reads the nodes' own gmond: a gap in the curves", names="gmetad", ports="tcp/8649")
def ganglia_polled(stage: Stage, number: int, rng: Random) -> None:
    """gmetad reads XML of gmond, which listens on its node only (gmetad.conf(5), data_source)."""
    for time_s in stage.times(number, 15, rng):
        stage.call(time_s, stage.sms, stage.nodes[number], 8649, b"", b'<?xml version="1.0"?>' + bytes(2500), rng)


@activity(DEFERRABLE, "checks by the management node", names="nagios", ports="tcp/5666")
def nrpe(stage: Stage, number: int, rng: Random) -> None:
    """Checks of Nagios, every five minutes."""
    for time_s in stage.times(number, 300, rng):
        stage.call(time_s, stage.sms, stage.nodes[number], 5666, bytes(1036), bytes(1036), rng)


@activity(DEFERRABLE, "values that the management node reads", ports="tcp/10050")
def zabbix_passive(stage: Stage, number: int, rng: Random) -> None:
    """Passive checks of Zabbix."""
    for time_s in stage.times(number, 60, rng):
        stage.call(time_s, stage.sms, stage.nodes[number], 10050, b"ZBXD\1" + bytes(30), b"ZBXD\1" + bytes(10), rng)


@activity(DEFERRABLE, "values that the management node reads", names="snmp", ports="udp/161")
def snmp(stage: Stage, number: int, rng: Random) -> None:
    """Polls of switches, PDUs and some nodes."""
    if number % 8 == 0:
        target = box(number // 8, f"10.1.127.{1 + number // 8 % 250}", vendor=4)
        for time_s in stage.times(number, 300, rng):
            stage.ask(time_s, stage.sms, stage.sms.next_port(), target, 161, bytes(60), bytes(90), rng)


@activity(DEFERRABLE, "backups run again the next night", ports="tcp/9102 tcp/9103")
def bacula(stage: Stage, number: int, rng: Random) -> None:
    """The director calls the file daemon, which calls the storage daemon: both on the management node."""
    if number % 5 == 0:
        for time_s in stage.random_times(number, 3000, rng, users=False):
            stage.call(time_s, stage.sms, stage.nodes[number], 9102, bytes(90), bytes(60), rng)
            stage.call(time_s + 0.2, stage.nodes[number], stage.sms, 9103, bytes(9000), bytes(60), rng)


# Nodes ask, but only for changes.


@activity(DEFERRABLE, "changes of the configuration: a run that fails is repeated", ports="tcp/8140")
def puppet(stage: Stage, number: int, rng: Random) -> None:
    """puppet agent, every 30 minutes, over TLS."""
    for time_s in stage.times(number, 1800, rng):
        stage.call(time_s, stage.nodes[number], stage.sms, 8140, TLS_HELLO + bytes(4000), TLS_ANSWER + bytes(9000), rng)


@activity(DEFERRABLE, "the administrator's commands, over connections that nodes keep open", ports="tcp/4505 tcp/4506")
def salt(stage: Stage, number: int, rng: Random) -> None:
    """salt-minion: keep-alives on the publisher's port, returns on the other."""
    stage.stay(number, 4505, stage.times(number, 300, rng), bytes(8), bytes(8), rng)
    for time_s in stage.random_times(number, 3000, rng, users=False):
        stage.call(time_s, stage.nodes[number], stage.sms, 4506, bytes(300), bytes(90), rng)


@activity(DEFERRABLE, "changes of the configuration: a run that fails is repeated", ports="tcp/5308")
def cfengine(stage: Stage, number: int, rng: Random) -> None:
    """cf-agent, every five minutes, over TLS."""
    for time_s in stage.times(number, 300, rng, jitter=0.1):
        stage.call(time_s, stage.nodes[number], stage.sms, 5308, TLS_HELLO + bytes(900), TLS_ANSWER + bytes(3000), rng)


@activity(DEFERRABLE, "updates of packages", names="https", ports="tcp/443")
def subscription(stage: Stage, number: int, rng: Random) -> None:
    """rhsmcertd and the like: every four hours (rhsm.conf(5), certCheckInterval)."""
    for time_s in stage.times(number, 14400, rng):
        stage.call(time_s, stage.nodes[number], stage.sms, 443, TLS_HELLO + bytes(700), TLS_ANSWER + bytes(5000), rng)


@activity(DEFERRABLE, "updates of packages", names="http repository", ports="tcp/80")
def repository(stage: Stage, number: int, rng: Random) -> None:
    """dnf-makecache.timer: an hour after the last, with a random delay of up to an hour."""
    times = stage.times(number, 5400, rng, jitter=0.33)
    for time_s in times:
        request = b"GET /repo/repodata/repomd.xml HTTP/1.1\r\n\r\n"
        stage.call(time_s, stage.nodes[number], stage.sms, 80, request, OK + bytes(3000), rng)


@activity(DEFERRABLE, "files that changed", ports="tcp/873")
def rsync(stage: Stage, number: int, rng: Random) -> None:
    """cron fetches a module every ten minutes."""
    for time_s in stage.times(number, 600, rng):
        stage.call(
            time_s, stage.nodes[number], stage.sms, 873, b"etc\n" + bytes(60), bytes(900), rng, first=b"@RSYNCD: 31.0\n"
        )


# Machines that serve the management node: nodes do not use it for that.

OTHER = "another machine serves it; nodes do not use the management node for it"


def other_server(number: int) -> Box:
    """A machine beside the nodes."""
    return box(number, f"10.1.0.{20 + number}", vendor=5)


@activity(DEFERRABLE, OTHER, names="nfs", ports="tcp/2049")
def other_nfs(stage: Stage, number: int, rng: Random) -> None:
    """The management node mounts a filer."""
    if number == 0:
        stream = Stream(stage.tape, stage.sms, other_server(1), 2049, own=777)
        for time_s in stage.random_times(number, 20, rng):
            stream.send(time_s, p.rpc_call(1, 1, bytes(40)))
            stream.send(time_s + 0.001, p.rpc_reply(1, bytes(112)), back=True)


@activity(DEFERRABLE, OTHER, names="dns", ports="udp/53")
def other_dns(stage: Stage, number: int, rng: Random) -> None:
    """The management node queries the name server of the site."""
    if number == 0:
        for time_s in stage.random_times(number, 60, rng):
            stage.ask(time_s, stage.sms, stage.sms.next_port(), other_server(2), 53, bytes(34), bytes(90), rng)


@activity(DEFERRABLE, OTHER, names="ldap", ports="tcp/389")
def other_ldap(stage: Stage, number: int, rng: Random) -> None:
    """The management node looks up users elsewhere."""
    if number == 0:
        for time_s in stage.random_times(number, 300, rng):
            stage.call(time_s, stage.sms, other_server(3), 389, bytes(90), bytes(400), rng)


@activity(DEFERRABLE, OTHER, ports="tcp/988")
def other_lustre(stage: Stage, number: int, rng: Random) -> None:
    """The management node is a client of a Lustre file system: pings to its four servers."""
    if number == 0:
        for server in range(4):
            stream = Stream(stage.tape, stage.sms, other_server(5 + server), 988, own=1021 - server)
            for time_s in stage.times(number, 25, rng):
                stream.send(time_s, bytes(400))
                stream.send(time_s + 0.001, bytes(360), back=True)


@activity(DEFERRABLE, "not a service")
def arp(stage: Stage, number: int, rng: Random) -> None:
    """ARP of nodes and the management node."""
    node, sms = stage.nodes[number], stage.sms
    if node.via:
        return
    for time_s in stage.times(number, 240, rng, jitter=0.2):
        request = p.arp(node.mac.hex(":"), p.ip_text(node.v4), p.ip_text(sms.v4))
        stage.tape.raw(time_s, node, request, p.ARP)
        answer = p.arp(sms.mac.hex(":"), p.ip_text(sms.v4), p.ip_text(node.v4), answer=True)
        stage.tape.raw(time_s + 1e-4, sms, answer, p.ARP, to=node.mac)
