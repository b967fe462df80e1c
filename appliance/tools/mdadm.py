"""A mirror by mdadm, for kernels without Btrfs: raid1 with XFS or ext4 on it. mdadm, util-linux.

Of two halves that differ it cannot tell the right one: there is no digest. It survives a disk that fails, and finds
noise, but does not mend it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.plan.overlay.mirror import Device, Made, Scrubbed, Seen
from appliance.progress import Step
from appliance.tools.programs import has_program

THERE = (
    "command -v mdadm >/dev/null || exit 44; command -v mkfs.xfs mkfs.ext4 >/dev/null || exit 46; "
    "grep -qw raid1 /proc/mdstat 2>/dev/null || modprobe -q raid1 2>/dev/null || exit 45"
)
WORDS = {44: "there is no mdadm", 45: "the kernel has no raid1 of md", 46: "there is no mkfs.xfs or mkfs.ext4"}
LOOK = '[ -e "$1" ] || exit 44; exec mdadm --examine --export "$1"'
EVENTS = 'mdadm --examine "$1" | sed -n "s/^ *Events : //p"'
SYNC = """
read -r now <"$1/sync_action" && [ "$now" = idle ] || exit 75
echo "$2" >"$1/sync_action" || exit
while read -r now <"$1/sync_action" && [ "$now" != idle ]; do sleep 1; done
cat "$1/mismatch_cnt"
"""
"""Shell: has md in sysfs folder $1 do $2 (check, repair); prints how many sectors differed."""
WAIT = 'mdadm --wait "$1" || true'
SECTOR = 512


def device_of(uuid: str) -> str:
    """The md device of a mirror; its name goes with the mirror's, for it must not depend on the order of a boot."""
    return f"/dev/md/sms-{uuid.replace(':', '')[:16]}"


class Md:
    """What a mirror needs of md; ``Btrfs`` has the same."""

    kind = "md"

    def lacks(self, host: Host) -> str:
        """Why the host cannot have one; empty when it can."""
        status = host.run("sh", "-c", THERE, "there", ok=None).status
        return "" if status == 0 else WORDS.get(status, "mdadm cannot be run")

    def make(self, host: Host, loops: Sequence[str], label: str) -> Made:
        """Make a mirror of two devices, with a file system on it."""
        new = f"/dev/md/{label}"
        options = ("--level", "1", "--raid-devices", "2", "--metadata", "1.2", "--bitmap", "internal", "--assume-clean")
        host.run("mdadm", "--create", new, "--run", *options, "--homehost", "any", *loops)
        seen = [self.look(host, loop) for loop in loops]
        if has_program(host, "mkfs.xfs"):
            host.run("mkfs.xfs", "-q", "-f", "-m", "reflink=1", new, timeout=300)
        else:
            host.run("mkfs.ext4", "-q", "-F", "-m", "0", new, timeout=300)
        host.run("mdadm", "--stop", new)
        return Made(seen[0].mirror, tuple(enumerate(one.uuid for one in seen)))

    def look(self, host: Host, path: str) -> Seen:
        """A member's file, or device, while it is not assembled."""
        said = host.run("sh", "-c", LOOK, "look", path, ok=None)
        if said.status == 44:
            return Seen(False)
        found = dict(line.split("=", 1) for line in said.text.splitlines() if "=" in line)
        if said.status or "MD_UUID" not in found:
            return Seen(True)
        mark = host.run("sh", "-c", EVENTS, "events", path).text
        return Seen(True, found["MD_UUID"], found.get("MD_DEV_UUID", ""), int(mark or 0))

    def mount(self, host: Host, uuid: str, loops: Sequence[str], folder: str, *, degraded: bool) -> None:
        """Assemble it of ``loops`` and mount it."""
        device = device_of(uuid)
        host.run("mdadm", "--assemble", device, "--uuid", uuid, *(["--run"] if degraded else []), *loops)
        host.run("mount", "-o", "noatime,discard", device, folder, timeout=600)

    def unmount(self, host: Host, uuid: str, folder: str) -> None:
        """Unmount it and take it apart."""
        host.run("umount", folder, timeout=600)
        host.run("mdadm", "--stop", device_of(uuid))

    def cancel(self, host: Host, uuid: str, folder: str) -> None:
        """End a check under way."""
        host.run("mdadm", "--misc", "--action=idle", device_of(uuid), ok=None)

    def mounted(self, host: Host, uuid: str, folder: str) -> bool:
        """Whether it is mounted at ``folder``."""
        return host.works("mountpoint", "-q", folder)

    def devices(self, host: Host, uuid: str, folder: str) -> list[Device]:
        """The members of a mounted one; md counts no errors, it puts a device out."""
        said = host.run("mdadm", "--detail", device_of(uuid)).text
        found = []
        for slot, state, path in re.findall(r"^ +\d+ +\d+ +\d+ +(\d+|-) +([a-z ]+?) +(/dev/\S+)$", said, re.MULTILINE):
            number = int(slot) if slot != "-" else -1
            found.append(Device(number, path, {"rebuilding": 1} if "rebuilding" in state else {}, "faulty" in state))
        gone = re.findall(r"^ +- +0 +0 +(\d+) +removed$", said, re.MULTILINE)
        return found + [Device(int(slot), "", missing=True) for slot in gone]

    def scrub(self, host: Host, uuid: str, folder: str, step: Step) -> Scrubbed:
        """Hold both halves against each other. What differs is lost: nobody knows which half is right."""
        began = time.monotonic()
        name = host.run("readlink", "-f", device_of(uuid)).text.rpartition("/")[2]
        folder = f"/sys/block/{name}/md"
        differ = int(host.run("sh", "-c", SYNC, "sync", folder, "check", timeout=None).text.splitlines()[-1] or 0)
        step.detail(f"{differ * SECTOR >> 10} KiB differ" if differ else "both are the same")
        return Scrubbed(0, differ, time.monotonic() - began)

    def replace(self, host: Host, uuid: str, folder: str, devid: int, loop: str) -> None:
        """Put out the member of slot ``devid`` and have ``loop`` take its place; then ``settle``."""
        device = device_of(uuid)
        for old in self.devices(host, uuid, folder):
            if old.devid == devid and old.path:
                host.run("mdadm", device, "--fail", old.path, "--remove", old.path, ok=None)
        host.run("mdadm", device, "--add", loop)

    def settle(self, host: Host, uuid: str, folder: str) -> None:
        """Wait until the new member holds all.

        Raises:
            SmsError: it does not.
        """
        device = device_of(uuid)
        host.run("sh", "-c", WAIT, "wait", device, timeout=None)
        left = [one for one in self.devices(host, uuid, folder) if one.missing or one.errors]
        if left:
            raise SmsError("md has not taken the new member", hint=f"mdadm --detail {device}")

    def enlarge(self, host: Host, uuid: str, folder: str) -> None:
        """Use all of devices that were made larger."""
        device = device_of(uuid)
        host.run("mdadm", "--grow", device, "--bitmap", "none")
        host.run("mdadm", "--grow", device, "--size", "max", "--assume-clean")
        host.run("mdadm", "--grow", device, "--bitmap", "internal")
        kind = host.run("findmnt", "--noheadings", "--output", "FSTYPE", "--mountpoint", folder).text
        host.run(*(("xfs_growfs", folder) if kind == "xfs" else ("resize2fs", device)), timeout=600)
