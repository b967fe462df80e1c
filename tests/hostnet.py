"""What the network of a host is, read before, while and after a verb ran: sms may change only links of its own.

All kernel parameters, links, addresses, routes, rules, neighbours, and the rules of both packet filters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from appliance.host.base import Host

READ = r"""
import json, os, re, subprocess, sys, time

PASSING = re.compile("expires|used|age|valid_life_time|preferred_life_time|stats|stats64|cache|.*_timer|probes|refcnt"
    "|tso_max_.*|gso_.*|gro_.*")  # a bridge has the least of its ports
# What counts or is drawn by the kernel, and what it calculates from its load.
COUNTS = re.compile(
    "kernel/random/|kernel/ns_last_pid|kernel/pty/nr|kernel/perf_|kernel/tainted|kernel/osrelease|fs/.*-(nr|state)|vm/stat_refresh"
    "|net/netfilter/nf_conntrack_count|vm/(min_free_kbytes|lowmem_reserve_ratio)|kernel/sched_domain|fs/quota/"
)

def run(*argv):
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace")
    if done.returncode:
        sys.exit("%s: %s" % (" ".join(argv), done.stderr))
    return done.stdout

def lasting(one):
    if isinstance(one, dict):
        return {name: lasting(value) for name, value in one.items() if not PASSING.fullmatch(name)}
    return [lasting(each) for each in one] if isinstance(one, list) else one

def listed(*words):
    return [lasting(one) for one in json.loads(run("ip", "-json", "-details", *words) or "[]") if one]

found = {}
def put(kind, name, value):
    found["%s %s" % (kind, name)] = value if isinstance(value, str) else json.dumps(value, sort_keys=True)

for top, _, names in os.walk("/proc/sys"):
    for name in names:
        path = os.path.join(top, name)
        if not COUNTS.match(path[len("/proc/sys/"):]):
            try:
                with open(path) as stream:
                    put("sysctl", path[len("/proc/sys/"):], stream.read().strip())
            except (OSError, UnicodeDecodeError):
                pass
for _ in range(50):  # a new address is not used for a second or two
    if "tentative" not in run("ip", "address", "show"):
        break
    time.sleep(0.1)
for one in listed("address", "show"):
    for entry in one.pop("addr_info", ()):
        put("address", "%s %s" % (one["ifname"], entry.get("local")), entry)
    put("link", one["ifname"], one)
for family in ("-4", "-6"):
    for one in listed(family, "route", "show", "table", "all"):
        words = [one.get(name, "") for name in ("dev", "type", "table", "dst", "gateway", "metric", "prefsrc")]
        put("route", " ".join(map(str, (family, *words))), one)
    for number, one in enumerate(listed(family, "rule", "show")):
        put("rule", "%s %d" % (family, number), one)
    for one in listed(family, "neigh", "show"):
        if set(one.get("state", ())) & {"PERMANENT"} or one.get("proxy"):
            put("neighbour", "%s %s" % (one["dev"], one["dst"]), one)
for one in json.loads(run("bridge", "-json", "vlan", "show") or "[]"):
    put("vlan", one["ifname"], one)
table = ""
for line in run("nft", "-s", "list", "ruleset").splitlines():
    table = line if line[:1] not in (" ", "\t", "}", "") else table
    put("nftables", "%s %s" % (table, line.strip()), "")
for program in ("iptables-save", "ip6tables-save"):
    table = ""
    for line in run(program).splitlines():
        table = line if line.startswith("*") else table
        if not line.startswith("#"):
            put(program, "%s %s" % (table, re.sub(r"\[[0-9:]+\]", "", line)), "")
for path in ("/proc/net/ip_tables_names", "/proc/net/ip6_tables_names", "/proc/net/arp_tables_names"):
    if os.path.exists(path):
        with open(path) as stream:
            put("iptables-legacy", path, sorted(stream))
json.dump(found, sys.stdout)
"""
OWN = re.compile(r"\b(veth[0-9a-f]{8}|sms[0-9a-f]{8}h[01]|smsvm-[a-z0-9]+|fd53:6d73:[0-9a-f:]+)\b")
"""Links that sms has made: ports of the container, bridges that it is started on, ports of the VM; and addresses of the
network that the VM advertises, which a host with `accept_ra` takes, and keeps for some time."""


def read_network(host: Host) -> dict[str, str]:
    """Return the network of a host: what it is by what it is about, both as text."""
    found: dict[str, str] = json.loads(host.run("python3", "-c", READ, limit=64 << 20).stdout)
    return found


def find_changes(before: dict[str, str], after: dict[str, str], *, own: bool = False) -> list[str]:
    """Return what is different, a line each.

    Args:
        own: links of sms may be there, with their addresses, routes and parameters.
    """
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and not (own and OWN.search(name))
    ]


@contextmanager
def unchanged(*hosts: Host, own: bool = False) -> Iterator[None]:
    """Nothing is different after the context on any of these hosts; ``own``: as for ``find_changes``."""
    before = [read_network(host) for host in hosts]
    yield
    changes = {
        host.name: found
        for host, one in zip(hosts, before, strict=True)
        if (found := find_changes(one, read_network(host), own=own))
    }
    assert not changes, json.dumps(changes, indent=2)
