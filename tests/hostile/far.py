"""Programs of a machine that sms logs in to, under hostile control: they do what an attack says, and are honest else.

``FAR`` takes the place of a program. What the other side has taken of it is recorded: an attack that nobody has read
proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from appliance.host.base import Host

FOLDER = "/etc/hostile"
PLAN, TAKEN = f"{FOLDER}/plan.json", f"{FOLDER}/taken"
PLACES = {"python3": "/usr/bin/python3"}
"""Of programs that are called by their path; others are found in /usr/local/bin."""
FAR = """\
#!/usr/bin/env -S /etc/hostile/real/python3 -I
import json, os, signal, sys, time

for one in (signal.SIGPIPE, signal.SIGINT):
    signal.signal(one, signal.SIG_DFL)
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
try:
    with open("/etc/hostile/plan.json") as stream:
        plan = json.load(stream)
except OSError:
    plan = {"program": ""}
if plan["program"] != name or (plan["word"] and plan["word"] not in words):
    os.execv("/etc/hostile/real/" + name, [name, *words])
taken = open("/etc/hostile/taken", "a", 1)

def give(number, block):
    while block:
        block = block[os.write(number, block):]

for step, value in plan["steps"]:
    if step in ("out", "error"):
        with open(value, "rb") as stream:
            give(1 if step == "out" else 2, stream.read())
    elif step == "read":
        while value and (block := os.read(0, value)):
            value -= len(block)
    elif step == "honest":
        pid = os.spawnv(os.P_WAIT, "/etc/hostile/real/" + name, [name, *words])
    elif step.startswith("endless"):
        with open(value, "rb") as stream:
            block = stream.read()
        for count in range(1, 1 << 20):
            give(2 if step.endswith("error") else 1, block)
            if count & count - 1 == 0:
                taken.write("%d blocks\\n" % count)
    elif step == "silent":
        taken.write("silent\\n")
        time.sleep(3600)
    elif step == "killed":
        taken.write("killed\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    taken.write(step + "\\n")
os._exit(plan["status"])
"""
Step = tuple[str, bytes | int]
"""What it does, and with which bytes, or how many."""
TAKE_OVER = """
set -eu
mkdir -p /etc/hostile/real
[ -e /etc/hostile/real/python3 ] || ln -s "$(readlink -f /usr/bin/python3)" /etc/hostile/real/python3
real=$(PATH=/usr/sbin:/usr/bin:/sbin:/bin; command -v "$1")
[ -e "/etc/hostile/real/$1" ] || ln -s "$(readlink -f "$real")" "/etc/hostile/real/$1"
cat >"$2.hostile"
chmod 755 "$2.hostile"
mv "$2.hostile" "$2"
"""
"""$1: a program, $2: where it is."""


def take_over(host: Host, *programs: str) -> None:
    """Put ``FAR`` in the place of programs."""
    for name in programs:
        place = PLACES.get(name, f"/usr/local/bin/{name}")
        host.run("sh", "-c", TAKE_OVER, "take over", name, place, input=FAR.encode())


def attack(host: Host, program: str, word: str, steps: Sequence[Step], *, status: int = 0) -> None:
    """Let a program do these steps when it has this word among its arguments; empty: always."""
    given = []
    for number, (step, value) in enumerate(steps):
        if isinstance(value, bytes):
            host.write(f"{FOLDER}/{number}", value, mode=0o600)
        given.append((step, f"{FOLDER}/{number}" if isinstance(value, bytes) else value))
    host.remove(TAKEN)
    plan = {"program": program, "word": word, "steps": given, "status": status}
    host.write(PLAN, json.dumps(plan).encode(), mode=0o600)


def be_honest(host: Host) -> None:
    """Forget the attack."""
    host.remove(PLAN)


def taken(host: Host) -> list[str]:
    """The steps whose bytes the other side has taken."""
    return (host.read(TAKEN) or b"").decode().splitlines()
