#!/bin/bash
# The simulator with clients that write back to their disks, and go down: write_back.sh [classic|uring]
# takes: 20 min on two CPUs
# limit: 7200
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/seeds.sh"
need_rust
cd "$root" || exit 1
# DRAY_SEEDS=A..B: these instead of 50,000.
run_seeds "write-back seeds" 0..50000 --work writtenback
