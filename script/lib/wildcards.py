"""No `match` on operations has a wildcard arm, so that the compiler names each place that a new operation concerns.

wildcards.py ROOT; exits 1 after naming each such arm. A match on operations is one whose arms name variants of
one of the types below. Numbers on the wire are no variants: a decoder may meet numbers that it does not know.
"""

import pathlib
import re
import sys

VARIANT = re.compile(r"\b(?:Op|Call|AuditCall|Operation|\w+Operation)::[A-Z]")
WILDCARD = re.compile(r"^(\s*)(?:_|[a-z]\w*) (?:if .*)?=>|^(\s*)(?:_|[a-z]\w*) =>")


def arms_before(lines, at, indent):
    """The lines of the arms of the same match that come before line `at`."""
    arms = []
    for line in reversed(lines[:at]):
        if line.strip() and not line.startswith(indent):
            break
        if re.match(indent + r"[^\s})\]]", line):
            arms.append(line.split("=>")[0])
    return arms


def main():
    root, found = pathlib.Path(sys.argv[1]), 0
    for source in sorted(root.glob("crates/*/src/**/*.rs")):
        lines = source.read_text(encoding="utf-8").split("#[cfg(test)]\nmod tests")[0].splitlines()
        for at, line in enumerate(lines):
            wildcard = WILDCARD.match(line)
            if not wildcard:
                continue
            arms = arms_before(lines, at, wildcard[1] or wildcard[2] or "")
            if any(VARIANT.search(arm) for arm in arms):
                found += 1
                print(f"{source.relative_to(root)}:{at + 1}: a match on operations with a wildcard arm")
    return int(found > 0)


sys.exit(main())
