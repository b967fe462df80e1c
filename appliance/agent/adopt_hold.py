"""The guard of the old node of an adoption, as a process (``adopt_guard`` has its unit)."""

import os
import select
import socket
import time
from typing import Any, Dict

from appliance.agent import protocol
from appliance.agent.adopt_resume import recover
from appliance.agent.adopt_state import OldNode
from appliance.agent.machine import reason
from appliance.agent.protocol import Problem, field
from appliance.shared.locks import Locked, hold_lock

RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR = 0x1, 0x10, 0x100
"""linux/rtnetlink.h."""
LOOK_S = 10.0
"""Seconds after which it looks again although nothing has changed."""
CONFIGURED_S = 30.0
"""Seconds after which the network of the node should be configured. It is not where its configuration finds an
interface by the MAC address that has moved: then the guard adds the addresses that stay."""
PAUSE_S = 0.05
"""Seconds to wait for further changes after one."""


def hold(request: Dict[str, Any]) -> Dict[str, Any]:
    """Keep away what has moved, until the services are back on this host."""
    mark, lock = field(request, "mark", str), field(request, "lock", str)
    changes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    changes.bind((0, RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR))
    with changes:
        _look(mark, lock, early=True)
        _notify_ready()
        began = time.monotonic()
        while _look(mark, lock, late=time.monotonic() > began + CONFIGURED_S):
            if select.select([changes], [], [], LOOK_S)[0]:
                select.select([], [], [], PAUSE_S)
                _drain(changes)
    return {}


def _look(mark: str, lock: str, *, early: bool = False, late: bool = False) -> bool:
    """Do what the stored state asks for; return whether there is one."""
    try:
        with hold_lock(lock):
            node = OldNode.stored(mark)
            if node is None:
                return False
            if node.mark.state in ("given", "released"):
                node.keep_away(early=early, late=late)
            if node.mark.state != "given" and not early:
                recover(node, lambda: False, sure=False)
            return os.path.exists(mark)
    except Locked:
        return True  # an agent of the adoption is at work
    except (OSError, Problem) as error:  # such as a network that is not there yet
        protocol.note(reason(error))
        return True


def _drain(changes: socket.socket) -> None:
    changes.setblocking(False)
    try:
        while changes.recv(65536):
            pass
    except BlockingIOError:
        pass
    except OSError:
        pass  # more than its buffer has room for
    finally:
        changes.setblocking(True)


def _notify_ready() -> None:
    """Tell systemd that what depends on this unit may start (sd_notify(3))."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as one:
            one.sendto(b"READY=1", "\0" + path[1:] if path.startswith("@") else path)
