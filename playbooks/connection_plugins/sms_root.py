"""Ansible in a root folder: chroot in a private mount namespace, whose mounts end with each command."""

from __future__ import annotations

import posixpath
import shutil
import subprocess
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
name: sms_root
short_description: Run tasks in a root folder
description: Runs tasks in a root folder, by chroot in mount and process namespaces of their own.
options:
  remote_addr:
    description: The folder.
    vars: [{name: sms_root}]
"""

ENTER = """\
mount -t proc proc "$1/proc" && mount -t sysfs -o ro sysfs "$1/sys" && mount --rbind /dev "$1/dev" &&
exec chroot "$1" /bin/sh -c "$2"
"""


class Connection(ConnectionBase):
    """A root folder as a host."""

    transport = "sms_root"
    has_pipelining = True

    def _connect(self) -> Connection:
        self.root = self.get_option("remote_addr")
        if not self.root or not Path(self.root).is_dir():
            raise AnsibleError(f"no root folder {self.root}")
        self._connected = True
        return self

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        """Run one command of Ansible's inside."""
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LC_ALL": "C.UTF-8",
            # Nothing in a root folder is running, nor to be started.
            "SYSTEMD_OFFLINE": "1",
            "DEBIAN_FRONTEND": "noninteractive",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            [*argv, "sh", "-c", ENTER, "enter", self.root, cmd],
            input=in_data or b"",
            capture_output=True,
            check=False,
            env=environment,
        )
        return done.returncode, done.stdout, done.stderr

    def put_file(self, in_path: str, out_path: str) -> None:
        """Copy a file in."""
        super().put_file(in_path, out_path)
        shutil.copyfile(in_path, self._inside(out_path))

    def fetch_file(self, in_path: str, out_path: str) -> None:
        """Copy a file out."""
        super().fetch_file(in_path, out_path)
        shutil.copyfile(self._inside(in_path), out_path)

    def _inside(self, path: str) -> str:
        return f"{self.root}{posixpath.normpath(path)}"

    def close(self) -> None:
        """Nothing is held."""
        self._connected = False
