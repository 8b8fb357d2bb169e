#!/bin/bash
# Thousands of requests for locks that wait and give up, and another client: locks.sh [classic|uring]
# takes: 2 min
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/long.sh"
transport=${1:-classic}
need_rust
cd "$root" && cargo build --quiet --profile ci -p dray-bench || die "the benchmarks cannot be compiled"
begin locks
store 300
serve
mount_at bystander
touch "$scratch/store/export/contended"
chmod 666 "$scratch/store/export/contended"

# give_up COUNT ROUNDS: so many requests wait behind one lock, and are given up all at once.
give_up() {
    "$target/ci/dray-bench" lock-waiters --address "tcp://127.0.0.1:$port" --export test \
        --file contended --count "$1" --rounds "$2"
}

# Near linear: ten times as many take no more than forty times as long to be given up.
withdrawals_are_cheap() {
    local few many
    few=$(give_up 500 3 | tee /dev/stderr | awk '{ print $6 }')
    many=$(give_up 5000 3 | tee /dev/stderr | awk '{ print $6 }')
    echo "figure withdrawals: 500 waiters ${few} s, 5000 waiters ${many} s"
    awk -v few="$few" -v many="$many" 'BEGIN { exit !(many <= 40 * (few + 0.01)) }'
}
check withdrawals withdrawals_are_cheap
sed -n 's/^figure /figure locks /p' "$scratch/check.log"

BYSTANDER_SECS=20
beside stat-waiters-give-up 3 stat "$scratch/bystander" give_up 5000 10
beside lock-waiters-give-up 3 lock "$scratch/bystander" give_up 5000 10
finish
