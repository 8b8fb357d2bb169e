#!/bin/bash
# The simulator with servers that take over, two and three of them, all kinds: seeds.sh [classic|uring]
# takes: 1 h on two CPUs
# limit: 43200
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/seeds.sh"
need_rust
cd "$root" || exit 1
# DRAY_SEEDS=A..B: these instead of 100,000. Kinds of work, of machines and of fleets go round with the seed.
run_seeds seeds 0..100000 --failover
