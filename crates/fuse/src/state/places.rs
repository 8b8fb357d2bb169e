//! Where files were last seen: for people who ask what is going on.
//!
//! A name is noted when the kernel is told of a file by it. Renames by other mounts are seen
//! at the next lookup, so that a place is what the kernel believes, not a promise.

use dray_core::{FileId, Name};

/// The root's slot.
const ROOT: u64 = 0;
/// Directories above a file that are followed. Those of renames elsewhere may seem to form a
/// circle.
const DEPTH_MAX: usize = 256;

/// Directory and name by slot of the node table. Names of slots that are used again use
/// their memory again.
#[derive(Default)]
pub(crate) struct Places(Vec<Place>);

#[derive(Clone, Default)]
struct Place {
    dir: Option<FileId>,
    name: Vec<u8>,
}

impl Places {
    /// The file of `slot` was found as `place`, if it has one.
    pub(crate) fn seen(&mut self, slot: u64, place: Option<(FileId, &Name)>) {
        let Some((dir, name)) = place else { return };
        let index = slot as usize;
        if self.0.len() <= index {
            self.0.resize(index + 1, Place::default());
        }
        let place = &mut self.0[index];
        place.dir = Some(dir);
        if place.name != name.as_bytes() {
            place.name.clear();
            place.name.extend_from_slice(name.as_bytes());
        }
    }

    /// Whatever was in `slot` is gone.
    pub(crate) fn forget(&mut self, slot: u64) {
        if let Some(place) = self.0.get_mut(slot as usize) {
            place.dir = None;
        }
    }

    /// The path of `slot`; `slot_of` knows the slots of directories.
    pub(crate) fn path(
        &self,
        slot: u64,
        slot_of: impl Fn(FileId) -> Option<u64>,
    ) -> Option<Vec<u8>> {
        if slot == ROOT {
            return Some(b"/".to_vec());
        }
        let mut names: Vec<&[u8]> = Vec::new();
        let mut slot = slot;
        while slot != ROOT {
            let place = self.0.get(slot as usize)?;
            names.push(&place.name);
            slot = slot_of(place.dir?)?;
            if names.len() > DEPTH_MAX {
                return None;
            }
        }
        let parts = names.iter().rev().flat_map(|name| [b"/".as_slice(), name]);
        Some(parts.flatten().copied().collect())
    }
}
