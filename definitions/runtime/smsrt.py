"""What the programs inside the container share. Runs on the Python of every base (3.6 and later)."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import time

import smsfiles

SERVICES = "/etc/sms/services.json"
NTP_PORT, SMTP_PORT, SYSLOG_PORT = 123, 25, 514
ETH_P_IP = 0x0800  # linux/if_ether.h
PROBE_ADDRESS = "169.254.77.2"  # of a node that is not there: nat.yaml
NTP_DELTA = 2208988800  # seconds from 1900 to 1970 (RFC 5905, figure 4)


def load(path=None):
    """The services of this container, or of the file at ``path``, by name in starting order."""
    with open(path or smsfiles.at(SERVICES)) as stream:
        return json.load(stream)["services"]


def probe(name, service):
    """Ask one service in its own protocol; gives {name, ok, detail, ms}."""
    spec = service["probe"]
    began = time.monotonic()
    try:
        detail = PROBES[spec["kind"]](spec)
        ok = True
    except Exception as error:  # whatever goes wrong is the answer
        detail = str(error) or error.__class__.__name__
        ok = False
    return {"name": name, "ok": ok, "detail": detail, "ms": round((time.monotonic() - began) * 1000, 1)}


def probe_exec(spec):
    """Run a pipeline; its last line of output is the detail."""
    deadline = time.monotonic() + spec["timeout_s"]
    said = b""
    for argv in spec["exec"]:
        # A session of its own: what a command started ends with it, and holds no pipe open.
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            output, errors = process.communicate(said, timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise RuntimeError("%s: no answer within %g s" % (argv[0], spec["timeout_s"]))
        if process.returncode:
            words = (errors or output).decode(errors="replace").split("\n")
            # The last sentence: not the rules of stars and capitals that some draw around it.
            words = [word.strip() for word in words if re.search("[a-z]", word)][-1:]
            raise RuntimeError("%s: %s" % (argv[0], words[0] if words else "status %d" % process.returncode))
        said = output
    text = said.decode(errors="replace")
    if not spec.get("expect"):
        return "ok"
    found = re.search(spec["expect"], text)
    if not found:
        raise RuntimeError("%s: unexpected answer: %s" % (argv[0], text.strip()[:120]))
    return re.sub(r"\s+", " ", found.group(0))


def probe_ntp(spec):
    """Ask for the time as a client (mode 3) and check the answer (mode 4) to this very question."""
    question = bytearray(48)
    question[0] = (4 << 3) | 3
    cookie = os.urandom(8)
    question[40:48] = cookie
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(spec["timeout_s"])
        sock.connect((spec["ntp"], NTP_PORT))
        sock.send(bytes(question))
        answer = sock.recv(512)
    if len(answer) < 48 or answer[0] & 7 != 4 or answer[24:32] != cookie:
        raise RuntimeError("that was no answer to the question")
    stratum = answer[1]
    if not 1 <= stratum <= 15:
        raise RuntimeError("not synchronised (stratum %d)" % stratum)
    seconds, fraction = struct.unpack("!II", answer[40:48])
    offset = seconds + fraction / 2.0**32 - NTP_DELTA - time.time()
    return "stratum %d, offset %+.3f s" % (stratum, offset)


def probe_smtp(spec):
    """Read the greeting and say goodbye."""
    with socket.create_connection((spec["smtp"], SMTP_PORT), spec["timeout_s"]) as sock:
        greeting = sock.makefile("rb").readline(1000).decode(errors="replace").strip()
        sock.sendall(b"QUIT\r\n")
    if not greeting.startswith("220"):
        raise RuntimeError("unexpected greeting: " + greeting[:120])
    return greeting[:80]


def probe_syslog(spec):
    """Send a line with a word of its own and wait until it is in the file."""
    word = "sms-probe-" + os.urandom(8).hex()
    path = smsfiles.at(spec["file"])
    deadline = time.monotonic() + spec["timeout_s"]
    try:
        offset = os.stat(path).st_size
    except OSError:
        offset = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((spec["syslog"], SYSLOG_PORT))
        sock.send(("<47>sms-probe: " + word).encode())
        while time.monotonic() < deadline:
            try:
                with open(path, "rb") as stream:
                    # Rotated meanwhile: look from the beginning.
                    stream.seek(offset if os.fstat(stream.fileno()).st_size >= offset else 0)
                    if word.encode() in stream.read():
                        return "a line arrived"
            except FileNotFoundError:
                pass
            time.sleep(0.02)
            sock.send(b"")  # an ICMP refusal surfaces as an error here
    raise RuntimeError("a line that was sent did not arrive in %s" % path)


def checksum(data):
    """The checksum of RFC 1071, of an even number of bytes."""
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def echo_request(target, identifier, cookie):
    """A ping to ``target`` as a packet (RFC 791, RFC 792) from the probe's address."""
    body = struct.pack("!BBHHH", 8, 0, 0, identifier, 1) + cookie
    body = body[:2] + struct.pack("!H", checksum(body)) + body[4:]
    addresses = socket.inet_aton(PROBE_ADDRESS) + socket.inet_aton(target)
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), identifier, 0, 64, 1, 0) + addresses
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + body


