"""Management controllers of nodes: credentials, and parallel requests to many of them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from appliance.errors import Refused, SmsError
from appliance.operations.context import Cluster, read_password
from appliance.operations.vm.client import tls_folder
from appliance.plan.vm.vm import need_vm
from appliance.tools.redfish import Controller

USER, PASSWORD = "SMS_BMC_USER", "SMS_BMC_PASSWORD"

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Login:
    """Credentials for all controllers of the site. The password is never printed."""

    user: str
    password: str = field(repr=False)
    ca: Path | None = None
    insecure: bool = False

    def controller(self, url: str) -> Controller:
        """Return the controller at a URL; the URL may include the path of a system."""
        return Controller(url, self.user, self.password, self.ca, self.insecure, "provisioning.bmc")


def find_login(cluster: Cluster) -> Login:
    """Return the credentials from the environment, else from the site file.

    Raises:
        Refused: neither has a password, others can read the password file, or the CA does not exist.
    """
    settings = need_vm(cluster.site).bmc
    user = os.environ.get(USER) or settings.user
    password = os.environ.get(PASSWORD, "")
    if not password and settings.password_file is None:
        raise Refused(
            "no password is configured for the management controllers",
            hint=f"set provisioning.bmc.password_file to a file of mode 0600 that contains it, or set ${PASSWORD}",
        )
    if not password and settings.password_file:
        password = read_password(settings.password_file)
    ca = settings.ca or tls_folder(cluster) / "ca.pem"
    if settings.insecure:
        return Login(user, password, None, insecure=True)
    if not ca.is_file():
        raise Refused(
            f"{ca} does not exist: certificates of controllers cannot be verified",
            hint="set provisioning.bmc.ca to the CA that signed them; `sms key ca` shows the site's own",
        )
    return Login(user, password, ca)


def controller_of(node: Mapping[str, object], login: Login) -> Controller:
    """Return the controller of a node.

    Raises:
        Refused: the node has no controller in the inventory.
    """
    url = str(node.get("bmc") or "")
    if urlsplit(url).scheme != "https":
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
