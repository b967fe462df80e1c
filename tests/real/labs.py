"""Labs of one test or module."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from appliance.errors import Refused
from appliance.host.netns import Netns
from appliance.lab import Extras, Lab, Layout, Metal
from appliance.lab.down import loops_below
from appliance.lab.up import check_machine
from appliance.operations.context import open_cluster
from appliance.operations.image.build import Built, build
from appliance.operations.lab.lab import lab_down, lab_up
from appliance.progress import Silent


@contextmanager
def fresh_lab(
    name: str,
    nodes: int,
    *,
    metal: int = 0,
    shape: str = "flat",
    engines: Sequence[str] = (),
    legacy: bool = False,
) -> Iterator[Lab]:
    """A lab without anything of an earlier run; nothing is left of it afterwards."""
    remove_lab(name)
    lab_up(name, nodes, Silent(), Extras(metal, shape, engines, legacy))
    try:
        yield Lab.open(name)
    finally:
        remove_lab(name)


OWN_IMAGES = """
umount -q /var/lib/sms/images
own=/run/own-images
mountpoint -q $own || { mkdir -p $own && mount -t tmpfs own $own && mkdir $own/upper $own/work; }
mount -t overlay -o "lowerdir=/var/lib/sms/images,upperdir=$own/upper,workdir=$own/work" own /var/lib/sms/images || exit
ln -sfn "$1" "/var/lib/sms/images/$2"
"""
"""Labs share the images of this machine, and their cluster's name: the current image is each lab's own here."""


def build_image(lab: Lab, site: str = "sms") -> Built:
    """The image of a site file of the lab, built for real where nothing like it has been built before.

    Another worker's lab may build another one of the same name: on the lab's own admin host this one stays current.
    """
    cluster = open_cluster(lab.etc / f"{site}.yaml", None, Silent())
    built = build(cluster, lock=lab.etc / f"{site}.lock")
    if any(host.name == "admin" for host in lab.layout.hosts):
        current = Path(cluster.places.current).name
        lab.host("admin").run("sh", "-c", OWN_IMAGES, "own", f"{built.key}.sif", current)
    return built


def console_text(machine: Metal) -> str:
    """The output of a diskless machine's serial console."""
    return machine.console.read_text(errors="replace") if machine.console.exists() else ""


def need_machine(*, metal: bool = False) -> None:
    """Skip where this machine cannot run a lab; in CI that is a failure."""
    try:
        check_machine(metal=metal)
    except Refused as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(error.message)


def remove_lab(name: str) -> None:
    """Remove a lab with its files."""
    lab_down(name, False, Silent())
    shutil.rmtree(f"/var/lib/sms-lab/{name}", ignore_errors=True)


def lab_processes(name: str) -> list[str]:
    """Processes with a mount of the lab or a file of it as argument, by their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            mounts = (process / "mountinfo").read_text()
        except OSError:
            continue
        if f"sms-lab/{name}/" in mounts or f"/run/sms-lab/{name}/" in command:
            found.append(command)
    return found


def find_cgroups(name: str) -> list[str]:
    """The cgroups of its hosts."""
    own = "-".join(filter(None, ("sms-lab", Path(os.environ.get("SMS_MACHINE", "")).name, name, "*")))
    return [str(path) for pattern in (own, f"*/{own}") for path in Path("/sys/fs/cgroup").glob(pattern)]


def remains(name: str) -> dict[str, object]:
    """All that is there of a lab; empty values where nothing is."""
    spaces = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout.split()
    links = subprocess.run(["ip", "-br", "link"], check=True, capture_output=True, text=True).stdout.splitlines()
    return {
        "namespaces": [space for space in spaces if space.startswith(f"sms-{name}-")],
        "processes": lab_processes(name),
        "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if name in line],
        "loops": loops_below(Layout(name, 0).disk),
        "links": [line for line in links if "@if" in line and line.startswith(("p-", "u-", "prov0", "pub0"))],
        "folder": Path(f"/run/sms-lab/{name}").exists(),
        "cgroups": find_cgroups(name),
    }


def assert_gone(name: str) -> None:
    left = {key: value for key, value in remains(name).items() if value}
    assert not left, left


@contextmanager
def wrong_munge_key(node: Netns) -> Iterator[None]:
    """A node has another munge key as long as the context lasts."""

    def munged(key: str) -> None:
        node.run("sh", "-c", 'cat "$1" >/etc/munge/munge.key', "key", key)
        node.run("supervisorctl", "-c", "/lab/supervisord.conf", "restart", "munged")

    node.run("cp", "-p", "/etc/munge/munge.key", "/etc/munge/munge.key.kept")
    node.run("sh", "-c", "head -c 1024 /dev/urandom >/root/wrong.key")
    munged("/root/wrong.key")
    try:
        yield
    finally:
        munged("/etc/munge/munge.key.kept")
        # The controller does not query a node again that it has marked DOWN: the node has to register.
        node.run("supervisorctl", "-c", "/lab/supervisord.conf", "restart", "slurmd")


@contextmanager
def cables_out(lab: Lab, name: str) -> Iterator[None]:
    """Both cables of a host are out."""
    switch = ("ip", "-n", lab.layout.namespace("switch"), "link", "set")
    ports = (f"p-{name}", f"u-{name}")
    for port in ports:
        subprocess.run([*switch, port, "down"], check=True)
    try:
        yield
    finally:
        for port in ports:
            subprocess.run([*switch, port, "up"], check=True)
