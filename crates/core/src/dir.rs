//! A page of directory entries.

use crate::{Attr, FileId, FileType};

/// An entry of a [`DirPage`]; its name is kept in the page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// Identity; where the listing was made without attributes the generation may be 0.
    pub id: FileId,
    /// Type, where the file system tells.
    pub kind: Option<FileType>,
    /// Position of the *next* entry: pass it to go on behind this one.
    pub cookie: u64,
    /// Attributes, if they were asked for and could be had.
    pub attr: Option<Attr>,
    name_at: u32,
    name_len: u16,
}

/// Entries of a directory from some position on. `.` and `..` are never in it:
/// a front end that needs them makes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirPage {
    entries: Vec<DirEntry>,
    names: Vec<u8>,
    /// No entries follow the last one.
    pub end: bool,
}

impl DirPage {
    /// Adds an entry. A name over 65,535 bytes is not a name and is left out.
    pub fn push(
        &mut self,
        name: &[u8],
        id: FileId,
        kind: Option<FileType>,
        cookie: u64,
        attr: Option<Attr>,
    ) {
        let (Ok(name_len), Ok(name_at)) =
            (u16::try_from(name.len()), u32::try_from(self.names.len()))
        else {
            return;
        };
        self.names.extend_from_slice(name);
        self.entries.push(DirEntry { id, kind, cookie, attr, name_at, name_len });
    }

    /// Replaces the attributes of the `index`th entry. Without such an entry nothing happens.
    pub fn set_attr(&mut self, index: usize, attr: Option<Attr>) {
        if let Some(entry) = self.entries.get_mut(index) {
            entry.attr = attr;
        }
    }

    /// Entries with their names, in the directory's order.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &DirEntry)> {
        self.entries.iter().map(|entry| (self.name(entry), entry))
    }

    /// The `index`th entry and its name.
    pub fn get(&self, index: usize) -> Option<(&[u8], &DirEntry)> {
        self.entries.get(index).map(|entry| (self.name(entry), entry))
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn name(&self, entry: &DirEntry) -> &[u8] {
        let at = entry.name_at as usize;
        &self.names[at..at + entry.name_len as usize]
    }
}
