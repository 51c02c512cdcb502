"""The limit of open files and sockets of a process.

Raises the soft limit, which many systems set to 1,024 for programs that use select; a front needs a
socket for each connection.
"""

import resource

ENOUGH = 65_536


def allow_many_descriptors() -> int:
    """Raise the soft limit towards the hard one, to 65,536 at most; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH:
        return soft
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else max(soft, min(hard, ENOUGH))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
