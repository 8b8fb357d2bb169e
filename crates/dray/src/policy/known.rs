//! What a policy knows of the files of an export: what the log has said of them, and what a scan found.
//!
//! It is a file of JSON lines, replaced as a whole. Bookmarks are in it, too: what is known is always
//! what the log says up to them.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::ops::Bound;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use dray_layers::audit::{AuditKind, AuditRecord, Text};
use serde::{Deserialize, Serialize};

/// Files that are known at most, of some 200 bytes of memory each.
pub const FILES_MAX: usize = 10_000_000;
/// A file that has been absent for so long is forgotten: records are in the log long before, microseconds.
pub const ABSENT_MAX_US: u64 = 60_000_000;

/// A file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KnownFile {
    /// When it was changed last, microseconds since 1970.
    pub changed_us: u64,
    /// When it was opened, changed or closed last.
    pub used_us: u64,
    /// Since when no file is at its path; 0: there is one, as far as is known.
    pub absent_us: u64,
}

/// How far a log was read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyBookmark {
    /// Which log, in hexadecimal digits; empty: it was empty.
    pub log: String,
    /// The next record.
    pub next_index: u64,
}

/// The first line.
#[derive(Default, Serialize, Deserialize)]
struct Head {
    /// By server; of this machine's log the name is empty.
    bookmarks: BTreeMap<String, PolicyBookmark>,
}

/// A line for a file. A path that is no UTF-8 comes in hexadecimal digits.
#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hex: Option<String>,
    changed_us: u64,
    used_us: u64,
    #[serde(default)]
    absent_us: u64,
}

/// All that is known.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct KnownFiles {
    pub bookmarks: BTreeMap<String, PolicyBookmark>,
    pub files: BTreeMap<Text, KnownFile>,
    /// Records that are missing in the log, since this was read.
    pub missing: u64,
    /// Files that were not taken in, since there are too many.
    pub left_out: u64,
}

