# Many clients of one server, for each number of them in CLIENTS: a process holds all their
# sessions, and starts, watches and kills the server. Over a tmpfs, so that no disk is measured.

CLIENTS=${CLIENTS:-500 1000 2000 4000}
IDLE_SECS=${IDLE_SECS:-10}

bench_many() {
    build_all
    scratch
    local count raw=$OUT/many.raw.jsonl
    : >"$raw"
    for count in $CLIENTS; do
        rm -rf "$STORE/export" "$WORK/many"
        mkdir "$STORE/export" "$WORK/many"
        # What did not come to its end shows as missing, and why stands above.
        "$BENCH" many --dray "$DRAY" --store "$STORE/export" --work "$WORK/many" \
            --port "$(free_port 17470)" --count "$count" --idle "$IDLE_SECS" "$@" >>"$raw" || true
        cp "$WORK/many/server.log" "$OUT/many-$count.log" || true
    done
    "$BENCH" report --bench many --raw "$raw" --out "$OUT/many.jsonl"
}
