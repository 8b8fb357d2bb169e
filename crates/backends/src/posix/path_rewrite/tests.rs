use std::os::unix::fs::MetadataExt;

use dray_core::{Attr, FileId, FsUuid, Gid, Identity, Name, Timestamp, Uid};

use super::super::paths::{Numbering, PathTable};
use super::*;

const ROOT: FileId = FileId { ino: 1, generation: 1 };
const NAMES: u64 = 20 * ENTRIES_AT_ONCE as u64;

fn name(name: &str) -> &Name {
    Name::new(name.as_bytes()).unwrap()
}

fn file(ino: u64) -> Attr {
    Attr { ino, mode: libc::S_IFREG, nlink: 1, ..Attr::default() }
}

/// A log in a directory of its own, which goes with it.
struct Site(LogIdentity);

impl Site {
    fn new() -> Site {
        let dir = std::env::temp_dir().join(format!("dray-rewrite-{:x}", dray_rt::random_u64()));
        fs::create_dir(&dir).unwrap();
        Site(LogIdentity { path: dir.join("log"), uuid: FsUuid(1), root_ino: 1, magic: 2 })
    }

    fn table(&self) -> PathTable {
        let table = PathTable::noted(1 << 20, Numbering::Counted { boot: 7 }, self.0.clone());
        for at in 0..NAMES {
            table.seen(ROOT, name(&at.to_string()), &file(10 + at), None);
        }
        table
    }

    /// What the server would know after a restart, should it end here.
    fn after_death(&self) -> PathTable {
        let path = self.0.path.with_file_name("copy");
        fs::copy(&self.0.path, &path).unwrap();
        PathTable::noted(
            1 << 20,
            Numbering::Counted { boot: 8 },
            LogIdentity { path, ..self.0.clone() },
        )
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(self.0.path.parent().unwrap());
    }
}

/// Changes of every kind to what was taken already, is taken next, or comes last.
fn change(table: &PathTable, step: u64) {
    for base in [0, NAMES / 3, NAMES - 200] {
        let at = |at: u64| (base + 7 * step + at).to_string();
        table.removed(ROOT, name(&at(0)));
        table.renamed((ROOT, name(&at(1))), (ROOT, name(&at(2))), false);
        table.renamed((ROOT, name(&at(3))), (ROOT, name(&at(4))), true);
        table.seen(ROOT, name(&format!("new-{}", at(0))), &file((1 << 30) + base + step), None);
        table.seen(ROOT, name(&at(5)), &file((1 << 31) + base + step), None); // another file
        if let Some(id) = table.at(ROOT, name(&at(6))) {
            let btime = Timestamp { sec: 5, nsec: 6 };
            table.changed(id, &Attr { btime, ..file((1 << 32) + base + step) });
            table.linked(id, ROOT, name(&format!("link-{}", at(6))));
        }
    }
}

// proves: P40
#[test]
fn whenever_the_server_dies_the_log_is_whole() {
    let site = Site::new();
    let table = site.table();
    let shared = table.shared();
    let mut step = 0;
    let mut changed = |table: &PathTable| {
        step += 1;
        change(table, step);
        assert!(site.after_death().content() == table.content(), "at step {step}");
    };
    changed(&table);
    let mut rewrite = Rewrite::begin(shared).unwrap();
    changed(&table);
    while rewrite.take_some(shared).unwrap() {
        changed(&table);
    }
    // More than is copied while others wait.
    let (one, other) = (name("one"), name("other"));
    table.seen(ROOT, one, &file(5), None);
    for _ in 0..1000 {
        table.renamed((ROOT, one), (ROOT, other), false);
        table.renamed((ROOT, other), (ROOT, one), false);
    }
    changed(&table);
    rewrite.catch_up(shared).unwrap();
    changed(&table);
    rewrite.put_in_place().unwrap();
    changed(&table);
    rewrite.switch(shared).unwrap();
    changed(&table);
    // And once more from there.
    super::rewrite(shared).unwrap();
    changed(&table);
    assert!(step > 20);
}

/// The log was once rewritten by the caller whose change was one too many, as that caller: as its
/// group, under its umask. All others waited until all names were written.
// proves: P40
#[test]
fn a_long_log_is_written_anew_by_the_server_a_few_names_at_a_time() {
    // SAFETY: geteuid cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("skipped: not root");
    }
    let site = Site::new();
    let table = site.table();
    let who = Identity { uid: Uid(1234), gid: Gid(2345), groups: [].into(), job: "".into() };
    cred::assume(&who, Some(0o777)).unwrap();
    let (one, other) = (name("one"), name("other"));
    table.seen(ROOT, one, &file(5), None);
    let mut len_bytes = 0;
    loop {
        for _ in 0..100 {
            table.renamed((ROOT, one), (ROOT, other), false);
            table.renamed((ROOT, other), (ROOT, one), false);
        }
        let now = cred::as_root(|| fs::metadata(&site.0.path).unwrap().len()).unwrap();
        if now < len_bytes {
            break;
        }
        len_bytes = now;
    }
    while table.shared().lock().rewriting {
        std::thread::yield_now();
    }
    cred::release().unwrap();
    let about = fs::metadata(&site.0.path).unwrap();
    let kept = (about.uid(), about.gid(), about.mode() & 0o7777);
    // SAFETY: getegid cannot fail.
    assert_eq!(kept, (0, unsafe { libc::getegid() }, 0o600));
    let handled_max = table.shared().lock().handled_max;
    assert!(handled_max > 0 && handled_max <= ENTRIES_AT_ONCE, "{handled_max} at once");
    assert!(site.after_death().content() == table.content());
}

// proves: P40
#[test]
fn what_cannot_be_written_anew_goes_on_as_it_is() {
    let site = Site::new();
    let table = site.table();
    // In the place of the next log is what cannot be removed as a file.
    fs::create_dir_all(site.0.next_path().join("in the way")).unwrap();
    assert!(super::rewrite(table.shared()).is_err());
    ended(table.shared(), Err(io::Error::other("a test")));
    change(&table, 1);
    assert!(site.after_death().content() == table.content());
    fs::remove_dir_all(site.0.next_path()).unwrap();
    super::rewrite(table.shared()).unwrap();
    change(&table, 2);
    assert!(site.after_death().content() == table.content());
}

#[test]
fn a_log_that_is_given_up_meanwhile_is_not_put_in_place() {
    let site = Site::new();
    let table = site.table();
    let mut rewrite = Rewrite::begin(table.shared()).unwrap();
    while rewrite.take_some(table.shared()).unwrap() {}
    rewrite.catch_up(table.shared()).unwrap();
    rewrite.put_in_place().unwrap();
    table.shared().lock().log = None;
    rewrite.switch(table.shared()).unwrap();
    assert!(!site.0.path.exists(), "it is behind from now on");
}
