#!/bin/bash
# The simulator with clients that write back to their disks, and go down: write_back.sh [classic|uring]
# takes: 20 min on two CPUs
# limit: 7200
. "$(dirname "$0")/../lib/common.sh"
need_rust
cd "$root" || exit 1
# DRAY_SEEDS=A..B: these instead of 50,000.
seeds=${DRAY_SEEDS:-0..50000}
first=${seeds%..*} end=${seeds#*..} piece=500

cargo build --quiet --locked --profile ci -p dray-testkit --example simulate ||
    die "the simulator cannot be compiled"
simulate=$target/ci/examples/simulate
logs=$(mktemp -d "${TMPDIR:-/tmp}/dray-write-back.XXXXXX")
trap 'rm -rf "$logs"' EXIT

# piece_of FROM: some of the seeds. Prints the failures, and a line of progress.
piece_of() {
    local from=$1 to=$(($1 + piece)) log="$logs/$1"
    if [ "$to" -gt "$end" ]; then to=$end; fi
    "$simulate" --work writtenback --seeds "$from..$to" >"$log" 2>&1 || touch "$logs/failed"
    grep -E '^seed .*:|^  again:' "$log" | grep -v ': undecided$' || true
    echo "$from..$to: $(tail -n 1 "$log")"
}
export -f piece_of
export simulate logs end piece

begin=$(date +%s)
seq "$first" "$piece" "$((end - 1))" | xargs -P "$(nproc)" -I '{}' bash -c 'piece_of {}'
echo "figure write-back seeds: $((end - first)) runs in $(($(date +%s) - begin)) s"
[ ! -e "$logs/failed" ]
