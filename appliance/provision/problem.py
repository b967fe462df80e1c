"""Errors in the form of RFC 7807, ``application/problem+json``, as in SMD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import TypeVar

from starlette.responses import JSONResponse, Response

from appliance.provision.payloads import Problem

MEDIA_TYPE = "application/problem+json"
Key = TypeVar("Key")
Entry = TypeVar("Entry")


class HttpProblem(Exception):
    """An error response. ``problems`` lists all errors of a body."""

    def __init__(
        self, status: int, detail: str, *, hint: str = "", problems: Sequence[str] = (), retry_s: int | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.hint = status, detail, hint
        self.problems, self.retry_s = tuple(problems), retry_s


bad_request = partial(HttpProblem, 400)
forbidden = partial(HttpProblem, 403)
not_found = partial(HttpProblem, 404)
conflict = partial(HttpProblem, 409)


def find_entry(entries: Mapping[Key, Entry], key: Key, missing: str) -> Entry:
    """Return an entry; 404 with the message ``missing`` if there is none."""
    if key not in entries:
        raise not_found(missing)
    return entries[key]


def answer(problem: HttpProblem) -> Response:
    """Return the response of a problem."""
    body: Problem = {
        "type": "about:blank",
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
    }
    if problem.hint:
        body["hint"] = problem.hint
    if problem.problems:
        body["problems"] = list(problem.problems)
    headers = {"Retry-After": str(problem.retry_s)} if problem.retry_s is not None else None
    return JSONResponse(body, problem.status, headers=headers, media_type=MEDIA_TYPE)
