#!/bin/bash
# sqlite with four writers, in both journal modes; the rollback journal over two mounts too (the
# write-ahead log shares memory, which ends at a mount, and loses commits). sqlite.sh [classic|uring]
# transports: classic
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
transport=${1:-classic}
need python3 || { begin sqlite; skip all "python3 cannot be installed"; exit 0; }
begin sqlite
store 200
# What one mount alone locks it decides on by itself. Over two mounts the locks go to and fro.
export_options=,leases,lock_leases
serve
mount_at mnt
mount_at twin
writers() { timeout 100 python3 "$root/script/lib/sqlite_writers.py" "$@"; }
check rollback writers delete "$scratch/mnt/rollback.db"
check wal writers wal "$scratch/mnt/wal.db"
check rollback-two-mounts writers delete "$scratch/mnt/both.db" "$scratch/twin/both.db"
finish
