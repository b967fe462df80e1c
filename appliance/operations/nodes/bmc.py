"""Management controllers of nodes: credentials, and parallel requests to many of them."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, ip_address
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from appliance.errors import Refused, SmsError
from appliance.operations.context import Cluster, read_password
from appliance.plan.nodes.nodes import CONTROLLER
from appliance.plan.vm.vm import need_vm
from appliance.tools.redfish import Controller

USER, PASSWORD = "SMS_BMC_USER", "SMS_BMC_PASSWORD"
FOREIGN_HINT = "`sms node show` has the controller of a node; provisioning.bmc.networks has the networks of controllers"

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Login:
    """Credentials for all controllers of the site. The password is never printed.

    It is sent to addresses in ``networks`` only, and to none of the provisioning VM's (``vm``).
    """

    user: str
    password: str = field(repr=False)
    networks: tuple[IPv4Network, ...]
    vm: tuple[IPv4Address, ...]
    ca: Path | None = None
    insecure: bool = False

    def controller(self, url: str) -> Controller:
        """Return the controller at a URL; the URL may include the path of a system.

        Raises:
            Refused: it is not in the controllers' networks, or is the VM.
            SmsError: its name cannot be resolved.
        """
        address = self._find_address(urlsplit(url).hostname or "")
        section = "provisioning.bmc"
        return Controller(url, self.user, self.password, self.ca, self.insecure, section=section, address=address)

    def _find_address(self, host: str) -> str:
        """Return the address to connect to: of a name with several ones, such as of both IP versions, one that may be.

        The connection is made to this address, whatever the name resolves to later.
        """
        try:
            found = sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
        except (OSError, UnicodeError) as error:
            raise SmsError(f"{host}: no such host", hint="is it the controller's name?") from error
        addresses = [ip_address(text.partition("%")[0]) for text in found]
        if any(address in self.vm for address in addresses):
            raise Refused(f"{host} is the provisioning VM: the password is not sent there", hint=FOREIGN_HINT)
        for address in addresses:
            if any(address in network for network in self.networks):
                return str(address)
        raise Refused(
            f"{host} is not in the controllers' networks ({', '.join(map(str, self.networks))}): "
            "the password is not sent there",
            hint=FOREIGN_HINT,
        )


def find_login(cluster: Cluster) -> Login:
    """Return the credentials from the environment, else from the site file.

    Raises:
        Refused: neither has a password, others can read the password file, the CA does not exist, or the networks of
            the controllers or their CA are not set.
    """
    settings, vm = need_vm(cluster.site).bmc, need_vm(cluster.site)
    if not settings.networks:
        raise Refused(
            "the networks of the management controllers are not configured",
            hint="set provisioning.bmc.networks, such as [10.0.9.0/24]: the password is sent to no other address",
        )
    user = os.environ.get(USER) or settings.user
    password = os.environ.get(PASSWORD, "")
    if not password and settings.password_file is None:
        raise Refused(
            "no password is configured for the management controllers",
            hint=f"set provisioning.bmc.password_file to a file of mode 0600 that contains it, or set ${PASSWORD}",
        )
    if not password and settings.password_file:
        password = read_password(settings.password_file)
    networks = tuple(each.network for each in settings.networks)
    own = (vm.address.ip, *([vm.public.address.ip] if vm.public else []))
    if settings.insecure:
        return Login(user, password, networks, own, insecure=True)
    if settings.ca is None:
        raise Refused(
            "the CA of the management controllers is not configured: their certificates cannot be verified",
            hint="set provisioning.bmc.ca to the CA that signed them",
        )
    if not settings.ca.is_file():
        raise Refused(
            f"{settings.ca} does not exist: certificates of controllers cannot be verified",
            hint="set provisioning.bmc.ca to the CA that signed them",
        )
    return Login(user, password, networks, own, settings.ca)


def controller_of(node: Mapping[str, object], login: Login) -> Controller:
    """Return the controller of a node.

    Raises:
        Refused: the node has no controller in the inventory, or the password must not be sent to it.
    """
    url = str(node.get("bmc") or "")
    if not CONTROLLER.fullmatch(url):
        raise Refused(
            f"{node['name']} has no controller in the inventory",
            hint=f"sms node edit {node['name']} --bmc https://ADDRESS; or `sms node discover`",
        )
    return login.controller(url)


def run_parallel(
    items: Sequence[Item], work: Callable[[Item], Outcome], *, workers: int
) -> Iterator[tuple[Item, Outcome | SmsError]]:
    """Run ``work`` on all items in parallel threads, and yield each result or error as it completes.

    Closing the generator does not wait for running threads, and starts no further ones.
    """
    left: queue.SimpleQueue[Item] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Item, Outcome | SmsError | Exception]] = queue.SimpleQueue()
    stopped = threading.Event()
    for item in items:
        left.put(item)

    def worker() -> None:
        while not stopped.is_set():
            try:
                item = left.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((item, work(item)))
            except Exception as error:
                done.put((item, error))

    # Daemon threads: one that hangs on a controller must not delay an interruption.
    for _ in range(min(workers, len(items))):
        threading.Thread(target=worker, daemon=True).start()
    try:
        for _ in items:
            item, outcome = done.get()
            if isinstance(outcome, Exception) and not isinstance(outcome, SmsError):
                raise outcome
            yield item, outcome
    finally:
        stopped.set()
