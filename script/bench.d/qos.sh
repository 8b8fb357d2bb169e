# Shares of bandwidth, on real mounts of one server: what a victim has beside an aggressor with ten times its
# load, with rules and without; how exact shares are; what rules cost.
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
    done
    DRAY=$DRAY STATE=$WORK/state SERVER=$(pids_of "$SERVER") MOUNTS=$(pids_of "${daemons[@]}") \
        RATE_MIB=$RATE_MIB SECS=$SECS ROUNDS=$ROUNDS \
        python3 script/bench.d/qos.py "${mounts[@]}" | tee "$OUT/qos.jsonl"
}
