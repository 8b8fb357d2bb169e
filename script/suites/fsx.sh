#!/bin/bash
# fsx: random operations on one file, every read compared with what must be there.
# fsx.sh [classic|uring]; $TOOLS/fsx is the program. FSX_OWN_DISKS=N: operations on servers' own disks.
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
transport=${1:-classic}
begin fsx
tool=${TOOLS:-$target/tools/bin}/fsx
seed=${FSX_SEED:-1}
store 200
# One of two mounts under leases: also the recalls of what the other one changes are drawn.
export_options=,leases
serve
mount_at mnt
mount_at twin leases=no

# weights MAP REOPEN: operations and how often each is drawn.
weights() {
    cat <<END
flen = 1048576
[opsize]
max = 131072
[weights]
close_open = $2
invalidate = $1
mapread = $1
mapwrite = $1
read = 10
write = 10
truncate = 5
fsync = 1
fdatasync = 1
posix_fallocate = 2
punch_hole = 2
sendfile = 3
posix_fadvise = 1
copy_file_range = 3
END
}
weights 6 2 >"$scratch/mapped.toml"
weights 0 2 >"$scratch/plain.toml"
weights 0 20 >"$scratch/twin.toml"

# run CONFIG OPERATIONS FILE
run() {
    mkdir -p "$scratch/saved"
    say "seed $seed"
    timeout 120 "$tool" -q -S "$seed" -N "$2" -f "$scratch/$1.toml" -P "$scratch/saved" "$3"
}

# written NAME: bytes that were written through this mount so far.
written() {
    "$DRAY" status "$scratch/$1" --json | sed -n 's/.*"written_bytes": *\([0-9]*\).*/\1/p'
}

# The file is reached through a link that points to either mount in turn; fsx opens it again
# and again.
over_two_mounts() {
    ln -sfn "$scratch/mnt/shared" "$scratch/turn"
    touch "$scratch/mnt/shared"
    (
        while [ ! -e "$scratch/turned" ]; do
            for side in twin mnt; do
                ln -sfn "$scratch/$side/shared" "$scratch/turn.new"
                mv -T "$scratch/turn.new" "$scratch/turn"
                sleep 0.003
            done
        done
    ) &
    local turner=$! code=0 before
    before=$(written mnt)
    run twin 6000 "$scratch/turn" || code=$?
    touch "$scratch/turned"
    wait "$turner"
    cmp "$scratch/mnt/shared" "$scratch/twin/shared"
    # Else it was no test of two.
    [ "$(written mnt)" -gt "$before" ]
    [ "$(written twin)" -gt 0 ]
    return "$code"
}
# own_disks LAYOUT: through a mount of three servers, whose blocks are smaller than most requests. The file is
# there as one in the end.
own_disks() {
    local at=$scratch/$1 code=0 number
    define_own_disks "$1" "$scratch/store/$1"
    for number in 1 2 3; do serve_cluster "$number"; done
    mount_cluster "$1"
    run mapped "${FSX_OWN_DISKS:-2000}" "$at/fsx" || code=$?
    [ -s "$at/fsx" ]
    cp "$at/fsx" "$scratch/$1.before"
    unmount_at "$1"
    for number in 1 2 3; do
        stop_cluster "$number"
        find "$scratch/store/$1/disk$number/objects" -type f -size +0 >>"$scratch/$1.objects"
        rm -rf "$scratch/state$number"
    done
    # Else it was no test of several targets.
    [ "$1" = file ] || [ "$(wc -l <"$scratch/$1.objects")" = 3 ]
    "$DRAY" reassemble "$scratch/store/$1"/disk{1,2,3} --to "$scratch/$1.plain"
    cmp "$scratch/$1.before" "$scratch/$1.plain/fsx"
    return "$code"
}
check plain run plain 10000 "$scratch/mnt/plain"
check mapped run mapped 10000 "$scratch/mnt/mapped"
check two-mounts over_two_mounts
check leased is_leased mnt
# What places data on servers does not see how the kernel asks for them.
[ "$transport" = classic ] || finish
for layout in 'file' stripe; do check "$layout" own_disks "$layout"; done
finish
