"""``python3 -m appliance.provision --config /etc/sms/provision.json``: sms-provd, the service in the VM."""

from __future__ import annotations

import argparse
import grp
import logging
import os
import resource
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn

from appliance.errors import SmsError
from appliance.provision.app import make_app
from appliance.provision.config import Config, read_config
from appliance.provision.dnsmasq import ConfigWriter, check_range
from appliance.provision.world import World


def main() -> int:
    """Serve until stopped. Return the exit status: 1 or 2 if the service cannot start."""
    parser = argparse.ArgumentParser(prog="sms-provd", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("/etc/sms/provision.json"))
    parser.add_argument("--listen", metavar="ADDRESS:PORT", help="a TCP port instead of the socket (tests)")
    parser.add_argument("--trust-headers", action="store_true", help="with --listen: trust the X-SMS-... headers")
    arguments = parser.parse_args()
    # Each request of nginx is a connection, and those that wait for a push stay open; the usual limit is 1024.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        config = read_config(arguments.config)
        world = World(config)
        check_range(config)
        server = open_port(arguments.listen) if arguments.listen else open_socket(config)
    except SmsError as error:
        sys.stderr.write(f"sms-provd: {error.message}\n" + (f"  hint: {error.hint}\n" if error.hint else ""))
        return error.status
    app = make_app(world, trust=arguments.trust_headers or not arguments.listen)
    if not arguments.listen:
        ConfigWriter(world, Path(config.socket).parent).start()
    notify_systemd()
    # nginx writes the access log.
    Server(uvicorn.Config(app, access_log=False, log_level="warning", lifespan="off", proxy_headers=False), world).run(
        sockets=[server]
    )
    world.store.close()
    return 0


def notify_systemd() -> None:
    """Report readiness with sd_notify(3): the socket listens and dnsmasq's files are written."""
    if path := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"READY=1", path)


class Server(uvicorn.Server):
    """A server that answers all requests waiting for a push when it is stopped: shutdown would wait for them."""

    def __init__(self, config: uvicorn.Config, world: World) -> None:
        super().__init__(config)
        self.world = world

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        for stop in self.world.on_stop:
            stop()
        super().handle_exit(sig, frame)


def open_port(listen: str) -> socket.socket:
    """Return a listening TCP socket; SmsError if the port is in use."""
    host, _, port = listen.rpartition(":")
    try:
        return socket.create_server((host or "127.0.0.1", int(port)), backlog=512)
    except (OSError, ValueError, OverflowError) as error:
        raise SmsError(f"cannot listen on {listen}: {error}") from error


def open_socket(config: Config) -> socket.socket:
    """Return the listening Unix socket for nginx; SmsError if it cannot be created."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o117)
    try:
        Path(config.socket).unlink(missing_ok=True)
        server.bind(config.socket)
    except OSError as error:
        raise SmsError(f"cannot create {config.socket}: {error}", hint="does its folder exist?") from error
    finally:
        os.umask(old)
    try:
        os.chown(config.socket, -1, grp.getgrnam(config.socket_group).gr_gid)
    except (KeyError, PermissionError):
        logging.getLogger("sms-provd").warning("%s keeps the group of this process", config.socket)
    server.listen(4096)
    return server


if __name__ == "__main__":
    sys.exit(main())
