"""Persistent files of a lab: its keys, and the folder mounted as /etc/sms on the admin hosts."""

from __future__ import annotations

import secrets

from appliance.lab import render
from appliance.lab.journal import busy
from appliance.lab.layout import ALICE, ALICE_GROUP, BMC, Layout

# $1 the lab's folder on disk, then the hosts that get an SSH key. Creates only what is missing.
KEYS = """
umask 077
disk=$1; shift
mkdir -p "$disk/etc-sms/keys" "$disk/ssh" "$disk/host-a" "$disk/host-b" "$disk/shared" "$disk/home"
mkdir -p -m 755 /var/lib/sms
chmod 755 "$disk" "$disk/etc-sms" "$disk/host-a" "$disk/host-b" "$disk/shared" "$disk/home"
key=$disk/etc-sms/keys/munge.key
[ -s "$key" ] || { head -c 1024 /dev/urandom >"$key.new" && mv "$key.new" "$key"; }
for pair in admin:"$disk/etc-sms/keys/id_ed25519" $(for host; do echo "$host:$disk/ssh/$host"; done); do
    file=${pair#*:}
    [ -s "$file.pub" ] && continue
    rm -f "$file" && ssh-keygen -q -t ed25519 -N "" -C "${pair%%:*}" -f "$file"
done
"""


BMC_PAIR = ("bmc.pem", "bmc.key")
"""Certificate and key of the management controllers, signed by the site's CA, in the lab's folder on disk."""


def make_etc(layout: Layout) -> render.Keys:
    """Create keys and the site file on disk; return the keys that hosts get."""
    names = render.ssh_hosts(layout)
    busy(layout.name).run("sh", "-c", KEYS, "keys", str(layout.disk), *names)
    ssh = layout.disk / "ssh"
    public = {name: (ssh / f"{name}.pub").read_text() for name in names}
    for path, text in {
        "sms.yaml": render.site_file(layout),
        "known_hosts": render.known_hosts(layout, public),
        "passwd": ALICE + "\n",
        "group": ALICE_GROUP + "\n",
    }.items():
        busy(layout.name).write(str(layout.etc / path), text.encode())
    keys = layout.etc / "keys"
    if layout.machines:
        password = keys / "bmc.password"
        if not password.exists() or not password.stat().st_size:
            busy(layout.name).write(str(password), secrets.token_hex(12).encode(), mode=0o600)
    return render.Keys(
        munge=(keys / "munge.key").read_bytes(),
        authorized=(keys / "id_ed25519.pub").read_bytes(),
        host={name: (ssh / name).read_bytes() for name in names},
        bmc=_bmc_files(layout) if layout.machines else {},
    )


def _bmc_files(layout: Layout) -> dict[str, bytes]:
    """Return certificate, key and password of the management controllers."""
    paths = [*(layout.disk / BMC / name for name in BMC_PAIR), layout.etc / "keys" / "bmc.password"]
    return {path.name: path.read_bytes() for path in paths}
