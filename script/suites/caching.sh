#!/bin/bash
# Programs that work together through two mounts whose kernels cache data and believe names, for a
# second and for a minute. caching.sh [classic|uring]
# transports: classic
# proves: P55
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/git_two_mounts.sh"
transport=${1:-classic}
need git python3 || { begin caching; skip all "git or python3 cannot be installed"; exit 0; }
begin caching
store 400
serve
git_at_home
together() { timeout 100 python3 "$root/script/lib/together.py" "$@"; }
writers() { timeout 100 python3 "$root/script/lib/sqlite_writers.py" "$@"; }
for seconds in 1 60; do
    ends=("one-$seconds" "other-$seconds")
    for name in "${ends[@]}"; do mount_at "$name" "consistency=close-to-open,attr_timeout=$seconds"; done
    dirs=("$scratch/one-$seconds/$seconds" "$scratch/other-$seconds/$seconds")
    mkdir "${dirs[0]}"
    # sqlite tells by the name of its journal, by its length or by its first bytes what is under way.
    for journal in delete truncate persist; do
        check "sqlite-$journal-$seconds-s" writers "$journal" "${dirs[@]/%//$journal.db}"
    done
    for what in counter-replaced counter-rewritten mail turns log; do
        check "$what-$seconds-s" together "$what" "${dirs[@]}"
    done
    for what in git_takes_turns git_at_once git_pushes; do
        check "$what-$seconds-s" "$what" "${ends[@]}"
    done
    rm -rf "$scratch/seed" "$scratch/one-$seconds"/*
done
finish
