# What the benchmarks share: building, scratch space, daemons, and leaving nothing behind.

# Where cargo puts what it makes, whatever its configuration files say.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}
BENCH=$CARGO_TARGET_DIR/release/dray-bench
DRAY_BUILT=$CARGO_TARGET_DIR/release/dray
DRAY=${DRAY:-$DRAY_BUILT}
OUT=bench-out
SECS=${SECS:-2}
FILE_MIB=${FILE_MIB:-256}
NAMES=${NAMES:-4000}
JOBS=4
mkdir -p "$OUT"

say() { printf '%s\n' "== $*" >&2; }

need_root() {
    [ "$(id -u)" = 0 ] && return
    say "root is needed to mount; trying sudo"
    exec sudo -E "PATH=$PATH" script/bench "$@"
}

# Installs what is missing, quietly, and starts no service.
install_packages() {
    local missing=() package
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
            missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] && return
    command -v apt-get >/dev/null || { say "no apt-get: cannot install ${missing[*]}"; return; }
    say "installing ${missing[*]}"
    local made=no
    if [ ! -e /usr/sbin/policy-rc.d ]; then
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
        chmod +x /usr/sbin/policy-rc.d
        made=yes
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$OUT/apt.log" 2>&1 ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
            >>"$OUT/apt.log" 2>&1 || say "not installed: ${missing[*]} (see $OUT/apt.log)"
    [ $made = no ] || rm -f /usr/sbin/policy-rc.d
}

# As every script here does it: a toolchain that is new enough, and a linker.
need_rust() {
    bash -c '. script/lib/common.sh; need_rust' script/bench || exit 1
    command -v cargo >/dev/null || PATH="${HOME:-/root}/.cargo/bin:$PATH"
}

build_bench() { need_rust && cargo build --release --quiet -p dray-bench; }

build_all() {
    build_bench
    [ "$DRAY" != "$DRAY_BUILT" ] || cargo build --release --quiet -p dray
}

# --- scratch space and cleaning up -----------------------------------------------------

DEFERRED=()
defer() { DEFERRED+=("$*"); }

