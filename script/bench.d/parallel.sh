# Projections over several servers on one machine: the seed's figures 8 to 11, and what placement costs.
#
# Disks are ext4 on loop devices, each limited to RATE_MIB in both directions, so that the disks are
# the limit and not this machine's two CPUs. Arms are interleaved in each round; ratios are taken within
# a round, and the median over rounds counts.
#
# shellcheck disable=SC2086,SC2206 # lists of loads are words

ROUNDS=${ROUNDS:-3}
# MiB/s of one disk: the seed's server has about 160 MB/s.
RATE_MIB=${RATE_MIB:-150}
# The same where several disks work at once.
STRIPE_RATE_MIB=${STRIPE_RATE_MIB:-50}
DISK_FILE_MIB=${DISK_FILE_MIB:-64}
# Of files over several disks: large enough that filling the servers' memory is a small part of the time.
STRIPE_FILE_MIB=${STRIPE_FILE_MIB:-256}
SIZES=${SIZES:-4k 8k 16k 32k 64k 128k 256k 512k 1m}
STRIPE_SIZES=${STRIPE_SIZES:-2k 8k 32k 128k 512k 1m}
OPENERS=${OPENERS:-512}
PARTS=${PARTS:-single clients opens placement failover stripe aggregate}

bench_parallel() {
    build_all
    install_packages python3
    scratch
    RAW=$OUT/parallel.raw.jsonl
    : >"$RAW"
    switch_uring_on || true
    local part parts=("$@")
    [ $# -gt 0 ] || parts=($PARTS)
    for part in "${parts[@]}"; do
        say "$part"
        "part_$part"
    done
    "$BENCH" report --bench parallel --raw "$RAW" --out "$OUT/parallel.jsonl"
}

# measure ARM ROUND ARGUMENTS...
measure() {
    local arm=$1 round=$2
    shift 2
    "$BENCH" load --bench parallel --arm "$arm" --round "$round" --file-mib "$DISK_FILE_MIB" \
        "$@" >>"$RAW"
}

# put ARM METRIC ROUND VALUE UNIT
put() {
    printf '{"bench":"parallel","arm":"%s","metric":"%s","value":%s,"unit":"%s","round":%s}\n' \
        "$1" "$2" "$4" "$5" "$3" >>"$RAW"
}

# --- servers and mounts ----------------------------------------------------------------

# serve_here NAME DIRECTORY [OPTION,...]: one server of one export; its address is in $ADDRESS.
serve_here() {
    local port
    port=$(free_port $((17500 + RANDOM % 2000)))
    start "$1" "$DRAY" serve --export "data=$2,squash=none${3:+,$3}" --listen "tcp://127.0.0.1:$port" \
        --state "$WORK/state.$1"
    SERVER=$STARTED
    wait_for 10 listens "$port"
    ADDRESS=127.0.0.1:$port
}

# mount_target TARGET NAME [ARGUMENT...]: the mount's pid is in $STARTED.
mount_target() {
    mkdir -p "$WORK/$2"
    start "$2" "$DRAY" mount "$1" "$WORK/$2" --foreground "${@:3}"
    defer "'$DRAY' umount '$WORK/$2' || unmount '$WORK/$2'"
    wait_for 10 is_mounted "$WORK/$2"
}

# serve_projection NAME LAYOUT COUNT DIRECTORY: COUNT servers. `%n` in the directory is the number of a
# server with a disk of its own. With $etcd_url they take over from each other. Pids are in $SERVERS,
# the target in $TARGET.
serve_projection() {
    local name=$1 layout=$2 count=$3 path=$4 number ports=() list="" port
    local file=$WORK/$name.toml
    port=$((19500 + RANDOM % 2000))
    for ((number = 0; number < count; number++)); do
        port=$(free_port $((port + 1)))
        ports+=("$port")
        list+="${list:+, }'tcp://127.0.0.1:$port'"
    done
    local cluster=""
    [ -z "${etcd_url:-}" ] || cluster="[cluster]
etcd = ['$etcd_url']
"
    printf "%s[projection.data]\nlayout = '%s'\nservers = [%s]\npath = '%s'\nstripe = '64K'\n%s\n" \
        "$cluster" "$layout" "$list" "$path" "export = { squash = 'none' }" >"$file"
    SERVERS=()
    PORTS=("${ports[@]}")
    PROJECTION=$name
    for ((number = 0; number < count; number++)); do serve_again "$number"; done
    TARGET=dray://127.0.0.1:${ports[0]}/data
}

# serve_again NUMBER: starts this server of the projection that was served last.
serve_again() {
    local port=${PORTS[$1]}
    start "$PROJECTION.$port" "$DRAY" serve --projections "$WORK/$PROJECTION.toml" \
        --server "tcp://127.0.0.1:$port" --listen "tcp://127.0.0.1:$port" \
        --state "$WORK/state.$PROJECTION.$port"
    SERVERS[$1]=$STARTED
    wait_for 10 listens "$port"
}

# loads SIZES: writes and reads of each size.
loads() {
    local size
    for size in $1; do printf 'file_write_%s file_read_%s ' "$size" "$size"; done
}

# --- parts -----------------------------------------------------------------------------

# Figures 8 and 9: a client against the rate of its server's own disk. `client` is without leases, and `merged`
# too, but with read-ahead and merged writes at the server. `leased` has read-ahead and leases: the client's kernel
# reads ahead, too, and the mount's daemon answers small writes.
part_single() {
    local round load arm
    make_disk disk "$RATE_MIB"
    for arm in disk client merged leased; do
        mkdir "$WORK/disk/$arm"
        "$BENCH" fill --dir "$WORK/disk/$arm" --jobs 1 --file-mib "$DISK_FILE_MIB"
    done
    serve_here single "$WORK/disk/client"
    mount_target "dray://$ADDRESS/data" client -o leases=no
    serve_here merging "$WORK/disk/merged" "read_ahead=64M,merge_writes=64M"
    mount_target "dray://$ADDRESS/data" merged -o leases=no
    serve_here leasing "$WORK/disk/leased" leases,write_leases,read_ahead=64M
    mount_target "dray://$ADDRESS/data" leased -o leases=yes,write_leases=yes
    for ((round = 0; round < ROUNDS; round++)); do
        for load in $(loads "$SIZES"); do
            measure disk "$round" --dir "$WORK/disk/disk" "$load"
            measure client "$round" --dir "$WORK/client" "$load"
            measure merged "$round" --dir "$WORK/merged" "$load"
            measure leased "$round" --dir "$WORK/leased" "$load"
        done
    done
}

# Figure 10: many clients of one server share its rate.
part_clients() {
    local round count number began ended mib=16
    make_disk shared "$RATE_MIB"
    serve_here clients "$WORK/shared"
    for ((number = 0; number < 20; number++)); do
        mkdir "$WORK/shared/$number"
        "$BENCH" fill --dir "$WORK/shared/$number" --jobs 1 --file-mib $mib
        mount_target "dray://$ADDRESS/data" "c$number"
    done
    for ((round = 0; round < ROUNDS; round++)); do
        for count in 4 8 12 16 20; do
            echo 1 >/proc/sys/vm/drop_caches
            began=$(date +%s%N)
            local readers=()
            for ((number = 0; number < count; number++)); do
                dd if="$WORK/c$number/$number/bench-data-0" of=/dev/null bs=1M status=none &
                readers+=($!)
            done
            wait "${readers[@]}"
            ended=$(date +%s%N)
            put "clients$count" read.mib_per_s "$round" \
                "$((count * mib * 1000 * 1000000 / (ended - began)))e-3" MiB/s
        done
    done
}

# Many processes that open one set of files together: opens must not fan out.
part_opens() {
    local round arm
    mkdir "$STORE/opens"
    serve_projection opens3 cluster-stripe 3 "$STORE/opens"
    mount_target "$TARGET" opens3
    serve_here opens1 "$STORE/opens"
    mount_target "dray://$ADDRESS/data" opens1
    for ((round = 0; round < 16; round++)); do echo x >"$WORK/opens1/file$round"; done
    for ((round = 0; round < ROUNDS; round++)); do
        for arm in opens1 opens3; do
            put "$arm" open.secs "$round" \
                "$(python3 script/lib/open_together.py "$OPENERS" "$WORK/$arm"/file*)" s
        done
    done
}

# What placement costs a request that stays on one server: the same server without it, as the only one of a
# projection, and as one of two. A request is one of the kernel to the mount. A read is 1, a stat 2, an open and close 4,
# a create and unlink 6. `placement_cpu_us` is the largest quotient of these four, of one server and of two. Of two servers
# all files are at one (dray-bench at-home), and the system calls of the other one are counted.
part_placement() {
    local round load arm number loads="rand4k create stat_cold open_close unlink" orders
    local projections=$WORK/pair.toml
    local -A daemons=()
    mkdir -p "$STORE/placement"
    serve_projection pair cluster 2 "$STORE/placement"
    mount_target "$TARGET" pair
    daemons[pair]="--client $(pids_of "$STARTED") --server $(pids_of "${SERVERS[@]}")"
    # Each has a directory of its own, since all make the same names.
    for arm in pair placed serial; do
        number=$("$BENCH" at-home --projections "$projections" --store "$STORE/placement/$arm")
        "$BENCH" fill --dir "$STORE/placement/$arm" --jobs 1 --file-mib "$DISK_FILE_MIB" \
            --projections "$projections" --store "$STORE/placement/$arm"
    done
    daemons[pair_other]="--server $(pids_of "${SERVERS[1 - number]}")"
    serve_projection placed cluster 1 "$STORE/placement"
    mount_target "$TARGET" placed
    daemons[placed]="--client $(pids_of "$STARTED") --server $(pids_of "${SERVERS[@]}")"
    serve_here serial "$STORE/placement"
    mount_target "dray://$ADDRESS/data" serial
    daemons[serial]="--client $(pids_of "$STARTED") --server $(pids_of "$SERVER")"
    orders=("serial placed pair" "pair placed serial" "placed pair serial" "serial pair placed" "pair serial placed"
        "placed serial pair")
    for ((round = 0; round < ROUNDS * 4; round++)); do
        for load in $loads; do
            # One load at a time: the speed of a virtual machine changes by a tenth within seconds, which is more than
            # is measured here. All orders take turns: the first finds the directory smaller.
            for arm in ${orders[round % 6]}; do
                measure "$arm" "$round" --dir "$WORK/$arm/$arm" --secs "$SECS" ${daemons[$arm]} \
                    --projections "$projections" --store "$STORE/placement/$arm" "$load"
            done
        done
    done
    for load in $loads; do
        measure pair_other 0 --dir "$WORK/pair/pair" --count 4000 ${daemons[pair_other]} \
            --projections "$projections" --store "$STORE/placement/pair" "$load"
    done
}

# One of three servers is killed: how long the slowest application stands still, until the others have its
# share.
part_failover() {
    local round load server=0
    . script/lib/etcd.sh
    install_packages python3 etcd-server
    mkdir "$STORE/failover"
    chmod 777 "$STORE/failover"
    start_etcd "$WORK/etcd" "$(free_port $((21500 + RANDOM % 500)))" || exit 1
    defer "kill -KILL $etcd_pid 2>/dev/null"
    serve_projection failover cluster 3 "$STORE/failover"
    wait_for_slices 6 || exit 1
    mount_target "$TARGET" failover
    for ((round = 0; round < ROUNDS; round++)); do
        mkdir "$WORK/failover/$round"
        python3 script/lib/longest_pause.py "$WORK/failover/$round" 8 >"$WORK/pause" &
        load=$!
        sleep 2
        server=$(((server + 1) % 3))
        kill -KILL "${SERVERS[$server]}"
        wait "$load" || { say "an application saw an error"; exit 1; }
        put failover failover_s "$round" "$(cat "$WORK/pause")" s
        serve_again "$server"
        wait_for_slices 6 || exit 1
    done
    etcd_url=
}

# Figure 11: one file over the disks of one, two and four servers.
part_stripe() {
    local round count load number DISK_FILE_MIB=$STRIPE_FILE_MIB
    for number in 1 2 3 4; do
        make_disk "target$number" "$STRIPE_RATE_MIB"
        mkdir "$WORK/target$number/"{1,2,4}
    done
    for count in 1 2 4; do
        serve_projection "stripe$count" stripe "$count" "$WORK/target%n/$count"
        mount_target "$TARGET" "mount$count"
        "$BENCH" fill --dir "$WORK/mount$count" --jobs 1 --file-mib "$DISK_FILE_MIB"
    done
    for ((round = 0; round < ROUNDS; round++)); do
        for load in $(loads "$STRIPE_SIZES"); do
            for count in 1 2 4; do
                measure "stripe$count" "$round" --dir "$WORK/mount$count" "$load"
            done
        done
    done
}

# Read-ahead and merged writes over a file system in user space that takes 2 ms for each call.
part_aggregate() {
    install_packages python3-pyfuse3
    "$BENCH" aggregate --dray "$DRAY" --slow-fs script/lib/slow_fs.py --rounds "$ROUNDS" |
        sed 's/"bench":"aggregate"/"bench":"parallel"/' >>"$RAW"
}
