"""Type names that stand for two things: no two types that other modules see share a name.

type_names.py ROOT; exits 1 after naming each such name with the places of its types. A reader who meets a
name in a log, a review or a document would else have to find out which of them is meant.
"""

import collections
import pathlib
import re
import sys

# Names that two rooms share for now. A name leaves this list when one of its types has another.
SHARED_FOR_NOW = {
    "Broken", "ChangeNumber", "Input", "Key", "Progress", "Recall", "RecentChanges", "Ring", "Row",
    "Step", "Ticket",
}

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
    for name in sorted(shared - SHARED_FOR_NOW):
        print(f"{name} is the name of several types: {', '.join(places[name])}")
    for name in sorted(SHARED_FOR_NOW - shared):
        print(f"{name} is the name of one type: it leaves the list in script/lib/type_names.py")
    return int(shared != SHARED_FOR_NOW)


sys.exit(main())
