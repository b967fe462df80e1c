"""The JSON Schema of the site file, for editors and other programs."""

from __future__ import annotations

import json

from appliance.config.model import Site


def make_schema() -> dict[str, object]:
    """Return the schema as a mapping."""
    body = Site.model_json_schema(by_alias=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **body,
        "title": "sms.yaml",
        "description": "The site file of sms: one cluster, its admin hosts, its networks and its services.",
    }


def schema_text() -> str:
    """Return the schema as `sms config schema` prints it."""
    return json.dumps(make_schema(), indent=2) + "\n"
