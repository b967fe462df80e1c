"""What engines add to the hosts of a lab: programs, commands, files, steps of a boot. Pure but for ``SMS_MACHINE``."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from appliance.lab.engines.agents import Agent, ClusterNode, Files, control_plane, prepare_node
from appliance.lab.layout import BALANCED, CONTROL, PROVISIONING, PUBLIC, SERVER, WORKER, LabHost, Layout

DISK = "/var/lib/engines"
"""On every host of an engine: what it keeps while it is off."""
VOLUMES = "/srv/volumes"
"""On each cluster node: the same folder, with the volumes of claims."""
FILES = Files(data=DISK, keys="/lab/keys")
# A client that registers before the servers have a key tries it again half a minute later.
WAIT = """\
has_key() {{
    exec 3<>"/dev/tcp/$1/4646" && printf 'GET /.well-known/jwks.json HTTP/1.0\\r\\n\\r\\n' >&3 && grep -q kid <&3
}}
while :; do
    for server in {}; do (has_key "$server") 2>/dev/null && break 2; done
    sleep 0.3
done
"""
KUBECTL = ("kubectl",)
CONTROL_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", *KUBECTL)
WORKER_PROGRAMS = ("kubelet", "kube-proxy", *KUBECTL)
FORWARD = "echo 1 >/proc/sys/net/ipv4/ip_forward"
STATE = "/var/lib/sms/nomad/lab"
STOP_S = "600s"
"""The longest `kill_timeout` that a client of Nomad accepts; 30 s by default."""


def programs(layout: Layout, host: LabHost) -> tuple[str, ...]:
    """Return the engines' programs on a host."""
    found: tuple[str, ...] = ()
    if "nomad" in layout.engines and host.kind in (SERVER, "carrier", "admin", "node"):
        found += ("nomad",)
    if "kubernetes" in layout.engines:
        found += {CONTROL: CONTROL_PROGRAMS, WORKER: WORKER_PROGRAMS, "carrier": KUBECTL, "admin": KUBECTL}.get(
            host.kind, ()
        )
    return found


def has_agent(layout: Layout, host: LabHost) -> bool:
    """Return whether an agent of Nomad runs on a host."""
    return "nomad" in layout.engines and (host.kind in (SERVER, "node") or host == layout.hosts_of("carrier")[0])


def has_disk(layout: Layout, host: LabHost) -> bool:
    """Return whether a host has a folder for its engine."""
    return host.kind in (SERVER, CONTROL, WORKER) or has_agent(layout, host)


def is_forwarded(layout: Layout, host: LabHost) -> bool:
    """Return whether a host without an agent reaches Nomad's API by a forwarded port, as by a tunnel of ssh."""
    return "nomad" in programs(layout, host) and not has_agent(layout, host)


API = "http://127.0.0.1:4646"
"""Nomad's API, as each host reaches it: sms sends no keys over a network unencrypted."""


def commands(layout: Layout, host: LabHost) -> dict[str, tuple[str, str]]:
    """Return by name what runs on a host: its command, and a line of bash that succeeds once it works."""
    found: dict[str, tuple[str, str]] = {}
    if has_agent(layout, host):
        path, shown = ("status/leader", '^"[0-9]')
        if host.kind != SERVER:
            path, shown = "nodes", f'"Name":"{host.name}"[^}}]*"Status":"ready"'
        request = f"printf 'GET /v1/{path} HTTP/1.0\\r\\n\\r\\n' >&3; grep -Eq {shlex.quote(shown)} <&3"
        works = f"exec 3<>/dev/tcp/127.0.0.1/4646 && {request}"
        found["nomad"] = ("bash /lab/nomad.sh", f"{_without_majority(layout)} || {{ {works}; }}")
    if is_forwarded(layout, host):
        server = layout.hosts_of(SERVER)[0].addresses[PUBLIC]
        found["nomad-api"] = (f"python3 /lab/forward.py {server} 4646", ": </dev/tcp/127.0.0.1/4646")
    if host.kind == CONTROL:
        probes = {
            "etcd": ": </dev/tcp/127.0.0.1/2379",
            "kube-apiserver": '[ "$(kubectl get --raw /readyz)" = ok ]',
            "kube-controller-manager": "kubectl get serviceaccount default",
            "kube-scheduler": ": </dev/tcp/127.0.0.1/10259",
        }
        argvs = control_plane(host.addresses[PROVISIONING], FILES)
        found |= {name: (shlex.join(argv), probes[name]) for name, argv in argvs.items()}
        found["cloud"] = (f"python3 /lab/cloud.py {BALANCED}", "[ -e /run/cloud.ready ]")
    if host.kind == WORKER:
        node = _node(layout, host)
        state = '{.status.conditions[?(@.type=="Ready")].status}'
        query = f"kubectl --kubeconfig {FILES.conf('kubelet')} get node {host.name} -o jsonpath={shlex.quote(state)}"
        argvs = node.programs()
        found |= {
            "containerd": (shlex.join(node.containerd), "ctr version"),
            "kubelet": ("sh /lab/kubelet.sh", f'[ "$({query})" = True ]'),
            "kube-proxy": (shlex.join(argvs["kube-proxy"]), ": </dev/tcp/127.0.0.1/10256"),
        }
    return found


