#!/bin/bash
# Large files that are removed, and another client that makes directories: evictions.sh [classic|uring]
# takes: 2 min
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/long.sh"
transport=${1:-classic}
begin evictions
store 3000
serve
mount_at aggressor
mount_at bystander
mkdir "$scratch/store/export/quiet" "$scratch/store/export/large"
# A hundred directories: each of the 64 parts into which a server could cut them has one, and the
# other client's has, too.
mkdir "$scratch"/store/export/large/{1..100}

# fragmented FILE MIB: a file of as many MiB whose every second page is there, which takes the
# kernel long to free, and little space. The store has it, and the server's kernel.
fragmented() {
    python3 - "$1" "$2" <<'PYTHON'
import os
import sys

file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o666)
page = b"x" * 4096
for at in range(0, int(sys.argv[2]) << 20, 8192):
    os.pwrite(file, page, at)
PYTHON
}

# removals: a large file after the other loses its name, or is replaced, through the mount.
removals() {
    local directory
    while :; do
        for directory in {1..100}; do
            fragmented "$scratch/store/export/large/$directory/f" 1024
            : >"$scratch/store/export/large/$directory/g"
            if ((directory % 2)); then
                rm "$scratch/aggressor/large/$directory/f"
            else
                mv "$scratch/aggressor/large/$directory/g" "$scratch/aggressor/large/$directory/f"
            fi
        done
    done
}

beside mkdir-removals-quiet-disk 3 mkdir "$scratch/bystander/quiet" removals
beside stat-removals-quiet-disk 3 stat "$scratch/bystander/quiet" removals
if throttle $((20 << 20)); then
    beside mkdir-removals-slow-disk 20 mkdir "$scratch/bystander/quiet" removals
    beside stat-removals-slow-disk 20 stat "$scratch/bystander/quiet" removals
    throttle 0
else
    skip slow-disk "this kernel has no blkio.throttle of control groups, version 1"
fi
finish
