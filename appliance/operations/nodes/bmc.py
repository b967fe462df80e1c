"""Management controllers of nodes: how they are logged in to, and many of them asked at once."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from appliance.errors import Refused, SmsError
from appliance.operations.context import Cluster
from appliance.operations.migration.fence import read_password
from appliance.operations.vm.client import need_vm, tls_folder
from appliance.tools.redfish import Controller

USER, PASSWORD = "SMS_BMC_USER", "SMS_BMC_PASSWORD"

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Login:
    """What all controllers of the site are asked with. The password is shown nowhere."""

    user: str
    password: str = field(repr=False)
    ca: Path | None = None
    insecure: bool = False

    def controller(self, url: str) -> Controller:
        """The controller at a URL, which may name a system."""
        return Controller(url, self.user, self.password, self.ca, self.insecure, "provisioning.bmc")


def find_login(cluster: Cluster) -> Login:
    """User and password of the environment, or as the site file says.

    Raises:
        Refused: neither has a password, the file can be read by others, or the CA is not there.
    """
    settings = need_vm(cluster).bmc
    user = os.environ.get(USER) or settings.user
    password = os.environ.get(PASSWORD, "")
    if not password and settings.password_file is None:
        raise Refused(
            "no password of the management controllers is known",
            hint=f"write it into a file of mode 0600, named as provisioning.bmc.password_file, or set ${PASSWORD}",
        )
    if not password and settings.password_file:
        password = read_password(settings.password_file)
    ca = settings.ca or tls_folder(cluster) / "ca.pem"
    if settings.insecure:
        return Login(user, password, None, insecure=True)
    if not ca.is_file():
        raise Refused(
            f"{ca} is not there: no certificate of a controller could be trusted",
            hint="name the CA that signed them as provisioning.bmc.ca; `sms key ca` shows the site's own",
        )
    return Login(user, password, ca)


def controller_of(node: dict[str, object], login: Login) -> Controller:
    """The controller of a node.

    Raises:
        Refused: the inventory knows none.
    """
    url = str(node.get("bmc") or "")
    if urlsplit(url).scheme != "https":
        raise Refused(
            f"{node['name']} has no controller in the inventory",
            hint=f"sms node edit {node['name']} --bmc https://ADDRESS; or `sms node discover`",
        )
    return login.controller(url)


def at_once(
    items: Sequence[Item], work: Callable[[Item], Outcome], *, workers: int
) -> Iterator[tuple[Item, Outcome | SmsError]]:
    """The outcome of each, or its error, as they come. Who stops listening waits for nobody: the rest is not begun."""
    left: queue.SimpleQueue[Item] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Item, Outcome | SmsError | Exception]] = queue.SimpleQueue()
    stopped = threading.Event()
    for item in items:
        left.put(item)

    def labour() -> None:
        while not stopped.is_set():
            try:
                item = left.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((item, work(item)))
            except Exception as error:
                done.put((item, error))

    # A thread that ends with the process: one that a controller holds would hold up an interruption.
    for _ in range(min(workers, len(items))):
        threading.Thread(target=labour, daemon=True).start()
    try:
        for _ in items:
            item, outcome = done.get()
            if isinstance(outcome, Exception) and not isinstance(outcome, SmsError):
                raise outcome
            yield item, outcome
    finally:
        stopped.set()