cleanup() {
    local status=$? index
    trap - EXIT INT TERM
    set +e
    for ((index = ${#DEFERRED[@]} - 1; index >= 0; index--)); do
        eval "${DEFERRED[index]}" >>"$OUT/cleanup.log" 2>&1
    done
    exit $status
}

# Makes $WORK, and $STORE, a tmpfs in it that everybody stores on.
scratch() {
    trap cleanup EXIT
    trap 'exit 130' INT TERM
    : >"$OUT/cleanup.log"
    WORK=$(mktemp -d "${TMPDIR:-/tmp}/dray-bench.XXXXXX")
    # A mount that would not go would have its files removed: --one-file-system.
    defer "rm -rf --one-file-system '$WORK'"
    STORE=$WORK/store
    mkdir "$STORE"
    mount -t tmpfs -o size=75% dray-bench "$STORE"
    defer "umount '$STORE' || umount -l '$STORE'"
}

# A process and all that it started.
descendants() {
    local child
    echo "$1"
    # shellcheck disable=SC2013 # words
    for child in $(cat /proc/"$1"/task/*/children 2>/dev/null); do descendants "$child"; done
}

pids_of() { local pid; for pid in "$@"; do descendants "$pid"; done | paste -sd, -; }

# Ends one process and all that it started: politely, then not.
end_process() {
    local pids pid tries
    pids=$(descendants "$1")
    for pid in $pids; do kill "$pid"; done
    for tries in $(seq 30); do
        # shellcheck disable=SC2086 # several
        alive $pids || return 0
        sleep 0.1
    done
    for pid in $pids; do kill -9 "$pid"; done
}

ended() { ! alive "$1"; }
alive() { local pid; for pid in "$@"; do [ -d "/proc/$pid" ] && return 0; done; return 1; }

# start LOG COMMAND...: starts a daemon in the background; its pid is in $STARTED.
start() {
    local log=$1
    shift
    "$@" </dev/null >"$OUT/$log.log" 2>&1 &
    STARTED=$!
    disown "$STARTED"
    defer "end_process $STARTED"
}

# wait_for SECONDS COMMAND...: until the command succeeds.
wait_for() {
    local left=$(($1 * 10))
    shift
    until "$@" >/dev/null 2>&1; do
        ((left-- > 0)) || { say "waited in vain for: $*"; return 1; }
        sleep 0.1
    done
}

is_mounted() { mountpoint -q "$1"; }
unmount() { ! is_mounted "$1" || fusermount3 -u "$1" || umount "$1" || umount -l "$1"; }

listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# A port of 127.0.0.1 on which nobody listens, from $1 up.
free_port() {
    local port=$1
    while listens "$port"; do port=$((port + 1)); done
    echo "$port"
}

# FUSE over io_uring must be switched on in the kernel; false where it has none.
switch_uring_on() {
    local file=/sys/module/fuse/parameters/enable_uring before
    modprobe fuse 2>/dev/null || true
    [ -e "$file" ] || return 1
    before=$(cat "$file")
    [ "$before" = Y ] && return 0
    echo Y >"$file" || return 1
    defer "echo $before >$file"
}

# --- dray ------------------------------------------------------------------------------

# Counters of a mount: our names, and where `dray status MOUNT --json` has them.
FIELDS=${FIELDS:-round_trips=server.calls,client_copied_bytes=process.copied_bytes}

# start_dray_server PORT DIRECTORY [OPTION,...]: pid in $SERVER.
start_dray_server() {
    # The load runs as root, whom an export would otherwise take for nobody.
    start dray-server "$DRAY" serve --export "data=$2,squash=none${3:+,$3}" \
        --listen "tcp://127.0.0.1:$1" --state "$WORK/state"
    SERVER=$STARTED
    wait_for 10 listens "$1"
}

# mount_dray PORT MOUNTPOINT OPTIONS: pid in $STARTED.
mount_dray() {
    mkdir -p "$2"
    start "dray-$(basename "$2")" "$DRAY" mount "dray://127.0.0.1:$1/data" "$2" -o "${3:-timeout=600}" --foreground
    defer "'$DRAY' umount '$2' || unmount '$2'"
    wait_for 10 is_mounted "$2"
}

# --- disks -----------------------------------------------------------------------------

# make_disk NAME RATE_MIB: $WORK/NAME, a limited disk of its own.
make_disk() {
    local image=$STORE/$1.img device number limits=/sys/fs/cgroup/blkio kind
    truncate -s 1G "$image"
    device=$(losetup --find --show "$image")
    defer "losetup -d $device"
    mkfs.ext4 -q -F "$device"
    mkdir -p "$WORK/$1"
    mount "$device" "$WORK/$1"
    defer "umount '$WORK/$1' || umount -l '$WORK/$1'"
    number=$(cat "/sys/class/block/${device#/dev/}/dev")
    if [ -w "/sys/class/bdi/$number/max_bytes" ]; then
        echo 1 >"/sys/class/bdi/$number/strict_limit"
        echo $((64 << 20)) >"/sys/class/bdi/$number/max_bytes"
    fi
    for kind in read write; do
        [ -w "$limits/blkio.throttle.${kind}_bps_device" ] ||
            { say "this kernel has no blkio.throttle of control groups, version 1"; exit 1; }
        echo "$number $(($2 << 20))" >"$limits/blkio.throttle.${kind}_bps_device"
        defer "echo '$number 0' >$limits/blkio.throttle.${kind}_bps_device"
    done
}

# --- results ---------------------------------------------------------------------------

# The results to show: those of the last run, else those that were kept.
chosen() {
    if [ -e "$OUT/$1.jsonl" ]; then echo "$OUT/$1.jsonl"; else echo "docs/figures/$1.jsonl"; fi
}

keep_runs() {
    local name
    mkdir -p docs/figures
    for name in serial peers parallel; do
        [ ! -e "$OUT/$name.jsonl" ] || cp "$OUT/$name.jsonl" "docs/figures/$name.jsonl"
    done
}
