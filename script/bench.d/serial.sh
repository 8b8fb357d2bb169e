# dray, end to end on one machine, against a raw TCP connection and the bare tmpfs.
#
# In every round: raw TCP (as the system sets it up, which the targets are about, and with the
# congestion control that dray uses on loopback), native tmpfs, then each transport, one after the other, so that
# whatever else the machine does hits all of them. Ratios are taken within a round; the
# median over rounds counts. All arms use the same files on the same tmpfs.

ROUNDS=${ROUNDS:-5}
TRANSPORTS=${TRANSPORTS:-classic uring}
COUNT=${COUNT:-200}
IDLE_SECS=${IDLE_SECS:-10}
CLOSE_TO_OPEN=${CLOSE_TO_OPEN:-consistency=close-to-open}
STRICT_LOADS="stream_read stream_write stream_read:$JOBS stream_write:$JOBS rand4k rand4k:$JOBS
    create stat_cold open_close unlink create_write_close unlink"
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
    build_all
    scratch
    RAW=$OUT/serial.raw.jsonl
    : >"$RAW"
    mkdir "$STORE/export"
    "$BENCH" fill --dir "$STORE/export" --jobs $JOBS --file-mib "$FILE_MIB" --with-names yes
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

# Every transport twice: strict, and close-to-open.
mount_all() {
    local transport
    for transport in $TRANSPORTS; do
        if [ "$transport" = uring ] && ! switch_uring_on; then
            say "this kernel has no FUSE over io_uring: that arm is left out"
            continue
        fi
        mount_dray "$PORT" "$WORK/$transport" "transport=$transport"
        CLIENT[$transport]=$STARTED
        mount_dray "$PORT" "$WORK/$transport.cto" "transport=$transport,$CLOSE_TO_OPEN"
        CLIENT[$transport.cto]=$STARTED
        ARMS="$ARMS $transport"
        fresh_idle "$transport"
    done
}

# Memory of a mount that has done nothing yet.
fresh_idle() {
    "$BENCH" idle --arm "$1.fresh" --secs 1 --client "$(pids_of "${CLIENT[$1]}")" >>"$RAW"
}

one_round() {
    local round=$1 arm server
    server=$(pids_of "$SERVER")
    "$BENCH" tcp --bench serial --arm tcp --round "$round" --secs "$SECS" >>"$RAW"
    "$BENCH" tcp --bench serial --arm tcp.reno --round "$round" --secs "$SECS" \
        --congestion reno >>"$RAW"
    load native "$round" --dir "$STORE/export" $STRICT_LOADS
    for arm in $ARMS; do
        load "$arm" "$round" --dir "$WORK/$arm" --server "$server" \
            --client "$(pids_of "${CLIENT[$arm]}")" $STRICT_LOADS
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

idle_all() {
    local arm
    say "idle for $IDLE_SECS s on each transport"
    sleep 2
    for arm in $ARMS; do
        "$BENCH" idle --arm "$arm" --secs "$IDLE_SECS" \
            --client "$(pids_of "${CLIENT[$arm]}")" --server "$(pids_of "$SERVER")" >>"$RAW"
    done
    "$BENCH" sessions --arm server --address "tcp://127.0.0.1:$PORT" --export data \
        --server "$(pids_of "$SERVER")" >>"$RAW" || say "idle connections were not measured"
}
