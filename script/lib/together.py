"""Programs that work together through two directories, which are one seen through two mounts.

together.py counter-replaced|counter-rewritten|mail|turns|log ONE OTHER
"""

import multiprocessing
import os
import sys
import time

DEADLINE_SECONDS = 60
MAILS = 200
STEPS = 200
TURNS = 400
LINES = 300


def text_of(path):
    with open(path) as file:
        return file.read()


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def at_once(work, directories):
    """Runs `work` on each directory, twice, each in a process of its own."""
    workers = [
        multiprocessing.Process(target=work, args=(directory,)) for directory in directories * 2
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a worker failed")


def locked(directory, work):
    """With a file that only one can make."""
    lock = os.path.join(directory, "lock")
    end = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if time.monotonic() > end:
                raise SystemExit("the lock is never free")
            time.sleep(0.001)
    work()
    os.unlink(lock)


def count_by_replacing(directory):
    count = os.path.join(directory, "count")

    def step():
        write(count + ".new", str(int(text_of(count)) + 1))
        os.rename(count + ".new", count)

    for _ in range(STEPS):
        locked(directory, step)


def count_in_place(directory):
    count = os.path.join(directory, "count")

    def step():
        with open(count, "r+") as file:
            number = int(file.read()) + 1
            file.seek(0)
            file.write(f"{number:08}")

    for _ in range(STEPS):
        locked(directory, step)


def counter(work, one, other):
    write(os.path.join(one, "count"), "00000000")
    at_once(work, [one, other])
    for directory in (one, other):
        found = int(text_of(os.path.join(directory, "count")))
        if found != 4 * STEPS:
            raise SystemExit(f"{directory}: counted to {found}, not {4 * STEPS}")
    os.unlink(os.path.join(one, "count"))


def deliver(one):
    for number in range(MAILS):
        write(os.path.join(one, "tmp", str(number)), f"mail {number}")
        os.rename(os.path.join(one, "tmp", str(number)), os.path.join(one, "new", str(number)))


def mail(one, other):
    """A mailbox as maildir(5) has it: delivered on one side, fetched on the other."""
    for name in ("tmp", "new", "cur"):
        os.mkdir(os.path.join(one, name))
    delivery = multiprocessing.Process(target=deliver, args=(one,))
    delivery.start()
    fetched = set()
    end = time.monotonic() + DEADLINE_SECONDS
    while len(fetched) < MAILS:
        if time.monotonic() > end:
            raise SystemExit(f"{len(fetched)} of {MAILS} mails have come")
        for name in os.listdir(os.path.join(other, "new")):
            kept = os.path.join(other, "cur", name)
            os.rename(os.path.join(other, "new", name), kept)
            if text_of(kept) != f"mail {name}":
                raise SystemExit(f"mail {name} is another one")
            fetched.add(name)
    delivery.join()


def turns(one, other):
    """Each side reads what the other has just written over it, as long as it was, or replaced."""
    for number in range(TURNS):
        writer, reader = (one, other) if number % 2 else (other, one)
        text = f"{number:08}"
        path = os.path.join(writer, "turn")
        if number % 3:
            write(path, text)
        else:
            write(path + ".new", text)
            os.rename(path + ".new", path)
        found = text_of(os.path.join(reader, "turn"))
        if found != text:
            raise SystemExit(f"{found} instead of {text}")


def log_lines(directory):
    for number in range(LINES):
        with open(os.path.join(directory, "log"), "a") as file:
            file.write(f"{os.getpid()} {number}\n")


def rotate(directory, done):
    """Moves the log away all the time; each writer opens it anew for each line."""
    number = 0
    while True:
        last = done.is_set()
        try:
            os.rename(os.path.join(directory, "log"), os.path.join(directory, f"log.{number}"))
            number += 1
        except FileNotFoundError:
            pass
        if last:
            return
        time.sleep(0.005)


def log(one, other):
    done = multiprocessing.Event()
    rotation = multiprocessing.Process(target=rotate, args=(one, done), daemon=True)
    rotation.start()
    at_once(log_lines, [one, other])
    done.set()
    rotation.join()
    for directory in (one, other):
        names = [name for name in os.listdir(directory) if name.startswith("log.")]
        lines = [line for name in names for line in text_of(os.path.join(directory, name)).splitlines()]
        if len(lines) != 4 * LINES or len(set(lines)) != 4 * LINES:
            raise SystemExit(f"{directory}: {len(set(lines))} lines in {len(names)} logs, not {4 * LINES}")


WORKS = {
    "counter-replaced": lambda one, other: counter(count_by_replacing, one, other),
    "counter-rewritten": lambda one, other: counter(count_in_place, one, other),
    "mail": mail,
    "turns": turns,
    "log": log,
}

if __name__ == "__main__":
    WORKS[sys.argv[1]](*sys.argv[2:])
