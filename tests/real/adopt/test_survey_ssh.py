"""`sms survey` over a real sshd: the same as on this machine, refused without sudo, the key only on request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.errors import Refused
from appliance.host.local import Local
from appliance.operations.adopt.survey import KEY, collect, fetch_key
from appliance.plan.adopt.frames import read_frames
from tests.real.sshd import Server, run_sshd
from tests.surveyed import PASSWORD, debian

pytestmark = pytest.mark.real
SUDO = "#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An sshd whose sudo always wants a password."""
    folder = tmp_path_factory.mktemp("sshd")
    (folder / "bin").mkdir()
    (folder / "bin" / "sudo").write_text(SUDO)
    (folder / "bin" / "sudo").chmod(0o755)
    yield from run_sshd(folder, "127.0.0.1", config=f"SetEnv PATH={folder}/bin:/usr/sbin:/usr/bin:/sbin:/bin\n")


def test_it_reads_the_same_over_ssh(server: Server, tmp_path: Path) -> None:
    root, far = str(debian().build(tmp_path)), server.host()
    try:
        output = collect(far, "", root=root)
    finally:
        far.close()
    assert PASSWORD.encode() not in output
    there, here = read_frames(output), read_frames(collect(Local("here"), "", root=root))
    assert there.complete
    assert "/etc/slurm/slurm.conf" in there.files
    assert there.files == here.files


def test_a_user_without_sudo_is_refused(server: Server) -> None:
    far = server.host()
    far.run("true")
    far.user = "admin"  # the same connection: every command is run by sudo
    try:
        with pytest.raises(Refused, match="a password is required") as error:
            collect(far, "")
    finally:
        far.close()
    assert "sudo" in error.value.hint


def test_no_munge_key_is_refused(server: Server) -> None:
    if Path(KEY).exists():
        pytest.skip("this machine has one")
    far = server.host()
    try:
        with pytest.raises(Refused, match="cannot be read"):
            fetch_key(far)
    finally:
        far.close()
