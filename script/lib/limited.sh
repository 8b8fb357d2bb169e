#!/bin/bash
# limited.sh SECONDS PROGRAM [ARGUMENT...]: runs a test program in a temporary directory of its
# own. One that takes longer is ended, with what it mounted and started there.

. "$(dirname "$0")/common.sh"
. "$(dirname "$0")/mounts.sh"

# end_users DIR: processes that have a path below DIR on their command line, by their numbers.
end_users() {
    local process
    for process in /proc/[0-9]*; do
        # Reading the command line of a process that hangs in its mount may hang as well.
        timeout 1 grep -qsF "$1/" "$process/cmdline" && kill -KILL "${process#/proc/}" 2>/dev/null
    done
}

# remove DIR: a process of a test that is still ending may make a file in there meanwhile.
remove() {
    local number
    for number in $(seq 50); do
        rm -rf --one-file-system "$1" 2>/dev/null && return
        sleep 0.2
    done
    rm -rf --one-file-system "$1"
}

main() {
    local limit=$1 code
    shift
    TMPDIR=$(mktemp -d /tmp/dray-tests.XXXXXX)
    export TMPDIR
    chmod 1777 "$TMPDIR" # as /tmp: tests act as other users, too
    timeout -k 10 "$limit" "$@"
    code=$?
    if [ "$code" = 124 ] || [ "$code" = 137 ]; then
        echo "FAIL $(basename "$1"): it hung, and was ended after $limit s"
        mounts_below "$TMPDIR" | while read -r at; do umount -l "$at"; done
        end_users "$TMPDIR"
    fi
    remove "$TMPDIR" || code=1
    exit "$code"
}

main "$@"
