"""Work with names and attributes, each kind by a function. Whatever is applied twice, or not at
all, shows in the next call."""

import ctypes
import errno
import os
import stat

from calls import Complaint, same

NOREPLACE, EXCHANGE = 1, 2
AT_FDCWD, AT_SYMLINK_FOLLOW = -100, 0x400
# POSIX ACL of version 2: owner rw, user 7 r, group r, mask r, others nothing.
ACL = bytes.fromhex(
    "02000000" "01000600ffffffff" "0200040007000000" "04000400ffffffff" "10000400ffffffff"
    "20000000ffffffff"
)  # fmt: skip


def absent(c, path):
    try:
        c.do("lookup", os.lstat, path)
    except FileNotFoundError:
        return
    raise Complaint(f"{path.decode()} is there")


def lookup(c):
    there = c.make("there", b"12345")
    for number in c.rounds():
        same(c.do("lookup", os.stat, there).st_size, 5, "size")
        absent(c, c.mine(f"absent{number}"))
        c.sys("access", "access", there, os.R_OK)
        c.do("statfs", os.statvfs, there)


def getattr_(c):
    path = c.make("file")
    descriptor = c.open(path, os.O_RDWR)
    for number in c.rounds():
        c.sys("truncate", "truncate", c.theirs("file"), number % 5000)
        same(c.do("getattr", os.fstat, descriptor).st_size, number % 5000, "size")
    c.close(descriptor)


def attributes(c):
    path, other = c.make("file"), c.theirs("file")
    descriptor = c.open(path, os.O_RDWR)
    for number in c.rounds():
        mode, owner, group = 0o600 | number % 64, number % 1000, number % 999
        c.sys("chmod", "chmod", path, mode)
        c.sys("chown", "lchown", path, owner, group)
        times = (ctypes.c_long * 4)(number, 5, number + 1, 999_999_999)
        c.sys("utimens", "utimensat", AT_FDCWD, path, times, 0)
        found = c.do("lookup", os.stat, other)
        wanted = (mode, owner, group, number * 10**9 + 5, (number + 2) * 10**9 - 1)
        found = (
            stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid,
            found.st_atime_ns, found.st_mtime_ns,
        )  # fmt: skip
        same(found, wanted, "attributes")
        c.sys("ftruncate", "ftruncate", descriptor, number % 7777)
        same(c.do("lookup", os.stat, other).st_size, number % 7777, "size")
    c.close(descriptor)


def mknod(c):
    kinds = [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFREG]
    for number in c.rounds():
        kind, name = kinds[number % 4], f"node{number}"
        words = c.mine(name), kind | 0o600, os.makedev(1, 3) if kind == stat.S_IFCHR else 0
        c.sys("mknod", "mknod", *words)
        same(stat.S_IFMT(c.do("lookup", os.lstat, c.theirs(name)).st_mode), kind, "kind")
        c.fails(errno.EEXIST, "mknod", "mknod", *words)
        c.sys("unlink", "unlink", c.mine(name))
        absent(c, c.theirs(name))


def directories(c):
    for number in c.rounds():
        name = f"dir{number}"
        c.sys("mkdir", "mkdir", c.mine(name), 0o755)
        c.fails(errno.EEXIST, "mkdir", "mkdir", c.theirs(name), 0o755)
        c.sys("rmdir", "rmdir", c.mine(name))
        c.fails(errno.ENOENT, "rmdir", "rmdir", c.theirs(name))


def files(c):
    for number in c.rounds():
        name = f"file{number}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        # As git writes: what could not be opened so again.
        descriptor = c.open(c.mine(name), flags, 0o444, "create-excl")
        c.fails(errno.EEXIST, "create-excl", "open", c.theirs(name), flags, 0o444)
        c.write(descriptor, b"once", 0)
        c.close(descriptor)
        same(c.content(c.theirs(name)), b"once", "content")
        c.sys("unlink", "unlink", c.mine(name))
        c.fails(errno.ENOENT, "unlink", "unlink", c.theirs(name))


def symlinks(c):
    buffer = ctypes.create_string_buffer(100)
    for number in c.rounds():
        name, target = f"link{number}", f"to/{number}".encode()
        c.sys("symlink", "symlink", target, c.mine(name))
        count = c.sys("readlink", "readlink", c.theirs(name), buffer, 100)
        same(buffer.raw[:count], target, "target")
        c.fails(errno.EEXIST, "symlink", "symlink", target, c.mine(name))
        flags = os.O_RDONLY | os.O_NOFOLLOW
        c.fails(errno.ELOOP, "lookup", "open", c.mine(name), flags, 0)
        c.sys("unlink", "unlink", c.mine(name))


