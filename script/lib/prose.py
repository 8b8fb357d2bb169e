"""Long sentences of Markdown documents, and of the comments and messages of Rust sources, and docstrings that
begin with a pronoun.

prose.py FILE...; exits 1 after naming every sentence of more than 25 words, as FILE:LINE, and every
docstring whose first word is a pronoun. The reader of a docstring may see nothing else, for instance in
an editor's window.
"""

import re
import sys

WORDS_MAX = 25

# A docstring that begins with one of these words does not say what it is about.
PRONOUNS = ("It", "Its", "They", "Their", "Those", "Whose", "Whom", "Such")

# What ends in a full stop and ends no sentence.
ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "cf.", "no.")


def blocks(text):
    """Paragraphs, items of lists, headings and cells of tables, each with its first line's number.

    Code between fences and indented code is left out.
    """
    number, lines, fenced, item = 0, [], False, False

    def finished():
        block = (number, " ".join(lines))
        lines.clear()
        return [block] if block[1] else []

    for at, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("```"):
            fenced = not fenced
            yield from finished()
            continue
        starts_item = re.match(r"\s*([-*+]|\d+\.)\s+", line)
        # Four spaces are code, unless they go on with an item or a paragraph.
        if fenced or (line.startswith("    ") and not lines and not item and not starts_item):
            continue
        if not bare or bare.startswith(("#", "|", "<!--")) or starts_item:
            yield from finished()
            item = bool(starts_item) or (item and not bare)
        if bare.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", bare.strip("|")):
                yield at, cell.strip()
        elif bare.startswith("#"):
            yield at, bare.lstrip("# ")
        elif bare:
            if not lines:
                number = at
                item = bool(starts_item) or (item and line.startswith(" "))
            lines.append(bare[starts_item.end() - (len(line) - len(line.lstrip())):]
                         if starts_item else bare)
    yield from finished()


def comments(text):
    """Paragraphs of the comments of a Rust source, each with its first line's number.

    Items of lists stand alone. Tables, lines of code, and comments behind code are left out.
    """
    number, lines, kind, fenced = 0, [], None, False

    def finished():
        block = (number, " ".join(lines))
        lines.clear()
        return [block] if block[1] else []

    for at, line in enumerate(text.splitlines(), 1):
        comment = re.match(r"\s*(//[/!]?)(?: (.*))?$", line)
        if not comment:
            yield from finished()
            kind = None
            continue
        words = (comment[2] or "").strip()
        if words.startswith("```"):
            fenced = not fenced
            words = ""
        if comment[1] != kind or not words or fenced or re.match(r"([-*|#]|\d+\.)", words):
            yield from finished()
        kind = comment[1]
        if words and not fenced and not words.startswith("|"):
            if not lines:
                number = at
            lines.append(words)
    yield from finished()


# What a Rust source consists of besides words and numbers. Groups: hashes and text of a raw string, text of another one.
TOKEN = re.compile(r"""//[^\n]*|/\*.*?\*/|\br(#*)"(.*?)"\1|"((?:\\.|[^"\\])*)"|'(?:\\[^']+|\\'|[^'\\])'""", re.DOTALL)


def messages(path, text):
    """Lines of the string literals of a Rust source that is no test, each with the literal's first line's number.

    What is put in for `{}` counts as a word.
    """
    if "/tests/" in path or path.endswith("/tests.rs"):
        return
    for token in TOKEN.finditer(text.split("#[cfg(test)]\nmod tests {")[0]):
        literal = token[2] if token[3] is None else token[3]
        number = text.count("\n", 0, token.start()) + 1
        for line in re.split(r"\\n|\n", re.sub(r"\\\n\s*", "", literal or "")):
            yield number, re.sub(r"\{[^{}]*\}", "value", line)


def docstrings(text):
    """The first line of each docstring of a Rust source, with its number."""
    kind = None
    for at, line in enumerate(text.splitlines(), 1):
        comment = re.match(r"\s*(//[/!]) (.*)$", line) or re.match(r"\s*(//[/!])()$", line)
        if comment and comment[1] != kind:
            yield at, comment[2]
        kind = comment[1] if comment else None


def pronouns(path, text):
    """Docstrings that begin with a pronoun."""
    if not path.endswith(".rs"):
        return
    for number, line in docstrings(text):
        word = re.match(r"\w+", line)
        if word and word[0] in PRONOUNS:
            yield number, word[0], line


def plain(block):
    """The block as it is read: code is one word, a link is its text."""
    block = re.sub(r"`[^`]*`", "code", block)
    block = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
    block = re.sub(r"<[^>]*>", "", block)
    return block.replace("*", "")


def sentences(block):
    """A full stop, a question mark or an exclamation mark ends a sentence, and nothing else does."""
    sentence = []
    for word in plain(block).split():
        sentence.append(word)
        bare = word.rstrip(")\"'")
        if bare.endswith((".", "?", "!")) and word.lower() not in ABBREVIATIONS:
            yield sentence
            sentence = []
    if sentence:
        yield sentence


def long_sentences(path, text):
    # A comment may say after a colon, in a sentence of its own, what follows from the first.
    rust = path.endswith(".rs")
    for number, block in comments(text) if rust else blocks(text):
        block = re.sub(r"(:) (?=[A-Z`])", r"\1. ", block) if rust else block
        for sentence in sentences(block):
            words = [word for word in sentence if re.search(r"\w", word)]
            if len(words) > WORDS_MAX:
                yield number, len(words), " ".join(sentence)
    for number, line in messages(path, text) if rust else ():
        # A message has a sentence for what happened, one for why, and one for what to do.
        for sentence in sentences(re.sub("[:;] ", ". ", line)):
            words = [word for word in sentence if re.search(r"\w", word)]
            if len(words) > WORDS_MAX:
                yield number, len(words), " ".join(sentence)


def main():
    found = False
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        for number, words, sentence in long_sentences(path, text):
            found = True
            print(f"{path}:{number}: {words} words: {sentence}")
        for number, word, line in pronouns(path, text):
            found = True
            print(f"{path}:{number}: begins with the pronoun {word}: {line}")
    return int(found)


sys.exit(main())
