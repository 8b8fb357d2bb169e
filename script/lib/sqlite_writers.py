"""Several processes that write to one sqlite database; nothing may be lost.

sqlite_writers.py JOURNAL PATH...: four writers, spread over the paths (which are one file seen
through several mounts). Each adds to a counter in transactions and inserts rows of its own.
"""

import multiprocessing
import sqlite3
import sys
import time

WRITERS = 4
ROUNDS = 40
BUSY_MAX_SECONDS = 60


def connect(path, journal):
    database = sqlite3.connect(path, timeout=BUSY_MAX_SECONDS, isolation_level=None)
    mode = database.execute(f"PRAGMA journal_mode={journal}").fetchone()[0]
    if mode.lower() != journal:
        raise SystemExit(f"the journal is {mode}, not {journal}")
    database.execute("PRAGMA synchronous=NORMAL")
    return database


def write(path, journal, writer):
    database = connect(path, journal)
    for number in range(ROUNDS):
        database.execute("BEGIN IMMEDIATE")
        count = database.execute("SELECT count FROM counter").fetchone()[0]
        database.execute("UPDATE counter SET count = ?", (count + 1,))
        row = (writer, number, bytes([writer]) * 3000)
        database.execute("INSERT INTO entry VALUES (?, ?, ?)", row)
        database.execute("COMMIT")
        # sqlite's way of waiting is unfair: who has had its turn stands back.
        time.sleep(0.002)
    database.close()


def main():
    journal, paths = sys.argv[1], sys.argv[2:]
    database = connect(paths[0], journal)
    database.execute("CREATE TABLE counter (count INTEGER)")
    database.execute("INSERT INTO counter VALUES (0)")
    database.execute("CREATE TABLE entry (writer INTEGER, number INTEGER, data BLOB)")
    database.close()
    writers = [
        multiprocessing.Process(target=write, args=(paths[n % len(paths)], journal, n))
        for n in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    if any(writer.exitcode for writer in writers):
        raise SystemExit("a writer failed")
    for path in paths:
        database = connect(path, journal)
        count = database.execute("SELECT count FROM counter").fetchone()[0]
        rows = database.execute("SELECT count(*) FROM entry").fetchone()[0]
        sound = database.execute("PRAGMA integrity_check").fetchone()[0]
        print(f"{path}: counter {count}, {rows} rows, {sound}")
        if (count, rows, sound) != (WRITERS * ROUNDS, WRITERS * ROUNDS, "ok"):
            raise SystemExit("something was lost")
        database.close()


main()
