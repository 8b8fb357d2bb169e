#!/usr/bin/python3
"""A file system in user space that is slow for each call: a flat directory, passed through.

usage: slow_fs.py SOURCE MOUNTPOINT DELAY_MS

Each read and write takes DELAY_MS, whatever its size, and bypasses the page cache. The extended
attribute user.requests of the root says, in JSON, how many there were, and the sizes of the largest.
Needs python3-pyfuse3. It runs in the foreground, until it is unmounted.
"""

import errno
import json
import os
import stat
import sys

import pyfuse3
import trio

COUNTED = ("read", "write")


class SlowFs(pyfuse3.Operations):
    supports_dot_lookup = True
    enable_writeback_cache = False

    def __init__(self, source, delay_s):
        super().__init__()
        self.delay_s = delay_s
        self.paths = {pyfuse3.ROOT_INODE: source}
        self.requests = {name: {"count": 0, "bytes": 0, "max_bytes": 0} for name in COUNTED}

    def count(self, name, size):
        one = self.requests[name]
        one["count"] += 1
        one["bytes"] += size
        one["max_bytes"] = max(one["max_bytes"], size)

    def path(self, parent, name):
        return os.path.join(os.fsencode(self.paths[parent]), name)

    def attributes(self, path_or_fd):
        try:
            found = os.stat(path_or_fd, **({} if isinstance(path_or_fd, int) else {"follow_symlinks": False}))
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno) from None
        entry = pyfuse3.EntryAttributes()
        for name in ("mode", "nlink", "uid", "gid", "size", "atime_ns", "mtime_ns", "ctime_ns", "rdev"):
            setattr(entry, "st_" + name, getattr(found, "st_" + name))
        entry.st_blksize, entry.st_blocks = 4096, found.st_blocks
        entry.st_ino, entry.generation = found.st_ino, 0
        entry.entry_timeout, entry.attr_timeout = 0, 0
        return entry

    def known(self, path):
        entry = self.attributes(path)
        root = os.stat(self.paths[pyfuse3.ROOT_INODE]).st_ino
        if entry.st_ino == root:
            entry.st_ino = pyfuse3.ROOT_INODE
        else:
            self.paths[entry.st_ino] = path
        return entry

    async def lookup(self, parent, name, ctx=None):
        if name in (b".", b".."):
            return self.known(self.paths[parent])
        return self.known(self.path(parent, name))

    async def getattr(self, inode, ctx=None):
        entry = self.attributes(self.paths[inode])
        entry.st_ino = inode
        return entry

    async def setattr(self, inode, attr, fields, fh, ctx):
        path = self.paths[inode]
        try:
            if fields.update_size:
                os.truncate(path, attr.st_size)
            if fields.update_mode:
                os.chmod(path, stat.S_IMODE(attr.st_mode))
            if fields.update_uid or fields.update_gid:
                os.chown(
                    path,
                    attr.st_uid if fields.update_uid else -1,
                    attr.st_gid if fields.update_gid else -1,
                )
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno) from None
        return await self.getattr(inode)

    def opened(self, fd):
        return pyfuse3.FileInfo(fh=fd, direct_io=True)

    async def open(self, inode, flags, ctx):
        try:
            return self.opened(os.open(self.paths[inode], flags & ~(os.O_CREAT | os.O_DIRECT)))
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno) from None

    async def create(self, parent, name, mode, flags, ctx):
        path = self.path(parent, name)
        try:
            fd = os.open(path, flags & ~os.O_DIRECT | os.O_CREAT, mode)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno) from None
        return self.opened(fd), self.known(path)

    async def read(self, fh, off, size):
        await trio.sleep(self.delay_s)
        self.count("read", size)
        return os.pread(fh, size, off)

    async def write(self, fh, off, buf):
        await trio.sleep(self.delay_s)
        self.count("write", len(buf))
        try:
            return os.pwrite(fh, buf, off)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno) from None

    async def fsync(self, fh, datasync):
        os.fsync(fh)

    async def release(self, fh):
        os.close(fh)

    async def unlink(self, parent, name, ctx):
        try:
            os.unlink(self.path(parent, name))
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno) from None

    async def opendir(self, inode, ctx):
        return inode

    async def readdir(self, fh, start, token):
        names = sorted(os.listdir(os.fsencode(self.paths[fh])))
        for index, name in enumerate(names[start:], start):
            if not pyfuse3.readdir_reply(token, name, self.known(self.path(fh, name)), index + 1):
                return

    async def statfs(self, ctx):
        found, answer = os.statvfs(self.paths[pyfuse3.ROOT_INODE]), pyfuse3.StatvfsData()
        for name in ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail"):
            setattr(answer, "f_" + name, getattr(found, "f_" + name))
        answer.f_namemax = 255
        return answer

    async def getxattr(self, inode, name, ctx):
        if inode == pyfuse3.ROOT_INODE and name == b"user.requests":
            return json.dumps(self.requests).encode()
        raise pyfuse3.FUSEError(errno.ENODATA)


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    source, at, delay_ms = sys.argv[1:]
    options = set(pyfuse3.default_options) - {"default_permissions"}
    options |= {"fsname=slow_fs", "subtype=slow", "allow_other", "default_permissions"}
    pyfuse3.init(SlowFs(source, float(delay_ms) / 1000), at, options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    main()
