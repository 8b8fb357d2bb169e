//! Which file an entry is of, and in which version.

use dray_core::{Attr, FileId, FsUuid, Timestamp};

/// A content of a file, as its size and times name it. Only a version whose times are past is kept: then
/// each later change gives the file other times ([`Attr::is_past`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileVersion {
    /// Bytes.
    pub size: u64,
    /// Time of the last change of content.
    pub mtime: Timestamp,
    /// Time of the last change.
    pub ctime: Timestamp,
}

impl FileVersion {
    /// The version of a file with these attributes.
    pub fn of(attr: &Attr) -> FileVersion {
        FileVersion { size: attr.size, mtime: attr.mtime, ctime: attr.ctime }
    }

    pub(crate) fn to_bytes(self) -> [u8; 40] {
        let mut bytes = [0; 40];
        let numbers = [
            self.size,
            self.mtime.sec as u64,
            u64::from(self.mtime.nsec),
            self.ctime.sec as u64,
            u64::from(self.ctime.nsec),
        ];
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }
}

/// A version of a file of some file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EntryKey {
    /// The file system, as its server names it.
    pub fs: FsUuid,
    /// The file.
    pub id: FileId,
    /// The content of the file.
    pub version: FileVersion,
}

impl EntryKey {
    /// The directory of all entries of this file system.
    pub(crate) fn directory(&self) -> String {
        format!("{:032x}", self.fs.0)
    }

    /// The name of the entry's files, without their endings.
    pub(crate) fn name(&self) -> String {
        let version = blake3::hash(&self.version.to_bytes());
        let version: String = version.as_bytes()[..8].iter().map(|b| format!("{b:02x}")).collect();
        format!("{:016x}-{:016x}-{version}", self.id.ino, self.id.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_have_names_of_their_own() {
        let version = FileVersion { size: 1, ..FileVersion::of(&Attr::default()) };
        let key = |version| EntryKey {
            fs: FsUuid(7),
            id: FileId { ino: 0x1234, generation: 5 },
            version,
        };
        let other = FileVersion { size: 2, ..version };
        assert_ne!(key(version).name(), key(other).name());
        assert!(key(version).name().starts_with("0000000000001234-0000000000000005-"));
        assert_eq!(key(version).directory(), "0".repeat(31) + "7");
    }
}
