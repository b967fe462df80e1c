"""Secrets of the hosts of a lab with Kubernetes, and the first process of its pods."""

from __future__ import annotations

from pathlib import Path

from appliance.lab.engines.members import FILES
from appliance.lab.engines.pause import pause_image
from appliance.lab.engines.pki import Authority
from appliance.lab.layout import CONTROL, PROVISIONING, PUBLIC, WORKER, Layout

NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost", "127.0.0.1", "10.96.0.1")
"""Of the API server, besides its addresses."""
KUBECONFIG = "root/.kube/config"
"""On admin hosts and the control plane: where `kubectl` finds it."""


def kubeconfig(layout: Layout) -> Path:
    """Return the path of that file among those of /etc/sms, where the site file names it."""
    return layout.etc / "keys" / "kubeconfig"


def make_keys(layout: Layout) -> dict[str, dict[str, bytes]]:
    """Return by host and path what only root reads there; made in the folder of the engines, which is new."""
    if "kubernetes" not in layout.engines:
        return {}
    (control,) = layout.hosts_of(CONTROL)
    authority = Authority(layout.engines_disk / "pki")
    own = authority.issue("apiserver", "kube-apiserver", "system:masters", (*NAMES, *control.addresses.values()))
    inside, outside = (f"https://{control.addresses[network]}:6443" for network in (PROVISIONING, PUBLIC))
    top = FILES.keys.removeprefix("/")

    def conf(name: str, user: str, group: str = "", url: str = inside) -> bytes:
        return authority.kubeconfig(url, authority.issue(name, user, group))

    shared = {f"{top}/ca.pem": authority.certificate.read_bytes()}
    admin = conf("admin", "admin", "system:masters", outside)
    found = {
        control.name: {
            **shared,
            f"{top}/apiserver.pem": own.certificate.read_bytes(),
            f"{top}/apiserver.key": own.key.read_bytes(),
            f"{top}/controller-manager.conf": conf("controller-manager", "system:kube-controller-manager"),
            f"{top}/scheduler.conf": conf("scheduler", "system:kube-scheduler"),
        }
    }
    pause, proxy = pause_image(layout.engines_disk), conf("proxy", "system:kube-proxy")
    for host in layout.hosts_of(WORKER):
        found[host.name] = {
            **shared,
            f"{top}/kubelet.conf": conf(host.name, f"system:node:{host.name}", "system:nodes"),
            f"{top}/proxy.conf": proxy,
            "lab/pause.tar": pause,
        }
    for host in (control, *layout.hosts_of("carrier"), *layout.hosts_of("admin")):
        found.setdefault(host.name, {})[KUBECONFIG] = admin
    return found
