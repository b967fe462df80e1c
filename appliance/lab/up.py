"""Create a lab."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError
from appliance.host.local import ENVIRONMENT, Local
from appliance.host.netns import Netns
from appliance.lab import legacy as legacy_node
from appliance.lab import render
from appliance.lab.down import take_down
from appliance.lab.engines import agents, members
from appliance.lab.engines.keys import KUBECONFIG, kubeconfig, make_keys
from appliance.lab.engines.programs import find_program, need_programs
from appliance.lab.etc import make_etc
from appliance.lab.journal import Journal, alive, busy, changing, read_journal
from appliance.lab.layout import CONTROL, LEGACY, SERVER, STANDARD, USUAL, WORKER, Extras, LabHost, Layout
from appliance.lab.root import make_root, root_of, root_path
from appliance.progress import Progress, Silent
from appliance.share import share

NEEDED = {
    "mmdebstrap": "mmdebstrap",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "supervisord": "supervisor",
    "setpriv": "util-linux",
    "nsenter": "util-linux",
    "pivot_root": "util-linux",
    "flock": "util-linux",
}
"""Programs of this machine that a lab needs, and the Debian packages they are in."""
NEEDED_BY_METAL = {
    "qemu-system-x86_64": "qemu-system-x86",
    "/usr/lib/ipxe/qemu/efi-virtio.rom": "ipxe-qemu",
    "/usr/share/ovmf/OVMF.fd": "ovmf",
}
"""The same, for a lab with diskless machines."""

NEEDED_BY_KUBERNETES = {
    "containerd": "containerd",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "gcc": "gcc",
}
"""The same, for a lab with Kubernetes."""
PROGRAMS_OF = {"nomad": ("nomad",), "kubernetes": (*members.CONTROL_PROGRAMS, *members.WORKER_PROGRAMS)}
"""Of each engine, what ``make engines`` builds."""

READY_S = 30
"""Seconds that the daemons of a host may take to answer."""
ENGINE_READY_S = 300
"""The same, in a lab with an engine."""

VOLUMES = "volumes"
"""The folder of volumes, among the disks of engine hosts."""

# $1 namespace, $2 the host's folder. Prints the pid of the host's first process once it is in its
# own root. It must wait, because until then `down` must wait for it too (see journal.busy).
SPAWN = """
rm -f "$2/log" # of an earlier start
setsid nsenter --net="/run/netns/$1" unshare -m -u -i -p -f --kill-child --propagation private \
    env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    sh "$2/init.sh" >"$2/log" 2>&1 </dev/null &
while kill -0 $! 2>/dev/null; do
    if grep -qx entered "$2/log"; then
        pid=$(cat "/proc/$!/task/$!/children" 2>/dev/null)
        # There is none once it has ended, although its parent is there for a moment longer.
        [ -z "$pid" ] || { echo "$pid"; exit 0; }
    fi
    sleep 0.02
done
cat "$2/log" >&2
exit 1
"""


def up(name: str, nodes: int, progress: Progress | None = None, extras: Extras = STANDARD) -> bool:
    """Create the lab, unless it is already up and the same; return whether anything had to be done."""
    progress = progress or Silent()
    layout = extras.layout(name, nodes)
    check_machine(metal=bool(layout.metal), engines=layout.engines)
    with changing(name):
        before = read_journal(name)
        if before and before.nodes == nodes and before.digest == _digest(layout) and alive(before):
            return False
        if before:
            with progress.step(f"remove the previous lab {name}"):
                take_down(before)
        _make_roots(layout, progress)
        with _undone_on_failure(layout):
            _make(layout, progress)
    return True


def up_planned(layout: Layout, munge: bytes, progress: Progress) -> None:
    """Create a lab from a custom plan; an existing one of its name is removed.

    Args:
        munge: munge key of its nodes.
    """
    check_machine()
    with changing(layout.name):
        if before := read_journal(layout.name):
            take_down(before)
        _make_roots(layout, progress)
        with _undone_on_failure(layout):
            busy(layout.name).run("mkdir", "-p", str(layout.disk / "home"))
            _make(layout, progress, render.Keys(munge, b"", {}))


def _make_roots(layout: Layout, progress: Progress) -> None:
    """Build the root file systems of the lab's hosts that do not exist."""
    for root in dict.fromkeys(root_of(host) for host in layout.hosts if host.own_root):
        make_root(progress, root)


def put_up_cables(layout: Layout) -> None:
    """Set the nodes' cables up, which the plan keeps down."""
    nodes = [host for host in layout.hosts if host.kind == "node"]
    lines = [f"link set {host.port(network)} up\n" for host in nodes for network in host.addresses]
    Local().run("ip", "-n", layout.namespace("switch"), "-batch", "-", input="".join(lines).encode())


