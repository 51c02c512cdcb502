"""`python -m penstock.server.cli`: the same as `penstock`."""

import sys

from penstock.server.cli import main

if __name__ == "__main__":
    sys.exit(main())
