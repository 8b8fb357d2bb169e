//! What the kernel is answered: encoders of fixed-size answers and of directories.

use std::time::Duration;

use dray_core::{Attr, Entry, Lock, LockKind, Statfs, Timestamp};

use super::abi;
use super::wire::Small;

/// How long the kernel may go on believing an answer, as it counts that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KernelValidity {
    pub(crate) entry: Duration,
    pub(crate) attr: Duration,
}

/// A directory entry's or file's number within the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeRef {
    pub(crate) node: u64,
    pub(crate) generation: u64,
}

/// Bytes of an entry answer.
pub(crate) const ENTRY_BYTES: usize = 128;

/// The header of an answer of `body_bytes`; `error` is 0 or a negative error number, or
/// the code of a notification (with `unique` 0).
pub(crate) fn header(unique: u64, error: i32, body_bytes: usize) -> [u8; abi::OUT_HEADER_BYTES] {
    let len = (abi::OUT_HEADER_BYTES + body_bytes) as u32;
    let mut bytes = [0; abi::OUT_HEADER_BYTES];
    bytes[0..4].copy_from_slice(&len.to_ne_bytes());
    bytes[4..8].copy_from_slice(&error.to_ne_bytes());
    bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
    bytes
}

fn put_attr(out: &mut Small, attr: &Attr) {
    let Attr { atime, mtime, ctime, .. } = attr;
    out.put_u64s([attr.ino, attr.size, attr.blocks]);
    out.put_u64s([atime, mtime, ctime].map(|time| time.sec as u64));
    out.put_u32s([atime.nsec, mtime.nsec, ctime.nsec, attr.mode, attr.nlink]);
    out.put_u32s([attr.uid.0, attr.gid.0, attr.rdev, attr.block_bytes, 0]);
}

pub(crate) fn entry(node: NodeRef, entry: &Entry, valid: KernelValidity) -> Small {
    let mut out = Small::new();
    let KernelValidity { entry: name, attr } = valid;
    out.put_u64s([node.node, node.generation, name.as_secs(), attr.as_secs()]);
    out.put_u32s([name.subsec_nanos(), attr.subsec_nanos()]);
    put_attr(&mut out, &entry.attr);
    out
}

/// "No such name", to be believed for a while.
pub(crate) fn negative_entry(valid: Duration) -> Small {
    Small::new().zeros(16).u64(valid.as_secs()).u64(0).u32(valid.subsec_nanos()).zeros(92)
}

pub(crate) fn attr(attr: &Attr, valid: Duration) -> Small {
    let mut out = Small::new();
    out.put_u64s([valid.as_secs()]);
    out.put_u32s([valid.subsec_nanos(), 0]);
    put_attr(&mut out, attr);
    out
}

/// `backing`: the number of the file that the kernel reads instead, or 0.
pub(crate) fn put_open(out: &mut Small, fh: u64, (flags, backing): (u32, u32)) {
    out.put_u64s([fh]);
    out.put_u32s([flags, backing]);
}

pub(crate) fn statx(attr: &Attr, valid: Duration) -> Small {
    let mut mask = libc::STATX_BASIC_STATS;
    if attr.btime != Timestamp::default() {
        mask |= libc::STATX_BTIME;
    }
    let time = |out: Small, time: Timestamp| out.u64(time.sec as u64).u32(time.nsec).u32(0);
    let out = Small::new().u64(valid.as_secs()).u32(valid.subsec_nanos()).u32(0).zeros(16);
    let out = out
        .u32(mask)
        .u32(attr.block_bytes)
        .u64(attr.attributes)
        .u32(attr.nlink)
        .u32(attr.uid.0)
        .u32(attr.gid.0)
        .u16(attr.mode as u16) // type and permissions take 16 bits
        .u16(0)
        .u64(attr.ino)
        .u64(attr.size)
        .u64(attr.blocks)
        .u64(attr.attributes_mask);
    let out = time(time(time(time(out, attr.atime), attr.btime), attr.ctime), attr.mtime);
    let (major, minor) = device_numbers(attr.rdev);
    out.u32(major).u32(minor).zeros(8 + 14 * 8)
}

/// Major and minor number out of the kernel's 32-bit encoding: twelve bits of major
/// between the lower eight and the upper twelve of minor.
fn device_numbers(rdev: u32) -> (u32, u32) {
    (rdev >> 8 & 0xfff, rdev & 0xff | rdev >> 12 & 0xf_ff00)
}

pub(crate) fn statfs(fs: &Statfs) -> Small {
    Small::new()
        .u64(fs.blocks)
        .u64(fs.blocks_free)
        .u64(fs.blocks_available)
        .u64(fs.files)
        .u64(fs.files_free)
        .u32(fs.block_bytes)
        .u32(fs.name_max_bytes)
        .u32(fs.fragment_bytes)
        .zeros(28)
}

