"""How long the parts of a verb take."""

from __future__ import annotations

from appliance.operations.env import Clock


class Stopwatch:
    """Measures the parts of a start."""

    def __init__(self, parts: dict[str, float], clock: Clock) -> None:
        self.parts = parts
        self.clock = clock
        self.last = clock.monotonic()

    def lap(self, name: str) -> None:
        """Record the time of the part that ends now."""
        now = self.clock.monotonic()
        self.parts[name] = round(now - self.last, 3)
        self.last = now