def _without_majority(layout: Layout) -> str:
    """Return a line of bash that succeeds while so many servers of Nomad are off that nothing of it can work."""
    servers = [one.addresses[PROVISIONING] for one in layout.hosts_of(SERVER)]
    count = f"n=0; for one in {' '.join(servers)}; do ping -q -c 1 -W 1 $one && n=$((n + 1)); done"
    return f"{{ command -v ping && {{ {count}; [ $n -lt {len(servers) // 2 + 1} ]; }}; }}"


def texts(layout: Layout, host: LabHost) -> dict[str, str]:
    """Return the files of a host without secrets, by path."""
    found: dict[str, str] = {}
    if has_agent(layout, host):
        agent = _agent(layout, host)
        found["lab/nomad.json"] = json.dumps(agent.settings, indent=1)
        wait = "" if host.kind == SERVER else WAIT.format(" ".join(agent.servers))
        found["lab/nomad.sh"] = f"{wait}exec nomad agent -config /lab/nomad.json\n"
    if host.kind == WORKER:
        node = _node(layout, host)
        found |= {f"lab/{name}": text for name, text in node.texts().items()}
        load = "until ctr -n k8s.io images import /lab/pause.tar; do sleep 0.5; done"
        found["lab/kubelet.sh"] = f"{load}\nexec {shlex.join(node.programs()['kubelet'])}\n"
    return found


def steps(layout: Layout, host: LabHost) -> list[str]:
    """Return shell commands of a host's boot."""
    found = []
    if has_agent(layout, host):
        # Nomad makes it with mode 0700: tasks of other users than root do not reach their own folders then.
        found.append(f"install -d -m 0711 {DISK} {DISK}/nomad")
    if "nomad" in layout.engines and host.kind == "carrier":
        found.append(f"mkdir -p -m 0700 {STATE}")
    if host.kind == CONTROL:
        found += [f"ip address add {BALANCED}/32 dev {host.interface(PROVISIONING)}", FORWARD]
    if host.kind == WORKER:
        others = [each for each in layout.hosts_of(WORKER) if each != host]
        found += [f"ip route add {_node(layout, each).pods} via {each.addresses[PROVISIONING]}" for each in others]
        found += [FORWARD, *prepare_node(DISK, cgroup(layout, host))]
    return found


def cgroup(layout: Layout, host: LabHost) -> str:
    """Return the name of the cgroup of a cluster node's pods."""
    machine = Path(os.environ.get("SMS_MACHINE", "")).name  # cgroups are those of the whole machine
    return "-".join(filter(None, ("sms-lab", machine, layout.name, host.name)))


def _agent(layout: Layout, host: LabHost) -> Agent:
    interface = host.interface(PROVISIONING)
    client: dict[str, Any] | None = None
    if host.kind == "node":
        client = {"max_kill_timeout": STOP_S, "node_pool": "compute"}
    if host.kind == "carrier":
        interface = layout.plan.bridges[PROVISIONING]
        client = {"max_kill_timeout": STOP_S, "host_volume": {"sms-lab": {"path": STATE, "read_only": False}}}
    servers = [each.addresses[PROVISIONING] for each in layout.hosts_of(SERVER)]
    return Agent(host.name, host.addresses[PROVISIONING], f"{DISK}/nomad", servers, interface, client)


def _node(layout: Layout, host: LabHost) -> ClusterNode:
    number = layout.hosts_of(WORKER).index(host) + 1
    return ClusterNode(host.name, host.addresses[PROVISIONING], cgroup(layout, host), FILES, "/lab", number)
