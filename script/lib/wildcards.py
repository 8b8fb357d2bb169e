"""No `match` on operations has a wildcard arm, so that the compiler names each place that a new operation concerns.

wildcards.py ROOT; exits 1 after naming each such arm, and each `matches!` on operations, which silently takes a
new one for one of the others. A match on operations is one whose arms name variants of one of the types below,
by the type's name or, after `use Op::*`, without. Numbers on the wire are no variants: a decoder may meet numbers that
it does not know. Tests are left out.
"""

import pathlib
import re
import sys

TYPES = r"\b(?:Op|Call|AuditCall|Operation|\w+Operation)"
VARIANT = re.compile(TYPES + r"::[A-Z]")
# After this, variants have no type in front of them.
BARE = re.compile(r"\buse (?:\w+::)*?" + TYPES.removeprefix(r"\b") + r"::[*{A-Z]")
WILDCARD = re.compile(r"^(\s*)(?:_|[a-z]\w*) (?:if .*)?=>|^(\s*)(?:_|[a-z]\w*) =>")


def operations(root):
    """The names of all operations, which those of the other types are, too, or which they resemble."""
    source = (root / "crates/core/src/op.rs").read_text(encoding="utf-8")
    names = re.findall(r'^    ([A-Z]\w*) "\w+" (?:true|false),$', source, re.MULTILINE)
    requests = (root / "crates/fuse/src/proto/request.rs").read_text(encoding="utf-8")
    for body in re.findall(r"^pub enum \w*Operation\b.*?\{\n(.*?)^\}", requests, re.MULTILINE | re.DOTALL):
        names += re.findall(r"^    ([A-Z]\w*)", body, re.MULTILINE)
    assert "Lookup" in names and "Fallocate" in names, "the operations are not where they were"
    return sorted(set(names))


def arms_before(lines, at, indent):
    """The lines of the arms of the same match that come before line `at`."""
    arms = []
    for line in reversed(lines[:at]):
        if line.strip() and not line.startswith(indent):
            break
        if re.match(indent + r"[^\s})\]]", line):
            arms.append(line.split("=>")[0])
    return arms


def wildcard_arms(text, variant):
    """The numbers of the lines with wildcard arms."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        wildcard = WILDCARD.match(line)
        if wildcard and any(map(variant.search, arms_before(lines, at, wildcard[1] or wildcard[2] or ""))):
            yield at + 1


def silent_matches(text, variant):
    """The numbers of the lines where a `matches!` on operations begins."""
    for macro in re.finditer(r"\bmatches!\(", text):
        depth, end = 1, macro.end()
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        if variant.search(text, macro.end(), end):
            yield text.count("\n", 0, macro.start()) + 1


def main():
    root, found = pathlib.Path(sys.argv[1]), 0
    bare = re.compile(VARIANT.pattern + r"|(?:^|[|(,])\s*(?:" + "|".join(operations(root)) + r")\b(?!::)")
    for source in sorted(root.glob("crates/*/src/**/*.rs")):
        if source.stem == "tests" or "tests" in source.parts:
            continue
        text = source.read_text(encoding="utf-8").split("#[cfg(test)]\nmod tests {")[0]
        variant = bare if BARE.search(text) else VARIANT
        for what, numbers in (("match on operations with a wildcard arm", wildcard_arms(text, variant)),
                              ("`matches!` on operations", silent_matches(text, variant))):
            for number in numbers:
                found += 1
                print(f"{source.relative_to(root)}:{number}: a {what}")
    return int(found > 0)


sys.exit(main())
