# What script/systemd checks, in a container of its guest: a line each in /mnt/checks. Below
# emulation all is slow, so that nothing here is about time but what must not last for ever.

export LC_ALL=C
say() { echo "$1" >>/mnt/checks; }

# check NAME COMMAND...: `ok` or `FAIL`.
check() {
    local name=$1
    shift
    echo "--- $name: $*"
    if "$@"; then say "ok    $name"; else say "FAIL  $name"; fi
}

main_pid() { systemctl show --property MainPID --value dray; }
of_mount() { cat "/sys/fs/cgroup/system.slice/$1.mount/cgroup.procs" 2>/dev/null; }

# wait_until COMMAND...: five minutes at most.
wait_until() {
    local number
    for number in $(seq 1500); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.2
    done
    echo "never: $*"
    return 1
}

nothing_runs() { ! systemctl is-active dray && ! systemctl is-enabled dray; }
is_quiet() {
    local said
    said=$(systemd-analyze verify /lib/systemd/system/dray.service 2>&1)
    echo "$said"
    [ -z "$said" ]
}

configure() {
    cat >/etc/dray/dray.toml <<END
listen = ["tcp://127.0.0.1:7440"]
[[export]]
name = "data"
dir = "/exported"
squash = "none"
END
    cat >/etc/fstab <<END
dray://127.0.0.1/data /data dray _netdev,nofail 0 0
dray://127.0.0.1/data /auto dray noauto,x-systemd.automount,x-systemd.idle-timeout=2s,_netdev 0 0
END
    mkdir -p /auto
    systemctl daemon-reload
}

is_read_back() { [ "$(echo hello | tee /data/file >/dev/null; cat /exported/file)" = hello ]; }

killed_and_back() {
    local before code=0
    exec 7<>/data/deleted
    echo kept >&7
    rm /data/deleted
    before=$(main_pid)
    kill -9 "$before"
    cat /data/file && [ "$(main_pid)" != "$before" ] &&
        [ "$(cat /proc/self/fd/7)" = kept ] || code=1
    exec 7>&-
    return "$code"
}

# appending FILE COMMAND...: nothing that is appended meanwhile is lost.
appending() {
    local file=$1 writer code=0 number
    shift
    (for number in $(seq 300); do echo "$number" || exit 1; done >>"$file") &
    writer=$!
    "$@" || code=1
    wait "$writer" || code=1
    [ "$code" = 0 ] && [ "$(wc -l <"$file")" = 300 ]
}

upgraded() {
    local before daemons
    before=$(main_pid)
    daemons=$(of_mount data)
    dpkg -i /mnt/dray_*.deb && [ "$(main_pid)" != "$before" ] && [ "$(of_mount data)" != "$daemons" ]
}

is_gone() { [ "$(systemctl is-active auto.mount)" = inactive ]; }

# Where the kernel has autofs; and unmounted when nobody has used it for a while.
mounted_by_use() {
    systemctl start auto.automount || { say "out   no autofs in the guest"; return 0; }
    [ "$(cat /auto/file)" = hello ] && wait_until is_gone
}

stopped_and_started() {
    systemctl stop data.mount && [ -z "$(of_mount data)" ] && systemctl start data.mount &&
        [ "$(cat /data/file)" = hello ]
}

# The server is away, and somebody waits for it, when the machine goes down.
away() {
    systemctl stop dray && dray status /data | grep AWAY >/dev/null && (cat /data/file &)
}

ip link set lo up
rm -f /var/lib/man-db/auto-update # which takes minutes here
check "the package is installed" dpkg -i /mnt/dray_*.deb
check "it starts nothing by itself" nothing_runs
check "systemd has no doubts about the unit" is_quiet
configure
check "the service starts" systemctl enable --now dray
check "a line of fstab is mounted" systemctl start data.mount
check "what is written there is at the server" is_read_back
check "every kind of call is allowed by the unit" python3 /mnt/systemd_calls.py /data
check "a killed server is back, and has a deleted open file" killed_and_back
check "a restart loses nothing" appending /data/restart systemctl restart dray
check "an upgrade of the package loses nothing" appending /data/upgrade upgraded
check "a mount by its first use" mounted_by_use
check "a stopped mount leaves no process, and is started again" stopped_and_started
check "a server that is away" away
systemctl --failed --no-legend
journalctl -b --no-pager
say "all checked"
