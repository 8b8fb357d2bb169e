# dray beside what a user would take instead. All store on the same tmpfs, all on loopback;
# every peer is started by hand with a configuration of its own in a scratch directory, in
# a network namespace of its own (so that fixed ports of theirs meet nobody), and ended by
# pid. FILE_MIB stays above 128, the write cache of mfsmount, which would otherwise swallow
# blocks written twice. All are up at the same time and idle but for the one under load; passes are
# interleaved, medians count.
#
# shellcheck disable=SC2086 # lists of loads and prefixes of commands are words

ROUNDS=${ROUNDS:-3}
PEERS=${PEERS:-moosefs glusterfs sshfs ganesha}
DRAY_TRANSPORT=${DRAY_TRANSPORT:-uring}
STREAMS="stream_write stream_read stream_write:$JOBS stream_read:$JOBS rand4k rand4k:$JOBS"

# What each arm needs for a run: where it is, and whose CPU time counts.
# The address of every peer in its own network.
HOST=10.99.0.1

declare -A PLACE=() CLIENTS=() SERVERS=() COLD_PLACE=() INSIDE=()
ARMS=""

# arm NAME PLACE CLIENT-PIDS SERVER-PIDS
arm() {
    ARMS="$ARMS $1"
    PLACE[$1]=$2 CLIENTS[$1]=$3 SERVERS[$1]=$4
}

bench_peers() {
    build_all
    install_packages moosefs-master moosefs-chunkserver moosefs-client glusterfs-server \
        glusterfs-client sshfs openssh-sftp-server nfs-ganesha nfs-ganesha-vfs libnfs13 rpcbind iproute2
    scratch
    RAW=$OUT/peers.raw.jsonl
    : >"$RAW"
    mkdir "$STORE/native"
    arm native "--dir $STORE/native" "" ""
    up_dray
    local peer round
    for peer in $PEERS; do
        say "starting $peer"
        # Not in a subshell: what it starts must be known here to be ended.
        if ! "up_$peer"; then say "$peer does not start here: left out (see $OUT/$peer*.log)"; fi
    done
    for peer in $ARMS; do
        ${INSIDE[$peer]:-} "$BENCH" fill ${PLACE[$peer]} --jobs "$JOBS" --file-mib "$FILE_MIB"
    done
    for ((round = 0; round < ROUNDS; round++)); do
        say "pass $((round + 1)) of $ROUNDS"
        for peer in $ARMS; do one_pass "$peer" "$round"; done
    done
    "$BENCH" report --bench peers --raw "$RAW" --out "$OUT/peers.jsonl"
}

one_pass() {
    local peer=$1 round=$2
    say "  $peer"
    # A peer that fails one pass is reported and does not end the run for the others.
    load_peer "$peer" "$round" "${PLACE[$peer]}" $STREAMS create &&
        load_peer "$peer" "$round" "${COLD_PLACE[$peer]:-${PLACE[$peer]}}" stat_cold &&
        load_peer "$peer" "$round" "${PLACE[$peer]}" open_close unlink ||
        say "$peer failed in this pass"
}

# load_peer NAME ROUND PLACE WORKLOADS...
load_peer() {
    local peer=$1 round=$2 place=$3
    shift 3
    ${INSIDE[$peer]:-} "$BENCH" load --bench peers --arm "$peer" --round "$round" $place \
        --secs "$SECS" --file-mib "$FILE_MIB" --names "$NAMES" \
        --client "$(pids_of ${CLIENTS[$peer]})" --server "$(pids_of ${SERVERS[$peer]})" \
        "$@" >>"$RAW"
}

# --- a network of their own --------------------------------------------------------------

# Starts a process that keeps a network namespace with only a loopback device; commands
# run in it with the words in $NET before them.
new_network() {
    start "$1-network" unshare --net sleep infinity
    NET="nsenter --net=/proc/$STARTED/ns/net"
    wait_for 5 test_network "$STARTED"
    $NET ip link set lo up
    # MooseFS refuses 127.0.0.1; this address is as local, and known only in there.
    $NET ip address add $HOST/32 dev lo
}

test_network() { [ "$(readlink "/proc/$1/ns/net")" != "$(readlink /proc/$$/ns/net)" ]; }

# --- the arms ----------------------------------------------------------------------------

up_dray() {
    mkdir "$STORE/dray"
    local port
    port=$(free_port 17440)
    start_dray_server "$port" "$STORE/dray"
    local transport=$DRAY_TRANSPORT
    if [ "$transport" = uring ] && ! switch_uring_on; then transport=classic; fi
    mount_dray "$port" "$WORK/dray" "transport=$transport"
    arm dray "--dir $WORK/dray" "$STARTED" "$SERVER"
}

