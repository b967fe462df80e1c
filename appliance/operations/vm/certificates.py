"""Certificates in use: renewed and installed in the running VM, in the running container and on other admin hosts.

The schedule calls ``renew_due`` on each admin host. The machine with the authority's key renews; every machine installs
what is newer in its folder than where it is used, so that a renewal by hand on one of them arrives everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath

from appliance.errors import Busy, ConfigError, SmsError
from appliance.host.base import CommandError, Host, Unreachable
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.hosts.installed import SITE_FILE, lies_there
from appliance.operations.preflight import find_instance
from appliance.operations.site import ca
from appliance.operations.site.issued import read_revoked, revoked_map
from appliance.operations.vm.client import tls_folder
from appliance.operations.vm.revoked import merge_revoked
from appliance.operations.vm.start import install_tls, issuer_days, issuer_end, make_seed, read_note, vm_names
from appliance.operations.vm.vm import view_hosts
from appliance.plan.machine import inside_argv
from appliance.plan.overlay import seed
from appliance.plan.vm.holder import running_host
from appliance.plan.vm.vm import REVOKED_MAP, VmPlaces
from appliance.shared.records import to_json
from appliance.shared.secret import SecretInput
from appliance.tools.guest import open_guest
from appliance.tools.qmp import NotResponding
from appliance.tools.scripts import script_argv

VM_TLS = "/etc/sms/tls"
CONTAINER_CERTIFICATE = seed.SECRET_PLACES["tls_cert"][0]
MAX_BYTES = 1 << 16
"""Size up to which a certificate is read from the container."""


@dataclass
class Installed:
    """Where certificates and the list of revoked ones are in use.

    Attributes:
        vm, container: the host that runs it; empty if none does.
        refuses: the VM has the list.
        later: what could not be done now, because a host or the VM does not answer, or another sms is at work.
        problems: what failed.
    """

    vm: str = ""
    refuses: bool = False
    container: str = ""
    later: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def attempt(self, what: str, do: Callable[[], None]) -> None:
        """Do one step; record why it failed, so that the others still run."""
        try:
            do()
        except (Busy, NotResponding, Unreachable) as error:
            self.later.append(f"{what}: {error.message}")
        except SmsError as error:
            self.problems.append(f"{what}: {error.message}" + (f"; {error.hint}" if error.hint else ""))


def renew_due(cluster: Cluster) -> None:
    """Renew certificates that expire soon, if the authority's key is here, and install all that are newer here.

    Raises:
        SmsError: with everything that failed, or expires because the key is elsewhere and nobody renews. Unreachable
            hosts are no failure: the next run, or theirs, does it.
    """
    folder = tls_folder(cluster)
    if cluster.site.provisioning is None or not (folder / "ca.pem").exists():
        return
    if ca.has_key(folder):
        ca.renew_due_clients(folder)
        issuer_end(cluster)  # also while the VM is off: other admin hosts that start it may have copies
    problems = install_certificates(cluster).problems
    problems += ca.expiring_clients(folder)
    if problems:
        raise SmsError("\n".join(problems))


def install_certificates(cluster: Cluster) -> Installed:
    """Install certificates and the list of revoked ones where they are in use; changes only what differs.

    The container first: once the VM has the list, it refuses the container's previous certificate.

    Raises:
        ConfigError: the list of revoked certificates on this machine cannot be read.
    """
    done = Installed()
    views = view_hosts(cluster, cluster.host(cluster.site.admin_hosts[0].name))
    silent = {view.name for view in views if not view.reachable}
    done.later += [f"{name} is unreachable" for name in sorted(silent)]
    done.problems += [why for name, why in merge_revoked(cluster).items() if name not in silent]
    for view in views:
        host = cluster.host(view.name)
        if view.reachable:
            done.attempt(f"certificates on {host.name}", partial(_share, cluster, host))
            done.attempt(f"the container's certificate on {host.name}", partial(_install_inside, cluster, host, done))
    if running := running_host(views):
        done.vm = running
        done.attempt(f"the VM on {running}", partial(_install_in_vm, cluster, cluster.host(running), done))
        done.attempt(f"the VM on {running}", partial(_check_end, cluster, cluster.host(running)))
    return done


def _share(cluster: Cluster, host: Host) -> None:
    """Replace certificates that another admin host has beside its site file, where this machine has newer ones."""
    folder, there = tls_folder(cluster), PurePosixPath(SITE_FILE).parent / ca.FOLDER
    if isinstance(host, Local) or not lies_there(cluster, host):
        return
    if host.read(str(there / "ca.pem")) != (folder / "ca.pem").read_bytes():
        return
    for name in (*ca.CLIENTS, ca.SERVER, ca.ISSUER):
        pair, present = ca.read_pair(folder, name), host.read(str(there / f"{name}.pem"))
        if pair and present and ca.supersedes(pair.certificate, present, _revoked(cluster)):
            # The certificate last: if this is interrupted, the next run replaces both again.
            host.write(str(there / f"{name}.key"), SecretInput(pair.key), mode=0o600)
            host.write(str(there / f"{name}.pem"), pair.certificate)


def _install_inside(cluster: Cluster, host: Host, done: Installed) -> None:
    """Replace the certificate in the container, if it runs on this host and this machine has a newer one."""
    files = cluster.site.secrets.tls_cert, cluster.site.secrets.tls_key
    try:
        if find_instance(cluster, host) is None:
            return
    except CommandError:
        return  # without apptainer it does not run there
    done.container = host.name
    present = read_container_certificate(cluster, host)
    if not present or not all(path and path.is_file() for path in files):
        return
    certificate, key = (path.read_bytes() for path in files if path)
    if ca.matches(certificate, key) and ca.supersedes(certificate, present, _revoked(cluster)):
        # sms-filesync reads both files for each connection.
        argv = script_argv("install-pair", str(PurePosixPath(CONTAINER_CERTIFICATE).parent))
        pair = SecretInput(key.rstrip() + b"\n" + certificate, key)
        host.run(*inside_argv(cluster.site, cluster.services, *argv), input=pair)


def read_container_certificate(cluster: Cluster, host: Host) -> bytes:
    """Return the certificate that the running container shows to the VM; empty if it has none."""
    argv = inside_argv(cluster.site, cluster.services, "head", "-c", str(MAX_BYTES), CONTAINER_CERTIFICATE)
    return host.run(*argv, ok=None).stdout


def container_problems(cluster: Cluster, host: Host) -> list[str]:
    """Return why the container's certificate makes it unhealthy: it expires before anybody would notice."""
    if cluster.site.provisioning is None or cluster.site.secrets.tls_cert is None:
        return []
    days = ca.days_left(read_container_certificate(cluster, host))
    if days is None or days >= ca.UNHEALTHY_DAYS:
        return []
    end = f"expires in {days} days" if days >= 0 else "has expired"
    return [f"the container's certificate for files of the VM {end}: `sms key ca renew` replaces it"]


