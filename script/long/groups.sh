#!/bin/bash
# Two users in many groups who take turns, and another client that only looks: groups.sh [classic|uring]
# takes: 1 min
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/long.sh"
transport=${1:-classic}
begin groups
store 300
serve
mount_at aggressor
mount_at bystander
mkdir "$scratch/store/export/quiet"

# users COUNT: eight processes, of two users in turn, each in COUNT groups, look at a file all the time.
users() {
    python3 - "$scratch/aggressor" "$1" <<'PYTHON'
import os
import sys

path, count = sys.argv[1], int(sys.argv[2])
for number in range(8):
    if os.fork() == 0:
        user = 5000 + number % 2
        os.setgroups([100_000 * (1 + number % 2) + group for group in range(count)])
        os.setgid(user)
        os.setuid(user)
        while True:
            try:
                os.stat(path + f"/nothing-{number}")
            except OSError:
                pass  # there is nothing, or they are in too many groups
while True:
    os.wait()
PYTHON
}

# Each also alone, so that what eight processes cost anyway is known.
beside stat-8-users-in-10-groups 3 stat "$scratch/bystander/quiet" users 10
beside stat-8-users-in-1000-groups 3 stat "$scratch/bystander/quiet" users 1000
beside stat-8-users-in-19900-groups 3 stat "$scratch/bystander/quiet" users 19900
finish
