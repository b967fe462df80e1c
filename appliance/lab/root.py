"""Root file systems of lab hosts that do not have this machine's: each built once and cached as a folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.lab.layout import CACHE, LEGACY, LOCKS, LabHost
from appliance.lab.render import digest
from appliance.progress import Progress

SUITE = "bookworm"


@dataclass(frozen=True)
class Root:
    """A root file system: whose it is, and its packages."""

    owner: str
    packages: tuple[str, ...]


NODES = Root(
    "compute nodes",
    (
        *("slurmd", "slurm-client", "munge", "rsyslog", "rsyslog-relp", "chrony", "openssh-server", "postfix"),
        *("bsd-mailx", "nginx-light", "curl", "iproute2", "iputils-ping", "procps", "supervisor", "netcat-openbsd"),
        *("python3-minimal", "ca-certificates", "less"),
    ),
)
"""Also of the outside host and the router."""
MANAGEMENT = Root(
    "legacy management node",
    (
        *("slurmctld", "slurmdbd", "slurm-client", "mariadb-server", "munge", "rsyslog", "chrony", "postfix"),
        *("bsd-mailx", "dnsmasq", "nfs-ganesha", "nfs-ganesha-vfs", "nftables", "conntrack", "openssh-server", "cron"),
        *("logrotate", "python3", "tcpdump", "systemd-sysv", "dbus", "iproute2", "iputils-ping", "procps", "curl"),
        *("ca-certificates", "less", "netcat-openbsd"),
    ),
)
"""A server with the kernel and the init system that it has as a machine, so systemd with Debian's units."""

# The new process tree and its mounts end with this process, however it ends. One build at a time:
# a second lab waits for the first one.
BUILD = """
[ -d "$1" ] && exit 0
rm -rf --one-file-system "$1.new"
mkdir -p "$(dirname "$1")"
sources=$(cat)
printf '%s\\n' "$sources" | mmdebstrap --mode=root --variant=minbase --include="$2" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' "$3" "$1.new" - 2>&1 || exit
mv -T "$1.new" "$1"
"""


def root_of(host: LabHost) -> Root:
    """Return the root file system of a host with one of its own."""
    return MANAGEMENT if host.kind == LEGACY else NODES


def root_path(root: Root = NODES) -> str:
    """Return the path of a root file system with its packages, built or not."""
    return str(CACHE / f"root-{digest(SUITE.encode(), BUILD.encode(), *(name.encode() for name in root.packages))}")


def source_lines(targets: str) -> list[str]:
    """Return the sources.list lines of the suite, from the output of ``apt-get indextargets``. Pure.

    Args:
        targets: lines of origin, code name, URI and component, separated by bars.
    """
    lines: dict[str, None] = {}
    for target in targets.splitlines():
        origin, codename, uri, component = target.split("|")
        if origin == "Debian" and codename in (SUITE, f"{SUITE}-updates", f"{SUITE}-security"):
            lines[f"deb {uri} {codename} {component}"] = None
    return list(lines)


def _mirrors() -> Iterable[str]:
    shown = "$(ORIGIN)|$(CODENAME)|$(REPO_URI)|$(COMPONENT)"
    lines = source_lines(Local().run("apt-get", "indextargets", "--format", shown, "Created-By: Packages").text)
    if not lines:
        raise SmsError(
            f"apt on this machine has no mirror of Debian {SUITE}", hint="run `apt-get update`, or add one to apt"
        )
    return lines


def make_root(progress: Progress, root: Root = NODES) -> str:
    """Build a root file system if it does not exist; return its path."""
    path = root_path(root)
    local = Local()
    if local.works("test", "-d", path):
        return path
    with progress.step(f"build the root file system of the {root.owner}") as step:
        local.run(
            *("setpriv", "--pdeathsig", "KILL", "unshare", "-m", "-p", "-f", "--kill-child", "--mount-proc"),
            *("flock", str(LOCKS / "sms-lab-root.lock"), "sh", "-c", BUILD, "build"),
            *(path, ",".join(root.packages), SUITE),
            input="\n".join(_mirrors()).encode(),
            timeout=1800,
            on_line=step.detail,
        )
        step.detail("")
    return path
