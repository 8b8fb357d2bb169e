"""Runs test programs, several at a time: most of them wait, for timeouts and for each other.

    cargo test --no-run --message-format=json ... | test_programs.py JOBS WITHOUT COMMAND...

WITHOUT names programs that are left to others, with commas between. COMMAND gets each program as
its last arguments. A program that is made of many files (`tests/NAME/main.rs`) runs file by file, each
in a process of its own: linking such files together saves time, and their tests still share nothing.
Those that take longest begin first, and those that measure run alone when the others have ended.
What a program says is printed when it has ended, below the line by which cargo announces it. The last lines have
the time of each, and what it computed for, with the processes that it waited for. Exits 1 if one has failed.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from os import environ, path, wait4, waitstatus_to_exitcode
from time import monotonic


# Test files and programs that take a quarter of a minute or more, the longest first. One of them that begins
# last would run alone in the end. The last lines of the log have the times of a run.
LONGEST = (
    "whole_program/failover", "whole_program/failover_hangs", "whole_program/supervision", "whole_program/system",
    "whole_program/parting",
    "whole_program/transport", "whole_program/hanging", "whole_program/held_back", "whole_program/survey",
    "whole_program/daemon_death", "whole_program/cluster", "whole_program/stacked", "whole_program/limits",
    "whole_program/round_trips", "whole_program/two_mounts", "whole_program/messages",
    "whole_program/applications", "whole_program/mappings", "client_server/restart", "memory_back",
    "whole_program/starting", "client_server/hostile", "client_server/settled_observed",
    "client_server/opening", "client_server/syncs", "client_server/withdrawn", "whole_program/leases",
    "whole_program/handles",
)
# What counts the cost of calls, measures rates, or distinguishes times by less than a second. It runs alone.
ALONE = {
    "budget", "deep", "front_end/leased_pages", "front_end/leases", "whole_program/believed", "whole_program/qos",
    "whole_program/qos_servers",
}
# How many of the times are shown at the end.
SHOWN = 30


def programs(messages, without):
    """(program, its name, whether it is made of many files, directory of its package) of each."""
    found = []
    for line in messages:
        message = json.loads(line)
        if message.get("reason") != "compiler-artifact" or not message["profile"]["test"]:
            continue
        target = message["target"]
        if message["executable"] and target["name"] not in without:
            many = target["kind"] == ["test"] and path.basename(target["src_path"]) == "main.rs"
            found.append((message["executable"], target["name"], many, path.dirname(message["manifest_path"])))
    return found


def parts(program, name, many, package):
    """(name, program, arguments, directory of the package) of each process: one a file, or one for all."""
    if not many:
        return [(name, program, [], package)]
    listed = subprocess.run(
        [program, "--list", "--format=terse"], cwd=package, stdout=subprocess.PIPE, check=True, text=True
    )
    files = {}
    for line in listed.stdout.splitlines():
        test, _, kind = line.rpartition(": ")
        if kind == "test":
            files.setdefault(test.split("::")[0], []).append(test)
    return [(f"{name}/{file}", program, ["--exact", *tests], package) for file, tests in files.items()]


def rank(part):
    """Those of LONGEST are the first, in their order."""
    return LONGEST.index(part[0]) if part[0] in LONGEST else len(LONGEST)


def title(program, arguments):
    """What runs: the program, and of one that is made of many files which."""
    return " ".join([program, *(name.split("::")[0] for name in arguments[1:2])])


def check_names(names):
    """A file of LONGEST or ALONE that has another name now would lose its place without a word."""
    here = {name.split("/")[0] for name in names}
    lost = [name for name in (*LONGEST, *ALONE) if name.split("/")[0] in here and name not in names]
    if lost:
        sys.exit(f"error: there is no test file {', '.join(lost)}")


def run(command, name, program, arguments, package):
    """As cargo would: in the package's directory. Returns what it said, whether it passed, and (time, time of
    CPUs, name)."""
    start = monotonic()
    process = subprocess.Popen(
        [*command, program, "--show-output", *arguments],
        cwd=package,
        env={**environ, "CARGO_MANIFEST_DIR": package},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with process.stdout as output:
        output = output.read()
    _, status, used = wait4(process.pid, 0)
    process.returncode = waitstatus_to_exitcode(status)
    said = f"     Running {title(program, arguments)}\n{output.decode(errors='replace')}"
    if process.returncode != 0:
        said += f"error: {path.basename(title(program, arguments))} ended with {process.returncode}\n"
    seconds, cpu_seconds = monotonic() - start, used.ru_utime + used.ru_stime
    said += f"       Ended after {seconds:.1f} s, {cpu_seconds:.1f} s of CPU\n"
    return said, process.returncode == 0, (seconds, cpu_seconds, name)


def run_all(jobs, command, every):
    """Returns whether all have passed, and the time of each."""
    passed, times = True, []
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run, command, *one) for one in every]):
            said, well, time = done.result()
            print(said, end="", flush=True)
            passed = passed and well
            times.append(time)
    return passed, times


def main():
    jobs, without, command = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    start = monotonic()
    every = sorted((part for one in programs(sys.stdin, without) for part in parts(*one)), key=rank)
    if not every:
        sys.exit("error: cargo named no test program")
    check_names({part[0] for part in every})
    together = run_all(jobs, command, [part for part in every if part[0] not in ALONE])
    alone = run_all(1, command, [part for part in every if part[0] in ALONE])
    times = sorted(together[1] + alone[1], reverse=True)
    computed = sum(cpu_seconds for _, cpu_seconds, _ in times)
    print(f"Longest of those that took {monotonic() - start:.0f} s, {jobs} at a time, and {computed:.0f} s of CPU:")
    for seconds, cpu_seconds, name in times[:SHOWN]:
        print(f"{seconds:8.1f} s {cpu_seconds:6.1f} s of CPU  {name}")
    sys.exit(0 if together[0] and alone[0] else 1)


main()
