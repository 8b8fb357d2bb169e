#!/bin/bash
# The suites that CI runs on the classic transport alone, over rings: transports.sh
# takes: 4 min
# On both CI runs generated sequences, fsx, and what dies in the middle of calls.
cd "$(dirname "$0")/../.." || exit 1
mapfile -t suites < <(grep -l '^# transports: classic$' script/suites/*.sh)
code=0
for suite in "${suites[@]}"; do "$suite" uring || code=1; done
exit "$code"
