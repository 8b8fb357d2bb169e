"""Type names that stand for two things: no two types that other modules see share a name.

type_names.py ROOT; exits 1 after naming each such name with the places of its types. A reader who meets a
name in a log, a review or a document would else have to find out which of them is meant.
"""

import collections
import pathlib
import re
import sys

# What a module keeps behind its own lock, where the module says whose it is.
PLAIN = {"State", "Inner", "Shared"}

TYPE = re.compile(r"\s*pub(?:\([^)]*\))? (?:unsafe )?(?:struct|enum|union|trait|type) (\w+)")


def main():
    root, places = pathlib.Path(sys.argv[1]), collections.defaultdict(list)
    for source in sorted([*root.glob("crates/*/src/**/*.rs"), *root.glob("benches/src/**/*.rs")]):
        for at, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
            if found := TYPE.match(line):
                places[found[1]].append(f"{source.relative_to(root)}:{at}")
    shared = {name for name, at in places.items() if len(at) > 1} - PLAIN
    for name in sorted(shared):
        print(f"{name} is the name of several types: {', '.join(places[name])}")
    return int(bool(shared))


sys.exit(main())
