# Shares of bandwidth, on real mounts of one server: what a victim has beside an aggressor with ten times its
# load, with rules and without; how exact shares are; what rules cost; how soon a changed rule counts, at the other
# server of a projection, too.
#
# The file system is a tmpfs, and the export's rule gives it a rate: then machines of any size have
# the same question. Loads are in qos.py.

ROUNDS=${ROUNDS:-3}
# MiB/s of the export, well below what two CPUs can do.
RATE_MIB=${RATE_MIB:-200}

bench_qos() {
    [ "$DRAY" != "$DRAY_BUILT" ] || { need_rust && cargo build --release --quiet -p dray; }
    install_packages python3
    scratch
    chmod 755 "$WORK"
    local port mounts=() daemons=() name
    port=$(free_port $((17500 + RANDOM % 2000)))
    mkdir -m 777 "$STORE/data"
    start_dray_server "$port" "$STORE/data"
    for name in a b; do
        mount_dray "$port" "$WORK/$name" timeout=600
        mounts+=("$WORK/$name")
        daemons+=("$STARTED")
        # What qos.py calls small.
        mount_dray "$port" "$WORK/$name.small" timeout=600,max_io=128K
        daemons+=("$STARTED")
    done
    local environment=("DRAY=$DRAY" "STATE=$WORK/state" "SERVER=$(pids_of "$SERVER")" "MOUNTS=$(pids_of "${daemons[@]}")")
    serve_shared
    mount_shared
    serve_apart
    env "${environment[@]}" "${APART[@]}" SHARED_MOUNT="$WORK/shared" SHARED_STATE="$WORK/state-shared0" \
        RATE_MIB="$RATE_MIB" SECS="$SECS" ROUNDS="$ROUNDS" \
        python3 script/bench.d/qos.py "${mounts[@]}" | tee "$OUT/qos.jsonl"
}

# A server and mounts for the victim on one CPU, and a mount for the writers on another one. The processes of the
# victim's first mount have the CPU before all others. APART is for qos.py, and empty where there is one CPU.
serve_apart() {
    local cpus port server daemons=()
    APART=()
    mapfile -t cpus < <(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
    [ ${#cpus[@]} -gt 1 ] || { say "one CPU: the victim shares it with the writers"; return; }
    port=$(free_port $((21500 + RANDOM % 2000)))
    mkdir -m 777 "$STORE/apart"
    start apart taskset -c "${cpus[0]}" "$DRAY" serve --export "data=$STORE/apart,squash=none" \
        --listen "tcp://127.0.0.1:$port" --state "$WORK/state-apart"
    server=$STARTED
    wait_for 10 listens "$port"
    mount_apart first "$port" taskset -c "${cpus[0]}" chrt --fifo 1
    mount_apart victims "$port" taskset -c "${cpus[0]}"
    mount_apart writers "$port" taskset -c "${cpus[1]}"
    APART=("APART_STATE=$WORK/state-apart" "APART_SERVER=$(pids_of "$server")" "APART_CPUS=${cpus[0]},${cpus[1]}"
        "APART_AT=$WORK/first,$WORK/victims,$WORK/writers" "APART_MOUNTS=$(pids_of "${daemons[@]}")")
}

# mount_apart NAME PORT COMMAND...: mounted by a process that the command starts.
mount_apart() {
    local name=$1 port=$2
    shift 2
    mkdir "$WORK/$name"
    start "apart-$name" "$@" "$DRAY" mount "dray://127.0.0.1:$port/data" "$WORK/$name" -o timeout=600 --foreground
    daemons+=("$STARTED")
    defer "'$DRAY' umount '$WORK/$name' || unmount '$WORK/$name'"
    wait_for 10 is_mounted "$WORK/$name"
}

# Two servers of a projection over one directory; the ports are in $PORTS.
serve_shared() {
    local number port list=""
    port=$((19500 + RANDOM % 2000))
    PORTS=()
    mkdir -m 777 "$STORE/shared"
    for number in 0 1; do
        port=$(free_port $((port + 1)))
        PORTS+=("$port")
        list+="${list:+, }'tcp://127.0.0.1:$port'"
    done
    printf "[projection.shared]\nlayout = 'cluster'\nservers = [%s]\npath = '%s'\nexport = { squash = 'none' }\n" \
        "$list" "$STORE/shared" >"$WORK/shared.toml"
    for number in 0 1; do
        start "shared$number" "$DRAY" serve --projections "$WORK/shared.toml" --state "$WORK/state-shared$number" \
            --server "tcp://127.0.0.1:${PORTS[number]}" --listen "tcp://127.0.0.1:${PORTS[number]}"
        wait_for 10 listens "${PORTS[number]}"
    done
}

mount_shared() {
    mkdir -p "$WORK/shared"
    start shared-mount "$DRAY" mount "dray://127.0.0.1:${PORTS[0]}/shared" "$WORK/shared" -o timeout=600 --foreground
    defer "'$DRAY' umount '$WORK/shared' || unmount '$WORK/shared'"
    wait_for 10 is_mounted "$WORK/shared"
}
