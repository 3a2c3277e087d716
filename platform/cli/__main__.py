"""Run the command line: `python -m dbo.platform.cli`."""

from dbo.platform.cli.main import main

main()
