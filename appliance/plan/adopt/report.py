"""The report of a survey: what is in the written site, and what to do about the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from appliance.catalog import Service
from appliance.plan.adopt.model import Survey

TITLES = {
    "left": "Not in the site",
    "check": "To be checked",
    "carried": "In the site",
}


def report_text(survey: Survey, problems: Sequence[str] = ()) -> str:
    """Return REPORT.md.

    Args:
        problems: what the site reader does not accept of the written file.
    """
    lines = [f"# What `sms survey` found on {survey.host}", ""]
    lines += [f"- sms.yaml is not accepted yet: {problem}" for problem in problems]
    for state, title in TITLES.items():
        found = [one for one in survey.findings if one.carried == state]
        lines += ["", f"## {title} ({len(found)})", ""]
        for one in found:
            source = f" ({one.source})" if one.source else ""
            lines.append(f"- {one.area}: {_inline(one.what)}{source}{f': {one.todo}' if one.todo else ''}")
    return "\n".join(lines) + "\n"


def _inline(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>#|" else letter for letter in text)


def survey_json(survey: Survey) -> str:
    """Return survey.json."""
    return json.dumps(survey.model_dump(), indent=2) + "\n"


def schema_text() -> str:
    """Return the JSON Schema of survey.json."""
    body = Survey.model_json_schema(mode="serialization")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", **body, "title": "survey.json"}
    return json.dumps({**head, "description": "What `sms survey` found on a live management node."}, indent=2) + "\n"


def compare(survey: Survey, verdicts: Mapping[str, str], services: Mapping[str, Service]) -> Iterator[tuple[str, str]]:
    """Yield the differences between what runs and what a capture shows: what, and what to do.

    Args:
        verdicts: time-critical or deferrable, by service.
    """
    running = set(survey.services)
    for name, verdict in verdicts.items():
        known = services.get(name)
        if name not in running and verdict == "time-critical":
            yield f"{name} is time-critical in the capture, but was not found here", "does another machine serve it?"
        elif known and not known.container and verdict == "time-critical":
            yield f"{name} is time-critical, and the container cannot run it", known.advice
    for name in sorted(running - verdicts.keys()):
        if services[name].ports and services[name].container:
            yield f"{name} runs, but the capture does not show it", "capture for longer, or is it not used?"
