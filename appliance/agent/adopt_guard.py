"""Guard of the old node of an adoption: a unit that keeps what has moved away from this host, also at its next boot.

The network configuration of the host has the addresses still. The guard runs before it, gives the interfaces their
spare MAC addresses as they appear, and removes moved addresses whenever something adds them. After a power failure
amid the switch it also decides, as the killed agent would have done.

It acts only while no other agent of the adoption is at work, which the lock shows.
"""

import json
import os
import sys

from appliance.agent.adopt_units import FOLDER, systemctl
from appliance.shared.files import remove_state, replace_file

UNIT = "sms-adopted.service"
WANTS = FOLDER + "/multi-user.target.wants/" + UNIT
TEXT = """\
# Written by sms adopt; removed when the services are back, or by sms adopt --finish.
[Unit]
Description=Addresses of this host that the services container has
DefaultDependencies=no
RequiresMountsFor={folder}
ConditionPathExists={mark}
Wants=network-pre.target
Before=network-pre.target shutdown.target
Conflicts=shutdown.target

[Service]
Type=notify
ExecStart={python} -I {program} adopt_hold '{request}'
Restart=on-failure
RestartSec=1
"""


def install(mark: str, lock: str) -> None:
    """Write the unit and a copy of this program; systemd has to read its units again afterwards.

    Where the agent is not a zipapp, as in tests of its modules, there is no guard.
    """
    archive = getattr(globals().get("__loader__"), "archive", "")
    if not archive:
        return
    with open(archive, "rb") as stream:
        replace_file(_program(mark), stream.read())
    request = json.dumps({"mark": mark, "lock": lock})
    facts = {"folder": os.path.dirname(mark), "mark": mark, "python": sys.executable, "program": _program(mark)}
    replace_file(FOLDER + "/" + UNIT, TEXT.format(request=request, **facts).encode(), 0o644)
    os.makedirs(os.path.dirname(WANTS), exist_ok=True)
    if not os.path.islink(WANTS):
        os.symlink("../" + UNIT, WANTS)


def renew(mark: str, lock: str) -> None:
    """Replace a guard of an earlier version that has another lock: it must not act while the caller does.

    The caller holds ``lock``.

    Raises:
        Problem: systemd does not start the new one.
    """
    try:
        with open(FOLDER + "/" + UNIT, "rb") as stream:
            if json.dumps({"mark": mark, "lock": lock}).encode() in stream.read():
                return
    except FileNotFoundError:
        return
    install(mark, lock)
    systemctl("daemon-reload")
    systemctl("restart", UNIT)


def is_installed() -> bool:
    """Return whether there is a guard."""
    return os.path.exists(FOLDER + "/" + UNIT)


def remove(mark: str) -> None:
    """Remove the unit and the program. One that runs ends when the stored state is removed."""
    for path in (WANTS, FOLDER + "/" + UNIT, _program(mark)):
        remove_state(path)


def _program(mark: str) -> str:
    return os.path.splitext(mark)[0] + ".pyz"