def is_reply(packet, target, identifier, cookie):
    """Whether a packet is the reply to ``echo_request``."""
    addresses = socket.inet_aton(target) + socket.inet_aton(PROBE_ADDRESS)
    body = packet[20:]
    return (
        packet[:1] == b"\x45"
        and packet[9:10] == b"\x01"
        and packet[12:20] == addresses
        and body[:1] == b"\0"
        and body[4:6] == struct.pack("!H", identifier)
        and body[8 : 8 + len(cookie)] == cookie
    )


def probe_routed(spec):
    """Ping from behind the container: the packet enters as a node's would, is routed and translated."""
    identifier, cookie = struct.unpack("!H", os.urandom(2))[0], os.urandom(16)
    # What is sent into one end of the cable comes out of the other one.
    with packet_socket("probe0") as inner, packet_socket("probe1") as outer:
        head = inner.getsockname()[4] + outer.getsockname()[4] + struct.pack("!H", ETH_P_IP)
        began = time.monotonic()
        outer.send(head + echo_request(spec["routed"], identifier, cookie))
        while True:
            left = began + spec["timeout_s"] - time.monotonic()
            if left <= 0:
                raise RuntimeError("no reply from %s within %g s" % (spec["routed"], spec["timeout_s"]))
            outer.settimeout(left)
            try:
                frame = outer.recv(2048)
            except socket.timeout:
                continue
            if is_reply(frame[14:], spec["routed"], identifier, cookie):
                return "reply after %.1f ms" % ((time.monotonic() - began) * 1000)


def packet_socket(interface):
    """A socket for the IPv4 packets of an interface, with their Ethernet headers."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_IP))
    sock.bind((interface, ETH_P_IP))
    return sock


def probe_http(spec):
    """GET; the path must be there and open to the probe (2xx), or lie elsewhere (3xx), or have the given status."""
    target = spec["http"]
    if target.startswith("http+unix:"):
        address, path = target[len("http+unix:") :].split(":", 1)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(spec["timeout_s"])
        sock.connect(address)
        host = "localhost"
    else:
        host, path = target[len("http://") :].split("/", 1)
        path = "/" + path
        name, _, port = host.partition(":")
        sock = socket.create_connection((name, int(port or 80)), spec["timeout_s"])
    with sock:
        sock.sendall(("GET %s HTTP/1.0\r\nHost: %s\r\n\r\n" % (path, host)).encode())
        status = sock.makefile("rb").readline(1000).decode(errors="replace").strip()
    found = re.match(r"HTTP/1\.[01] ([0-9]{3})", status)
    code = int(found.group(1)) if found else 0
    if code != spec["status"] if "status" in spec else not 200 <= code < 400:
        raise RuntimeError("unexpected answer: " + status[:120])
    return status[:80]


def probe_fresh(spec):
    """The service says itself how it is, and until when that holds."""
    with open(smsfiles.at(spec["fresh"])) as stream:
        status = json.load(stream)
    if time.time() > status["until"]:
        raise RuntimeError("silent for %.0f s: %s" % (time.time() - status["until"], status["detail"]))
    if status["state"] == "failed":
        raise RuntimeError(status["detail"])
    return status["detail"]


PROBES = {
    "exec": probe_exec,
    "ntp": probe_ntp,
    "smtp": probe_smtp,
    "syslog": probe_syslog,
    "routed": probe_routed,
    "http": probe_http,
    "fresh": probe_fresh,
}
