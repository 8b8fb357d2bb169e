# What every script here shares: where things are, what the machine needs, how to say what
# happened. To be sourced by bash.

set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export CARGO_TERM_PROGRESS_WHEN=never

# say TEXT: a line for people.
say() { printf '%s\n' "$*" >&2; }

# die TEXT: the script cannot go on.
die() { say "$(basename "$0"): $*"; exit 1; }

# as_root COMMAND...: as it is for root, through sudo for others who may without a password.
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# may_root: whether as_root works.
may_root() { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }

# Lists of packages are fetched once at most, and only if something is missing.
lists_are_fresh=

# need PACKAGE...: installs the Debian packages that are missing, quietly. False if that
# cannot be done here; the caller then says what it leaves out.
need() {
    local package missing=()
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
            missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] && return 0
    may_root && command -v apt-get >/dev/null || return 1
    if [ -z "$lists_are_fresh" ]; then
        as_root apt-get update -qq >/dev/null 2>&1
        lists_are_fresh=yes
    fi
    say "installing ${missing[*]}"
    # Run level 1 keeps services (postgres) from being started by their installation.
    as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1
}

# need_rust: cargo is on the path, also in a fresh login of a machine set up by rustup.
need_rust() {
    command -v cargo >/dev/null || export PATH="$HOME/.cargo/bin:$PATH"
    command -v cargo >/dev/null || die "a Rust toolchain is needed (https://rustup.rs)"
    need gcc libc6-dev || command -v cc >/dev/null || die "a C linker is needed (package gcc)"
}

# seconds_since START: whole seconds, START being a value of $SECONDS.
seconds_since() { echo $((SECONDS - $1)); }
