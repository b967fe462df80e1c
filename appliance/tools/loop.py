"""Loop devices: a file as a block device. util-linux."""

from __future__ import annotations

import time

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.tools import ext3


def attach(host: Host, path: str) -> str:
    """The loop device of a file, a new one where it has none."""
    users = ext3.users_of(host, path)
    return users[0] if users else host.run("losetup", "--find", "--show", path).text


def let_go(host: Host, loop: str) -> None:
    """Detach a loop device; one that is in use goes when its last user does."""
    host.run("losetup", "--detach", loop, ok=None)


def reread(host: Host, path: str) -> None:
    """Have the loop devices of a file see how long it is now."""
    for loop in ext3.users_of(host, path):
        host.run("losetup", "--set-capacity", loop)


def wait_free(host: Host, path: str, timeout_s: float = 20) -> None:
    """Wait until no loop device has the file open.

    Raises:
        SmsError: one still has.
    """
    deadline = time.monotonic() + timeout_s
    while users := ext3.users_of(host, path):
        for loop in users:
            let_go(host, loop)
        if time.monotonic() > deadline:
            raise SmsError(
                f"{', '.join(users)} still has {path} open on {host.name}",
                hint="find who uses it (`losetup -l`, `fuser`), then run this again",
            )
        time.sleep(0.1)
