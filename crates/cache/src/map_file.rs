//! The map of an entry: a small file beside its data that says which blocks are there.
//!
//! A map is replaced as a whole, after the data that it speaks of are on media. So after any crash it names
//! no block whose data are not there.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use dray_core::{FileId, FsUuid, Timestamp};

use crate::blocks::{BlockSet, blocks_of};
use crate::key::{EntryKey, FileVersion};

const MAGIC: &[u8; 8] = b"DRAYMAP1";
const HEAD_BYTES: usize = 8 + 16 + 16 + 40 + 8;
const HASH_BYTES: usize = 32;
/// Largest map: of a file of 64 TiB.
const MAP_MAX_BYTES: u64 = 128 << 20;

/// What a map says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryMap {
    /// The version of the file.
    pub key: EntryKey,
    /// Eviction leaves it alone.
    pub pinned: bool,
    pub(crate) blocks: BlockSet,
}

impl EntryMap {
    /// Bytes that are resident; the last block may be shorter.
    pub fn resident_bytes(&self) -> u64 {
        (self.blocks.count() * crate::BLOCK_BYTES).min(self.key.version.size)
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.blocks.words().len() * 8 + HASH_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(self.key.fs.0.to_le_bytes());
        bytes.extend(self.key.id.ino.to_le_bytes());
        bytes.extend(self.key.id.generation.to_le_bytes());
        bytes.extend(self.key.version.to_bytes());
        bytes.extend(u64::from(self.pinned).to_le_bytes());
        self.blocks.words().iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        let hash = blake3::hash(&bytes);
        bytes.extend(hash.as_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<EntryMap> {
        let (bytes, hash) = bytes.split_at_checked(bytes.len().checked_sub(HASH_BYTES)?)?;
        if bytes.len() < HEAD_BYTES || blake3::hash(bytes).as_bytes() != hash {
            return None;
        }
        let (head, words) = bytes.split_at(HEAD_BYTES);
        let (magic, head) = head.split_at(8);
        let (fs, numbers) = head.split_at(16);
        let (numbers, _) = numbers.as_chunks::<8>();
        let number = |index: usize| u64::from_le_bytes(numbers[index]);
        let time =
            |index: usize| Timestamp { sec: number(index) as i64, nsec: number(index + 1) as u32 };
        let version = FileVersion { size: number(2), mtime: time(3), ctime: time(5) };
        let key = EntryKey {
            fs: FsUuid(u128::from_le_bytes(fs.try_into().ok()?)),
            id: FileId { ino: number(0), generation: number(1) },
            version,
        };
        let (words, rest) = words.as_chunks::<8>();
        let words = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let blocks = BlockSet::from_words(words, blocks_of(version.size))?;
        let is_whole = magic == MAGIC && rest.is_empty();
        is_whole.then_some(EntryMap { key, pinned: number(7) != 0, blocks })
    }

    /// Reads a map. None: there is none, or none that is whole.
    pub(crate) fn read(path: &Path) -> io::Result<Option<EntryMap>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(MAP_MAX_BYTES).read_to_end(&mut bytes)?;
        Ok(EntryMap::from_bytes(&bytes))
    }

    /// Replaces the map in one step. Errors: those of the local disk.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let new = path.with_extension(format!("new-{}", std::process::id()));
        let written = (|| {
            let mut file =
                File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
            file.write_all(&self.to_bytes())?;
            file.sync_data()?;
            fs::rename(&new, path)
        })();
        if written.is_err() {
            let _ = fs::remove_file(&new); // as far as it was made
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use dray_core::Attr;

    use super::*;

    #[test]
    fn a_map_is_what_was_written_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.map");
        let version = FileVersion::of(&Attr {
            size: 10 << 20,
            mtime: Timestamp { sec: -1, nsec: 5 },
            ..Attr::default()
        });
        let key = EntryKey { fs: FsUuid(3), id: FileId { ino: 1, generation: 2 }, version };
        let mut map = EntryMap { key, pinned: true, blocks: BlockSet::default() };
        map.blocks.insert(159);
        assert_eq!(EntryMap::read(&path).unwrap(), None);
        map.write(&path).unwrap();
        assert_eq!(EntryMap::read(&path).unwrap(), Some(map.clone()));
        let bytes = fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            let mut torn = bytes.clone();
            torn[at] ^= 1;
            assert_eq!(EntryMap::from_bytes(&torn), None, "{at}");
            assert_eq!(EntryMap::from_bytes(&bytes[..at]), None);
        }
    }
}
