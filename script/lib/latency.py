"""How long single calls of one unhurried client take.

latency.py OPERATION DIR SECONDS: makes one call every 2 ms, for SECONDS, in the directory DIR of a
mount, and prints `p50 p99 max count`: three times in microseconds, and the number of calls.
OPERATION is `stat` (of a file that is there), `mkdir` (of a new directory, which is removed again;
the removal is not timed), `create` (of a new file, removed likewise), `read` (4 KiB of a file
that was read before) or `lock` (of a file that nobody else locks).

A call that takes longer than the pause delays the next one. Such a call stands for the calls that
it kept from being made: each of them is counted as having waited from its own time on. Otherwise
one long wait would be a single sample among thousands.
"""

import fcntl
import os
import sys
import time

PAUSE_S = 0.002
MOST_CALLS = 1_000_000


def stat(directory, _number):
    path = os.path.join(directory, "latency-file")
    return lambda: os.stat(path), None


def mkdir(directory, number):
    path = os.path.join(directory, f"latency-dir{number}")
    return lambda: os.mkdir(path), lambda: os.rmdir(path)


def create(directory, number):
    path = os.path.join(directory, f"latency-new{number}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    return lambda: os.close(os.open(path, flags, 0o644)), lambda: os.unlink(path)


def read(directory, _number):
    file = os.open(os.path.join(directory, "latency-file"), os.O_RDONLY)
    return lambda: os.pread(file, 4096, 0), lambda: os.close(file)


def lock(directory, _number):
    file = os.open(os.path.join(directory, "latency-file"), os.O_RDWR)
    return lambda: fcntl.lockf(file, fcntl.LOCK_EX), lambda: os.close(file)


OPERATIONS = {"stat": stat, "mkdir": mkdir, "create": create, "read": read, "lock": lock}


def measure(operation, directory, seconds):
    """The times of all calls, seconds, those included that were held up by an earlier one."""
    with open(os.path.join(directory, "latency-file"), "wb") as file:
        file.write(b"x" * 4096)
    prepare = OPERATIONS[operation]
    times = []
    start = time.monotonic()
    while len(times) < MOST_CALLS and time.monotonic() < start + seconds:
        call, undo = prepare(directory, len(times))
        before = time.monotonic()
        call()
        took = time.monotonic() - before
        if undo:
            undo()
        while took > 0 and len(times) < MOST_CALLS:
            times.append(took)
            took -= PAUSE_S
        time.sleep(PAUSE_S)
    return times


def main():
    operation, directory, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    times = sorted(measure(operation, directory, seconds))
    at = [times[len(times) // 2], times[len(times) * 99 // 100], times[-1]]
    print(*(round(value * 1e6) for value in at), len(times))


main()
