"""Loop devices: a file as a block device. util-linux."""

from __future__ import annotations

import time

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.tools import ext3


def attach(host: Host, path: str) -> str:
    """Return the loop device of a file; attach one if there is none."""
    users = ext3.users_of(host, path)
    return users[0] if users else host.run("losetup", "--find", "--show", path).text


def detach(host: Host, loop: str) -> None:
    """Detach a loop device; if it is in use, the kernel does so after the last close."""
    host.run("losetup", "--detach", loop, ok=None)


def reread(host: Host, path: str) -> None:
    """Update the capacity of a file's loop devices to its size."""
    for loop in ext3.users_of(host, path):
        host.run("losetup", "--set-capacity", loop)


def wait_free(host: Host, path: str, timeout_s: float = 20) -> None:
    """Wait until no loop device has the file open.

    Raises:
        SmsError: one still has it open after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while users := ext3.users_of(host, path):
        for loop in users:
            detach(host, loop)
        if time.monotonic() > deadline:
            raise SmsError(
                f"{', '.join(users)} still has {path} open on {host.name}",
                hint="find its users (`losetup -l`, `fuser`), then run the command again",
            )
        time.sleep(0.1)
