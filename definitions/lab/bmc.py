"""Management controllers of the lab's machines: sushy-tools' Redfish emulator, and QEMU as what it switches.

Each controller answers at an address of its own and knows one machine; the host's first address knows all of them.
A machine is on while its QEMU runs: it outlives this program, as a machine outlives its controller's restart.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import ssl
import subprocess
import threading
import time
import uuid

import bcrypt
import flask
from sushy_tools.emulator import main
from sushy_tools.emulator.resources.systems.fakedriver import FakeDriver
from werkzeug.serving import WSGIRequestHandler, make_server

HERE = pathlib.Path("/lab")
STATE = pathlib.Path("/srv/metal")
USERS = pathlib.Path("/run/bmc.users")
USER = "root"
PORT = 443
SETTINGS = json.loads((HERE / "bmc.json").read_text())
SYSTEMS = {str(uuid.uuid5(uuid.NAMESPACE_DNS, one["mac"])): one for one in SETTINGS["machines"]}
OFF, ON = "Off", "On"
MODULES = pathlib.Path("/sys/module")


def accelerator():
    """KVM where it can run any kernel; under pvm it cannot."""
    real = any((MODULES / name).exists() for name in ("kvm_intel", "kvm_amd")) and not (MODULES / "kvm_pvm").exists()
    if real and os.access("/dev/kvm", os.R_OK | os.W_OK):
        return ["-accel", "kvm", "-cpu", "host"]
    features = "qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,-svm"
    return ["-accel", "tcg,thread=multi,tb-size=128", "-cpu", features]


def command(identity, machine, device, mode):
    """QEMU's argv. Where it is not to boot from the network, its card has no boot code, and there is nothing else."""
    name, efi = machine["name"], mode == "UEFI"
    rom = "" if device == "Pxe" else ",romfile="
    return [
        *("nsenter", f"--net={HERE / 'switch'}", "--", "qemu-system-x86_64", "-name", f"guest={name}"),
        *("-machine", "q35,graphics=off", *accelerator(), "-uuid", identity, "-m", str(machine["memory_mb"])),
        *("-display", "none", "-nodefaults", "-no-user-config", "-device", "virtio-rng-pci"),
        *("-netdev", f"tap,id=net,ifname={machine['port']},script=no,downscript=no"),
        *("-device", f"virtio-net-pci,netdev=net,mac={machine['mac']}{rom}"),
        *(("-bios", "/usr/share/ovmf/OVMF.fd") if efi else ("-boot", "n,reboot-timeout=5000")),
        *("-chardev", f"socket,id=console,path={STATE / name}.sock,server=on,wait=off,logfile={STATE / name}.log"),
        *("-serial", "chardev:console", "-qmp", f"unix:{STATE / name}.qmp,server=on,wait=off"),
        *("-daemonize", "-pidfile", f"{STATE / name}.pid"),
    ]


def pid_of(name):
    """The process of a machine that is on, or None."""
    try:
        pid = int((STATE / f"{name}.pid").read_text())
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if f"guest={name}".encode() in words else None


def press_a_key(name):
    """Any key but Ctrl-B ends the two seconds that iPXE waits for that one."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
        link.settimeout(10)
        link.connect(f"{STATE / name}.sock")
        said = b""
        while b"Press Ctrl-B for" not in said:
            if not (more := link.recv(4096)):
                return
            said = said[-32:] + more
        link.sendall(b"\r")


def press_button(name):
    """Ask the machine's system to go down; what it does about it is its own matter."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(5)
        link.connect(f"{STATE / name}.qmp")
        said = link.makefile("rw")
        said.readline()
        for order in ("qmp_capabilities", "system_powerdown"):
            print(json.dumps({"execute": order}), file=said, flush=True)
            said.readline()


class Machines(FakeDriver):
    """The emulator's own systems, but for what switches them."""

    lock = threading.Lock()

    @property
    def systems(self):
        here = flask.request.environ["SERVER_NAME"]
        return [identity for identity, one in SYSTEMS.items() if here in (one["bmc"], SETTINGS["own"])]

    def _get(self, identity):
        found = super()._get(identity)
        if found["uuid"] not in self.systems:
            raise main.error.NotFound()
        return found

    def get_power_state(self, identity):
        return ON if pid_of(self._get(identity)["name"]) else OFF

    def set_power_state(self, identity, state):
        system = self._get(identity)
        with self.lock:
            name, pid = system["name"], pid_of(system["name"])
            if state == "GracefulShutdown":
                if pid:
                    press_button(name)
                return
            if state not in ("On", "ForceOn", "ForceOff", "ForceRestart", "GracefulRestart", "PowerCycle"):
                raise main.error.NotSupportedError(f"Power state {state} is not supported")
            if pid and state not in ("On", "ForceOn"):
                os.kill(pid, signal.SIGKILL)
                while pid_of(name):
                    time.sleep(0.02)
                pid = None
            if not pid and state != "ForceOff":
                argv = command(
                    system["uuid"],
                    SYSTEMS[system["uuid"]],
                    self.get_boot_device(identity),
                    self.get_boot_mode(identity),
                )
                done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
                if done.returncode:
                    raise main.error.FishyError(f"{name} does not start: {done.stderr.strip()}")
                threading.Thread(target=press_a_key, args=(name,), daemon=True).start()


class Quiet(WSGIRequestHandler):
    """Without a resolver: no lookups; a client that says nothing is let go."""

    timeout = 60

    def address_string(self):
        return self.client_address[0]


def serve(address, context):
    """A controller at an address; a thread a client, so that a silent one keeps nobody waiting."""
    server = make_server(address, PORT, main.app, threaded=True, request_handler=Quiet)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.ssl_context = context
    threading.Thread(target=server.serve_forever).start()


def run():
    password = (HERE / "bmc.password").read_bytes().strip()
    with os.fdopen(os.open(USERS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        # Few rounds: it is verified at every request.
        print(f"{USER}:{bcrypt.hashpw(password, bcrypt.gensalt(4)).decode()}", file=stream)
    systems = [
        {"uuid": identity, "name": one["name"], "boot_mode": "Legacy", "nics": [{"mac": one["mac"]}]}
        for identity, one in SYSTEMS.items()
    ]
    main.app.configure(
        extra_config={
            "SUSHY_EMULATOR_FAKE_DRIVER": True,
            "SUSHY_EMULATOR_FAKE_SYSTEMS": systems,
            "SUSHY_EMULATOR_AUTH_FILE": str(USERS),
            "SUSHY_EMULATOR_STATE_DIR": "/run/bmc",
        }
    )
    main.fakedriver.FakeDriver = Machines
    # The emulator makes these, and their databases, at the first request for each: two concurrent ones conflict.
    for part in ("systems", "chassis", "managers", "indicators", "vmedia", "storage", "drives", "volumes"):
        getattr(main.app, part)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(HERE / "bmc.pem", HERE / "bmc.key")
    for address in [*(one["bmc"] for one in SETTINGS["machines"]), SETTINGS["own"]]:
        serve(address, context)


if __name__ == "__main__":
    run()
