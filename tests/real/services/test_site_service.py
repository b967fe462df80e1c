"""A service of the site's own, from a signed repository of the site's that demands a password: built, started, used.

Debian's own mirror is behind the same server, so that the first packages need the password as well.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.catalog import read_bases
from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.operations.image.build import Built
from appliance.operations.image.sources import find_mirrors
from appliance.share import share
from tests.conftest import find_tool
from tests.real.conftest import Playground
from tests.real.labs import build_image
from tests.servers import free_port
from tests.waiting import wait_until

pytestmark = [pytest.mark.real, pytest.mark.full]

SMS = (sys.executable, "-m", "appliance")
USER, PASSWORD = "builder", "Token-5c2f/a%b:c"
SECRETS = (PASSWORD, "Token-5c2f%2Fa%25b%3Ac", base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode())

SERVER = """#!/usr/bin/python3
import socketserver, sys
word = open("/etc/sms-echo/word").read().strip()
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(word.encode() + b" " + line)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
Server(("0.0.0.0", 7007), Handler).serve_forever()
"""
ASK = """
import socket, sys
stream = socket.create_connection((sys.argv[1], 7007), timeout=3).makefile("rw")
stream.write("ECHO " + sys.argv[2] + "\\n"); stream.flush(); print(stream.readline().strip())
"""
SERVICE = """\
name: echo
summary: answers each line with a word
critical: true
packages: {debian: [sms-echo]}
run: [sms-echo]
user: nobody
ports: [tcp/7007]
traffic: {first: [{port: tcp/any, starts: ECHO}]}
after: [rsyslog]
files: [{path: /etc/sms-echo/word, template: echo/word.j2}]
probe:
  exec:
    - - python3
      - -c
      - "import socket; s = socket.create_connection(('127.0.0.1', 7007), 2); s.sendall(b'x\\\\n'); print(s.recv(9))"
  expect: hello
outage: {seconds: 5, why: the test waits}
"""


def make_package(folder: Path) -> None:
    """A Debian package with the service's program."""
    root = folder / "package"
    (root / "DEBIAN").mkdir(parents=True)
    control = "Package: sms-echo\nVersion: 1.0\nArchitecture: all\nDepends: python3\nMaintainer: t <t@example.org>\n"
    (root / "DEBIAN" / "control").write_text(f"{control}Description: echo\n")
    (root / "usr" / "bin").mkdir(parents=True)
    program = root / "usr" / "bin" / "sms-echo"
    program.write_text(SERVER)
    program.chmod(0o755)
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", root, folder / "own" / "sms-echo.deb"], check=True)


def make_repository(folder: Path) -> None:
    """A signed repository without suites in ``own``, and the public key in key.asc."""
    (folder / "own").mkdir()
    make_package(folder)
    own = folder / "own"
    packages = subprocess.run(["dpkg-scanpackages", "."], cwd=own, check=True, capture_output=True).stdout
    (own / "Packages").write_bytes(packages)
    digest = hashlib.sha256(packages).hexdigest()
    (folder / "Release").write_text(
        f"Origin: t\nDate: {formatdate(usegmt=True)}\nSHA256:\n {digest} {len(packages)} Packages\n"
    )
    home = folder / "gpg"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", "", "--homedir", str(home)]
    try:
        for word in ("right", "wrong"):
            subprocess.run([*gpg, "--quick-generate-key", f"{word}@example.org", "rsa2048", "sign"], check=True)
            key = subprocess.run([*gpg, "--export", f"{word}@example.org"], check=True, capture_output=True).stdout
            (folder / f"{word}.gpg").write_bytes(key)
        sign = ["--local-user", "right@example.org", "--clearsign", "-o", str(own / "InRelease")]
        subprocess.run([*gpg, *sign, str(folder / "Release")], check=True)
    finally:
        subprocess.run(["gpgconf", "--homedir", home, "--kill", "gpg-agent"], check=True)


