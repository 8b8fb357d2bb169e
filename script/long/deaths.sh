#!/bin/bash
# Changes and puts over deaths of the server, more of them than in CI: deaths.sh
# takes: 2 min
. "$(dirname "$0")/../lib/common.sh"
need_rust
cd "$root" || exit 1
DRAY_SEEDS=${DRAY_SEEDS:-60} cargo test --quiet --locked -p dray-rpc --test client_server restart::
