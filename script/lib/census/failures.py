"""What goes wrong at a site, each kind by a function, which ends when it is over. `look` is called
in the middle."""

import os
import signal
import time

from proxy import DOWN, UP


def a_while(site, least, most):
    time.sleep(site.chance.uniform(least, most))


def kill(pid, number=signal.SIGKILL):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has just ended by itself


def serve_again(site, look):
    a_while(site, 0.05, 0.5)
    look()
    site.serve()


def server_killed(site, look):
    site.end_server(signal.SIGKILL)
    serve_again(site, look)


def server_restarted(site, look):
    site.end_server(signal.SIGTERM)
    serve_again(site, look)


def server_stopped(site, look):
    site.signal_server(signal.SIGSTOP)
    a_while(site, 0.3, 2)
    look()
    site.signal_server(signal.SIGCONT)


def server_stopped_and_killed(site, look):
    """What has arrived and was not read is lost with it."""
    site.signal_server(signal.SIGSTOP)
    a_while(site, 0.3, 1)
    site.end_server(signal.SIGKILL)
    serve_again(site, look)


def connections_reset(site, look):
    for number in site.some_mounts():
        site.networks[number].weather.resets.value += 1
    a_while(site, 0.02, 0.1)
    look()


def connections_cut_within_messages(site, look):
    for number in site.some_mounts():
        site.networks[number].weather.cuts.value += 1
    a_while(site, 0.2, 0.5)
    look()


def hold(site, ways, held):
    for number, which in ways:
        site.networks[number].weather.held[which] = held


def held_up(site, look, which, then=None):
    """Nothing arrives in one direction for a while; what comes then may be the end of it."""
    ways = [(number, which) for number in site.some_mounts()]
    hold(site, ways, 1)
    a_while(site, 0.5, 2.5)
    look()
    if then:
        then(ways)
    hold(site, ways, 0)


def requests_held_up(site, look):
    held_up(site, look, UP)


def replies_held_up(site, look):
    held_up(site, look, DOWN)


def reset(site, ways):
    for number, _ in ways:
        site.networks[number].weather.resets.value += 1
    time.sleep(0.1)


def replies_lost(site, look):
    held_up(site, look, DOWN, lambda ways: reset(site, ways))


def replies_lost_and_server_killed(site, look):
    def then(ways):
        site.end_server(signal.SIGKILL)
        reset(site, ways)

    held_up(site, look, DOWN, then)
    serve_again(site, look)


def both_ways_held_up(site, look):
    ways = [(number, which) for number in site.some_mounts() for which in (UP, DOWN)]
    hold(site, ways, 1)
    a_while(site, 0.5, 2.5)
    look()
    hold(site, ways, 0)


def network_slow(site, look):
    numbers = site.some_mounts()
    for number in numbers:
        site.networks[number].weather.delay.value = site.chance.uniform(0.01, 0.2)
    a_while(site, 0.5, 2)
    look()
    for number in numbers:
        site.networks[number].weather.delay.value = 0


def daemon_killed(site, look):
    for number in site.some_mounts():
        kill(site.daemon(number))
    look()


def daemon_stopped(site, look):
    pids = [site.daemon(number) for number in site.some_mounts()]
    for pid in pids:
        kill(pid, signal.SIGSTOP)
    a_while(site, 0.3, 1)
    look()
    for pid in pids:
        kill(pid, signal.SIGCONT)


def daemon_upgraded(site, look):
    look()
    for number in site.some_mounts():
        site.upgrade(number)


def server_and_daemon_killed(site, look):
    pids = [site.daemon(number) for number in site.some_mounts()]
    site.end_server(signal.SIGKILL)
    for pid in pids:
        kill(pid)
    serve_again(site, look)


def daemon_killed_before_replies(site, look):
    """Its successor asks again for what the server has answered."""

    def then(ways):
        for number, _ in ways:
            kill(site.daemon(number))
        time.sleep(0.1)

    held_up(site, look, DOWN, then)


FAILURES = [
    server_killed, server_restarted, server_stopped, server_stopped_and_killed, connections_reset,
    connections_cut_within_messages, requests_held_up, replies_held_up, replies_lost,
    replies_lost_and_server_killed, both_ways_held_up, network_slow, daemon_killed, daemon_stopped,
    daemon_upgraded, server_and_daemon_killed, daemon_killed_before_replies,
]  # fmt: skip
