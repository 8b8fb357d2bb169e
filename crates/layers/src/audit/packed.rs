//! Records on their way to another machine: those that somebody wants, which need not follow each other.

use super::codec::Codec;
use super::record::{AuditRecord, Text};
use super::segment::Corruption;
use super::varint::{RecordInput, put};

/// Records of one pack, at most: a pack of few bytes can be many records. The packer keeps to it.
pub const PACK_RECORDS_MAX: usize = 4096;

/// Paths of the records of a pack, bytes: names of the tables can be short for long paths.
const PATHS_MAX_BYTES: usize = 64 << 20;

/// Records that are encoded as those of a segment are, with a number before each.
pub struct RecordPack {
    codec: Codec,
    bytes: Vec<u8>,
    next_index: u64,
}

impl Default for RecordPack {
    fn default() -> RecordPack {
        RecordPack { codec: Codec::new(), bytes: Vec::new(), next_index: 0 }
    }
}

/// The directory that a path and the last name in it give.
fn parent_of(path: Option<&Text>, name: Option<&Text>) -> Option<Text> {
    let above = path?.strip_suffix(&**name?)?.strip_suffix(b"/")?;
    Some(if above.is_empty() { Text::from(&b"/"[..]) } else { above.into() })
}

impl RecordPack {
    /// Adds a record. Records come in the order of their numbers.
    pub fn put(&mut self, record: &AuditRecord) {
        put(&mut self.bytes, record.index.wrapping_sub(self.next_index));
        self.next_index = record.index.wrapping_add(1);
        let parent = parent_of(record.path.as_ref(), record.name.as_ref());
        let to_parent = parent_of(record.to_path.as_ref(), record.to_name.as_ref());
        self.codec.put(record, (parent.as_ref(), to_parent.as_ref()), &mut self.bytes);
    }

    /// The bytes to be sent; none: it has no records.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// The records of a pack. Errors: nobody has made it so.
pub fn unpack(bytes: &[u8]) -> Result<Vec<AuditRecord>, Corruption> {
    let (mut codec, mut input, mut all, mut next) =
        (Codec::new(), RecordInput(bytes), Vec::new(), 0u64);
    let mut paths_bytes = 0;
    while !input.0.is_empty() {
        if all.len() >= PACK_RECORDS_MAX || paths_bytes > PATHS_MAX_BYTES {
            return Err(Corruption("more records than a pack has"));
        }
        let index = next.wrapping_add(input.number()?);
        let record = codec.get(index, &mut input)?;
        let paths = [&record.path, &record.to_path];
        paths_bytes += paths.into_iter().flatten().map(|path| path.len()).sum::<usize>();
        all.push(record);
        next = index.wrapping_add(1);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::AuditKind;
    use dray_core::{Errno, FileId};

    fn text(text: &str) -> Option<Text> {
        Some(Text::from(text.as_bytes()))
    }

    #[test]
    fn records_arrive_as_they_were_and_what_is_no_pack_is_refused() {
        let id = |ino| Some(FileId { ino, generation: 1 });
        let mut create = AuditRecord::new(AuditKind::Create, 1_000);
        create = AuditRecord {
            index: 7,
            id: id(12),
            parent: id(2),
            name: text("a"),
            path: text("/a"),
            ..create
        };
        let unlink = AuditRecord {
            index: 9,
            parent: id(5),
            name: text("b"),
            path: text("/d/b"),
            error: Some(Errno::EACCES),
            ..AuditRecord::new(AuditKind::Unlink, 900)
        };
        let rename = AuditRecord {
            index: 4_000_000,
            parent: id(5),
            name: text("b"),
            path: text("/d/b"),
            to_parent: id(2),
            to_name: text("c"),
            to_path: text("/c"),
            ..AuditRecord::new(AuditKind::Rename, 2_000)
        };
        let close = AuditRecord {
            index: 4_000_001,
            id: id(12),
            path: text("/a"),
            ..AuditRecord::new(AuditKind::Close, 2_001)
        };
        let gap = AuditRecord { index: 4_000_002, ..AuditRecord::gap(3_000, 5, "lost") };
        let all = vec![create, unlink, rename, close, gap];
        let mut pack = RecordPack::default();
        all.iter().for_each(|record| pack.put(record));
        let bytes = pack.into_bytes();
        assert_eq!(unpack(&bytes), Ok(all));
        for end in 1..bytes.len() {
            let _ = unpack(&bytes[..end]); // some ends are those of records
        }
        assert!(unpack(&[0, 255]).is_err());
    }

    #[test]
    fn a_pack_has_so_many_records_and_no_more() {
        let mut pack = RecordPack::default();
        let start = AuditRecord::new(AuditKind::Start, 1);
        for _ in 0..PACK_RECORDS_MAX {
            pack.put(&AuditRecord { index: pack.next_index, ..start.clone() });
        }
        assert_eq!(unpack(&pack.bytes).map(|all| all.len()), Ok(PACK_RECORDS_MAX));
        pack.put(&AuditRecord { index: pack.next_index, ..start });
        assert_eq!(unpack(&pack.bytes), Err(Corruption("more records than a pack has")));
    }
}
