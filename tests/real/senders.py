"""Nodes that log numbered lines over TCP or RELP all the time, and which of these lines arrive."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from appliance.lab import Lab
from tests.places import ROOT
from tests.waiting import wait_until

EVERY_S = 0.05
NUMBERED = """\
n=0
while [ ! -e "/run/end $2" ]; do n=$((n+1)); logger $1 -t numbered "$2 $n of them"; echo $n; sleep $3; done
rm "/run/end $2"
"""
SENDERS = """\
global(workDirectory="/var/spool/rsyslog")
module(load="imuxsock" SysSock.Use="off")
%s
input(type="imuxsock" Socket="/run/relp.sock" ruleset="relp")
input(type="imuxsock" Socket="/run/defaults.sock")
ruleset(name="relp") {
%s
}
*.* @@10.77.0.1:514
"""
"""By RELP as documented; and by TCP without a queue of its own and without retries."""
SOCKETS = {"queue": "", "defaults": "-u/run/defaults.sock", "relp": "-u/run/relp.sock"}
"""How `logger` reaches each sender of a node; the lab's own has a queue."""
OVER_TCP = ("queue", "defaults")


def senders_conf() -> str:
    """Configuration of the further senders of a node."""
    text = (ROOT / "docs/running.md").read_text()
    found = re.search(r'^```\n(module\(load="omrelp"\))\n(action.*?)\n```$', text, re.MULTILINE | re.DOTALL)
    assert found
    return SENDERS % found.groups()


@contextmanager
def further_senders(lab: Lab, node: str) -> Iterator[None]:
    """A second rsyslogd on a node."""
    host = lab.host(node)
    host.write("/run/defaults.conf", senders_conf().encode())
    argv = [*host.prefix, "rsyslogd", "-n", "-f", "/run/defaults.conf", "-i", "/run/defaults.pid"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: host.works("test", "-S", "/run/defaults.sock"), "its socket")
        try:
            yield
        finally:
            host.run("sh", "-c", "kill $(cat /run/defaults.pid)", ok=None)
            process.wait(10)


@contextmanager
def steady_lines(lab: Lab, nodes: Iterable[str], senders: Iterable[str], run: str = "") -> Iterator[set[str]]:
    """Lines are logged on nodes all the time; yields a set, which has them afterwards.

    Args:
        senders: by which of ``SOCKETS``.
        run: further words of each line, where a lab has several of these.
    """
    lines: set[str] = set()
    with ExitStack() as stack:
        for node in nodes:
            for sender in senders:
                stack.enter_context(_numbered_lines(lab, node, sender, run, lines))
        yield lines


@contextmanager
def _numbered_lines(lab: Lab, node: str, sender: str, run: str, lines: set[str]) -> Iterator[None]:
    name = " ".join(filter(None, (sender, node, run)))
    argv = [*lab.host(node).prefix, "sh", "-c", NUMBERED, "numbered", SOCKETS[sender], name, str(EVERY_S)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield
        finally:
            lab.host(node).write(f"/run/end {name}", b"")
            (count,) = [int(line) for line in (process.stdout or ()) if line.endswith("\n")][-1:]
            lines |= {f"{name} {number} of them" for number in range(1, count + 1)}
    assert count > 100, f"{name} logged for some seconds"


def numbered(log: str) -> list[str]:
    """The numbered lines of a log."""
    return re.findall(r" numbered: (.*)$", log, re.MULTILINE)


def wait_for_lines(read: Callable[[], Iterable[str]], lines: set[str], timeout_s: float = 60) -> None:
    """Wait until ``read`` returns all these lines, for a while: which ones are lost is for the caller to compare."""
    with suppress(AssertionError):
        wait_until(lambda: lines.issubset(read()), "all lines", timeout_s, 1)
