#!/bin/bash
# Programs that people run: git, cargo, tar, rsync. programs.sh [classic|uring]
# transports: classic
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/git_two_mounts.sh"
transport=${1:-classic}
need git rsync tar || say "git or rsync are missing"
need_rust
begin programs
store 700
# One of two mounts under leases.
export_options=,leases
serve
mount_at mnt
mount_at twin leases=no
git_at_home

# tree DIR: some hundred files in directories, with links and modes.
tree() {
    local number
    mkdir -p "$1"
    for number in $(seq 240); do
        mkdir -p "$1/dir$((number % 12))/deep"
        seq "$number" $((number * 7)) >"$1/dir$((number % 12))/deep/file$number"
    done
    ln -s deep/file12 "$1/dir0/link"
    ln "$1/dir0/deep/file12" "$1/dir0/hard"
    chmod 4755 "$1/dir1/deep/file13"
    chmod 000 "$1/dir2/deep/file14"
    truncate -s 5M "$1/sparse"
    printf end >>"$1/sparse"
}

git_works() {
    local at=$scratch/mnt/git number
    git init -q -b main "$at"
    tree "$at/tree"
    chmod 644 "$at/tree/dir2/deep/file14"
    git -C "$at" add .
    git -C "$at" commit -q -m first
    for number in $(seq 6); do
        seq "$number" 4000 >"$at/changing"
        git -C "$at" add changing
        git -C "$at" commit -q -m "change $number"
    done
    git clone -q "$at" "$scratch/mnt/clone"
    git -C "$scratch/mnt/clone" checkout -q -b side HEAD~2
    echo side >"$scratch/mnt/clone/side"
    git -C "$scratch/mnt/clone" add side
    git -C "$scratch/mnt/clone" commit -q -m side
    git -C "$scratch/mnt/clone" merge -q -m merged origin/main
    git -C "$scratch/mnt/clone" gc -q --prune=now
    git -C "$scratch/mnt/clone" fsck --full --strict
    git -C "$at" fsck --full --strict
    [ -z "$(git -C "$scratch/mnt/clone" status --porcelain)" ]
    diff -r "$at/tree" "$scratch/mnt/clone/tree"
}

cargo_builds() {
    local at=$scratch/mnt/crate
    mkdir -p "$at/src" "$at/inner/src"
    printf '[package]\nname = "outer"\nversion = "0.1.0"\nedition = "2021"\n%s\n' \
        '[dependencies]
inner = { path = "inner" }' >"$at/Cargo.toml"
    printf '[package]\nname = "inner"\nversion = "0.1.0"\nedition = "2021"\n' >"$at/inner/Cargo.toml"
    echo 'pub fn word() -> &'"'"'static str { "built" }' >"$at/inner/src/lib.rs"
    printf '%s\n' 'fn main() { println!("{}", inner::word()) }' \
        '#[test] fn it_is_built() { assert_eq!(inner::word(), "built") }' >"$at/src/main.rs"
    cd "$at"
    # The toolchain stays where its owner has it.
    export HOME=$owner_home
    env -u CARGO_TARGET_DIR cargo build --offline --quiet
    [ "$(target/debug/outer)" = built ]
    env -u CARGO_TARGET_DIR cargo test --offline --quiet
    # Nothing changed: nothing may be compiled, or times do not mean what they should.
    env -u CARGO_TARGET_DIR cargo build --offline -v >"$scratch/cargo.log" 2>&1
    grep 'Fresh outer' "$scratch/cargo.log"
    touch src/main.rs
    env -u CARGO_TARGET_DIR cargo build --offline -v >"$scratch/cargo.log" 2>&1
    grep 'Compiling outer' "$scratch/cargo.log"
}
owner_home=$(getent passwd "$(id -u)" | cut -d: -f6)

tar_keeps_everything() {
    tree "$scratch/store/bare/tree"
    tar -C "$scratch/store/bare" -cf "$scratch/tree.tar" tree
    mkdir "$scratch/mnt/untarred"
    tar -C "$scratch/mnt/untarred" -xpf "$scratch/tree.tar"
    tar -C "$scratch/mnt/untarred" --compare -f "$scratch/tree.tar"
    tar -C "$scratch/twin/untarred" --sparse -cf "$scratch/again.tar" tree
    tar -C "$scratch/store/bare" --compare -f "$scratch/again.tar"
}

rsync_keeps_everything() {
    local from=$scratch/store/bare/tree differs
    rsync -aHSX "$from/" "$scratch/mnt/synced/"
    differs=$(rsync -aHXnc --delete --itemize-changes "$from/" "$scratch/twin/synced/")
    echo "$differs"
    [ -z "$differs" ]
    rm -r "$from/dir3"
    echo changed >"$from/dir4/deep/new"
    rsync -aHX --delete "$from/" "$scratch/twin/synced/"
    differs=$(rsync -aHXnc --delete --itemize-changes "$from/" "$scratch/mnt/synced/")
    echo "$differs"
    [ -z "$differs" ]
}
check git git_works
check git-two-mounts git_takes_turns mnt twin
check git-two-mounts-at-once git_at_once mnt twin
check cargo cargo_builds
check tar tar_keeps_everything
check rsync rsync_keeps_everything
check leased is_leased mnt
finish
