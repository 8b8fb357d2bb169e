//! Converts a [`FileId`] to a kernel handle and back.
//!
//! On file systems whose handles are known, a file id holds all that the handle holds. So the server
//! keeps no table, and ids outlive it. The lower half of the generation is the file system's own. The
//! upper half is a keyed hash of the rest. It is never 0, so a generation of 0 can mean "not known".
//! Clients get only ids of files in the export, and cannot forge others.

use dray_core::FileId;

use super::lower_fs::{BTRFS, EXT, TMPFS, XFS};
use super::siphash::siphash;
use super::sys::KernelHandle;

/// Handle type of `FILEID_INO32_GEN`, which tmpfs uses too, with other contents.
const INO32_GEN: i32 = 1;
/// Handle type of XFS with 64-bit inode numbers.
const XFS_64: i32 = 0x81;
/// Handle type of btrfs without the parent.
const BTRFS_PLAIN: i32 = 0x4d;

/// How the handles of one export are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// ext2, ext3 and ext4: 32-bit number, 32-bit generation.
    Ino32Gen,
    /// XFS: 64-bit number, 32-bit generation. With the option `inode32`, which can be set and taken
    /// back while it is mounted, its handles are those of ext4. It takes both at any time
    /// (`xfs_fs_fh_to_dentry` in fs/xfs/xfs_export.c).
    Xfs,
    /// tmpfs: 32-bit generation, 64-bit number.
    GenIno64,
    /// btrfs: 64-bit object, 64-bit subvolume, 32-bit generation.
    Btrfs { subvolume: u64 },
}

/// Translates between file ids and kernel handles.
#[derive(Clone, Copy)]
pub(crate) struct HandleCodec {
    layout: Layout,
    key: u128,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

impl HandleCodec {
    /// The codec for the file system with this `statfs` number whose root has this handle. None if
    /// that file system is unknown, or its handle has an unknown form.
    pub(crate) fn detect(magic: i64, root: &KernelHandle, key: u128) -> Option<HandleCodec> {
        let layout = match (magic, root.kind(), root.bytes().len()) {
            (EXT, INO32_GEN, 8) => Layout::Ino32Gen,
            (XFS, INO32_GEN, 8) | (XFS, XFS_64, 12) => Layout::Xfs,
            (TMPFS, INO32_GEN, 12) => Layout::GenIno64,
            (BTRFS, BTRFS_PLAIN, 20) => Layout::Btrfs { subvolume: u64_at(root.bytes(), 8)? },
            _ => return None,
        };
        Some(HandleCodec { layout, key })
    }

    /// The id of the file with this handle. None for a handle that is laid out differently
    /// or belongs to another subvolume.
    pub(crate) fn encode(&self, handle: &KernelHandle) -> Option<FileId> {
        let bytes = handle.bytes();
        let (ino, generation) = match (self.layout, handle.kind(), bytes.len()) {
            (Layout::Ino32Gen | Layout::Xfs, INO32_GEN, 8) => {
                (u64::from(u32_at(bytes, 0)?), u32_at(bytes, 4)?)
            }
            (Layout::Xfs, XFS_64, 12) => (u64_at(bytes, 0)?, u32_at(bytes, 8)?),
            (Layout::GenIno64, INO32_GEN, 12) => (u64_at(bytes, 4)?, u32_at(bytes, 0)?),
            (Layout::Btrfs { subvolume }, BTRFS_PLAIN, 20) if u64_at(bytes, 8)? == subvolume => {
                (u64_at(bytes, 0)?, u32_at(bytes, 16)?)
            }
            _ => return None,
        };
        Some(FileId { ino, generation: self.sign(ino, generation) })
    }

    /// The handle that an id stands for. None if we did not make the id.
    pub(crate) fn decode(&self, id: FileId) -> Option<KernelHandle> {
        let generation = id.generation as u32;
        if id.generation != self.sign(id.ino, generation) {
            return None;
        }
        let (ino, generation) = (id.ino.to_ne_bytes(), generation.to_ne_bytes());
        match self.layout {
            Layout::Ino32Gen => {
                let ino = u32::try_from(id.ino).ok()?.to_ne_bytes();
                KernelHandle::new(INO32_GEN, &[&ino, &generation])
            }
            Layout::Xfs => KernelHandle::new(XFS_64, &[&ino, &generation]),
            Layout::GenIno64 => KernelHandle::new(INO32_GEN, &[&generation, &ino]),
            Layout::Btrfs { subvolume } => {
                KernelHandle::new(BTRFS_PLAIN, &[&ino, &subvolume.to_ne_bytes(), &generation])
            }
        }
    }

