"""Both hosts start at the same moment, many times: there is never an instance on both."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from appliance.operations.image.build import Built
from tests.real.conftest import Playground, give_image

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

HOSTS = ("host-a", "host-b")
LATE_S = 1.5
"""The second start begins up to so much later than the first: each meets the other at another step."""


def small(document: dict[str, Any]) -> None:
    """A round takes seconds."""
    document["services"] = ["munge", "chrony"]
    document["overlay"] = {"size_mb": 64}


def shared(document: dict[str, Any]) -> None:
    small(document)
    document["overlay"]["directory"] = "/srv/shared/overlays"


@dataclass
class Watch:
    """How often it looked, how often it saw the ports of an instance on a host, and on both."""

    looks: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    both: int = 0


@contextmanager
def watched(playground: Playground) -> Iterator[Watch]:
    """Count instances on both hosts, every few milliseconds, by the ports that they have there."""
    files = {name: Path(f"/proc/{playground.lab.host(name).pid}/net/dev") for name in HOSTS}
    watch, over = Watch(), threading.Event()

    def look() -> None:
        while not over.wait(0.003):
            there = [name for name, file in files.items() if "veth" in file.read_text()]
            watch.looks += 1
            watch.seen.update(there)
            watch.both += len(there) > 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()


def start_both(playground: Playground, site: str) -> list[tuple[int, str]]:
    """Status and words of each host's start, begun at nearly the same moment."""
    chosen = random.sample(HOSTS, 2)
    late_s = random.choice([0, random.uniform(0, LATE_S)])
    runs = {}
    for name in chosen:
        words = [*playground.lab.host(name).prefix, "sms", "-q", "--site", site, "start"]
        runs[name] = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(late_s)
    said = {name: run.communicate(timeout=240)[1].decode() for name, run in runs.items()}
    return [(runs[name].returncode, said[name]) for name in HOSTS]


CASES = [
    pytest.param(shared, "/srv/shared/overlays"),
    pytest.param(small, "/var/lib/sms/overlays", marks=pytest.mark.full),
]


@pytest.mark.parametrize("rounds", [2, pytest.param(12, marks=pytest.mark.full)])
@pytest.mark.parametrize(("change", "folder"), CASES)
def test_never_two(
    stopped: Playground,
    built: Built,
    change: Callable[[dict[str, Any]], None],
    folder: str,
    rounds: int,
    record_property: Callable[[str, object], None],
) -> None:
    give_image(stopped, built, "host-b")
    site = stopped.variant(f"split-{change.__name__}.yaml", change)
    why: Counter[str] = Counter()
    won: Counter[str] = Counter()
    generation = 0
    try:
        with watched(stopped) as watch:
            for number in range(rounds):
                forget_overlays(stopped, folder)
                ended = start_both(stopped, site)
                up = [name for name in HOSTS if stopped.instances(name)]
                assert [status for status, _ in ended if status not in (0, 3)] == [], ended
                assert [name for name, (status, _) in zip(HOSTS, ended, strict=True) if status == 0] == up, ended
                assert len(up) == 1, f"round {number}: {ended}"
                generation = check_leases(stopped, folder, up[0], generation)
                won.update(up)
                why.update(words.splitlines()[0].removeprefix("sms: ") for status, words in ended if status)
                stop_both(stopped, site)
    finally:
        stop_both(stopped, site)
        forget_overlays(stopped, folder)
    assert watch.both == 0, "an instance on both hosts"
    assert watch.seen.total() > rounds, "it saw those that ran"
    figures = {"rounds": rounds, "won": dict(won), "both": watch.both, "looks": watch.looks, "refused": dict(why)}
    record_property("split_brain", figures)
    print(json.dumps({change.__name__: figures}))


def forget_overlays(playground: Playground, folder: str) -> None:
    """Either host may be first: with an overlay on one of them the other one is refused."""
    for name in HOSTS:
        playground.host(name).run("sh", "-c", 'rm -f "$1"/lab.img*', "forget", folder)


def check_leases(playground: Playground, folder: str, holder: str, generation: int) -> int:
    """Both hosts' files say who holds, and with a higher generation than before; give that."""
    leases = [json.loads(playground.host(name).read(f"{folder}/lab.lease") or b"{}") for name in HOSTS]
    assert [lease["holder"] for lease in leases] == [holder, holder]
    found: int = leases[0]["generation"]
    assert leases[1]["generation"] == found > generation
    return found


def stop_both(playground: Playground, site: str) -> None:
    runs = [
        subprocess.Popen([*playground.lab.host(name).prefix, "sms", "-q", "--site", site, "stop"], stdout=-3, stderr=-3)
        for name in HOSTS
    ]
    assert [run.wait(120) for run in runs] == [0, 0]
