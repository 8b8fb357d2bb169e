# dray, end to end on one machine, against a raw TCP connection, the bare tmpfs and FUSE alone.
#
# In every round: raw TCP (as the system sets it up, which the targets are about, and with the
# congestion control that dray uses on loopback), native tmpfs, then for each transport FUSE's null file
# system, a relay without a protocol and dray, one after the other. So whatever else the machine does hits all of them. Ratios are
# taken within a round; the median over rounds counts. All arms but the null file system use the same files
# on the same tmpfs.
#
# shellcheck disable=SC2086 # lists of loads and prefixes of commands are words

ROUNDS=${ROUNDS:-5}
TRANSPORTS=${TRANSPORTS:-classic uring}
COUNT=${COUNT:-200}
IDLE_SECS=${IDLE_SECS:-10}
CLOSE_TO_OPEN=${CLOSE_TO_OPEN:-consistency=close-to-open}
DATA_LOADS="stream_read stream_write stream_read:$JOBS stream_write:$JOBS rand4k rand4k:$JOBS
    stream_sync sync4k"
NAME_LOADS="create stat_cold open_close unlink create_write_close unlink"
STRICT_LOADS="$DATA_LOADS $NAME_LOADS"
# What FUSE costs alone: benches/src/report/sums.rs says which load stands for which.
NULL_LOADS="stream_read stream_write rand4k open_close stat_cold"
# What keeping unsynced changes costs: without it, and with four times the default room.
REPLAYS=${REPLAYS:-0 256M}
REPLAY_LOADS="stream_write stream_write:$JOBS stream_sync sync4k create unlink"
STRICT_COUNTS="stream_read stream_write rand4k create_write_close create open_close unlink stat
    open open_deep readdir"

# load ARM ROUND ARGUMENTS...
load() {
    local arm=$1 round=$2
    shift 2
    "$BENCH" load --bench serial --arm "$arm" --round "$round" --secs "$SECS" \
        --file-mib "$FILE_MIB" --names "$NAMES" "$@" >>"$RAW"
}

bench_serial() {
    case "${1:-}" in
        "") ;;
        --against) bench_against "${2:-}"; return ;;
        *) usage >&2; exit 2 ;;
    esac
    build_all
    install_packages python3
    # Either counts system calls; strace takes minutes for it.
    command -v perf >/dev/null || command -v strace >/dev/null ||
        { install_packages linux-perf; install_packages strace; }
    scratch
    RAW=$OUT/serial.raw.jsonl
    : >"$RAW"
    mkdir "$STORE/export"
    "$BENCH" fill --dir "$STORE/export" --jobs "$JOBS" --file-mib "$FILE_MIB" --with-names yes
    PORT=$(free_port 17440)
    start_dray_server "$PORT" "$STORE/export"
    mount_all
    local round
    for ((round = 0; round < ROUNDS; round++)); do
        say "round $((round + 1)) of $ROUNDS"
        one_round "$round"
    done
    count_all
    idle_all
    "$BENCH" counters --dir "$WORK" >>"$RAW"
    "$BENCH" report --bench serial --raw "$RAW" --out "$OUT/serial.jsonl"
}

declare -A CLIENT=()
ARMS=""

# Every transport strict, close-to-open, and strict with each other room for unsynced changes.
mount_all() {
    local transport replay
    for transport in $TRANSPORTS; do
        if [ "$transport" = uring ] && ! switch_uring_on; then
            say "this kernel has no FUSE over io_uring: that arm is left out"
            continue
        fi
        mount_dray "$PORT" "$WORK/$transport" "transport=$transport"
        CLIENT[$transport]=$STARTED
        mount_null "null.$transport" "$transport"
        mount_null "relay.$transport" "$transport" --relay "$STORE/export/bench-data-0"
        touch_relay "$WORK/relay.$transport"
        mount_dray "$PORT" "$WORK/$transport.cto" "transport=$transport,$CLOSE_TO_OPEN"
        CLIENT[$transport.cto]=$STARTED
        for replay in $REPLAYS; do
            mount_dray "$PORT" "$WORK/$transport.replay$replay" \
                "transport=$transport,replay=$replay"
            CLIENT[$transport.replay$replay]=$STARTED
        done
        ARMS="$ARMS $transport"
        fresh_idle "$transport"
    done
}

# mount_null NAME TRANSPORT [ARGUMENTS]: the null file system at $WORK/NAME.
mount_null() {
    local name=$1 at=$WORK/$1
    mkdir -p "$at"
    start "$name" "$BENCH" null-mount --at "$at" --transport "$2" "${@:3}"
    CLIENT[$name]=$STARTED
    defer "unmount '$at'"
    wait_for 10 is_mounted "$at"
}

# touch_relay MOUNT: each of its threads has a server then, whose CPU time counts.
touch_relay() {
    local cpu
    for cpu in $(seq 0 $(($(nproc) - 1))); do
        taskset -c "$cpu" dd if="$1/zeros" of=/dev/null bs=4k count=64 iflag=direct status=none
    done
}

# Memory of a mount that has done nothing yet. Its wake-ups would be those of starting.
fresh_idle() {
    sleep 1
    "$BENCH" idle --arm "$1.fresh" --secs 0 --client "$(pids_of "${CLIENT[$1]}")" >>"$RAW"
}

