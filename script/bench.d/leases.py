"""Loads of `script/bench leases`: the arms interleaved, medians of the rounds, JSON lines.

Ratios are those of a second run beside the bare directory, on one mount; `_first` is the first run beside the
strict mount without leases. `_requests` is how many requests the kernel makes of the daemon in a second run.
The arm `ring` is the same over io_uring, where the kernel has that.
Each arm works in a directory of its own. What one mount changes is recalled from the other ones, and is not leased to
any for a while. So arms that shared a repository measured each other.
"""

import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
import zipfile

WORK = sys.argv[1]
BARE = os.environ["BARE"]
ROUNDS = int(os.environ["ROUNDS"])
FILES = int(os.environ["FILES"])
FILE_MIB = int(os.environ["FILE_MIB"])
DRAY = os.environ["DRAY"]
ARMS = {"bare": BARE, "strict": f"{WORK}/strict", "leased": f"{WORK}/leased"}
LEASED = ["leased"]
if os.path.ismount(f"{WORK}/ring"):
    ARMS["ring"] = f"{WORK}/ring"
    LEASED.append("ring")


# Of what `second_runs` knows.
for name in [*ARMS, "keeps", "back"]:
    os.makedirs(f"{BARE}/{name}", exist_ok=True)
    os.chmod(f"{BARE}/{name}", 0o777)


def shared(at):
    """What all arms read, from the own directory of one."""
    return os.path.dirname(at)


def say(metric, value, unit, arm="leased"):
    line = {"bench": "leases", "arm": arm, "metric": metric, "value": round(value, 4), "unit": unit}
    print(json.dumps(line), flush=True)


def took(run):
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def command(*words, cwd=None):
    return lambda: subprocess.run(words, cwd=cwd, check=True, stdout=subprocess.DEVNULL)


def second_runs(name, run_at, again=None, others=(), untimed=0, strict_part=1):
    """The median ratios of second runs, and of first runs, of `run_at(directory)()`, each in the own directory of its
    arm. `others`: mounts with leases besides. So many runs between the first and the one that is timed are `untimed`.
    The strict mount without leases has a `strict_part`th of the work, and its times count as often: it asks for each
    file."""
    arms, leased = ARMS | {arm: f"{WORK}/{arm}" for arm in others}, [*LEASED, *others]
    ratios, first, asked = ({arm: [] for arm in leased} for _ in range(3))
    for _ in range(ROUNDS):
        times = {}
        for arm, at in arms.items():
            forget(arm in leased)
            run = run_at(f"{at}/{arm}")
            cold = took(run)
            for _ in range(untimed):
                run()
            before = requests(at) if arm in leased else 0
            times[arm] = (cold, took(again(at) if again else run))
            if arm == "strict":
                times[arm] = tuple(time * strict_part for time in times[arm])
            if arm in leased:
                asked[arm].append(requests(at) - before)
        for arm in leased:
            ratios[arm].append(times[arm][1] / times["bare"][1])
            first[arm].append(times[arm][0] / times["strict"][0])
        strict = times["strict"][1] / times["bare"][1]
    for arm in leased:
        say(f"{name}_ratio", statistics.median(ratios[arm]), "x", arm)
        say(f"{name}_first", statistics.median(first[arm]), "x", arm)
        say(f"{name}_requests", statistics.median(asked[arm]), "calls", arm)
    say(f"{name}_ratio", strict, "x", "strict")


def requests(at):
    """What the kernel has asked of the daemon of a mount so far."""
    return sum(status(at)["ops"].values())


def status(at):
    # Without the half second in which it measures rates: what follows at once is to be measured.
    said = subprocess.run([DRAY, "status", at, "--json", "--interval", "0"], check=True, capture_output=True)
    return json.loads(said.stdout)


def forget(is_leased):
    """What was leased ends: a change by another mount would do so file by file. This is a rest of a term."""
    if is_leased:
        subprocess.run(["sh", "-c", "echo 2 >/proc/sys/vm/drop_caches"], check=True)


# Of the tree that the strict mount without leases lists, which takes some 500 us a file.
STRICT_PART = 10


def tree(at, files):
    per = 100
    for number in range(files // per):
        directory = f"{at}/tree/d{number // 10}/e{number}"
        os.makedirs(directory)
        for file in range(per):
            with open(f"{directory}/file{file}", "w") as out:
                out.write("content\n" * 10)


def repository(at):
    at = f"{at}/repo"
    os.makedirs(at)
    for number in range(2000):
        directory = f"{at}/s{number % 50}"
        os.makedirs(directory, exist_ok=True)
        with open(f"{directory}/f{number}.c", "w") as out:
            out.write(f"int f{number};\n")
    git = ["git", "-c", "user.name=b", "-c", "user.email=b@b", "-c", "safe.directory=*"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "b"]):
        subprocess.run(git + words, cwd=at, check=True)


def database(at):
    sql = "create table t(a integer primary key, b text);" + "".join(
        f"insert into t values({n}, 'value {n}');" for n in range(2000))
    subprocess.run(["sqlite3", f"{at}/db", "begin;" + sql + "commit;"], check=True)


