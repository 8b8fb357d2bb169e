use dray_core::Timestamp;

use super::*;

const NUMBERING: Numbering = Numbering::Counted { boot: 7 };
const ROOT: FileId = FileId { ino: 1, generation: 1 };

/// As [`PathTable::seen`], and names of what looks the same are of one file.
fn seen(table: &PathTable, at: &str, attr: &Attr) -> FileId {
    let known = table.other_link((ROOT, name(at)), attr);
    table.seen(ROOT, name(at), attr, known)
}

fn name(name: &str) -> &Name {
    Name::new(name.as_bytes()).unwrap()
}

fn file(ino: u64, nlink: u32) -> Attr {
    Attr { ino, mode: libc::S_IFREG, nlink, ..Attr::default() }
}

// proves: P40
#[test]
fn an_id_follows_renames() {
    let table = PathTable::new(100, NUMBERING);
    let id = seen(&table, "a", &file(10, 1));
    assert_eq!(seen(&table, "a", &file(10, 1)), id);
    table.renamed((ROOT, name("a")), (ROOT, name("b")), false);
    assert_eq!(table.at(ROOT, name("a")), None);
    assert_eq!(table.find(id).unwrap().places, [(ROOT, name("b").to_owned())]);
    let other = seen(&table, "c", &file(11, 1));
    table.renamed((ROOT, name("b")), (ROOT, name("c")), true);
    assert_eq!((table.at(ROOT, name("b")), table.at(ROOT, name("c"))), (Some(other), Some(id)));
    table.renamed((ROOT, name("b")), (ROOT, name("c")), false);
    assert!(table.find(id).is_none());
    assert_eq!(table.at(ROOT, name("c")), Some(other));
}

#[test]
fn hard_links_are_one_file_and_reused_numbers_are_not() {
    let table = PathTable::new(100, NUMBERING);
    let id = seen(&table, "a", &file(10, 1));
    assert_eq!(seen(&table, "b", &file(10, 2)), id);
    table.removed(ROOT, name("a"));
    assert!(table.find(id).is_some());
    table.removed(ROOT, name("b"));
    assert!(table.find(id).is_none());
    assert_ne!(seen(&table, "a", &file(10, 1)), id);
}

#[test]
fn another_file_under_a_known_name_is_another_id() {
    let table = PathTable::new(100, NUMBERING);
    let id = seen(&table, "a", &file(10, 1));
    assert_ne!(seen(&table, "a", &file(11, 1)), id);
    assert!(table.find(id).is_none());
}

fn identity() -> LogIdentity {
    let name = format!("dray-paths-{:x}", dray_rt::random_u64());
    let path = std::env::temp_dir().join(name);
    LogIdentity { path, uuid: dray_core::FsUuid(1), root_ino: 1, magic: 2 }
}

// proves: P40
#[test]
fn a_noted_table_is_there_after_a_restart() {
    let identity = identity();
    let table = PathTable::noted(100, NUMBERING, identity.clone());
    for number in 0..40 {
        seen(&table, &format!("f{number}"), &file(100 + number, 1));
    }
    seen(&table, "link", &file(103, 2));
    let unnamed = table.unnamed(&file(99, 0));
    table.linked(unnamed, ROOT, name("named"));
    table.removed(ROOT, name("f0"));
    table.renamed((ROOT, name("f1")), (ROOT, name("g")), false);
    table.renamed((ROOT, name("f2")), (ROOT, name("f4")), false);
    table.renamed((ROOT, name("f5")), (ROOT, name("f6")), true);
    table.renamed((ROOT, name("f7")), (ROOT, name("not known")), true);
    seen(&table, "f8", &file(500, 1)); // another file
    let copied = table.at(ROOT, name("f9")).unwrap();
    let btime = Timestamp { sec: 5, nsec: 6 };
    table.changed(copied, &Attr { btime, ..file(600, 1) });
    assert!(seen(&table, "f9", &Attr { btime, ..file(600, 1) }) == copied);
    let before = table.content();
    let next = PathTable::noted(100, NUMBERING, identity.clone());
    assert_eq!(next.content(), before);
    assert_eq!(seen(&next, "copied", &Attr { btime, ..file(600, 2) }), copied);
    std::fs::remove_file(&identity.path).unwrap();
}

#[test]
fn the_table_is_bounded_and_keeps_what_is_used() {
    let table = PathTable::new(50, NUMBERING);
    let kept = seen(&table, "kept", &file(5, 1));
    for ino in 10..1000 {
        seen(&table, &ino.to_string(), &file(ino, 1));
        assert!(table.find(kept).is_some());
    }
    assert!(table.len() <= 50);
    assert!(table.lock().slots.len() <= 51);
}
