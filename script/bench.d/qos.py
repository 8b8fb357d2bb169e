"""The loads of `script/bench qos`. qos.py MOUNT MOUNT; prints JSON lines.

Environment: DRAY (the command), STATE (the server's state directory), SERVER (its processes), MOUNTS (those of the
mounts), RATE_MIB, SECS, ROUNDS, SHARED_MOUNT and SHARED_STATE (a mount of the projection `shared`, and the state
directory of one of its servers), PARTS (victim share idle overhead jain change spread; all of them), ARMS (of victim:
apart server_cpu same_cpus elsewhere small; all of them). Root: users are made by setresuid of threads.

APART_STATE and APART_SERVER are of a server on one CPU, for which writers have another one: APART_CPUS, the victim's
first. APART_AT are mounts on these CPUs: of a victim before whose processes all others wait, of one without that, of
the writers. APART_MOUNTS are their processes. Without APART_AT there is no such server.
"""

import ctypes
import dataclasses
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import threading
import time

DRAY, STATE = os.environ["DRAY"], os.environ["STATE"]
SERVER = os.environ["SERVER"].split(",")
MOUNTS = os.environ["MOUNTS"].split(",")
RATE_MIB, SECS = int(os.environ["RATE_MIB"]), float(os.environ["SECS"])
ROUNDS = int(os.environ["ROUNDS"])
MIB = 1 << 20
VICTIM, AGGRESSOR = 1001, 1002
LIBC = ctypes.CDLL(None, use_errno=True)
# setresgid(2) and setresuid(2) as system calls change the thread alone.
NUMBERS = {"x86_64": (119, 117), "aarch64": (149, 147)}


def put(metric, value, unit, arm="dray"):
    line = {"bench": "qos", "arm": arm, "metric": metric, "value": round(value, 4), "unit": unit}
    print(json.dumps(line), flush=True)


def become(uid):
    for number in NUMBERS[os.uname().machine]:
        if LIBC.syscall(number, uid, uid, uid) != 0:
            raise OSError(ctypes.get_errno(), "cannot become another user")


def qos(*words, state=STATE):
    subprocess.run([DRAY, "qos", *words, "--state", state], check=True, stdout=subprocess.DEVNULL)


def qos_shown(state=STATE):
    shown = subprocess.run([DRAY, "qos", "show", "--json", "--state", state], check=True, capture_output=True)
    return json.loads(shown.stdout)["exports"][0]


def rules(wanted, state=STATE):
    for name in qos_shown(state)["rules"]:
        qos("remove", name, state=state)
    for name, *settings in wanted:
        qos("set", name, *settings, state=state)


USERS = ("users", "each=user")
WHOLE = ("whole", f"limit={RATE_MIB}M")


class Load:
    """Threads of users that work until it ends. Each notes when its calls ended, and how long they took."""

    def __init__(self):
        self.threads, self.running, self.calls, self.lock = [], True, {}, threading.Lock()
        self.tasks = []

    def add(self, uid, step, pause=0.0, cpus=None, is_first=False):
        def work():
            # Of the thread alone.
            if cpus:
                os.sched_setaffinity(0, cpus)
            if is_first:
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            become(uid)
            noted = []
            with self.lock:
                self.calls.setdefault(uid, []).append(noted)
                self.tasks.append(threading.get_native_id())
            call = step()
            while self.running:
                begun = time.monotonic()
                size = call()
                now = time.monotonic()
                noted.append((now, now - begun, size))
                if pause:
                    time.sleep(pause)

        thread = threading.Thread(target=work)
        self.threads.append(thread)
        thread.start()
        return self

    def end(self):
        self.running = False
        for thread in self.threads:
            thread.join()
        return {uid: sorted(sum(lists, [])) for uid, lists in self.calls.items()}

    def run(self, seconds):
        time.sleep(seconds)
        return self.end()


def buffer(size):
    memory = mmap.mmap(-1, size)
    memory.write(b"x" * size)
    return memory


def writer(path, size=MIB, span=8):
    """Direct writes, one after the other."""
    def step():
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o666)
        data, state = buffer(size), [0]

        def call():
            state[0] = (state[0] + 1) % span
            return os.pwrite(file, data, state[0] * size)
        return call
    return step


