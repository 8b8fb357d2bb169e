# The steps of script/test but the suites, a function each. To be sourced by bash.

. script/lib/common.sh
set -e
need_rust

# skip_step WHY: ends the step as skipped.
skip_step() { echo "$*"; exit 77; }

component() {
    cargo "$1" --version >/dev/null 2>&1 || rustup component add "$2"
}

step_format() {
    component fmt rustfmt
    cargo fmt --all --check
    # A macro declares these, so cargo does not find them.
    rustfmt --check crates/dray/src/serve/observers/*.rs
}

step_lint() {
    component clippy clippy
    lint_scripts
    lint_test_files
    lint_doc_tests
    python3 script/lib/type_names.py .
    python3 script/lib/words.py .
    python3 script/lib/wildcards.py .
    script/promises --check
    script/prose --check
    cargo clippy --workspace --all-targets --locked -- -D warnings
    lint_shipped
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
}

# lint_shipped: the program as it is shipped. A build of the whole workspace gives it the features
# of the tests. `-p dray` alone does not, by which script/install and script/package build it.
lint_shipped() {
    local features
    cargo clippy -p dray --bin dray --locked -- -D warnings
    features=$(cargo tree --locked -p dray -e normal,build,features --prefix none)
    if grep 'feature "sabotage"' <<<"$features"; then
        echo "the shipped program has a feature that is for tests only"
        return 1
    fi
}

lint_scripts() {
    need shellcheck || { echo "shellcheck is missing: scripts are not looked at"; return; }
    # Git is not asked: it need not be there, and does not speak to everybody who runs this.
    find script -type f \( -name '*.sh' -o ! -name '*.*' \) -print0 | xargs -0 shellcheck
    shellcheck packaging/debian/*
}

# lint_test_files: who adds a test file beside a main.rs and does not name it there would have a test
# that nobody compiles.
lint_test_files() {
    local main module lost=
    for main in {crates/*,benches}/tests/*/main.rs; do
        [ -e "$main" ] || continue
        while read -r module; do
            grep -qx "mod $module;" "$main" || { echo "$main lacks \`mod $module;\`"; lost=yes; }
        done < <(cd "$(dirname "$main")" && find . -maxdepth 2 \
            \( -path './*/mod.rs' -o ! -path './*/*' -name '*.rs' ! -name main.rs \) -printf '%P\n' |
            sed 's,/mod\.rs$,,; s,\.rs$,,')
    done
    [ -z "$lost" ]
}