SELECTS = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
for n in range(300):
    db.execute("select b from t where a = ?", (n * 6,)).fetchone()
"""


def cached():
    """Reads of a file on the local disk through the mount, beside the same file read from that disk."""
    size = FILE_MIB << 20
    with open(f"{BARE}/large", "wb") as out:
        for _ in range(FILE_MIB):
            out.write(os.urandom(1 << 20))
    time.sleep(0.3)  # its times are past
    begin = time.perf_counter()
    subprocess.run([DRAY, "cache", "attach", f"{WORK}/cached/large"], check=True, stdout=subprocess.DEVNULL)
    say("pcc_attach_mib_s", FILE_MIB / (time.perf_counter() - begin), "MiB/s", "cached")
    native = next(os.path.join(root, name) for root, _, names in os.walk(os.environ["CACHE"])
                  for name in names if name.endswith(".data"))

    def read(path):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass

    def read_past_pages(path):
        """Pages that the kernel has of the mount's file are dropped, so that each round asks the cache."""
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return took(lambda: read(path))

    arms = {"cached": "cached", "passthrough": "through", "no_passthrough": "asked"}
    ratios = {arm: [] for arm in arms}
    for _ in range(ROUNDS):
        for arm, mount in arms.items():
            ratios[arm].append(took(lambda: read(native)) / read_past_pages(f"{WORK}/{mount}/large"))
    for arm, values in ratios.items():
        say("pcc_read_vs_native", statistics.median(values), "x", arm)
    assert os.stat(f"{WORK}/cached/large").st_size == size


def mapped():
    """Each page of a file in a mapping. The file has not been written for a while. At their second use the kernel
    moves pages of files to its active list, once, on any file system of disks (ext4 takes twice as long then, too). The
    bare directory is a tmpfs, which has no such list. So that run is not timed."""
    with open(f"{BARE}/mapped", "wb") as out:
        for _ in range(FILE_MIB):
            out.write(os.urandom(1 << 20))
    os.utime(f"{BARE}/mapped", (1, 1))

    def touch(at):
        def run():
            with open(f"{shared(at)}/mapped", "rb") as file, \
                    mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
                mapping[::4096]
        return run

    second_runs("warm_mmap", touch, untimed=1)


def imports():
    """Programs that import the scientific packages of Python, installed outside of the timing."""
    packages = ["numpy", "scipy", "pandas", "pyarrow"]
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", f"{BARE}/site"] + packages
    if subprocess.run(install, capture_output=True).returncode != 0:
        print("skipped: import_ratio, pip cannot install the packages", file=sys.stderr)
        return

    def load(at):
        path = ["env", f"PYTHONPATH={shared(at)}/site"]
        return command(*path, sys.executable, "-B", "-c", f"import {', '.join(packages)}")

    second_runs("import", load)


def contended():
    """Two mounts append to one file and look at it in turn, with leases and without."""

    def fight(here, there):
        def run():
            path = "contended"
            with open(f"{here}/{path}", "ab", buffering=0) as one, \
                    open(f"{there}/{path}", "ab", buffering=0) as other:
                for step in range(1000):
                    (one if step % 2 else other).write(b"x")
                    os.stat(f"{here if step % 2 else there}/{path}")
        return run

    ratios = []
    for _ in range(ROUNDS):
        strict = took(fight(f"{WORK}/strict", f"{WORK}/strict2"))
        ratios.append(took(fight(f"{WORK}/leased", f"{WORK}/other")) / strict)
    say("contended_vs_strict", statistics.median(ratios), "x")


def idle():
    """Switches of context of the daemon of a mount that rests, in ten seconds."""
    pid = status(f"{WORK}/leased")["pid"]

    def switches():
        count = 0
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/status") as file:
                count += sum(int(line.split()[1]) for line in file if "ctxt_switches" in line)
        return count

    time.sleep(8)  # longer than a term
    before = switches()
    time.sleep(10)
    say("idle_wakeups_10s", switches() - before, "switches")


def small_files():
    """500 small files written by one program."""

    def write(at):
        def run():
            directory = f"{at}/small{os.urandom(4).hex()}"
            os.mkdir(directory)
            for number in range(500):
                with open(f"{directory}/f{number}", "w") as out:
                    out.write("content")
        return run

    second_runs("small_files", write, others=("keeps", "back"))


def fresh(at):
    """A directory of this run that was not there before."""
    directory = f"{at}/new{os.urandom(4).hex()}"
    os.mkdir(directory)
    return directory


