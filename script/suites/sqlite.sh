#!/bin/bash
# sqlite with four writers, in both journal modes; the rollback journal over two mounts too, and over
# two that cache data (the write-ahead log shares memory, which ends at a mount). sqlite.sh [classic|uring]
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
transport=${1:-classic}
need python3 || { begin sqlite; skip all "python3 cannot be installed"; exit 0; }
begin sqlite
store 200
serve
mount_at mnt
mount_at twin
writers() { timeout 100 python3 "$root/script/lib/sqlite_writers.py" "$@"; }
check rollback writers delete "$scratch/mnt/rollback.db"
check wal writers wal "$scratch/mnt/wal.db"
check rollback-two-mounts writers delete "$scratch/mnt/both.db" "$scratch/twin/both.db"
# sqlite tells by the name of its journal what is under way: names that are believed are tried, too.
for seconds in 1 60; do
    for name in mnt twin; do mount_at "$name-$seconds" "consistency=close-to-open,attr_timeout=$seconds"; done
    check "rollback-two-mounts-that-cache-for-$seconds-s" \
        writers delete "$scratch/mnt-$seconds/$seconds.db" "$scratch/twin-$seconds/$seconds.db"
done
finish
