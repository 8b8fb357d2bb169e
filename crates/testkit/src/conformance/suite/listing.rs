//! readdir.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dray_core::{OpenFile, OpenHow, RemoveKind};

use super::place::{TestDirectory, close, name, user};

/// Entries of the test's directory.
const ENTRIES: usize = 300;
/// Pages that a listing of them may have.
const PAGES_MAX: usize = 1000;

async fn fill(place: &TestDirectory) -> BTreeSet<Vec<u8>> {
    let mut names = BTreeSet::new();
    for number in 0..ENTRIES {
        let text = format!("entry-{number}");
        let (_, file) = place.file(&text).await;
        close(file).await;
        names.insert(text.into_bytes());
    }
    names
}

/// All names behind `cookie`, with the cookie that stands behind each.
async fn list(dir: &Arc<dyn OpenFile>, mut cookie: u64, plus: bool) -> Vec<(Vec<u8>, u64)> {
    let mut found = Vec::new();
    for _ in 0..PAGES_MAX {
        let page = dir.readdir(&user(0), cookie, 1000, plus).await.unwrap();
        assert!(page.end || !page.is_empty(), "a page that is not the last has entries");
        for (name, entry) in page.iter() {
            assert!(!plus || entry.attr.is_some_and(|attr| attr.ino == entry.id.ino));
            found.push((name.to_vec(), entry.cookie));
            cookie = entry.cookie;
        }
        if page.end {
            return found;
        }
    }
    panic!("the listing does not come to an end");
}

// proves: P37
pub(super) async fn a_listing_is_whole_and_goes_on_from_any_cookie(place: &TestDirectory) {
    let want = fill(place).await;
    let dir = place.client(1).open(&user(0), place.dir, OpenHow::DIRECTORY).await.unwrap();
    for plus in [false, true] {
        let found = list(&dir, 0, plus).await;
        let names: BTreeSet<Vec<u8>> = found.iter().map(|(name, _)| name.clone()).collect();
        assert_eq!(names, want);
        assert_eq!(found.len(), ENTRIES, "no name comes twice");
        for index in [0, 1, ENTRIES / 2, ENTRIES - 1] {
            let rest = list(&dir, found[index].1, plus).await;
            assert_eq!(rest, found[index + 1..], "from behind entry {index}");
        }
    }
    close(dir).await;
}

// proves: P37
pub(super) async fn a_listing_survives_changes(place: &TestDirectory) {
    let want = fill(place).await;
    let dir = place.fs().open(&user(0), place.dir, OpenHow::DIRECTORY).await.unwrap();
    let mut seen = BTreeMap::new();
    let mut cookie = 0;
    for round in 0..PAGES_MAX {
        let page = dir.readdir(&user(0), cookie, 1000, false).await.unwrap();
        for (name, entry) in page.iter() {
            *seen.entry(name.to_vec()).or_insert(0) += 1;
            cookie = entry.cookie;
        }
        if page.end {
            break;
        }
        // What has been read goes, and something new comes.
        for (gone, _) in page.iter().filter(|(name, _)| want.contains(*name)) {
            let gone = std::str::from_utf8(gone).unwrap();
            place.remove(gone, RemoveKind::File).await.unwrap();
        }
        let (_, file) = place.file(&format!("new-{round}")).await;
        close(file).await;
    }
    for name in &want {
        assert_eq!(seen.get(name), Some(&1), "{:?} comes once", name.escape_ascii().to_string());
    }
    assert!(seen.values().all(|&times| times == 1));
    assert!(place.client(1).lookup(&user(0), place.dir, &name("new-0")).await.is_ok());
    close(dir).await;
}
