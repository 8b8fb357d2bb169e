"""Work with data and locks, each kind by a function."""

import ctypes
import errno
import fcntl
import mmap
import os
import random
import shutil
import subprocess

from calls import PAGE, Complaint, lock_range, same

SIZE = 1 << 20
PUNCH, ZERO, KEEP_SIZE = 2, 0x10, 1
GET_FLAGS, SET_FLAGS, NODUMP = 0x80086601, 0x40086602, 0x40
OFD_GETLK, OFD_SETLKW = 36, 38


def blocks(c, flags, operation, page):
    """Writes and reads of a file, beside what must be there."""
    chance, content = random.Random(c.number), bytearray(SIZE)
    path = c.make("file", bytes(SIZE))
    descriptor = c.open(path, os.O_RDWR | flags, operation="open-direct" if page > 1 else "open")
    memory = mmap.mmap(-1, SIZE)  # aligned, as O_DIRECT may want
    aligned = (ctypes.c_char * SIZE).from_buffer(memory)
    for number in c.rounds():
        longest = SIZE if number % 16 == 0 else 8 * PAGE
        at = chance.randrange(SIZE // page) * page
        count = min(1 + chance.randrange(longest // page), (SIZE - at) // page) * page
        memory[:count] = content[at : at + count] = bytes([number % 251]) * count
        written = c.write_from(operation, descriptor, aligned, count, at)
        same(written, count, "bytes written")
        at = chance.randrange(SIZE // page) * page
        count = min(longest, SIZE - at)
        found = c.sys("read", "pread", descriptor, aligned, count, at)
        same(memory[:found], bytes(content[at : at + count]), f"content at {at}")
        if number % 16 == 0:
            same(c.content(c.theirs("file")), bytes(content), "content seen by the other mount")
    c.close(descriptor)


def writes(c):
    blocks(c, 0, "write", 1)


def direct(c):
    blocks(c, os.O_DIRECT, "write", PAGE)


def synced(c):
    blocks(c, os.O_SYNC, "write-sync", 1)


def truncated(c):
    """Opens that cut, and files that come and go between two opens."""
    path = c.make("file", b"before")
    for number in c.rounds():
        text = b"%d" % number
        descriptor = c.open(path, os.O_WRONLY | os.O_TRUNC, operation="open-trunc")
        same(c.do("lookup", os.stat, c.theirs("file")).st_size, 0, "size")
        c.write(descriptor, text, 0)
        c.sys("fsync", "fsync", descriptor)
        c.sys("fsync", "fdatasync", descriptor)
        c.close(descriptor)
        same(c.content(c.theirs("file")), text, "content")


def allocated(c):
    path = c.make("file", b"x" * 4 * PAGE)
    descriptor = c.open(path, os.O_RDWR)
    for _ in c.rounds():
        c.write(descriptor, b"x" * 4 * PAGE, 0)
        c.sys("fallocate", "fallocate", descriptor, PUNCH | KEEP_SIZE, PAGE, PAGE)
        wanted = b"x" * PAGE + bytes(PAGE) + b"x" * 2 * PAGE
        same(c.content(c.theirs("file")), wanted, "content")
        same(c.sys("lseek", "lseek", descriptor, 0, os.SEEK_HOLE), PAGE, "first hole")
        same(c.sys("lseek", "lseek", descriptor, PAGE, os.SEEK_DATA), 2 * PAGE, "data behind it")
        c.sys("fallocate", "fallocate", descriptor, 0, 5 * PAGE, PAGE)
        same(c.do("getattr", os.fstat, descriptor).st_size, 6 * PAGE, "size")
        c.sys("ftruncate", "ftruncate", descriptor, 4 * PAGE)
    c.close(descriptor)


def copied(c):
    path = c.make("from", b"")
    source, target = c.open(path, os.O_RDWR), c.open(c.make("to"), os.O_RDWR)
    for number in c.rounds():
        text = b"%d," % number * 1000
        c.sys("ftruncate", "ftruncate", source, 0)
        c.write(source, text, 0)
        begin, to = ctypes.c_int64(0), ctypes.c_int64(7)
        words = ctypes.byref(begin), target, ctypes.byref(to), len(text), 0
        same(c.sys("copy", "copy_file_range", source, *words), len(text), "bytes copied")
        found = c.content(c.theirs("to"))
        same(found[7 : 7 + len(text)], text, "copy")
    c.close(source)
    c.close(target)


def deleted(c):
    for number in c.rounds():
        name = f"gone{number}"
        descriptor = c.open(c.mine(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, "create-excl")
        c.sys("unlink", "unlink", c.mine(name))
        for at in range(5):
            c.write(descriptor, b"%d" % at, at)
            same(c.read(descriptor, 10, 0), b"01234"[: at + 1], "content")
        same(c.do("getattr", os.fstat, descriptor).st_nlink, 0, "names")
        c.close(descriptor)


def mapped(c):
    descriptor = c.open(c.make("file", bytes(2 * PAGE)), os.O_RDWR)
    memory = mmap.mmap(descriptor, 2 * PAGE)
    for number in c.rounds():
        text = b"%d" % number
        memory[PAGE : PAGE + len(text)] = text
        c.do("mmap", memory.flush)
        same(c.content(c.theirs("file"))[PAGE : PAGE + len(text)], text, "what was stored")
    c.do("mmap", memory.close)
    c.close(descriptor)


def flags(c):
    descriptor = c.open(c.make("file"), os.O_RDWR)
    buffer = ctypes.c_long(0)
    for number in c.rounds():
        c.sys("ioctl", "ioctl", descriptor, GET_FLAGS, ctypes.byref(buffer))
        wanted = NODUMP if number % 2 else 0
        buffer.value = buffer.value & ~NODUMP | wanted
        c.sys("ioctl", "ioctl", descriptor, SET_FLAGS, ctypes.byref(buffer))
        c.sys("ioctl", "ioctl", descriptor, GET_FLAGS, ctypes.byref(buffer))
        same(buffer.value & NODUMP, wanted, "flags")
    c.close(descriptor)


def programs(c):
    shutil.copy("/bin/true", c.mine("program"))
    for _ in c.rounds(0.05):
        same(c.do("exec", subprocess.call, [c.mine("program")]), 0, "exit code")


def append(c):
    """Both mounts append to one log. Answers how many lines are its own."""
    path, count = c.mine("log"), 0
    descriptor = c.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, operation="create")
    for count in c.rounds():
        line = b"%d:%d:%s;" % (c.number, count, b"." * (count % 50))
        written = c.sys("append", "write", descriptor, line, len(line))
        same(written, len(line), "bytes written")
        if count % 100 == 99:
            c.close(descriptor)
            descriptor = c.open(path, os.O_WRONLY | os.O_APPEND)
    c.close(descriptor)
    return {"lines": c.shared.rounds[c.number], "worker": c.number}


def counts(c, operation, lock, unlock):
    """Both mounts count in one file under a lock. Answers how far this one has counted."""
    flags = os.O_RDWR | os.O_CREAT
    descriptor = c.open(c.mine("counter"), flags, operation="create")
    other = c.open(c.theirs("counter"), flags)
    for number in c.rounds():
        lock(c, descriptor)
        count = int(c.read(descriptor, 20, 0) or b"0")
        c.write(descriptor, b"%020d" % (count + 1), 0)
        if number % 8 == 0 and operation != "fcntl":
            refused(c, operation, other)
        unlock(c, descriptor)
    c.close(other)
    c.close(descriptor)
    return {"count": c.shared.rounds[c.number]}


def refused(c, operation, other):
    """Who comes through the other mount does not get what is locked here."""
    if operation == "flock":
        c.fails(errno.EAGAIN, "flock", "flock", other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    wanted = lock_range(fcntl.F_WRLCK, 0, 0)
    c.sys("getlk", "fcntl", other, OFD_GETLK, wanted)
    if wanted.raw[:2] == bytes([fcntl.F_UNLCK, 0]):
        raise Complaint("nobody has the lock that we have")


def flock(c):
    def change(how):
        return lambda c, descriptor: c.sys("flock", "flock", descriptor, how)

    return counts(c, "flock", change(fcntl.LOCK_EX), change(fcntl.LOCK_UN))


def ranges(operation, command):
    def change(kind):
        return lambda c, descriptor: c.sys(
            operation, "fcntl", descriptor, command, lock_range(kind, 5, 10)
        )

    return change(fcntl.F_WRLCK), change(fcntl.F_UNLCK)


def process_locks(c):
    return counts(c, "fcntl", *ranges("fcntl", fcntl.F_SETLKW))


def file_locks(c):
    return counts(c, "ofd", *ranges("ofd", OFD_SETLKW))


WORK = [
    writes, direct, synced, truncated, allocated, copied, deleted, mapped, flags, programs,
]  # fmt: skip
TOGETHER = [append, flock, process_locks, file_locks]
