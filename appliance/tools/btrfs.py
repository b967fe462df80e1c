"""A mirror with Btrfs: raid1 of data and metadata on two devices, with checksums. btrfs-progs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypedDict

from appliance.errors import SmsError
from appliance.host.base import Host, OddOutput
from appliance.plan.overlay.mirror import Device, Made, Scrubbed, Seen
from appliance.progress import Step
from appliance.tools.programs import find_missing

SCRUBS = 5
"""Maximum number of scrubs. A scrub that found errors is repeated: blocks written meanwhile may be damaged too."""
CONVERT = ("-dconvert=raid1,soft", "-mconvert=raid1,soft", "-sconvert=raid1,soft")


class Btrfs:
    """Mirror operations with Btrfs; same interface as ``Md``."""

    kind = "btrfs"

    def lacks(self, host: Host) -> str:
        """Return why the host cannot have such a mirror; empty if it can."""
        if find_missing(host, "btrfs", "mkfs.btrfs"):
            return "btrfs-progs is not installed"
        listed = host.works("grep", "-qw", "btrfs", "/proc/filesystems")
        return "" if listed or host.works("env", "modprobe", "-q", "btrfs") else "the kernel does not support Btrfs"

    def make(self, host: Host, loops: Sequence[str], label: str) -> Made:
        """Create a mirror of two devices. xxhash has 64 bits; a 32-bit checksum misses one damaged block in 2^32."""
        options = ("--data", "raid1", "--metadata", "raid1", "--csum", "xxhash", "--label", label)
        host.run("mkfs.btrfs", "--quiet", "--force", *options, *loops, timeout=300)
        made = [_read_super(host, loop) for loop in loops]
        if not all(made):
            raise SmsError("mkfs.btrfs left a device without Btrfs", hint=f"btrfs filesystem show {' '.join(loops)}")
        return Made(made[0]["fsid"], tuple((int(one["dev_item.devid"]), one["dev_item.uuid"]) for one in made))

    def inspect(self, host: Host, path: str) -> Seen:
        """Inspect a member's file while it is not mounted."""
        if not host.works("test", "-f", path):
            return Seen(False)
        found = _read_super(host, path)
        return Seen(True, found["fsid"], found["dev_item.uuid"], int(found["generation"])) if found else Seen(True)

    def mount(self, host: Host, uuid: str, loops: Sequence[str], folder: str, *, degraded: bool) -> None:
        """Mount the mirror from ``loops``. Freed blocks are discarded in the members' file systems."""
        options = ["noatime", "discard=async", *(f"device={loop}" for loop in loops)]
        options += ["degraded"] if degraded else []
        host.run("mount", "-t", "btrfs", "-o", ",".join(options), loops[0], folder, timeout=600)

    def unmount(self, host: Host, uuid: str, folder: str) -> None:
        """Unmount the mirror."""
        host.run("umount", folder, timeout=600)

    def cancel(self, host: Host, uuid: str, folder: str) -> None:
        """Cancel a running scrub, replacement or balance. An interrupted replacement blocks all others."""
        for what in (("scrub",), ("replace",), ("balance",)):
            host.run("btrfs", *what, "cancel", folder, ok=None)

    def mounted(self, host: Host, uuid: str, folder: str) -> bool:
        """Return whether the mirror is mounted at ``folder``.

        Raises:
            SmsError: something else is mounted there.
        """
        if not host.works("mountpoint", "-q", folder):
            return False
        if uuid not in host.run("btrfs", "filesystem", "show", "--raw", folder, ok=None).text:
            raise SmsError(f"{folder} is the mount point of something else than the mirror", hint=f"umount {folder}")
        return True

    def devices(self, host: Host, uuid: str, folder: str) -> list[Device]:
        """Return the members of a mounted mirror with their error counts."""
        result = host.run("btrfs", "--format", "json", "device", "stats", folder, ok=None)
        found = []
        for one in result.parse(_Stats, empty=b"{}").get("device-stats", []):
            try:
                path, devid = str(one.pop("device")), int(one.pop("devid"))
                counts = {name: int(count) for name, count in one.items()}
            except (KeyError, ValueError) as error:
                raise OddOutput(result, f"no counts of a device: {error}") from None
            found.append(Device(devid, path, counts, not path.startswith("/dev/")))
        if not found:
            raise SmsError(f"btrfs reports no devices of {folder}", hint=f"btrfs device stats {folder}")
        return [device for device in found if device.devid]  # 0 is the target of a replacement under way

    def scrub(self, host: Host, uuid: str, folder: str, step: Step) -> Scrubbed:
        """Scrub: read everything, repair from the other member, reset the error counters.

        Raises:
            SmsError: the scrub failed or was cancelled.
        """
        repaired = 0
        for number in range(1, SCRUBS + 1):
            host.run("btrfs", "filesystem", "sync", folder, timeout=600)
            found = read_scrub(host.run("btrfs", "scrub", "start", "-B", "-R", folder, ok=(0, 3), timeout=None).text)
            repaired += found.mended
            step.detail(f"{repaired} errors repaired" if repaired else "no errors")
            if found.lost:
                return Scrubbed(repaired, found.lost)
            if not found.mended:
                break
            if number == SCRUBS:
                raise SmsError(
                    f"each scrub of the mirror finds new errors ({repaired} repaired)",
                    hint="a disk is failing: `sms overlay mirror rebuild --on DIR` moves its member elsewhere",
                )
        host.run("btrfs", "device", "stats", "--reset", folder)
        host.run("fstrim", folder, ok=None, timeout=600)  # discard damaged blocks in unused space
        return Scrubbed(repaired, 0)

    def replace(self, host: Host, uuid: str, folder: str, devid: int, loop: str) -> None:
        """Replace member ``devid`` by ``loop`` and copy its data there; call ``settle`` afterwards."""
        host.run("btrfs", "replace", "start", "-B", "-r", "-f", str(devid), loop, folder, timeout=None)

    def settle(self, host: Host, uuid: str, folder: str) -> None:
        """Complete a replacement: mirror the data that was written while a member was missing."""
        self.enlarge(host, uuid, folder)
        host.run("btrfs", "balance", "start", "--force", *CONVERT, folder, timeout=None)
        host.run("btrfs", "device", "stats", "--reset", folder)

    def enlarge(self, host: Host, uuid: str, folder: str) -> None:
        """Use the whole size of enlarged devices."""
        for device in self.devices(host, uuid, folder):
            if not device.missing:
                host.run("btrfs", "filesystem", "resize", f"{device.devid}:max", folder, timeout=600)


