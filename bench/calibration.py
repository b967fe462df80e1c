"""Whether the confidence of `sms classify` is right: clusters with known truth, of families that the fit never saw.

`python -m bench.calibration` prints the scales that fit the other families, and the bins of the picture in the HTML
report: both are in `analysis/confidence.py`.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from analysis.budget import find_budget
from analysis.classify import classify
from analysis.confidence import Bin, Grounds, Relation, Scale, confidence
from analysis.context import make_context
from analysis.errors import CaptureError
from analysis.model import Verdict
from analysis.reading import read_captures
from analysis.roles import find_roles
from analysis.samples import own_samples, read_samples
from analysis.servers import find_servers
from analysis.services import sort_traffic
from analysis.signatures import Signature
from analysis.users import count_users
from analysis.verdict import CRITICAL, judge
from appliance.operations.classify.signatures import make_signatures, open_catalogue
from bench.rig import Rig, result, work_folder
from bench.rig.measure import Samples
from tests.captures.clusters.families import FAMILIES, Drawn, draw

CAPTURES = 20
"""Captures of each family."""
HIGH, HIGH_RIGHT, RIGHT = 0.9, 0.95, 0.97
"""Of the verdicts stated with HIGH or more, HIGH_RIGHT are right; of all, RIGHT."""
BY_HAND: dict[Relation, Scale] = {
    "agrees": Scale(0.4, 1.0),
    "decides": Scale(0.4, 0.58),
    "contradicts": Scale(0.0, 0.8),
    "unknown": Scale(0.0, 1.0),
    "proved": Scale(0.0, 1.0),
}
"""The scales before the fit."""
PRIOR = 60
"""Verdicts that the scales set by hand count as: the clusters know only what their authors thought of."""


@dataclass(frozen=True)
class Stated:
    """A verdict and the truth; None if it is not a service."""

    family: str
    seed: int
    name: str
    verdict: Verdict
    truth: Verdict | None
    confidence: float
    grounds: Grounds
    reason: str

    @property
    def right(self) -> bool:
        """Whether the verdict is right."""
        return self.verdict == self.truth


@dataclass(frozen=True)
class Outcome:
    """The verdicts on one capture, and what nodes need of the traffic without a verdict."""

    packets: int
    stated: tuple[Stated, ...]
    missed: tuple[str, ...]


@cache
def signatures() -> tuple[Signature, ...]:
    """Return the signatures of the shipped catalogue."""
    return tuple(make_signatures(open_catalogue(None)))


def state(drawn: Drawn, folder: Path) -> Outcome:
    """Classify a capture."""
    path = folder / f"{drawn.family}-{drawn.seed}.pcap"
    path.write_bytes(drawn.capture())
    known = signatures()
    try:
        reading = read_captures([str(path)], signatures=known)
        hosts, links = reading.hosts(), reading.links()
        roles = find_servers(find_roles(hosts, links, reading.samples), hosts, links, known)
    except CaptureError:
        return Outcome(len(drawn.packets), (), tuple(drawn.needs()))
    finally:
        path.unlink()
    observation = reading.observe(roles.by_index, hosts, links)
    services = classify(observation, roles, known).services
    grounds = {}
    context = make_context(observation, roles.by_index, roles.routed)
    decoded = read_samples(own_samples(observation.samples, roles.by_index), observation.cut_at * bool(observation.cut))
    traffic = sort_traffic(observation, roles.by_index, known)
    count_users(traffic.services, observation, roles.by_index, context)
    for counts in traffic.services:
        grounds[counts.name] = judge(counts, context, find_budget(counts, decoded, context)).grounds
    stated = [
        Stated(
            drawn.family,
            drawn.seed,
            one.name,
            one.verdict,
            drawn.truth(one.name, one.ports),
            one.confidence,
            grounds[one.name] or Grounds("proved", 1.0),
            one.reasons[0],
        )
        for one in services
    ]
    seen, ports = {one.name for one in services}, {port for one in services for port in one.ports}
    missed = [name for name, one in drawn.needs().items() if not seen & {*one.names} and not ports & {*one.ports}]
    return Outcome(len(drawn.packets), tuple(stated), tuple(missed))


def one(job: tuple[str, int, str]) -> Outcome:
    """Draw a cluster and classify its capture."""
    family, seed, folder = job
    return state(draw(family, seed), Path(folder))


def outcomes(families: Iterable[str], seeds: Sequence[int], folder: str) -> list[Outcome]:
    """Classify captures of these families, in as many processes as there are cores."""
    jobs = [(family, seed, folder) for family in families for seed in seeds]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, jobs, chunksize=4))


def verdicts(found: Iterable[Outcome]) -> list[Stated]:
    """Return all verdicts."""
    return [each for outcome in found for each in outcome.stated]


# The fit.


def fit(stated: Sequence[Stated]) -> dict[Relation, Scale]:
    """Return the scales with the least squared error (Brier score) for each relation; PRIOR steadies them."""
    fitted: dict[Relation, Scale] = {}
    for relation, before in BY_HAND.items():
        points = [(each.grounds.evidence, float(each.right)) for each in stated if each.grounds.relation == relation]
        for part in (0.0, 0.5, 1.0):
            points += [(part, before.none + (before.all - before.none) * part)] * (PRIOR // 3)
        fitted[relation] = _line(points)
    return fitted


def _line(points: Sequence[tuple[float, float]]) -> Scale:
    """Return the best line that does not fall and stays between 0 and 1: of all, in steps of a hundredth."""
    n, x, y = len(points), sum(a for a, _ in points), sum(b for _, b in points)
    xx, xy, yy = sum(a * a for a, _ in points), sum(a * b for a, b in points), sum(b * b for _, b in points)

    def error(low: int, high: int) -> float:
        begin, rise = low / 100, (high - low) / 100
        return n * begin**2 + rise**2 * xx + yy + 2 * begin * rise * x - 2 * begin * y - 2 * rise * xy

    low, high = min(((low, high) for high in range(101) for low in range(high + 1)), key=lambda pair: error(*pair))
    return Scale(low / 100, high / 100)


# Figures.


def brier(stated: Sequence[Stated]) -> float:
    """Return the mean squared error of the confidence (G. W. Brier, Monthly Weather Review 78 (1950), 1-3)."""
    return sum((each.confidence - each.right) ** 2 for each in stated) / len(stated)


def share_right(stated: Sequence[Stated]) -> float:
    """Return the share of right verdicts; 1 for none."""
    return sum(each.right for each in stated) / len(stated) if stated else 1.0


def high_right(stated: Sequence[Stated]) -> float:
    """Return the share of right verdicts among those stated with HIGH or more."""
    return share_right([each for each in stated if each.confidence >= HIGH])


EDGES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def bins(stated: Sequence[Stated]) -> list[Bin]:
    """Return the bins that are not empty."""
    found = []
    for low, high in pairwise(EDGES):
        mine = [each for each in stated if low <= each.confidence < high or each.confidence == high == 1.0]
        if mine:
            mean = sum(each.confidence for each in mine) / len(mine)
            found.append(Bin(low, high, len(mine), round(mean, 3), round(share_right(mine), 3)))
    return found


def figures(found: Sequence[Outcome]) -> dict[str, Any]:
    """Return all figures of verdicts."""
    stated = verdicts(found)
    by_family: dict[str, list[Stated]] = defaultdict(list)
    for each in stated:
        by_family[each.family].append(each)
    return {
        "captures": len(found),
        "verdicts": len(stated),
        "right": round(share_right(stated), 4),
        "high": sum(each.confidence >= HIGH for each in stated),
        "high_right": round(high_right(stated), 4),
        "brier": round(brier(stated), 4),
        "bins": bins(stated),
        "harmful": sum(each.truth == CRITICAL and not each.right for each in stated),
        "by_family": {name: round(share_right(mine), 4) for name, mine in by_family.items()},
        "missed": sum(len(outcome.missed) for outcome in found),
    }


def with_scales(stated: Iterable[Stated], scales: dict[Relation, Scale]) -> list[Stated]:
    """Return the verdicts with the confidence by other scales."""
    return [replace(each, confidence=confidence(each.grounds, scales)) for each in stated]


def unseen() -> list[str]:
    """Return the families that the fit never sees."""
    return [name for name, family in FAMILIES.items() if family.unseen]


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare with the numbers that were set by hand, on the families that the fit never saw."""
    with work_folder() as folder, rig.progress.step("classify clusters"):
        found = outcomes(unseen(), range(CAPTURES), folder)
    stated = verdicts(found)
    by_hand = with_scales(stated, BY_HAND)
    yield result(
        "calibration",
        Samples([high_right(stated)]),
        "0.4, 0.6 and 0.8 set by hand",
        Samples([high_right(by_hand)]),
        above=HIGH_RIGHT,
        unit="right of 1",
        peer_brier=round(brier(by_hand), 4),
        **figures(found),
    )


def main() -> None:
    """Print the scales that fit the other families, the figures of those, and the bins of the rest."""
    with work_folder() as folder:
        seen = outcomes([name for name in FAMILIES if name not in unseen()], range(CAPTURES), folder)
        rest = outcomes(unseen(), range(CAPTURES), folder)
    scales = fit(verdicts(seen))
    print(json.dumps({"scales": {name: [one.none, one.all] for name, one in scales.items()}, **figures(seen)}))
    stated = with_scales(verdicts(rest), scales)
    print(
        json.dumps(
            {"right": share_right(stated), "high": high_right(stated), "brier": brier(stated), "bins": bins(stated)}
        )
    )


if __name__ == "__main__":
    main()
