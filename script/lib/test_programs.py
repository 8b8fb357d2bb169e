"""Runs test programs, several at a time: most of them wait, for timeouts and for each other.

    cargo test --no-run --message-format=json ... | test_programs.py JOBS WITHOUT COMMAND...

WITHOUT names programs that are left to others, with commas between. COMMAND gets each program as
its last arguments. What a program says is printed when it has ended, below the line by which cargo
announces it. Exits 1 if one has failed.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from os import environ, path


def programs(messages, without):
    """(program, directory of its package), those that wait longest first."""
    found = []
    for line in messages:
        message = json.loads(line)
        if message.get("reason") != "compiler-artifact" or not message["profile"]["test"]:
            continue
        if message["executable"] and message["target"]["name"] not in without:
            package = path.dirname(message["manifest_path"])
            found.append((message["target"]["kind"] != ["test"], message["executable"], package))
    # Cargo names a package after those that it uses: what starts whole servers and mounts comes
    # last, and takes longest. Unit tests are done in a moment.
    found.reverse()
    return [(program, package) for _, program, package in sorted(found, key=lambda one: one[0])]


def run(command, program, package):
    """As cargo would: in the package's directory. Returns what it said, and whether it passed."""
    done = subprocess.run(
        [*command, program, "--show-output"],
        cwd=package,
        env={**environ, "CARGO_MANIFEST_DIR": package},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    said = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        said += f"error: {path.basename(program)} ended with {done.returncode}\n"
    return said, done.returncode == 0


def main():
    jobs, without, command = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    every = programs(sys.stdin, without)
    if not every:
        sys.exit("error: cargo named no test program")
    passed = True
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run, command, *one): one[0] for one in every}
        for done in as_completed(running):
            said, well = done.result()
            print(f"     Running {running[done]}\n{said}", end="", flush=True)
            passed = passed and well
    sys.exit(0 if passed else 1)


main()
