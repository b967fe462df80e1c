"""The types of bodies agree with openapi.yaml, which is what validates them."""

from __future__ import annotations

from typing import Any, NotRequired, get_origin, get_type_hints

import pytest
import yaml

from appliance.provision import payloads
from appliance.provision.contract import find_contract

DOCUMENT = yaml.safe_load(find_contract().read_text())
SCHEMAS = DOCUMENT["components"]["schemas"]
IMPORT = SCHEMAS["Import"]["properties"]


def body(method: str, path: str) -> Any:
    return DOCUMENT["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (payloads.Address, SCHEMAS["Interface"]["properties"]["addresses"]["items"]["anyOf"][1]),
        (payloads.Interface, SCHEMAS["Interface"]),
        (payloads.Node, SCHEMAS["Node"]),
        (payloads.Group, IMPORT["groups"]["items"]),
        (payloads.OtherComponent, IMPORT["components"]["items"]),
        (payloads.Endpoint, IMPORT["endpoints"]["items"]),
        (payloads.Boot, IMPORT["boot"]["items"]),
        (payloads.Inventory, SCHEMAS["Import"]),
        (payloads.BootParameters, SCHEMAS["BootParameters"]),
        (payloads.SmdComponent, SCHEMAS["Component"]),
        (payloads.SmdInterface, SCHEMAS["EthernetInterface"]),
        (payloads.FoundInterface, SCHEMAS["Found"]["properties"]["ethernet_interfaces"]["items"]),
        (payloads.Found, SCHEMAS["Found"]),
        (payloads.SmdEndpoint, SCHEMAS["Endpoint"]),
        (payloads.MasterFile, SCHEMAS["MasterFile"]),
        (payloads.Rollback, body("post", "/sms/v1/sync/rollback")),
        (payloads.FileReport, body("post", "/sms/v1/sync/report")),
        (payloads.EnrolRequest, body("post", "/sms/v1/enrol")),
    ],
)
def test_bodies_agree_with_their_schema(kind: Any, schema: Any) -> None:
    hints = get_type_hints(kind, include_extras=True)
    required = {key for key, hint in hints.items() if kind.__total__ and get_origin(hint) is not NotRequired}
    assert set(hints) == set(schema["properties"])
    assert required == set(schema.get("required", ()))
