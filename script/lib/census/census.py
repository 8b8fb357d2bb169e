"""Every operation beside every failure: programs at work in two mounts, which complain about
anything that is not as it should be, while servers, daemons and networks fail.

census.py --dray PROGRAM --export DIR --scratch DIR --transport NAME [--half 0|1]
          [--seconds N] [--seed N]

Starts a server of DIR and two mounts of it through networks that can fail, and a worker for each
kind of work and mount. Then one failure after the other, each kind once, or one half of them, and
any of them until the time is over; after each, everybody must have gone on within a minute. Prints
how often which operation was under way in which failure. Ends with 1 if anything went wrong.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
import traceback

import data
import names
from calls import OPERATIONS, Caller, Shared
from failures import FAILURES
from failing_site import Site

# Everybody has gone on by then, on a machine that is busy with others' work, too.
PATIENCE_SECONDS = 60
# Everybody has made what he works with by then: some hundred files each, while all others do so.
BEGIN_SECONDS_MAX = 300
# Writes that come to memory of a ring which was never used, just when the daemon is killed, in a
# run of each failure, and one more in so many seconds.
CUT_SHORT_MAX = 3
SECONDS_OF_ONE_CUT_SHORT = 60


class Workers:
    """Processes at work, two for each kind: one in each mount."""

    def __init__(self, mounts, over_ring):
        kinds = [(work, False) for work in names.WORK + data.WORK]
        kinds += [(work, True) for work in names.TOGETHER + data.TOGETHER]
        self.shared, self.all = Shared(2 * len(kinds)), []
        self.results = multiprocessing.SimpleQueue()
        for work, together in kinds:
            for side in (0, 1):
                number = len(self.all)
                name = work.__name__.strip("_") + ("" if together else f"-{side}")
                dirs = [os.path.join(mounts[(side + turn) % 2], name) for turn in (0, 1)]
                os.makedirs(dirs[0], exist_ok=True)
                caller = Caller(self.shared, number, number ^ 1, *dirs, over_ring)
                run = (work, caller, f"{work.__name__.strip('_')}-{side}")
                self.all.append(multiprocessing.Process(target=self.run, args=run, name=run[2]))

    def run(self, work, caller, name):
        try:
            self.results.put((name, work(caller), None))
        except BaseException:  # whatever it is must be reported
            self.results.put((name, None, traceback.format_exc()))

    def under_way(self):
        """What each one waits for; none: it is between two calls."""
        at = (operation for operation in self.shared.operation)
        return [OPERATIONS[operation] if operation >= 0 else None for operation in at]

    def begin(self):
        for worker in self.all:
            worker.start()
        self.have_gone_on([0] * len(self.all), BEGIN_SECONDS_MAX)

    def have_gone_on(self, since, seconds_max=PATIENCE_SECONDS):
        """Waits until all have made a round. Answers how long that took."""
        begin = time.monotonic()
        while True:
            stuck = [
                worker
                for worker, rounds in enumerate(since)
                if self.shared.rounds[worker] == rounds
            ]
            took = time.monotonic() - begin
            if not stuck or not self.results.empty():
                return took
            if took > seconds_max:
                workers_stuck = [f"{self.all[at].name} in {self.under_way()[at]}" for at in stuck]
                raise SystemExit(f"have not gone on within {took:.0f} s: {', '.join(workers_stuck)}")
            time.sleep(0.01)

    def end(self):
        """Has all end; what each had to say."""
        self.shared.stop.value = 1
        said, deadline = {}, time.monotonic() + PATIENCE_SECONDS
        while len(said) < len(self.all):
            if time.monotonic() > deadline:
                left = [worker.name for worker in self.all if worker.name not in said]
                raise SystemExit(f"do not end: {', '.join(left)}")
            if self.results.empty():
                time.sleep(0.01)
                continue
            name, result, complaint = self.results.get()
            said[name] = result
            if complaint:
                print(f"{name} complains:\n{complaint}", flush=True)
                said[name] = "complained"
        return said


    def kill(self):
        """Ends those that have not ended, as where something went wrong: nobody waits for them."""
        for worker in self.all:
            if worker.is_alive():
                worker.kill()


def both(said, work):
    return said[f"{work}-0"], said[f"{work}-1"]


def check_together(said, mount):
    """What two workers made of one thing. Answers what is wrong."""
    wrong = []
    race = both(said, "race")
    for what in ("made", "removed"):
        lists = [side[what] for side in race]
        # One that is always ahead of the other does it alone.
        either = set(lists[0]) | set(lists[1])
        twice = set(lists[0]) & set(lists[1])
        neither = set(range(max(either, default=1))) - either
        if twice or neither:
            wrong.append(f"race: {what} by both {sorted(twice)}, by nobody {sorted(neither)}")
    with open(os.path.join(mount, "append/log"), "rb") as log:
        lines = log.read().split(b";")[:-1]
    for side in both(said, "append"):
        mark = b"%d:" % side["worker"]
        own = [int(line.split(b":")[1]) for line in lines if line.startswith(mark)]
        if own != list(range(side["lines"])):
            wrong.append(f"append: {len(own)} lines of {side['lines']}, or in another order")
    for lock in ("flock", "process_locks", "file_locks"):
        count = sum(side["count"] for side in both(said, lock))
        with open(os.path.join(mount, lock, "counter"), "rb") as counter:
            found = int(counter.read())
        if found != count:
            wrong.append(f"{lock}: counted to {found} in {count} rounds")
    return wrong


def check_given_back(site):
    """Nothing is open or under way at the server any more. Answers what is."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        status = site.status()
        files = sum(client["open_files"] for client in status["clients"])
        if files == 0 and not status["operations"] and len(status["clients"]) == 2:
            return []
        if time.monotonic() > deadline:
            left = json.dumps([status["clients"], status["operations"]])
            return [f"not given back: {left}"]
        time.sleep(0.2)


