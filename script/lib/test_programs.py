"""Runs test programs, several at a time: most of them wait, for timeouts and for each other.

    cargo test --no-run --message-format=json ... | test_programs.py JOBS WITHOUT COMMAND...

WITHOUT names programs that are left to others, with commas between. COMMAND gets each program as
its last arguments. A program that is made of many files (`tests/NAME/main.rs`) runs file by file, each
in a process of its own: linking such files together saves time, and their tests still share nothing.
What a program says is printed when it has ended, below the line by which cargo announces it. Exits 1
if one has failed.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from os import environ, path
from time import monotonic


def programs(messages, without):
    """(program, whether it is made of many files, directory of its package)."""
    found = []
    for line in messages:
        message = json.loads(line)
        if message.get("reason") != "compiler-artifact" or not message["profile"]["test"]:
            continue
        target = message["target"]
        if message["executable"] and target["name"] not in without:
            many = target["kind"] == ["test"] and path.basename(target["src_path"]) == "main.rs"
            found.append((message["executable"], many, path.dirname(message["manifest_path"])))
    return found


def parts(program, many, package):
    """(program, arguments, directory of the package) of each process: one a file, or one for all."""
    if not many:
        return [(program, [], package)]
    listed = subprocess.run(
        [program, "--list", "--format=terse"], cwd=package, stdout=subprocess.PIPE, check=True, text=True
    )
    files = {}
    for line in listed.stdout.splitlines():
        name, _, kind = line.rpartition(": ")
        if kind == "test":
            files.setdefault(name.split("::")[0], []).append(name)
    return [(program, ["--exact", *tests], package) for tests in files.values()]


def title(program, arguments):
    """What runs: the program, and of one that is made of many files which."""
    return " ".join([program, *(name.split("::")[0] for name in arguments[1:2])])


def run(command, program, arguments, package):
    """As cargo would: in the package's directory. Returns what it said, and whether it passed."""
    start = monotonic()
    done = subprocess.run(
        [*command, program, "--show-output", *arguments],
        cwd=package,
        env={**environ, "CARGO_MANIFEST_DIR": package},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    said = f"     Running {title(program, arguments)}\n{done.stdout.decode(errors='replace')}"
    if done.returncode != 0:
        said += f"error: {path.basename(title(program, arguments))} ended with {done.returncode}\n"
    return said + f"       Ended after {monotonic() - start:.1f} s\n", done.returncode == 0


def main():
    jobs, without, command = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    found = [parts(*one) for one in programs(sys.stdin, without)]
    if not found:
        sys.exit("error: cargo named no test program")
    # The program of most files starts whole servers and mounts, and waits most: it comes first.
    every = [part for program in sorted(found, key=len, reverse=True) for part in program]
    passed = True
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run, command, *one) for one in every]):
            said, well = done.result()
            print(said, end="", flush=True)
            passed = passed and well
    sys.exit(0 if passed else 1)


main()
