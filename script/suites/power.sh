#!/bin/bash
# The server's machine loses power: its disk goes on with what it had been given, which is a
# copy of the image behind the mounted file system, and everything else is gone. What clients
# kept is sent again. The loss of what they did not keep is reported. power.sh [classic|uring]
# transports: classic
# proves: P102
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/losses.sh"
transport=${1:-classic}
begin power
store 300
boot=1

# The state directory is on the lost machine, too.
state=$scratch/store/state
serve_machine() { serve --boot-id "$boot"; }

# lose_power: as far as the server's machine is concerned. The image must not change while
# it is copied, so it is copied until it did not.
lose_power() {
    kill -9 "$server"
    wait "$server" 2>/dev/null || true
    local image=$scratch/memory/image
    for _ in $(seq 20); do
        cp --sparse=always "$image" "$scratch/image"
        cmp -s "$image" "$scratch/image" && break
    done
    for _ in $(seq 600); do # until the keeper of deleted files is gone
        umount "$scratch/store" 2>/dev/null && break
        sleep 0.1
    done
    cp --sparse=always "$scratch/image" "$image"
    rm "$scratch/image"
    mount -t ext4 -o loop "$image" "$scratch/store"
    boot=$((boot + 1))
    echo "$boot" >"$scratch/boot" # for those after a check, which is a subshell
}

# base NAME...: files that are there, and empty, whatever happens.
base() {
    local name
    for name in "$@"; do : >"$scratch/mnt/$name"; done
    sync -f "$scratch/store"
}

# lose_unsynced: writes to an open file (7) and to a closed one, and loses power.
lose_unsynced() {
    local at=$scratch/mnt
    base open closed
    exec 7<>"$at/open"
    head -c 8000000 /dev/urandom >"$scratch/data"
    cat "$scratch/data" >&7
    dd if="$scratch/data" "of=$at/closed" bs=1M
    printf changed | dd "of=$at/closed" bs=1 seek=4000000 conv=notrunc
    printf changed | dd "of=$scratch/data" bs=1 seek=4000000 conv=notrunc
    truncate -s 5000000 "$at/closed"
    lose_power
}

# What was written and not synced is there after the loss, in open and in closed files.
kept_is_sent_again() {
    local at=$scratch/mnt try
    for try in $(seq 10); do
        lose_unsynced
        # Else this would prove nothing. Others may have had all of the machine synced: then again.
        cmp -s -n 5000000 "$scratch/data" "$scratch/store/export/closed" || break
        [ "$try" != 10 ]
        serve_machine
        sync_7
        exec 7>&-
    done
    serve_machine
    sync_7
    exec 7>&-
    cmp -n 5000000 "$scratch/data" "$at/closed"
    [ "$(stat -c %s "$at/closed")" = 5000000 ]
    [ "$(stat -c %s "$at/open")" = 8000000 ]
    cmp "$at/closed" "$scratch/store/export/closed"
    [ "$(unsynced_count mnt losses)" = 0 ]
    [ "$(unsynced_count mnt power_losses)" = "$try" ]
}

# Without replay the next sync of an open file reports its loss, once. The mount's status reports
# losses of closed files.
unkept_loss_is_reported() {
    mount_at bare replay=0
    local at=$scratch/bare
    base reported unreported
    exec 7<>"$at/reported"
    head -c 3000000 /dev/urandom >&7
    head -c 3000000 /dev/urandom >"$at/unreported"
    lose_power
    serve_machine
    sync_7_tells_once
    exec 7>&-
    [ "$(unsynced_count bare losses)" -ge 2 ]
    [ "$(unsynced_count bare lost_bytes)" -ge 6000000 ]
    "$DRAY" status "$at" --json | grep "it was not kept" >/dev/null
    unmount_at bare
}

# A file whose name did not get onto media is gone, and its loss is reported.
lost_names_are_reported() {
    local at=$scratch/mnt
    mkdir "$at/fresh"
    echo here >"$at/fresh/file"
    lose_power
    serve_machine
    ls "$at" >/dev/null
    if [ -e "$at/fresh/file" ]; then return; fi # its name was on media
    "$DRAY" status "$at" --json | grep "no file has the name any more" >/dev/null
}

checked() {
    check "$@"
    server=$(cat "$scratch/server.pid" 2>/dev/null || echo "$server")
    boot=$(cat "$scratch/boot" 2>/dev/null || echo 1)
    # One that failed before that has left those after it no server to go on with.
    kill -0 "$server" 2>/dev/null || serve_machine
}
serve_machine
mount_at mnt replay=64M
checked kept-is-sent-again kept_is_sent_again
checked unkept-loss-is-reported unkept_loss_is_reported
checked lost-names-are-reported lost_names_are_reported
finish
