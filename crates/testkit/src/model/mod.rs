//! The reference: a file system written to be obviously right.
//!
//! It answers what Linux answers, by the shortest way from the manual pages. It has whole files in
//! vectors, link counts by counting, "is it inside" by looking everywhere. It shares no code with
//! any backend. Its rules are checked against a real file system by the tests of this crate, so
//! that a disagreement tells who is wrong.

mod attributes;
mod files;
mod names;
mod node;

use std::collections::{BTreeMap, BTreeSet};

use dray_core::{Errno, FileType, Identity};

use crate::step::{self, Action, Path, SLOTS, Step};
use node::{ModelContent, ModelHandle, ModelNode};

/// What a step came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepOutcome {
    /// Success with nothing to tell.
    Done,
    /// This error.
    Failed(Errno),
    /// The slot is empty: there was nothing to do.
    NoSlot,
    /// Attributes.
    Stat(ModelStat),
    /// Data, a link's text, an attribute's value.
    Bytes(Vec<u8>),
    /// Bytes written or copied, or an offset.
    Count(u64),
    /// Names of a directory with their types.
    Names(BTreeMap<Vec<u8>, FileType>),
    /// Names of extended attributes.
    XattrNames(BTreeSet<Vec<u8>>),
}

/// The attributes that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelStat {
    /// Type and permissions.
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes; 0 for directories, whose size means nothing.
    pub size: u64,
    /// Last change of the content, seconds since 1970; none where it is whatever the
    /// clock said.
    pub mtime_sec: Option<i64>,
}

/// Where file systems, or the kernel above them, differ without being wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quirks {
    /// `fs.protected_hardlinks`: only the owner, or who may read and write a file, may
    /// link it.
    pub protected_hardlinks: bool,
    /// `fs.protected_regular`: open(2) with `O_CREAT` refuses somebody else's file in a
    /// sticky directory that all (1), or the group too (2), may write to.
    pub protected_regular: u8,
    /// Where a change of names fails for several reasons, rights may be the last to be looked at.
    /// The kernel above a mount compares kinds by itself, and leaves rights, those of sticky
    /// directories too, to the server. Without `default_permissions` FUSE has it no other way.
    pub rights_come_last: bool,
    /// Directories have one link, however many are in them (btrfs).
    pub directories_have_one_link: bool,
    /// A directory with something in it cannot be replaced: `EEXIST`, where others say
    /// `ENOTEMPTY` (xfs). POSIX has both.
    pub full_directories_are_eexist: bool,
    /// To punch a hole where there is one changes nothing, not even set-id bits (btrfs). The
    /// model knows no holes: nobody punches any here.
    pub punching_may_change_nothing: bool,
    /// A directory that changes places with something in another directory is modified itself
    /// (xfs: `xfs_cross_rename` in fs/xfs/xfs_inode.c), for its `..` is another one.
    pub exchanged_directories_are_modified: bool,
}

impl Quirks {
    /// Of a file system called directly, with no kernel above.
    pub const NONE: Quirks = Quirks {
        protected_hardlinks: false,
        protected_regular: 0,
        rights_come_last: false,
        directories_have_one_link: false,
        full_directories_are_eexist: false,
        punching_may_change_nothing: false,
        exchanged_directories_are_modified: false,
    };

    /// Of a directory of a bare file system under this machine's kernel, from
    /// `/proc/sys/fs`.
    pub fn kernel() -> Quirks {
        let level = |name: &str| {
            let text = std::fs::read_to_string(format!("/proc/sys/fs/{name}"));
            text.ok().and_then(|text| text.trim().parse::<u8>().ok()).unwrap_or(0)
        };
        Quirks {
            protected_hardlinks: level("protected_hardlinks") > 0,
            protected_regular: level("protected_regular"),
            ..Quirks::NONE
        }
    }

    /// Of a directory served by this machine but called without a kernel above. A server links
    /// under its kernel's eyes, and opens what exists without `O_CREAT`.
    pub fn served() -> Quirks {
        Quirks { protected_regular: 0, ..Quirks::kernel() }
    }

    /// These and those of btrfs.
    pub fn on_btrfs(self) -> Quirks {
        Quirks { directories_have_one_link: true, punching_may_change_nothing: true, ..self }
    }

    /// These and those of xfs.
    pub fn on_xfs(self) -> Quirks {
        Quirks {
            full_directories_are_eexist: true,
            exchanged_directories_are_modified: true,
            ..self
        }
    }

    /// Of a mount, under `strict`, of a directory served by this machine.
    pub fn mounted() -> Quirks {
        Quirks { rights_come_last: true, ..Quirks::served() }
    }
}

type Answer = Result<StepOutcome, Errno>;

const ROOT: u64 = 1;
const READ: u32 = 4;
const WRITE: u32 = 2;
const EXECUTE: u32 = 1;

/// The model file system. Its root directory is open to all (mode 0777).
pub struct Model {
    nodes: BTreeMap<u64, ModelNode>,
    slots: [Option<ModelHandle>; SLOTS],
    quirks: Quirks,
}

impl Model {
    /// An empty one.
    pub fn new(quirks: Quirks) -> Model {
        let root =
            ModelNode::new(libc::S_IFDIR | 0o777, 0, 0, ModelContent::Directory(BTreeMap::new()));
        Model { nodes: BTreeMap::from([(ROOT, root)]), slots: [None; SLOTS], quirks }
    }

