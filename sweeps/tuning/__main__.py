"""Run the search for step sizes: `python -m dbo.sweeps.tuning`."""

import sys

from dbo.platform.config.terminal import escape_control
from dbo.platform.errors import InputError
from dbo.sweeps.tuning.command import app

try:
    app()
except InputError as error:
    print(f"dbo: {escape_control(str(error))}", file=sys.stderr)
    sys.exit(2)
