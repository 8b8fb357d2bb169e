# In a guest of script/systemd, as root: a container whose root is this one with a layer of its
# own on top, and whose first process is systemd. It ends when systemd powers off.

top=/tmp/top
mkdir -p "$top"
mount -t tmpfs none "$top"
mkdir "$top"/{upper,work,root}
mount -t overlay -o "lowerdir=/,upperdir=$top/upper,workdir=$top/work" none "$top/root" || exit 1
cd "$top/root" || exit 1
for dir in run tmp var/tmp; do mount -t tmpfs none "$dir"; done
mount -t sysfs none sys
mount -t cgroup2 none sys/fs/cgroup
mount --rbind /dev dev
mount --bind /mnt mnt
mkdir -p old exported data
mount -t tmpfs none exported
rm -f etc/fstab etc/machine-id
# Whatever else this machine runs is not looked at.
for unit in systemd-udevd systemd-udev-trigger systemd-networkd systemd-resolved \
    systemd-timesyncd e2scrub_reap; do
    ln -sf /dev/null "etc/systemd/system/$unit.service"
done
cat >etc/systemd/system/checks.target <<END
[Unit]
Requires=basic.target checks.service
END
cat >etc/systemd/system/checks.service <<END
[Unit]
After=basic.target
[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/bin/bash -c 'bash /mnt/systemd_checks.sh >/mnt/log 2>&1'
ExecStopPost=/bin/systemctl --no-block poweroff
END
export container=checks
unshare --pid --fork --mount bash -c 'mount -t proc none proc &&
    pivot_root . old && exec chroot . /lib/systemd/systemd --unit=checks.target'
[ $? = 130 ] # a container that is powered off has ended by SIGINT
