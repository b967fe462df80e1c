"""Node images of the VM: ``images/PROFILE/`` has a folder for each digest and names the current one.

An upload stays below ``images/.upload/`` until every digest matches its manifest. Only then it is renamed to its final
folder and becomes current, so bootable images are complete at any time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.provision.blobs import RESERVE_B
from appliance.provision.problem import HttpProblem, bad_request, conflict, not_found
from appliance.shared.files import free_bytes, make_folder, replace_file, sync_folder

FILES = ("vmlinuz", "initrd.img", "root.squashfs")
SEAL = ("manifest.json", "manifest.sig")
MAX_SIZES = {"manifest.json": 4 << 20, "manifest.sig": 65536}
LARGEST_B = 64 << 30
PROFILE = re.compile(r"[a-z][a-z0-9-]{0,30}")
DIGEST = re.compile(r"[0-9a-f]{64}")
KEEP = 3


@dataclass(frozen=True)
class Image:
    """A node image; ``digest`` is that of its root.squashfs and names its folder."""

    profile: str
    digest: str
    files: Mapping[str, tuple[str, int]]
    arguments: str = ""
    groups: tuple[str, ...] = ()
    made: str = ""
    kernel: str = ""

    @property
    def bytes(self) -> int:
        """Total size of its files in bytes."""
        return sum(size for _, size in self.files.values())


def read_manifest(profile: str, digest: str, data: bytes) -> Image:
    """Parse the manifest of an image; 400 if it is invalid or of another image."""
    try:
        about = json.loads(data)
        files = {name: (about["files"][name]["sha256"], about["files"][name]["bytes"]) for name in about["files"]}
        groups = tuple(about.get("groups", ()))
        arguments, made, kernel = (str(about.get(name) or "") for name in ("arguments", "made", "kernel"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise bad_request("manifest.json is not the manifest of a sealed folder") from None
    wrong = sorted(files) != sorted(FILES) or any(
        not isinstance(sha, str) or not DIGEST.fullmatch(sha) or type(size) is not int or not 0 < size <= LARGEST_B
        for sha, size in files.values()
    )
    if wrong or about.get("kind") != "node" or not all(isinstance(each, str) for each in groups):
        raise bad_request(f"manifest.json is not that of a node image: it has {', '.join(FILES)}, with their digests")
    if about.get("profile") != profile or files["root.squashfs"][0] != digest:
        raise bad_request(f"manifest.json is not that of {profile} {digest[:12]}")
    if not f"{arguments}{made}{kernel}".isprintable():
        raise bad_request("manifest.json has control characters")
    return Image(profile, digest, files, arguments, groups, made, kernel)


@dataclass
class Cache:
    """Images read since the last change. A change replaces it, so threads still filling an old one do no harm."""

    images: dict[str, Image | None] = field(default_factory=dict)
    by_group: dict[str, str] | None = None


class Images:
    """The images below a folder. Each change is a rename, so readers need no lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uploads = folder / ".upload"
        self._lock = threading.Lock()
        self._writing: set[tuple[str, str, str]] = set()
        self._cache = Cache()

    def current(self, profile: str) -> Image | None:
        """Return the image that nodes of a profile boot, or None."""
        return self._find_current(self._cache, profile)

    def _find_current(self, cache: Cache, profile: str) -> Image | None:
        if profile in cache.images:
            return cache.images[profile]
        digest = self.pointer(profile, "current") if PROFILE.fullmatch(profile) else None
        found = cache.images[profile] = self._read(profile, digest) if digest else None
        return found

    def profile_for(self, groups: Iterator[str] | list[str] | tuple[str, ...]) -> str:
        """Return the default profile of a node: that of its first group that has one, else the one without groups.

        Empty if no image applies.
        """
        cache = self._cache
        by_group = cache.by_group
        if by_group is None:
            found: dict[str, str] = {}
            for profile in self.profiles():
                image = self._find_current(cache, profile)
                for group in (image.groups or ("",)) if image else ():
                    found.setdefault(group, profile)
            by_group = cache.by_group = found
        for group in (*groups, ""):
            if group in by_group:
                return by_group[group]
        return ""

    def profiles(self) -> list[str]:
        """Return the profiles that have a folder."""
        with suppress(FileNotFoundError):
            return sorted(each.name for each in self.folder.iterdir() if PROFILE.fullmatch(each.name))
        return []

    def pointer(self, profile: str, name: str) -> str | None:
        """Return the digest that ``current`` or ``previous`` names, if its image exists."""
        try:
            digest = (self.folder / profile / name).read_text()[:100].strip()
        except FileNotFoundError:
            return None
        return digest if DIGEST.fullmatch(digest) and (self.folder / profile / digest).is_dir() else None

    def all(self) -> list[tuple[Image, bool, bool]]:
        """Return every image, whether it is current, and whether it is previous; newest first within a profile."""
        found = []
        for profile in self.profiles():
            current, previous = self.pointer(profile, "current"), self.pointer(profile, "previous")
            images = [self._read(profile, digest) for digest in self._digests(profile)]
            found += [(one, one.digest == current, one.digest == previous) for one in images if one]
        return found

    def _digests(self, profile: str) -> list[str]:
        """Return the digests of a profile's images, latest upload first."""
        folders = [each for each in (self.folder / profile).iterdir() if DIGEST.fullmatch(each.name)]
        return [each.name for each in sorted(folders, key=lambda each: -each.stat().st_mtime)]

    def _read(self, profile: str, digest: str) -> Image | None:
        try:
            return read_manifest(profile, digest, (self.folder / profile / digest / "manifest.json").read_bytes())
        except (OSError, HttpProblem):
            return None

    def has(self, profile: str, digest: str) -> bool:
        """Return whether the complete image exists."""
        return (self.folder / profile / digest).is_dir()

    # Uploads

    def received(self, profile: str, digest: str) -> dict[str, int]:
        """Return the bytes received so far of each file of an upload."""
        folder = self._upload(profile, digest)
        found = {}
        for name in (*SEAL, *FILES):
            with suppress(FileNotFoundError):
                found[name] = (folder / name).stat().st_size
        return found

    @contextmanager
    def receiving(self, profile: str, digest: str, name: str, offset: int, size: int | None) -> Iterator[Receiver]:
        """Receive a file from ``offset``, which must equal the bytes received so far; 0 restarts the file.

        Raises:
            HttpProblem: 404, 409, 411, 413 or 507, before anything is written.
        """
        folder = self._upload(profile, digest)
        max_size = self._check_range(folder, profile, digest, name, offset, size)
        if free_space(self.folder) - (size or 0) < RESERVE_B:
            raise disk_full(self.folder, size or 0)
        key = (profile, digest, name)
        with self._lock:
            if key in self._writing:
                raise conflict(f"another upload of {name} is in progress")
            self._writing.add(key)
        try:
            make_folder(str(self.folder))
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("r+b" if offset else "wb") as stream:
                stream.seek(offset)
                stream.truncate()
                yield Receiver(stream, max_size - offset, self.folder)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            shutil.rmtree(folder, ignore_errors=True)  # free the space for others; the upload restarts
            raise disk_full(self.folder, size or 0) from error
        finally:
            with self._lock:
                self._writing.discard(key)

    def _check_range(self, folder: Path, profile: str, digest: str, name: str, offset: int, size: int | None) -> int:
        """Check offset and size of an upload; return the maximum size of the whole file."""
        if name not in (*SEAL, *FILES):
            raise not_found(f"an image has no file {name[:60]}")
        if self.has(profile, digest):
            raise conflict(f"{profile} {digest[:12]} exists already")
        if size is None:
            raise HttpProblem(411, "the Content-Length header is missing")
        max_size = MAX_SIZES.get(name, 0)
        if not max_size:
            manifest = folder / "manifest.json"
            if not manifest.exists():
                raise conflict(
                    "the manifest is missing", hint="upload manifest.json and manifest.sig before the others"
                )
            max_size = read_manifest(profile, digest, manifest.read_bytes()).files[name][1]
        received = (folder / name).stat().st_size if offset and (folder / name).exists() else 0
        if offset != received:
            raise conflict(
                f"{received} bytes of {name} were received, not {offset}", hint="query the upload and resume there"
            )
        if offset + size > max_size:
            raise HttpProblem(413, f"{name} has at most {max_size} bytes, not {offset + size}")
        return max_size

    def finish(self, profile: str, digest: str, *, keep: int = KEEP, used: frozenset[str] = frozenset()) -> list[str]:
        """Verify an upload against its manifest and make it current; return the digests removed.

        An image that exists already is verified and made current.

        Args:
            used: digests referenced by boot parameters; they are not removed.

        Raises:
            HttpProblem: 404 without an upload, 409 if it is incomplete, 422 if a digest does not match.
        """
        if self.has(profile, digest):
            self._verify_stored(profile, digest)
        else:
            folder = self._upload(profile, digest)
            if not (folder / "manifest.json").exists():
                raise not_found(f"no upload of {profile} {digest[:12]} is in progress")
            self._verify_upload(folder, read_manifest(profile, digest, (folder / "manifest.json").read_bytes()))
            target = self.folder / profile / digest
            make_folder(str(target.parent))
            sync_folder(str(folder))
            folder.rename(target)
            os.utime(target)
            sync_folder(str(target.parent))
        with self._lock:
            self._make_current(profile, digest)
        return self._prune(profile, keep, used)

    def _verify_stored(self, profile: str, digest: str) -> None:
        """Verify a stored image; turn a damaged one into an incomplete upload, which can be uploaded again."""
        folder, upload = self.folder / profile / digest, self._upload(profile, digest)
        try:
            self._verify_upload(folder, read_manifest(profile, digest, (folder / "manifest.json").read_bytes()))
        except (HttpProblem, FileNotFoundError) as error:
            shutil.rmtree(upload, ignore_errors=True)
            self.uploads.mkdir(exist_ok=True)
            folder.rename(upload)
            self._invalidate()
            why = error.detail if isinstance(error, HttpProblem) else "manifest.json is missing"
            raise HttpProblem(422, f"{why}, on the VM's disk", hint=f"sms image push {profile}") from None

    def _verify_upload(self, folder: Path, image: Image) -> None:
        if missing := [name for name in (*SEAL, *FILES) if not (folder / name).exists()]:
            raise conflict(f"{', '.join(missing)} not uploaded yet")
        for name, (expected, size) in image.files.items():
            received = (folder / name).stat().st_size
            if received < size:
                raise conflict(f"{received} of {size} bytes of {name} received", hint="upload the rest, then finish")
            with (folder / name).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
                os.fsync(stream.fileno())
            if found != expected:
                (folder / name).unlink()
                raise HttpProblem(422, f"{name} does not match its digest: it is {found[:12]}, not {expected[:12]}")
        for name in SEAL:
            with (folder / name).open("rb") as stream:
                os.fsync(stream.fileno())
        for name in (*SEAL, *FILES):
            (folder / name).chmod(0o644)
        folder.chmod(0o755)
        if unknown := {each.name for each in folder.iterdir()} - {*SEAL, *FILES}:
            raise conflict(f"the upload has unknown files: {', '.join(sorted(unknown))}")

    # Selection

    def rollback(self, profile: str) -> tuple[str, str]:
        """Make the previous image current; return the new current and previous digests.

        Raises:
            HttpProblem: 404 or 409, there is no previous image.
        """
        with self._lock:
            current, previous = self.pointer(profile, "current"), self.pointer(profile, "previous")
            if current is None:
                raise not_found(f"there is no image of {profile}", hint=f"sms image push {profile}")
            if previous is None or previous == current:
                raise conflict(f"{profile} has no previous image", hint="sms image list --nodes")
            self._make_current(profile, previous)
        return previous, current

    def _make_current(self, profile: str, digest: str) -> None:
        now = self.pointer(profile, "current")
        if now != digest:
            # `previous` first: after a crash in between both name the same image, and nodes still boot.
            if now:
                self._write_pointer(profile, "previous", now)
            self._write_pointer(profile, "current", digest)
        self._invalidate()

    def _write_pointer(self, profile: str, name: str, digest: str) -> None:
        replace_file(str(self.folder / profile / name), f"{digest}\n".encode(), 0o644)

    def remove(self, profile: str, digest: str, *, used: frozenset[str] = frozenset()) -> None:
        """Remove an image or an unfinished upload.

        Raises:
            HttpProblem: 404, or 409 if nodes may boot it.
        """
        if not self.has(profile, digest):
            if not self._upload(profile, digest).exists():
                raise not_found(f"there is no image {profile} {digest[:12]}")
            shutil.rmtree(self._upload(profile, digest))
            return
        for name in ("current", "previous"):
            if self.pointer(profile, name) == digest:
                raise conflict(f"{digest[:12]} is the {name} image of {profile}", hint="push another one first")
        if digest in used:
            raise conflict(f"boot parameters reference {digest[:12]}", hint="change them first")
        self._delete(profile, digest)

    def _prune(self, profile: str, keep: int, used: frozenset[str]) -> list[str]:
        protected = {self.pointer(profile, "current"), self.pointer(profile, "previous"), *used}
        digests = self._digests(profile)
        old = [digest for digest in digests[max(keep, 1) :] if digest not in protected]
        for digest in old:
            self._delete(profile, digest)
        return old

    def _delete(self, profile: str, digest: str) -> None:
        self.uploads.mkdir(exist_ok=True)
        trash = self.uploads / f".gone-{profile}-{digest}"
        shutil.rmtree(trash, ignore_errors=True)
        (self.folder / profile / digest).rename(trash)  # atomic for readers
        shutil.rmtree(trash)
        self._invalidate()

    def _invalidate(self) -> None:
        self._cache = Cache()

    def _upload(self, profile: str, digest: str) -> Path:
        if not PROFILE.fullmatch(profile) or not DIGEST.fullmatch(digest):
            raise not_found("an image is identified by its profile and a digest of 64 hexadecimal digits")
        return self.uploads / f"{profile}-{digest}"


class Receiver:
    """A file being received."""

    def __init__(self, stream: Any, remaining: int, folder: Path) -> None:
        self._stream, self._remaining, self._folder = stream, remaining, folder
        self._since_check = 0

    def write(self, data: bytes) -> None:
        """Append data; 413 beyond the size in the manifest, 507 if the disk is full."""
        self._remaining -= len(data)
        if self._remaining < 0:
            raise HttpProblem(413, "more bytes received than the manifest specifies")
        self._since_check += len(data)
        if self._since_check >= RESERVE_B // 4:
            self._since_check = 0
            if free_space(self._folder) < RESERVE_B // 2:
                raise OSError(errno.ENOSPC, "the disk is nearly full")
        self._stream.write(data)


def free_space(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return free_bytes(folder)


def disk_full(folder: Path, size: int) -> HttpProblem:
    return HttpProblem(
        507,
        f"the VM's disk has {free_space(folder) >> 20} MiB left, {RESERVE_B >> 20} of them reserved; "
        f"{max(size >> 20, 1)} MiB do not fit",
        hint="sms image push --keep 1 removes old images; a larger disk: provisioning.disk_mb",
    )