def renames(c):
    one, two = c.make("one", b"one"), c.make("two", b"two")
    moved, others = c.mine("moved"), (c.theirs("one"), c.theirs("two"))
    contents = [b"one", b"two"]
    for _ in c.rounds():
        c.sys("rename", "rename", one, moved)
        c.fails(errno.ENOENT, "rename", "rename", one, moved)
        c.fails(errno.EEXIST, "noreplace", "renameat2", -100, moved, -100, two, NOREPLACE)
        c.sys("noreplace", "renameat2", -100, moved, -100, one, NOREPLACE)
        # Twice would be never.
        c.sys("exchange", "renameat2", -100, one, -100, two, EXCHANGE)
        contents.reverse()
        same([c.content(path) for path in others], contents, "contents")
        c.make("new", contents[0])
        c.sys("rename", "rename", c.mine("new"), one)
        absent(c, c.theirs("new"))


def links(c):
    path = c.make("file")
    for number in c.rounds():
        name = f"link{number}"
        c.sys("link", "link", path, c.mine(name))
        c.fails(errno.EEXIST, "link", "link", path, c.mine(name))
        same(c.do("lookup", os.stat, c.theirs("file")).st_nlink, 2, "links")
        c.sys("unlink", "unlink", c.mine(name))
        same(c.do("lookup", os.stat, c.theirs("file")).st_nlink, 1, "links")


def unnamed(c):
    for number in c.rounds():
        flags = os.O_RDWR | os.O_TMPFILE
        descriptor = c.open(c.mine("."), flags, 0o600, "tmpfile")
        c.write(descriptor, b"unnamed", 0)
        here, name = f"/proc/self/fd/{descriptor}".encode(), f"named{number}"
        words = AT_FDCWD, here, AT_FDCWD, c.mine(name), AT_SYMLINK_FOLLOW
        c.sys("linkat", "linkat", *words)
        c.fails(errno.EEXIST, "linkat", "linkat", *words)
        same(c.content(c.theirs(name)), b"unnamed", "content")
        c.close(descriptor)
        c.sys("unlink", "unlink", c.mine(name))


def listing(c):
    wanted = {f"name{number}" for number in range(300)}
    directory = c.mine("many")
    c.sys("mkdir", "mkdir", directory, 0o755)
    for name in wanted:
        c.make(f"many/{name}")
    for number in c.rounds():
        c.make(f"many/other{number}")
        through = directory if number % 2 else c.theirs("many")
        found = c.do("readdir", os.listdir, through)
        same(len(found), 301, "names listed")
        same({name.decode() for name in found} - wanted, {f"other{number}"}, "further names")
        c.sys("unlink", "unlink", c.mine(f"many/other{number}"))
        descriptor = c.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        c.sys("fsyncdir", "fsync", descriptor)
        c.close(descriptor)


def xattrs(c):
    path, other, name = c.make("file"), c.theirs("file"), b"user.census"
    buffer, create, replace = ctypes.create_string_buffer(300), 1, 2
    for number in c.rounds():
        value = b"%d" % number
        c.sys("setxattr", "lsetxattr", path, name, value, len(value), create)
        c.fails(errno.EEXIST, "setxattr", "lsetxattr", path, name, value, len(value), create)
        count = c.sys("getxattr", "lgetxattr", other, name, buffer, 300)
        same(buffer.raw[:count], value, "value")
        c.sys("setxattr", "lsetxattr", path, name, b"", 0, replace)
        count = c.sys("listxattr", "llistxattr", other, buffer, 300)
        if name not in buffer.raw[:count].split(b"\0"):
            raise Complaint(f"{buffer.raw[:count]} are listed")
        c.sys("removexattr", "lremovexattr", path, name)
        c.fails(errno.ENODATA, "removexattr", "lremovexattr", other, name)


def access_lists(c):
    path, other, name = c.make("file"), c.theirs("file"), b"system.posix_acl_access"
    buffer = ctypes.create_string_buffer(300)
    for _ in c.rounds():
        c.sys("acl", "lsetxattr", path, name, ACL, len(ACL), 0)
        count = c.sys("acl", "lgetxattr", other, name, buffer, 300)
        same(buffer.raw[:count], ACL, "access list")
        same(stat.S_IMODE(c.do("lookup", os.stat, other).st_mode), 0o640, "mode")
        c.sys("acl", "lremovexattr", path, name)
        c.fails(errno.ENODATA, "acl", "lgetxattr", other, name, buffer, 300)


def race(c):
    """Both mounts make the same directory and remove it: one of them each time. Answers what
    this one has made and removed."""
    made, removed = [], []
    for number in c.rounds():
        c.not_far_ahead(number, 20)
        for done, call, words, at, refused in (
            (made, "mkdir", (0o755,), number, errno.EEXIST),
            (removed, "rmdir", (), number - 50, errno.ENOENT),
        ):
            if at < 0:
                continue
            try:
                c.sys(call, call, c.mine(f"race{at}"), *words)
                done.append(at)
            except OSError as error:
                if error.errno != refused:
                    raise
    return {"made": made, "removed": removed}


WORK = [
    lookup, getattr_, attributes, mknod, directories, files, symlinks, renames, links, unnamed,
    listing, xattrs, access_lists,
]  # fmt: skip
# Of two workers in one directory, with what both have to answer for in the end.
TOGETHER = [race]
