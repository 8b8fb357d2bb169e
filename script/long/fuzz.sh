#!/bin/bash
# The inputs of CI's fuzzing, and three times as many after them: fuzz.sh
# takes: 4 min
exec "$(dirname "$0")/../fuzz" --long
