"""What applications ask the kernel for, counted and timed, without Python's own tries after EINTR.

A worker notes in shared memory what it waits for, so that it can be names which operations were
under way when something went wrong, and who is stuck.
"""

import ctypes
import errno
import multiprocessing
import os
import struct
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

# Numbers of x86-64.
NUMBERS = {
    "read": 0, "write": 1, "open": 2, "close": 3, "lseek": 8, "ioctl": 16, "pread": 17,
    "pwrite": 18, "access": 21, "sendfile": 40, "fcntl": 72, "flock": 73, "fsync": 74,
    "fdatasync": 75, "truncate": 76, "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84,
    "link": 86, "unlink": 87, "symlink": 88, "readlink": 89, "chmod": 90, "lchown": 94,
    "mknod": 133, "lsetxattr": 189, "lgetxattr": 192, "llistxattr": 195, "lremovexattr": 198,
    "linkat": 265, "utimensat": 280, "fallocate": 285, "renameat2": 316, "copy_file_range": 326,
}  # fmt: skip

# Operations of FUSE, as the table shows them; one more: nothing is under way.
OPERATIONS = [
    "lookup", "getattr", "chmod", "chown", "utimens", "truncate", "ftruncate", "mknod", "mkdir",
    "rmdir", "unlink", "symlink", "readlink", "rename", "noreplace", "exchange", "link", "open",
    "open-trunc", "open-direct", "create", "create-excl", "read", "write", "write-sync", "append",
    "flush", "fsync", "fsyncdir", "readdir", "setxattr", "getxattr", "listxattr", "removexattr",
    "acl", "fallocate", "copy", "lseek", "flock", "fcntl", "ofd", "getlk", "ioctl", "statfs",
    "tmpfile", "linkat", "access", "mmap", "exec",
]  # fmt: skip


PAGE = 4096
# Longest read, bytes.
CONTENT_MAX = 1 << 20
# A daemon that was killed has died within this time.
DYING_SECONDS_MAX = 5


class Complaint(Exception):
    """Something is not as it must be."""


class Shared:
    """What workers and the process that watches them know of each other."""

    def __init__(self, workers):
        self.stop = multiprocessing.RawValue("b", 0)
        self.rounds = multiprocessing.RawArray("Q", workers)
        self.operation = multiprocessing.RawArray("b", [-1] * workers)
        self.since = multiprocessing.RawArray("d", workers)
        # Writes that came to memory of a ring which was never used, of each.
        self.cut_short = multiprocessing.RawArray("I", workers)


class Caller:
    """One worker at work in a directory that it sees through two mounts."""

    def __init__(self, shared, number, partner, mine, theirs, over_ring):
        self.shared, self.number, self.partner = shared, number, partner
        self.over_ring = over_ring
        self.mine_dir, self.theirs_dir = mine, theirs
        self.buffer = ctypes.create_string_buffer(CONTENT_MAX)

    def mine(self, name):
        return os.path.join(self.mine_dir, name).encode()

    def theirs(self, name):
        return os.path.join(self.theirs_dir, name).encode()

    def rounds(self, pause_seconds=0.001):
        """Numbers from 0 on until it is time to stop."""
        number = 0
        while not self.shared.stop.value:
            yield number
            number += 1
            self.shared.rounds[self.number] = number
            time.sleep(pause_seconds)

    def not_far_ahead(self, number, most):
        """Waits for the worker that does the same through the other mount."""
        while number > self.shared.rounds[self.partner] + most and not self.shared.stop.value:
            time.sleep(0.002)

    def do(self, operation, call, *words):
        """Calls something of Python's."""
        self.shared.since[self.number] = time.monotonic()
        self.shared.operation[self.number] = OPERATIONS.index(operation)
        try:
            return call(*words)
        finally:
            self.shared.operation[self.number] = -1

    def sys(self, operation, name, *words):
        """A system call. Raises OSError, EINTR included."""
        return self.do(operation, raw, name, *words)

    def fails(self, with_errno, operation, name, *words):
        """A system call that has to fail so."""
        try:
            self.sys(operation, name, *words)
        except OSError as error:
            if error.errno == with_errno:
                return
            raise
        wanted = errno.errorcode[with_errno]
        raise Complaint(f"{name}{words} succeeded, and should have failed with {wanted}")

    def open(self, path, flags, mode=0o644, operation="open"):
        return self.sys(operation, "open", path, flags | os.O_CLOEXEC, mode)

    def close(self, descriptor):
        self.sys("flush", "close", descriptor)

    def make(self, name, content=b""):
        """A file through this mount; answers its name there."""
        path = self.mine(name)
        descriptor = self.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, operation="create")
        self.write(descriptor, content, 0)
        self.close(descriptor)
        return path

    def write(self, descriptor, content, at, operation="write"):
        count = self.write_from(operation, descriptor, content, len(content), at)
        same(count, len(content), "bytes written")

    def write_from(self, operation, descriptor, memory, count, at):
        """A write that may come to memory of a ring which was never used: if the daemon is killed
        at that moment it fails with EINTR (docs/SEMANTICS.md), and is made again. On a busy machine
        the daemon takes a while to die, and the ring takes further writes as long."""
        deadline = None
        while True:
            try:
                return self.sys(operation, "pwrite", descriptor, memory, count, at)
            except InterruptedError:
                # The first page of that memory is always there.
                late = deadline is not None and time.monotonic() > deadline
                if not self.over_ring or count <= PAGE or late:
                    raise
            if deadline is None:
                deadline = time.monotonic() + DYING_SECONDS_MAX
                self.shared.cut_short[self.number] += 1
            time.sleep(0.01)

    def read(self, descriptor, len_bytes, at):
        count = self.sys("read", "pread", descriptor, self.buffer, len_bytes, at)
        return ctypes.string_at(self.buffer, count)

    def content(self, path):
        """What a file holds, to 1 MiB."""
        descriptor = self.open(path, os.O_RDONLY)
        found = self.read(descriptor, CONTENT_MAX, 0)
        self.close(descriptor)
        return found


def raw(name, *words):
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in words]
    found = libc.syscall(ctypes.c_long(NUMBERS[name]), *words)
    if found < 0:
        code = ctypes.get_errno()
        names = [word for word in words if isinstance(word, bytes) and len(word) < 300]
        raise OSError(code, os.strerror(code), b" ".join(names).decode(errors="replace"))
    return found


def same(found, wanted, what):
    if found != wanted:
        raise Complaint(f"{what}: {shown(found)} instead of {shown(wanted)}")


def shown(value):
    text = repr(value)
    return text if len(text) < 200 else f"{text[:150]}... ({len(value)})"


def lock_range(kind, start, len_bytes):
    """A struct flock, writable."""
    fields = struct.pack("hh4xqqi4x", kind, os.SEEK_SET, start, len_bytes, 0)
    return ctypes.create_string_buffer(fields, len(fields))
