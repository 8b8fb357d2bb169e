#!/bin/bash
# Writers that the disk cannot follow, and a stranger who only looks: streams.sh [classic|uring]
# takes: 2 min
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/long.sh"
transport=${1:-classic}
begin streams
store 3000
serve
mount_at aggressor
mount_at stranger
mkdir "$scratch/store/export/streams" "$scratch/store/export/quiet"

# streams NUMBER: so many files are written over and over, each by a process of its own.
streams() {
    local number
    for number in $(seq "$1"); do
        while :; do
            dd if=/dev/zero of="$scratch/aggressor/streams/$number" bs=1M count=64 conv=notrunc
        done &
    done
    wait
}

beside stat-1-stream-quiet-disk 3 stat "$scratch/stranger/quiet" streams 1
beside stat-24-streams-quiet-disk 3 stat "$scratch/stranger/quiet" streams 24
if throttle $((20 << 20)); then
    beside stat-1-stream-slow-disk 20 stat "$scratch/stranger/quiet" streams 1
    beside stat-24-streams-slow-disk 20 stat "$scratch/stranger/quiet" streams 24
    beside mkdir-24-streams-slow-disk 20 mkdir "$scratch/stranger/quiet" streams 24
    throttle 0
else
    skip slow-disk "this kernel has no blkio.throttle of control groups, version 1"
fi
finish
