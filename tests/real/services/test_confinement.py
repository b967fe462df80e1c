"""What the processes of the running services container may do, as the kernel reports it; what an intruder tries."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from appliance.host.base import Host
from appliance.operations.lab import demo
from tests.real.conftest import NODES, Playground

pytestmark = pytest.mark.real

FIELDS = ("Name", "Uid", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
READ = """for file in /proc/[0-9]*/status; do grep -E "^($1):" "$file" && echo; done 2>/dev/null; true"""
CONTAINER = {"AUDIT_WRITE": 29, "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "NET_ADMIN": 12}
CONTAINER |= {"NET_BIND_SERVICE": 10, "NET_RAW": 13, "SETGID": 6, "SETPCAP": 8, "SETUID": 7, "SYS_CHROOT": 18}
BIND = 1 << CONTAINER["NET_BIND_SERVICE"]

DAEMONS = {
    "munged": (False, 0),
    "slurmctld": (False, 0),
    "rsyslogd": (False, BIND),
    "chronyd": (False, BIND),
    "nft": (True, 1 << CONTAINER["NET_ADMIN"]),
}
"""By name: whether it is root, and its effective capabilities."""


def processes(running: Playground) -> list[dict[str, str]]:
    """The status of every process in the instance, that of the shell which reads them included."""
    text = running.sms("exec", "--", "sh", "-c", READ, "read", "|".join(FIELDS)).text
    return [dict(line.split(":", 1) for line in one.splitlines()) for one in text.split("\n\n") if one]


def bits(process: dict[str, str], name: str) -> int:
    return int(process[name].strip(), 16)


def test_every_process_is_confined(running: Playground) -> None:
    found = processes(running)
    names = {one["Name"].strip() for one in found}
    assert names >= {*DAEMONS, "cron", "master", "sms-supervise", "sms-filesync", "sh"}
    allowed = sum(1 << number for number in CONTAINER.values())
    for one in found:
        assert one["Seccomp"].strip() == "2", one
        assert one["NoNewPrivs"].strip() == "1", one
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert not bits(one, name) & ~allowed, one


def test_daemons_have_only_what_they_need(running: Playground) -> None:
    for one in processes(running):
        if one["Name"].strip() not in DAEMONS:
            continue
        root, capabilities = DAEMONS[one["Name"].strip()]
        assert bits(one, "CapEff") == capabilities, one
        assert all((uid == "0") == root for uid in one["Uid"].split()), one


ATTEMPTS = {
    "the kernel runs a program of the host for a crash": "echo '|/tmp/x' >/proc/sys/kernel/core_pattern",
    "the same for a device": "echo /tmp/x >/sys/kernel/uevent_helper",
    "the same for a file format": "ls /proc/sys/fs/binfmt_misc",
    "kernel parameters of the network": "echo 0 >/proc/sys/net/ipv4/ip_forward",
    "the host crashes": "echo c >/proc/sysrq-trigger",
    "devices of the host": "ls /proc/bus/* /proc/irq/*",
    "a device": "mknod /tmp/disk b 7 0",
    "a mount": "mount -t tmpfs none /mnt",
    "a writable /proc/sys": "mount -o remount,rw /proc/sys",
    "a user namespace": "unshare --user --map-root-user true",
    "a network namespace": "unshare --net true",
    "another process's namespaces": "nsenter -t 1 -m true",
    "the host's time zone": "echo x >>/etc/localtime",
    "the clock": "date -s '2030-01-01'",
    "the host name": "hostname elsewhere",
    "Apptainer's program, by the first process": "chmod 4777 /proc/1/exe",
    "the same by its content": "exec 3<>/proc/1/exe",
    "its log on the host's disk, without a bound": "head -c 200M /dev/zero >/proc/1/fd/1",
    "the host's null device": "chmod 0600 /dev/null",
    "the host's terminal device": "chown 65534 /dev/tty",
    "the same by what a program has got": "chmod 0600 /proc/self/fd/0",
    "the same by what the first process has got": "chmod 0600 /proc/1/fd/0",
    "what its first process has open": "ls /proc/1/fd/*/.",
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_root_inside_cannot_reach_the_host(running: Playground, attempt: str) -> None:
    done = running.sms("exec", "--", "sh", "-c", ATTEMPTS[attempt], ok=None)
    assert done.status, attempt


def test_logs_are_rotated_for_a_daemon_that_is_not_root(running: Playground) -> None:
    owner = ("exec", "--", "stat", "-c", "%U:%G %a", "/var/log/messages")
    assert running.sms(*owner).text == "syslog:syslog 640"
    running.sms("exec", "--", "logrotate", "--force", "--state", "/var/lib/logrotate/status", "/etc/logrotate.conf")
    assert running.sms(*owner).text == "syslog:syslog 640"
    assert "node1" in demo.syslog_arrives(running.lab, running.host("node1"))
    demo.wait_for("every service", lambda: "yes" if running.status()["healthy"] else "")


def test_a_user_of_the_container_sends_mail_without_setgid(running: Playground) -> None:
    """As slurmctld does; its group is its own, because no program can change it."""
    script = "id -G; echo test | mail -s confined root && echo sent"
    argv = ("exec", "--", "setpriv", "--reuid=slurm", "--regid=slurm", "--groups=354", "sh", "-c", script)
    assert running.sms(*argv).text.splitlines()[-1] == "sent"
    demo.wait_idle(running.host("node1"), NODES)


WATCH = """
i=0
while [ $i -lt 3000 ]; do
    i=$((i + 1))
    for process in /proc/[0-9]*; do
        # Opened first: the process may run a program of the container when its name is read.
        { case $(readlink /proc/self/fd/3) in
            */starter) chmod 4777 /proc/self/fd/3 && touch /root/changed ;;
        esac; } 3<"$process/exe"
    done