# One master, two chunkservers; goal 1, so that every byte is stored once, as by the others.
up_moosefs() {
    command -v mfsmaster >/dev/null && command -v mfsmount >/dev/null || return 1
    local dir=$WORK/moosefs port=19420 servers="" index
    mkdir -p "$dir/master" "$WORK/mnt-moosefs"
    new_network moosefs || return 1
    # shellcheck disable=SC2012 # one of two names
    cp "$(ls /var/lib/mfs/metadata.mfs.empty /usr/share/*/metadata.mfs.empty 2>/dev/null |
        head -1)" "$dir/master/metadata.mfs" 2>/dev/null || printf 'MFSM NEW' >"$dir/master/metadata.mfs"
    echo '* / rw,alldirs,maproot=0' >"$dir/exports.cfg"
    : >"$dir/topology.cfg"
    cat >"$dir/master.cfg" <<END
WORKING_USER = root
WORKING_GROUP = root
SYSLOG_IDENT = dray-bench-mfsmaster
DATA_PATH = $dir/master
EXPORTS_FILENAME = $dir/exports.cfg
TOPOLOGY_FILENAME = $dir/topology.cfg
MATOML_LISTEN_HOST = $HOST
MATOCS_LISTEN_HOST = $HOST
MATOCL_LISTEN_HOST = $HOST
MATOML_LISTEN_PORT = $((port - 1))
MATOCS_LISTEN_PORT = $port
MATOCL_LISTEN_PORT = $((port + 1))
CHUNKS_LOOP_MIN_TIME = 3600
END
    start moosefs-master $NET mfsmaster -f -c "$dir/master.cfg" start
    servers=$STARTED
    for index in 1 2; do
        mkdir -p "$dir/chunk$index" "$STORE/moosefs$index"
        echo "$STORE/moosefs$index" >"$dir/hdd$index.cfg"
        cat >"$dir/chunk$index.cfg" <<END
WORKING_USER = root
WORKING_GROUP = root
SYSLOG_IDENT = dray-bench-mfschunkserver$index
DATA_PATH = $dir/chunk$index
HDD_CONF_FILENAME = $dir/hdd$index.cfg
HDD_LEAVE_SPACE_DEFAULT = 64MiB
BIND_HOST = $HOST
MASTER_HOST = $HOST
MASTER_PORT = $port
CSSERV_LISTEN_HOST = $HOST
CSSERV_LISTEN_PORT = $((port + 1 + index))
END
        start "moosefs-chunk$index" $NET mfschunkserver -f -c "$dir/chunk$index.cfg" start
        servers="$servers $STARTED"
    done
    sleep 3
    start moosefs-mount $NET mfsmount -f -o "mfsmaster=$HOST,mfsport=$((port + 1))" \
        "$WORK/mnt-moosefs"
    local client=$STARTED
    defer "unmount '$WORK/mnt-moosefs'"
    wait_for 20 is_mounted "$WORK/mnt-moosefs" || return 1
    $NET mfssetgoal -r 1 "$WORK/mnt-moosefs" >/dev/null 2>&1 || true
    # The chunkservers may still be joining: a file can be written once they have. The
    # write waits for them where no signal ends it, so it is not ours to wait for.
    start moosefs-probe dd if=/dev/zero of="$WORK/mnt-moosefs/probe" bs=64k count=1
    wait_for 40 ended "$STARTED" && [ -s "$WORK/mnt-moosefs/probe" ] || return 1
    rm -f "$WORK/mnt-moosefs/probe"
    arm moosefs "--dir $WORK/mnt-moosefs" "$client" "$servers"
}

