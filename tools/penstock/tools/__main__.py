"""`python -m penstock.tools`: the same as `penstock`."""

import sys

from penstock.tools.command_line import main

if __name__ == "__main__":
    sys.exit(main())
