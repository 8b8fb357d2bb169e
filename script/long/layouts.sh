#!/bin/bash
# Servers' own disks: pjdfstest with the layout that the suite leaves out on each transport, and more of fsx.
# layouts.sh
# takes: 5 min
suites=$(dirname "$0")/../suites
code=0
PJDFSTEST_LAYOUT=stripe "$suites/pjdfstest.sh" classic || code=1
PJDFSTEST_LAYOUT='file' "$suites/pjdfstest.sh" uring || code=1
# Of other seeds than CI has.
for seed in 2 3; do
    FSX_SEED=$seed FSX_OWN_DISKS=20000 "$suites/fsx.sh" classic || code=1
done
exit "$code"
