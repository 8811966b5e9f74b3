"""Raises the limit of open files of this process, and returns the maximum number of connections."""

import contextlib

try:
    import resource
except ImportError:  # Systems without limits of this kind.
    resource = None

# Reserved for files of the store, models and adapters, which must open when all connections are in use.
RESERVED_FILES = 256
_MOST_CONNECTIONS = 4096
_LEAST_CONNECTIONS = 16


def raise_open_files() -> None:
    """Raises the limit of open files to the hard limit."""
    if resource is not None:
        with contextlib.suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """Maximum number of concurrent connections of a server that leaves enough files for everything else."""
    if resource is None:
        return _MOST_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(_LEAST_CONNECTIONS, min(_MOST_CONNECTIONS, files - RESERVED_FILES))
