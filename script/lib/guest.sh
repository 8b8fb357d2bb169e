# Guests: other kernels than this machine's, under emulation. To be sourced by bash, after
# common.sh. A guest sees this machine's root read-only, has its own /tmp, /run and /dev, and
# no network but loopback unless it is given one.

# The longest that a guest may take, seconds: emulation is slow.
guest_limit=${DRAY_GUEST_LIMIT:-900}

# kernel_package SERIES: the newest Debian package of a kernel series, such as 6.1.
kernel_package() {
    apt-cache search --names-only "^linux-image-${1//./\\.}\\.[0-9].*-amd64\$" |
        awk '$1 !~ /cloud|rt-amd64|unsigned/ { print $1 }' | sort -V | tail -n 1
}

# guest_build SERIES DIR: DIR/kernel and DIR/initrd of Debian's kernel. Only unpacked, not
# installed.
guest_build() {
    local package version modules ram=$2/ram module file
    package=$(kernel_package "$1")
    [ -n "$package" ] || { say "no package of a kernel $1 is known here"; return 1; }
    mkdir -p "$2/deb" "$ram"/{bin,dev,proc,sys,host}
    (cd "$2/deb" && apt-get -qq download "$package" 2>/dev/null && dpkg-deb -x "$package"_*.deb .) ||
        { say "$package cannot be had"; return 1; }
    version=${package#linux-image-}
    modules=lib/modules/$version
    cp "$2/deb/boot/vmlinuz-$version" "$2/kernel"
    depmod -b "$2/deb" "$version"
    for module in virtio_pci virtio_net virtio_blk 9pnet_virtio 9p fuse loop ext4 crc32c_generic; do
        modprobe -d "$2/deb" -S "$version" --show-depends "$module" 2>/dev/null
    done | awk '$1 == "insmod" { print $2 }' | sort -u | while read -r file; do
        module=$ram/${file#"$2/deb/"}
        mkdir -p "$(dirname "$module")"
        case $file in
            *.xz) xz -dc "$file" >"${module%.xz}" ;;
            *) cp "$file" "$module" ;;
        esac
    done
    cp "$2/deb/$modules"/modules.{builtin,builtin.modinfo,order} "$ram/$modules/"
    depmod -b "$ram" "$version"
    cp /bin/busybox "$ram/bin/"
    ln -s busybox "$ram/bin/sh"
    guest_init >"$ram/init"
    chmod +x "$ram/init"
    (cd "$ram" && find . | cpio -o -H newc --quiet) >"$2/initrd"
    rm -r "$2/deb" "$ram"
}

# guest_init: the first process of a guest. What it runs says its exit code at the end.
guest_init() {
    cat <<'END'
#!/bin/sh
/bin/busybox mkdir -p /sbin /usr/bin /usr/sbin
/bin/busybox --install -s
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in virtio_pci virtio_net virtio_blk 9pnet_virtio 9p fuse loop ext4; do modprobe $module; done
share=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o $share,ro,cache=loose host /host || poweroff -f
for dir in tmp run mnt; do mount -t tmpfs none /host/$dir; done
mount -t 9p -o $share,cache=none work /host/mnt
mount --rbind /dev /host/dev
mount --rbind /proc /host/proc
mount --rbind /sys /host/sys
mkdir -p /dev/pts /dev/shm
mount -t devpts none /dev/pts
mount -t tmpfs none /dev/shm
ifconfig lo 127.0.0.1 up
[ -e /sys/class/net/eth0 ] && ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp
chroot /host /bin/bash /mnt/guest.sh
echo "GUEST_CODE=$?"
sync
poweroff -f
END
}

# guest_command BUILT DIR: in `guest` the command that runs DIR/guest.sh in the guest, where DIR
# is /mnt. It speaks on its console, which is its standard output.
guest_command() {
    guest=(qemu-system-x86_64 -nodefaults -no-user-config -display none -serial stdio -no-reboot
        -accel "tcg,thread=multi" -cpu max -smp 2 -m 1536
        -kernel "$1/kernel" -initrd "$1/initrd"
        -append "console=ttyS0 quiet panic=-1 mitigations=off"
        -fsdev "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"
        -device "virtio-9p-pci,fsdev=host,mount_tag=host"
        -fsdev "local,id=work,path=$2,security_model=none"
        -device "virtio-9p-pci,fsdev=work,mount_tag=work")
}

# guest_boot BUILT DIR: runs DIR/guest.sh in the guest; its exit code.
guest_boot() {
    local code guest
    guest_command "$1" "$2"
    timeout -k 5 "$guest_limit" "${guest[@]}" -nic none </dev/null 2>&1 |
        tr -d '\r' >"$2/console.log"
    code=$(sed -n 's/^GUEST_CODE=//p' "$2/console.log" | tail -n 1)
    return "${code:-99}"
}