_Stats = TypedDict("_Stats", {"device-stats": list[dict[str, Any]]}, total=False)

SUPER = ("fsid", "generation", "dev_item.devid", "dev_item.uuid")
"""Fields of a superblock that are used."""


def _read_super(host: Host, path: str) -> dict[str, str]:
    """Return the fields of a superblock; none if the file or device has no Btrfs."""
    result = host.run("env", "btrfs", "inspect-internal", "dump-super", path, ok=None)  # env: there may be no btrfs
    found = dict(line.split(None, 1) for line in result.text.splitlines() if len(line.split(None, 1)) == 2)
    if result.status or "[match]" not in found.get("magic", ""):
        return {}
    if missing := [name for name in SUPER if name not in found] or not found["generation"].isdecimal():
        raise OddOutput(result, f"no {missing}")
    return found


def read_scrub(output: str) -> Scrubbed:
    """Parse the output of ``btrfs scrub start -B -R``.

    Raises:
        SmsError: the scrub did not complete.
    """
    counts = {name: int(count) for name, count in re.findall(r"^\s*(\w+): (\d+)\s*$", output, re.MULTILINE)}
    if "corrected_errors" not in counts or re.search(r"^Status:\s+(aborted|interrupted)", output, re.MULTILINE):
        raise SmsError("the scrub did not complete", hint="sms overlay mirror scrub")
    lost = counts["uncorrectable_errors"] + counts.get("unverified_errors", 0)
    return Scrubbed(counts["corrected_errors"] + counts.get("super_errors", 0), lost)
