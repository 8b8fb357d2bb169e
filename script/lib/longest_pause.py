"""longest_pause.py DIR SECONDS: how long the slowest of many small jobs in DIR took, seconds.

Each of eight threads has files of its own. It appends to one, reads it back, and goes on with the next: the
files are at all servers. An error of any of them ends this with it."""

import os
import sys
import threading
import time

THREADS, FILES = 8, 24


def work(directory, number, end, longest, errors):
    try:
        round = 0
        while time.monotonic() < end:
            path = os.path.join(directory, f"pause-{number}-{round % FILES}")
            begun = time.monotonic()
            with open(path, "ab") as file:
                file.write(b"x" * 100)
            with open(path, "rb") as file:
                if len(file.read()) != 100 * (round // FILES + 1):
                    raise OSError(f"{path} has not what was written")
            longest[number] = max(longest[number], time.monotonic() - begun)
            round += 1
    except OSError as error:
        errors.append(error)


def main():
    directory, end = sys.argv[1], time.monotonic() + float(sys.argv[2])
    longest, errors = [0.0] * THREADS, []
    threads = [
        threading.Thread(target=work, args=(directory, number, end, longest, errors))
        for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        sys.exit(f"an application saw an error: {errors[0]}")
    print(f"{max(longest):.3f}")


main()
