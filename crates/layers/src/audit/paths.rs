//! Paths of files, asked for when a record is written, and remembered for those that follow.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use dray_core::{FileId, IdMap};

use super::codec::PATH_MAX_BYTES;
use super::kind::AuditKind;
use super::record::{AuditRecord, Text, joined};

/// Paths that are remembered at most.
const KNOWN_MAX: usize = 65_536;
/// A path is believed so long: others than this server may rename a directory.
const BELIEVED_US: u64 = 10_000_000;

/// Finds the path of a file, from the root of the export on. It may wait for the file system below.
pub type FindPath = Box<dyn FnMut(FileId) -> Option<Vec<u8>> + Send>;

/// What is known of paths.
pub(super) struct Paths {
    find: FindPath,
    known: IdMap<FileId, (Option<Text>, u64)>,
    by_path: BTreeMap<Text, FileId>,
}

/// The paths that belong to a record.
#[derive(Default)]
pub(super) struct Placed {
    pub(super) parent: Option<Text>,
    pub(super) to_parent: Option<Text>,
}

impl Paths {
    pub(super) fn new(find: FindPath) -> Paths {
        Paths { find, known: HashMap::default(), by_path: BTreeMap::new() }
    }

    /// Fills in the paths of a record.
    pub(super) fn place(&mut self, record: &mut AuditRecord) -> Placed {
        let now = record.time_us;
        let parent = record.parent.and_then(|id| self.of(id, now));
        let to_parent = record.to_parent.and_then(|id| self.of(id, now));
        let by_name =
            |dir: &Option<Text>, name: &Option<Text>| Some(joined(dir.as_ref()?, name.as_ref()?));
        let to_path = by_name(&to_parent, &record.to_name);
        record.path = match (&record.name, record.kind) {
            (Some(_), _) => by_name(&parent, &record.name),
            (None, AuditKind::Link) => to_path.clone(),
            (None, _) if record.parent.is_some() => None, // a file without a name
            (None, _) => record.id.and_then(|id| self.of(id, now)),
        };
        record.to_path = to_path;
        if record.error.is_none() {
            self.learn(record, now);
        }
        Placed { parent, to_parent }
    }

    /// What a change that was made says of paths.
    fn learn(&mut self, record: &AuditRecord, now: u64) {
        match (record.kind, &record.path, record.id) {
            (AuditKind::Create | AuditKind::Mkdir, Some(path), Some(id)) => {
                self.insert(id, Some(path.clone()), now);
            }
            (AuditKind::Unlink, Some(path), _) => self.forget_one(path), // nothing is beneath
            (AuditKind::Rmdir, Some(path), _) => self.forget(path),
            (AuditKind::Rename, Some(path), _) => {
                let moved = self.by_path.get(path).copied();
                self.forget(path);
                record.to_path.iter().for_each(|path| self.forget(path));
                if let Some(id) = record.id.or(moved) {
                    self.insert(id, record.to_path.clone(), now);
                }
            }
            (AuditKind::Rename, None, _) => self.clear(),
            _ => {}
        }
    }

    fn of(&mut self, id: FileId, now: u64) -> Option<Text> {
        if let Some((path, since)) = self.known.get(&id)
            && now.saturating_sub(*since) < BELIEVED_US
        {
            return path.clone();
        }
        let path = (self.find)(id).filter(|path| path.len() <= PATH_MAX_BYTES);
        let path: Option<Text> = path.map(Text::from);
        self.insert(id, path.clone(), now);
        path
    }

    fn insert(&mut self, id: FileId, path: Option<Text>, now: u64) {
        if self.known.len() >= KNOWN_MAX {
            self.clear();
        }
        if let Some(path) = &path {
            self.by_path.insert(path.clone(), id);
        }
        if let Some((Some(former), _)) = self.known.insert(id, (path.clone(), now))
            && Some(&former) != path.as_ref()
        {
            self.by_path.remove(&former);
        }
    }

    fn forget_one(&mut self, path: &Text) {
        if let Some(id) = self.by_path.remove(path) {
            self.known.remove(&id);
        }
    }

    /// Forgets a path and all beneath it.
    fn forget(&mut self, path: &Text) {
        self.forget_one(path);
        let beneath = joined(path, b"");
        let range = (Bound::Included(beneath.clone()), Bound::Unbounded);
        let all = self.by_path.range(range).take_while(|(one, _)| one.starts_with(&beneath));
        let all: Vec<(Text, FileId)> = all.map(|(path, id)| (path.clone(), *id)).collect();
        for (path, id) in all {
            self.by_path.remove(&path);
            self.known.remove(&id);
        }
    }

    fn clear(&mut self) {
        self.known.clear();
        self.by_path.clear();
    }
}
