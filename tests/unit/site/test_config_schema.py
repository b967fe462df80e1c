"""The JSON Schema accepts the starter files, rejects what the reader rejects, and is checked in."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import yaml

from appliance.config.model import Site
from appliance.config.read import read_model
from appliance.config.schema import make_schema, schema_text
from appliance.errors import ConfigError
from appliance.share import share

PROFILES = ("lab", "openhpc", "cray-ex")


def _profile(name: str) -> Any:
    return yaml.safe_load(share("definitions", "profiles", f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", PROFILES)
def test_starter_files_are_valid(name: str) -> None:
    jsonschema.validate(_profile(name), make_schema(), cls=jsonschema.Draft202012Validator)


def test_it_is_a_schema_itself() -> None:
    jsonschema.Draft202012Validator.check_schema(make_schema())


BAD: dict[str, dict[str, Any]] = {
    "unknown key": {"clustre": "x"},
    "unknown key below": {"mail": {"relais": "x"}},
    "wrong pattern": {"cluster": "Not a name"},
    "half a time": {"slurm": {"partitions": [{"name": "a", "max_time": "INFINITEx"}]}},
    "out of range": {"overlay": {"size_mb": 1}},
    "wrong kind": {"admin_hosts": "host-a"},
    "empty list": {"admin_hosts": []},
    "wrong union": {"services": {"form": "x"}},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_refuses_what_the_reader_refuses(change: dict[str, Any]) -> None:
    values = _profile("lab") | change
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, make_schema(), cls=jsonschema.Draft202012Validator)
    with pytest.raises(ConfigError):
        read_model(yaml.safe_dump(values), "sms.yaml", Site)


def test_every_object_refuses_unknown_keys_and_every_key_is_described() -> None:
    schema: dict[str, Any] = make_schema()
    for part in (schema, *schema["$defs"].values()):
        assert part["additionalProperties"] is False
        for name, field in part["properties"].items():
            described = field.get("description") or "$ref" in field
            assert described, name


def test_the_checked_in_copy_is_up_to_date() -> None:
    copy = share("docs", "sms.schema.json")
    if not share("pyproject.toml").exists():
        pytest.skip("docs/ is in a checkout only")
    assert copy.read_text() == schema_text(), "run: sms config schema > docs/sms.schema.json"