one_round() {
    local round=$1 arm replay server
    server=$(pids_of "$SERVER")
    "$BENCH" tcp --bench serial --arm tcp --round "$round" --secs "$SECS" >>"$RAW"
    "$BENCH" tcp --bench serial --arm tcp.reno --round "$round" --secs "$SECS" \
        --congestion reno >>"$RAW"
    load native "$round" --dir "$STORE/export" zeros $STRICT_LOADS
    for arm in $ARMS; do
        load "null.$arm" "$round" --dir "$WORK/null.$arm" \
            --client "$(pids_of "${CLIENT[null.$arm]}")" $NULL_LOADS
        load "relay.$arm" "$round" --dir "$WORK/relay.$arm" \
            --client "$(pids_of "${CLIENT[relay.$arm]}")" rand4k
        load "$arm" "$round" --dir "$WORK/$arm" --server "$server" \
            --client "$(pids_of "${CLIENT[$arm]}")" $STRICT_LOADS
        for replay in $REPLAYS; do
            load "$arm.replay$replay" "$round" --dir "$WORK/$arm.replay$replay" \
                --server "$server" --client "$(pids_of "${CLIENT[$arm.replay$replay]}")" \
                $REPLAY_LOADS
        done
        # Both are copies out of memory and nothing else: whatever else the machine does
        # must hit them alike.
        load "native.$arm" "$round" --dir "$STORE/export" warm_read
        load "$arm.cto" "$round" --dir "$WORK/$arm.cto" --server "$server" \
            --client "$(pids_of "${CLIENT[$arm.cto]}")" warm_read stat
    done
}

# Round trips and system calls of single operations, in runs of their own.
count_all() {
    local arm
    say "counting round trips and system calls"
    for arm in $ARMS; do
        count_arm "$arm" $STRICT_COUNTS
        count_arm "$arm.cto" stat open open_close create_write_close readdir_stat
    done
}

count_arm() {
    local arm=$1
    shift
    load "$arm" 0 --dir "$WORK/$arm" --count "$COUNT" --server "$(pids_of "$SERVER")" \
        --client "$(pids_of "${CLIENT[$arm]}")" --fields "$FIELDS" \
        --status "'$DRAY' status '$WORK/$arm' --json" "$@"
}

# Whether nothing of a mount is unsynced: what it wrote is synced after 30 s.
is_clean() {
    "$DRAY" status "$1" --json | python3 -c '
import json, sys
unsynced = json.load(sys.stdin)["unsynced"]
sys.exit(unsynced["files"] + unsynced["names"] > 0)'
}

idle_all() {
    local arm replay
    say "idle for $IDLE_SECS s on each transport, once everything is synced"
    for arm in $ARMS; do
        for replay in "" $REPLAYS; do
            wait_for 60 is_clean "$WORK/$arm${replay:+.replay$replay}"
        done
    done
    sleep 2
    for arm in $ARMS; do
        for replay in $REPLAYS; do
            "$BENCH" idle --arm "$arm.replay$replay" --secs 1 \
                --client "$(pids_of "${CLIENT[$arm.replay$replay]}")" >>"$RAW"
        done
        "$BENCH" idle --arm "$arm" --secs "$IDLE_SECS" \
            --client "$(pids_of "${CLIENT[$arm]}")" --server "$(pids_of "$SERVER")" >>"$RAW"
    done
    "$BENCH" sessions --arm server --address "tcp://127.0.0.1:$PORT" --export data \
        --server "$(pids_of "$SERVER")" >>"$RAW" || say "idle connections were not measured"
}

# bench_against PATH: this binary and another one, each with its own server and mounts, over the same
# files: those of a tmpfs cost a fifth more or less by where they lie in memory. In every round each
# load of data runs on one and then on the other, and so do all loads of names together, which leave
# nothing behind; which binary is first changes from round to round.
bench_against() {
    local other=$1 transport round loads order which
    [ -x "$other" ] || { say "--against needs the path of another dray"; exit 2; }
    build_all
    scratch
    RAW=$OUT/against.raw.jsonl
    : >"$RAW"
    mkdir "$STORE/export"
    "$BENCH" fill --dir "$STORE/export" --jobs "$JOBS" --file-mib "$FILE_MIB" --with-names yes
    declare -A server=()
    serve_and_mount "" "$DRAY"
    serve_and_mount .other "$(realpath "$other")"
    for ((round = 0; round < ROUNDS; round++)); do
        say "round $((round + 1)) of $ROUNDS"
        order=("" .other)
        [ $((round % 2)) = 0 ] || order=(.other "")
        for transport in $ARMS; do
            for loads in $DATA_LOADS "$NAME_LOADS"; do
                for which in "${order[@]}"; do
                    load "$transport$which" "$round" --dir "$WORK/$transport$which" \
                        --server "$(pids_of "${server[this$which]}")" \
                        --client "$(pids_of "${CLIENT[$transport$which]}")" $loads
                done
            done
        done
    done
    "$BENCH" report --bench against --raw "$RAW" --out "$OUT/against.jsonl"
}

# serve_and_mount SUFFIX BINARY: a server of its own, and a mount on each transport.
serve_and_mount() {
    local transport port DRAY=$2
    port=$(free_port $((17440 + RANDOM % 1000)))
    start "dray-server$1" "$DRAY" serve --export "data=$STORE/export,squash=none" \
        --listen "tcp://127.0.0.1:$port" --state "$WORK/state$1"
    server[this$1]=$STARTED
    wait_for 10 listens "$port"
    ARMS=
    for transport in $TRANSPORTS; do
        if [ "$transport" = uring ] && ! switch_uring_on; then continue; fi
        mount_dray "$port" "$WORK/$transport$1" "transport=$transport"
        CLIENT[$transport$1]=$STARTED
        ARMS="$ARMS $transport"
    done
}