def _which(program: str) -> str | None:
    return shutil.which(program, path=ENVIRONMENT["PATH"])


def check_machine(*, metal: bool = False, engines: Sequence[str] = ()) -> None:
    """Check that this machine has what a lab needs.

    Args:
        metal: whether the lab has diskless machines.
        engines: the lab's engines.

    Raises:
        Refused: with the command that fixes it.
    """
    needed = {**NEEDED, **(NEEDED_BY_METAL if metal else {})}
    needed |= NEEDED_BY_KUBERNETES if "kubernetes" in engines else {}
    missing = [name for name in needed if not (os.access(name, os.R_OK) if name[:1] == "/" else _which(name))]
    if os.geteuid():
        raise Refused("a lab is made of namespaces, which requires root", hint="run it with sudo")
    if missing:
        packages = " ".join(sorted({needed[program] for program in missing}))
        raise Refused(f"the lab needs {', '.join(missing)}", hint=f"apt-get install {packages}")
    need_programs([name for engine in engines for name in PROGRAMS_OF[engine]])
    if metal and importlib.util.find_spec("sushy_tools") is None:
        python = Path(sys.prefix) / "bin" / "python"
        raise Refused(
            "the lab's machines need sushy-tools as their management controllers",
            hint=f"{python} -m pip install sushy-tools",
        )
    if metal and not Path("/dev/net/tun").exists():
        raise Refused("the lab's machines need /dev/net/tun", hint="modprobe tun")


@contextmanager
def _undone_on_failure(layout: Layout) -> Iterator[None]:
    try:
        yield
    except BaseException:
        journal = read_journal(layout.name)
        if journal:
            take_down(journal)
        raise


def _digest(layout: Layout) -> str:
    """Return the digest of a lab's inputs; a lab with another digest is recreated."""
    templates = sorted(share("definitions", "lab").rglob("*"))
    parts = [path.read_bytes() for path in templates if path.is_file()]
    parts += [Path(render.__file__).read_bytes(), SPAWN.encode(), repr(layout.hosts).encode()]
    parts += [repr(layout.machines).encode()] if layout.machines else []
    if layout.engines:
        sources = (members.__file__, agents.__file__)
        parts += [Path(source).read_bytes() for source in sources]
        parts += [repr(_programs(layout, host)).encode() for host in layout.hosts]
    if layout.legacy:
        parts += [Path(legacy_node.__file__).read_bytes(), root_path(root_of(layout.hosts_of(LEGACY)[0])).encode()]
    return render.digest(root_path().encode(), *parts)


def _make(layout: Layout, progress: Progress, keys: render.Keys | None = None) -> None:
    plan = None if layout.plan == USUAL else layout.plan.as_dict()
    journal = Journal(layout.name, layout.count, plan=plan, metal=layout.metal, engines=layout.engines)
    journal = replace(journal, legacy=layout.legacy)
    journal.write()
    with progress.step(f"connect {len(layout.hosts)} hosts"):
        keys = keys or make_etc(layout)
        if layout.engines:
            keys = replace(keys, engines=_make_engines(layout))
        if layout.legacy:
            keys = replace(keys, database=secrets.token_hex(16))
        _write_files(layout, keys)
        local = busy(layout.name)
        spaces = "".join(f"netns add {space}\n" for space in layout.namespaces)
        local.run("ip", "-batch", "-", input=spaces.encode())
        switch = ("ip", "-n", layout.namespace("switch"))
        local.run(*switch, "-batch", "-", input=render.switch_batch(layout).encode())
    with progress.step("start the hosts") as step, ThreadPoolExecutor(max_workers=4) as pool:
        started = pool.map(lambda host: start_host(layout, host), layout.hosts)
        pids = {}
        for number, (host, pid) in enumerate(zip(layout.hosts, started, strict=True), 1):
            pids[host.name] = pid
            step.detail(f"{number} of {len(layout.hosts)}")
    with progress.step("wait for their daemons"), ThreadPoolExecutor(max_workers=8) as pool:
        seconds = ENGINE_READY_S if layout.engines else READY_S
        list(pool.map(lambda item: wait_ready(Netns(*item), seconds), pids.items()))
    replace(journal, digest=_digest(layout), pids=pids).write()


def _make_engines(layout: Layout) -> dict[str, dict[str, bytes]]:
    """Create the disks of engine hosts, as new ones; return the secrets of the hosts."""
    folders = [layout.engines_disk / host.name for host in layout.hosts if members.has_disk(layout, host)]
    local = busy(layout.name)
    local.run("rm", "-rf", "--one-file-system", str(layout.engines_disk), timeout=300)
    local.run("mkdir", "-p", "-m", "0711", *map(str, (layout.engines_disk, layout.engines_disk / VOLUMES, *folders)))
    keys = make_keys(layout)
    if "kubernetes" in layout.engines:
        local.write(str(kubeconfig(layout)), keys["admin"][KUBECONFIG], mode=0o600)
    return keys