def reader(path, size, span=8):
    def step():
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        data, state = buffer(size), [0]

        def call():
            state[0] = (state[0] + 1) % span
            return os.preadv(file, [data], state[0] * size)
        return call
    return step


def interactive(path):
    """What somebody at a terminal does: stat, open, a small read, close. Counted as one."""
    def step():
        data = buffer(4096)

        def call():
            os.stat(path)
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            size = os.preadv(file, [data], 0)
            os.close(file)
            return size
        return call
    return step


def make(path, size):
    with open(path, "wb") as file:
        file.write(b"y" * size)
    os.chmod(path, 0o666)


def p99(calls):
    times = sorted(duration for _, duration, _ in calls)
    return times[len(times) * 99 // 100]


def rate(calls, seconds):
    return sum(size for *_, size in calls) / MIB / seconds


def schedstat(pid, task):
    """Nanoseconds on a CPU, nanoseconds ready without one, and how often it had one."""
    with open(f"/proc/{pid}/task/{task}/schedstat", encoding="utf-8") as file:
        return [int(word) for word in file.read().split()]


def scheduled(pids):
    """The same of all threads of these processes, of which none ends meanwhile."""
    each = [schedstat(pid, task) for pid in pids for task in os.listdir(f"/proc/{pid}/task")]
    return [sum(column) for column in zip(*each)]


def machine():
    """Ticks for which the machine's CPUs were busy, and all ticks."""
    with open("/proc/stat", encoding="utf-8") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def cpu_s():
    return scheduled(SERVER)[0] / 1e9


class Aggressor:
    """A process of its own with so many writers on these mounts, by turns. They rest until they are to work."""

    def __init__(self, mounts, writers, cpus=None):
        self.shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")  # whether to work, and bytes of each writer
        self.pid = os.fork()
        if self.pid == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            if cpus:
                os.sched_setaffinity(0, cpus)
            load = Load()
            for number in range(writers):
                path = f"{mounts[number % len(mounts)]}/aggressor{number}"
                load.add(AGGRESSOR, self.when_working(writer(path), number))
            while True:
                time.sleep(60)

    def when_working(self, step, number):
        def rests():
            call = step()

            def work():
                while not self.shared[0]:
                    time.sleep(0.02)
                size = call()
                self.shared[1 + number] += size
                return size
            return work
        return rests

    def work(self, is_working):
        self.shared[0] = is_working

    def written_bytes(self):
        return sum(self.shared[1:])

    def end(self):
        os.kill(self.pid, signal.SIGTERM)
        os.waitpid(self.pid, 0)


class Copier:
    """A process of its own that knows nothing of dray. So often as a server with this limit copies a MiB it has the CPU
    for as long, and copies 64 KiB at a time within the kernel. By turns, as an aggressor."""

    def __init__(self, limit_mib, cpus):
        self.shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")  # whether to work, bytes, nanoseconds for a MiB
        self.pid = os.fork()
        if self.pid == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            os.sched_setaffinity(0, cpus)
            file = os.memfd_create("copies")
            os.ftruncate(file, MIB)
            while True:
                time.sleep(0.02)
                due = time.monotonic()
                while self.shared[0]:
                    due += 1 / limit_mib
                    time.sleep(max(0.0, due - time.monotonic()))
                    self.copy(file, bytes(MIB // 16))
                    self.shared[1] += MIB

    def copy(self, file, piece):
        begun, number = time.thread_time_ns(), 0
        while time.thread_time_ns() - begun < self.shared[2]:
            os.pwrite(file, piece, number % 16 * len(piece))
            number += 1

    def takes(self, ns_each_mib):
        self.shared[2] = int(ns_each_mib)

    def work(self, is_working):
        self.shared[0] = is_working

    def written_bytes(self):
        return self.shared[1]

    def end(self):
        os.kill(self.pid, signal.SIGTERM)
        os.waitpid(self.pid, 0)


@dataclasses.dataclass
class Place:
    """Where a victim and an aggressor work, and the processes that serve them."""

    at: str  # the victim's mount
    theirs: list  # mounts of the writers
    state: str = STATE
    server: list = dataclasses.field(default_factory=lambda: SERVER)
    mounts: list = dataclasses.field(default_factory=lambda: MOUNTS)
    cpus: tuple = (None, None)  # of the victim and of the writers, where they have some
    is_first: bool = False  # the victim's thread has a CPU before all others
    has_copier: bool = False  # beside a process that copies as much as the server, too

    def queued_s(self):
        """How long the victim's calls have waited in the server's scheduler so far."""
        classes = (qos_shown(self.state)["qos"] or {"classes": []})["classes"]
        return sum(one["wait_total_s"] for one in classes if one["class"] == str(VICTIM))

    def counters(self, victim_task, aggressor):
        """What has been counted by now: only differences say something."""
        counted = {"at": time.monotonic(), "queued_s": self.queued_s(), "written": aggressor.written_bytes()}
        counted["victim_ready_ns"] = schedstat(os.getpid(), victim_task)[1]
        for who, pids in (("server", self.server), ("mounts", self.mounts)):
            counted[f"{who}_cpu_ns"], counted[f"{who}_ready_ns"], counted[f"{who}_turns"] = scheduled(pids)
        counted["busy_ticks"], counted["ticks"] = machine()
        return counted


def places(mounts):
    """Where the victim is in each arm."""
    found = {}
    if "APART_AT" in os.environ:
        comes_first, victims, writers = os.environ["APART_AT"].split(",")
        served = {"state": os.environ["APART_STATE"], "cpus": [{int(cpu)} for cpu in os.environ["APART_CPUS"].split(",")]}
        served |= {name: os.environ[f"APART_{name.upper()}"].split(",") for name in ("server", "mounts")}
        # On a cluster all have CPUs of their own, and share the server. So the victim and its mount have a CPU whenever
        # they want one, and the server has what is left of it. What the victim waits for is the server.
        found["apart"] = Place(comes_first, [writers], is_first=True, **served)
        # The victim waits for the CPU of the server, too.
        found["server_cpu"] = Place(victims, [writers], has_copier=True, **served)
    # Writers on the CPUs of the victim and its mount, and over that mount.
    found["same_cpus"] = Place(mounts[0], mounts)
    # By what the machine itself does to the victim that is to be judged.
    found["elsewhere"] = Place(mounts[0], [os.environ["SHARED_MOUNT"]])
    # Mounts whose requests have 128 KiB at most: each copy is shorter.
    found["small"] = Place(f"{mounts[0]}.small", [f"{at}.small" for at in mounts])
    return found


# Writers begin with the burst of their limit. They end with the calls that wait: 10 MiB, at 20 MiB a second at least.
SETTLE_S = 0.7
WINDOWS = 3  # of each kind in a round, in turn: what else the machine does is in both


def victim(place, limit_mib=None):
    """What the victim finds alone, and beside ten writers; beside a copier as well, where the place has one. A thread that
    is ready and has no CPU waits for one."""
    others = [Aggressor(place.theirs, 10, place.cpus[1])]
    if place.has_copier and limit_mib:
        others.append(Copier(limit_mib, place.cpus[0]))
    load = Load().add(VICTIM, interactive(f"{place.at}/small"), pause=0.002, cpus=place.cpus[0], is_first=place.is_first)
    windows = [[] for _ in range(1 + len(others))]
    for _ in range(WINDOWS):
        for other, found in zip([None, *others], windows):
            if isinstance(other, Copier):
                other.takes(server_ns_each_mib(*windows[1][-1], *windows[0][-1]))
            found.append(window(place, load, others, other))
    for other in others:
        other.end()
    calls = load.end()[VICTIM]
    return [seen_in(found, calls) for found in windows]


def window(place, load, others, other):
    """Counters before and after a window in which this one of the others works."""
    aggressor = other or others[0]
    if other:
        other.work(True)
    time.sleep(SETTLE_S)
    before = place.counters(load.tasks[0], aggressor)
    time.sleep(SECS)
    after = place.counters(load.tasks[0], aggressor)
    if other:
        other.work(False)
    return before, after


def server_ns_each_mib(before, after, before_alone, after_alone):
    """How long the server has the CPU for a MiB that is written: what it takes alone in such a window does not count."""
    took = after["server_cpu_ns"] - before["server_cpu_ns"] - (after_alone["server_cpu_ns"] - before_alone["server_cpu_ns"])
    return max(0, took) / max(1, (after["written"] - before["written"]) / MIB)


def seen_in(windows, calls):
    """Of these windows together, which begin and end with counters: the p99 of the calls, and what they waited for."""
    calls = [call for call in calls if any(old["at"] <= call[0] - call[1] and call[0] <= new["at"] for old, new in windows)]

    def more(key):
        return sum(new[key] - old[key] for old, new in windows)
    seen = {
        "p99": p99(calls),
        "mean_us": sum(duration for _, duration, _ in calls) / len(calls) * 1e6,
        "queued_us": more("queued_s") / len(calls) * 1e6,
        "victim_ready_us": more("victim_ready_ns") / 1e3 / len(calls),
        "machine_busy": more("busy_ticks") / max(1, more("ticks")),
        "written_mib": more("written") / MIB / more("at"),
    }
    for who in ("server", "mounts"):
        # Each time that a thread was ready; how often one is for a call of the victim only its time alone tells.
        turns = max(1, more(f"{who}_turns"))
        seen[f"{who}_ready_us"] = more(f"{who}_ready_ns") / 1e3 / turns
        seen[f"{who}_turns"] = turns / len(calls)
    return seen


# MiB a second of the export. The headline is at RATE_MIB. The lowest is some ten times what the victim moves, 4 KiB every
# 2.5 ms. What calls wait for is in docs/QOS.md.
LIMITS_MIB = sorted({20, 50, 100, RATE_MIB})


def ready_us(alone, seen):
    """How long a call of the victim waited for CPUs, on average: its own thread, its mount and its server."""
    of_others = sum(alone[f"{who}_turns"] * seen[f"{who}_ready_us"] for who in ("server", "mounts"))
    return seen["victim_ready_us"] + of_others


# A call that takes no longer beside others than this, by its time alone, is held up by nothing.
LONGER_MIN = 0.05


def bound_by(pairs):
    """What calls waited for in most of the time that they took more beside others: (words, its part of that time).
    By means: of single calls no kernel says how long they waited for a CPU."""
    def more(of):
        return statistics.median(of(alone, beside) - of(alone, alone) for alone, beside, *_ in pairs)
    longer = more(lambda _, seen: seen["mean_us"])
    if longer < LONGER_MIN * statistics.median(alone["mean_us"] for alone, *_ in pairs):
        return "nothing", 0.0
    waits = {"the scheduler": more(lambda _, seen: seen["queued_us"]), "a CPU": more(ready_us)}
    name = max(waits, key=waits.get)
    part = min(1.0, waits[name] / longer)
    return (name if part >= 0.5 else "something else"), part


def beside_another_server(place, limit):
    """The same beside an aggressor of another server, over another mount, who has the same limit there: what both share
    is the machine."""
    state = os.environ["SHARED_STATE"]
    qos("set", "elsewhere", f"match.user={AGGRESSOR}", "match.export=shared", f"limit={limit}M", state=state)
    pair = victim(place)
    qos("remove", "elsewhere", state=state)
    return pair


def part_victim(mounts):
    """Beside an aggressor, at several rates of the export, and without rules, in several places."""
    where = places(mounts)
    where = {name: where[name] for name in os.environ.get("ARMS", "").split() or where if name in where}
    arms = [(name, limit) for name in where for limit in LIMITS_MIB]
    arms += [(name, None) for name in where if name not in ("elsewhere", "small")]
    seen = {arm: [] for arm in arms}
    for number in range(ROUNDS):
        # In turn: what comes first finds another machine.
        for name, limit in arms if number % 2 else reversed(arms):
            place = where[name]
            whole = [("whole", f"limit={limit}M")] if name != "elsewhere" else []
            rules([*whole, USERS] if limit else [], place.state)
            pair = beside_another_server(place, limit) if name == "elsewhere" else victim(place, limit)
            seen[name, limit].append(pair)
    for (name, limit), pairs in seen.items():
        put_victim(f"_{name}_{limit or 'without'}", pairs)
    headline = next(iter(where))  # where there is one CPU, the victim shares it with the writers
    put("qos_victim_alone_p99", statistics.median(alone["p99"] for alone, *_ in seen[headline, RATE_MIB]) * 1e3, "ms")
    put("qos_victim_p99_ratio", ratio(seen[headline, RATE_MIB]), f"ratio, {headline}")
    put("qos_victim_p99_ratio_without", ratio(seen[headline, None]), f"ratio, {headline}")


def ratio(pairs):
    return statistics.median(beside["p99"] / alone["p99"] for alone, beside, *_ in pairs)


def put_victim(arm, pairs):
    put(f"qos_victim_p99_ratio{arm}", ratio(pairs), "ratio")
    sides_of = dict(zip(("alone", "beside", "copier"), zip(*pairs)))
    if "copier" in sides_of:
        put(f"qos_victim_p99_copier_ratio{arm}", ratio(list(zip(sides_of["alone"], sides_of["copier"]))), "ratio")
        put(f"qos_victim_p99_vs_copier{arm}", ratio(list(zip(sides_of["copier"], sides_of["beside"]))), "ratio")
    for name, sides in sides_of.items():
        put(f"qos_victim{arm}_{name}_p99", statistics.median(one["p99"] for one in sides) * 1e3, "ms")
        put(f"qos_victim{arm}_{name}_machine_busy", statistics.median(one["machine_busy"] for one in sides), "part")
        put(f"qos_victim{arm}_{name}_written", statistics.median(one["written_mib"] for one in sides), "MiB/s")
        for key in ("mean_us", "queued_us", "victim_ready_us", "server_ready_us", "mounts_ready_us"):
            put(f"qos_victim{arm}_{name}_{key}", statistics.median(one[key] for one in sides), "us")
    name, part = bound_by(pairs)
    put(f"qos_victim{arm}_bound", part, f"part of the longer time that was waited for {name}")


def share_error(mounts, wanted):
    """The largest error of a share of three to one in any second. The one of less weight has more calls, and
    smaller ones, so that only rules can give that share."""
    rules(wanted)
    load = Load()
    for number in range(8):
        load.add(VICTIM, writer(f"{mounts[0]}/heavy{number}"))
    for number in range(16):
        load.add(AGGRESSOR, writer(f"{mounts[1]}/light{number}", MIB // 4))
    begun = time.monotonic() + 0.5
    seen = load.run(4.6)
    errors = []
    for second in range(4):
        # As the weights count: 32 KiB for each call, and its data.
        done = [sum(size + (32 << 10) for at, _, size in seen[uid] if 0 <= at - begun - second < 1)
                for uid in (VICTIM, AGGRESSOR)]
        errors.append(abs(done[0] / sum(done) - 0.75) / 0.75)
    return max(errors)


def part_share(mounts):
    named = [("heavy", f"match.user={VICTIM}", "weight=3"), ("light", f"match.user={AGGRESSOR}")]
    put("qos_share_error", share_error(mounts, [WHOLE, *named]), "part")
    put("qos_share_error_without", share_error(mounts, []), "part")


def part_idle(mounts):
    """The throughput of one user, the others idle, with rules and without; no limit."""
    ratios = []
    for number in range(2 * ROUNDS):
        rates = {}
        # In turn: what comes second finds another machine.
        for arm in (0, 1) if number % 2 else (1, 0):
            rules([USERS] if arm else [])
            load = Load()
            for writers in range(4):
                load.add(VICTIM, writer(f"{mounts[0]}/idle{writers}"))
            rates[arm] = rate(load.run(SECS)[VICTIM], SECS)
        ratios.append(rates[1] / rates[0])
    put("qos_idle_efficiency", statistics.median(ratios), "ratio")


def part_overhead(mounts):
    """CPU of the server for each small read, with rules and without."""
    costs = {0: [], 1: []}
    for _ in range(2 * ROUNDS + 1):
        for arm, wanted in enumerate(([], [USERS])):
            rules(wanted)
            before = cpu_s()
            seen = Load().add(VICTIM, reader(f"{mounts[0]}/small", 4096, span=1)).run(SECS)
            costs[arm].append((cpu_s() - before) / len(seen[VICTIM]))
    without, with_rules = (statistics.median(costs[arm]) for arm in (0, 1))
    put("qos_overhead", with_rules / without - 1, "part")
    put("qos_cpu_each_call", with_rules * 1e6, "us")


def part_jain(mounts):
    """A thousand users, each with one read of 128 KiB after the other."""
    rules([WHOLE, USERS])
    threading.stack_size(256 << 10)
    load = Load()
    for number in range(1000):
        load.add(10_000 + number, reader(f"{mounts[number % 2]}/large", 128 << 10))
    time.sleep(3)
    begun = time.monotonic()
    time.sleep(6)
    ended = time.monotonic()
    seen = load.end()
    rates = [sum(size for at, _, size in calls if begun <= at < ended) for calls in seen.values()]
    put("qos_jain_1000", sum(rates) ** 2 / (len(rates) * sum(one * one for one in rates)), "index")


def part_change(mounts):
    """From the start of `dray qos` until calls that waited have gone on."""
    times = []
    for _ in range(ROUNDS):
        rules([("slow", f"match.user={AGGRESSOR}", "limit=1M")])
        load = Load()
        for number in range(8):
            load.add(AGGRESSOR, writer(f"{mounts[0]}/change{number}"))
        time.sleep(1.5)
        begun = time.monotonic()
        qos("set", "slow", f"match.user={AGGRESSOR}", "limit=1G")
        seen = load.run(0.5)
        after = [at for at, *_ in seen[AGGRESSOR] if at > begun]
        times.append((after[8] - begun) * 1e3)
    put("qos_rule_change_ms", statistics.median(times), "ms")


def show_all(state):
    """What is shown of the projection's export at each of its servers."""
    shown = subprocess.run([DRAY, "qos", "show", "--json", "--state", state], check=True, capture_output=True)
    [export] = [one for one in json.loads(shown.stdout)["exports"] if one["name"] == "shared"]
    return [export, *export["others"]]


def waiting(shown):
    return [sum(one["waiting"] for one in (server["qos"] or {"classes": []})["classes"]) for server in shown]


def part_spread(_):
    """From the start of `dray qos` at one server until calls that waited have gone on at all of the projection."""
    # Each file is at one of the servers: of so many, some are at each.
    times, mount, state = [], os.environ["SHARED_MOUNT"], os.environ["SHARED_STATE"]

    def slow(limit):
        words = [DRAY, "qos", "set", "slow", f"match.user={AGGRESSOR}", "match.export=shared", f"limit={limit}"]
        subprocess.run([*words, "--state", state], check=True, stdout=subprocess.DEVNULL)

    for _ in range(2 * ROUNDS):
        slow("1G")
        load = Load()
        for number in range(16):
            load.add(AGGRESSOR, writer(f"{mount}/spread{number}", MIB // 4))
        time.sleep(0.5)
        slow("16K")
        deadline = time.monotonic() + 30
        while min(waiting(show_all(state))) == 0 or sum(waiting(show_all(state))) < 16:
            if time.monotonic() > deadline:
                raise TimeoutError(f"calls do not wait at each server: {waiting(show_all(state))}")
            time.sleep(0.1)
        begun = time.monotonic()
        slow("1G")
        time.sleep(0.5)
        load.end()
        first = [next(at for at, *_ in noted if at > begun) for noted in load.calls[AGGRESSOR]]
        times.append((max(first) - begun) * 1e3)
    put("qos_rule_spread_ms", statistics.median(times), "ms")


def main():
    mounts = sys.argv[1:]
    make(f"{mounts[0]}/small", 4096)
    make(f"{mounts[0]}/large", 2 * MIB)
    if "APART_AT" in os.environ:
        make(f"{os.environ['APART_AT'].split(',')[0]}/small", 4096)
    parts = [part_victim, part_share, part_idle, part_overhead, part_jain, part_change, part_spread]
    wanted = os.environ.get("PARTS", "").split()
    for part in parts:
        if not wanted or part.__name__.removeprefix("part_") in wanted:
            part(mounts)


main()
