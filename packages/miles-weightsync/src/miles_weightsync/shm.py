"""Shared-memory segments with an owner: files in /dev/shm that never outlive the process that made them for long.

A segment is made without a name, locked, filled with zeros, and only then linked. The lock is held as long as the owner
lives, whatever its pid namespace, so a file that can be locked is stale. Extra names (hard links) are cheap: each
reader gets its own, because PyTorch's memory manager in a reader unlinks the name it opened when that reader dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import struct
import threading
import weakref
from pathlib import Path

from .errors import StagingError

SHM_DIR = "/dev/shm"
PREFIX = "miles-weightsync-"
HEADER_BYTES = 64
"""PyTorch keeps a reference count at the start of a named shared storage; the data begin here (ATen `MapAllocator`)."""


def shm_free_bytes() -> int:
    """Bytes that can still be allocated in /dev/shm."""
    stats = os.statvfs(SHM_DIR)
    return stats.f_bavail * stats.f_frsize


def required_bytes(*, bucket_bytes: int, model_bytes: int, largest_tensor_bytes: int = 0) -> int:
    """Shared memory that a push of this model needs: two buckets, or one if all fits in it."""
    bucket = max(min(bucket_bytes, model_bytes), largest_tensor_bytes) + HEADER_BYTES
    return bucket if model_bytes <= bucket_bytes else 2 * bucket


class Segment:
    """A mapped piece of shared memory. The owner creates it, others on the host attach by name."""

    def __init__(self, *, fd: int, name: str, nbytes: int, owned: bool) -> None:
        self.name = name
        self.nbytes = nbytes
        """Bytes of data, header not counted."""
        self.memory = mmap.mmap(fd, HEADER_BYTES + nbytes)
        self._fd = fd
        self.num_writers = 0
        """Threads of this process that have entered."""
        self._writers_lock = threading.Lock()
        self._links: set[str] = set()
        # Runs on close, on garbage collection and at interpreter exit: no path leaves a name behind.
        self._finalize = weakref.finalize(self, _release, os.getpid(), fd, name if owned else None, self._links)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Reserve memory and give it a name that no other process has.

        Raises:
            StagingError: /dev/shm has too little space; says how much is needed and free.
        """
        fd = os.open(SHM_DIR, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if HEADER_BYTES + nbytes > shm_free_bytes():  # asked first: the kernel takes all that is free, then refuses
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Reserved now: writing into a sparse file on a full tmpfs would kill the process with SIGBUS.
            os.posix_fallocate(fd, 0, HEADER_BYTES + nbytes)
            name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
            _link(fd, name)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.ENOSPC:
                raise
            raise StagingError(
                f"A weight bucket needs {HEADER_BYTES + nbytes} bytes of {SHM_DIR} but {shm_free_bytes()} are free. "
                "Enlarge it (docker run --shm-size=…, or mount -o remount,size=… /dev/shm) or lower `bucket_bytes`."
            ) from None
        segment = cls(fd=fd, name=name, nbytes=nbytes, owned=True)
        segment.reset_count()
        return segment

    @classmethod
    def attach(cls, name: str, nbytes: int) -> Segment:
        """Map a segment that another process on this host owns."""
        try:
            fd = os.open(os.path.join(SHM_DIR, name), os.O_RDWR)
        except OSError as error:
            raise StagingError(f"Cannot open shared memory {SHM_DIR}/{name}: {error.strerror}.") from None
        return cls(fd=fd, name=name, nbytes=nbytes, owned=False)

    def reset_count(self) -> None:
        """Make PyTorch's reference count so high that no reader ever takes it to zero and unlinks the name."""
        self.memory[:4] = (1 << 30).to_bytes(4, "little")

    def link(self) -> str:
        """A further name for the same memory, for one reader of one push."""
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        _link(self._fd, name)
        self._links.add(name)
        return name

    def unlink(self) -> None:
        """Remove the readers' names. Mappings that readers still hold stay valid."""
        while self._links:
            _unlink(self._links.pop())

    def enter(self) -> None:
        """Say that this process writes, until `leave`. May be called by several threads."""
        with self._writers_lock:
            if self.num_writers == 0:
                _record_lock(self._fd, fcntl.F_OFD_SETLK, fcntl.F_RDLCK)
            self.num_writers += 1

    def leave(self) -> None:
        """A thread of this process has stopped writing."""
        with self._writers_lock:
            self.num_writers -= 1
            if self.num_writers == 0:
                _record_lock(self._fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK)

    @property
    def has_writers(self) -> bool:
        """Another holder of this segment has entered and not left; the kernel counts a process that died as left."""
        return _record_lock(self._fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK) != fcntl.F_UNLCK

    @property
    def owner_is_dead(self) -> bool:
        """Nobody will read this memory. For those who attached."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Remove every name and give the memory back once no tensor looks at it."""
        self._finalize()
        with contextlib.suppress(BufferError):  # a tensor still looks at it: freed when that one goes
            self.memory.close()


def clean_stale() -> list[str]:
    """Remove segments whose owner is dead; returns their names. Safe while other owners live."""
    removed: list[str] = []
    for path in Path(SHM_DIR).glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path.name)
        except OSError:  # the owner lives
            pass
        finally:
            os.close(fd)
    return removed


_FLOCK = struct.Struct("hhqqi4x")
"""The C structure `flock` where `off_t` has 64 bits: kind, whence, start, length, pid."""


def _record_lock(fd: int, command: int, kind: int) -> int:
    """Lock the first byte for the open file (so that threads share it), or ask who does.

    Returns:
        The kind of lock that stands in the way (F_OFD_GETLK), or the kind that was set.
    """
    answer = fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, 0, 1, 0))
    return int(_FLOCK.unpack(answer)[0])


def is_linked(name: str) -> bool:
    """Whether a segment still has this name."""
    return os.path.exists(os.path.join(SHM_DIR, name))


def _link(fd: int, name: str) -> None:
    # os.link() follows /proc/self/fd/N to the open file only when it goes through linkat(), hence src_dir_fd.
    fds = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(str(fd), os.path.join(SHM_DIR, name), src_dir_fd=fds, follow_symlinks=True)
    finally:
        os.close(fds)


def _unlink(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # a reader's memory manager removed it
        os.unlink(os.path.join(SHM_DIR, name))


def _release(pid: int, fd: int, name: str | None, links: set[str]) -> None:
    if os.getpid() != pid:  # a forked child ends; the names are its parent's
        return
    for link in links:
        _unlink(link)
    links.clear()
    if name is not None:
        _unlink(name)
    os.close(fd)
