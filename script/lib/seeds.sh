#!/bin/bash
# Many seeds of the simulator, in pieces, as many at a time as there are CPUs. To be sourced by script/long/*.sh.

# run_seeds FIGURE SEEDS ARGUMENT...: seeds A..B, or those of DRAY_SEEDS, with these arguments of `simulate`.
run_seeds() {
    local figure=$1 seeds=${DRAY_SEEDS:-$2} first begin
    shift 2
    first=${seeds%..*} end=${seeds#*..} piece=500 arguments="$*"
    cargo build --quiet --locked --profile ci -p dray-testkit --example simulate ||
        die "the simulator cannot be compiled"
    simulate=$target/ci/examples/simulate
    logs=$(mktemp -d "${TMPDIR:-/tmp}/dray-seeds.XXXXXX")
    trap 'rm -rf "$logs"' EXIT
    export -f piece_of
    export simulate logs end piece arguments
    begin=$(date +%s)
    seq "$first" "$piece" "$((end - 1))" | xargs -P "$(nproc)" -I '{}' bash -c 'piece_of {}'
    echo "figure $figure: $((end - first)) runs in $(($(date +%s) - begin)) s"
    [ ! -e "$logs/failed" ]
}

# piece_of FROM: some of the seeds. Prints the failures, and a line of progress.
piece_of() {
    local from=$1 to=$(($1 + piece)) log="$logs/$1"
    if [ "$to" -gt "$end" ]; then to=$end; fi
    # shellcheck disable=SC2086 # arguments are words
    "$simulate" $arguments --seeds "$from..$to" >"$log" 2>&1 || touch "$logs/failed"
    grep -E '^seed .*:|^  again:' "$log" | grep -v ': undecided$' || true
    echo "$from..$to: $(tail -n 1 "$log")"
}