impl KnownFiles {
    /// Reads what was kept; nothing was, if there is no file. Errors: it cannot be read, or is broken.
    pub fn load(path: &Path) -> io::Result<KnownFiles> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(KnownFiles::default());
            }
            file => file?,
        };
        let mut lines = BufReader::new(file).lines();
        let broken = |error: serde_json::Error| {
            io::Error::other(format!("{}: {error}; remove it, and scan anew", path.display()))
        };
        let head = lines.next().transpose()?.unwrap_or_default();
        let Head { bookmarks } = serde_json::from_str(&head).map_err(broken)?;
        let mut known = KnownFiles { bookmarks, ..KnownFiles::default() };
        for line in lines {
            let Line { path, hex, changed_us, used_us, absent_us } =
                serde_json::from_str(&line?).map_err(broken)?;
            let bytes = match (path, hex) {
                (Some(path), _) => path.into_bytes(),
                (None, hex) => unhex(&hex.unwrap_or_default()),
            };
            known.insert(bytes.into(), KnownFile { changed_us, used_us, absent_us });
        }
        Ok(known)
    }

    /// Keeps it, durably. Errors: those of the files.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let dir = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(dir)?;
        let new = path.with_extension("new");
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(true).write(true).mode(0o600).open(&new)?;
        let mut out = BufWriter::new(file);
        serde_json::to_writer(&mut out, &Head { bookmarks: self.bookmarks.clone() })?;
        out.write_all(b"\n")?;
        for (path, file) in &self.files {
            let KnownFile { changed_us, used_us, absent_us } = *file;
            let text = std::str::from_utf8(path).ok().map(str::to_owned);
            let hex =
                text.is_none().then(|| path.iter().map(|byte| format!("{byte:02x}")).collect());
            let line = Line { path: text, hex, changed_us, used_us, absent_us };
            serde_json::to_writer(&mut out, &line)?;
            out.write_all(b"\n")?;
        }
        out.into_inner().map_err(|error| error.into_error())?.sync_all()?;
        fs::rename(&new, path)?;
        File::open(dir)?.sync_all()
    }

    /// Takes a file in, if there are not too many.
    pub fn insert(&mut self, path: Text, file: KnownFile) {
        match self.files.len() >= FILES_MAX && !self.files.contains_key(&path) {
            true => self.left_out += 1,
            false => drop(self.files.insert(path, file)),
        }
    }

    /// Takes in a file as it is; what the log has said of later times stays.
    pub fn see(&mut self, path: Text, seen: KnownFile) {
        let known = self.files.get(&path).copied().unwrap_or_default();
        let (changed_us, used_us) =
            (seen.changed_us.max(known.changed_us), seen.used_us.max(known.used_us));
        self.insert(path, KnownFile { changed_us, used_us, absent_us: 0 });
    }

    /// There is no file at this path now. The log may be behind: the record of a rename, which says where
    /// the file is, can still come. So the file is forgotten after [`ABSENT_MAX_US`] only.
    pub fn absent(&mut self, path: &Text, now_us: u64) {
        let Some(file) = self.files.get_mut(path) else { return };
        if file.absent_us == 0 {
            file.absent_us = now_us;
        } else if now_us.saturating_sub(file.absent_us) >= ABSENT_MAX_US {
            self.files.remove(path);
        }
    }

    /// Takes in what a record says.
    pub fn learn(&mut self, record: &AuditRecord) {
        if let Some(gap) = &record.gap {
            self.missing += gap.records.max(1);
        }
        let (Some(path), None) = (&record.path, record.error) else { return };
        let now_us = record.time_us;
        match record.kind {
            AuditKind::Create | AuditKind::Mknod => {
                let file = KnownFile { changed_us: now_us, used_us: now_us, absent_us: 0 };
                self.insert(path.clone(), file);
            }
            AuditKind::Link => {
                if let Some(to_path) = &record.to_path {
                    self.touch(to_path, now_us, false);
                }
            }
            AuditKind::Unlink | AuditKind::Rmdir => self.forget(path),
            AuditKind::Rename => self.rename(path, record.to_path.as_ref()),
            AuditKind::Open => self.touch(path, now_us, false),
            AuditKind::Close => {
                let wrote = record.totals.is_some_and(|totals| totals.writes > 0);
                self.touch(path, now_us, wrote);
            }
            AuditKind::Chmod
            | AuditKind::Chown
            | AuditKind::Times
            | AuditKind::Setxattr
            | AuditKind::Removexattr
            | AuditKind::Flags => self.touch(path, now_us, false),
            AuditKind::Truncate | AuditKind::Fallocate | AuditKind::Copy => {
                self.touch(path, now_us, true);
            }
            // Directories and symbolic links are no files here, and the others change nothing.
            AuditKind::Mkdir
            | AuditKind::Symlink
            | AuditKind::Gap
            | AuditKind::Start
            | AuditKind::Lookup
            | AuditKind::Getattr
            | AuditKind::Access
            | AuditKind::Read
            | AuditKind::Write
            | AuditKind::Readlink
            | AuditKind::Readdir
            | AuditKind::Getxattr
            | AuditKind::Listxattr
            | AuditKind::Lock
            | AuditKind::Other => {}
        }
    }

    fn touch(&mut self, path: &Text, now_us: u64, is_change: bool) {
        let known = self.files.get(path).copied().unwrap_or_default();
        let changed_us = if is_change { now_us } else { known.changed_us };
        let used_us = known.used_us.max(now_us);
        self.insert(path.clone(), KnownFile { changed_us, used_us, absent_us: 0 });
    }

    /// Forgets a file, or a directory and all beneath it.
    fn forget(&mut self, path: &Text) {
        self.files.remove(path);
        drop(self.take_beneath(path));
    }

    fn rename(&mut self, from: &Text, to: Option<&Text>) {
        let one = self.files.remove(from);
        let beneath = self.take_beneath(from);
        let Some(to) = to else { return };
        self.forget(to);
        let moved = |file| KnownFile { absent_us: 0, ..file };
        one.into_iter().for_each(|file| self.insert(to.clone(), moved(file)));
        for (path, file) in beneath {
            self.insert([&**to, &path[from.len()..]].concat().into(), moved(file));
        }
    }

    fn take_beneath(&mut self, dir: &Text) -> Vec<(Text, KnownFile)> {
        let begin: Text = [&**dir, &b"/"[..]].concat().into();
        let range = (Bound::Included(begin.clone()), Bound::Unbounded);
        let all = self.files.range(range).take_while(|(path, _)| path.starts_with(&begin));
        let all: Vec<_> = all.map(|(path, file)| (path.clone(), *file)).collect();
        for (path, _) in &all {
            self.files.remove(path);
        }
        all
    }
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    text.as_bytes().chunks(2).filter_map(digit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Option<Text> {
        Some(Text::from(text.as_bytes()))
    }

    fn record(kind: AuditKind, time_us: u64, path: &str) -> AuditRecord {
        AuditRecord { path: text(path), ..AuditRecord::new(kind, time_us) }
    }

    // proves: P210
    #[test]
    fn a_file_whose_rename_is_not_in_the_log_yet_is_not_forgotten() {
        let mut known = KnownFiles::default();
        known.learn(&record(AuditKind::Create, 1, "/e"));
        let (absent, moved): (Text, Text) = (b"/e"[..].into(), b"/f"[..].into());
        known.absent(&absent, 100);
        known.absent(&absent, 100 + ABSENT_MAX_US - 1);
        let rename =
            AuditRecord { to_path: Some(moved.clone()), ..record(AuditKind::Rename, 2, "/e") };
        known.learn(&rename);
        assert_eq!(
            known.files.get(&moved).map(|file| (file.changed_us, file.absent_us)),
            Some((1, 0))
        );
        known.absent(&moved, 200);
        known.absent(&moved, 200 + ABSENT_MAX_US);
        assert!(known.files.is_empty(), "{:?}", known.files);
    }

    #[test]
    fn what_records_say_of_files_is_known_and_kept() {
        let mut known = KnownFiles::default();
        for (time_us, path) in [(1, "/d/a"), (2, "/d/b"), (3, "/d2"), (4, "/e")] {
            known.learn(&record(AuditKind::Create, time_us, path));
        }
        known.learn(&record(AuditKind::Open, 9, "/d/a"));
        known.learn(&AuditRecord { to_path: text("/new"), ..record(AuditKind::Rename, 10, "/d") });
        known.learn(&record(AuditKind::Unlink, 11, "/e"));
        known.learn(&AuditRecord {
            error: Some(dray_core::Errno::EACCES),
            ..record(AuditKind::Unlink, 11, "/new/a")
        });
        known.learn(&AuditRecord::gap(12, 5, "lost"));
        let all: Vec<_> = known.files.iter().map(|(path, file)| (&**path, *file)).collect();
        let file = |changed_us, used_us| KnownFile { changed_us, used_us, absent_us: 0 };
        let wanted: [(&[u8], KnownFile); 3] =
            [(b"/d2", file(3, 3)), (b"/new/a", file(1, 9)), (b"/new/b", file(2, 2))];
        assert_eq!((all, known.missing), (wanted.to_vec(), 5));
        known.insert(Text::from(&b"/\xff"[..]), file(1, 2));
        let bookmark = PolicyBookmark { log: "ab".into(), next_index: 7 };
        known.bookmarks.insert(String::new(), bookmark);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("policy/old.json");
        known.save(&path).unwrap();
        known.missing = 0; // that was said once
        assert_eq!(KnownFiles::load(&path).unwrap(), known);
        fs::write(&path, "{}\n").unwrap();
        assert!(KnownFiles::load(&path).is_err());
    }
}
