#!/bin/bash
# Servers that die, go away and run full, and unauthenticated peers that send garbage: what applications
# see of it. failure.sh [classic|uring]
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
transport=${1:-classic}
need git || say "git is missing"
begin failure
store 300
serve
mount_at mnt

# kill_server: -9, under whatever load there is; and a new one, a moment later.
restart_server() {
    kill -9 "$server"
    wait "$server" 2>/dev/null || true
    sleep "${1:-0.5}"
    serve
}

# Every line is appended once, in order, and every directory made once, over three deaths.
work_goes_on() {
    local at=$scratch/mnt/work number code=0 worker
    mkdir "$at"
    (
        set -e
        for number in $(seq 400); do
            echo "line $number" >>"$at/log"
            mkdir "$at/dir$number"
            mv "$at/dir$number" "$at/moved$number"
            echo "$number" >"$at/moved$number/file"
        done
    ) &
    worker=$!
    for number in 1 2 3; do
        sleep 0.4
        restart_server
    done
    wait "$worker" || code=$?
    [ "$code" = 0 ]
    seq -f 'line %g' 400 | cmp - "$at/log"
    [ "$(find "$at" -mindepth 1 -maxdepth 1 | wc -l)" = 401 ]
    for number in $(seq 400); do [ "$(cat "$at/moved$number/file")" = "$number" ]; done
}

# git works while the server is killed every second, and what it made is whole.
git_goes_on() {
    local at=$scratch/mnt/repo number worker code=0
    git init -q "$at"
    (
        set -e
        cd "$at"
        for number in $(seq 50); do
            echo "$number" >"file$number"
            git add "file$number"
            git -c user.name=ci -c user.email=ci@example.org commit -qm "$number"
        done
    ) &
    worker=$!
    while kill -0 "$worker" 2>/dev/null; do
        sleep 1
        restart_server 0.1
    done
    wait "$worker" || code=$?
    [ "$code" = 0 ]
    git -C "$at" fsck --full --strict
    [ "$(git -C "$at" rev-list --count HEAD)" = 50 ]
}

# daemon_of NAME: the process that serves the mount now.
daemon_of() {
    local process
    for process in /proc/[0-9]*; do
        # Reading the command line of a process that hangs in its mount may hang as well.
        timeout 1 grep -qsz '^mount-daemon$' "$process/cmdline" &&
            timeout 1 grep -qszxF "$scratch/$1" "$process/cmdline" && echo "${process#/proc/}"
    done | head -n 1
}

# changed_since FILE NANOSECONDS
changed_since() { [ "$(date -r "$1" +%s%N)" -gt "$2" ]; }

# kill_daemon NAME: -9. On a busy machine a look can miss it.
kill_daemon() {
    local pid number
    for number in $(seq 100); do
        pid=$(daemon_of "$1") || true # of the last process that it looked at
        [ -n "$pid" ] && break
    done
    kill -9 "$pid"
}

# fsx compares every read with what must be there, mapped ones too, while the server and the
# daemon of its mount are killed in turn. It is ended when it has outlived the last kill.
fsx_goes_on() {
    local at=$scratch/mnt/fsx tool=${TOOLS:-$target/tools/bin}/fsx runner victim code=0
    local seed=${FSX_SEED:-1}
    echo "seed $seed"
    printf '%s\n' 'flen = 1048576' '[opsize]' 'max = 131072' '[weights]' 'close_open = 2' \
        'mapread = 4' 'mapwrite = 4' 'read = 10' 'write = 10' 'truncate = 5' 'fsync = 1' \
        'punch_hole = 2' 'copy_file_range = 3' >"$scratch/fsx.toml"
    mkdir -p "$scratch/saved"
    "$tool" -q -S "$seed" -N 100000000 -f "$scratch/fsx.toml" -P "$scratch/saved" "$at" \
        >"$scratch/fsx.log" 2>&1 &
    runner=$!
    remember "$runner"
    for victim in server daemon server daemon server daemon; do
        sleep 1
        case $victim in
            server) restart_server 0.3 ;;
            daemon) kill_daemon mnt ;;
        esac
        if ! wait_up_to 60 changed_since "$at" "$(date +%s%N)"; then
            cat "$scratch/fsx.log"
            echo "fsx has not gone on after the death of the $victim"
            return 1
        fi
    done
    kill -TERM "$runner"
    wait "$runner" || code=$?
    cat "$scratch/fsx.log"
    [ "$code" = 143 ]
}

