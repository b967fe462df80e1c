"""What comes in over the public network."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.places import GOLDEN
from tests.unit.services.conftest import (
    needs_root,
)

TRAFFIC = r"""
set -eu
mount -t tmpfs tmpfs /run
mkdir /run/netns
ip link set lo up
for n in 0 1; do
    ip netns add p$n
    ip link add eth$n type veth peer name peer netns p$n
    ip addr add 10.7$((7 + n)).0.1/24 dev eth$n
    ip link set eth$n up
    ip -n p$n addr add 10.7$((7 + n)).0.9/24 dev peer
    ip -n p$n link set peer up
done
for twice in 1 2; do nft -f "$1"; done
cat >/run/serve.py <<'END'
import socket, sys
server = socket.create_server((sys.argv[1], 8000))
open(sys.argv[2], "w").close()
while True:
    server.accept()[0].close()
END
python3 /run/serve.py 0.0.0.0 /run/up & first=$!
ip netns exec p1 python3 /run/serve.py 10.78.0.9 /run/up1 & second=$!
trap 'kill $first $second' EXIT
while [ ! -e /run/up ] || [ ! -e /run/up1 ]; do sleep 0.05; done
try() {
    name=$1; shift
    "$@" python3 -c 'import socket, sys; socket.create_connection((sys.argv[1], 8000), 0.7)' "$address" 2>/dev/null &&
        echo "$name=yes" || echo "$name=no"
}
address=10.77.0.1 try node ip netns exec p0
address=10.78.0.1 try public ip netns exec p1
address=127.0.0.1 try itself env
address=10.78.0.9 try out env
ip netns exec p1 ping -qc 1 -W 1 10.78.0.1 >/dev/null && echo ping=yes || echo ping=no
"""


@needs_root
@pytest.mark.slow
def test_public_network_cannot_reach_daemons(need: Callable[[str], None]) -> None:
    for program in ("nft", "unshare", "ip", "ping"):
        need(program)
    (rules,) = (GOLDEN / "debian-12").rglob("nat.nft")
    argv = ["unshare", "--net", "--mount", "sh", "-c", TRAFFIC, "traffic", str(rules)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    answers = dict(line.split("=") for line in done.stdout.splitlines())
    assert answers == {"node": "yes", "public": "no", "itself": "yes", "out": "yes", "ping": "yes"}, done.stderr
