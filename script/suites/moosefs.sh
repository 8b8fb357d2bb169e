#!/bin/bash
# A projection over two servers on a real MooseFS: a master, two chunkservers, and a mount for each server.
# Whatever two mounts of the projection have to agree on, and deaths of servers and daemons under load.
# moosefs.sh [classic|uring]
# transports: classic
# $CONFORMANCE is the program that runs the conformance suite in a directory.
# proves: P155, P156, P157, P369, P425
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/moosefs.sh"
transport=${1:-classic}
need moosefs-master moosefs-chunkserver moosefs-client iproute2 ||
    { begin moosefs; skip all "MooseFS cannot be installed"; exit 0; }
begin moosefs
conformance=${CONFORMANCE:-$target/ci/examples/conformance}
[ -x "$conformance" ] ||
    die "no program at $conformance: cargo build --profile ci -p dray-testkit --example conformance"
start_moosefs
for number in 1 2; do mount_moosefs "below$number" || die "mfsmount does not start"; done
moosefs_takes_data below1 || die "MooseFS takes no data"
mkdir -m 777 "$scratch/below1/export"

# Each server has a mount of its own, which clients do not learn of: the definition's path leads to it in a mount
# namespace of the server's.
define_two() {
    mkdir -p "$scratch/shared"
    cat >"$scratch/projections.toml" <<TOML
[projection.scratch]
layout = "cluster"
servers = ["unix://$scratch/io1.sock", "unix://$scratch/io2.sock"]
path = "$scratch/shared/export"
export = { squash = "none" }
TOML
}

# serve_moosefs N: starts the Nth server on the Nth mount; again after it was killed.
serve_moosefs() {
    local log=$scratch/server$1.log
    : >"$log"
    # shellcheck disable=SC2016 # the inner shell expands them
    unshare --mount --propagation private sh -c 'mount --bind "$1" "$2" && shift 2 && exec "$@"' sh \
        "$scratch/below$1" "$scratch/shared" \
        "$DRAY" serve --listen "unix://$scratch/io$1.sock" --state "$scratch/state$1" \
        --projections "$scratch/projections.toml" >>"$log" 2>&1 7>&- 8>&- 9>&- &
    moosefs_servers[$1]=$!
    remember "$!"
    for _ in $(seq 600); do
        grep -q "serving scratch" "$log" && return
        kill -0 "${moosefs_servers[$1]}" 2>/dev/null || break
        sleep 0.05
    done
    cat "$log" >&2
    die "server $1 of the projection does not start"
}

# settles_at BYTES FILE: the file has this size, at the latest after 2 s. For a moment while a file is flushed, the
# mount of MooseFS itself shows the size from before the last write, to programs beside dray as well.
settles_at() {
    wait_up_to 2 has_size "$@" || same "$(stat -c %s "$2")" "$1"
}

# has_size BYTES FILE
has_size() { [ "$(stat -c %s "$2")" = "$1" ]; }

# What one mount makes, moves, links, cuts and removes the other one sees at once; sizes as MooseFS has them.
two_mounts_agree() {
    local one=$scratch/one other=$scratch/other number
    for number in $(seq 24); do
        mkdir -p "$one/a$number/deep"
        echo "first" >"$one/a$number/deep/f"
        settles_at 6 "$other/a$number/deep/f"
        same "$(cat "$other/a$number/deep/f")" first
        mv "$other/a$number" "$other/b$number"
        is_absent "$one/a$number"
        echo "second" >>"$one/b$number/deep/f"
        settles_at 13 "$other/b$number/deep/f"
        same "$(stat -c %i "$one/b$number/deep/f")" "$(stat -c %i "$other/b$number/deep/f")"
        ln "$other/b$number/deep/f" "$other/link$number"
        same "$(stat -c %h "$one/b$number/deep/f")" 2
        rm "$one/b$number/deep/f"
        same "$(stat -c %h "$other/link$number")" 1
        : >"$one/link$number"
        settles_at 0 "$other/link$number"
        mv "$one/link$number" "$one/b$number/deep/g"
        stat "$other/b$number/deep/g"
        is_absent "$other/link$number"
    done
    same "$(find "$one" | sed "s|$one||" | sort)" "$(find "$other" | sed "s|$other||" | sort)"
    rm -rf "$one"/b*
    same "$(ls "$other")" ""
}