# An open file and its lock go on.
open_files_live() {
    local at=$scratch/mnt/open
    exec 7>"$at"
    flock -x 7
    echo before >&7
    restart_server
    echo after >&7
    [ "$(cat "$at")" = "$(printf 'before\nafter')" ]
    mount_at twin
    if flock -n -x "$scratch/twin/open" true; then return 1; fi
    exec 7>&-
    # The kernel does not wait for the release of what was closed.
    flock -w 60 -x "$scratch/twin/open" true
    unmount_at twin
}

# So does a file that was removed while it was open.
deleted_files_live() {
    local at=$scratch/mnt/gone
    # shellcheck disable=SC2094 # that is what is tested
    exec 8>"$at" 9<"$at"
    echo kept >&8
    rm "$at"
    restart_server
    echo more >&8
    [ "$(cat <&9)" = "$(printf 'kept\nmore')" ]
    exec 8>&- 9<&-
}

# A mount with a limit answers EHOSTDOWN, and works again when the server is back.
limits_hold() {
    mount_at limited timeout=5
    echo here >"$scratch/limited/file"
    kill -9 "$server"
    wait "$server" 2>/dev/null || true
    local said
    said=$(LC_ALL=C timeout 60 cat "$scratch/limited/file" 2>&1) && return 1
    echo "$said"
    [[ $said == *"Host is down"* ]]
    serve
    # Until it has noticed, calls go on failing at once: that must end soon.
    wait_up_to 60 limited_reads
    unmount_at limited
}
limited_reads() { [ "$(timeout 20 cat "$scratch/limited/file" 2>/dev/null)" = here ]; }

# A wait for a server that is away ends with SIGKILL.
waits_are_killable() {
    kill -9 "$server"
    wait "$server" 2>/dev/null || true
    cat "$scratch/mnt/open" >/dev/null &
    local reader=$!
    sleep 1
    kill -0 "$reader"
    kill -9 "$reader"
    wait_up_to 60 is_gone "$reader"
    serve
    timeout 60 cat "$scratch/mnt/open" >/dev/null
}

# Garbage, lengths beyond everything, and connections that say nothing disturb nobody.
unauthenticated_peers_are_refused() {
    local number held=()
    for number in $(seq 20); do
        (head -c 3000 /dev/urandom >"/dev/tcp/127.0.0.1/$port") 2>/dev/null || true
        (printf '\377\377\377\377\377\377\377\377%0100d' 0 >"/dev/tcp/127.0.0.1/$port") \
            2>/dev/null || true
        exec {number}<>"/dev/tcp/127.0.0.1/$port" && held+=("$number")
    done
    echo undisturbed >"$scratch/mnt/calm"
    [ "$(timeout 60 cat "$scratch/mnt/calm")" = undisturbed ]
    [ "$(awk '/^VmRSS/ { print $2 }' "/proc/$server/status")" -lt 200000 ]
    for number in "${held[@]}"; do exec {number}>&-; done
}

# A full file system below says so, and is usable again once there is room.
full_is_said() {
    local said
    said=$(LC_ALL=C dd if=/dev/zero "of=$scratch/mnt/big" bs=1M count=600 2>&1) && return 1
    [[ $said == *"No space left on device"* ]]
    rm "$scratch/mnt/big"
    # The kernel does not wait for the release of what was closed: until then its room is taken.
    wait_up_to 60 dd if=/dev/zero "of=$scratch/mnt/big" bs=1M count=20 conv=fsync
    rm "$scratch/mnt/big"
}
# Each in a subshell of `check`: what it starts anew, those after it must find.
checked() {
    check "$@"
    server=$(cat "$scratch/server.pid" 2>/dev/null || echo "$server")
}
checked work-goes-on work_goes_on
checked git-goes-on git_goes_on
checked fsx-goes-on fsx_goes_on
checked open-files-live open_files_live
checked deleted-files-live deleted_files_live
checked limits-hold limits_hold
checked waits-are-killable waits_are_killable
checked unauthenticated-peers-are-refused unauthenticated_peers_are_refused
checked full-is-said full_is_said
finish
