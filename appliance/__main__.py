"""``python -m appliance`` is ``sms``."""

import sys

from appliance.cli import main

sys.exit(main())