def build():
    """A source tree of 150 files is unpacked and built."""
    if not (shutil.which("cc") and shutil.which("make")):
        print("skipped: untar_build_ratio, there is no cc or no make", file=sys.stderr)
        return
    source = f"{WORK}/source"
    os.makedirs(source)
    units = [f"u{number}" for number in range(150)]
    for unit in units:
        with open(f"{source}/{unit}.c", "w") as out:
            out.write(f'#include "all.h"\nint {unit}(void) {{ return {len(unit)}; }}\n')
    with open(f"{source}/all.h", "w") as out:
        out.writelines(f"int {unit}(void);\n" for unit in units)
    with open(f"{source}/main.c", "w") as out:
        out.write('#include "all.h"\nint main(void) { return u0() - 2; }\n')
    with open(f"{source}/Makefile", "w") as out:
        objects = " ".join(f"{unit}.o" for unit in units + ["main"])
        out.write(f"main: {objects}\n\tcc -o $@ $^\n%.o: %.c all.h\n\tcc -O0 -c $<\n")
    archive = f"{WORK}/source.tar"
    subprocess.run(["tar", "-cf", archive, "-C", source, "."], check=True)

    def work(at):
        def run():
            directory = fresh(at)
            subprocess.run(["tar", "-xf", archive, "-C", directory], check=True)
            subprocess.run(["make", "-s", "-j2"], cwd=directory, check=True)
            subprocess.run([f"{directory}/main"], check=True)
        return run

    second_runs("untar_build", work)


def pip_install():
    """A package of 400 modules is installed from a file: nothing comes from a network."""
    wheel, info = f"{WORK}/bench_wheel-1-py3-none-any.whl", "bench_wheel-1.dist-info"
    with zipfile.ZipFile(wheel, "w") as out:
        names = [f"bench_wheel/m{number}.py" for number in range(400)]
        for name in names:
            out.writestr(name, "VALUE = 1\n" * 40)
        out.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: bench-wheel\nVersion: 1\n")
        out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
           "--disable-pip-version-check", "--root-user-action=ignore", wheel, "--target"]
    if subprocess.run(pip + [f"{WORK}/pip"], capture_output=True).returncode != 0:
        print("skipped: pip_install_ratio, pip cannot install a file", file=sys.stderr)
        return
    second_runs("pip_install", lambda at: lambda: command(*pip, fresh(at))())


def calls(at):
    """Round trips of a mount so far."""
    return status(at)["server"]["calls"]


def round_trips():
    """Round trips of a long listing by a mount that knows nothing, and of new small files."""
    names = [f"file{number:016}" for number in range(5000)]
    os.mkdir(f"{BARE}/flat")
    for name in names:
        with open(f"{BARE}/flat/{name}", "w"):
            pass
    at = f"{WORK}/cold"
    before = calls(at)
    command("ls", "-l", f"{at}/flat")()
    # As a server counts them: a record, its name, and attributes.
    listed = sum(24 + len(name) + 128 for name in names)
    say("cold_round_trips_per_64k", (calls(at) - before) / (listed / 65536), "calls")
    at = f"{WORK}/leased"
    directory = fresh(at)
    time.sleep(1)  # the other mount had listed where it is made: what is recalled rests for a while
    before = calls(at)
    for number in range(500):
        with open(f"{directory}/f{number}", "w") as out:
            out.write("content")
    say("create_round_trips_leased", (calls(at) - before) / 500, "calls")


def written_back():
    """Synced writes of 64 KiB to one file, and small files that are synced and closed: under write leases, through and
    back. Ratios are those of the time without write leases beside the arm's."""

    def one_file(at):
        with open(f"{at}/written{os.urandom(4).hex()}", "xb", buffering=0) as out:
            for _ in range(100):
                out.write(bytes(64 << 10))
                os.fsync(out.fileno())

    def files(at):
        directory = fresh(at)
        for number in range(200):
            with open(f"{directory}/f{number}", "xb", buffering=0) as out:
                out.write(b"content")
                os.fsync(out.fileno())

    for name, write, count in (("synced_64k", one_file, 100), ("synced_files", files, 200)):
        ratios = {arm: [] for arm in ("keeps", "back")}
        asked = dict(ratios)
        for _ in range(ROUNDS):
            without = took(lambda: write(f"{WORK}/strict"))
            for arm, found in ratios.items():
                before = calls(f"{WORK}/{arm}")
                found.append(without / took(lambda: write(f"{WORK}/{arm}")))
                asked[arm] = asked[arm] + [(calls(f"{WORK}/{arm}") - before) / count]
        for arm, found in ratios.items():
            say(f"{name}_gain", statistics.median(found), "ratio", arm)
            say(f"{name}_round_trips", statistics.median(asked[arm]), "calls", arm)


for arm in ARMS:
    tree(f"{BARE}/{arm}", FILES // STRICT_PART if arm == "strict" else FILES)
    repository(f"{BARE}/{arm}")
    database(f"{BARE}/{arm}")
round_trips()
second_runs("ls_lr", lambda at: command("ls", "-lR", f"{at}/tree"), strict_part=STRICT_PART)
second_runs("du", lambda at: command("du", "-s", f"{at}/tree"), strict_part=STRICT_PART)
second_runs("find", lambda at: command("find", f"{at}/tree", "-newer", f"{at}/db"), strict_part=STRICT_PART)
second_runs("git_status", lambda at: command("git", "-c", "safe.directory=*", "status", "-s", cwd=f"{at}/repo"))
second_runs("sqlite_select", lambda at: command("python3", "-c", SELECTS, f"{at}/db"))
small_files()
build()
pip_install()
mapped()
imports()
contended()
written_back()
cached()
idle()