def _install_in_vm(cluster: Cluster, host: Host, done: Installed) -> None:
    """Give the running VM new certificates if its own expire soon, and revoked ones that it does not refuse yet."""
    with open_guest(host, str(VmPlaces(cluster.site).guest)) as guest:
        server, refused = (guest.run(("/bin/cat", f"{VM_TLS}/{name}")).stdout for name in ("server.pem", REVOKED_MAP))
    wanted = revoked_map(tls_folder(cluster))
    if not _renew_vm(cluster, host, server) and {*wanted.splitlines()} - {*refused.splitlines()}:
        install_tls(cluster, host, seed.seed_archive([seed.Seed(f"{VM_TLS}/{REVOKED_MAP}", wanted)]))
    if wanted:
        with open_guest(host, str(VmPlaces(cluster.site).guest)) as guest:
            if guest.run(("/bin/grep", "-q", "revoked", "/etc/nginx/nginx.conf")).status:
                raise SmsError(
                    f"the VM on {host.name} runs an older image, which checks no revoked certificates",
                    hint="`sms vm build`, `sms vm stop`, `sms vm start`",
                )
    done.refuses = True


def _renew_vm(cluster: Cluster, host: Host, server: bytes) -> bool:
    """Install newer certificates of the VM if its own, of which ``server`` is one, expire soon; return whether."""
    hostname, addresses = vm_names(cluster)
    days = issuer_days(read_note(cluster, host), cluster.env.clock.time())
    if days >= ca.ISSUER_SOON_DAYS or not ca.is_for(server, hostname, addresses):
        return False  # with another address in the site file, the next start issues others
    try:
        ends = issuer_end(cluster)
    except ConfigError:
        return False  # the key is on another machine
    busy = f"another sms is at work on the VM on {host.name}"
    with cluster.env.locks.hold(host, str(VmPlaces(cluster.site).lock), busy):
        written = read_note(cluster, host)
        if ends <= written.issuer_ends:
            return False
        install_tls(cluster, host, make_seed(cluster))
        host.write(str(VmPlaces(cluster.site).note), to_json(replace(written, issuer_ends=ends)), mode=0o600)
    return True


def _check_end(cluster: Cluster, host: Host) -> None:
    """Raise SmsError if certificates of the VM expire soon: the machine that has the key would have renewed them."""
    days = issuer_days(read_note(cluster, host), cluster.env.clock.time())
    if days < ca.ALARM_DAYS:
        raise SmsError(
            f"its certificates expire in {max(days, 0)} days",
            hint="`sms key ca renew` on the machine that has tls/ca.key, or `sms vm stop` and `sms vm start`",
        )


def _revoked(cluster: Cluster) -> set[str]:
    return {each.serial for each in read_revoked(tls_folder(cluster))}
