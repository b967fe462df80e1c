"""Programs that the catalogue does not know, people on login nodes, addresses of a boot's first system.

They were written, and their truth, before a verdict on one of them was seen.
"""

from __future__ import annotations

from random import Random

from tests.captures.clusters.leases import exchange
from tests.captures.clusters.needed import TLS_ANSWER, TLS_HELLO
from tests.captures.clusters.stage import CRITICAL, DEFERRABLE, READY_S, Stage, activity
from tests.captures.clusters.waits import OK

# Nodes send what is lost otherwise.


@activity(CRITICAL, "measurements of nodes are lost", ports="tcp/2003")
def graphite(stage: Stage, number: int, rng: Random) -> None:
    """Lines of text over a connection that stays open (Carbon)."""
    times = stage.times(number, stage.random("graphite").choice((10, 60)), rng, jitter=0.05)
    stage.stay(number, 2003, times, b"n.load 0.1 1700000000\n" * 20, b"", rng)


@activity(CRITICAL, "measurements of nodes are lost", ports="udp/25826")
def collectd(stage: Stage, number: int, rng: Random) -> None:
    """Values every 10 s, no answers (collectd's network plugin)."""
    node, own = stage.nodes[number], 33000 + number % 20000
    for time_s in stage.times(number, 10, rng, jitter=0.02):
        stage.ask(time_s, node, own, stage.sms, 25826, b"\0\0\0\7n1\0" + bytes(600), b"", rng)


@activity(CRITICAL, "the state of nodes turns purple, and is lost", ports="tcp/1984")
def xymon(stage: Stage, number: int, rng: Random) -> None:
    """A status message every five minutes (Xymon)."""
    for time_s in stage.times(number, 300, rng, jitter=0.05):
        stage.call(time_s, stage.nodes[number], stage.sms, 1984, b"status n.cpu green\n" + bytes(900), b"", rng)


@activity(CRITICAL, "results of checks that agents send", ports="tcp/5665")
def icinga(stage: Stage, number: int, rng: Random) -> None:
    """A connection of the agent that stays open, over TLS."""
    stage.stay(number, 5665, stage.times(number, 10, rng, jitter=0.2), b"\x17\3\3" + bytes(300), bytes(60), rng)


@activity(CRITICAL, "jobs take their work from it", ports="tcp/6379")
def redis(stage: Stage, number: int, rng: Random) -> None:
    """A queue of tasks on some nodes."""
    if number % 2 == 0:
        stage.stay(number, 6379, stage.random_times(number, 60, rng), b"*2\r\n$5\r\nBLPOP\r\n", b"*2\r\n", rng)


@activity(CRITICAL, "jobs write their results there", ports="tcp/27017")
def mongodb(stage: Stage, number: int, rng: Random) -> None:
    """A database of a workflow's results; a connection for each task."""
    if number % 3 == 0:
        for time_s in stage.random_times(number, 300, rng):
            stage.call(time_s, stage.nodes[number], stage.sms, 27017, bytes(200), bytes(120), rng)


@activity(CRITICAL, "nodes find their services by it", ports="tcp/8300 tcp/8301 udp/8301")
def consul(stage: Stage, number: int, rng: Random) -> None:
    """A connection of the agent, and gossip (Serf)."""
    stage.stay(number, 8300, stage.times(number, 60, rng, jitter=0.3), bytes(200), bytes(90), rng)
    for time_s in stage.random_times(number, 60, rng, users=False):
        stage.ask(time_s, stage.nodes[number], 8301, stage.sms, 8301, bytes(60), bytes(40), rng)


# What can wait.


@activity(DEFERRABLE, "backups run again the next night", ports="tcp/4971")
def burp(stage: Stage, number: int, rng: Random) -> None:
    """Clients ask every 20 minutes whether it is time (BURP)."""
    for time_s in stage.times(number, 1200, rng, jitter=0.02):
        stage.call(time_s, stage.nodes[number], stage.sms, 4971, TLS_HELLO + bytes(600), TLS_ANSWER + bytes(900), rng)


@activity(DEFERRABLE, "values that the management node reads", ports="tcp/6556")
def checkmk(stage: Stage, number: int, rng: Random) -> None:
    """The agent's output, each minute (Checkmk)."""
    for time_s in stage.times(number, 60, rng):
        stage.call(time_s, stage.sms, stage.nodes[number], 6556, b"\n", b"<<<check_mk>>>\n" + bytes(9000), rng)


@activity(DEFERRABLE, "values that the management node reads", ports="tcp/4949")
def munin(stage: Stage, number: int, rng: Random) -> None:
    """Munin's master, every five minutes."""
    for time_s in stage.times(number, 300, rng):
        stage.call(time_s, stage.sms, stage.nodes[number], 4949, b"fetch load\n", bytes(400), rng, first=b"# munin\n")


@activity(DEFERRABLE, "updates of packages", names="http repository", ports="tcp/80")
def debian(stage: Stage, number: int, rng: Random) -> None:
    """apt-daily.timer: twice a day, with a random delay of up to 12 hours; a mirror on the management node."""
    for time_s in stage.random_times(number, 43200 / 4, rng, users=False):
        request = b"GET /debian/dists/bookworm/InRelease HTTP/1.1\r\nHost: sms\r\n\r\n"
        stage.call(time_s, stage.nodes[number], stage.sms, 80, request, OK + bytes(5000), rng)


@activity(DEFERRABLE, "lists of viruses: the next attempt finds them", names="http", ports="tcp/80")
def clamav(stage: Stage, number: int, rng: Random) -> None:
    """freshclam of a private mirror, every two hours."""
    for time_s in stage.times(number, 7200, rng):
        request = b"GET /clamav/daily.cvd HTTP/1.1\r\nHost: sms\r\n\r\n"
        stage.call(time_s, stage.nodes[number], stage.sms, 80, request, b"HTTP/1.1 304 Not Modified\r\n\r\n", rng)


@activity(DEFERRABLE, "an inventory, sent again the next day", names="http", ports="tcp/80")
def inventory(stage: Stage, number: int, rng: Random) -> None:
    """OCS Inventory's agent, once a day."""
    for time_s in stage.random_times(number, 86400, rng, users=False):
        request = b"POST /ocsinventory HTTP/1.1\r\nHost: sms\r\n\r\n" + bytes(4000)
        stage.call(time_s, stage.nodes[number], stage.sms, 80, request, OK + bytes(300), rng)


@activity(DEFERRABLE, "people on a login node, and from there on the management node", names="ssh", ports="tcp/22")
def people(stage: Stage, number: int, rng: Random) -> None:
    """The first nodes are login nodes: administrators go on from there."""
    if number < stage.logins:
        for time_s in stage.random_times(number, 1500, rng):
            stage.call(
                time_s, stage.nodes[number], stage.sms, 22, bytes(2500), bytes(9000), rng, first=b"SSH-2.0-x\r\n"
            )


@activity(
    DEFERRABLE,
    "the boot's first system asks for an address; the node's own is fixed",
    names="provisioning",
    ports="udp/67",
)
def initrd(stage: Stage, number: int, rng: Random) -> None:
    """dracut, udhcpc: a lease of hours that nobody renews, as the node's system has its address in a file."""
    if number not in stage.boots:
        return
    exchange(
        stage, number, stage.boots[number] + READY_S / 2, b"udhcp 1.36.1", stage.random("initrd").choice((600, 21600))
    )
