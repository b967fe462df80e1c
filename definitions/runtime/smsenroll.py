"""How a node that has just booted gets its certificate from the provisioning VM. Python 3.9 and later.

The kernel's command line names the server (sms.server=), the node (sms.node=) and a token (sms.token=) that is good
once, from this node's address, for some minutes. The key is made here and stays here. A token that is not good any more
is replaced by asking for the boot script once more, as the firmware has done.
"""

import json
import os
import re
import subprocess
import time

from urllib.parse import urlsplit

import smsfiles
import smslink

TLS = "/etc/sms/tls"
NODE_TLS = "/run/sms/tls"
PAIR = "pair.pem"
"""The key and its certificate; key.pem and cert.pem are links to it."""
PATH = "/sms/v1/enrol"
SCRIPT = "/boot/v1/bootscript?mac="


def say(text):
    print("sms-enroll: " + text, flush=True)


def openssl(*argv, given=b""):
    """What openssl prints; RuntimeError with its last words where it fails. ``given``: its standard input."""
    done = subprocess.run(("openssl",) + argv, input=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().split("\n")
        raise RuntimeError("openssl %s: %s" % (argv[0], words[-1]))
    return done.stdout


def make_request(name):
    """A new key, and a signing request for it."""
    key = openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
    request = openssl("req", "-new", "-sha256", "-key", "/dev/stdin", "-subj", "/OU=node/CN=" + name, given=key)
    return key, request.decode()


def addresses_of_ports():
    """MAC addresses of this machine's ports, the one it has booted from first."""
    booted = re.sub("^01-", "", smsfiles.boot_word("BOOTIF")).replace("-", ":").lower()
    found = [booted] if re.match(r"([0-9a-f]{2}:){5}[0-9a-f]{2}\Z", booted) else []
    folder = smsfiles.at("/sys/class/net")
    for port in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        try:
            with open(os.path.join(folder, port, "address")) as stream:
                mac = stream.read(32).strip()
        except OSError:
            continue
        if os.path.exists(os.path.join(folder, port, "device")) and mac not in found:
            found.append(mac)
    return found


def ask_token(server):
    """A new token out of this machine's boot script; empty where it has none for us."""
    where = urlsplit(server)
    for mac in addresses_of_ports():
        try:
            with smslink.Link("http://" + (where.hostname or "")) as link:
                script = link.get(SCRIPT + mac, 1 << 20).decode(errors="replace")
        except (OSError, ValueError):
            continue
        found = re.search(r"\bsms\.token=([0-9A-Za-z_-]{16,128})", script)
        if found:
            return found.group(1)
    return ""


def enroll(server, name, token, renewing):
    """Get a certificate and put it beside its key. Raises what a Link raises, RuntimeError."""
    folder = smsfiles.at(NODE_TLS)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    key, request = make_request(name)
    body = {"csr": request}
    shown = ()
    if renewing:
        shown = (folder + "/cert.pem", folder + "/key.pem")
    else:
        body["token"] = token
    context = smslink.trust(smsfiles.at(TLS + "/ca.pem"), *shown)
    with smslink.Link(server, context, low_port=True) as link:
        answer = json.loads(link.post(PATH, body).decode())
    if answer["name"] != name:
        raise RuntimeError("the certificate is for %r, and this is %s" % (answer["name"], name))
    us = os.getuid(), os.getgid()
    # Both are in one file, which is replaced at once: a run that was killed leaves no certificate of another key.
    smsfiles.replace(NODE_TLS + "/" + PAIR, key + answer["certificate"].encode(), 0o600, *us)
    smsfiles.replace(NODE_TLS + "/renew", b"%d" % (time.time() + answer["renew_s"]), 0o600, *us)
    for file in ("key.pem", "cert.pem"):
        for link, target in ((folder, PAIR), (smsfiles.at(TLS), folder + "/" + file)):
            if not os.path.lexists(link + "/" + file):
                os.symlink(target, link + "/" + file)


def wait_for_certificate(seconds, renewing=False):
    """Try for so many seconds; an exit status.

    ``renewing``: the certificate that is here is shown in the token's place.
    """
    server, name = smsfiles.boot_word("sms.server").rstrip("/"), smsfiles.boot_word("sms.node")
    token = smsfiles.boot_word("sms.token")
    if not server.startswith("https://") or not re.match(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}\Z", name):
        say("the kernel's command line names no server or no node: sms.server=, sms.node=")
        return 2
    deadline = time.monotonic() + seconds
    while True:
        try:
            enroll(server, name, token, renewing)
            say("%s has its certificate" % name)
            return 0
        except (OSError, ValueError, LookupError, TypeError, RuntimeError, subprocess.SubprocessError) as error:
            say(str(error) or error.__class__.__name__)
            # A token that is spent, or a certificate that has ended.
            new = ask_token(server) if isinstance(error, smslink.Said) and error.status in (400, 401, 403) else ""
            if new and (renewing or new != token):
                token, renewing = new, False
                continue
        if time.monotonic() >= deadline:
            return 1
        time.sleep(min(3.0, max(0.05, deadline - time.monotonic())))