# Two mounts append to files and make them exclusively at the same time.
appends_and_creations_are_atomic() {
    local mounts=("$scratch/one" "$scratch/other") at number workers=()
    for at in "${mounts[@]}"; do
        (for number in $(seq 100); do
            echo "line" >>"$at/log$((number % 4))"
            (set -C; echo "$at" >"$at/new$number") 2>/dev/null && echo "$number" >>"$at/winners"
        done; true) &
        workers+=("$!")
    done
    for number in "${workers[@]}"; do wait "$number"; done
    sleep 0.5 # what was closed is flushed, see settles_at
    same "$(cat "$scratch/one"/log? | grep -cx line)" 200
    same "$(sort -n "$scratch/other/winners" | uniq | wc -l)" 100
    same "$(wc -l <"$scratch/other/winners")" 100
    rm "$scratch/one"/*
}

# Tests that fail directly on a mount of MooseFS 3, too. It does not exchange two names, and refuses reads at offsets
# beyond its greatest file. It gives, punches, zeroes and moves no ranges, and a write leaves set-id bits. An owner
# cannot give a file to a supplementary group, root may execute anything, and extended attributes have any name.
moosefs_cannot=(
    names::rename_replaces_keeps_back_and_exchanges
    data::reads_are_short_only_at_the_end
    data::space_is_given_and_punched
    data::zeroed_ranges_read_as_zeros
    data::ranges_are_cut_out_and_put_in
    attributes::a_write_clears_set_id_bits
    attributes::permissions_are_checked
    attributes::access_answers_for_the_caller
    attributes::xattrs_are_kept
)

# The conformance suite through a mount of the projection.
conformance_suite_passes() {
    mkdir -m 777 "$scratch/one/conformance"
    "$conformance" "$scratch/one/conformance" "${moosefs_cannot[@]}"
    rm -rf "$scratch/one/conformance"
}

# daemon_of NAME: the process that serves the mount now.
daemon_of() {
    local process
    for process in /proc/[0-9]*; do
        grep -qsz '^mount-daemon$' "$process/cmdline" &&
            grep -qszxF "$scratch/$1" "$process/cmdline" && echo "${process#/proc/}"
    done | head -n 1
}

# kill_daemon NAME: -9; false while there is none.
kill_daemon() {
    local pid
    pid=$(daemon_of "$1")
    [ -n "$pid" ] && kill -9 "$pid"
}

# Servers and daemons are killed while programs work in directories that are moved, and with a file that is open.
work_goes_on() {
    local at=$scratch/one/work other=$scratch/other/work code=0 number worker
    mkdir "$at"
    exec 5>>"$at/open"
    (
        set -e
        for number in $(seq 150); do
            echo "line $number" >>"$at/log"
            echo "open $number" >&5
            mkdir "$at/dir$number"
            echo "$number" >"$at/dir$number/file"
            mv "$at/dir$number" "$at/moved$number"
            same "$(cat "$at/moved$number/file")" "$number"
        done
    ) &
    worker=$!
    mv "$at/open" "$at/open2"
    for number in 1 2 1 2; do
        sleep 0.7
        kill -9 "${moosefs_servers[$number]}"
        # A check is no parent of it. It has its state until its last thread has ended.
        wait_up_to 30 is_reaped "${moosefs_servers[$number]}"
        serve_moosefs "$number"
        wait_up_to 30 kill_daemon one
    done
    wait "$worker" || code=$?
    exec 5>&-
    [ "$code" = 0 ]
    seq -f 'line %g' 150 | cmp - "$other/log"
    seq -f 'open %g' 150 | cmp - "$other/open2"
    for number in $(seq 150); do same "$(cat "$other/moved$number/file")" "$number"; done
    same "$(find "$other" -mindepth 1 -maxdepth 1 | wc -l)" 152
}

moosefs_servers=()
define_two
for number in 1 2; do serve_moosefs "$number"; done
mount_cluster one
mount_target "dray+unix://$scratch/io2.sock?export=scratch" other
check conformance conformance_suite_passes
check two-mounts-agree two_mounts_agree
check appends-and-creations appends_and_creations_are_atomic
check deaths-under-load work_goes_on
finish
