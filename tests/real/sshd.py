"""An sshd on the loopback."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from appliance.host.ssh import Ssh
from tests.conftest import find_tool
from tests.servers import free_port


@dataclass(frozen=True)
class Server:
    """A running sshd, and what a client needs for it."""

    folder: Path
    address: str
    port: int
    pid: int

    def host(self, *, key: str = "user", known: str = "known_hosts") -> Ssh:
        return Ssh("far", self.address, port=self.port, key=self.folder / key, known_hosts=self.folder / known)

    def sessions(self) -> list[int]:
        """Its processes for the connections that are open."""
        listed = subprocess.run(["pgrep", "-P", str(self.pid)], capture_output=True, text=True, check=False)
        return [int(word) for word in listed.stdout.split()]

    def signal(self, signum: signal.Signals) -> None:
        for pid in self.sessions():
            with suppress(ProcessLookupError):  # it ended since it was listed
                os.kill(pid, signum)


def run_sshd(folder: Path, address: str, *prefix: str, config: str = "") -> Iterator[Server]:
    """An sshd with keys of its own; it accepts only root with the key ``user``."""
    sshd, keygen = find_tool("sshd"), find_tool("ssh-keygen")
    for name in ("host", "other_host", "user", "other_user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    for name, key in (("known_hosts", "host"), ("wrong_hosts", "other_host")):
        (folder / name).write_text(f"[{address}]:{port} {(folder / key).with_suffix('.pub').read_text()}")
    (folder / "no_hosts").touch()
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    (folder / "config").write_text(
        f"ListenAddress {address}:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin prohibit-password\nMaxStartups 100\n" + config
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    with subprocess.Popen(
        [*prefix, sshd, "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        server = Server(folder, address, port, process.pid)
        try:
            assert "listening" in process.stderr.readline()
            yield server
        finally:
            try:
                server.signal(signal.SIGKILL)
            finally:
                process.kill()  # without it the end of "with" waits for ever
