"""A mirror with mdadm, for kernels without Btrfs: raid1 with XFS or ext4. mdadm, util-linux.

Without checksums it cannot know which of two different halves is correct. It survives a failed disk and detects silent
corruption, but cannot repair it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.plan.overlay.mirror import Device, Made, Scrubbed, Seen
from appliance.progress import Step
from appliance.tools.programs import find_missing, has_program

SYNC = """
read -r now <"$1/sync_action" && [ "$now" = idle ] || exit 75
echo "$2" >"$1/sync_action" || exit
while read -r now <"$1/sync_action" && [ "$now" != idle ]; do sleep 1; done
cat "$1/mismatch_cnt"
"""
"""Shell script: run md's sync action $2 (check, repair) in sysfs folder $1; print the number of differing sectors."""
SECTOR = 512


def device_of(uuid: str) -> str:
    """Return the md device of a mirror. The name is derived from the UUID, so it does not depend on the boot order."""
    return f"/dev/md/sms-{uuid.replace(':', '')[:16]}"


class Md:
    """Mirror operations with md; same interface as ``Btrfs``."""

    kind = "md"

    def lacks(self, host: Host) -> str:
        """Return why the host cannot have such a mirror; empty if it can."""
        if find_missing(host, "mdadm"):
            return "mdadm is not installed"
        if len(find_missing(host, "mkfs.xfs", "mkfs.ext4")) == 2:
            return "mkfs.xfs or mkfs.ext4 is missing"
        supported = host.works("grep", "-qw", "raid1", "/proc/mdstat") or host.works("env", "modprobe", "-q", "raid1")
        return "" if supported else "the kernel does not support md raid1"

    def make(self, host: Host, loops: Sequence[str], label: str) -> Made:
        """Create a mirror of two devices with a file system."""
        new = f"/dev/md/{label}"
        options = ("--level", "1", "--raid-devices", "2", "--metadata", "1.2", "--bitmap", "internal", "--assume-clean")
        host.run("mdadm", "--create", new, "--run", *options, "--homehost", "any", *loops)
        seen = [self.inspect(host, loop) for loop in loops]
        if has_program(host, "mkfs.xfs"):
            host.run("mkfs.xfs", "-q", "-f", "-m", "reflink=1", new, timeout=300)
        else:
            host.run("mkfs.ext4", "-q", "-F", "-m", "0", new, timeout=300)
        host.run("mdadm", "--stop", new)
        return Made(seen[0].mirror, tuple(enumerate(one.uuid for one in seen)))

    def inspect(self, host: Host, path: str) -> Seen:
        """Inspect a member's file or device while it is not assembled."""
        if not host.works("test", "-e", path):
            return Seen(False)
        result = host.run("env", "mdadm", "--examine", "--export", path, ok=None)  # env: there may be no mdadm
        found = dict(line.split("=", 1) for line in result.text.splitlines() if "=" in line)
        if result.status or "MD_UUID" not in found:
            return Seen(True)
        mark = re.search(r"^ *Events : (\d+)", host.run("mdadm", "--examine", path).text, re.MULTILINE)
        return Seen(True, found["MD_UUID"], found.get("MD_DEV_UUID", ""), int(mark.group(1)) if mark else 0)

    def mount(self, host: Host, uuid: str, loops: Sequence[str], folder: str, *, degraded: bool) -> None:
        """Assemble the mirror from ``loops`` and mount it."""
        device = device_of(uuid)
        host.run("mdadm", "--assemble", device, "--uuid", uuid, *(["--run"] if degraded else []), *loops)
        host.run("mount", "-o", "noatime,discard", device, folder, timeout=600)

    def unmount(self, host: Host, uuid: str, folder: str) -> None:
        """Unmount the mirror and stop the array."""
        host.run("umount", folder, timeout=600)
        host.run("mdadm", "--stop", device_of(uuid))

    def cancel(self, host: Host, uuid: str, folder: str) -> None:
        """Cancel a running check."""
        host.run("mdadm", "--misc", "--action=idle", device_of(uuid), ok=None)

    def mounted(self, host: Host, uuid: str, folder: str) -> bool:
        """Return whether the mirror is mounted at ``folder``."""
        return host.works("mountpoint", "-q", folder)

    def devices(self, host: Host, uuid: str, folder: str) -> list[Device]:
        """Return the members of a mounted mirror; md has no error counts, it removes failing devices."""
        text = host.run("mdadm", "--detail", device_of(uuid)).text
        found = []
        for slot, state, path in re.findall(r"^ +\d+ +\d+ +\d+ +(\d+|-) +([a-z ]+?) +(/dev/\S+)$", text, re.MULTILINE):
            number = int(slot) if slot != "-" else -1
            found.append(Device(number, path, {"rebuilding": 1} if "rebuilding" in state else {}, "faulty" in state))
        removed = re.findall(r"^ +- +0 +0 +(\d+) +removed$", text, re.MULTILINE)
        return found + [Device(int(slot), "", missing=True) for slot in removed]

    def scrub(self, host: Host, uuid: str, folder: str, step: Step) -> Scrubbed:
        """Compare both halves. Blocks that differ are lost: md cannot know which half is correct."""
        name = host.run("readlink", "-f", device_of(uuid)).text.rpartition("/")[2]
        folder = f"/sys/block/{name}/md"
        (differ,) = host.run("sh", "-c", SYNC, "sync", folder, "check", timeout=None).numbers(1)
        step.detail(f"{differ * SECTOR >> 10} KiB differ" if differ else "no differences")
        return Scrubbed(0, differ)

    def replace(self, host: Host, uuid: str, folder: str, devid: int, loop: str) -> None:
        """Replace the member in slot ``devid`` by ``loop``; call ``settle`` afterwards."""
        device = device_of(uuid)
        for old in self.devices(host, uuid, folder):
            if old.devid == devid and old.path:
                host.run("mdadm", device, "--fail", old.path, "--remove", old.path, ok=None)
        host.run("mdadm", device, "--add", loop)

    def settle(self, host: Host, uuid: str, folder: str) -> None:
        """Wait until the new member is synchronized.

        Raises:
            SmsError: the array is not complete.
        """
        device = device_of(uuid)
        host.run("mdadm", "--wait", device, ok=None, timeout=None)
        left = [one for one in self.devices(host, uuid, folder) if one.missing or one.errors]
        if left:
            raise SmsError("md has not synchronized the new member", hint=f"mdadm --detail {device}")

    def enlarge(self, host: Host, uuid: str, folder: str) -> None:
        """Use the whole size of enlarged devices."""
        device = device_of(uuid)
        host.run("mdadm", "--grow", device, "--bitmap", "none")
        host.run("mdadm", "--grow", device, "--size", "max", "--assume-clean")
        host.run("mdadm", "--grow", device, "--bitmap", "internal")
        kind = host.run("findmnt", "--noheadings", "--output", "FSTYPE", "--mountpoint", folder).text
        host.run(*(("xfs_growfs", folder) if kind == "xfs" else ("resize2fs", device)), timeout=600)
