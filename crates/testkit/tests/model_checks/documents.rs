//! Links, paths and modules that documents name are held against the tree, and so are the rules
//! of docs/ARCHITECTURE.md. What tests prove is checked by `script/promises`.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What stands between backquotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
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

/// Modules that a page names as `crate::module` or `crate::{module, module}`.
fn modules(text: &str) -> Vec<String> {
    let mut all = Vec::new();
    for word in quoted(text).filter(|word| word.contains("::") && !word.contains('(')) {
        match word.split_once("::{") {
            Some((stem, list)) => {
                let names = list.trim_end_matches('}').split(',').map(str::trim);
                all.extend(names.map(|name| format!("{stem}::{name}")));
            }
            None => all.push(word.to_owned()),
        }
    }
    all
}

/// Whether a path of modules leads to a file, or to something in one. Paths into what is not ours
/// are nobody's business here.
fn leads_somewhere(module: &str) -> bool {
    let mut words = module.split("::");
    let mut at = root().join("crates").join(words.next().unwrap_or_default()).join("src");
    if !at.is_dir() {
        return true;
    }
    for word in words {
        let is_item = |file: PathBuf| {
            fs::read_to_string(file).is_ok_and(|text| text.contains(&format!(" {word}")))
        };
        let below = at.join(word);
        if !below.is_dir() && !below.with_extension("rs").exists() {
            let inside = [at.with_extension("rs"), at.join("mod.rs"), at.join("lib.rs")];
            return inside.into_iter().any(is_item);
        }
        at = below;
    }
    true
}

#[test]
fn modules_that_pages_name_are_there() {
    let mut all = Vec::new();
    pages(&root().join("docs"), &mut all);
    let mut dead = Vec::new();
    for page in &all {
        let text = fs::read_to_string(page).unwrap();
        let gone = modules(&text).into_iter().filter(|module| !leads_somewhere(module));
        dead.extend(gone.map(|module| format!("{}: {module}", page.display())));
    }
    assert!(dead.is_empty(), "{}", dead.join("\n"));
    assert_eq!(modules("`a::{b, c::d}` `e::f` `g`"), ["a::b", "a::c::d", "e::f"]);
    assert!(leads_somewhere("rpc::server::exactly_once::plan") && leads_somewhere("tokio::sync"));
    assert!(!leads_somewhere("rpc::server::nothing_of_that_name"));
}

/// What each crate may import of ours, as docs/ARCHITECTURE.md has it. Tests may import more, and
/// `dray`, which puts stacks together, and `testkit` anything.
const IMPORTS: [(&str, &[&str]); 9] = [
    ("core", &[]),
    ("rt", &[]),
    ("fabric", &["core", "rt"]),
    ("rpc", &["core", "rt", "fabric"]),
    ("layers", &["core", "rt"]),
    ("backends", &["core", "rt"]),
    ("fuse", &["core", "rt"]),
    ("client", &["core", "rt", "fabric", "rpc", "layers"]),
    ("cluster", &["core", "rt", "rpc"]),
];

#[test]
fn crates_import_what_they_may_know() {
    for (name, allowed) in IMPORTS {
        let manifest = root().join("crates").join(name).join("Cargo.toml");
        let text = fs::read_to_string(manifest).unwrap();
        let imports = text.split("\n[").find(|part| part.starts_with("dependencies]"));
        for line in imports.unwrap_or_default().lines() {
            let Some(ours) = line.strip_prefix("dray-") else { continue };
            let ours = ours.split(['.', ' ']).next().unwrap_or_default();
            assert!(allowed.contains(&ours), "{name} imports {ours}");
        }
    }
}

/// Every source file in `dir` and below.
fn sources(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap().flatten() {
        match entry.path() {
            path if path.is_dir() => sources(&path, into),
            path if path.extension().is_some_and(|end| end == "rs") => into.push(path),
            _ => {}
        }
    }
}

/// Else the simulator would not have time in its hands.
#[test]
fn only_rt_asks_the_system_for_time_and_chance() {
    for (name, _) in IMPORTS.iter().filter(|(name, _)| *name != "rt") {
        let mut files = Vec::new();
        sources(&root().join("crates").join(name).join("src"), &mut files);
        assert!(!files.is_empty(), "{name} has no sources");
        for file in files {
            let text = fs::read_to_string(&file).unwrap();
            let shipped = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            let asks = |line: &&str| {
                ["SystemTime", "clock_gettime", "getrandom"].iter().any(|name| line.contains(name))
                    || line.contains("std::time::") && line.contains("Instant")
            };
            assert_eq!(shipped.lines().find(asks), None, "{}", file.display());
        }
    }
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
fn links_and_paths_are_found_in_a_text() {
    let page = "[a](b.md#c), ![d](e.svg), [f](https://g), [h](#i): `script/test STEP`, docs/adr.";
    assert_eq!(links(page).collect::<Vec<_>>(), ["b.md", "e.svg"]);
    assert_eq!(paths(page).collect::<Vec<_>>(), ["script/test", "docs/adr"]);
}
