"""Processes that open and close the same files at the same time.

open_together.py PROCESSES FILE...; prints the seconds from the start signal to the end of the last.
"""

import os
import sys
import time


def child(start, files):
    os.read(start, 1)
    for file in files:
        os.close(os.open(file, os.O_RDONLY))
    os._exit(0)


def main():
    count, files = int(sys.argv[1]), sys.argv[2:]
    start, give = os.pipe()
    for _ in range(count):
        if os.fork() == 0:
            child(start, files)
    began = time.monotonic()
    os.write(give, b"x" * count)
    failed = 0
    for _ in range(count):
        failed += os.wait()[1] != 0
    print(f"{time.monotonic() - began:.4f}")
    return int(failed > 0)


sys.exit(main())