@contextmanager
def served(folder: Path, nginx: str, upstream: str) -> Iterator[str]:
    """A server on loopback that demands the password for /own and for Debian's mirror; its URL."""
    port = free_port()
    hashed = subprocess.run(
        ["openssl", "passwd", "-apr1", "-stdin"], input=PASSWORD.encode(), check=True, capture_output=True
    ).stdout.decode()
    (folder / "users").write_text(f"{USER}:{hashed}")
    (folder / "nginx.conf").write_text(
        f"""daemon off; user root; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1;
events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        auth_basic own; auth_basic_user_file {folder}/users;
        location /own/ {{ root {folder}; }}
        proxy_http_version 1.1; proxy_set_header Authorization ""; proxy_ssl_server_name on;
        location /debian/ {{ proxy_pass {upstream}/; }}
    }}
}}
"""
    )
    process = subprocess.Popen([nginx, "-p", folder, "-c", folder / "nginx.conf"])
    try:
        wait_until(lambda: (folder / "nginx.pid").exists(), "nginx")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yield a list to which command lines and environments with the password are added meanwhile."""
    found: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for path in Path("/proc").glob("[0-9]*"):
                for name in ("cmdline", "environ"):
                    try:
                        text = (path / name).read_bytes().decode(errors="replace")
                    except OSError:
                        continue
                    found.extend(f"{path}/{name}: {text}" for secret in SECRETS if secret in text)
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def own(playground: Playground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Built, list[str]]]:
    """The image with the service, and what was seen of the password in processes."""
    for tool in ("dpkg-deb", "dpkg-scanpackages", "gpg", "openssl"):
        find_tool(tool)
    folder = tmp_path_factory.mktemp("own")
    make_repository(folder)
    etc = playground.lab.etc
    upstream = find_mirrors(Local(), read_bases(share("definitions", "bases"))["debian-12"], {})["debian"]
    with served(folder, find_tool("nginx"), upstream) as url:
        (etc / "credentials.yaml").write_text(
            f'debian: {{user: {USER}, password: "{PASSWORD}"}}\nown: {{user: {USER}, password: "{PASSWORD}"}}\n'
        )
        (etc / "credentials.yaml").chmod(0o600)
        shutil.copy(folder / "right.gpg", etc / "own.gpg")
        shutil.copy(folder / "wrong.gpg", etc / "wrong.gpg")
        (etc / "services.d" / "echo").mkdir(parents=True)
        (etc / "services.d" / "echo.yaml").write_text(SERVICE)
        (etc / "services.d" / "echo" / "word.j2").write_text("hello-{{ site.cluster }}\n")

        def change(document: dict[str, Any]) -> None:
            document["cluster"] = "own"
            document["services"] = ["munge", "slurmctld", "nat", "rsyslog", "echo"]
            document["overlay"] = {"size_mb": 512, "directory": "/var/lib/sms/own"}
            repository = {"url": f"{url}/own", "suite": "./", "key": "own.gpg"}
            document["base"] = {
                "mirrors": {"debian": f"{url}/debian"},
                "repositories": {"own": repository},
                "packages": ["netcat-openbsd"],
                "credentials": "credentials.yaml",
            }

        playground.variant("own.yaml", change)
        playground.sms("--site", "/etc/sms/own.yaml", "config", "check")
        with watched() as seen:
            built = build_image(playground.lab, "own")
        yield built, seen
    shutil.rmtree(etc / "services.d")


def test_the_password_is_nowhere(own: tuple[Built, list[str]], tmp_path: Path) -> None:
    """Not in the image file, its files, manifest, bill of materials, log, processes, or what is left in folders."""
    built, seen = own
    assert not seen
    image = Path(built.image)
    subprocess.run(["apptainer", "build", "--sandbox", tmp_path / "root", image], check=True, capture_output=True)
    installed = (tmp_path / "root" / "opt" / "sms" / "packages.tsv").read_text()
    assert "\nsms-echo\t1.0\t" in installed and "\nnetcat-openbsd\t" in installed
    sources = (tmp_path / "root" / "etc" / "apt" / "sources.list").read_text()
    assert "deb [signed-by=/opt/sms/keys/own.asc] http://127.0.0.1:" in sources
    assert not list((tmp_path / "root" / "etc" / "apt" / "auth.conf.d").iterdir())
    left = [path for path in (image.parent.parent / "cache", Path("/run/sms")) if path.exists()]
    places = [image, *image.parent.glob(f"{image.stem}.*"), image.parent / "build.log", tmp_path / "root", *left]
    for secret in SECRETS:
        argv = ["grep", "-rlFa", "--devices=skip", "-e", secret, *map(str, places)]
        found = subprocess.run(argv, check=False, capture_output=True, text=True).stdout
        assert not found, f"{secret} is in {found}"
    assert not list(Path("/run").glob("sms-credentials-*"))


def test_what_is_not_signed_by_the_key_is_refused(own: tuple[Built, list[str]], playground: Playground) -> None:
    def change(document: dict[str, Any]) -> None:
        document["base"]["repositories"]["own"]["key"] = "wrong.gpg"

    etc = playground.lab.etc
    document = yaml.safe_load((etc / "own.yaml").read_text())
    change(document)
    (etc / "wrong.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(SmsError, match="cannot resolve packages"):
        build_image(playground.lab, "wrong")


def test_it_runs(own: tuple[Built, list[str]], playground: Playground, tmp_path: Path) -> None:
    """Started, probed, restarted, and recognised by its traffic."""
    site = ("--site", "/etc/sms/own.yaml")
    for host in ("host-a", "host-b"):
        playground.sms("-q", "stop", on=host)
    playground.sms(*site, "-q", "start", "--host", "host-a", on="admin")
    try:
        services = json.loads(playground.sms(*site, "status", "--json", ok=(0, 4)).stdout)["services"]
        (found,) = [one for one in services if one["name"] == "echo"]
        assert found["ok"], found
        capture = tmp_path / "it.pcap"
        address = "10.77.0.1"
        listening = subprocess.Popen(
            [*SMS, "-q", "lab", "capture", "--name", playground.lab.name, "-o", capture, "--duration", "60s"]
        )
        try:
            wait_until(lambda: capture.exists() and capture.stat().st_size > 20, "the capture")
            for number in range(4):
                node = playground.host(f"node{number % 2 + 1}")
                reply = node.run("python3", "-c", ASK, address, str(number)).text
                assert reply == f"hello-own ECHO {number}"
                time.sleep(1)
        finally:
            listening.terminate()
            listening.wait()
        argv = [*SMS, "--site", str(playground.lab.etc / "own.yaml"), "-q", "classify", str(capture), "--json"]
        printed = subprocess.run(argv, check=True, capture_output=True).stdout
        (verdict,) = [one for one in json.loads(printed)["services"] if one["name"] == "echo"]
        assert verdict["verdict"]
        done = json.loads(playground.sms(*site, "-q", "restart", "echo", "--json").stdout)
        assert [(one["service"], one["ok"]) for one in done] == [("echo", True)]
        (playground.lab.etc / "services.d" / "echo" / "word.j2").write_text("other\n")
        playground.sms(*site, "-q", "apply", "--wait", "10", ok=(5,))
        assert playground.host("node1").run("python3", "-c", ASK, address, "x").text == "hello-own ECHO x"
        (playground.lab.etc / "services.d" / "echo" / "word.j2").write_text("hello-again\n")
        done = json.loads(playground.sms(*site, "-q", "apply", "--json").stdout)
        assert [(one["service"], one["kind"]) for one in done["steps"]] == [("echo", "restart")]
        assert playground.host("node1").run("python3", "-c", ASK, address, "x").text == "hello-again ECHO x"
    finally:
        playground.sms(*site, "-q", "stop")
        playground.host("host-a").run("rm", "-rf", "/var/lib/sms/own")