/// The answer to GETLK: the lock in the way, or that there is none.
pub(crate) fn lock(lock: Option<&Lock>) -> Small {
    let Some(lock) = lock else {
        return Small::new().u64(0).u64(0).u32(libc::F_UNLCK as u32).u32(0);
    };
    let kind = match lock.kind {
        LockKind::Shared => libc::F_RDLCK,
        LockKind::Exclusive => libc::F_WRLCK,
        LockKind::Unlock => libc::F_UNLCK,
    };
    let end = lock.range.end.min(i64::MAX as u64); // the kernel's "to the end"
    Small::new().u64(lock.range.start).u64(end).u32(kind as u32).u32(lock.pid.0)
}

/// A list of directory entries being filled up to a limit.
pub(crate) struct DirList {
    bytes: Vec<u8>,
    max_bytes: usize,
}

/// Bytes of an entry's fixed part in a list.
const DIRENT_BYTES: usize = 24;

impl DirList {
    pub(crate) fn new(max_bytes: usize) -> DirList {
        DirList { bytes: Vec::with_capacity(max_bytes), max_bytes }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What the kernel has room for.
    pub(crate) fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// An end that ends no listing which the kernel keeps. An entry that is cut short is none, so that there are no
    /// more. But only an empty list completes what is kept (`fuse_readdir_uncached` in fs/fuse/readdir.c).
    pub(crate) fn end_that_is_not_kept(plus: bool) -> Vec<u8> {
        let fixed = if plus { ENTRY_BYTES + DIRENT_BYTES } else { DIRENT_BYTES };
        let mut list = DirList::new(fixed + 8);
        let nothing = Small::new().zeros(ENTRY_BYTES);
        list.push(b"-", 0, 0, 0, plus.then(|| nothing.as_slice()));
        list.bytes.truncate(fixed);
        list.bytes
    }

    /// Whether an entry of this name still fits.
    pub(crate) fn fits(&self, name: &[u8], plus: bool) -> bool {
        let fixed = if plus { ENTRY_BYTES + DIRENT_BYTES } else { DIRENT_BYTES };
        self.bytes.len() + (fixed + name.len()).next_multiple_of(8) <= self.max_bytes
    }

    /// Adds an entry, which must fit. `next` is the position behind it; `entry` is the
    /// encoded entry answer in a list with attributes.
    pub(crate) fn push(
        &mut self,
        name: &[u8],
        ino: u64,
        next: u64,
        kind: u8,
        entry: Option<&[u8]>,
    ) {
        self.bytes.extend_from_slice(entry.unwrap_or_default());
        self.bytes.extend_from_slice(&ino.to_ne_bytes());
        self.bytes.extend_from_slice(&next.to_ne_bytes());
        self.bytes.extend_from_slice(&(name.len() as u32).to_ne_bytes());
        self.bytes.extend_from_slice(&u32::from(kind).to_ne_bytes());
        self.bytes.extend_from_slice(name);
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_have_the_kernel_s_sizes() {
        let file = Attr::default();
        assert_eq!(attr(&file, Duration::ZERO).as_slice().len(), 104);
        assert_eq!(statx(&file, Duration::ZERO).as_slice().len(), 288);
        assert_eq!(statfs(&Statfs::default()).as_slice().len(), 80);
        assert_eq!(lock(None).as_slice().len(), 24);
        assert_eq!(negative_entry(Duration::ZERO).as_slice().len(), ENTRY_BYTES);
    }

    #[test]
    fn device_numbers_take_their_odd_places() {
        assert_eq!(device_numbers(0x0801), (8, 1));
        assert_eq!(device_numbers(0x1230_4567), (0x45, 0x1_2367));
    }

    /// The kernel goes on while there is room for an entry without a name. It ends at an entry that is longer than
    /// what is left (`parse_dirfile`, `parse_dirplusfile`).
    #[test]
    fn an_end_that_is_not_kept_has_an_entry_that_is_cut_short() {
        for (plus, head) in [(false, 0), (true, ENTRY_BYTES)] {
            let end = DirList::end_that_is_not_kept(plus);
            assert_eq!(end.len(), head + DIRENT_BYTES);
            assert!(end[..head].iter().all(|byte| *byte == 0), "it links no file");
            assert_eq!(end[head + 16..head + 20], 1u32.to_ne_bytes(), "the length of its name");
        }
    }

    #[test]
    fn a_list_keeps_to_its_limit() {
        let mut list = DirList::new(64);
        assert!(list.fits(b"abcdefgh", false));
        list.push(b"abcdefgh", 1, 1, 4, None);
        assert!(list.fits(b"abcdefgh", false) && !list.fits(b"abcdefghi", false));
        assert!(!list.fits(b"a", true));
    }
}
