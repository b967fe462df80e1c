"""The container's state takes the place of that of the old node, which is kept beside it.

By renaming both folders. Where that is impossible, because the place is a mount point or a folder of a lower layer of
an overlay, entry by entry:

    STATE.sms-new      written by the coordinator; the entries of STATE move to STATE.sms-old
    STATE.sms-ready    the same folder afterwards; its entries move to STATE
    STATE.before-sms   the old entries; with a number if there is one of an earlier undo
"""

import errno
import os
import shutil

from appliance.agent.system import SYSTEM
from appliance.shared.files import make_folder, sync_folder

NOT_MOVABLE = (errno.EXDEV, errno.EBUSY)
COPY_S = 600.0
"""Seconds that the copy of an entry to another file system may take."""


def new_state(state: str) -> str:
    """Return where the coordinator writes the state of the container."""
    return state + ".sms-new"


def place_state(state: str) -> str:
    """Put the container's state in the place of this node's, and keep the old one; may be repeated after a failure.

    Returns:
        Where the old one is; empty if all was done before, or there is no state of the container.
    """
    new, ready = new_state(state), state + ".sms-ready"
    if os.path.isdir(ready):
        _place_entries(ready, state)
        return ""
    if not os.path.isdir(new):
        return ""
    if not os.path.isdir(state + ".sms-old"):  # else a killed run moves entries
        try:
            return _rename_both(state, new)
        except OSError as error:
            if error.errno not in NOT_MOVABLE:
                raise
    kept = _keep_entries(state)
    os.rename(new, ready)
    sync_folder(os.path.dirname(state))
    _place_entries(ready, state)
    return kept


def _rename_both(state: str, new: str) -> str:
    kept = ""
    if os.path.isdir(state):  # else a killed run has renamed it
        kept = _free_name(state + ".before-sms")
        found = os.stat(state)
        os.chown(new, found.st_uid, found.st_gid)
        os.chmod(new, found.st_mode & 0o7777)
        os.rename(state, kept)
        sync_folder(os.path.dirname(state))  # else a power failure may leave the second name only
    os.rename(new, state)
    sync_folder(os.path.dirname(state))
    return kept


def _keep_entries(state: str) -> str:
    """Move the entries of a folder beside it; return where they are, empty if a killed run has moved them."""
    old = state + ".sms-old"
    if not os.path.isdir(old) and not os.listdir(state):
        return ""
    make_folder(old, 0o700)
    _move_entries(state, old)
    kept = _free_name(state + ".before-sms")
    os.rename(old, kept)
    return kept


def _place_entries(ready: str, state: str) -> None:
    _move_entries(ready, state)
    os.rmdir(ready)
    sync_folder(os.path.dirname(state))


def _move_entries(source: str, target: str) -> None:
    for name in os.listdir(source):
        one, other = os.path.join(source, name), os.path.join(target, name)
        try:
            os.rename(one, other)
        except OSError as error:
            if error.errno not in NOT_MOVABLE:
                raise
            SYSTEM.run("cp", "-a", "-T", "--", one, other, timeout=COPY_S)
            if os.path.isdir(one) and not os.path.islink(one):
                shutil.rmtree(one)
            else:
                os.unlink(one)
    os.sync()


def _free_name(path: str) -> str:
    """Return a path, with a number if there is something of its name."""
    found, number = path, 0
    while os.path.lexists(found):
        number += 1
        found = "%s.%d" % (path, number)
    return found
