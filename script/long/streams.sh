#!/bin/bash
# Writers that the disk cannot follow, and another client that only looks: streams.sh [classic|uring]
# takes: 2 min
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/long.sh"
transport=${1:-classic}
begin streams
store 3000
serve
mount_at aggressor
mount_at bystander
mkdir "$scratch/store/export/streams" "$scratch/store/export/quiet"

# streams NUMBER [DIR]: so many files are written over and over, each by a process of its own.
streams() {
    local number dir=${2:-$scratch/aggressor/streams}
    for number in $(seq "$1"); do
        while :; do
            dd if=/dev/zero of="$dir/$number" bs=1M count=64 conv=notrunc
        done &
    done
    wait
}

# What the machine itself makes another client wait: the same streams without dray. No goal of dray's, but
# where processors are few, more than that cannot be asked of it on a quiet disk.
beside stat-24-streams-of-others 100000 stat "$scratch/bystander/quiet" streams 24 "$scratch/store/bare"
quiet_goal=$(awk -v ratio="${ratio:-0}" 'BEGIN { print (ratio > 3 ? ratio : 3) }')

beside stat-1-stream-quiet-disk "$quiet_goal" stat "$scratch/bystander/quiet" streams 1
beside stat-24-streams-quiet-disk "$quiet_goal" stat "$scratch/bystander/quiet" streams 24
if throttle $((20 << 20)); then
    beside stat-1-stream-slow-disk 20 stat "$scratch/bystander/quiet" streams 1
    beside stat-24-streams-slow-disk 20 stat "$scratch/bystander/quiet" streams 24
    beside mkdir-24-streams-slow-disk 20 mkdir "$scratch/bystander/quiet" streams 24
    throttle 0
else
    skip slow-disk "this kernel has no blkio.throttle of control groups, version 1"
fi
finish
