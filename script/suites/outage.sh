#!/bin/bash
# The server's machine loses power for real: it is an emulated one, with an ext4 on a disk of
# its own, and is killed with what it had not written. What clients kept is sent again. The
# loss of what they did not keep is reported. outage.sh [classic|uring]
# transports: classic
#
# The guest's kernel is made once and kept in target/guests: in CI by the step `guest`, within a
# limit; without it this suite is left out there.
# proves: P102
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/guest.sh"
. "$(dirname "$0")/../lib/losses.sh"
transport=${1:-classic}
begin outage

built=$target/guests/$guest_series
leave_out() { skip all "$1"; exit 0; }
if [ ! -e "$built/initrd" ]; then
    [ -z "${CI:-}" ] || leave_out "no guest in target/guests: see the step \`guest\`"
    if ! { guest_tools && guest_build "$guest_series" "$built"; }; then
        leave_out "no guest can be made here"
    fi
fi
command -v qemu-system-x86_64 >/dev/null || leave_out "there is no qemu-system-x86_64"

# The machine's disk, with what clients may rely on: it is all on media.
share=$scratch/share disk=$scratch/disk
mkdir "$share" "$scratch/store"
cp "$DRAY" "$share/dray"
truncate -s 200M "$disk"
need e2fsprogs || true
mkfs.ext4 -q -F -m 0 "$disk"
mount -o loop "$disk" "$scratch/store"
mkdir "$scratch/store/export" "$scratch/store/state"
for name in open closed reported unreported; do : >"$scratch/store/export/$name"; done
umount "$scratch/store"

# What the machine does: it writes nothing by itself that nobody syncs, so that a loss of
# power soon after a write is sure to undo it.
# The emulator's network comes from any port, which is insecure.
cat >"$share/guest.sh" <<'END'
mkdir /tmp/disk
echo 0 >/proc/sys/vm/dirty_writeback_centisecs
mount -t ext4 -o commit=600 /dev/vda /tmp/disk || exit 1
/mnt/dray serve --export test=/tmp/disk/export,squash=none,insecure --listen tcp://0.0.0.0:7440 \
    --state /tmp/disk/state &
for number in $(seq 600); do
    (exec 3<>/dev/tcp/127.0.0.1/7440) 2>/dev/null && break
    sleep 0.1
done
touch /mnt/serves
wait
END

port=$(free_port)
# boot: the machine starts. True when it serves.
boot() {
    local guest number
    rm -f "$share/serves"
    guest_command "$built" "$share"
    "${guest[@]}" -drive "file=$disk,format=raw,if=virtio,cache=writeback" \
        -nic "user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:$port-:7440" \
        </dev/null >"$scratch/server.log" 2>&1 7>&- &
    machine=$!
    remember "$machine"
    echo "$machine" >"$scratch/machine"
    for number in $(seq 1200); do
        [ -e "$share/serves" ] && return
        kill -0 "$machine" 2>/dev/null || break
        sleep 0.1
    done
    power_off
    tail -n 20 "$scratch/server.log" >&2
    return 1
}

# power_on: and waits until the machine serves. A kernel that dies under emulation before it has
# come to dray says nothing about dray: it has three tries.
power_on() {
    local try
    for try in 1 2 3; do
        boot && return
        grep -q "Kernel panic" "$scratch/server.log" || break
        say "the guest's kernel died while it started (try $try of 3)"
    done
    die "the guest does not serve"
}

power_off() {
    { kill -9 "$machine"; wait "$machine" || true; } 2>/dev/null # the shell tells of the kill
}

# on_media FILE: what of an exported file is on the disk, which is looked at as it is.
on_media() {
    cp --sparse=always "$disk" "$scratch/copy"
    mount -o loop "$scratch/copy" "$scratch/store"
    cp "$scratch/store/export/$1" "$scratch/found" 2>/dev/null || : >"$scratch/found"
    umount "$scratch/store"
    rm "$scratch/copy"
}

# What was written and not synced is there after the outage, in open and in closed files; what
# is written while the machine is away waits for it.
kept_is_sent_again() {
    local at=$scratch/mnt writer code=0
    head -c 3000000 /dev/urandom >"$scratch/data"
    exec 7<>"$at/open"
    cat "$scratch/data" >&7
    dd if="$scratch/data" "of=$at/closed" bs=1M
    printf changed | dd "of=$at/closed" bs=1 seek=1000000 conv=notrunc
    printf changed | dd "of=$scratch/data" bs=1 seek=1000000 conv=notrunc
    truncate -s 2000000 "$at/closed"
    power_off
    on_media closed
    # Else this would prove nothing.
    if cmp -s -n 2000000 "$scratch/data" "$scratch/found"; then return 1; fi
    (echo behind >>"$at/closed") &
    writer=$!
    power_on
    wait "$writer" || code=$?
    [ "$code" = 0 ]
    sync_7
    exec 7>&-
    cmp -n 2000000 "$scratch/data" "$at/closed"
    [ "$(tail -c +2000001 "$at/closed")" = behind ]
    [ "$(stat -c %s "$at/open")" = 3000000 ]
    [ "$(unsynced_count mnt losses)" = 0 ]
    [ "$(unsynced_count mnt power_losses)" = 1 ]
    # What was synced afterwards stays.
    sync "$at/closed"
    power_off
    on_media closed
    cmp "$scratch/found" <(head -c 2000000 "$scratch/data"; echo behind)
    power_on
}

# Without replay the next sync of an open file reports its loss, once. The mount's status reports
# losses of closed files and of names.
unkept_loss_is_reported() {
    mount_at bare replay=0
    local at=$scratch/bare
    exec 7<>"$at/reported"
    head -c 1000000 /dev/urandom >&7
    head -c 1000000 /dev/urandom >"$at/unreported"
    echo here >"$at/fresh"
    power_off
    power_on
    sync_7_tells_once
    exec 7>&-
    [ "$(unsynced_count bare losses)" -ge 2 ]
    "$DRAY" status "$at" --json | grep "it was not kept" >/dev/null
    if [ ! -e "$at/fresh" ]; then
        "$DRAY" status "$at" --json | grep "no file has the name any more" >/dev/null
    fi
    unmount_at bare
}

checked() {
    check "$@"
    machine=$(cat "$scratch/machine")
}
power_on
mount_at mnt replay=64M
checked kept-is-sent-again kept_is_sent_again
checked unkept-loss-is-reported unkept_loss_is_reported
finish
