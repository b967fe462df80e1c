"""Redfish, DMTF's interface to management controllers: only what switches a machine off for sure. Standard library."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from appliance.errors import SmsError

SYSTEMS = "/redfish/v1/Systems"
ACTION = "#ComputerSystem.Reset"
OFF = "Off"
ANSWER_S = 15
"""Seconds until a controller that says nothing counts as silent; some take ten to wake up."""
LOOK_S = 1
MOST_BYTES = 1 << 20
"""Of an answer: it may be from somebody else."""


@dataclass(frozen=True)
class Controller:
    """A management controller. ``url`` may have the path of the one system that is meant."""

    url: str
    user: str
    password: str
    ca: Path | None = None
    insecure: bool = False

    def ask(self, method: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        """The answer's JSON; an empty object where there is none.

        Raises:
            SmsError: it does not answer, not well, or is not to be trusted. The password is in no message.
        """
        where = urlsplit(self.url)
        link = http.client.HTTPSConnection(where.hostname or "", where.port, timeout=ANSWER_S, context=self._trust())
        login = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        headers = {"Authorization": f"Basic {login}", "Accept": "application/json", "OData-Version": "4.0"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            link.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = link.getresponse()
            said = answer.read(MOST_BYTES)
        except ssl.SSLCertVerificationError as error:
            raise SmsError(
                f"{where.netloc}: its certificate is not to be trusted: {error.verify_message}",
                hint="name the CA that signed it as fence.redfish.ca",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise SmsError(
                f"{where.netloc} does not answer: {error}", hint="is it the controller's address?"
            ) from error
        finally:
            link.close()
        # A redirection is not followed: the password is for this controller alone.
        if not 200 <= answer.status < 300:
            raise SmsError(
                f"{where.netloc}: {method} {path}: {answer.status} {answer.reason}", hint=_why(answer.status)
            )
        return _object(said, f"{where.netloc}: {method} {path}")

    def _trust(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        except OSError as error:
            raise SmsError(f"{self.ca} cannot be read as a CA: {error}", hint="see fence.redfish.ca") from error
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def find_system(self) -> str:
        """The path of the system: the URL's own, or that of the only one there.

        Raises:
            SmsError: there are none, or several.
        """
        path = urlsplit(self.url).path.rstrip("/")
        if path.startswith(f"{SYSTEMS}/"):
            return path
        members = self.ask("GET", SYSTEMS).get("Members")
        paths = [str(one.get("@odata.id", "")) for one in members or [] if isinstance(one, dict)]
        if len(paths) != 1 or not paths[0].startswith("/"):
            raise SmsError(
                f"{self.url} has {len(paths)} systems: {', '.join(paths)[:300]}",
                hint="name the one that is meant behind the URL: https://bmc/redfish/v1/Systems/1",
            )
        return paths[0]


def _why(status: int) -> str:
    return "are fence.redfish.user and the password right?" if status in (401, 403) else ""


def _object(said: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(said or b"{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SmsError(f"{what}: the answer is no Redfish", hint="is it the controller's address?")
    return found


def power_off(controller: Controller, *, timeout_s: float) -> None:
    """Switch it off, at once, and wait until the controller says that it is.

    Raises:
        SmsError: it is not known to be off.
    """
    path = controller.find_system()
    deadline = time.monotonic() + timeout_s
    system = controller.ask("GET", path)
    if system.get("PowerState") != OFF:
        action = (system.get("Actions") or {}).get(ACTION) or {}
        target = str(action.get("target") or f"{path}/Actions/ComputerSystem.Reset")
        if not target.startswith("/"):
            raise SmsError(f"{controller.url}: a reset leads to {target[:200]}", hint="is it the controller's address?")
        controller.ask("POST", target, {"ResetType": "ForceOff"})
    while True:
        late = time.monotonic() > deadline
        try:
            state = controller.ask("GET", path).get("PowerState")
        except SmsError:
            if late:
                raise
            state = None  # controllers are slow to answer while they switch
        if state == OFF:
            return
        if late:
            raise SmsError(f"{controller.url}: after {timeout_s:g} s its power is {state}", hint="look at the machine")
        time.sleep(LOOK_S)
