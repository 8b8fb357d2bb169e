"""Every kind of call that a server makes for its clients, through a mount, to be run as root:
systemd's unit of the server must not forbid any. Usage: systemd_calls.py DIRECTORY"""

import fcntl
import os
import stat
import struct
import sys

CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)  # net_bind_service, effective
NOBODY = 0xFFFFFFFF
# Version, then tag, rights and id of each entry: user::rw-, user:1001:r--, group::r--, mask, other.
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry)
    for entry in [(1, 6, NOBODY), (2, 4, 1001), (4, 4, NOBODY), (16, 4, NOBODY), (32, 4, NOBODY)]
)
GET_FLAGS = 0x80086601  # linux/fs.h, FS_IOC_GETFLAGS


def locks():
    with open("file", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX)


def as_user():
    pid = os.fork()
    if pid == 0:
        os.setgroups([1002])
        os.setgid(1001)
        os.setuid(1001)
        os.close(os.open("user's", os.O_CREAT | os.O_WRONLY))
        found = os.stat("user's")
        os._exit((found.st_uid, found.st_gid) != (1001, 1001))
    assert os.waitpid(pid, 0)[1] == 0


def flags():
    with open("file") as file:
        fcntl.ioctl(file, GET_FLAGS, bytes(8))


def sync():
    with open("file", "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 8192)
        os.fsync(file.fileno())


CALLS = {
    "create": lambda: os.close(os.open("file", os.O_CREAT | os.O_RDWR)),
    "chown": lambda: os.chown("file", 1000, 1000),
    "set-id bits": lambda: os.chmod("file", 0o6755),
    "a character device": lambda: os.mknod("null", stat.S_IFCHR | 0o666, os.makedev(1, 3)),
    "a block device": lambda: os.mknod("block", stat.S_IFBLK | 0o600, os.makedev(7, 0)),
    "a FIFO": lambda: os.mkfifo("fifo"),
    "links": lambda: (os.symlink("file", "soft"), os.link("file", "hard")),
    "user.*": lambda: os.setxattr("file", "user.one", b"1"),
    "trusted.*": lambda: os.setxattr("file", "trusted.one", b"1"),
    "capabilities": lambda: os.setxattr("file", "security.capability", CAPABILITY),
    "an ACL": lambda: os.setxattr("file", "system.posix_acl_access", ACL),
    "times": lambda: os.utime("file", (1, 2)),
    "a size": lambda: os.truncate("file", 100),
    "space, and a sync": sync,
    "rename": lambda: os.rename("hard", "harder"),
    "a file without a name": lambda: os.close(os.open(".", os.O_TMPFILE | os.O_RDWR)),
    "locks": locks,
    "flags": flags,
    "another user": as_user,
    "statfs": lambda: os.statvfs("."),
    "removal": lambda: [os.unlink(name) for name in os.listdir(".")],
}


def main():
    os.chdir(sys.argv[1])
    os.makedirs("calls", exist_ok=True)
    os.chmod("calls", 0o777)
    os.chdir("calls")
    failed = 0
    for name, call in CALLS.items():
        try:
            call()
        except (OSError, AssertionError) as error:
            print(f"{name}: {error!r}")
            failed += 1
    sys.exit(1 if failed else 0)


main()