    fn sign(&self, ino: u64, generation: u32) -> u64 {
        let tag = siphash(self.key, [ino, u64::from(generation)]) >> 32;
        tag.max(1) << 32 | u64::from(generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(kind: i32, bytes: &[u8]) -> KernelHandle {
        KernelHandle::new(kind, &[bytes]).unwrap()
    }

    #[test]
    fn an_id_holds_all_of_the_handle() {
        let bytes: Vec<u8> = (1..=20).collect();
        for (magic, kind, len) in [
            (EXT, INO32_GEN, 8),
            (XFS, XFS_64, 12),
            (TMPFS, INO32_GEN, 12),
            (BTRFS, BTRFS_PLAIN, 20),
        ] {
            let original = handle(kind, &bytes[..len]);
            let codec = HandleCodec::detect(magic, &original, 42).unwrap();
            let decoded = codec.decode(codec.encode(&original).unwrap()).unwrap();
            assert_eq!((decoded.kind(), decoded.bytes()), (kind, &bytes[..len]));
        }
    }

    /// Clients keep them: with another version of dray a file is to have the id that it had.
    // proves: P137
    #[test]
    fn an_id_is_what_it_was() {
        let id = FileId { ino: 128, generation: 0x9e6a_ac86_0000_0007 };
        let ino = [128, 0, 0, 0, 0, 0, 0, 0];
        let generation = [7, 0, 0, 0];
        let subvolume = [5, 0, 0, 0, 0, 0, 0, 0];
        for (magic, kind, bytes) in [
            (EXT, INO32_GEN, [&ino[..4], &generation].concat()),
            (XFS, XFS_64, [&ino[..], &generation].concat()),
            (TMPFS, INO32_GEN, [&generation[..], &ino].concat()),
            (BTRFS, BTRFS_PLAIN, [&ino[..], &subvolume, &generation].concat()),
        ] {
            let root = handle(kind, &bytes);
            assert_eq!(HandleCodec::detect(magic, &root, 42).unwrap().encode(&root), Some(id));
        }
    }

    /// An XFS could be mounted anew with the other option, or have it changed while it was mounted.
    /// Its export had none of its files any more.
    #[test]
    fn a_file_of_xfs_has_one_id_whichever_of_its_handles_is_seen() {
        let root = handle(INO32_GEN, &[128, 0, 0, 0, 7, 0, 0, 0]);
        let codec = HandleCodec::detect(XFS, &root, 42).unwrap();
        let id = codec.encode(&root).unwrap();
        let long = handle(XFS_64, &[128, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0]);
        assert_eq!(codec.encode(&long), Some(id));
        assert_eq!(HandleCodec::detect(XFS, &long, 42).unwrap().encode(&root), Some(id));
        assert_eq!(codec.decode(id).unwrap().bytes(), long.bytes());
    }

    #[test]
    fn made_up_ids_are_not_taken() {
        let root = handle(INO32_GEN, &[2, 0, 0, 0, 0, 0, 0, 0]);
        let codec = HandleCodec::detect(EXT, &root, 42).unwrap();
        assert!(codec.decode(FileId { ino: 2, generation: 0 }).is_none());
        let mut id = codec.encode(&root).unwrap();
        assert!(codec.decode(id).is_some());
        id.ino = 3;
        assert!(codec.decode(id).is_none());
        let other = HandleCodec::detect(EXT, &root, 43).unwrap();
        assert!(other.decode(codec.encode(&root).unwrap()).is_none());
    }

    #[test]
    fn another_subvolume_is_another_file_system() {
        let root = handle(BTRFS_PLAIN, &[5; 20]);
        let codec = HandleCodec::detect(BTRFS, &root, 42).unwrap();
        assert!(codec.encode(&handle(BTRFS_PLAIN, &[6; 20])).is_none());
    }

    #[test]
    fn what_is_not_known_has_no_codec() {
        assert!(HandleCodec::detect(0x6573_5546, &handle(INO32_GEN, &[0; 12]), 42).is_none());
        assert!(HandleCodec::detect(EXT, &handle(INO32_GEN, &[0; 12]), 42).is_none());
    }
}