# One volume of one brick with the defaults of its own management daemon.
up_glusterfs() {
    command -v glusterd >/dev/null || return 1
    local dir=$WORK/glusterfs server brick
    mkdir -p "$dir/state" "$dir/run" "$STORE/glusterfs" "$WORK/mnt-glusterfs" /var/log/glusterfs
    new_network glusterfs || return 1
    cat >"$dir/glusterd.vol" <<END
volume management
    type mgmt/glusterd
    option working-directory $dir/state
    option run-directory $dir/run
    option glusterd-sockfile $dir/glusterd.socket
    option transport-type socket
    option transport.socket.bind-address $HOST
    option transport.address-family inet
    option ping-timeout 0
end-volume
END
    start glusterfs-daemon $NET glusterd -N -f "$dir/glusterd.vol" -p "$dir/glusterd.pid" \
        -l "$PWD/$OUT/glusterfs-daemon.log"
    server=$STARTED
    # Its socket is there before it listens to anybody.
    wait_for 20 gluster_do "$dir" volume list || return 1
    # Bricks are started as daemons of their own: they are found by their pid files.
    defer "end_bricks '$dir/run'"
    gluster_do "$dir" volume create bench "$HOST:$STORE/glusterfs/brick" force || return 1
    gluster_do "$dir" volume start bench || return 1
    start glusterfs-mount $NET glusterfs -N -s $HOST --volfile-id=bench \
        -l "$PWD/$OUT/glusterfs-client.log" "$WORK/mnt-glusterfs"
    local client=$STARTED
    defer "unmount '$WORK/mnt-glusterfs'"
    wait_for 20 is_mounted "$WORK/mnt-glusterfs" || return 1
    wait_for 20 touch "$WORK/mnt-glusterfs/probe" || return 1
    rm -f "$WORK/mnt-glusterfs/probe"
    brick=$(cat "$(find "$dir/run" -path '*bench*' -name '*.pid' | head -1)")
    arm glusterfs "--dir $WORK/mnt-glusterfs" "$client" "$server $brick"
}

gluster_do() {
    local dir=$1
    shift
    $NET gluster --mode=script --glusterd-sock="$dir/glusterd.socket" "$@" \
        >>"$OUT/glusterfs-cli.log" 2>&1
}

end_bricks() {
    local file
    find "$1" -name '*.pid' | while read -r file; do end_process "$(cat "$file")"; done
}

# sshfs without ssh: it connects to an sftp-server directly. The mount for cold stat has
# its directory cache off.
up_sshfs() {
    local sftp=/usr/lib/openssh/sftp-server port listener client nocache
    command -v sshfs >/dev/null && [ -x $sftp ] || return 1
    mkdir -p "$STORE/sshfs" "$WORK/mnt-sshfs" "$WORK/mnt-sshfs-nocache"
    new_network sshfs || return 1
    port=19722
    start sshfs-server $NET "$BENCH" inetd --port $port -- $sftp
    listener=$STARTED
    sleep 0.5
    start sshfs-mount $NET sshfs -f -o directport=$port "127.0.0.1:$STORE/sshfs" "$WORK/mnt-sshfs"
    client=$STARTED
    defer "unmount '$WORK/mnt-sshfs'"
    wait_for 10 is_mounted "$WORK/mnt-sshfs" || return 1
    start sshfs-mount-nocache $NET sshfs -f -o "directport=$port,dir_cache=no,entry_timeout=0,attr_timeout=0" \
        "127.0.0.1:$STORE/sshfs" "$WORK/mnt-sshfs-nocache"
    nocache=$STARTED
    defer "unmount '$WORK/mnt-sshfs-nocache'"
    wait_for 10 is_mounted "$WORK/mnt-sshfs-nocache" || return 1
    COLD_PLACE[sshfs]="--dir $WORK/mnt-sshfs-nocache"
    arm sshfs "--dir $WORK/mnt-sshfs" "$client $nocache" "$listener"
}

# NFSv3 from libnfs in the load generator to ganesha: neither FUSE nor the kernel's client.
up_ganesha() {
    command -v ganesha.nfsd >/dev/null || return 1
    local dir=$WORK/ganesha
    mkdir -p "$dir/recovery" "$STORE/ganesha"
    new_network ganesha || return 1
    # It insists on a portmapper for NFSv3.
    start ganesha-rpcbind $NET rpcbind -f
    cat >"$dir/ganesha.conf" <<END
NFS_CORE_PARAM { Protocols = 3; Enable_NLM = false;
    Enable_RQUOTA = false; NFS_Port = 12049; MNT_Port = 12050; }
NFSV4 { RecoveryRoot = "$dir/recovery"; Graceless = true; }
EXPORT { Export_Id = 1; Path = "$STORE/ganesha"; Pseudo = "/bench"; Protocols = 3;
    Access_Type = RW; Squash = No_Root_Squash; SecType = sys; Filesystem_Id = 77.1;
    FSAL { Name = VFS; } }
END
    start ganesha-server $NET ganesha.nfsd -F -f "$dir/ganesha.conf" -p "$dir/ganesha.pid" \
        -L "$PWD/$OUT/ganesha.log" -N NIV_WARN
    local server=$STARTED
    INSIDE[ganesha]=$NET
    wait_for 20 $NET bash -c 'exec 3<>/dev/tcp/127.0.0.1/12049' || return 1
    local url="nfs://127.0.0.1$STORE/ganesha?version=3&nfsport=12049&mountport=12050&uid=0&gid=0"
    wait_for 20 $NET "$BENCH" load --nfs "$url" --names 1 create unlink || return 1
    arm ganesha "--nfs $url" "" "$server"
}