done 2>/dev/null
"""
"""A race with Apptainer's own program, which runs for a moment in each process that joins the container."""


def test_a_program_that_joins_is_no_way_to_apptainers_programs(running: Playground) -> None:
    host = running.host("host-a")
    running.sms("exec", "--", "sh", "-c", f"({WATCH}) >/dev/null 2>&1 & echo $! >/root/watch")
    for _ in range(5):
        running.sms("exec", "--", "true")
    script = "kill $(cat /root/watch); rm /root/watch; test ! -e /root/changed"
    assert running.sms("exec", "--", "sh", "-c", script, ok=None).status == 0
    starter = host.run("sh", "-c", "stat -c %a /usr/lib/*/apptainer/bin/starter").text
    assert starter == "755"


SPY = """
import os
try:
    with open("/var/spool/spy", "a") as stream:
        stream.write("%s %s\\n" % (os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")))
except OSError:
    pass
"""
"""A library of the overlay that each start of Python runs."""
LIBRARY = "$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"))')/sitecustomize.py"


def test_programs_of_the_overlay_run_in_the_instance_only(running: Playground) -> None:
    """Root in the container spoils the mark, so the next start seeds the overlay: by programs of the image."""
    host = running.host("host-a")
    spoil = f": >/var/spool/spy; chmod 666 /var/spool/spy; echo spoiled >/etc/sms/seed.mark; cat >{LIBRARY}"
    host.run("sms", "exec", "--", "sh", "-c", spoil, input=SPY.encode(), timeout=60)
    try:
        running.sms("stop")
        running.sms("-q", "start")
        script = "cat /var/spool/spy; echo; readlink /proc/self/ns/pid /proc/self/ns/net; cat /etc/sms/seed.mark"
        spied, _, rest = running.sms("exec", "--", "sh", "-c", script).text.partition("\n\n")
        seen = {tuple(line.split()) for line in spied.splitlines()}
        words = rest.split()
        own, mark = tuple(words[:2]), " ".join(words[2:])
        outside = host.run("readlink", "/proc/self/ns/pid", "/proc/self/ns/net").text.split()
        assert mark != "spoiled", "it was not seeded"
        assert own in seen and not {word for line in seen for word in line} & set(outside)
        assert len(seen) <= 2, "it ran elsewhere than in the instance before and the one after"
    finally:
        running.sms("exec", "--", "sh", "-c", f": >{LIBRARY}")


def test_a_confined_instance_has_no_warning(running: Playground) -> None:
    shown = running.status()
    assert not [fault for fault in shown["warnings"] if "confine" in fault], shown["warnings"]


WEAKER = """#!/bin/sh
case "$1 $2" in
    %(runs)s)
        for word; do
            shift
            case $word in %(option)s) set -- "$@" %(instead)s ;; *) set -- "$@" "$word" ;; esac
        done
        ;;
esac
exec %(real)s.kept "$@"
"""
"""In the place of Apptainer: it drops or replaces an option of some runs."""


