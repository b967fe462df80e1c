"""Power a lab host off and on, as `sms lab power` does."""

from __future__ import annotations

from appliance.lab import Lab, power


def power_off(lab: Lab, host: str) -> None:
    """End a host abruptly."""
    power.power_off(lab.name, host)


def power_on(lab: Lab, host: str) -> None:
    """Start a powered-off host; the opened lab knows it afterwards."""
    lab._pids[host] = power.power_on(lab.name, host)