def _programs(layout: Layout, host: LabHost) -> dict[str, str]:
    """Return the paths of a host's programs of engines, by name."""
    return {name: str(find_program(name)) for name in members.programs(layout, host)}


def _write_files(layout: Layout, keys: render.Keys) -> None:
    """Write one folder per host, as init.sh expects it; as one archive, to save commands."""
    files: dict[str, render.File] = {}
    sms = str(Path(sys.prefix) / "bin" / "sms")
    for host in layout.hosts:
        lower = root_path(root_of(host)) if host.own_root else "/"
        script = render.init_script(layout, host, lower=lower, binds=_binds(layout, host))
        files[f"{host.name}/init.sh"] = render.File(script.encode())
        inside = render.archive(render.host_files(layout, host, keys, sms=sms, programs=_programs(layout, host)))
        files[f"{host.name}/files.tar"] = render.File(inside, 0o600)
        files[f"{host.name}/mnt/.keep"] = render.File(b"")
    if layout.machines:
        files[f"{layout.consoles.name}/.keep"] = render.File(b"")
    busy(layout.name).run("tar", "-x", "-C", str(layout.running), input=render.archive(files))


def _engine_binds(layout: Layout, host: LabHost) -> list[render.Bind]:
    binds = [(str(layout.engines_disk / host.name), members.DISK, False)] if members.has_disk(layout, host) else []
    binds += [(str(layout.engines_disk / VOLUMES), members.VOLUMES, False)] if host.kind == WORKER else []
    folders = sorted({str(Path(path).parent) for path in _programs(layout, host).values()})
    return binds + [(folder, folder, True) for folder in folders]


def _binds(layout: Layout, host: LabHost) -> list[render.Bind]:
    engine = _engine_binds(layout, host)
    if host.own_root:
        # Homes are shared, as on any cluster: a job's output is in the folder of its submission.
        return [(str(layout.disk / "home"), "/home", False), *engine] if host.kind in ("node", LEGACY) else []
    if layout.plan.hosts:
        return [(path, path, False) for path in layout.plan.binds]
    if host.kind == "bmc":
        # The consoles are read from outside; the machines' cables are at the switch.
        return [(str(layout.consoles), "/srv/metal", False)] + [(str(path), str(path), True) for path in _code()]
    if host.kind in (SERVER, CONTROL, WORKER):
        return engine
    binds = [(str(layout.etc), "/etc/sms", False), *engine]
    if host.kind == "admin":
        # The admin host sees images that were built on this machine.
        binds += [("/var/lib/sms", "/var/lib/sms", False)]
    else:
        binds += [(str(layout.disk / host.name), "/var/lib/sms", False)]
        binds += [(str(layout.disk / "shared"), "/srv/shared", False)]
    return binds + [(str(path), str(path), True) for path in _code()]


def _code() -> list[Path]:
    """Return the folders of this program, unless it is part of the system.

    Through the overlay's lower layer a host would see neither later changes nor file systems other
    than the root.
    """
    folders = {Path(sys.prefix).resolve(), share()}
    return sorted(
        folder for folder in folders if folder != Path("/usr") and not any(other in folder.parents for other in folders)
    )


def start_host(layout: Layout, host: LabHost) -> int:
    """Start a host whose files and cables exist; return its first process."""
    folder = str(layout.running / host.name)
    try:
        pid = busy(layout.name).run("sh", "-c", SPAWN, "spawn", layout.namespace(host.name), folder).text
    except CommandError as error:
        output = (error.result.stderr or b"").decode(errors="replace").strip()
        raise SmsError(
            f"lab host {host.name} does not start: {output}", hint="this is the output of its start script"
        ) from None
    return int(pid)


def wait_ready(host: Netns, seconds: int = READY_S) -> None:
    """Wait until the host's daemons answer.

    Raises:
        SmsError: timeout; with the last lines of the log of the first that does not.
    """
    missing = host.run("bash", "/lab/ready.sh", str(seconds), ok=(0, 1), timeout=seconds + 30).text
    if missing:
        first = missing.split()[0]
        lines = host.run("tail", "-n", "8", f"/var/log/lab/{first}.log", ok=None).text
        lines = lines or host.run("journalctl", "--no-pager", "--lines", "8", "--unit", first, ok=None).text
        raise SmsError(f"lab host {host.name}: not ready after {seconds} s: {missing}\n{lines}")
