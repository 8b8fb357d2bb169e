#!/bin/bash
# What CI runs on one transport alone, on the other, too: transports.sh
# takes: 10 min
# The suites that CI runs on the classic transport, over rings; and tests of the whole program, of which CI runs
# half on each. On both CI runs generated sequences, fsx, and what dies in the middle of calls.
. "$(dirname "$0")/../lib/common.sh"
need_rust
cd "$root" || exit 1
mapfile -t suites < <(grep -l '^# transports: classic$' script/suites/*.sh)
code=0
for suite in "${suites[@]}"; do "$suite" uring || code=1; done
# `script/test` puts the switch back.
rings=/sys/module/fuse/parameters/enable_uring
[ ! -w "$rings" ] || echo Y >"$rings"
DRAY_TRANSPORTS=all cargo test --quiet --locked -p dray --test whole_program -- --test-threads "$(nproc)" ||
    code=1
exit "$code"
