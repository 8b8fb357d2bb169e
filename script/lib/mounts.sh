# Servers and mounts for suites: started here, ended by the trap that `begin` sets, by their
# process ids and paths alone. To be sourced by bash, after common.sh.

# begin NAME: makes $scratch and promises to clean it up. $DRAY is the binary; $transport is
# classic or uring (argument of the suite, default classic).
begin() {
    suite=$1
    [ "$(id -u)" = 0 ] || die "suites mount and act as other users: root is needed"
    transport=${transport:-classic}
    DRAY=${DRAY:-$target/ci/dray}
    [ -x "$DRAY" ] || die "no binary at $DRAY: cargo build --profile ci -p dray"
    scratch=${DRAY_SCRATCH:-$(mktemp -d "/tmp/dray-suite-$suite.XXXXXX")}
    mkdir -p "$scratch"
    chmod 755 "$scratch"
    trap 'clean_up "$scratch"' EXIT
    trap 'exit 143' TERM
    trap 'exit 130' INT
    if [ "$transport" = uring ]; then switch_ring_on || { skip all "$no_ring"; exit 0; }; fi
}

ring_switch=/sys/module/fuse/parameters/enable_uring
no_ring="this kernel has no FUSE over io_uring, or it cannot be switched on"

# switch_ring_on: for new mounts of this machine; clean_up puts the switch back.
switch_ring_on() {
    [ -e "$ring_switch" ] || modprobe -q fuse 2>/dev/null
    [ -w "$ring_switch" ] || return 1
    local was
    was=$(cat "$ring_switch")
    [ "$was" = Y ] && return 0
    echo "$was" >"$scratch/ring-switch-was"
    echo Y >"$ring_switch" 2>/dev/null
}

# clean_up DIR: ends everything that was started for DIR and removes it. May be called by
# somebody else than who started it (script/test does when a suite had to be killed).
clean_up() {
    local dir=$1 pid at
    [ -d "$dir" ] || return 0
    mounts_below "$dir" fuse.dray | while read -r at; do umount -l "$at" 2>/dev/null; done
    [ -e "$dir/pids" ] && end_processes "$dir/pids"
    end_keepers "$dir"
    for _ in 1 2 3; do
        mounts_below "$dir" | while read -r at; do umount -l "$at" 2>/dev/null; done
    done
    [ -e "$dir/ring-switch-was" ] && cat "$dir/ring-switch-was" >"$ring_switch"
    rm -rf --one-file-system "$dir"
}

