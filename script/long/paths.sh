#!/bin/bash
# An export without stable handles whose table of paths is written anew, and another client that looks:
# paths.sh [classic|uring]
# takes: 4 min
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/long.sh"
transport=${1:-classic}
begin paths
# An overlay has none; in memory, so that no disk is waited for.
mkdir -p "$scratch/memory" "$scratch/store/export"
mount -t tmpfs -o size=2g dray-test "$scratch/memory"
mkdir "$scratch/memory/upper" "$scratch/memory/work" "$scratch/memory/lower"
mount -t overlay -o "lowerdir=$scratch/memory/lower,upperdir=$scratch/memory/upper,workdir=$scratch/memory/work" \
    dray-test "$scratch/store/export"
names=${NAMES:-300000}
python3 - "$scratch/store/export" "$names" <<'PYTHON'
import os
import sys

for number in range(int(sys.argv[2])):
    if number % 1000 == 0:
        at = os.path.join(sys.argv[1], f"d{number // 1000}")
        os.mkdir(at)
    os.close(os.open(os.path.join(at, f"file{number}"), os.O_CREAT))
PYTHON
mkdir "$scratch/store/export/quiet"
serve
mount_at aggressor
mount_at bystander
# The server learns all names.
find "$scratch/aggressor" -type f -size +1M >/dev/null

# rename_all: every change is a line of the log, which is written anew when it is long.
rename_all() {
    python3 - "$scratch/aggressor" <<'PYTHON'
import os
import sys

while True:
    for one in os.scandir(sys.argv[1]):
        if one.name.startswith("d"):
            for file in list(os.scandir(one.path)):
                new = file.name[1:] if file.name.startswith("x") else "x" + file.name
                os.rename(file.path, os.path.join(one.path, new))
PYTHON
}

# A hold of the table's lock is no part of a p99: the longest of all counts, in microseconds.
longest_us=${LONGEST_US:-200000}
nobody_waits_long() {
    local with aggressor
    BYSTANDER_SECS=90
    set -m
    rename_all &
    aggressor=$!
    set +m
    with=$(latency_of stat "$scratch/bystander/quiet")
    kill -TERM -- "-$aggressor" 2>/dev/null || true
    echo "figure stat-beside-rewrites: $names names, p50 p99 max count: $with us"
    [ "$(awk '{ print $3 }' <<<"$with")" -le "$longest_us" ]
}
check stat-beside-rewrites nobody_waits_long
sed -n 's/^figure /figure paths /p' "$scratch/check.log"
finish
