# What every script here shares: where things are, what the machine needs, how to say what
# happened. To be sourced by bash.

set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# The script that runs, wherever it was called from and goes to.
script=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
# Where cargo puts what it makes, whatever its configuration files say.
target=$(realpath -m "${CARGO_TARGET_DIR:-$root/target}")
export CARGO_TARGET_DIR=$target CARGO_TERM_PROGRESS_WHEN=never

# say TEXT: a line for people.
say() { printf '%s\n' "$*" >&2; }

# die TEXT: the script cannot go on.
die() { say "$(basename "$0"): $*"; exit 1; }

# help_if_asked ARGUMENT...: the first lines of the script, if an argument asks for them.
help_if_asked() {
    local argument
    for argument in "$@"; do
        case $argument in
            -h | --help) sed -n '2,/^$/{/^$/d;s/^# \{0,1\}//;p}' "$script"; exit 0 ;;
        esac
    done
}

# as_root COMMAND...: as it is for root, through sudo for others who may without a password.
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# may_root: whether as_root works.
may_root() { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }

# Lists of packages are fetched once at most, and only if something is missing. Steps that run at
# the same time take turns.
lists_are_fresh=
packages_lock=/var/cache/apt
# How often it is tried, every 5 s, while another program has apt's locks: a fresh machine looks for
# upgrades by itself.
lock_tries=60

# apt_get ARGUMENT...: what it says is in `said`. Run level 1 keeps services (postgres) from being
# started by their installation.
apt_get() {
    local try
    for try in $(seq "$lock_tries"); do
        said=$(as_root flock "$packages_lock" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
            LC_ALL=C apt-get -qq "$@" 2>&1) && return 0
        grep -q 'Could not get lock' <<<"$said" || return 1
        [ "$try" != 1 ] || say "waiting for another apt: $(grep -m 1 -o 'held by.*' <<<"$said")"
        sleep 5
    done
    return 1
}

# need PACKAGE...: installs the Debian packages that are missing, quietly. False if that
# cannot be done here; the caller then says what it leaves out.
need() {
    local package missing=() said
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
            missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] && return 0
    may_root && command -v apt-get >/dev/null || return 1
    say "installing ${missing[*]}"
    [ -n "$lists_are_fresh" ] || apt_get update || true
    lists_are_fresh=yes
    apt_get install -y --no-install-recommends "${missing[@]}" && return 0
    say "apt-get cannot install ${missing[*]}:"
    grep -E '^(E|dpkg):' <<<"$said" | tail -n 3 >&2
    return 1
}

# find_cargo: cargo is on the path, also in a fresh login of a machine set up by rustup, and behind
# sudo, which leaves the path of who called it out.
find_cargo() {
    local home
    command -v cargo >/dev/null && return 0
    for home in "${HOME:-/root}" "$(getent passwd "${SUDO_USER:-root}" | cut -d: -f6)"; do
        [ -x "$home/.cargo/bin/cargo" ] || continue
        export PATH="$home/.cargo/bin:$PATH"
        [ ! -d "$home/.rustup" ] || export RUSTUP_HOME="${RUSTUP_HOME:-$home/.rustup}"
        return 0
    done
    return 1
}

# need_rust: there is a Rust toolchain that is new enough, and what it needs: a linker, certificates to
# fetch crates by, and protoc with its own definitions, which the client of etcd is made with.
need_rust() {
    local wanted version
    find_cargo || die "a Rust toolchain is needed (https://rustup.rs)"
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
    version=$(cargo --version | cut -d ' ' -f 2)
    printf '%s\n' "$wanted" "$version" | sort -CV ||
        die "Rust $wanted or newer is needed, and $(command -v cargo) is ${version:-broken}" \
            "(rustup update, or https://rustup.rs)"
    need gcc libc6-dev || command -v cc >/dev/null || die "a C linker is needed (package gcc)"
    need ca-certificates || true
    need protobuf-compiler libprotobuf-dev || command -v protoc >/dev/null ||
        die "protoc is needed (packages protobuf-compiler and libprotobuf-dev)"
}

# seconds_since START: whole seconds, START being a value of $SECONDS.
seconds_since() { echo $((SECONDS - $1)); }
