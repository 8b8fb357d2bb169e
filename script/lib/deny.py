"""The rules of deny.toml over `cargo metadata`, which comes on standard input.

deny.py RULES MANIFEST; exits 1 after naming everything that breaks a rule.
"""

import collections
import json
import re
import sys
import tomllib

REGISTRY = "registry+https://github.com/rust-lang/crates.io-index"


def allowed(expression, licences):
    """Whether an SPDX expression can be met with `licences` alone."""
    # Crates of old write a slash for OR.
    words = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))

    def either():
        good = both()
        while words and words[0] == "OR":
            words.pop(0)
            good = both() or good
        return good

    def both():
        good = one()
        while words and words[0] == "AND":
            words.pop(0)
            good = one() and good
        return good

    def one():
        word = words.pop(0)
        if word == "(":
            good = either()
            words.pop(0)
            return good
        if words and words[0] == "WITH":
            word = f"{word} WITH {words[1]}"
            del words[:2]
        return word in licences

    return either() and not words


def complaints(rules, packages):
    licences = set(rules["licenses"]["allow"])
    exceptions = {entry["crate"]: set(entry["allow"]) for entry in rules["licenses"]["exceptions"]}
    banned = {entry["crate"] for entry in rules["bans"]["deny"]}
    for package in packages:
        name = f"{package['name']} {package['version']}"
        expression = package["license"]
        if not expression:
            yield f"{name}: no licence is named"
        elif not allowed(expression, licences | exceptions.get(package["name"], set())):
            yield f"{name}: licence `{expression}`"
        if package["name"] in banned:
            yield f"{name}: banned"
        if package["source"] not in (None, REGISTRY):
            yield f"{name}: comes from {package['source']}"
        if package["source"] is None:
            for wanted in package["dependencies"]:
                if wanted["req"] == "*" and not wanted.get("path"):
                    yield f"{name}: any version of {wanted['name']} would do"


def main():
    with open(sys.argv[1], "rb") as file:
        rules = tomllib.load(file)
    packages = json.load(sys.stdin)["packages"]
    found = list(complaints(rules, packages))
    versions = collections.Counter(package["name"] for package in packages)
    for name, count in sorted(versions.items()):
        if count > 1:
            print(f"warning: {count} versions of {name}")
    for complaint in found:
        print(f"error: {complaint}")
    print(f"{sys.argv[2]}: {len(packages)} packages, {len(found)} complaints")
    return 1 if found else 0


# The reader of expressions must be right before its answers mean anything.
assert allowed("MIT OR GPL-3.0", {"MIT"}) and not allowed("MIT AND GPL-3.0", {"MIT"})
assert allowed("(MIT OR GPL-3.0) AND Zlib", {"MIT", "Zlib"})
assert not allowed("Apache-2.0 WITH LLVM-exception", {"Apache-2.0"})
assert allowed("MIT/Apache-2.0", {"Apache-2.0"})

sys.exit(main())
