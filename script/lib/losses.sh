# What suites ask after a loss of power of the server's machine. To be sourced by bash, after
# mounts.sh; files under test are open as descriptor 7.

# unsynced_count NAME KEY: a number of the mount's status on what may not be on media.
unsynced_count() {
    "$DRAY" status "$scratch/$1" --json |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["unsynced"][sys.argv[1]])' "$2"
}

# sync_7: fsync(2) of the open file.
sync_7() { LC_ALL=C dd if=/dev/null conv=fsync >&7; }

# sync_7_tells_once: the first sync behind a loss fails, the next one does not.
sync_7_tells_once() {
    local said
    said=$(sync_7 2>&1) && return 1
    echo "$said"
    [[ $said == *"Input/output error"* ]]
    sync_7
}
