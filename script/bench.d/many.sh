# Many clients of one server, for each number of them in CLIENTS: a process holds all their
# sessions, and starts, watches and kills the server. Over a tmpfs, so that no disk is measured; but what all
# read together comes from a disk of RATE_MIB, which is to stay the limit.

CLIENTS=${CLIENTS:-500 1000 2000 4000}
# The number of clients that read together, and are looked at while they rest.
TOGETHER_CLIENTS=${TOGETHER_CLIENTS:-10000}
# The number of clients with leases.
LEASED_CLIENTS=${LEASED_CLIENTS:-10000}
IDLE_SECS=${IDLE_SECS:-10}
RATE_MIB=${RATE_MIB:-150}
PHASES=${PHASES:-idle contention hold status rogues restart half leave power vanish}

bench_many() {
    build_all
    scratch
    local count phases=("$@") together=no leases=no alone=()
    RAW=$OUT/many.raw.jsonl
    : >"$RAW"
    # shellcheck disable=SC2206 # a list of words
    [ $# -gt 0 ] || { phases=($PHASES); together=yes leases=yes; }
    for count in "${phases[@]}"; do
        case $count in
            together) together=yes ;;
            leases) leases=yes ;;
            *) alone+=("$count") ;;
        esac
    done
    if [ ${#alone[@]} -gt 0 ]; then
        for count in $CLIENTS; do many "$count" "$STORE/export" "${alone[@]}"; done
    fi
    [ "$leases" = no ] || many "$LEASED_CLIENTS" "$STORE/export" leases
    if [ "$together" = yes ]; then
        make_disk limited "$RATE_MIB"
        many "$TOGETHER_CLIENTS" "$WORK/limited/export" idle together
    fi
    "$BENCH" report --bench many --raw "$RAW" --out "$OUT/many.jsonl"
}

# many COUNT DIRECTORY PHASE...: a server of this directory, and so many clients.
many() {
    local count=$1 store=$2
    shift 2
    rm -rf "$store" "$WORK/many"
    mkdir "$store" "$WORK/many"
    # What did not come to its end shows as missing, and why stands above.
    "$BENCH" many --dray "$DRAY" --store "$store" --work "$WORK/many" \
        --port "$(free_port 17470)" --count "$count" --idle "$IDLE_SECS" "$@" >>"$RAW" || true
    cp "$WORK/many/server.log" "$OUT/many-$count.log" || true
}
