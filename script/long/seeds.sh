#!/bin/bash
# The simulator with servers that take over, two and three of them, all kinds: seeds.sh [classic|uring]
# takes: 1 h on two CPUs
# limit: 43200
. "$(dirname "$0")/../lib/common.sh"
need_rust
cd "$root" || exit 1
# DRAY_SEEDS=A..B: these instead of 100,000. Kinds of work, of machines and of fleets go round with the seed.
seeds=${DRAY_SEEDS:-0..100000}
first=${seeds%..*} end=${seeds#*..} piece=500

cargo build --quiet --locked --profile ci -p dray-testkit --example simulate ||
    die "the simulator cannot be compiled"
simulate=$target/ci/examples/simulate
logs=$(mktemp -d "${TMPDIR:-/tmp}/dray-seeds.XXXXXX")
trap 'rm -rf "$logs"' EXIT

# piece_of FROM: some of the seeds. Prints the failures, and a line of progress.
piece_of() {
    local from=$1 to=$(($1 + piece)) log="$logs/$1"
    if [ "$to" -gt "$end" ]; then to=$end; fi
    "$simulate" --failover --seeds "$from..$to" >"$log" 2>&1 || touch "$logs/failed"
    grep -E '^seed .*:|^  again:' "$log" | grep -v ': undecided$' || true
    echo "$from..$to: $(tail -n 1 "$log")"
}
export -f piece_of
export simulate logs end piece

begin=$(date +%s)
seq "$first" "$piece" "$((end - 1))" | xargs -P "$(nproc)" -I '{}' bash -c 'piece_of {}'
echo "figure seeds: $((end - first)) runs in $(($(date +%s) - begin)) s"
[ ! -e "$logs/failed" ]
