"""Open files that others may have replaced by a device or a pipe."""

import errno
import os
import stat


def open_regular(path: str, flags: int) -> int:
    """Open a file for `open(opener=…)`; a device or a pipe, which may never end, is an OSError."""
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(number, os.strerror(number) if number == errno.EISDIR else "not a regular file", path)
