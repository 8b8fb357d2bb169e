//! Inode numbers of an export that has several devices.
//!
//! An overlay of several file systems shows each file with the device and the inode number of its
//! layer. It does not where `xino` has spare bits for the layer (`ovl_map_dev_ino` in
//! fs/overlayfs/inode.c). Clients see one device for all of a mount. So the number of a file on
//! another device than the export's root is made of both. Two files of different devices then have
//! different numbers everywhere. A file on the export's own device keeps the number of the file
//! system below.
//!
//! Nothing is stored for that. A device number lasts as long as the mount below, which outlasts the
//! server. A new mount of such an overlay numbers its directories anew, too (`ovl_map_ino`).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, Ordering};

use dray_core::{FileType, Name};

use super::core::Core;
use super::siphash::siphash;
use super::sys::{self, InodeStat, Sys};

/// No number of a file system on disk is as high, and a signed number takes it.
const MARK: u64 = 1 << 62;
/// The rest is a hash, not the two side by side.
const HASHED: u64 = 1 << 61;
/// Bits of the inode number, of those side by side; those of the device are above.
const INO_BITS: u32 = 41;
/// Bits of a minor number (`MINORBITS` in linux/kdev_t.h). Layers have no major one.
const DEVICE_BITS: u32 = 20;

const _: () = assert!(1 << (INO_BITS + DEVICE_BITS) == HASHED);

/// What is known of the devices of an export.
pub(super) struct Devices {
    /// The device number of the export's root.
    pub(super) own: u64,
    seen: AtomicU8,
}

/// No file has been looked at yet that could be on another one.
const UNKNOWN: u8 = 0;
const ONE: u8 = 1;
const SEVERAL: u8 = 2;

impl Devices {
    /// The devices of an export whose root is on `own`. An `overlay` is asked for its devices.
    pub(super) fn new(own: u64, overlay: bool) -> Devices {
        Devices { own, seen: AtomicU8::new(if overlay { UNKNOWN } else { ONE }) }
    }

    fn number(&self, dev: u64, ino: u64) -> u64 {
        if dev == self.own {
            return ino;
        }
        let (major, minor) = (libc::major(dev), u64::from(libc::minor(dev)));
        if major == 0 && minor >> DEVICE_BITS == 0 && ino >> INO_BITS == 0 {
            return MARK | minor << INO_BITS | ino;
        }
        MARK | HASHED | siphash(0, [dev, ino]) & (HASHED - 1)
    }

    fn tell_apart(&self, stat: &mut InodeStat) {
        if stat.dev != self.own {
            stat.attr.ino = self.number(stat.dev, stat.attr.ino);
            self.seen.store(SEVERAL, Ordering::Relaxed);
        } else if self.seen.load(Ordering::Relaxed) == UNKNOWN
            && stat.attr.file_type() != FileType::Directory
        {
            let (relaxed, seen) = (Ordering::Relaxed, &self.seen);
            let _else_another_was_seen = seen.compare_exchange(UNKNOWN, ONE, relaxed, relaxed);
        }
    }
}

impl Core {
    /// As [`sys::stat`], with the number that clients know.
    pub(crate) fn stat(&self, fd: BorrowedFd<'_>) -> Sys<InodeStat> {
        let mut stat = sys::stat(fd)?;
        self.devices.tell_apart(&mut stat);
        Ok(stat)
    }

    /// The number that clients know of an entry of the directory `dir`, of which its listing says
    /// that it has the number `listed`. What cannot be looked at keeps that.
    pub(super) fn listed_number(
        &self,
        dir: BorrowedFd<'_>,
        name: &Name,
        (listed, kind): (u64, Option<FileType>),
    ) -> u64 {
        match self.devices.seen.load(Ordering::Relaxed) {
            ONE => return listed,
            UNKNOWN if kind == Some(FileType::Directory) => return listed, // they are never elsewhere
            _ => {}
        }
        let stat = sys::open_path(dir, name).and_then(|fd| self.stat(fd.as_fd()));
        stat.map_or(listed, |stat| stat.attr.ino)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_different_devices_differ_and_those_of_the_own_one_stay() {
        let devices = Devices::new(46, true);
        let (long, most) = (1 << INO_BITS, u64::MAX);
        for ino in [1, 3, 128, long - 1, long, most] {
            assert_eq!(devices.number(46, ino), ino);
        }
        let foreign = [(0, 0), (0, 47), (0, 48), (0, 0xfffff), (8, 1), (7, 0xfffff)];
        let mut numbers: Vec<u64> = foreign
            .iter()
            .map(|(major, minor)| libc::makedev(*major, *minor))
            .flat_map(|dev| [1, 3, 128, long - 1, long, most].map(|ino| devices.number(dev, ino)))
            .collect();
        assert!(numbers.iter().all(|number| *number >= MARK && *number >> 63 == 0));
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 6 * 6);
        // What clients and the log of the path table know from the version before.
        assert_eq!(devices.number(48, 3), 0x4000_6000_0000_0003);
        assert_eq!(devices.number(libc::makedev(0, 300), 3), 0x4002_5800_0000_0003);
    }
}