# end_keepers DIR: what holds deleted files of servers below DIR for the next ones, which there
# will not be.
end_keepers() {
    local process comm words
    for process in /proc/[0-9]*; do
        # Of a process that hangs in its mount the name can be read, the command line perhaps not.
        read -r comm 2>/dev/null <"$process/comm" && [ "$comm" = exe ] || continue
        mapfile -d '' words 2>/dev/null <"$process/cmdline"
        [ "${words[1]:-}" = keep-files ] && [[ ${words[2]:-} == "$1"/* ]] || continue
        kill -KILL "${process#/proc/}" 2>/dev/null # it heeds no other: a server's end is none
    done
}

# mounts_below DIR [TYPE]: newest first.
mounts_below() {
    # Blanks in paths are written \040 there.
    sed 's/\\040/\x1/g' /proc/mounts | awk -v dir="${1// /$'\1'}/" -v type="${2:-}" \
        'index($2, dir) == 1 && (type == "" || $3 == type) { print $2 }' | tr '\1' ' ' | tac
}

# end_processes FILE: those whose "PID START-TIME" stand in it: first asked, then killed. The
# start time distinguishes them from processes that got the number later.
end_processes() {
    local pid start left signal
    for signal in TERM TERM KILL; do
        left=
        while read -r pid start; do
            [ "$(start_time "$pid")" = "$start" ] || continue
            kill -"$signal" "$pid" 2>/dev/null && left=yes
        done <"$1"
        [ -z "$left" ] && return
        for _ in $(seq 20); do
            sleep 0.1
            left=
            while read -r pid start; do
                [ "$(start_time "$pid")" = "$start" ] && left=yes
            done <"$1"
            [ -z "$left" ] && return
        done
    done
}

# start_time PID: in clock ticks since boot; empty if it is gone or waits to be reaped.
start_time() {
    sed -n 's/.*) \(.\)/\1/p' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" { print $20 }'
}

# remember PID: it will be ended by clean_up.
remember() { echo "$1 $(start_time "$1")" >>"$scratch/pids"; }

# store MIB: an ext4 at $scratch/store, in memory, with the directories `export` (served) and
# `bare` (for comparison).
store() {
    need e2fsprogs || true
    mkdir -p "$scratch/memory" "$scratch/store"
    mount -t tmpfs -o "size=$(($1 + $1 / 8 + 16))m" dray-test "$scratch/memory"
    truncate -s "$1M" "$scratch/memory/image"
    mkfs.ext4 -q -F -m 0 "$scratch/memory/image"
    mount -t ext4 -o loop "$scratch/memory/image" "$scratch/store"
    mkdir "$scratch/store/export" "$scratch/store/bare"
    chmod 777 "$scratch/store/export" "$scratch/store/bare"
}

# free_port: one of the loopback that nobody listens on.
free_port() {
    local port
    while :; do
        port=$((20000 + RANDOM % 12000))
        awk '{ print $2 }' /proc/net/tcp /proc/net/tcp6 | grep -i ":$(printf %04X $port)$" >/dev/null ||
            break
    done
    echo "$port"
}

# serve [ARGUMENT...]: serves $scratch/store/export as `test`, with $export_options; again after it was killed.
serve() {
    : "${port:=$(free_port)}"
    "$DRAY" serve --export "test=$scratch/store/export,squash=none${export_options:-}" \
        --listen "tcp://127.0.0.1:$port" --state "${state:-$scratch/state}" "$@" \
        >>"$scratch/server.log" 2>&1 7>&- 8>&- 9>&- &
    server=$!
    # A check that starts it anew is a subshell: those after it read this.
    echo "$server" >"$scratch/server.pid"
    remember "$server"
    for _ in $(seq 1200); do
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && return
        kill -0 "$server" 2>/dev/null || break
        sleep 0.05
    done
    cat "$scratch/server.log" >&2
    die "the server does not start"
}

# define_cluster DIR LAYOUT [STRIPE]: the projection `scratch` over three servers of DIR, in
# $scratch/projections.toml. With $etcd_url they take over from each other.
define_cluster() {
    cluster_pids=()
    cat >"$scratch/projections.toml" <<TOML
${etcd_url:+[cluster]
etcd = [\"$etcd_url\"]}
[projection.scratch]
layout = "$2"
${3:+stripe = \"$3\"}
servers = ["unix://$scratch/io1.sock", "unix://$scratch/io2.sock", "unix://$scratch/io3.sock"]
path = "$1"
export = { squash = "none" }
TOML
}

# define_own_disks LAYOUT DIR: the same over three directories in DIR, each a server's own disk.
define_own_disks() {
    cluster_pids=()
    mkdir -p "$2"/disk{1,2,3}
    cat >"$scratch/projections.toml" <<TOML
[projection.scratch]
layout = "$1"
stripe = "64K"
servers = ["unix://$scratch/io1.sock", "unix://$scratch/io2.sock", "unix://$scratch/io3.sock"]
path = "$2/disk%n"
export = { squash = "none" }
TOML
}

# stop_cluster N: ends the Nth of its servers in good order.
stop_cluster() {
    kill "${cluster_pids[$1]}"
    wait "${cluster_pids[$1]}" || true
}

# serve_cluster N: starts the Nth of its servers; again after it was killed.
serve_cluster() {
    local log=$scratch/server$1.log
    : >"$log"
    "$DRAY" serve --listen "unix://$scratch/io$1.sock" --state "$scratch/state$1" \
        --projections "$scratch/projections.toml" >>"$log" 2>&1 7>&- 8>&- 9>&- &
    cluster_pids[$1]=$!
    remember "$!"
    for _ in $(seq 1200); do
        grep -q "serving scratch" "$log" && return
        kill -0 "${cluster_pids[$1]}" 2>/dev/null || break
        sleep 0.05
    done
    cat "$log" >&2
    die "server $1 of the projection does not start"
}

# end_cluster: ends its servers.
end_cluster() {
    local pid
    for pid in "${cluster_pids[@]}"; do kill "$pid"; done
    wait "${cluster_pids[@]}" 2>/dev/null
    return 0
}

# mount_at NAME [OPTION,...]: mounts `test` at $scratch/NAME; its pid is in $mounter.
mount_at() { mount_target "dray://127.0.0.1:$port/test" "$@"; }

# mount_cluster NAME [OPTION,...]: the same of the projection.
mount_cluster() { mount_target "dray+unix://$scratch/io1.sock?export=scratch" "$@"; }

# is_leased NAME: whether this mount has answered anything by its leases.
is_leased() {
    "$DRAY" status "$scratch/$1" --json | tr -d ' \n' | grep '"leases":{[^}]*"hits":[1-9]' >/dev/null
}

mount_target() {
    local source=$1 at=$scratch/$2 options="transport=$transport${3:+,$3}"
    mkdir -p "$at"
    "$DRAY" mount "$source" "$at" -o "$options" --foreground \
        >>"$scratch/mount.log" 2>&1 7>&- 8>&- 9>&- &
    mounter=$!
    remember "$mounter"
    for _ in $(seq 1200); do
        # It serves once its root can be looked at.
        mounts_below "$scratch" fuse.dray | grep -x "$at" >/dev/null && stat "$at" >/dev/null && return
        kill -0 "$mounter" 2>/dev/null || break
        sleep 0.05
    done
    cat "$scratch/mount.log" >&2
    die "the mount does not start"
}

# unmount_at NAME: in good order. A process that looks at all mounts of the machine (df) may be in it
# for a moment.
unmount_at() { wait_up_to 60 "$DRAY" umount "$scratch/$1"; }

# same FOUND WANTED: both are the same text. Where they are not, both are shown.
same() {
    [ "$1" = "$2" ] && return
    say "found:  ${1:-nothing}"
    say "wanted: ${2:-nothing}"
    return 1
}

# is_absent PATH: nothing has this name. What has it is shown.
is_absent() { ! stat "$1" 2>/dev/null; }

# check NAME COMMAND...: a test. What it says is shown if it fails, with the command that failed; `set -e`
# holds in it.
check() {
    local name=$1 start=$SECONDS code
    shift
    # Not inside `if`, where bash ignores `set -e`.
    (set -eE; trap 'say "line $LINENO: $BASH_COMMAND"' ERR; "$@") >"$scratch/check.log" 2>&1
    code=$?
    if [ "$code" = 0 ]; then
        echo "ok $suite/$transport/$name ($(seconds_since "$start") s)"
    else
        echo "FAIL $suite/$transport/$name (exit code $code, $(seconds_since "$start") s)"
        tail -n "${CHECK_LINES:-40}" "$scratch/check.log" | sed 's/^/    /'
        tail -n 10 "$scratch/server.log" "$scratch/mount.log" 2>/dev/null | sed 's/^/    /'
        failures=$((failures + 1))
    fi
}

# wait_up_to SECONDS COMMAND...: until it succeeds. False if it does not within that time.
wait_up_to() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.1
    done
}

# is_reaped PID: no process has the number, so that no thread of it has anything open.
is_reaped() { [ ! -e "/proc/$1" ]; }

# is_gone PID: it has ended, and waits to be reaped at most.
is_gone() { [ -z "$(start_time "$1")" ]; }

# skip NAME WHY
skip() { echo "skip $suite/$transport/$1: $2"; }

failures=0
# finish: the suite's exit code.
finish() { [ "$failures" = 0 ]; exit; }
