#!/bin/bash
# Every operation beside every failure, over ext4 and over tmpfs: see script/lib/census/census.py.
# $CENSUS_SECONDS: so long for each, and a table of what was tried (default: each failure once in
# all). $CENSUS_SEED: another order. census.sh [classic|uring]
# proves: P80
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
transport=${1:-classic}
need python3 || { begin census; skip all "python3 cannot be installed"; exit 0; }
begin census
store 1000
mkdir -m 777 "$scratch/memory/export"

# Two parts of the failures, each the other way round over the other transport.
parts=(0 1)
[ "$transport" = classic ] || parts=(1 0)

# census DIR HALF
census() {
    local how=(--half "$2")
    [ -z "${CENSUS_SECONDS:-}" ] || how=(--seconds "$CENSUS_SECONDS")
    PYTHONDONTWRITEBYTECODE=1 python3 "$root/script/lib/census/census.py" --dray "$DRAY" \
        --export "$1" --scratch "$scratch" --transport "$transport" \
        --seed "${CENSUS_SEED:-1}" "${how[@]}" | tee "$scratch/census.log"
}
CHECK_LINES=100
check ext4 census "$scratch/store/export" "${parts[0]}"
[ -z "${CENSUS_SECONDS:-}" ] || cat "$scratch/census.log"
check tmpfs census "$scratch/memory/export" "${parts[1]}"
[ -z "${CENSUS_SECONDS:-}" ] || cat "$scratch/census.log"
finish
