"""Raises the number of files that this process may have open, and says how many may be connections."""

import contextlib

try:
    import resource
except ImportError:  # Systems without limits of this kind.
    resource = None

# For the files of the store, models and adapters, which must open when all connections are taken.
RESERVED_FILES = 256
_MOST_CONNECTIONS = 4096
_LEAST_CONNECTIONS = 16


def raise_open_files() -> None:
    """Raises the limit of open files to the most that the system lets this process have."""
    if resource is not None:
        with contextlib.suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """How many connections a server may have open at a time, so that files are left for everything else."""
    if resource is None:
        return _MOST_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(_LEAST_CONNECTIONS, min(_MOST_CONNECTIONS, files - RESERVED_FILES))
