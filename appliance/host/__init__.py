"""Hosts on which verbs run commands: this machine, another over SSH, a namespace of the lab."""

import sys
from typing import Any, cast

# paramiko imports it for `Match exec` of SSH's configuration, which is not read here: that is a third of its import.
cast("dict[str, Any]", sys.modules).setdefault("invoke", None)
