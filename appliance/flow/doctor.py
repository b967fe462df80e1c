"""``sms doctor``: asks a machine about itself; appliance.plan.doctor says what that means."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

from appliance.config.model import AdminHost, Site
from appliance.errors import SmsError
from appliance.flow.context import Cluster, find_host
from appliance.host.base import Host, Unreachable
from appliance.host.local import Local
from appliance.plan.distro import family, install_command
from appliance.plan.doctor import FILE_SYSTEMS, PROGRAMS, Finding, examine, examine_files, worst
from appliance.plan.facts import Facts, read_bridges, read_said

__all__ = ["Finding", "ask", "diagnose", "worst"]

# $1 the state folder, $2 the overlays' folder, $3 the overlay, $4 file systems, then programs.
# Prints name=value lines; what cannot be asked is left out.
ASK = r"""
state=$1 overlays=$2 overlay=$3 systems=$4; shift 4
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
yes() { name=$1; shift; "$@" >/dev/null 2>&1 && echo "$name=yes" || echo "$name=no"; }
there() { while [ ! -d "$1" ]; do set -- "$(dirname "$1")"; done; echo "$1"; }
echo "uid=$(id -u)"
echo "kernel=$(uname -r)"
sed -n 's/^CapPrm:[[:space:]]*/caps=/p' /proc/self/status
echo "last_cap=$(cat /proc/sys/kernel/cap_last_cap)"
echo "loadable=$(for name in $systems; do modprobe -qn "$name" 2>/dev/null && echo "$name"; done | tr '\n' ' ')"
yes loop sh -c '[ -e /dev/loop-control ] || modprobe -qn loop'
yes netns test -e /proc/self/ns/net
yes bridge sh -c '[ -d /sys/module/bridge ] || [ -d /proc/sys/net/bridge ] || modprobe -qn bridge ||
    ip link show type bridge | grep -q .'
yes nft nft list tables
echo "programs=$(for name; do command -v "$name" >/dev/null && printf '%s ' "$name"; done)"
echo "apptainer=$(apptainer --version 2>&1 | head -n 1)"
head -c 4096 "$(command -v apptainer)" 2>/dev/null | sed -n 's/.*--drop-caps "\([A-Z_,]*\)".*/wrapper=\1/p'
own=$(sed -n 's/^cni plugin path *= *//p' /etc/apptainer/apptainer.conf 2>/dev/null | tail -n 1)
for folder in ${own:-"$(apptainer buildcfg LIBEXECDIR 2>/dev/null)/apptainer/cni" /usr/lib/cni}; do
    [ -x "$folder/bridge" ] && { echo "cni=$(cd "$folder" && echo *)"; echo "cni_folder=$folder"; break; }
done
for folder in /usr/libexec/cni /usr/lib/cni /opt/cni/bin; do
    [ -x "$folder/bridge" ] && [ -x "$folder/static" ] && { echo "cni_elsewhere=$folder"; break; }
done
nf=/proc/sys/net/bridge/bridge-nf-call-iptables
[ -e $nf ] && echo "bridge_nf=$(cat $nf)"
if chronyc -n tracking 2>/dev/null | grep -q '^Leap status *: Normal'; then echo clock=yes
else timedatectl show --property NTPSynchronized --value 2>/dev/null | sed -n 's/^\(yes\|no\)$/clock=\1/p'; fi
for folder in "$state/images" "$overlays"; do [ -d "$folder" ] && stat -c '%a:%n' "$folder"; done | sort -u |
    { printf modes=; tr '\n' ' '; echo; }
