# git in one repository through two mounts. To be sourced by bash, after mounts.sh.

# git_at_home: an author, and no configuration of this machine. After `begin`.
git_at_home() {
    export GIT_AUTHOR_NAME=test GIT_AUTHOR_EMAIL=test@localhost
    export GIT_COMMITTER_NAME=test GIT_COMMITTER_EMAIL=test@localhost
    export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null HOME=$scratch/home
    mkdir -p "$HOME"
}

# git_takes_turns ONE OTHER: commits that take turns between the mounts: each must see all of the
# other's.
git_takes_turns() {
    local number side
    git init -q -b main "$scratch/$1/turns"
    for number in $(seq 12); do
        side=$1
        [ $((number % 2)) = 0 ] && side=$2
        echo "$number" >"$scratch/$side/turns/file$number"
        git -C "$scratch/$side/turns" add .
        git -C "$scratch/$side/turns" commit -q -m "number $number"
    done
    [ "$(git -C "$scratch/$1/turns" rev-list --count HEAD)" = 12 ]
    git -C "$scratch/$2/turns" gc -q
    git -C "$scratch/$1/turns" fsck --full --strict
    [ -z "$(git -C "$scratch/$1/turns" status --porcelain)" ]
}

# commit_all SIDE: a file after the other. git's lock files keep the sides apart, and a process that
# finds one tries again.
commit_all() {
    local at=$scratch/$1/at-once number name try
    for number in $(seq 8); do
        name=$1-$number
        echo "$name" >"$at/$name"
        for try in $(seq 400); do
            # The other side's commit may have taken it along.
            git -C "$at" cat-file -e "HEAD:$name" 2>/dev/null && break
            { git -C "$at" add "$name" && git -C "$at" commit -q -m "$name" -- "$name"; } \
                >/dev/null 2>&1 || sleep 0.05
        done
        git -C "$at" cat-file -e "HEAD:$name"
    done
}

# git_at_once ONE OTHER: commits from both mounts at once.
git_at_once() {
    git init -q -b main "$scratch/$1/at-once"
    git -C "$scratch/$1/at-once" commit -q --allow-empty -m first
    commit_all "$1" &
    local other=$!
    commit_all "$2"
    wait "$other"
    [ "$(git -C "$scratch/$1/at-once" ls-tree --name-only HEAD | wc -l)" = 16 ]
    [ -z "$(git -C "$scratch/$2/at-once" status --porcelain)" ]
    git -C "$scratch/$2/at-once" fsck --full --strict
}

# push_all SIDE: commits in a clone of its own, each pushed into the repository of both.
push_all() {
    local at=$scratch/$1/clone-of-$1 number
    git clone -q "$scratch/$1/bare.git" "$at"
    for number in $(seq 8); do
        echo "$number" >"$at/$1"
        git -C "$at" add "$1"
        git -C "$at" commit -q -m "$1 $number"
        until git -C "$at" push -q origin main 2>/dev/null; do
            git -C "$at" pull -q --rebase origin main
        done
    done
}

# git_pushes ONE OTHER: both push at once.
git_pushes() {
    local side pusher
    git init -q -b main --bare "$scratch/$1/bare.git"
    git clone -q "$scratch/$1/bare.git" "$scratch/seed" 2>/dev/null
    git -C "$scratch/seed" commit -q --allow-empty -m first
    git -C "$scratch/seed" push -q origin main
    push_all "$1" &
    pusher=$!
    push_all "$2"
    wait "$pusher"
    for side in "$@"; do
        [ "$(git -C "$scratch/$side/bare.git" rev-list --count main)" = 17 ]
        git -C "$scratch/$side/bare.git" fsck --full --strict
    done
}
