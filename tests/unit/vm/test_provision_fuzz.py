"""schemathesis over the contract: no request, valid or invalid, is answered with 500."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
import yaml
from schemathesis import GenerationMode

from appliance.provision.contract import find_contract
from tests.provd import ADMIN, SERVICES, Provd, make_config, running

pytestmark = pytest.mark.slow

EXAMPLES = [pytest.param(20, marks=pytest.mark.full)]
"""Examples of each kind, valid and invalid, per operation."""
SCHEMA = schemathesis.openapi.from_dict(yaml.safe_load(find_contract().read_text()))
FOUND = [found.ok() for found in SCHEMA.get_all_operations()]  # type: ignore[union-attr]  # none is invalid
OPERATIONS = {f"{found.method.upper()} {found.path}": found for found in FOUND}


def as_role(provd: Provd, role: str) -> dict[str, str]:
    """Return the headers of a client with this role."""
    if role != "node":
        return SERVICES if role == "services" else ADMIN
    add_node(provd)  # a request of another test may have removed it
    return provd.as_node("n1")


def add_node(provd: Provd) -> None:
    """Add node n1, with all that a node can have."""
    node = {"macs": ["02:00:0a:4d:00:97"], "address": "10.77.0.151", "xname": "x0c0s0b0n0", "groups": ["compute"]}
    if provd.world.inventory().find_node("n1") is None:
        provd.good("PUT", "/sms/v1/nodes/n1", {**node, "nid": 7})


@pytest.fixture(scope="module")
def provd() -> Iterator[Provd]:
    with tempfile.TemporaryDirectory() as folder, running(make_config(Path(folder))) as found:
        # Create an object of each kind, so that requests find something.
        add_node(found)
        yield found


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_request_causes_a_500(name: str, examples: int, provd: Provd) -> None:
    operation = OPERATIONS[name]
    role = operation.definition.raw.get("x-roles", ["admin"])[0]
    headers = as_role(provd, role)
    session = requests.Session()
    statuses: list[int] = []

    def ask(case: Any) -> None:
        # Do not wait in a long poll.
        if name.endswith("/wait"):
            case.query = {**(case.query or {}), "seconds": 0}
        try:
            response = case.call(base_url=provd.url, headers=headers, session=session, timeout=30)
        except (ValueError, requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL):
            return
        statuses.append(response.status_code)
        assert response.status_code != 500, f"{case.formatted_path} {case.query} {case.body}: {response.text}"
        # The server rejects lines of more than 64 KiB before our code runs.
        if response.status_code >= 400 and response.text not in ("", "Invalid HTTP request received."):
            assert response.headers["content-type"] == ["application/problem+json"], response.text

    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        try:
            strategy = operation.as_strategy(generation_mode=mode)
            settings = hypothesis.settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(hypothesis.HealthCheck),
                phases=[hypothesis.Phase.generate],
            )
            settings(hypothesis.given(strategy)(ask))()
        except hypothesis.errors.Unsatisfiable:
            continue
        except schemathesis.errors.InvalidSchema:
            continue
    assert statuses, "no request was sent"


FIRST = {"integer": "1", "boolean": "true"}
"""A valid value of a query parameter, by its type."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_repeated_parameters_are_rejected(name: str, provd: Provd) -> None:
    """The contract could check one value, and a route read the other."""
    method, _, path = name.partition(" ")
    operation = provd.world.contract.operations[method, path]
    role = operation.roles[0]
    headers = as_role(provd, role)
    filled = re.sub(r"\{\w+\}", "n1", path)
    for parameter in operation.query.keys() - operation.many:
        whole: Any = operation.query[parameter].schema
        schema = whole["allOf"][0]
        right = schema.get("enum", [FIRST.get(schema.get("type"), "1")])[0]
        for other in ("abc", right, "", "-1", "9" * 30, "%00"):
            for pair in (f"{parameter}={right}&{parameter}={other}", f"{parameter}={other}&{parameter}={right}"):
                answer = provd.ask(method, f"{filled}?{pair}", headers=headers)
                assert answer.status == 400, f"{filled}?{pair}: {answer.status}"
                assert f"{parameter}: " in answer.text
