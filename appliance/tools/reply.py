"""What an agent replies with: data of another machine, checked before anything reads it."""

from __future__ import annotations

from typing import Any

from appliance.errors import SmsError
from appliance.shared.records import check_value
from appliance.shared.results import Fields

ENDED_HINT = "run the command again: it cleans up or resumes what was left"


class Reply(dict[str, Any]):
    """A message or result of an agent: the fields that it has are of the types of ``Fields``."""

    def __init__(self, host: str, message: Any) -> None:
        """Check it.

        Raises:
            RecordError: a field has another type.
        """
        super().__init__(check_value(Fields, message))
        self.host = host

    def __missing__(self, name: str) -> Any:
        raise SmsError(f"{self.host}: the reply of the agent there has no {name}", hint=ENDED_HINT)
