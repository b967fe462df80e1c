"""What each page of the documents needs, so that its commands run in a lab."""

from __future__ import annotations

from tests.real.blocks import MACHINE, Page

FIRST_DAY = Page(
    "admin",
    hooks={
        # The images of the tests are signed with the lab's key, which another one replaces for a moment only.
        "test -e /etc/sms/keys/sign.pem": (("admin", "rm /etc/sms/keys/sign.pem /etc/sms/keys/sign.pub"),),
        "sms host prepare host-a": (
            ("admin", "test -s /etc/sms/keys/sign.pem"),
            (MACHINE, "cp /var/lib/sms-lab/.signing/sign.* /var/lib/sms-lab/lab/etc-sms/keys"),
        ),
    },
    names={"^sms build\\b": "sms lab exec admin -- sms build"},
    places={"sms lab ": MACHINE},
)
"""The page has a lab of its own."""
ROUTED = {
    "lab up --nodes 3": "lab up --nodes 3 --shape routed",
    r'"10\.77\.0\.\[101-102\]"': '"10.100.0.[101-102]"',
    "provisioning: {": "provisioning: {routes: [{network: 10.100.0.0/17, gateway: 10.77.0.254}], ",
}
"""What it says is different where nodes are behind a router."""
