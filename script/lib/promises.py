"""The tests behind each promise of docs/SEMANTICS.md, docs/PROJECTIONS.md, docs/AUDIT.md, docs/QOS.md
and docs/LEASES.md.

promises.py [--check] ROOT; writes ROOT/docs/PROMISES.md, or checks that it is what it should be.
Exits 1 after naming everything that is wrong; nothing is written then.
"""

import pathlib
import re
import sys

PAGE = "docs/PROMISES.md"
SOURCES = ("docs/SEMANTICS.md", "docs/PROJECTIONS.md", "docs/AUDIT.md", "docs/QOS.md",
           "docs/LEASES.md")
SUITE = "crates/testkit/src/conformance/suite"

HEAD = """\
# The tests behind each promise

`script/promises` writes this page from comments beside the tests; do not edit it. The text of each
promise is in [SEMANTICS](SEMANTICS.md), [PROJECTIONS](PROJECTIONS.md), [AUDIT](AUDIT.md), [QOS](QOS.md) or
[LEASES](LEASES.md). The list names the tests that were written for a promise.

Other tests cover many promises at once:

- The conformance suite (`conformance/suite`) runs on the memory backend, on the simulated disk, and on the
  posix backend over tmpfs, ext4, xfs, btrfs and overlay. It also runs over rpc, with and without broken
  connections (`suite.rs`, `file_systems.rs` and `stacks.rs` in `crates/testkit/tests`).
- Generated sequences of calls run on the same stacks and through real mounts (`model.rs`, `mounts.rs`). A
  reference model checks each answer. Up to three clients take part, with interleaved calls.
- Sequences that failed once are kept in `regressions.rs`.
"""


def promises(root, problems):
    """The ids that the pages give, in their order, each with the chapter that it stands in."""
    found, chapter = {}, ""
    for source in SOURCES:
        for line in (root / source).read_text(encoding="utf-8").splitlines():
            if line.startswith("##"):
                chapter = line.lstrip("# ")
            for name in re.findall(r"\*\*([PD]\d+)\*\*", line):
                if name in found:
                    problems.append(f"{source} has {name} a second time")
                found[name] = chapter
    return found


def tested_function(lines, at):
    """The function that the comment at `lines[at]` is beside, and whether it is marked as a test.

    Only attributes and comments may stand in between. None if there is no function.
    """
    marked = False
    for line in lines[at + 1:]:
        bare = line.strip()
        function = re.match(r"(?:pub(?:\([a-z]+\))? )?(?:async )?fn (\w+)\(", bare)
        if function:
            return function[1], marked
        if not bare.startswith(("#[", "//")):
            return None, marked
        marked = marked or bare == "#[test]"
    return None, marked


def rust_test(root, path, lines, at):
    """The test that the comment at `lines[at]` is beside, or why it is none that runs."""
    name, marked = tested_function(lines, at)
    if name is None:
        return None, "no function stands behind this comment"
    if path.as_posix().startswith(SUITE + "/"):
        # Functions of the conformance suite run where its module calls them.
        called = f"{path.stem}::{name}" in (root / SUITE / "mod.rs").read_text(encoding="utf-8")
    else:
        called = marked
    return (f"{path.as_posix()}::{name}", None) if called else (None, f"{name} is no test that runs")


def comments(root):
    """Every comment that begins with "proves": its file, the file's lines, where it stands, its words.
    The words are None where the comment has another form than `proves: P1, P2`.
    """
    sources = [*root.glob("crates/**/*.rs"), *root.glob("benches/**/*.rs")]
    sources += [*root.glob("script/suites/*.sh"), *root.glob("script/long/*.sh")]
    for source in sorted(sources):
        text = source.read_text(encoding="utf-8")
        if "proves" not in text:
            continue
        lines = text.splitlines()
        for at, line in enumerate(lines):
            if re.match(r"\s*(//|#)\s*proves\b", line):
                form = re.match(r"\s*(?://|#) proves: ([PD]\d+(?:, [PD]\d+)*)$", line)
                yield source.relative_to(root), lines, at, form and form[1]


def proofs(root, known, problems):
    """The tests of each id."""
    found = {}
    for path, lines, at, words in comments(root):
        where = f"{path}:{at + 1}"
        if words is None:
            problems.append(f"{where}: this comment has not the form `proves: P1, P2`")
            continue
        names = words.split(", ")
        test, problem = (path.as_posix(), None)
        if path.suffix == ".rs":
            test, problem = rust_test(root, path, lines, at)
        unknown = [name for name in names if name not in known]
        if unknown:
            problem = f"no page of {', '.join(SOURCES)} has {', '.join(unknown)}"
        if problem:
            problems.append(f"{where}: {problem}")
            continue
        for name in names:
            found.setdefault(name, []).append(test)
    return found


def page(known, tests):
    lines, last = [HEAD.rstrip("\n")], None
    for name, chapter in known.items():
        if chapter != last:
            lines += ["", f"## {chapter}", ""]
            last = chapter
        lines.append(f"- **{name}**")
        lines += [f"  - `{test}`" for test in sorted(tests[name])]
    return "\n".join(lines) + "\n"


def main():
    check, root = "--check" in sys.argv[1:-1], pathlib.Path(sys.argv[-1])
    problems = []
    known = promises(root, problems)
    if not known:
        problems.append("there are no promises: has the form of the pages changed?")
    tests = proofs(root, known, problems)
    problems += [f"{name} has no test" for name in known if name not in tests]
    if not problems:
        wanted, written = page(known, tests), root / PAGE
        if not check:
            written.write_text(wanted, encoding="utf-8")
        elif not written.exists() or written.read_text(encoding="utf-8") != wanted:
            problems.append(f"{PAGE} is out of date: run script/promises")
    for problem in problems:
        print(problem)
    return int(bool(problems))


sys.exit(main())
