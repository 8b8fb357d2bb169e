//! `script/promises`, `script/prose` and the check of matches on operations find what they are for, in small trees that have it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use dray_testkit::fixture::TempDir;

/// What `script/lib/NAME.py` says of `arguments`.
fn run(name: &str, arguments: &[&str]) -> Output {
    let script =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../script/lib").join(format!("{name}.py"));
    Command::new("python3").arg(script).args(arguments).output().expect("python3 runs")
}

/// A tree with two promises, a unit test and a function of the suite that prove them, and `extra`.
fn tree(dir: &TempDir, extra: &[(&str, &str)]) {
    let suite = "crates/testkit/src/conformance/suite";
    let module = format!("{suite}/mod.rs");
    let functions = format!("{suite}/names.rs");
    let files = [
        ("docs/SEMANTICS.md", "## Promises\n\n| **P1** | One. |\n"),
        ("docs/PROJECTIONS.md", "## Others\n\n| **P2** | Two. |\n"),
        ("docs/AUDIT.md", ""),
        ("docs/QOS.md", ""),
        ("docs/LEASES.md", ""),
        ("crates/a/src/lib.rs", "/// It holds.\n// proves: P1, P2\n#[test]\nfn holds() {}\n"),
        (module.as_str(), "names::called(place)\n"),
        (functions.as_str(), "// proves: P2\npub(super) async fn called(place: &Place) {}\n"),
        ("script/suites/power.sh", "#!/bin/bash\n# proves: P1\n"),
    ];
    for (path, text) in files.iter().chain(extra) {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

/// What `promises.py` says of a tree with `extra`, whose page was written before that.
fn said_of(extra: &[(&str, &str)]) -> (bool, String) {
    let dir = TempDir::new("promises").unwrap();
    let root = dir.path().to_str().unwrap();
    tree(&dir, &[]);
    assert!(run("promises", &[root]).status.success());
    tree(&dir, extra);
    let output = run("promises", &["--check", root]);
    (output.status.success(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn a_page_of_promises_has_all_tests() {
    assert_eq!(said_of(&[]), (true, String::new()));
    let dir = TempDir::new("promises").unwrap();
    tree(&dir, &[]);
    assert!(run("promises", &[dir.path().to_str().unwrap()]).status.success());
    let page = fs::read_to_string(dir.path().join("docs/PROMISES.md")).unwrap();
    let list = page.split("## Promises\n\n").nth(1).unwrap();
    assert_eq!(
        list,
        "- **P1**\n  - `crates/a/src/lib.rs::holds`\n  - `script/suites/power.sh`\n\n\
         ## Others\n\n- **P2**\n  - `crates/a/src/lib.rs::holds`\n  - \
         `crates/testkit/src/conformance/suite/names.rs::called`\n"
    );
}

#[test]
fn what_is_wrong_with_promises_is_found() {
    let lib = "crates/a/src/lib.rs";
    let names = "crates/testkit/src/conformance/suite/names.rs";
    let page = "docs/SEMANTICS.md";
    let cases: [(&str, &str, &str); 8] = [
        (page, "| **P1** |\n| **P3** |\n", "P3 has no test"),
        (page, "| **P1** |\n| **P2** |\n", "has P2 a second time"),
        (lib, "// proves: P1, P9\n#[test]\nfn holds() {}\n", "has P9"),
        (lib, "// proves: P1,P2\n#[test]\nfn holds() {}\n", "has not the form"),
        (lib, "// proves P1, P2\n#[test]\nfn holds() {}\n", "has not the form"),
        (lib, "// proves: P1\nfn holds() {}\n", "holds is no test that runs"),
        (lib, "// proves: P1\nstruct Holds;\nfn holds() {}\n", "no function stands behind"),
        (names, "// proves: P2\npub(super) async fn other() {}\n", "other is no test that runs"),
    ];
    for (path, text, problem) in cases {
        let (fine, said) = said_of(&[(path, text)]);
        assert!(!fine && said.contains(problem), "{path}: {text}: {said}");
    }
    let further = ("crates/b/tests/b.rs", "// proves: P1\n#[test]\nfn further() {}\n");
    let (fine, said) = said_of(&[further]);
    assert!(!fine && said.contains("out of date"), "{said}");
}

#[test]
fn long_sentences_are_found_where_they_stand() {
    let dir = TempDir::new("prose").unwrap();
    let words = |count: usize| vec!["word"; count].join(" ");
    let (fits, long) = (words(25), words(26));
    let cases = [
        (format!("- a\n\nA paragraph:\n\n    {long}\n"), None),
        (format!("- a\n\n    {long}\n"), Some(3)),
        (format!("# A\n\n{fits}. {fits}.\n"), None),
        (format!("# A\n\n{fits}.\n{long}.\n"), Some(3)),
        (format!("- {fits}\n- {fits}\n"), None),
        (format!("- {fits}\n  word\n"), Some(1)),
        (format!("| {fits} | {fits} |\n|---|---|\n| a | {long} |\n"), Some(3)),
        (format!("`{long}` {}\n", words(24)), None),
        (format!("```\n{long}\n```\n\n    {long}\n"), None),
        (format!("[{}](a.md) {}; {}\n", words(5), words(10), words(11)), Some(1)),
    ];
    for (text, line) in cases {
        let path = dir.path().join("page.md");
        fs::write(&path, &text).unwrap();
        let path = path.to_str().unwrap();
        let output = run("prose", &[path]);
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.success(), line.is_none(), "{text}: {said}");
        let named = line.map(|line| format!("{path}:{line}: 26 words: "));
        assert!(named.is_none_or(|named| said.starts_with(&named)), "{text}: {said}");
    }
}

/// A comment of Rust is a document, too; behind a colon another sentence may begin.
#[test]
fn long_sentences_of_comments_and_messages_are_found_where_they_stand() {
    let dir = TempDir::new("prose").unwrap();
    let words = |count: usize| vec!["word"; count].join(" ");
    let (fits, long) = (words(25), words(26));
    let cases = [
        (format!("fn a() {{}} // {long}\n"), None),
        (format!("/// {fits}: Word {}.\nfn a() {{}}\n", words(20)), None),
        (format!("fn a() {{\n    // {}\n    // {}\n}}\n", words(20), words(6)), Some(2)),
        (format!("//! {fits}\n//!\n//! {long}\n"), Some(3)),
        (format!("//! - {fits}\n//! - {fits}\n"), None),
        (format!("/// ```\n/// {long}\n/// ```\nfn a() {{}}\n"), None),
        (format!("/// | {long} |\nfn a() {{}}\n"), None),
        (format!("fn a() {{\n    say(\"{fits}: {fits}; {fits}. {fits}\");\n}}\n"), None),
        (format!("fn a() {{\n    say(\"{fits}\\n{fits}\", \"{fits}\");\n}}\n"), None),
        (format!("fn a() {{\n    say('\"', \"{long}\");\n}}\n"), Some(2)),
        (format!("say(\"it\",\n\"{fits} \\\n    {{shown}}\"); // \"\n"), Some(2)),
        (format!("say(r#\"\"{long}\"#);\n"), Some(1)),
        (format!("#[cfg(test)]\nmod tests {{\n    say(\"{long}\");\n}}\n"), None),
    ];
    for (text, line) in cases {
        let path = dir.path().join("source.rs");
        fs::write(&path, &text).unwrap();
        let path = path.to_str().unwrap();
        let output = run("prose", &[path]);
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.success(), line.is_none(), "{text}: {said}");
        let named = line.map(|line| format!("{path}:{line}: 26 words: "));
        assert!(named.is_none_or(|named| said.starts_with(&named)), "{text}: {said}");
    }
}

/// A docstring is read alone, so that its first word is no pronoun.
#[test]
fn docstrings_that_begin_with_a_pronoun_are_found_where_they_stand() {
    let dir = TempDir::new("prose").unwrap();
    let cases = [
        ("/// It goes on.\nGoesOn,\n", Some((1, "It"))),
        (
            "enum A {\n    /// Goes on.\n    B,\n    /// Such a one\n    /// ends.\n    C,\n}\n",
            Some((4, "Such")),
        ),
        ("//! Their end.\n", Some((1, "Their"))),
        ("/// A comment.\n// proves: P1\n/// Those\n", Some((3, "Those"))),
        ("/// The caller goes on.\n/// It waits.\nGoesOn,\n", None),
        ("/// The caller goes on.\n///\n/// It waits.\nGoesOn,\n", None),
        ("/// Items `It` and Itself.\n", None),
        ("// It is here.\n", None),
        ("fn a() {} /// It\n", None),
    ];
    let said_of = |path: &str, text: &str| {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        let output = run("prose", &[path.to_str().unwrap()]);
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.success(), said.is_empty(), "{text}: {said}");
        said.replace(dir.path().to_str().unwrap(), "")
    };
    for (text, found) in cases {
        let said = said_of("crates/a/src/lib.rs", text);
        let named = found.map_or(String::new(), |(line, word)| {
            format!("/crates/a/src/lib.rs:{line}: begins with the pronoun {word}: ")
        });
        assert!(
            said.starts_with(&named) && said.lines().count() == named.lines().count(),
            "{text}: {said}"
        );
    }
    assert!(said_of("docs/a.md", "It goes on.\n").is_empty());
}

#[test]
fn a_match_on_operations_that_takes_a_new_one_silently_is_found_where_it_stands() {
    let dir = TempDir::new("wildcards").unwrap();
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for kept in ["crates/core/src/op.rs", "crates/fuse/src/proto/request.rs"] {
        let copy = dir.path().join(kept);
        fs::create_dir_all(copy.parent().unwrap()).unwrap();
        fs::copy(repository.join(kept), copy).unwrap();
    }
    let source = dir.path().join("crates/core/src/source.rs");
    let arms = |first: &str, last: &str| {
        format!(
            "fn a() {{\n    match op {{\n        {first} => 1,\n        {last} => 2,\n    }}\n}}\n"
        )
    };
    let cases = [
        (arms("Op::Read", "_"), Some("4: a match")),
        (arms("Op::Read", "other if other.writes()"), Some("4: a match")),
        (arms("Op::Read", "Op::Write"), None),
        (arms("KeptOp::Read", "_"), None),
        (arms("Write | Read", "_"), None),
        (format!("use Op::*;\n{}", arms("Write | Read", "_")), Some("5: a match")),
        (format!("use Op::*;\n{}", arms("Some(one)", "_")), None),
        (
            "let a = 1;\nlet b = matches!(op, Op::Read | Op::Write);\n".to_owned(),
            Some("2: a `matches!`"),
        ),
        (
            "let b = matches!(\n    self.of(op),\n    Operation::Read(_)\n);\n".to_owned(),
            Some("1: a `matches!`"),
        ),
        ("let b = matches!(kind, Kind::Read) && op == Op::Read;\n".to_owned(), None),
        (format!("#[cfg(test)]\nmod tests {{\n{}}}\n", arms("Op::Read", "_")), None),
    ];
    for (text, found) in cases {
        fs::write(&source, &text).unwrap();
        let output = run("wildcards", &[dir.path().to_str().unwrap()]);
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.success(), found.is_none(), "{text}: {said}");
        let named =
            found.map_or(String::new(), |found| format!("crates/core/src/source.rs:{found}"));
        assert!(said.starts_with(&named) && said.lines().count() <= 1, "{text}: {said}");
    }
}
