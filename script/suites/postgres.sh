#!/bin/bash
# postgres on a mount: initdb, pgbench, kill -9 in the middle of it, recovery from the log,
# and everything that it called committed is there. postgres.sh [classic|uring]
# transports: classic
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
transport=${1:-classic}
need postgresql postgresql-contrib || true
begin postgres
bin=$(find /usr/lib/postgresql -name initdb -printf '%h\n' 2>/dev/null | sort -V | tail -n 1)
[ -n "$bin" ] || { skip all "postgresql cannot be installed"; exit 0; }
store 900
serve
mount_at mnt
data=$scratch/mnt/data
sockets=$scratch/sockets
mkdir "$data" "$sockets"
chown postgres: "$data" "$sockets"
# as_postgres COMMAND...
as_postgres() { (cd "$sockets" && runuser -u postgres -- env PGHOST="$sockets" "$@"); }
sql() { as_postgres "$bin/psql" -qAt -d postgres -c "$1"; }

initialise() {
    chmod 700 "$data"
    as_postgres "$bin/initdb" -D "$data" --no-locale -E UTF8 -A trust >/dev/null
    cat >>"$data/postgresql.conf" <<END
listen_addresses = ''
unix_socket_directories = '$sockets'
shared_buffers = 32MB
max_wal_size = 128MB
END
}
# Our own child, so that it is gone for good once it was killed and waited for; $postmaster.
start() {
    (cd "$sockets" && exec setpriv --reuid=postgres --regid=postgres --init-groups \
        "$bin/postgres" -D "$data" >>"$sockets/log" 2>&1) &
    postmaster=$!
    remember "$postmaster"
    for _ in $(seq 600); do
        sql "select 1" >/dev/null 2>&1 && return
        sleep 0.1
    done
    tail -n 30 "$sockets/log"
    return 1
}
measure() {
    as_postgres "$bin/pgbench" -q -i -s 3 postgres
    as_postgres "$bin/pgbench" -c 4 -j 2 -T 8 postgres
    # Bank accounts: what tellers, branches and the history say must agree.
    books_agree
}
books_agree() {
    local sums
    sums=$(sql "select (select sum(abalance) from pgbench_accounts) = (select
        coalesce(sum(delta), 0) from pgbench_history) and (select sum(bbalance) from
        pgbench_branches) = (select sum(tbalance) from pgbench_tellers)")
    [ "$sums" = t ]
}
survive() {
    local number client child children
    start
    measure
    sql "create table survived (number int)"
    # -n: at its start it would empty the history that the books are held against.
    as_postgres "$bin/pgbench" -n -c 4 -j 2 -T 30 postgres >/dev/null 2>&1 &
    client=$!
    # Each number is written down elsewhere once postgres says that it is committed.
    for number in $(seq 60); do
        sql "insert into survived values ($number)"
        echo "$number" >"$scratch/committed"
    done
    # All must go at once, as in a crash of their machine: its children would go on for a while,
    # and it starts no more of them while it stands still.
    kill -STOP "$postmaster"
    children=$(cat "/proc/$postmaster/task/$postmaster/children")
    # shellcheck disable=SC2086 # several
    kill -9 "$postmaster" $children || true
    wait "$client" || true
    wait "$postmaster" || true
    # Nobody starts while one of them still has the shared memory.
    for child in $children; do wait_up_to 60 is_gone "$child"; done
    start
    books_agree
    [ "$(sql 'select count(*) from survived')" -ge "$(cat "$scratch/committed")" ]
    sql "select count(*) from pgbench_accounts" | grep -x 300000
    as_postgres "$bin/pg_ctl" -D "$data" -m fast -w stop
    wait "$postmaster"
}
check initdb initialise
check pgbench-and-crash-recovery survive
finish
