"""zypper, from Debian's packages, reads a repository that demands a password or a token with the files of a build."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from appliance.catalog import read_bases
from appliance.plan.image.repositories import Credential, credential_files, hide
from appliance.share import share
from tests.conftest import find_tool

pytestmark = [pytest.mark.real, pytest.mark.full]

SECRET, TOKEN = Credential("sms", "pa:ss/w@rd%1"), Credential(token="0123456789abcdef")
PRIMARY = '<?xml version="1.0"?>\n<metadata xmlns="http://linux.duke.edu/metadata/common" packages="0"/>\n'
INDEX = """<?xml version="1.0"?>
<repomd xmlns="http://linux.duke.edu/metadata/repo"><revision>1</revision>
<data type="primary"><checksum type="sha256">{0}</checksum><open-checksum type="sha256">{0}</open-checksum>
<location href="repodata/primary.xml"/><timestamp>1</timestamp><size>{1}</size><open-size>{1}</open-size></data>
</repomd>
"""


class Guarded(SimpleHTTPRequestHandler):
    """Files for requests with the password, below /token for those with the token."""

    def send_head(self):  # type: ignore[no-untyped-def]
        path, _, query = self.path.partition("?")
        if path.startswith("/token/"):
            allowed = query == TOKEN.token
        else:
            pair = base64.b64encode(f"{SECRET.user}:{SECRET.password}".encode()).decode()
            allowed = self.headers.get("Authorization") == f"Basic {pair}"
        if allowed:
            return super().send_head()
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="own"')
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def log_message(self, *words: object) -> None:
        pass


@dataclass(frozen=True)
class Zypper:
    """The programs below a folder, with a root of their own."""

    folder: Path
    url: str

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        tree = self.folder / "tree"
        environment = {
            "PATH": f"{tree}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{tree}/usr/lib/x86_64-linux-gnu:{tree}/usr/lib",
            "RPM_CONFIGDIR": f"{tree}/usr/lib/rpm",
            "ZYPP_LOGFILE": str(self.folder / "zypp.log"),
            "HOME": str(self.folder),
        }
        argv = [str(tree / "usr" / "bin" / program), *words]
        return subprocess.run(argv, env=environment, check=False, capture_output=True, text=True, timeout=120)

    def refresh(self, **credentials: Credential) -> subprocess.CompletedProcess[str]:
        """Refresh the repositories, as the definition of an image does before its first package."""
        base = read_bases(share("definitions", "bases"))["sles-15"]
        urls = {"hpc": f"{self.url}/hpc", "product": f"{self.url}/token/product"}
        repositories = self.folder / "mounted"
        repositories.mkdir(exist_ok=True)
        for name, text in credential_files(base, urls, credentials).items():
            (repositories / name).write_text(text)
        options = ("--root", str(self.root), "--reposd-dir", str(repositories), "--non-interactive")
        return self.run("zypper", *options, "refresh", "--force")


@pytest.fixture(scope="module")
def zypper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zypper]:
    """zypper and rpm without installing them, and a signed empty repository on loopback."""
    folder = tmp_path_factory.mktemp("zypper")
    (folder / "archives" / "partial").mkdir(parents=True)
    options = ("-o", f"Dir::Cache::archives={folder}/archives", "-o", "Debug::NoLocking=1", "--no-install-recommends")
    argv = [find_tool("apt-get"), "-qq", "-y", *options, "--download-only", "install", "zypper", "rpm"]
    got = subprocess.run(argv, check=False, capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"zypper cannot be fetched: {got.stderr[-200:]}")
    for package in (folder / "archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "tree"], check=True)
    # Debian's libsolv calls it without the suffix that its zypper expects.
    (folder / "tree" / "usr" / "bin" / "repo2solv.sh").symlink_to("repo2solv")
    for name in ("hpc", "token/product"):
        data = folder / "served" / name / "repodata"
        data.mkdir(parents=True)
        (data / "primary.xml").write_text(PRIMARY)
        (data / "repomd.xml").write_text(INDEX.format(hashlib.sha256(PRIMARY.encode()).hexdigest(), len(PRIMARY)))
    sign(folder, find_tool("gpg"))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Guarded, directory=str(folder / "served"))) as server:
        threading.Thread(target=server.serve_forever).start()
        found = Zypper(folder, f"http://127.0.0.1:{server.server_port}")
        found.root.mkdir()
        imported = found.run("rpmkeys", "--root", str(found.root), "--import", str(folder / "key.asc"))
        assert not imported.returncode, imported.stderr
        yield found
        server.shutdown()


def sign(folder: Path, program: str) -> None:
    """Sign the repositories; the key is in key.asc."""
    home = folder / "gpg"
    home.mkdir(mode=0o700)
    gpg = [program, "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", "", "--homedir", str(home)]
    try:
        subprocess.run([*gpg, "--quick-generate-key", "r@example.org", "rsa2048", "sign", "never"], check=True)
        key = subprocess.run([*gpg, "--armor", "--export"], check=True, capture_output=True).stdout
        (folder / "key.asc").write_bytes(key)
        for index in folder.glob("served/**/repomd.xml"):
            subprocess.run([*gpg, "--armor", "--detach-sign", index], check=True)
            (index.parent / "repomd.xml.key").write_bytes(key)
    finally:
        subprocess.run(["gpgconf", "--homedir", home, "--kill", "gpg-agent"], check=True)


def test_it_reads_the_repositories(zypper: Zypper) -> None:
    done = zypper.refresh(hpc=SECRET, product=TOKEN)
    assert not done.returncode, done.stdout + done.stderr
    assert list(zypper.root.glob("var/cache/zypp/raw/hpc/repodata/repomd.xml"))
    assert list(zypper.root.glob("var/cache/zypp/raw/product/repodata/repomd.xml"))
    for path in (path for path in zypper.root.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for secret in (SECRET.password, "pa%3Ass", TOKEN.token):
            assert secret.encode() not in data, path


@pytest.mark.parametrize(
    "credentials",
    [{"hpc": SECRET}, {"product": TOKEN}, {"hpc": Credential("sms", "wrong"), "product": TOKEN}],
    ids=["no token", "no password", "wrong password"],
)
def test_it_fails_without_them(zypper: Zypper, credentials: dict[str, Credential]) -> None:
    """And the output, as it is logged, has none."""
    done = zypper.refresh(**credentials)
    assert done.returncode
    logged = hide(done.stdout + done.stderr, list(credentials.values()))
    assert not any(secret in logged for secret in (SECRET.password, "pa%3Ass", TOKEN.token))
