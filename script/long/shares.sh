#!/bin/bash
# A client that takes all locks or open files that it can, and another client that wants one: shares.sh [classic|uring]
# takes: 5 min
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/long.sh"
transport=${1:-classic}
begin shares
store 300
serve
mount_at aggressor
mount_at bystander
touch "$scratch/store/export/greedy" "$scratch/store/export/modest"

# greedy WHAT: takes all `locks` or `files` that it can have, says how many these are, and keeps them.
greedy() {
    python3 - "$scratch/aggressor/greedy" "$1" <<'PYTHON'
import errno
import fcntl
import os
import resource
import sys
import time

path, what = sys.argv[1:]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def lock(file, number):
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 2 * number)


def take():
    """How many this process has got, and why no more."""
    file = os.open(path, os.O_RDWR)
    for number in range(1 << 21):
        try:
            if what == "locks":
                lock(file, number)
            else:
                os.open(path, os.O_RDONLY)
        except OSError as error:
            return number, error.errno
    return number, 0


total = 0
while True:
    count, why = take()
    total += count
    if why != errno.EMFILE:
        break
    if os.fork():  # the parent keeps what it has; its child has the same, and needs others
        time.sleep(100_000)
    os.closerange(3, hard)
print(f"figure shares: {total} {what}, then {errno.errorcode.get(why, why)}", flush=True)
time.sleep(100_000)
PYTHON
}

# modest WHAT: takes one.
modest() {
    python3 - "$scratch/bystander/modest" <<'PYTHON'
import fcntl
import os
import sys

file = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
PYTHON
}

# beside_greedy WHAT: somebody else has one as well while a client has all that it can have.
beside_greedy() {
    local aggressor code=0 waited=0
    : >"$scratch/greedy.log"
    set -m
    (greedy "$1") >"$scratch/greedy.log" 2>&1 &
    aggressor=$!
    set +m
    until grep -q '^figure' "$scratch/greedy.log"; do
        sleep 1
        waited=$((waited + 1))
        [ "$waited" -lt 600 ] || break
    done
    cat "$scratch/greedy.log"
    modest || code=$?
    kill -KILL -- "-$aggressor" 2>/dev/null || true
    wait "$aggressor" 2>/dev/null || true
    return "$code"
}

for what in locks files; do
    check "one-beside-all-$what" beside_greedy "$what"
    sed -n 's/^figure /figure /p' "$scratch/check.log"
done
finish
