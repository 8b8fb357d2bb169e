#!/bin/bash
# fio with verification: every block carries a checksum, and is read back and compared.
# fio.sh [classic|uring]
# transports: classic
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
transport=${1:-classic}
need fio || { begin fio; skip all "fio cannot be installed"; exit 0; }
begin fio
store 400
serve
mount_at mnt

# job NAME OPTION...
job() {
    local name=$1
    shift
    (cd "$scratch" && timeout 120 fio --name="$name" --directory="$scratch/mnt" --size=24m \
        --verify=crc32c --verify_fatal=1 --do_verify=1 --verify_dump=0 \
        --group_reporting --minimal "$@")
    rm -f "$scratch"/mnt/"$name".*
}
check psync job psync --ioengine=psync --rw=randwrite --bsrange=512-256k --bs_unaligned=1
check psync-rw job psync-rw --ioengine=psync --rw=randrw --bs=4k --numjobs=3 --fsync=32
check mmap job mmap --ioengine=mmap --rw=randwrite --bs=4k
check libaio-direct job libaio --ioengine=libaio --direct=1 --iodepth=16 --rw=randwrite \
    --bsrange=4k-128k --numjobs=2
check libaio-backlog job backlog --ioengine=libaio --iodepth=16 --rw=randwrite --bs=16k \
    --verify_backlog=64
# Written through one mount, verified through the other, which reads what the first said.
other_mount() {
    mount_at twin
    job_of() {
        (cd "$scratch" && timeout 120 fio --name=cross --filename="$scratch/$1/cross" --size=24m \
            --ioengine=psync --rw=write --bs=64k --verify=crc32c --verify_fatal=1 --minimal "${@:2}")
    }
    job_of mnt --do_verify=0
    job_of twin --verify_only
    unmount_at twin
}
check other-mount other_mount
finish
