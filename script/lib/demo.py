"""The workload of script/demo: the same work on a bare directory and through a mount.

demo.py [--size-mib N] BARE MOUNT TWIN: the mount is written to, its twin, another mount of
the same export, is read from. Exits 1 if anything is read back wrong.
"""

import argparse
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time

MIB = 1 << 20
SHARDS = 4
SMALL_FILES = 1000
SMALL_BYTES = 4096
RANDOM_READS = 4000
SOURCES = 60


def say(text):
    print(text, file=sys.stderr, flush=True)


def timed(work, *arguments):
    start = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - start, result


class Checkpoint:
    """A model's state in shards: a header with names, shapes and places of the tensors, and
    the tensors behind it, as the usual formats for tensors have it."""

    def __init__(self, size_mib):
        self.tensor_bytes = 8 * MIB
        self.tensors = max(1, size_mib * MIB // SHARDS // self.tensor_bytes)
        self.block = random.Random(7).randbytes(self.tensor_bytes)
        self.bytes = SHARDS * self.tensors * self.tensor_bytes

    def tensor(self, shard, number):
        """Different for every tensor, and cheap to make: a block with its name in it."""
        mark = f"shard {shard} tensor {number} ".encode()
        turn = (shard * 131 + number * 17) * 4099 % len(self.block)
        return b"".join((mark, self.block[turn:], self.block[: turn - len(mark)]))[
            : self.tensor_bytes
        ]

    def header(self, shard):
        places = {
            f"layer.{shard}.{number}.weight": {
                "dtype": "BF16",
                "shape": [2048, self.tensor_bytes // 4096],
                "data_offsets": [number * self.tensor_bytes, (number + 1) * self.tensor_bytes],
            }
            for number in range(self.tensors)
        }
        text = json.dumps(places).encode()
        return len(text).to_bytes(8, "little") + text

    def shards(self):
        """What will be written: (name, pieces, checksum)."""
        for shard in range(SHARDS):
            pieces = [self.header(shard)]
            pieces += [self.tensor(shard, number) for number in range(self.tensors)]
            checksum = hashlib.sha256()
            for piece in pieces:
                checksum.update(piece)
            name = f"model-{shard + 1:05}-of-{SHARDS:05}.tensors"
            yield name, pieces, checksum.hexdigest()


def write_checkpoint(directory, checkpoint):
    """Written under another name, synced, then renamed, as careful programs do. The time
    of making the data is not counted."""
    seconds, sums = 0.0, {}
    os.mkdir(directory)
    for name, pieces, checksum in checkpoint.shards():
        seconds += timed(write_shard, os.path.join(directory, name), pieces)[0]
        sums[name] = checksum
    with open(os.path.join(directory, "checksums.json"), "w") as file:
        json.dump(sums, file)
    return seconds


def write_shard(path, pieces):
    with open(path + ".new", "wb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[file.write(view[: 4 * MIB]) :]
        os.fsync(file.fileno())
    os.rename(path + ".new", path)


def read_checkpoint(directory):
    """Seconds of reading alone, and the names of shards that are not what was written."""
    with open(os.path.join(directory, "checksums.json")) as file:
        sums = json.load(file)
    seconds, wrong = 0.0, []
    buffer = bytearray(4 * MIB)
    for name, expected in sums.items():
        checksum = hashlib.sha256()
        with open(os.path.join(directory, name), "rb", buffering=0) as file:
            while True:
                spent, count = timed(file.readinto, buffer)
                seconds += spent
                if not count:
                    break
                checksum.update(memoryview(buffer)[:count])
        if checksum.hexdigest() != expected:
            wrong.append(name)
    return seconds, wrong


def small_files(directory):
    """Microseconds an operation, by its name."""
    os.mkdir(directory)
    paths = [os.path.join(directory, f"file-{number:04}") for number in range(SMALL_FILES)]
    content = b"x" * SMALL_BYTES

    def create():
        for path in paths:
            with open(path, "wb", buffering=0) as file:
                file.write(content)

    def look():
        for path in paths:
            os.stat(path)

    def read():
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                if file.read(SMALL_BYTES) != content:
                    raise SystemExit(f"{path} is not what was written")

    def remove():
        for path in paths:
            os.unlink(path)

    steps = {
        "create, write 4 KiB, close": create,
        "stat": look,
        "open, read 4 KiB, close": read,
        "list a directory, a name": lambda: sum(1 for _ in os.scandir(directory)),
        "unlink": remove,
    }
    return {name: timed(step)[0] / SMALL_FILES * 1e6 for name, step in steps.items()}


def random_reads(directory):
    name = sorted(name for name in os.listdir(directory) if name.endswith(".tensors"))[0]
    descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
    blocks = os.fstat(descriptor).st_size // SMALL_BYTES
    numbers = random.Random(3)
    places = [numbers.randrange(blocks) * SMALL_BYTES for _ in range(RANDOM_READS)]

    def read():
        for place in places:
            os.pread(descriptor, SMALL_BYTES, place)

    seconds = timed(read)[0]
    os.close(descriptor)
    return seconds / RANDOM_READS * 1e6


def source_archive():
    """A small C program in many files, as a tar archive."""
    names = [f"part{number:02}" for number in range(SOURCES)]
    calls = " + ".join(f"{name}(n)" for name in names)
    prototypes = "\n".join(f"int {name}(int n);" for name in names)
    files = {
        "parts.h": prototypes + "\n",
        "main.c": '#include <stdio.h>\n#include "parts.h"\nint main(void) {\n'
        f'    int n = 1;\n    printf("%d\\n", {calls});\n    return 0;\n}}\n',
        "Makefile": "OBJECTS = main.o " + " ".join(f"{name}.o" for name in names) + "\n"
        "program: $(OBJECTS)\n\tcc -o $@ $(OBJECTS)\n"
        "%.o: %.c parts.h\n\tcc -O1 -c -o $@ $<\n",
    }
    for number, name in enumerate(names):
        body = "".join(f"    n = n * {step + 3} % 1009;\n" for step in range(20))
        files[f"{name}.c"] = (
            f'#include "parts.h"\nint {name}(int n) {{\n    n += {number};\n{body}'
            "    return n;\n}\n"
        )
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"tree/{name}")
            entry.size, entry.mtime = len(data), int(time.time()) - 10
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def build_tree(directory, archive):
    os.mkdir(directory)

    def unpack():
        command = ["tar", "-x", "-C", directory]
        subprocess.run(command, input=archive, check=True)

    def make():
        jobs = f"-j{os.cpu_count()}"
        command = ["make", "-s", jobs, "-C", os.path.join(directory, "tree")]
        subprocess.run(command, check=True)

    seconds = timed(unpack)[0], timed(make)[0]
    program = os.path.join(directory, "tree", "program")
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return *seconds, said.strip()


class Table:
    """Rows of: what, unit, bare, dray; and whether more is better."""

    def __init__(self):
        self.rows = []

    def add(self, what, unit, bare, dray, more_is_better=False):
        good = dray / bare if more_is_better else bare / dray
        self.rows.append((what, unit, bare, dray, good))

    def show(self):
        print()
        print(f"{'':36} {'bare':>9} {'dray':>9}        dray's speed, bare = 1")
        for what, unit, bare, dray, good in self.rows:
            print(f"{what:36} {self.number(bare)} {self.number(dray)} {unit:<6} {good:8.2f}")
        print()

    @staticmethod
    def number(value):
        return f"{value:9.0f}" if value >= 100 else f"{value:9.2f}"


def run(bare, mount, twin, size_mib):
    checkpoint, table = Checkpoint(size_mib), Table()
    mib = checkpoint.bytes / MIB
    at = os.path.join
    say(f"== a checkpoint of {mib:.0f} MiB in {SHARDS} shards, through the mount")
    written = [write_checkpoint(at(root, "checkpoint"), checkpoint) for root in (bare, mount)]
    table.add("write a checkpoint, synced", "MiB/s", *(mib / s for s in written), True)
    say("== read back through the other mount, checksums compared")
    read = [read_checkpoint(at(root, "checkpoint")) for root in (bare, twin)]
    wrong = read[1][1]
    for name in wrong:
        say(f"   {name} IS NOT WHAT WAS WRITTEN")
    if not wrong:
        say(f"   {SHARDS} of {SHARDS} shards are what was written")
    table.add("read it back", "MiB/s", *(mib / seconds for seconds, _ in read), True)
    places = [random_reads(at(root, "checkpoint")) for root in (bare, twin)]
    table.add("read 4 KiB at random, one at a time", "us", *places)
    say(f"== {SMALL_FILES} small files")
    small = [small_files(at(root, "small")) for root in (bare, mount)]
    for name in small[0]:
        table.add(name, "us", small[0][name], small[1][name])
    say(f"== a source tree of {SOURCES} files: untar, make, run")
    archive = source_archive()
    trees = [build_tree(at(root, "build"), archive) for root in (bare, mount)]
    table.add("untar a source tree", "s", trees[0][0], trees[1][0])
    table.add("build it", "s", trees[0][1], trees[1][1])
    same = trees[0][2] == trees[1][2]
    say(f"   the program built on the mount says {trees[1][2]}, as it should"
        if same else "   THE PROGRAMS DIFFER")
    table.show()
    for name in ("checkpoint", "small", "build"):
        shutil.rmtree(at(bare, name))
        shutil.rmtree(at(mount, name))
    left = os.listdir(twin)
    if left:
        say(f"   REMOVED, AND STILL SEEN BY THE OTHER MOUNT: {left}")
    return not wrong and same and not left


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=512)
    for name in ("bare", "mount", "twin"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    good = run(arguments.bare, arguments.mount, arguments.twin, arguments.size_mib)
    sys.exit(0 if good else 1)


try:
    main()
except KeyboardInterrupt:
    say("   interrupted")
    sys.exit(130)
except (OSError, subprocess.CalledProcessError) as error:
    say(f"   {error}")
    sys.exit(1)
