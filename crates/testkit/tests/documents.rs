//! The promises of docs/SEMANTICS.md name their tests; here those names are held against the
//! tree, so that a promise does not outlive its proof. So are links and paths of all pages.

use std::fs;
use std::path::{Path, PathBuf};

/// A test as the page names it: `PATH.rs::FUNCTION`.
struct Named {
    file: String,
    function: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Everything between backquotes in `text` that has the form of a test.
fn named(text: &str) -> Vec<Named> {
    let quoted = text.split('`').skip(1).step_by(2);
    let split = quoted.filter_map(|word| word.split_once(".rs::"));
    split
        .map(|(file, function)| Named { file: format!("{file}.rs"), function: function.into() })
        .collect()
}

/// Rows of the tables whose last column is called `tests`.
fn promises(page: &str) -> Vec<&str> {
    let mut rows = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        if !line.starts_with('|') {
            inside = false;
        } else if line.trim_end().ends_with("| tests |") {
            inside = true;
        } else if inside && !line.starts_with("|---") {
            rows.push(line);
        }
    }
    rows
}

/// Why `test` is none that runs, if so: it is marked as a test, or the directed suite calls it.
fn problem(test: &Named) -> Option<String> {
    let Ok(text) = fs::read_to_string(root().join(&test.file)) else {
        return Some(format!("there is no file {}", test.file));
    };
    let head = format!("fn {}(", test.function);
    let Some(at) = text.find(&head) else {
        return Some(format!("{} has no function {}", test.file, test.function));
    };
    let runs = match test.file.rsplit_once("conformance/suite/") {
        Some((_, module)) => {
            let call = format!("{}::{}", module.trim_end_matches(".rs"), test.function);
            let suite = root().join("crates/testkit/src/conformance/suite/mod.rs");
            fs::read_to_string(suite).is_ok_and(|suite| suite.contains(&call))
        }
        None => {
            // The attribute stands between the function and whatever ends before it.
            let before = &text[..at];
            let item = before.rfind(['}', ';']).map_or(0, |end| end + 1);
            before[item..].contains("#[test]")
        }
    };
    (!runs).then(|| format!("{}::{} is no test that runs", test.file, test.function))
}

#[test]
fn every_promise_names_tests_that_exist() {
    let page = fs::read_to_string(root().join("docs/SEMANTICS.md")).unwrap();
    let rows = promises(&page);
    assert!(
        rows.len() > 30,
        "only {} promises were found: has the form of the page changed?",
        rows.len()
    );
    let unproven = rows.iter().filter(|row| named(row).is_empty());
    let mut problems: Vec<String> =
        unproven.map(|row| format!("no test is named: {row}")).collect();
    problems.extend(named(&page).iter().filter_map(problem));
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Every page for people in `dir` and below, but in what is made there.
fn pages(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let made = ["target", "bench-out", "corpus", "artifacts"].iter().any(|one| name == **one);
        if path.is_dir() && !made && !name.to_string_lossy().starts_with('.') {
            pages(&path, into);
        } else if path.extension().is_some_and(|end| end == "md") {
            into.push(path);
        }
    }
}

/// Where the links of a page lead within the repository, from the page's folder.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let paths = targets.map(|target| target.split('#').next().unwrap_or_default());
    paths.filter(|path| !path.is_empty() && !path.contains("://"))
}

/// Files and folders that a page names by their path from the repository's root.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    let ends = |c: char| !c.is_alphanumeric() && !matches!(c, '/' | '.' | '_' | '-');
    let words = text.split(ends).map(|word| word.trim_end_matches('.'));
    words.filter(|word| {
        ["crates/", "docs/", "script/", "benches/", "packaging/", "fuzz/"]
            .iter()
            .any(|folder| word.starts_with(folder) && word.len() > folder.len())
    })
}

#[test]
fn links_and_paths_of_all_pages_lead_somewhere() {
    let mut all = Vec::new();
    pages(&root(), &mut all);
    assert!(all.len() > 20, "{all:?}");
    let mut dead = Vec::new();
    for page in &all {
        let (text, folder) = (fs::read_to_string(page).unwrap(), page.parent().unwrap());
        // What fuzzing makes is there once it was fuzzed.
        let made =
            |path: &&str| path.starts_with("fuzz/corpus") || path.starts_with("fuzz/artifacts");
        let linked = links(&text).filter(|link| !folder.join(link).exists());
        let named = paths(&text).filter(|path| !root().join(path).exists() && !made(path));
        dead.extend(linked.chain(named).map(|path| format!("{}: {path}", page.display())));
    }
    assert!(dead.is_empty(), "{}", dead.join("\n"));
}

#[test]
fn what_the_benchmark_plots_is_shown() {
    let pages = ["README.md", "docs/PERFORMANCE.md"].map(|page| root().join(page));
    let text: String = pages.map(|page| fs::read_to_string(page).unwrap()).concat();
    for entry in fs::read_dir(root().join("docs/figures")).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        assert!(!name.ends_with(".svg") || text.contains(&format!("figures/{name})")), "{name}");
    }
}

#[test]
fn every_decision_record_is_in_the_list() {
    let list = fs::read_to_string(root().join("docs/adr/README.md")).unwrap();
    for entry in fs::read_dir(root().join("docs/adr")).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        assert!(name == "README.md" || list.contains(&format!("({name})")), "{name}");
    }
}

#[test]
fn what_is_named_wrongly_is_found() {
    let wrong = [
        ("crates/nowhere.rs", "x"),
        ("crates/testkit/tests/documents.rs", "not_there"),
        ("crates/testkit/tests/documents.rs", "problem"),
        ("crates/testkit/src/conformance/suite/listing.rs", "fill"),
    ];
    for (file, function) in wrong {
        let test = Named { file: file.into(), function: function.into() };
        assert!(problem(&test).is_some(), "{file}::{function}");
    }
    let page = "| promise | tests |\n|---|---|\n| a | `b.rs::c` |\n\n| what | now |\n|---|---|\n| d | e |\n";
    assert_eq!(promises(page), ["| a | `b.rs::c` |"]);
    assert_eq!(named(page).len(), 1);
    let page = "[a](b.md#c), ![d](e.svg), [f](https://g), [h](#i): `script/test STEP`, docs/adr.";
    assert_eq!(links(page).collect::<Vec<_>>(), ["b.md", "e.svg"]);
    assert_eq!(paths(page).collect::<Vec<_>>(), ["script/test", "docs/adr"]);
}
