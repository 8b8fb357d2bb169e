# Leases and the cache on a local disk, on real mounts of one server: the bare directory beside a strict mount
# with leases and one without. What is measured is in leases.py.

ROUNDS=${ROUNDS:-3}
# Files in the tree that is listed, in each arm.
FILES=${FILES:-50000}

bench_leases() {
    [ "$DRAY" != "$DRAY_BUILT" ] || { need_rust && cargo build --release --quiet -p dray; }
    build_bench
    install_packages python3 git sqlite3
    scratch
    chmod 755 "$WORK"
    local port
    port=$(free_port $((17500 + RANDOM % 2000)))
    mkdir -m 777 "$STORE/data"
    start_dray_server "$port" "$STORE/data" leases,write_leases,lock_leases
    # On one transport, whatever the machine has switched on.
    mount_dray "$port" "$WORK/strict" leases=no,transport=classic
    mount_dray "$port" "$WORK/strict2" leases=no,transport=classic
    mount_dray "$port" "$WORK/leased" leases=yes,transport=classic
    mount_dray "$port" "$WORK/other" leases=yes,transport=classic
    mount_dray "$port" "$WORK/cold" leases=yes,transport=classic
    mkdir -m 700 "$WORK/cache"
    mount_dray "$port" "$WORK/cached" "leases=yes,cache=$WORK/cache,cache_size=4G"
    mount_dray "$port" "$WORK/through" "consistency=immutable,cache=$WORK/cache,cache_size=4G"
    mount_dray "$port" "$WORK/asked" \
        "consistency=immutable,cache=$WORK/cache,cache_size=4G,cache_passthrough=no"
    mount_dray "$port" "$WORK/keeps" leases=yes,write_leases=yes,transport=classic
    mkdir -m 700 "$STORE/dirty"
    mount_dray "$port" "$WORK/back" "cache=$STORE/dirty,cache_write=back,transport=classic"
    # The same over rings: what is left of a second run is mostly the way of requests to the daemon and back.
    if switch_uring_on; then
        mount_dray "$port" "$WORK/ring" leases=yes,transport=uring
    fi
    DRAY=$DRAY ROUNDS=$ROUNDS FILES=$FILES FILE_MIB=$FILE_MIB CACHE=$WORK/cache BARE=$STORE/data \
        python3 script/bench.d/leases.py "$WORK" | tee "$OUT/leases.jsonl"
    "$BENCH" batch --target "dray://127.0.0.1:$port/data" --rounds "$ROUNDS" | tee -a "$OUT/leases.jsonl"
}
