"""A network between one mount and its server that can be made to fail: connections are reset, also
in the middle of a message, and either direction is held up or delayed."""

import collections
import multiprocessing
import os
import random
import selectors
import socket
import struct
import time

UP, DOWN = 0, 1
# Bytes read ahead of a receiver that does not take them.
AHEAD_MAX = 1 << 20
PIECE = 1 << 16
# What a cut connection still carries at most.
REST_MAX = 300_000
# How often it is looked whether something else is wanted, seconds.
LOOK_EVERY = 0.01


class Weather:
    """What the maker of the proxy wants of it."""

    def __init__(self):
        self.held = multiprocessing.RawArray("b", 2)
        self.delay = multiprocessing.RawValue("d", 0)
        self.resets = multiprocessing.RawValue("l", 0)
        self.cuts = multiprocessing.RawValue("l", 0)


class Way:
    """One direction of a connection: bytes and when they are due."""

    def __init__(self):
        self.pieces, self.waiting, self.ended = collections.deque(), 0, False
        # So many bytes more, then the connection is reset.
        self.rest = None


class Pair:
    def __init__(self, client, server):
        self.ends = (client, server)
        self.ways = (Way(), Way())

    def reset(self):
        for end in self.ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()


class Proxy:
    """Carries connections to one port on to another one, in a process of its own."""

    def __init__(self, to_port):
        self.weather, self.to_port = Weather(), to_port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.process = multiprocessing.Process(target=self.run, daemon=True)

    def run(self):
        selector, pairs, chance = selectors.DefaultSelector(), [], random.Random(os.getpid())
        self.listener.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ)
        resets = cuts = 0
        while True:
            busy = any(way.pieces for pair in pairs for way in pair.ways)
            selector.select(0.002 if busy else LOOK_EVERY)
            if resets != self.weather.resets.value:
                resets = self.weather.resets.value
                self.end(selector, pairs, list(pairs))
            if cuts != self.weather.cuts.value:
                cuts = self.weather.cuts.value
                for pair in pairs:
                    chance.choice(pair.ways).rest = chance.randrange(REST_MAX)
            self.accept(selector, pairs)
            over = [pair for pair in pairs if self.carry(pair)]
            self.end(selector, pairs, over)

    def end(self, selector, pairs, over):
        for pair in over:
            for end in pair.ends:
                selector.unregister(end)
            pair.reset()
            pairs.remove(pair)

    def accept(self, selector, pairs):
        try:
            client, _ = self.listener.accept()
        except BlockingIOError:
            return
        try:
            server = socket.create_connection(("127.0.0.1", self.to_port))
        except OSError:
            return client.close()
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(end, selectors.EVENT_READ)
        pairs.append(Pair(client, server))

    def carry(self, pair):
        """Moves what can be moved; whether the connection is over."""
        return any([self.carry_way(pair, which) for which in (UP, DOWN)])

    def carry_way(self, pair, which):
        way, source, target = pair.ways[which], pair.ends[which], pair.ends[1 - which]
        if self.weather.held[which]:
            return False
        try:
            while way.waiting < AHEAD_MAX and not way.ended:
                piece = source.recv(PIECE)
                way.ended = not piece
                way.pieces.append((time.monotonic() + self.weather.delay.value, piece))
                way.waiting += len(piece)
        except BlockingIOError:
            pass
        except OSError:
            return True
        return self.pass_on(way, target)

    def pass_on(self, way, target):
        while way.pieces and way.pieces[0][0] <= time.monotonic():
            due, piece = way.pieces.popleft()
            if not piece:
                return True
            if way.rest is not None:
                piece = piece[: way.rest]
            try:
                count = target.send(piece)
            except BlockingIOError:
                count = 0
            except OSError:
                return True
            way.waiting -= count
            if way.rest is not None:
                way.rest -= count
                if way.rest == 0:
                    return True
            if count < len(piece):
                way.pieces.appendleft((due, piece[count:]))
                return False
        return False
