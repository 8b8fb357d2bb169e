"""A server, and two mounts of it through networks that can fail."""

import json
import os
import random
import signal
import socket
import subprocess
import time

from proxy import Proxy

# What should take a moment takes at most this long.
PATIENCE_SECONDS = 60


def wait_for(what, condition):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited in vain for {what}")
        time.sleep(0.02)
    return found


def start_time(pid):
    """In clock ticks since boot, by which a process differs from the next one of its number."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
        return stat.read().rpartition(") ")[2].split()[19]


def free_port():
    """One of the loopback that nobody listens on, below those that the kernel gives to any process that asks
    for any: nobody else takes it while the server is away."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


class Site:
    def __init__(self, options, chance):
        self.dray, self.export, self.scratch = options.dray, options.export, options.scratch
        self.transport, self.chance = options.transport, chance
        self.mounts, self.networks, self.server = [], [], None
        self.port = free_port()

    def __enter__(self):
        try:
            self.serve()
            self.networks = [Proxy(self.port) for _ in range(2)]
            for network in self.networks:
                network.process.start()
            self.mounts = [self.mount(number) for number in range(2)]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for at in self.mounts:
            subprocess.call([self.dray, "umount", "--lazy", at])
        for network in self.networks:
            network.process.kill()
        if self.server:
            self.signal_server(signal.SIGCONT)
            self.end_server(signal.SIGTERM)

    def log(self, name):
        return open(os.path.join(self.scratch, name), "ab")

    def remember(self, pid):
        """The end of the suite ends this process, too."""
        with open(os.path.join(self.scratch, "pids"), "a", encoding="utf-8") as pids:
            print(pid, start_time(pid), file=pids)

    def serve(self):
        # Insecure: what stands between comes from any port.
        words = [self.dray, "serve", "--export", f"test={self.export},squash=none,insecure"]
        words += ["--listen", f"tcp://127.0.0.1:{self.port}"]
        words += ["--state", os.path.join(self.scratch, "census-state")]
        with self.log("server.log") as log:
            self.server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=log, stdout=log)
        self.remember(self.server.pid)
        wait_for("the server", self.listens)

    def listens(self):
        if self.server.poll() is not None:
            raise SystemExit("the server has ended")
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True

    def signal_server(self, number):
        self.server.send_signal(number)

    def end_server(self, number):
        self.server.send_signal(number)
        self.server.wait(PATIENCE_SECONDS)

    def mount(self, number):
        at = os.path.join(self.scratch, f"census-{number}")
        os.makedirs(at, exist_ok=True)
        target = f"dray://127.0.0.1:{self.networks[number].port}/test"
        words = [self.dray, "mount", target, at, "-o", f"transport={self.transport}"]
        with self.log("mount.log") as log:
            subprocess.check_call(words, stdin=subprocess.DEVNULL, stderr=log, stdout=log)
        return at

    def processes(self, kind, number):
        """Of one mount: those of this kind."""
        found, at = [], self.mounts[number].encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as line:
                    words = line.read().split(b"\0")
            except OSError:
                continue  # it has ended
            if len(words) > 1 and words[1] == kind.encode() and at in words:
                found.append(int(pid))
        return found

    def daemon(self, number):
        """The process that serves a mount; between two of them there is none for a moment."""
        return wait_for("a daemon", lambda: self.processes("mount-daemon", number))[0]

    def upgrade(self, number):
        subprocess.check_call([self.dray, "upgrade", self.mounts[number]])

    def status(self):
        state = os.path.join(self.scratch, "census-state")  # others may serve a `test`, too
        words = [self.dray, "status", state, "--json", "--interval", "0"]
        return json.loads(subprocess.check_output(words))

    def some_mounts(self):
        """One or both."""
        return self.chance.choice([[0], [1], [0, 1]])
