"""A mirror by Btrfs: raid1 of data and metadata on two devices, with a digest of every block. btrfs-progs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.plan.overlay.mirror import Device, Made, Scrubbed, Seen
from appliance.progress import Step

SCRUBS = 5
"""A scrub that found something is run again: what was written meanwhile may have come to lie in noise."""
THERE = (
    "command -v btrfs mkfs.btrfs >/dev/null || exit 44; "
    "grep -qw btrfs /proc/filesystems || modprobe -q btrfs 2>/dev/null || exit 45"
)
LOOK = '[ -f "$1" ] || exit 44; exec btrfs inspect-internal dump-super "$1"'
CONVERT = ("-dconvert=raid1,soft", "-mconvert=raid1,soft", "-sconvert=raid1,soft")
WORDS = {44: "there is no btrfs-progs", 45: "the kernel has no Btrfs"}


class Btrfs:
    """What a mirror needs of Btrfs; ``Md`` has the same."""

    kind = "btrfs"

    def lacks(self, host: Host) -> str:
        """Why the host cannot have one; empty when it can."""
        status = host.run("sh", "-c", THERE, "there", ok=None).status
        return "" if status == 0 else WORDS.get(status, "btrfs cannot be run")

    def make(self, host: Host, loops: Sequence[str], label: str) -> Made:
        """Make a mirror of two devices. A digest of 64 bits lets no noise pass: of 32 bits, one block in 2^32."""
        options = ("--data", "raid1", "--metadata", "raid1", "--csum", "xxhash", "--label", label)
        host.run("mkfs.btrfs", "--quiet", "--force", *options, *loops, timeout=300)
        seen = [self.look(host, loop, device=True) for loop in loops]
        numbers = [self._super(host, loop, "dev_item.devid") for loop in loops]
        devices = tuple((int(number), one.uuid) for number, one in zip(numbers, seen, strict=True))
        return Made(seen[0].mirror, devices)

    def look(self, host: Host, path: str, *, device: bool = False) -> Seen:
        """A member's file, or device, while it is not mounted."""
        script = 'exec btrfs inspect-internal dump-super "$1"' if device else LOOK
        said = host.run("sh", "-c", script, "look", path, ok=None)
        if said.status == 44:
            return Seen(False)
        found = dict(line.split(None, 1) for line in said.text.splitlines() if len(line.split(None, 1)) == 2)
        if said.status or "[match]" not in found.get("magic", ""):
            return Seen(True)
        return Seen(True, found["fsid"], found["dev_item.uuid"], int(found["generation"]))

    def _super(self, host: Host, path: str, name: str) -> str:
        said = host.run("btrfs", "inspect-internal", "dump-super", path).text
        return next(line.split()[1] for line in said.splitlines() if line.split()[:1] == [name])

    def mount(self, host: Host, uuid: str, loops: Sequence[str], folder: str, *, degraded: bool) -> None:
        """Mount what ``loops`` hold of it. Freed blocks are given back to the members' file systems."""
        options = ["noatime", "discard=async", *(f"device={loop}" for loop in loops)]
        options += ["degraded"] if degraded else []
        host.run("mount", "-t", "btrfs", "-o", ",".join(options), loops[0], folder, timeout=600)

    def unmount(self, host: Host, uuid: str, folder: str) -> None:
        """Unmount it."""
        host.run("umount", folder, timeout=600)

    def cancel(self, host: Host, uuid: str, folder: str) -> None:
        """End a scrub, a replacement or a balance under way. A replacement that was cut off lets no other begin."""
        for what in (("scrub",), ("replace",), ("balance",)):
            host.run("btrfs", *what, "cancel", folder, ok=None)

    def mounted(self, host: Host, uuid: str, folder: str) -> bool:
        """Whether it is mounted at ``folder``.

        Raises:
            SmsError: something else is.
        """
        if not host.works("mountpoint", "-q", folder):
            return False
        if uuid not in host.run("btrfs", "filesystem", "show", "--raw", folder, ok=None).text:
            raise SmsError(f"something else than the mirror is mounted at {folder}", hint=f"umount {folder}")
        return True

    def devices(self, host: Host, uuid: str, folder: str) -> list[Device]:
        """The members of a mounted one, with what was found wrong with each."""
        said = host.run("btrfs", "--format", "json", "device", "stats", folder, ok=None).stdout
        found = []
        for one in json.loads(said or b"{}").get("device-stats", []):
            path, devid = one.pop("device"), int(one.pop("devid"))
            missing = not path.startswith("/dev/")
            found.append(Device(devid, path, {name: int(count) for name, count in one.items()}, missing))
        if not found:
            raise SmsError(f"btrfs says nothing of {folder}", hint=f"btrfs device stats {folder}")
        return [device for device in found if device.devid]  # 0 is the target of a replacement under way

    def scrub(self, host: Host, uuid: str, folder: str, step: Step) -> Scrubbed:
        """Read all of it, mend what is mended from the other member; the errors are counted anew after.

        Raises:
            SmsError: it cannot be done, or was ended.
        """
        began, mended = time.monotonic(), 0
        for number in range(1, SCRUBS + 1):
            host.run("btrfs", "filesystem", "sync", folder, timeout=600)
            found = read_scrub(host.run("btrfs", "scrub", "start", "-B", "-R", folder, ok=(0, 3), timeout=None).text)
            mended += found.mended
            step.detail(f"{mended} mended" if mended else "nothing to mend")
            if found.lost:
                return Scrubbed(mended, found.lost, time.monotonic() - began)
            if not found.mended:
                break
            if number == SCRUBS:
                raise SmsError(
                    f"the mirror has new errors whenever it is read ({mended} mended)",
                    hint="a disk is failing: `sms overlay mirror rebuild --on DIR` moves its member elsewhere",
                )
        host.run("btrfs", "device", "stats", "--reset", folder)
        host.run("fstrim", folder, ok=None, timeout=600)  # noise that was written over what nobody uses
        return Scrubbed(mended, 0, time.monotonic() - began)

    def replace(self, host: Host, uuid: str, folder: str, devid: int, loop: str) -> None:
        """Copy what member ``devid`` should hold to ``loop``, which takes its place; then ``settle``."""
        host.run("btrfs", "replace", "start", "-B", "-r", "-f", str(devid), loop, folder, timeout=None)

    def settle(self, host: Host, uuid: str, folder: str) -> None:
        """After a replacement: what was written while one was missing lies on the other alone, and is to be on both."""
        self.enlarge(host, uuid, folder)
        host.run("btrfs", "balance", "start", "--force", *CONVERT, folder, timeout=None)
        host.run("btrfs", "device", "stats", "--reset", folder)

    def enlarge(self, host: Host, uuid: str, folder: str) -> None:
        """Use all of devices that were made larger."""
        for device in self.devices(host, uuid, folder):
            if not device.missing:
                host.run("btrfs", "filesystem", "resize", f"{device.devid}:max", folder, timeout=600)


def read_scrub(said: str) -> Scrubbed:
    """What ``btrfs scrub start -B -R`` says.

    Raises:
        SmsError: it was ended before it was through.
    """
    counts = {name: int(count) for name, count in re.findall(r"^\s*(\w+): (\d+)\s*$", said, re.MULTILINE)}
    if "corrected_errors" not in counts or re.search(r"^Status:\s+(aborted|interrupted)", said, re.MULTILINE):
        raise SmsError("the scrub was ended before it was through", hint="sms overlay mirror scrub")
    lost = counts["uncorrectable_errors"] + counts.get("unverified_errors", 0)
    return Scrubbed(counts["corrected_errors"] + counts.get("super_errors", 0), lost)
