"""What a cloud gives a Kubernetes cluster, for that of a lab: volumes for claims, an address for load balancers.

A volume is a folder that all cluster nodes have. All load balancers share one address, which this host has: it forwards
each port to a cluster node with a pod of the service.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

VOLUMES = "/srv/volumes"
READY = Path("/run/cloud.ready")
CHAIN = "SMS-LB"


def kubectl(*words: str, data: object = None) -> str:
    text = None if data is None else json.dumps(data)
    return subprocess.run(["kubectl", *words], input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


def get(kind: str) -> list[dict]:
    return json.loads(kubectl("get", "-A", kind, "-o", "json"))["items"]


def provide_volumes() -> None:
    volumes = {each["metadata"]["name"] for each in get("pv")}
    for claim in get("pvc"):
        meta, spec = claim["metadata"], claim["spec"]
        # Another claim of the same name has another volume.
        name = f"{meta['namespace']}-{meta['name']}-{meta['uid'][:8]}"
        if claim["status"]["phase"] != "Pending" or name in volumes:
            continue
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "accessModes": spec["accessModes"],
                "capacity": spec["resources"]["requests"],
                "claimRef": {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
                "storageClassName": spec.get("storageClassName", ""),
                "hostPath": {"path": f"{VOLUMES}/{name}", "type": "DirectoryOrCreate"},
            },
        }
        kubectl("apply", "-f", "-", data=volume)


def balance(address: str) -> None:
    hosts = {
        node["metadata"]["name"]: each["address"]
        for node in get("nodes")
        for each in node["status"]["addresses"]
        if each["type"] == "InternalIP"
    }
    places: dict[tuple[str, str], str] = {}
    for each in get("endpointslices"):
        name = each["metadata"]["labels"].get("kubernetes.io/service-name", "")
        for endpoint in each["endpoints"] or ():
            if endpoint["conditions"].get("ready") and endpoint.get("nodeName") in hosts:
                places[each["metadata"]["namespace"], name] = hosts[endpoint["nodeName"]]
    rules = []
    for service in get("services"):
        if service["spec"]["type"] != "LoadBalancer":
            continue
        meta = service["metadata"]
        if target := places.get((meta["namespace"], meta["name"])):
            rules += [
                f"-A {CHAIN} -p {port['protocol'].lower()} --dport {port['port']}"
                f" -j DNAT --to-destination {target}:{port['nodePort']}\n"
                for port in service["spec"]["ports"]
            ]
        if not service["status"].get("loadBalancer"):
            status = json.dumps({"status": {"loadBalancer": {"ingress": [{"ip": address}]}}})
            kubectl("patch", "service", meta["name"], "-n", meta["namespace"], "--subresource=status", "-p", status)
    table = "".join(["*nat\n", f":{CHAIN} - [0:0]\n", *rules, "COMMIT\n"])  # an existing chain is emptied
    subprocess.run(["iptables-restore", "--noflush"], input=table, text=True, check=True)


def watch(kind: str, work: Callable[[], None]) -> None:
    """Work now and after each change; end where the API server does."""
    argv = ["kubectl", "get", "-A", kind, "--watch", "--no-headers"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as watching:
        work()
        for _ in watching.stdout:
            work()


def main() -> None:
    (address,) = sys.argv[1:]
    balance(address)
    subprocess.run(["iptables", "-t", "nat", "-F", "PREROUTING"], check=True)
    subprocess.run(["iptables", "-t", "nat", "-A", "PREROUTING", "-d", address, "-j", CHAIN], check=True)
    subprocess.run(["iptables", "-t", "nat", "-F", "POSTROUTING"], check=True)
    # The answers come back this way.
    rule = ["-m", "conntrack", "--ctstate", "DNAT", "-j", "MASQUERADE"]
    subprocess.run(["iptables", "-t", "nat", "-A", "POSTROUTING", *rule], check=True)
    for kind in ("services", "endpointslices"):
        threading.Thread(target=watch, args=(kind, lambda: balance(address)), daemon=True).start()
    READY.touch()
    watch("pvc", provide_volumes)


if __name__ == "__main__":
    main()
