# A MooseFS on this machine: a master, two chunkservers and mounts, in a network of their own. Nothing of an
# installed MooseFS is touched. To be sourced by bash, after mounts.sh.

# What a projection needs off below it: whatever a mount may remember that another mount has changed.
moosefs_uncached=mfscachemode=DIRECT,mfsattrcacheto=0,mfsentrycacheto=0,mfsdirentrycacheto=0
moosefs_uncached+=,mfsnegentrycacheto=0,mfssymlinkcacheto=0,mfsxattrcacheto=0,mfsgroupscacheto=0

# Chunkservers refuse to reach their master at 127.0.0.1.
moosefs_address=10.254.1.1

# in_moosefs_net COMMAND...: becomes the command, in MooseFS's network.
in_moosefs_net() { exec nsenter --net="/proc/$moosefs_net/ns/net" "$@"; }

# moosefs_daemon PROGRAM NAME: starts it in the foreground, by $moosefs/NAME.cfg.
moosefs_daemon() {
    in_moosefs_net "$1" -f -c "$moosefs/$2.cfg" start >>"$scratch/moosefs-$2.log" 2>&1 7>&- 8>&- 9>&- &
    remember "$!"
}

# start_moosefs: all but the mounts. Chunks lie in memory.
start_moosefs() {
    local number
    moosefs=$scratch/moosefs
    mkdir -p "$moosefs/master" "$moosefs/memory"
    mount -t tmpfs -o size=2g dray-test "$moosefs/memory"
    unshare --net sleep infinity 7>&- 8>&- 9>&- &
    moosefs_net=$!
    remember "$moosefs_net"
    wait_up_to 30 has_own_network "$moosefs_net" || die "there is no network namespace to be had"
    (in_moosefs_net ip link set lo up) && (in_moosefs_net ip address add "$moosefs_address/32" dev lo) ||
        die "MooseFS gets no network"
    echo "* / rw,alldirs,admin,maproot=0:0" >"$moosefs/exports.cfg"
    echo "MFSM NEW" >"$moosefs/master/metadata.mfs"
    moosefs_config master <<CFG
EXPORTS_FILENAME = $moosefs/exports.cfg
TOPOLOGY_FILENAME = $moosefs/none
CFG
    moosefs_daemon mfsmaster master
    wait_up_to 30 moosefs_answers || die "mfsmaster does not start"
    for number in 1 2; do
        mkdir "$moosefs/chunks$number" "$moosefs/memory/$number"
        echo "$moosefs/memory/$number" >"$moosefs/disks$number.cfg"
        moosefs_config "chunks$number" <<CFG
HDD_CONF_FILENAME = $moosefs/disks$number.cfg
HDD_LEAVE_SPACE_DEFAULT = 16MiB
MASTER_HOST = $moosefs_address
MASTER_RECONNECTION_DELAY = 1
CSSERV_LISTEN_HOST = $moosefs_address
CSSERV_LISTEN_PORT = 943$number
CFG
        moosefs_daemon mfschunkserver "chunks$number"
    done
}

# moosefs_config NAME: what each daemon's has, and what is read.
moosefs_config() {
    printf '%s\n' "WORKING_USER = root" "WORKING_GROUP = root" "NICE_LEVEL = 0" \
        "DATA_PATH = $moosefs/$1" >"$moosefs/$1.cfg"
    cat >>"$moosefs/$1.cfg"
}

# has_own_network PID
has_own_network() { ! [ "/proc/$1/ns/net" -ef /proc/self/ns/net ]; }

# moosefs_answers: the master takes connections of mounts.
moosefs_answers() {
    # shellcheck disable=SC2016 # the inner shell expands it
    (in_moosefs_net bash -c 'exec 3<>"/dev/tcp/$0/9421"' "$moosefs_address") 2>/dev/null
}

# mount_moosefs NAME: mounts it at $scratch/NAME, with nothing cached.
mount_moosefs() {
    mkdir -p "$scratch/$1"
    in_moosefs_net mfsmount "$scratch/$1" -f -H "$moosefs_address" -o "mfsnice=0,$moosefs_uncached" \
        >>"$scratch/moosefs-$1.log" 2>&1 7>&- 8>&- 9>&- &
    remember "$!"
    wait_up_to 30 mountpoint -q "$scratch/$1"
}

# moosefs_takes_data NAME: both chunkservers are there once a file can be written.
moosefs_takes_data() {
    # shellcheck disable=SC2016 # the inner shell expands it
    wait_up_to 60 timeout 20 sh -c 'echo x >"$0/try" && rm "$0/try"' "$scratch/$1"
}