[ -e "$overlay" ] && echo overlay_there=yes
echo "images_free=$(df -B1 --output=avail "$(there "$state/images")" | tail -n 1)"
echo "overlay_free=$(df -B1 --output=avail "$(there "$overlays")" | tail -n 1)"
yes systemd test -d /run/systemd/system
yes cron sh -c 'pgrep -x cron || pgrep -x crond'
exit 0
"""

BOOTSTRAP = {"apt": "debootstrap", "dnf": "dnf", "zypper": "zypper"}
"""What Apptainer calls to make a base, by its package manager."""


def diagnose(cluster: Cluster, wanted: str | None) -> list[Finding]:
    """What an admin host lacks; this machine, where none is named.

    Args:
        wanted: an admin host's name.
    """
    here = socket.gethostname()
    admin = {host.name: host for host in cluster.site.admin_hosts}.get(wanted or here)
    host = find_host(cluster.site, wanted) if wanted else Local(here)
    try:
        facts = ask(cluster, host)
    except Unreachable as error:
        return [Finding("SSH", "missing", error.message, error.hint)]
    findings = [] if isinstance(host, Local) else [Finding("SSH", "ok", f"reaches {host.name}")]
    networks = cluster.site.networks
    # A machine that only builds needs no bridge.
    bridges = (networks.provisioning.bridge, networks.public.bridge) if admin else ()
    findings += examine(facts, bridges=bridges, overlay_bytes=cluster.site.overlay.size_mb << 20)
    if isinstance(host, Local):
        findings += examine_files(_files(cluster.site))
        findings += _known_hosts(cluster.site, host)
        findings.append(_bootstrap(cluster, host))
    return findings


def ask(cluster: Cluster, host: Host) -> Facts:
    """What a machine says of itself; changes nothing there."""
    places = cluster.places
    names = (*PROGRAMS, "singularity", "cron", "crond")
    where = (str(cluster.site.state), str(places.overlay.parent), str(places.overlay), " ".join(FILE_SYSTEMS.values()))
    said = host.run("sh", "-c", ASK, "ask", *where, *names).text
    links = host.run("ip", "-json", "-details", "link", "show", ok=None) if " ip " in said else None
    kinds = (host.read("/proc/filesystems") or b"").decode().split()
    return Facts(
        host.name,
        (host.read("/etc/os-release") or b"").decode(errors="replace"),
        frozenset(kinds),
        read_said(said),
        dict(read_bridges(json.loads(links.stdout or b"[]"))) if links else {},
    )


def _files(site: Site) -> Iterator[tuple[str, str, int | None, bool, str]]:
    """Keys and secrets that the site names, with their modes."""
    given = [("signing key", site.signing.private_key, True, "sms key create")]
    given += [("public key", path, False, "copy it from where images are built") for path in site.signing.public_keys]
    for name in type(site.secrets).model_fields:
        path = getattr(site.secrets, name)
        if path:
            given.append((f"secrets.{name}", path, True, "put it there, or take it out of the site file"))
    for what, path, secret, make in given:
        if what == "signing key" and not path.exists() and all(public.exists() for public in site.signing.public_keys):
            continue  # it lies where images are built
        yield what, str(path), path.stat().st_mode & 0o777 if path.exists() else None, secret, make


def _known_hosts(site: Site, local: Host) -> Iterator[Finding]:
    """Whether the other admin hosts' keys are known."""
    path = site.known_hosts or Path("~/.ssh/known_hosts").expanduser()
    for admin in site.admin_hosts:
        if admin.name == local.name:
            continue
        what = f"host key of {admin.name}"
        known = _known_name(admin)
        try:
            found = local.works("ssh-keygen", "-F", known, "-f", str(path))
        except SmsError:
            yield Finding(what, "missing", "ssh-keygen is not installed", install_command(["ssh"], _family(local)))
            return
        scan = f"ssh-keyscan -p {admin.port} {admin.address} >>{path}, and compare its fingerprint on {admin.name}"
        yield Finding(what, "ok", str(path)) if found else Finding(what, "missing", f"not in {path}", scan)


def _known_name(admin: AdminHost) -> str:
    return admin.address if admin.port == 22 else f"[{admin.address}]:{admin.port}"


def _family(host: Host) -> str:
    return family((host.read("/etc/os-release") or b"").decode(errors="replace"))


def _bootstrap(cluster: Cluster, local: Host) -> Finding:
    """Whether this machine can build the site's base."""
    program = BOOTSTRAP[cluster.base.manager]
    what = f"build of {cluster.base.name}"
    if local.works("sh", "-c", 'command -v "$1"', "find", program):
        return Finding(what, "ok", f"{program} is there")
    return Finding(what, "warning", f"only `sms build` needs {program}", install_command([program], _family(local)))
