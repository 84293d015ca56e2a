"""Files: how the files of a run directory are replaced."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

TEMPORARY_SUFFIX = ".new"


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``path`` when the block ends without an exception.

    A process that is killed at any instant leaves the old file or the new one, whole, and maybe a temporary file beside
    it. With ``durable`` that is so after a power loss too. Several processes may replace a file at once: the last one
    wins. Symbolic links are replaced and not followed: a run directory may come from somebody else.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            if durable:  # the content first: a file system may write the new name to the disk before it
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Write the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporary(path: Path) -> None:
    """Remove what processes left that were killed while they replaced ``path``. No process may replace it meanwhile."""
    for temporary in path.parent.glob(f"{path.name}.*{TEMPORARY_SUFFIX}"):
        temporary.unlink(missing_ok=True)
