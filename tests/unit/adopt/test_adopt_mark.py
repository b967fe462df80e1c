"""The stored state of an adoption: what is written is read again."""

from __future__ import annotations

from dataclasses import asdict

from appliance.shared.adopt import AdoptMark, AdoptRequest, SavedInterface
from appliance.shared.records import from_json, from_value, to_json
from tests.unit.adopt.requests import ADOPT


def test_what_is_stored_is_read_again() -> None:
    request = from_value(AdoptRequest, ADOPT)
    assert (request.interfaces[0].moves, request.reset_ports) == (("10.1.0.1/16",), ())
    saved = SavedInterface("bond0", ("10.1.0.1/16 brd +", "10.1.0.9/16"), ("default via 10.1.0.254",), ("10.1.0.254",))
    mark = AdoptMark("released", 7, asdict(request), (saved,), {"stopping": 5.5})
    found = from_json(AdoptMark, to_json(mark))
    assert (found.state, found.interfaces, found.times) == ("released", (saved,), {"stopping": 5.5})
    assert from_value(AdoptRequest, found.request) == request
