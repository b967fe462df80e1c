"""An overlay of elsewhere, such as a restored snapshot: its layers are links, or its superblock has mount options."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.agent import ext
from appliance.agent.check import _check_layers
from appliance.agent.store import Damage
from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.share import share
from appliance.tools import ext3
from appliance.tools.scripts import script_argv

Need = Callable[[str], str]

SOUND = ("mkdir upper", "mkdir work")
HOSTILE = {
    "upper is a link": ("symlink upper /etc", "mkdir work"),
    "work is a link": ("mkdir upper", "symlink work /etc"),
    "upper is a pipe": ("mknod upper p", "mkdir work"),
    "a second upper": ("mkdir upper", "mkdir work", "symlink uppet /etc"),
}
STATE = "/var/spool/slurmctld"


def make_overlay(folder: Path, commands: tuple[str, ...]) -> Path:
    """Return an ext3 image that these commands of debugfs have filled."""
    image = folder / "overlay.img"
    image.touch()
    os.truncate(image, 4 << 20)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext3", image], check=True)
    subprocess.run(["debugfs", "-w", "-f", "-", image], input="\n".join(commands), text=True, check=True)
    image.write_bytes(image.read_bytes().replace(b"uppet", b"upper"))  # no program makes a second one
    return image


@pytest.mark.parametrize("case", ["sound", *HOSTILE])
def test_layers_are_checked_before_a_start(tmp_path: Path, need: Need, case: str) -> None:
    need("mke2fs")
    need("debugfs")
    image = make_overlay(tmp_path, HOSTILE.get(case, SOUND))
    if case == "sound":
        ext3.check(Local(), str(image))
    else:
        with pytest.raises(SmsError, match=r"has not one folder /(upper|work)"):
            ext3.check(Local(), str(image))


@pytest.mark.parametrize("case", ["sound", *HOSTILE])
def test_layers_of_a_snapshot_are_checked(tmp_path: Path, need: Need, case: str) -> None:
    need("mke2fs")
    need("debugfs")
    data = make_overlay(tmp_path, HOSTILE.get(case, SOUND)).read_bytes()
    image = ext.Image(lambda offset, size: data[offset : offset + size])
    if case == "sound":
        _check_layers(image)
    else:
        with pytest.raises(Damage, match="is not a folder"):
            _check_layers(image)


OPTIONS = (["-e", "panic"], ["-E", "mount_opts=data=journal"], ["-o", "nobarrier"])


@pytest.mark.parametrize("option", OPTIONS, ids="".join)
def test_mount_options_of_the_superblock_are_refused(tmp_path: Path, need: Need, option: list[str]) -> None:
    """With errors=panic, damage that is found while it is mounted would end the host."""
    image = make_overlay(tmp_path, SOUND)
    subprocess.run([need("tune2fs"), *option, image], check=True)
    data = image.read_bytes()
    with pytest.raises(ext.Unknown, match="mount options"):
        ext.Image(lambda offset, size: data[offset : offset + size])
    with pytest.raises(SmsError, match="mount options"):
        ext3.check(Local(), str(image))


@pytest.mark.parametrize("link", ["", "upper", "work"])
def test_a_run_of_the_image_follows_no_layer(tmp_path: Path, link: str) -> None:
    """What run-image does after its mount of the overlay."""
    text = share("definitions", "scripts", "run-image").read_text()
    start = text.index("check_layers() {")
    check = text[text.index("fail() {") :].partition("\n")[0] + "\n" + text[start : text.index("\n}\n", start) + 3]
    assert text.count("$place/data\n        check_layers\n") == 2, "after each mount"
    (tmp_path / "data").mkdir()
    for name in ("upper", "work"):
        if name == link:
            (tmp_path / "data" / name).symlink_to("/etc")
        else:
            (tmp_path / "data" / name).mkdir()
    script = f"place=$1 overlay=o.img\n{check}check_layers"
    ran = subprocess.run(["sh", "-euc", script, "run-image", tmp_path], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == ((1, f"o.img has no folder /{link}\n") if link else (0, ""))


@pytest.mark.parametrize("behind", ["", "upper", "spool"])
def test_jobs_are_listed_in_the_overlay_only(tmp_path: Path, need: Need, behind: str) -> None:
    need("mke2fs")
    need("debugfs")
    if os.getuid():
        pytest.skip("only root mounts it")
    outside = tmp_path / "outside"
    (outside / "var/spool/slurmctld/hash.1/job.1").mkdir(parents=True)
    if behind == "upper":
        commands: tuple[str, ...] = (f"symlink upper {outside}",)
    else:
        spool = f"symlink upper/var/spool {outside}/var/spool" if behind else "mkdir upper/var/spool"
        inside = [] if behind else [f"mkdir upper{STATE}{more}" for more in ("", "/hash.2", "/hash.2/job.2")]
        commands = ("mkdir upper", "mkdir upper/var", spool, *inside)
    image = make_overlay(tmp_path, commands)
    argv = ("unshare", "-m", *script_argv("list-jobs", str(image), str(tmp_path / "mounted"), STATE))
    listed = Local().run(*argv, ok=None)
    if behind:
        assert not listed.stdout and b"is behind a link" in listed.stderr
    else:
        assert listed.text.split()[0] == "job.2"
