"""Runs the command line of `penstock` for `python -m penstock.tools`."""

import sys

from penstock.tools.command_line import main

if __name__ == "__main__":
    sys.exit(main())
