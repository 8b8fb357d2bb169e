#!/bin/bash
# The POSIX conformance suite pjdfstest: whatever the bare file system passes, the mount
# passes, test by test. pjdfstest.sh [classic|uring]; $TOOLS/pjdfstest is the program.
# transports: classic
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
transport=${1:-classic}
begin pjdfstest
store 600
# Not in suites that kill servers: where an export has leases, changes wait for a term after that.
export_options=,leases
serve
mount_at mnt leases=no
# Its other users run the program and name files below the scratch directory.
cp "${TOOLS:-$target/tools/bin}/pjdfstest" "$scratch/pjdfstest"
chmod 755 "$scratch/pjdfstest"
cat >"$scratch/pjdfstest.toml" <<'END'
[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.05
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
END

# run DIR OUT: one run; "NAME STATE" lines, sorted.
run() {
    (cd "$scratch" && timeout 150 ./pjdfstest -c pjdfstest.toml -p "$1") >"$2.full" 2>&1 || true
    awk '$2 == "ok" || $2 == "FAILED" || $2 == "failed" || $2 == "skipped" { print $1, $2 }' \
        "$2.full" | sort >"$2"
    [ "$(wc -l <"$2")" -gt 300 ] || { tail "$2.full"; return 1; }
}

# What passes on the bare file system and does not on the mount. The limit on links is asked
# of pathconf(3), which knows the bare file system by its type and can ask no FUSE: left out.
whatever_the_bare_one_passes() {
    [ -e "$scratch/bare" ] || run "$scratch/store/bare" "$scratch/bare"
    run "$scratch/$1" "$scratch/dray"
    local name worse
    worse=$(comm -23 <(awk '$2 == "ok" { print $1 }' "$scratch/bare") \
        <(awk '$2 == "ok" { print $1 }' "$scratch/dray") | grep -v '^link::link_count_max$') || true
    grep "^Summary" "$scratch/bare.full" "$scratch/dray.full"
    for name in $worse; do grep -A 6 "^$name " "$scratch/dray.full"; done
    [ -z "$worse" ]
}
check conformance whatever_the_bare_one_passes mnt
unmount_at mnt
# On one transport: what believes leases does not see which one it is.
if [ "$transport" = classic ]; then
    mount_at leased leases=yes
    check leases whatever_the_bare_one_passes leased
    unmount_at leased
fi
# One layout for each transport: what places files on servers does not see how the kernel asks for them.
case $transport in
    classic) define_cluster "$scratch/store/export" cluster ;;
    *) define_cluster "$scratch/store/export" cluster-stripe 4K ;;
esac
for number in 1 2 3; do serve_cluster "$number"; done
mount_cluster cluster
check cluster whatever_the_bare_one_passes cluster
unmount_at cluster
for number in 1 2 3; do stop_cluster "$number"; done
# script/long/layouts.sh has the other one.
layout=$([ "$transport" = classic ] && echo file || echo stripe)
layout=${PJDFSTEST_LAYOUT:-$layout}
define_own_disks "$layout" "$scratch/store/$layout"
for number in 1 2 3; do serve_cluster "$number"; done
mount_cluster "$layout"
check "$layout" whatever_the_bare_one_passes "$layout"
unmount_at "$layout"
finish
