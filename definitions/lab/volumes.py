"""Gives each claim of a lab's Kubernetes a folder of all cluster nodes as its volume, as a storage class would."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

VOLUMES = "/srv/volumes"
READY = Path("/run/volumes.ready")


def get(kind: str) -> list[dict]:
    done = subprocess.run(["kubectl", "get", "-A", kind, "-o", "json"], capture_output=True, check=True)
    return json.loads(done.stdout)["items"]


def provide() -> None:
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
        subprocess.run(["kubectl", "apply", "-f", "-"], input=json.dumps(volume).encode(), check=True)


def main() -> None:
    provide()
    argv = ["kubectl", "get", "-A", "pvc", "--watch", "--no-headers"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as watching:
        READY.touch()
        for _ in watching.stdout:
            provide()


if __name__ == "__main__":
    main()
