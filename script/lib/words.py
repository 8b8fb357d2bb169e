"""Private words that have a standard one: none of them comes back.

words.py ROOT; exits 1 after naming each such word in documents, comments, messages and identifiers of
Rust sources, and scripts, with the word to use. docs/GLOSSARY.md explains the standard words. A reader who
meets a private word would have to find out what it means.
"""

import pathlib
import re
import sys

# A word, as it stands alone or as a part of an identifier, and what to write in its place.
BANNED = {
    "attendance": "nothing: it is gone",
    "custodian": "held for recovery",
    "custody": "held for recovery",
    "gather": "coalesce; reclaim",
    "gathering": "coalescing; payload reclaim",
    "guest": "client, peer or handshake",
    "guests": "clients, peers or handshakes",
    "halves": "parts of a split read",
    "keepsake": "persistent record",
    "keepsakes": "persistent records",
    "life": "server epoch, daemon instance or connection epoch",
    "lookers": "lookup holders",
    "lookout": "nothing: it is gone",
    "outdated": "what others have changed; invalidator",
    "returning": "reconnecting; held for recovery",
    "seldom": "rarely; log throttle",
    "stranger": "another client, another user or an unauthenticated peer",
    "strangers": "other clients, other users or unauthenticated peers",
    "tender": "sync scheduler",
    "tidy": "export monitor",
    "told": "notified, reported or acknowledged",
    "whoever": "the caller, a client whose session ended, or who else is meant",
    "whomever": "the one who is meant",
}
PHRASES = {
    "sent back": "answered with ESTALE",
    "claimed again": "reclaimed, as NFS says",
    "claim again": "reclaim, as NFS says",
}
# Names of types. The words themselves are English.
TYPES = {
    "Claims": "RangeTable",
    "Crowd": "AddressCounts",
    "Door": "ConnectionLimits",
    "Life": "ServerEpoch or ConnectionEpoch",
    "Resident": "Established",
    "Returning": "RecoveryWindow",
    "Standing": "SessionState",
    "Turn": "RangeGrant, DirectoryLock or Tick",
    "Visit": "Admitted",
}

# Where a word is the ordinary or the kernel's word: the file's path, and what the line has to match.
EXCEPTIONS = [
    # What was removed has its name in the record of its removal.
    (r"docs/adr/(README|0016-.*)\.md", r"attendance|lookout"),
    # Virtual machines.
    (r"(script|packaging)/.*|docs/.*|(CONTRIBUTING|CHANGELOG)\.md", r"(?i)guest"),
    # The processes before and after an upgrade share these two names, so they stay.
    (r"crates/(fuse|dray)/.*", r"system\.dray\.gather|gather-entries"),
    # English.
    (r"docs/OPERATIONS\.md", r"site's life"),
]

PATHS = [
    "crates/**/*.rs", "crates/*/Cargo.toml", "benches/**/*.rs", "fuzz/fuzz_targets/*.rs", "*.md", "docs/*.md",
    "docs/adr/*.md", "packaging/**/*.md", "script/*", "script/**/*.sh",
]

TYPE = re.compile(r"\b(?:struct|enum|union|trait|type) (\w+)")
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def sources(root):
    for pattern in PATHS:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and "target" not in path.parts:
                yield path, path.relative_to(root).as_posix()


def excepted(name, line):
    return any(re.fullmatch(path, name) and re.search(what, line) for path, what in EXCEPTIONS)


def private_words(line):
    """Each private word of a line, once. Parts of identifiers count as words."""
    words = {word.lower() for word in WORD.findall(line)}
    yield from ((word, BANNED[word]) for word in sorted(words & BANNED.keys()))
    types = set(TYPE.findall(line))
    yield from ((name, TYPES[name]) for name in sorted(types & TYPES.keys()))
    plain = re.sub(r"[_\s]+", " ", line.lower())
    yield from ((phrase, use) for phrase, use in PHRASES.items() if phrase in plain)


def main():
    root, found = pathlib.Path(sys.argv[1]), False
    for path, name in sources(root):
        for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for word, use in private_words(line):
                if not excepted(name, line):
                    found = True
                    print(f'{name}:{at}: "{word}" is a private word; use: {use}')
    return int(found)


sys.exit(main())
