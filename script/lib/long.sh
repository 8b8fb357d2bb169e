# What the load tests of script/long share: a bystander, who does little, beside an aggressor, who
# does as much as it can. To be sourced by bash, after common.sh and mounts.sh.

# Seconds that a bystander is measured for, alone and beside the aggressor.
BYSTANDER_SECS=${BYSTANDER_SECS:-5}
# Seconds that the aggressor has to get going.
HEAD_START_SECS=${HEAD_START_SECS:-2}

# latency_of OPERATION DIR: `p50 p99 max count`, in microseconds; see script/lib/latency.py.
latency_of() {
    timeout -k 5 "$((BYSTANDER_SECS * 20 + 60))" \
        python3 "$root/script/lib/latency.py" "$1" "$2" "$BYSTANDER_SECS"
}

# beside NAME GOAL OPERATION DIR AGGRESSOR...: a check. The p99 of the bystander's OPERATION in DIR
# beside the command AGGRESSOR is at most GOAL times the p99 that it has alone. Alone it is measured
# before and after the aggressor, and the larger p99 of the two counts: what else the machine does
# must not pass for the aggressor. The command runs in a subshell, and is ended with all that it
# started. The line `figure ...` says what came of it; the step's log keeps it. The ratio is in $ratio.
beside() {
    local name=$1 goal=$2 operation=$3 dir=$4
    shift 4
    check "$name" measure_beside "$name" "$goal" "$operation" "$dir" "$@"
    sed -n 's/^figure /figure '"$suite"' /p' "$scratch/check.log"
    ratio=$(sed -n 's/^figure .* ratio \([0-9.]*\),.*/\1/p' "$scratch/check.log")
}

measure_beside() {
    local name=$1 goal=$2 operation=$3 dir=$4 before after with aggressor code=0
    shift 4
    before=$(latency_of "$operation" "$dir")
    set -m
    ("$@") >"$scratch/aggressor.log" 2>&1 &
    aggressor=$!
    set +m
    sleep "$HEAD_START_SECS"
    with=$(latency_of "$operation" "$dir") || code=$?
    kill -TERM -- "-$aggressor" 2>/dev/null || true
    wait "$aggressor" 2>/dev/null || true
    [ "$code" = 0 ]
    settle || true
    after=$(latency_of "$operation" "$dir")
    python3 - "$name" "$goal" "$before" "$with" "$after" <<'PYTHON'
import sys

name, goal = sys.argv[1], float(sys.argv[2])
before, beside, after = ([int(word) for word in text.split()] for text in sys.argv[3:])
alone = max(before[1], after[1])
ratio = beside[1] / alone
print(f"figure {name}: p99 alone {alone} us, beside {beside[1]} us (p50 {beside[0]}, "
      f"max {beside[2]}), ratio {ratio:.1f}, goal {goal:g}")
sys.exit(ratio > goal)
PYTHON
}

# What the store's device may write each second; 0 is no limit.
throttled_to=0

# settle: what the aggressor has left to be written is on media. The limit does not hold meanwhile.
settle() {
    set_throttle 0
    timeout 60 sync -f "$scratch/store" || true
    set_throttle "$throttled_to"
}

# throttle BYTES_PER_S: limits what is written to the store's loop device, for all processes.
# Ended with `throttle 0`, and with the device. False where the kernel has no such limit (control
# groups of version 2 have none for their root, and writeback belongs to that).
throttle() {
    throttled_to=$1
    set_throttle "$1"
}

# Where the kernel takes it (Linux 6.2), writers wait once so much of the device's is dirty, and not only
# when a part of all memory is.
dirty_max_bytes=$((64 << 20))

set_throttle() {
    local device limits=/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device
    device=$(cat "/sys/class/block/$(basename "$(findmnt -no SOURCE "$scratch/store")")/dev")
    if [ "$1" != 0 ] && [ -w "/sys/class/bdi/$device/max_bytes" ]; then
        echo 1 >"/sys/class/bdi/$device/strict_limit"
        echo "$dirty_max_bytes" >"/sys/class/bdi/$device/max_bytes"
    fi
    [ -w "$limits" ] && echo "$device $1" >"$limits"
}
