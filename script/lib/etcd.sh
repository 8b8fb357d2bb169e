# Sourced: an etcd of one member on loopback, for servers that take over from each other. A script that sources it
# has installed etcd-server and python3, and ends $etcd_pid.

# start_etcd DIR PORT: clients use the port, and the next one is its own. What definitions say is in $etcd_url.
start_etcd() {
    local dir=$1 port=$2 peers=http://127.0.0.1:$(($2 + 1)) program
    program=$(PATH=$PATH:/usr/bin command -v etcd) ||
        { echo "etcd is needed (package etcd-server)" >&2; return 1; }
    etcd_url=http://127.0.0.1:$port
    mkdir -p "$dir"
    "$program" --name one --data-dir "$dir/data" --listen-client-urls "$etcd_url" \
        --advertise-client-urls "$etcd_url" --listen-peer-urls "$peers" \
        --initial-advertise-peer-urls "$peers" --initial-cluster "one=$peers" \
        >"$dir/log" 2>&1 7>&- 8>&- 9>&- &
    etcd_pid=$!
    for _ in $(seq 600); do
        etcd_is_healthy "$port" && return
        kill -0 "$etcd_pid" 2>/dev/null || break
        sleep 0.1
    done
    tail -n 5 "$dir/log" >&2
    echo "etcd does not start" >&2
    return 1
}

etcd_is_healthy() {
    (exec 3<>"/dev/tcp/127.0.0.1/$1" && printf 'GET /health HTTP/1.0\r\n\r\n' >&3 &&
        grep -q '"health":"true"' <&3) 2>/dev/null
}

# wait_for_slices COUNT: until each of so many slices is served by one of the servers here, and another one
# could take it over.
wait_for_slices() {
    local reader
    reader=$(dirname "${BASH_SOURCE[0]}")/slices.py
    for _ in $(seq 300); do
        "$DRAY" status --json --interval 0 2>/dev/null | python3 "$reader" "$1" && return
        sleep 0.1
    done
    "$DRAY" status >&2
    echo "not all slices are in step" >&2
    return 1
}
