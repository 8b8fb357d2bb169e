# Guests: other kernels than this machine's, under emulation. To be sourced by bash, after
# common.sh. A guest sees this machine's root read-only, has its own /tmp, /run and /dev, and
# no network but loopback unless it is given one.

# The longest that a guest may take, seconds: emulation is slow.
guest_limit=${DRAY_GUEST_LIMIT:-900}

# The kernel of guests where any will do.
guest_series=6.12

# guest_tools: installs what making and running guests takes.
guest_tools() { need qemu-system-x86 busybox-static cpio kmod xz-utils zstd; }

# kernel_packages SERIES DIR: downloads Debian's newest kernel of a series, such as 6.1, and what
# it is split into, to DIR. `apt` are options for apt. False if there is none.
kernel_packages() {
    local package parts
    package=$(apt-cache "${apt[@]}" search --names-only \
        "^linux-image-${1//./\\.}\\.[0-9].*-amd64\$" |
        awk '$1 !~ /cloud|rt-amd64|unsigned/ { print $1 }' | sort -V | tail -n 1)
    [ -n "$package" ] || return 1
    # From 7.0 on the kernel and its modules are packages of their own.
    parts=$(apt-cache "${apt[@]}" depends "$package" |
        awk '$1 ~ /Depends:/ && $2 ~ /^linux-(binary|modules)-/ { print $2 }')
    # shellcheck disable=SC2086 # none, or two
    (cd "$2" && apt-get "${apt[@]}" -qq download "$package" $parts 2>/dev/null)
}

# elsewhere DIR: in `apt` the options by which apt looks at Debian's other releases at the same
# mirror, with lists of its own in DIR.
elsewhere() {
    local mirror release
    # shellcheck disable=SC2016 # apt-get replaces it
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' \
        'Origin: Debian' | grep -v security | head -n 1)
    [ -n "$mirror" ] || return 1
    mkdir -p "$1"/lists/partial "$1"/cache/archives/partial
    for release in bullseye bookworm bookworm-backports trixie trixie-backports; do
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $release main"
    done >"$1/sources.list"
    apt=(-o "Dir::Etc::SourceList=$1/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$1/lists" -o "Dir::Cache=$1/cache" -o APT::Sandbox::User=root
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false)
    # A release that has moved to the archive is a failure of this, and the others are there.
    apt-get "${apt[@]}" -qq update 2>/dev/null || true
}

# guest_packages SERIES DIR: the packages of a kernel series, or those that were put into the
# directory SERIES, in DIR.
guest_packages() {
    local apt=()
    if [ -d "$1" ]; then cp "$1"/*.deb "$2"; return; fi
    kernel_packages "$1" "$2" || { elsewhere "$2/apt" && kernel_packages "$1" "$2"; }
}

# guest_build SERIES DIR: DIR/kernel and DIR/initrd of Debian's kernel of that series, or of the
# packages in the directory SERIES. Only unpacked, not installed.
guest_build() {
    local package version root=$2/deb ram=$2/ram module
    rm -rf "$2"
    mkdir -p "$root/packages" "$ram"/{bin,dev,proc,sys,host}
    guest_packages "$1" "$root/packages" || { say "no kernel $1 can be had here"; return 1; }
    for package in "$root"/packages/*.deb; do dpkg-deb -x "$package" "$root" || return 1; done
    [ -e "$root/lib" ] || ln -s usr/lib "$root/lib"
    version=$(cd "$root/boot" && echo vmlinuz-*)
    version=${version#vmlinuz-}
    cp "$root/boot/vmlinuz-$version" "$2/kernel" || return 1
    depmod -b "$root" "$version"
    for module in $guest_modules; do
        # Some are built in, or gone, in some kernels.
        modprobe -d "$root" -S "$version" --show-depends "$module" 2>/dev/null || true
    done | sed -n 's/^insmod \(.*\.ko[.a-z]*\).*/\1/p' | sort -u | while read -r module; do
        guest_module "$root" "$module" "$ram" || exit 1
    done || { say "the modules of kernel $1 cannot be unpacked"; return 1; }
    mkdir -p "$ram/lib/modules/$version"
    cp "$root/lib/modules/$version"/modules.{builtin,builtin.modinfo,order} \
        "$ram/lib/modules/$version/"
    depmod -b "$ram" "$version"
    cp /bin/busybox "$ram/bin/"
    ln -s busybox "$ram/bin/sh"
    guest_init >"$ram/init"
    chmod +x "$ram/init"
    (cd "$ram" && find . | cpio -o -H newc --quiet) >"$2/initrd.new"
    mv "$2/initrd.new" "$2/initrd"
    rm -r "$root" "$ram"
}

guest_modules="virtio_pci virtio_net virtio_blk 9pnet_virtio 9p fuse loop ext4 crc32c_generic overlay autofs4"

# guest_module ROOT FILE RAM: a module below ROOT to the same place below RAM, unpacked: busybox
# loads nothing else.
guest_module() {
    local file=$3/${2#"$1/"}
    mkdir -p "$(dirname "$file")"
    case $2 in
        *.xz) xz -dc "$2" >"${file%.xz}" ;;
        *.zst) zstd -dcq "$2" >"${file%.zst}" ;;
        *) cp "$2" "$file" ;;
    esac
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
for module in virtio_pci virtio_net virtio_blk 9pnet_virtio 9p fuse loop ext4 overlay autofs4; do modprobe $module; done 2>/dev/null
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
#
# One thread emulates both CPUs: with a thread each, code that the kernel of the guest changes
# while the other CPU runs it was not always seen changed, and one boot in many ended in an oops
# at a breakpoint that was long gone. It takes no longer.
guest_command() {
    guest=(qemu-system-x86_64 -nodefaults -no-user-config -display none -serial stdio -no-reboot
        -accel "tcg,thread=single" -cpu max -smp 2 -m 1536
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
