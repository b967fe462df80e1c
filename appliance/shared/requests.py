"""Requests that change a file on a host: typed records, performed in one process there."""

from __future__ import annotations

from typing import Union

from appliance.shared.history import AppendLine
from appliance.shared.lease import SwapLease
from appliance.shared.overlay import MarkOverlay

Request = Union[SwapLease, AppendLine, MarkOverlay]
KINDS: dict[str, type[Request]] = {
    "SwapLease": SwapLease,
    "AppendLine": AppendLine,
    "MarkOverlay": MarkOverlay,
}
"""By the name that identifies a request when it is sent."""