# lint_doc_tests: there are none, since each crate's would be linked by itself. Nobody would run one.
lint_doc_tests() {
    local found manifest
    found=$(find crates benches/src fuzz/src -name '*.rs' -exec awk '
        FNR == 1 { within = 0 }
        !/^ *\/\/[\/!] *```/ { next }
        (within = !within) && !/```(text|toml|console|ignore)/ { print FILENAME ":" FNR }' {} +)
    for manifest in {crates/*,benches}/Cargo.toml; do
        [ ! -e "${manifest%Cargo.toml}src/lib.rs" ] || grep -q '^doctest = false' "$manifest" ||
            found+=" $manifest lacks \`doctest = false\`"
    done
    [ -z "$found" ] || { printf '%s\n' "doc tests, which nobody runs:" "$found"; return 1; }
}

step_deny() { script/deny; }

# with_rings: tests use FUSE over io_uring where it is switched on. script/test puts the switch
# back.
with_rings() {
    local switch=/sys/module/fuse/parameters/enable_uring
    [ "$(id -u)" = 0 ] || return 0
    [ -e "$switch" ] || modprobe -q fuse 2>/dev/null || true
    [ ! -w "$switch" ] || echo Y >"$switch" || true
}

# The test programs that compute most: they run optimised, in the step `simulator`.
simulations=(sabotage simulator stacks model_checks)

# need_for_tests: what tests use besides dray.
need_for_tests() {
    need e2fsprogs acl attr fuse3 iproute2 python3 make binutils ||
        echo "e2fsprogs, acl, attr, fuse3, iproute2, python3, make or binutils are missing: tests may fail"
    need xfsprogs btrfs-progs || echo "tests on xfs and btrfs are left out"
    need bindfs || echo "a test on bindfs is left out"
    need etcd-server || echo "tests of failover are left out"
}

# Unit and integration tests. Tests that need a mounted dray are the step `mounts`.
step_unit() {
    need_for_tests
    with_rings
    # What computes is the step `simulator`.
    run_test_programs "$(IFS=,; echo "${simulations[*]}")" "${unoptimised[@]}"
}

# A test program that hangs is ended, and named, while the others still run.
test_program_limit=600

# run_test_programs WITHOUT COMMAND ARGUMENT...: those that cargo makes with this command and these
# arguments, but for those named in WITHOUT. Three at a time for each CPU: most of them wait for three
# quarters of their time.
run_test_programs() {
    local without=$1 made
    shift
    need python3 || echo "python3 is missing: it runs the test programs"
    made=$(cargo "$@" --locked --message-format=json-render-diagnostics) || return
    python3 script/lib/test_programs.py "$((3 * $(nproc)))" "$without" \
        "$root/script/lib/limited.sh" "$test_program_limit" <<<"$made"
}

# The binary that the suites mount and the simulations, which have most crates in common, and so are
# made by one command: with other features those would be compiled again. This binary has the feature
# `sabotage` of the simulations, and nothing that makes use of it. It is for tests only.
optimised=(build --profile ci -p dray -p dray-testkit --bin dray --example conformance "${simulations[@]/#/--test=}")

# All other tests. Optimised they would take four times as long to compile, and they mostly wait. The profile is
# the same, so that they share the crates of others, a tenth of what a clean run compiles.
unoptimised=(test --profile ci --config 'profile.ci.opt-level=0' --workspace --no-run)

make_tests() { cargo "${unoptimised[@]}" --locked; }

# What later steps run. Compiled once, then kept in target/. `cargo` leaves the program that it has made last
# under its name: this is the optimised one, and tests have the other.
step_build() {
    cargo "${optimised[@]}" --locked
    [ -n "${given_binary:-}" ] || install -D "$target/ci/dray" "$DRAY"
    install_tool pjdfstest 0.2.2
    install_tool fsx 0.3.2
}

# install_tool NAME VERSION: a program from crates.io. Little optimised: its speed does not
# matter, that of its compilation does.
install_tool() {
    local tools=$target/tools
    [ -x "$tools/bin/$1" ] && "$tools/bin/$1" --version | grep -q "$2" && return
    need libacl1-dev || true
    CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
        CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_DEBUG=0 \
        cargo install "$1" --version "$2" --locked --quiet --root "$tools" \
        --target-dir "$tools/target"
}

# The machine that the suite `outage` kills. It takes a kernel of Debian's and an emulator: a
# mirror that is slow or away must not fail the rest.
guest_made_within=200
step_guest() {
    . script/lib/guest.sh
    local at=$target/guests/$guest_series
    [ -e "$at/initrd" ] && return
    timeout -k 10 "$guest_made_within" bash -c '. script/lib/common.sh; . script/lib/guest.sh
        guest_tools && guest_build "$@"' guest "$guest_series" "$at" ||
        skip_step "no emulator, or no kernel $guest_series of Debian, within $guest_made_within s"
}

# The simulator's smoke, a server that breaks its promises, and stacks that are compared with the model.
step_simulator() {
    need_for_tests
    run_test_programs "" "${optimised[@]}"
}

# Generated sequences through real mounts, on both transports.
step_mounts() {
    need e2fsprogs || echo "e2fsprogs are missing: tests may fail"
    with_rings
    # Mounts wait for servers and for leases, and use a third of two CPUs.
    DRAY_BINARY=$DRAY RUST_TEST_THREADS=$((3 * $(nproc))) run_test_programs "" "${unoptimised[@]}" --test mounts
}

step_fuzz() { script/fuzz --smoke; }