def check_cut_short(workers, options):
    """Writes that a killed daemon cut short are few. Answers what is wrong."""
    count = sum(workers.shared.cut_short)
    most = CUT_SHORT_MAX + options.seconds / SECONDS_OF_ONE_CUT_SHORT
    return [f"{count} writes were cut short, of {most:.0f} at most"] if count > most else []


def fail(site, workers, failure, covered):
    """One failure, from its beginning until everybody has gone on. How long that took."""
    kind = failure.__name__

    def look():
        for operation in filter(None, workers.under_way()):
            covered[kind][operation] = covered[kind].get(operation, 0) + 1

    failure(site, look)
    since = list(workers.shared.rounds)
    return workers.have_gone_on(since)


def failures(site, workers, options, covered):
    """Each once, in any order, and on by chance until the time is over."""
    begin, left = time.monotonic(), FAILURES
    if options.half is not None:
        left = left[options.half :: 2]
    left = site.chance.sample(left, len(left))
    while left or time.monotonic() - begin < options.seconds:
        failure = left.pop() if left else site.chance.choice(FAILURES)
        at = time.monotonic() - begin
        print(f"{at:6.1f} s {failure.__name__.replace('_', ' ')}", end="", flush=True)
        took = fail(site, workers, failure, covered)
        print(f": all went on within {took:.2f} s", flush=True)
        if not workers.results.empty():
            return  # somebody complains


def table(covered):
    """How often each operation was under way in each failure."""
    kinds = list(covered)
    print("under way at:".ljust(14), *(str(number + 1).rjust(4) for number in range(len(kinds))))
    for operation in OPERATIONS:
        counts = (covered[kind].get(operation, 0) for kind in kinds)
        print(operation.ljust(14), *(str(count or ".").rjust(4) for count in counts))
    for number, kind in enumerate(kinds):
        print(f"{number + 1:4} {kind.replace('_', ' ')}")
    pairs = sum(1 for kind in kinds for operation in OPERATIONS if covered[kind].get(operation))
    print(f"{pairs} of {len(kinds) * len(OPERATIONS)} pairs")


def main():
    parser = argparse.ArgumentParser()
    for option in ("--dray", "--export", "--scratch", "--transport"):
        parser.add_argument(option, required=True)
    parser.add_argument("--half", type=int)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    covered = {failure.__name__: {} for failure in FAILURES}
    print(f"seed {options.seed}", flush=True)
    with Site(options, random.Random(options.seed)) as site:
        workers = Workers(site.mounts, options.transport == "uring")
        try:
            workers.begin()
            failures(site, workers, options, covered)
            said = workers.end()
        finally:
            workers.kill()
        wrong = [f"{name} complained" for name, what in said.items() if what == "complained"]
        if not wrong:
            wrong = check_together(said, site.mounts[0]) + check_given_back(site)
            wrong += check_cut_short(workers, options)
    if options.half is None:
        table(covered)
    print(sum(workers.shared.rounds), "rounds")
    sys.exit("\n".join(wrong) or 0)


main()
