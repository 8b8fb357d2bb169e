#!/bin/bash
# A thousand connections that have the server remember all that they can: memory.sh [classic|uring]
# takes: 1 min
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/long.sh"
transport=${1:-classic}
need_rust
cd "$root" && cargo build --quiet --profile ci -p dray-bench || die "the benchmarks cannot be compiled"
begin memory
store 100
serve --listen "unix://$scratch/socket"

# What docs/ARCHITECTURE.md adds up for so many connections, and the buffers that they share, MiB.
most_mib=$((256 + 150))

connections_are_bounded() {
    local took
    took=$("$target/ci/dray-bench" hoard --socket "$scratch/socket" --export test --server "$server")
    echo "figure $took"
    [ "$(awk '{ print $4 }' <<<"$took")" -le "$most_mib" ]
}
check connections connections_are_bounded
sed -n 's/^figure /figure memory /p' "$scratch/check.log"
finish