    /// Carries out a step.
    pub fn apply(&mut self, step: &Step) -> StepOutcome {
        let who = step::identity(step.who);
        self.run(&who, &step.action).unwrap_or_else(StepOutcome::Failed)
    }

    fn run(&mut self, who: &Identity, action: &Action) -> Answer {
        match action {
            Action::Mkdir { path, mode } => self.mkdir(who, path, *mode),
            Action::Mknod { path, mode } => self.mknod(who, path, *mode),
            Action::Symlink { path, target } => self.symlink(who, path, *target),
            Action::Link { from, to } => {
                let ino = self.walk(who, from, false)?;
                self.link(who, ino, to)
            }
            Action::LinkSlot { slot, to } => match self.slot(*slot) {
                Some(opened) => self.link(who, opened.ino, to),
                None => Ok(StepOutcome::NoSlot),
            },
            Action::Unlink { path } => self.remove(who, path, false),
            Action::Rmdir { path } => self.remove(who, path, true),
            Action::Rename { from, to, how } => self.rename(who, from, to, *how),
            Action::List { path } => self.list(who, path),
            Action::Readlink { path } => self.readlink(who, path),
            Action::Open { path, flags, slot } => self.open(who, path, *flags, *slot),
            Action::Create { path, flags, mode, exclusive, slot } => {
                self.create(who, path, (*flags, *mode, *exclusive), *slot)
            }
            Action::Tmpfile { dir, mode, slot } => self.tmpfile(who, dir, *mode, *slot),
            Action::Close { .. }
            | Action::Read { .. }
            | Action::Write { .. }
            | Action::Fsync { .. }
            | Action::Fstat { .. }
            | Action::Ftruncate { .. }
            | Action::Fallocate { .. }
            | Action::Seek { .. }
            | Action::CopyRange { .. } => self.run_on_slot(who, action),
            _ => self.run_on_attributes(who, action),
        }
    }

    /// Whether the model cannot say what `action` leads to.
    pub fn leaves_out(&self, action: &Action) -> bool {
        let punches = matches!(action, Action::Fallocate { flags, .. }
            if flags & libc::FALLOC_FL_PUNCH_HOLE != 0);
        punches && self.quirks.punching_may_change_nothing
    }

    /// Whether the target may fail `action` with `actual` where the model fails it with
    /// `expected`.
    pub fn failure_allowed(&self, action: &Action, expected: Errno, actual: Errno) -> bool {
        if expected == actual {
            return true;
        }
        if self.quirks.full_directories_are_eexist
            && matches!(action, Action::Rename { .. })
            && (expected, actual) == (Errno::ENOTEMPTY, Errno::EEXIST)
        {
            return true;
        }
        let of_rights = expected == Errno::EACCES || expected == Errno::EPERM;
        if !of_rights || !self.quirks.rights_come_last {
            return false;
        }
        // What Linux looks at in the meantime (fs/namei.c).
        match action {
            Action::Unlink { .. } => actual == Errno::EISDIR,
            Action::Rmdir { .. } => actual == Errno::ENOTDIR,
            // Kinds; and the second path, where the first ends in a directory that may not be
            // searched.
            Action::Rename { .. } => {
                [Errno::EISDIR, Errno::ENOTDIR, Errno::ENOENT].contains(&actual)
            }
            // The file has lost its last name, or is a directory.
            Action::Link { .. } | Action::LinkSlot { .. } => {
                [Errno::ENOENT, Errno::EPERM].contains(&actual)
            }
            _ => false,
        }
    }

    /// Every path that leads to something, the directories' own among them, the root
    /// first. Names are the pool's.
    pub fn paths(&self) -> Vec<(Path, FileType)> {
        let mut found = vec![(Path::new(), FileType::Directory)];
        let mut next = 0;
        while let Some((path, _)) = found.get(next).cloned() {
            next += 1;
            let ino = path.iter().try_fold(ROOT, |at, &part| self.child(at, &step::name(part)));
            let Some(ModelContent::Directory(names)) = ino.map(|ino| &self.nodes[&ino].kind) else {
                continue;
            };
            for (name, ino) in names {
                let number = (0..7).find(|&number| step::name(number) == *name);
                let mut path = path.clone();
                path.extend(number);
                found.push((path, self.nodes[ino].file_type()));
            }
        }
        found
    }

    /// Whether `answer` is one that lseek(2) may give: file systems are free to call
    /// zeros a hole or data.
    pub fn seek_allowed(&self, slot: u8, at: u64, hole: bool, answer: &StepOutcome) -> bool {
        let Some(ModelContent::File(content)) =
            self.slot(slot).map(|open| &self.nodes[&open.ino].kind)
        else {
            return true; // a directory: every file system has its own answer
        };
        let size = content.len() as u64;
        let zeros =
            |from: u64, to: u64| content[from as usize..to as usize].iter().all(|&b| b == 0);
        match answer {
            StepOutcome::Failed(errno) if *errno == Errno::ENXIO => {
                at >= size || !hole && zeros(at, size)
            }
            StepOutcome::Count(found) if *found < at || *found > size || at >= size => false,
            StepOutcome::Count(found) if hole => *found == size || zeros(*found, *found + 1),
            StepOutcome::Count(found) => *found < size && zeros(at, *found),
            _ => false,
        }
    }
}
