"""How many files and sockets a process may have open.

Owns the raising of the soft limit, which many systems set to 1,024 for the sake of programs that
use select: a front has a socket for each connection.
"""

import resource

ENOUGH = 65_536


def allow_many_descriptors() -> int:
    """Raise the soft limit towards the hard one, to 65,536 at most; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH:
        return soft
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else max(soft, min(hard, ENOUGH))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