@contextmanager
def weaker(host: Host) -> Iterator[Callable[[str, str, str], None]]:
    """Apptainer of the host is replaced; yields what sets the runs, the option, and what is in its place."""
    real = host.run("sh", "-c", "command -v apptainer").text
    host.run("cp", "-p", real, f"{real}.kept")

    def drop(runs: str, option: str, instead: str) -> None:
        text = WEAKER % {"runs": runs, "option": option, "instead": instead, "real": real}
        host.write(real, text.encode(), mode=0o755)

    try:
        yield drop
    finally:
        host.run("mv", f"{real}.kept", real)


def test_a_host_whose_apptainer_does_not_confine_is_refused(running: Playground) -> None:
    """It drops the option in all runs, as an Apptainer without libseccomp ignores it."""
    running.sms("stop")
    with weaker(running.host("host-a")) as drop:
        drop("*", "seccomp:*", "selinux:")
        done = running.sms("start", ok=None)
    running.sms("-q", "start")
    assert done.status == 3 and b"system calls are not filtered (seccomp)" in done.stderr


PERMISSIVE = "/root/permissive.json"
LESS = {
    "seccomp:*": ("selinux:", "system calls are not filtered (seccomp)"),
    "seccomp:/*": (f"seccomp:{PERMISSIVE}", "its filter of system calls permits what it should not (seccomp)"),
    "CAP_*": ('"$word,CAP_SYS_PTRACE"', "CapBnd is"),
    "--ipc": ("", "it is in the host's namespace: ipc"),
    "sys": ("/etc/hosts", "/sys is mounted"),
}
"""Options of an instance, what is in their place, and what the start reports."""


def test_an_instance_with_less_confinement_is_stopped(running: Playground) -> None:
    """The trial before the start is confined, and the instance is not: it ends, and the lease is as before."""
    running.sms("stop")
    host = running.host("host-a")
    host.write(PERMISSIVE, json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}).encode())
    try:
        with weaker(host) as drop:
            for option, (instead, why) in LESS.items():
                drop('"instance start"', option, instead)
                done = running.sms("start", ok=None)
                assert done.status == 5 and why in done.stderr.decode(), (option, done.stderr)
                running.assert_nothing_runs()
    finally:
        running.sms("-q", "start")


ADVERTISE = """
import socket, struct, sys
one = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
index = socket.if_nametoindex(sys.argv[1])
one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
header = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0)
prefix = struct.pack("!BBBBIII", 3, 4, 64, 0xC0, 86400, 86400, 0) + socket.inet_pton(socket.AF_INET6, "2001:db8:66::")
for _ in range(3):
    one.sendto(header + prefix, ("ff02::1", 0, 0, index))
"""
"""A router advertisement (RFC 4861): a default router, and a prefix from which hosts make addresses."""


def test_router_advertisements_and_redirects_of_nodes_are_ignored(running: Playground) -> None:
    script = "ip -o -6 address show scope global; ip -6 route show default; ip -6 route show 2001:db8:66::/64"
    node = running.host("node1")
    argv = ["nsenter", f"--net=/proc/{node.pid}/ns/net", sys.executable, "-c", ADVERTISE, "eth0"]
    for _ in range(2):
        subprocess.run(argv, check=True)
        time.sleep(0.5)
    assert running.sms("exec", "--", "sh", "-c", script).text == ""
    names = running.sms("exec", "--", "ls", "/proc/sys/net/ipv6/conf").text.split()
    assert {"eth0", "eth1", "probe0", "probe1"} <= set(names)
    read = 'cd /proc/sys/net; for one in "$@"; do echo "$one $(cat "$one")"; done'
    of_ipv6 = [f"ipv6/conf/{name}/{what}" for name in names for what in ("accept_ra", "autoconf", "accept_redirects")]
    of_ipv6 = [path for path in of_ipv6 if path.split("/")[2] not in ("all", "lo")]
    found = running.sms("exec", "--", "sh", "-c", read, "sh", *of_ipv6).text.splitlines()
    assert len(found) == len(of_ipv6) and [line for line in found if not line.endswith(" 0")] == []
    of_ipv4 = [f"ipv4/conf/{name}/accept_redirects" for name in ("all", "default", "eth0", "eth1", "probe0")]
    found = running.sms("exec", "--", "sh", "-c", read, "sh", *of_ipv4).text.splitlines()
    assert [line for line in found if not line.endswith(" 0")] == []
