#!/bin/bash
# pjdfstest on servers' own disks, with the layout that the suite leaves out on each transport: layouts.sh
# takes: 3 min
suite=$(dirname "$0")/../suites/pjdfstest.sh
PJDFSTEST_LAYOUT=stripe "$suite" classic
code=$?
PJDFSTEST_LAYOUT='file' "$suite" uring && [ "$code" = 0 ]
