"""What dray can do on the kernel that runs this: kernel_probe.py DRAY FACTS

Serves an ext4 over loopback, mounts it, tries one thing after the other, and writes a line
"name TAB answer" for each to FACTS. The answer is `yes`, or what happened instead. Needs root.
Ends with 1 if something failed that every supported kernel must have.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import multiprocessing
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

libc = ctypes.CDLL(None, use_errno=True)
DRAY, FACTS = sys.argv[1:3]
SCRATCH = tempfile.mkdtemp(prefix="dray-kernel-")
PORT = 23440
# How often a server or a daemon is killed.
STRIKES = int(os.environ.get("DRAY_STRIKES", 3))
# A single thing takes at most this long, seconds; guests are emulated.
LIMIT = 90 + 10 * STRIKES
AT_FDCWD = -100
NOT_TRIED = "not tried: "
SWITCH = "/sys/module/fuse/parameters/enable_uring"


def at(*parts):
    return os.path.join(SCRATCH, *parts)


def call(name, *args):
    """A function of the C library; its error as OSError."""
    result = getattr(libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def wait_until(what, condition, limit=40):
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain for {what}")
        time.sleep(0.05)


# The server and the mounts.


def prepare():
    os.chmod(SCRATCH, 0o755)  # other users have to get in
    os.makedirs(at("store"))
    with open(at("image"), "wb") as image:
        image.truncate(96 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", at("image")], check=True)
    subprocess.run(["mount", "-t", "ext4", "-o", "loop", at("image"), at("store")], check=True)
    os.mkdir(at("store", "export"))
    os.chmod(at("store", "export"), 0o777)


def environment():
    return dict(os.environ, DRAY_RUN_DIR=at("run"))


def serve():
    """Starts a server; it listens when this returns."""
    export = f"test={at('store', 'export')},squash=none"
    log = open(at("server.log"), "ab")
    server = subprocess.Popen(
        [DRAY, "serve", "--export", export, "--listen", f"tcp://127.0.0.1:{PORT}", "--state",
         at("state")], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment())
    def listens():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", PORT)) == 0

    wait_until("the server", listens)
    return server


def mount(name, options=""):
    os.makedirs(at(name), exist_ok=True)
    words = [DRAY, "mount", f"dray://127.0.0.1:{PORT}/test", at(name)]
    if options:
        words += ["-o", options]
    # Files, not pipes: the supervisor keeps what it inherits.
    with open(at("mount.log"), "ab") as log:
        subprocess.run(words, check=True, timeout=LIMIT, env=environment(), stdout=log,
                       stderr=log, stdin=subprocess.DEVNULL)


def umount(name):
    words = [DRAY, "umount", at(name)]
    subprocess.run(words, check=True, timeout=LIMIT, env=environment())


def status(name):
    words = [DRAY, "status", at(name), "--json"]
    said = subprocess.run(words, check=True, timeout=LIMIT, env=environment(), capture_output=True)
    report = json.loads(said.stdout)
    while isinstance(report, list):
        report = report[0]
    return report


# What is tried. Each in a process of its own, so that a hang is an answer, too.


def names():
    base = at("mnt", "names")
    os.mkdir(base)
    for name in ("a", "b"):
        with open(f"{base}/{name}", "w") as file:
            file.write(name)
    os.rename(f"{base}/a", f"{base}/c")
    os.link(f"{base}/c", f"{base}/hard")
    os.symlink("c", f"{base}/soft")
    os.mkfifo(f"{base}/fifo")
    assert open(f"{base}/soft").read() == "a" and os.stat(f"{base}/c").st_nlink == 2
    paths = [AT_FDCWD, f"{base}/c".encode(), AT_FDCWD, f"{base}/b".encode()]
    call("renameat2", *paths, 2)  # RENAME_EXCHANGE
    assert open(f"{base}/b").read() == "a"
    try:
        call("renameat2", *paths, 1)  # RENAME_NOREPLACE
        return "no: RENAME_NOREPLACE replaced"
    except OSError as error:
        assert error.errno == errno.EEXIST, error
    os.unlink(f"{base}/b")
    assert sorted(os.listdir(base)) == ["c", "fifo", "hard", "soft"]
    assert sorted(os.listdir(at("twin", "names"))) == ["c", "fifo", "hard", "soft"]
    shutil.rmtree(base)


def large_data():
    data = os.urandom(5 << 20)
    with open(at("mnt", "large"), "wb", buffering=0) as file:
        assert file.write(data) == len(data)
        os.fsync(file.fileno())
    with open(at("twin", "large"), "rb") as file:
        assert file.read() == data


def direct_data():
    data = mmap.mmap(-1, 1 << 20)
    data.write(os.urandom(1 << 20))
    file = os.open(at("mnt", "direct"), os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    assert os.pwritev(file, [data], 4096) == 1 << 20
    back = mmap.mmap(-1, 1 << 20)
    assert os.preadv(file, [back], 4096) == 1 << 20
    assert back[:] == data[:]
    os.close(file)


def seen_at_once():
    """Under strict a size and a name are right at the next call."""
    for number in range(20):
        with open(at("mnt", "grows"), "ab", buffering=0) as file:
            file.write(b"x" * 100)
        assert os.stat(at("twin", "grows")).st_size == 100 * (number + 1)
        assert os.path.getsize(at("store", "export", "grows")) == 100 * (number + 1)
        open(at("twin", f"name{number}"), "w").close()
        assert os.path.exists(at("mnt", f"name{number}"))


def names_at_open():
    """Under close-to-open open(2) finds what has a name now, whatever the kernel believes."""
    def write(name, path, text):
        with open(at(name, path), "w") as file:
            file.write(text)

    def read(path):
        with open(at("ctoe", path)) as file:
            return file.read()

    for number in range(20):
        write("mnt", "new", str(number))
        os.rename(at("mnt", "new"), at("mnt", "replaced"))
        assert read("replaced") == str(number)
        os.rename(at("mnt", "replaced"), at("mnt", f"kept{number}"))
        write("ctoe", "replaced", "cut and written")
        assert open(at("mnt", f"kept{number}")).read() == str(number)
        kept = os.open(at("ctoe", f"kept{number}"), os.O_RDONLY)
        os.unlink(at("mnt", "replaced"))
        for path, errno_of in (("replaced", errno.ENOENT), (f"kept{number}", 0)):
            try:
                found = 0 if read(path) == str(number) else errno.EIO
            except OSError as error:
                found = error.errno
            assert found == errno_of
        os.rename(at("mnt", f"kept{number}"), at("mnt", "kept"))
        assert open(f"/proc/self/fd/{kept}").read() == str(number)
        os.close(kept)


def appends():
    files = [os.open(at(name, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
             for name in ("mnt", "twin")]
    for number in range(200):
        os.write(files[number % 2], b"%05d\n" % number)
    lines = open(at("mnt", "log"), "rb").read().split()
    assert lines == [b"%05d" % number for number in range(200)]


def exclusive(family, first, second):
    """What `first` has locked `second` cannot lock, until it is given back."""
    one, two = (os.open(path, os.O_RDWR | os.O_CREAT) for path in (first, second))
    lock = fcntl.flock if family == "flock" else fcntl.lockf
    lock(one, fcntl.LOCK_EX)
    try:
        lock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return f"no: {family} was given twice"
    except BlockingIOError:
        pass
    lock(one, fcntl.LOCK_UN)
    lock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return None


def locks():
    for family in ("flock", "fcntl"):
        wrong = exclusive(family, at("mnt", family), at("twin", family))
        if wrong:
            return wrong


def waiting_locks():
    """A lock that is waited for comes, and a signal ends the wait."""
    path = at("mnt", "waiting")
    holder = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    other = os.open(at("twin", "waiting"), os.O_RDWR)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        return "no: a lock that is held was given"
    except InterruptedError:
        pass
    child = os.fork()
    if child == 0:
        time.sleep(0.5)
        fcntl.flock(holder, fcntl.LOCK_UN)
        os._exit(0)
    fcntl.flock(other, fcntl.LOCK_EX)
    os.waitpid(child, 0)


def interrupt(*_):
    raise InterruptedError


def private_mappings():
    with open(at("mnt", "large"), "rb") as file, \
            mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        file.seek(0)
        assert mapped[:] == file.read()
    shutil.copy("/bin/true", at("mnt", "program"))
    os.chmod(at("mnt", "program"), 0o755)
    subprocess.run([at("mnt", "program")], check=True)


def shared_mapping(name):
    with open(at(name, f"mapped-{name}"), "w+b") as file:
        file.truncate(8192)
        with mmap.mmap(file.fileno(), 8192) as mapped:
            mapped[5000:5005] = b"store"
            mapped.flush()
            with open(at("store", "export", f"mapped-{name}"), "rb") as below:
                below.seek(5000)
                assert below.read(5) == b"store"


def unnamed_files():
    file = os.open(at("mnt"), os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(file, b"unnamed")
    link = f"/proc/self/fd/{file}".encode()
    call("linkat", AT_FDCWD, link, AT_FDCWD, at("mnt", "named").encode(), 0x400)
    assert open(at("twin", "named")).read() == "unnamed"


def extended_attributes():
    path = at("mnt", "attributes")
    open(path, "w").close()
    os.setxattr(path, "user.key", b"value")
    assert os.getxattr(at("twin", "attributes"), "user.key") == b"value"
    assert "user.key" in os.listxattr(path)
    os.removexattr(path, "user.key")


def as_user(uid, action):
    """Runs `action` as an ordinary user; whether it was allowed."""
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        try:
            action()
            os._exit(0)
        except PermissionError:
            os._exit(1)
        except BaseException:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), f"code {code}"
    return code == 0


def access_lists(name):
    below = at("store", "export")
    if subprocess.run(["setfacl", "-m", "u:1001:rwx", below], capture_output=True).returncode:
        return NOT_TRIED + "the file system below has none on this kernel"
    path = at(name, f"listed-{name}")
    with open(path, "w") as file:
        file.write("listed")
    os.chmod(path, 0o600)
    subprocess.run(["setfacl", "-m", "u:1001:r", path], check=True)
    assert as_user(1001, lambda: open(path).read())
    assert not as_user(1001, lambda: open(path, "r+"))
    assert not as_user(1002, lambda: open(path).read())


def users():
    path = at("mnt", "private")
    with open(path, "w") as file:
        file.write("mine")
    os.chmod(path, 0o640)
    os.chown(path, 0, 3000)
    assert not as_user(1001, lambda: open(path).read())
    child = os.fork()
    if child == 0:
        os.setgroups([3000])
        os.setgid(1001)
        os.setuid(1001)
        open(path).read()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def birth_time():
    """statx(2); the structure's fields are at fixed places."""
    def born(path):
        buffer = ctypes.create_string_buffer(256)
        call("statx", AT_FDCWD, path.encode(), 0, 0x800, buffer)
        mask = int.from_bytes(buffer[0:4], "little")
        return int.from_bytes(buffer[80:88], "little") if mask & 0x800 else None

    path = "large"
    below, above = born(at("store", "export", path)), born(at("mnt", path))
    assert below is not None
    if above is None:
        return "no: not announced"
    assert below == above, f"{above}, below {below}"


