//! Numbers for what is remembered.

use std::hash::{BuildHasher, Hasher};

use dray_core::{FileId, IdHash};

/// A hash of the question. The secret of this process is in it, so that nobody can choose what falls
/// together. Two questions of one number are answered one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AnswerKey(pub(super) u64);

impl AnswerKey {
    /// For the attributes of a file.
    pub(super) fn of_attributes(id: FileId) -> AnswerKey {
        AnswerKey(hasher(id).finish())
    }

    /// For a name in a directory.
    pub(super) fn of_name(dir: FileId, name: &[u8]) -> AnswerKey {
        let mut hasher = hasher(dir);
        hasher.write(name);
        AnswerKey(hasher.finish())
    }
}

fn hasher(id: FileId) -> impl Hasher {
    let mut hasher = IdHash::default().build_hasher();
    hasher.write_u64(id.ino);
    hasher.write_u64(id.generation);
    hasher
}
