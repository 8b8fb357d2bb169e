//! Which data of a file are at no disk.
//!
//! An object is made with the first byte that its disk gets. So a hole over all blocks of a disk leaves no
//! object there, and looks like a loss. What is left of the file tells which of the two is likely.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;

use dray_layers::placement::ObjectId;

use super::{TargetDisks, shown};
use crate::error::{ErrorContext, Failure};

/// Units of `st_blocks`, as stat(2) says.
const SECTOR_BYTES: u64 = 512;

/// What is not there of a file that has an id.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Absence {
    /// No disk has an object. The home gives an id only to who is about to write.
    Everything,
    /// These disks, by their numbers, have no object, and blocks of theirs are within the file's size.
    Parts {
        targets: Vec<usize>,
        /// The rest of the file has no such holes, so that this one is likely to be none.
        is_likely_lost: bool,
    },
}

impl Absence {
    /// Whether data are lost, as far as that can be said.
    pub(super) fn is_damage(&self) -> bool {
        match self {
            Absence::Everything => true,
            Absence::Parts { is_likely_lost, .. } => *is_likely_lost,
        }
    }

    /// For a person, behind the name of the file.
    pub(super) fn text(&self, disks: &TargetDisks) -> String {
        match self {
            Absence::Everything => {
                "its data are at no disk: they are lost, or were never written".to_owned()
            }
            Absence::Parts { targets, is_likely_lost } => {
                let servers = |target: &usize| disks.definition.servers[*target].as_str();
                let servers = targets.iter().map(servers).collect::<Vec<_>>().join(" and ");
                match is_likely_lost {
                    true => format!(
                        "{servers} has no data of it: they are lost, since the rest is dense"
                    ),
                    false => {
                        format!("{servers} has no data of it: a hole in a sparse file, or a loss")
                    }
                }
            }
        }
    }
}

impl TargetDisks {
    /// None: all is there, as far as that can be said. Errors: those of stat(2) but `ENOENT`.
    pub(super) fn absence(&self, object: ObjectId) -> Result<Option<Absence>, Failure> {
        let (mut size, mut stored_bytes) = (0, 0_u64);
        let (mut present, mut absent) = (0_u64, Vec::new());
        // Targets by their first block, each once.
        let mut targets: Vec<(u64, usize)> = Vec::new();
        for (block, target) in (0..).zip(self.targets_of(object)) {
            if targets.iter().all(|(_, known)| *known != target) {
                targets.push((block, target));
            }
        }
        for (block, target) in targets {
            let path = self.object_path(target, object);
            match fs::symlink_metadata(&path) {
                Ok(seen) => {
                    present += 1;
                    size = size.max(seen.len());
                    stored_bytes = stored_bytes.saturating_add(seen.blocks() * SECTOR_BYTES);
                }
                Err(error) if error.kind() == ErrorKind::NotFound => absent.push((block, target)),
                Err(error) => return Err(error).doing(|| shown(&path)),
            }
        }
        if present == 0 {
            return Ok(Some(Absence::Everything));
        }
        let count = present + absent.len() as u64;
        let within = |(block, _): &(u64, usize)| {
            u128::from(*block) * u128::from(self.placement.stripe_bytes()) < u128::from(size)
        };
        let lacking: Vec<usize> =
            absent.iter().filter(|one| within(one)).map(|(_, target)| *target).collect();
        if lacking.is_empty() {
            return Ok(None);
        }
        // The present ones have at least half of what they would have without any hole.
        let dense_bytes = u128::from(size) * u128::from(present) / u128::from(count);
        let is_likely_lost = u128::from(stored_bytes) * 2 >= dense_bytes;
        Ok(Some(Absence::Parts { targets: lacking, is_likely_lost }))
    }
}