def space():
    path = at("mnt", "space")
    with open(path, "w+b", buffering=0) as file:
        file.write(b"x" * 65536)
        call("fallocate", file.fileno(), 3, ctypes.c_long(8192), ctypes.c_long(16384))
        assert os.pread(file.fileno(), 16384, 8192) == bytes(16384)
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 8192
        assert os.lseek(file.fileno(), 8192, os.SEEK_DATA) == 24576
        with open(at("mnt", "copied"), "w+b", buffering=0) as copy:
            assert os.copy_file_range(file.fileno(), copy.fileno(), 65536, 0, 0) == 65536
            assert os.path.getsize(at("store", "export", "copied")) == 65536


def writer(base, name, stop, done, aborted):
    """Appends numbered lines, makes and renames directories in `base`, until it gets the order to stop. What
    was acknowledged is noted beside the mount."""
    log = os.open(f"{base}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number = 0
    with open(at(f"done-{name}"), "w") as acknowledged:
        while not stop.is_set():
            line, new, named = b"%06d\n" % number, f"{base}/new{number}", f"{base}/dir{number}"
            steps = [("line", os.write, log, line), ("mkdir", os.mkdir, new),
                     ("rename", os.rename, new, named)]
            for word, step, *arguments in steps:
                try:
                    step(*arguments)
                    print(word, number, file=acknowledged, flush=True)
                except ConnectionAbortedError:
                    # Where the kernel cannot send requests again: done or not, who knows.
                    aborted.value += 1
                    break
            number += 1
            done.value = number


def under_load(mounted, name, strike):
    """What was acknowledged is there, once, although `strike` was done meanwhile, often."""
    base = at(mounted, name)
    os.mkdir(base)
    stop = multiprocessing.Event()
    done, aborted = multiprocessing.Value("q", 0), multiprocessing.Value("q", 0)
    worker = multiprocessing.Process(target=writer, args=(base, name, stop, done, aborted))
    worker.start()

    def goes_on(what):
        before = done.value
        wait_until(what, lambda: done.value > before + 5 or not worker.is_alive())

    for _ in range(STRIKES):
        goes_on("some work")
        strike()
        goes_on("work to go on")
    stop.set()
    worker.join(LIMIT)
    if worker.exitcode != 0:
        return f"no: the application failed ({worker.exitcode})"
    base = at("store", "export", name)
    lines = open(f"{base}/log").read().split()
    assert lines == sorted(set(lines)), "lines are doubled or out of order"
    for word, number in map(str.split, open(at(f"done-{name}"))):
        number = int(number)
        assert word != "line" or f"{number:06}" in lines, f"line {number} is lost"
        assert word != "rename" or os.path.isdir(f"{base}/dir{number}"), f"{number} is lost"
    if aborted.value:
        return "goes on; calls under way fail with ECONNABORTED"
    return None


server = None


def server_dies(mounted="mnt"):
    def strike():
        global server
        server.kill()
        server.wait()
        server = serve()
    return under_load(mounted, f"over-server-{mounted}", strike)


def daemon_dies(mounted="mnt"):
    def strike():
        pid = status(mounted)["pid"]
        os.kill(pid, signal.SIGKILL)

        def another():
            try:
                return status(mounted)["pid"] != pid
            except (subprocess.SubprocessError, ValueError, KeyError, IndexError):
                return False
        wait_until("another daemon", another)
    return under_load(mounted, f"over-daemon-{mounted}", strike)


def sent_again():
    return "yes" if "has_resend" in status("mnt")["kernel"]["flags"] else "no"


def switch_on():
    """FUSE over io_uring for new mounts; what the switch was, or None without one."""
    try:
        with open(SWITCH, "r+") as switch:
            before = switch.read()
            switch.write("Y")
            return before
    except OSError:
        return None


def ring():
    """Rings asked for: what one gets."""
    mount("ring", "transport=uring")
    with open(at("ring", "by-ring"), "w") as file:
        file.write("ring")
    assert open(at("mnt", "by-ring")).read() == "ring"
    used = status("ring")["transport"]
    return "yes" if used == "uring" else f"no: {used}"


def on_ring(action):
    """The same through a ring, where there is one."""
    def tried():
        if not os.path.ismount(at("ring")) or status("ring")["transport"] != "uring":
            return NOT_TRIED + "no ring"
        return action("ring")
    return tried


def chosen():
    """Which transport a mount takes by default."""
    mount("auto")
    report = status("auto")
    umount("auto")
    return report["transport"]


def unmounts():
    for name in ("ring", "ctoe", "twin", "mnt"):
        if os.path.ismount(at(name)):
            umount(name)


# What every kernel must have, and what depends on it.
MUST, MAY = True, False
FACTS_TRIED = [
    ("names: create, rename, exchange, links", MUST, names),
    ("reads and writes over 1 MiB", MUST, large_data),
    ("O_DIRECT", MUST, direct_data),
    ("strict: seen by the other mount at once", MUST, seen_at_once),
    ("names at open(2), `close-to-open`", MUST, names_at_open),
    ("O_APPEND from two mounts", MUST, appends),
    ("flock and fcntl locks over two mounts", MUST, locks),
    ("waiting locks, ended by a signal", MUST, waiting_locks),
    ("users and supplementary groups", MUST, users),
    ("extended attributes", MUST, extended_attributes),
    ("ACLs, `strict`", MUST, lambda: access_lists("mnt")),
    ("ACLs, `close-to-open`", MUST, lambda: access_lists("ctoe")),
    ("fallocate, holes, copy_file_range", MUST, space),
    ("programs and private mappings, `strict`", MUST, private_mappings),
    ("MAP_SHARED, `strict`", MAY, lambda: shared_mapping("mnt")),
    ("MAP_SHARED, `close-to-open`", MUST, lambda: shared_mapping("ctoe")),
    ("O_TMPFILE", MAY, unnamed_files),
    ("statx with birth time", MAY, birth_time),
    ("kill -9 of the server under load", MUST, server_dies),
    ("requests sent again to a new daemon", MAY, sent_again),
    ("kill -9 of the daemon under load", MAY, daemon_dies),
    ("FUSE over io_uring", MAY, ring),
    ("kill -9 of the server under load, ring", MUST, on_ring(server_dies)),
    ("kill -9 of the daemon under load, ring", MUST, on_ring(daemon_dies)),
    ("taken by itself", MAY, chosen),
    ("unmounting", MUST, unmounts),
]


def answer(action):
    try:
        return action() or "yes"
    except AssertionError as error:
        return f"no: {error or 'wrong answer'}"
    except OSError as error:
        return f"no: {errno.errorcode.get(error.errno, error)}"
    except subprocess.SubprocessError as error:
        return f"no: {error}"


def in_child(action):
    receive, send = multiprocessing.Pipe(False)
    child = multiprocessing.Process(target=lambda: send.send(answer(action)))
    child.start()
    if receive.poll(LIMIT):
        result = receive.recv()
        child.join(5)
        return result
    child.kill()
    return f"no: not done after {LIMIT} s"


def main():
    global server
    failed = False
    switch = switch_on()
    try:
        prepare()
        server = serve()
        mount("mnt", "transport=classic")
        mount("twin", "transport=classic")
        mount("ctoe", "transport=classic,consistency=close-to-open")
        kernel = status("mnt")["kernel"]
        with open(FACTS, "w") as facts:
            facts.write(f"\t{platform.release()}\n")
            facts.write(f"FUSE protocol agreed on\t7.{kernel['minor']}\n")
            for name, must, action in FACTS_TRIED:
                # The server is this process's child: who kills it must be, too.
                here = name.startswith("kill -9 of the server")
                found = answer(action) if here else in_child(action)
                failed |= must and found != "yes" and not found.startswith(NOT_TRIED)
                facts.write(f"{name}\t{found}\n")
                facts.flush()
                print(f"{name}: {found}", flush=True)
    finally:
        clean_up(failed)
        if switch is not None:
            with open(SWITCH, "w") as file:
                file.write(switch)
    sys.exit(1 if failed else 0)


def clean_up(failed):
    for name in ("auto", "ring", "ctoe", "twin", "mnt"):
        libc.umount2(at(name).encode(), 2)
    if server:
        server.kill()
        server.wait()
    libc.umount2(at("store").encode(), 2)
    for log in ("server.log", "mount.log"):
        if failed and os.path.exists(at(log)):
            print(open(at(log), errors="replace").read()[-4000:])
    shutil.rmtree(SCRATCH, ignore_errors=True)


if __name__ == "__main__":
    main()
