# Where CPU time goes in one load: perf samples the stacks of application, client and server.
# Built with frame pointers, in a target directory of its own, so that stacks of our own code are
# whole; else as released.

TRANSPORTS=${TRANSPORTS:-classic uring}

bench_profile() {
    local name=${1:-rand4k} transport
    need_perf
    install_packages python3
    build_with_frames
    scratch
    mkdir "$STORE/export"
    "$BENCH" fill --dir "$STORE/export" --jobs 1 --file-mib "$FILE_MIB" --with-names yes
    PORT=$(free_port 17440)
    start_dray_server "$PORT" "$STORE/export"
    : >"$OUT/profile.jsonl"
    for transport in $TRANSPORTS; do
        if [ "$transport" = uring ] && ! switch_uring_on; then
            say "this kernel has no FUSE over io_uring: that arm is left out"
            continue
        fi
        mount_dray "$PORT" "$WORK/$transport" "transport=$transport"
        profile "$name" "$transport" "$STARTED"
    done
}

need_perf() {
    command -v perf >/dev/null || install_packages linux-perf
    command -v perf >/dev/null ||
        { say "perf is needed: package linux-perf, or linux-tools of the kernel that runs"; exit 1; }
    # A counter of the kernel's clock, which virtual machines have, too.
    perf record -q -a -e cpu-clock -o "$OUT/perf.probe" -- true >"$OUT/perf.log" 2>&1 || {
        say "perf cannot sample here (a container?): see $OUT/perf.log;" \
            "on the host: sysctl kernel.perf_event_paranoid=-1 kernel.kptr_restrict=0"
        exit 1
    }
    rm -f "$OUT/perf.probe"
}

build_with_frames() {
    local into=$CARGO_TARGET_DIR/profile
    need_rust
    cargo build --release --quiet --target-dir "$into" -p dray -p dray-bench \
        --config 'build.rustflags=["-Cforce-frame-pointers=yes"]'
    BENCH=$into/release/dray-bench DRAY=$into/release/dray
}

# profile LOAD TRANSPORT PID: PID is the mount's.
profile() {
    local name=$1 transport=$2 client server load perf us at=$OUT/profile-$1-$2
    client=$(pids_of "$3") server=$(pids_of "$SERVER")
    say "$name over $transport, $SECS s"
    perf record -q -a -e cpu-clock -F 1999 -g -o "$WORK/perf.data" >>"$OUT/perf.log" 2>&1 &
    perf=$!
    defer "kill $perf"
    wait_for 10 test -s "$WORK/perf.data"
    "$BENCH" load --bench profile --arm "$transport" --round 0 --secs "$SECS" \
        --file-mib "$FILE_MIB" --names "$NAMES" --dir "$WORK/$transport" \
        --client "$client" --server "$server" "$name" >"$at.raw.jsonl" &
    load=$!
    wait "$load"
    kill -INT "$perf"
    wait "$perf" || true # which says that it was interrupted
    us=$(sed -n "s/.*\"$name.cpu_us\",\"value\":\([0-9.]*\).*/\1/p" "$at.raw.jsonl")
    perf script -i "$WORK/perf.data" --no-inline -F comm,pid,ip,sym 2>>"$OUT/perf.log" |
        python3 script/lib/flame.py --arm "$transport" --load "$name" --us "$us" \
            --role "application=$load" --role "client=$client" --role "server=$server" \
            --folded "$at.folded" --svg "$at.svg" | tee -a "$OUT/profile.jsonl"
    say "flame graph: $at.svg, folded stacks: $at.folded"
}
