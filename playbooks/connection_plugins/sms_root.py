"""Ansible connection to a root folder: chroot in a private mount namespace, removed after each command."""

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
description: Runs tasks in a root folder, with chroot in separate mount and process namespaces.
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
    """A root folder as an Ansible host."""

    transport = "sms_root"
    has_pipelining = True

    def _connect(self) -> Connection:
        self.root = self.get_option("remote_addr")
        if not self.root or not Path(self.root).is_dir():
            raise AnsibleError(f"no root folder {self.root}")
        self._connected = True
        return self

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        """Run a command in the root folder."""
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LC_ALL": "C.UTF-8",
            # No services run in a root folder, and none may be started.
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
        """Copy a file into the root folder."""
        super().put_file(in_path, out_path)
        shutil.copyfile(in_path, self._inside(out_path))

    def fetch_file(self, in_path: str, out_path: str) -> None:
        """Copy a file from the root folder."""
        super().fetch_file(in_path, out_path)
        shutil.copyfile(self._inside(in_path), out_path)

    def _inside(self, path: str) -> str:
        return f"{self.root}{posixpath.normpath(path)}"

    def close(self) -> None:
        """Close the connection; there are no resources to release."""
        self._connected = False
