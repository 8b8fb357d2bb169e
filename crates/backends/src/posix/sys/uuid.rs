//! The uuid of a file system.

use std::os::fd::{AsRawFd, BorrowedFd};

use super::super::lower_fs::{BTRFS, EXT, XFS};

/// `FS_IOC_GETFSUUID` of linux/fs.h, `_IOR(0x15, 0, struct fsuuid2)`: Linux 6.9, any file system that
/// has a uuid. The kernel answers it by itself, and asks no file system.
const FS_IOC_GETFSUUID: libc::Ioctl = 0x8011_1500_u32 as libc::Ioctl;
/// `_IOR('f', 44, struct fsuuid)` of fs/ext4/ext4.h: Linux 6.0.
const EXT4_IOC_GETFSUUID: libc::Ioctl = 0x8008_662c_u32 as libc::Ioctl;
/// `_IOR('X', 100, struct xfs_fsop_geom_v1)` of fs/xfs/libxfs/xfs_fs.h.
const XFS_IOC_FSGEOMETRY_V1: libc::Ioctl = 0x8070_5864_u32 as libc::Ioctl;
/// `_IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)` of linux/btrfs.h.
const BTRFS_IOC_FS_INFO: libc::Ioctl = 0x8400_941f_u32 as libc::Ioctl;

const UUID_BYTES: usize = 16;
type Uuid = [u8; UUID_BYTES];

/// Room for the answer of any of these.
#[repr(C, align(8))]
struct Room([u8; 1024]);

/// The uuid of the file system that `dir`, a real descriptor, is on; none if the kernel knows none.
/// `magic` is that of statfs(2): a file system is asked in its own way where the kernel has no other.
pub(crate) fn uuid_of(dir: BorrowedFd<'_>, magic: i64) -> Option<Uuid> {
    in_general(dir).or_else(|| in_its_own_way(dir, magic))
}

/// `struct fsuuid2`: one byte says how long the uuid behind it is.
fn in_general(dir: BorrowedFd<'_>) -> Option<Uuid> {
    let room = ask(dir, FS_IOC_GETFSUUID, 0)?;
    if usize::from(room.0[0]) == UUID_BYTES { uuid_at(&room, 1) } else { None }
}

fn in_its_own_way(dir: BorrowedFd<'_>, magic: i64) -> Option<Uuid> {
    match magic {
        // The kernel wants the length of the buffer.
        EXT => uuid_at(&ask(dir, EXT4_IOC_GETFSUUID, UUID_BYTES as u32)?, 8),
        XFS => uuid_at(&ask(dir, XFS_IOC_FSGEOMETRY_V1, 0)?, 64),
        BTRFS => uuid_at(&ask(dir, BTRFS_IOC_FS_INFO, 0)?, 16),
        _ => None,
    }
}

fn ask(dir: BorrowedFd<'_>, request: libc::Ioctl, first_word: u32) -> Option<Room> {
    let mut room = Room([0; 1024]);
    room.0[..4].copy_from_slice(&first_word.to_ne_bytes());
    // SAFETY: the room outlives the call, and is as large as any of the requests says at least.
    let asked = unsafe { libc::ioctl(dir.as_raw_fd(), request, room.0.as_mut_ptr()) };
    (asked == 0).then_some(room)
}

fn uuid_at(room: &Room, at: usize) -> Option<Uuid> {
    let uuid: Uuid = room.0.get(at..at + UUID_BYTES)?.try_into().ok()?;
    (uuid != [0; UUID_BYTES]).then_some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    /// What one kernel has noted the next one has to find again.
    #[test]
    fn both_ways_to_ask_for_a_uuid_agree() {
        let mut tried = 0;
        for place in ["/", "/boot", "/home", "/var/tmp", env!("CARGO_MANIFEST_DIR")] {
            let Ok(dir) = File::open(place) else { continue };
            let (_, magic) = super::super::statfs(dir.as_fd()).unwrap();
            let both = (in_general(dir.as_fd()), in_its_own_way(dir.as_fd(), magic));
            if let (Some(general), Some(own)) = both {
                assert_eq!(general, own, "{place}");
                tried += 1;
            }
        }
        if tried == 0 {
            eprintln!("skipped: no ext4, xfs or btrfs at hand, or Linux before 6.9");
        }
    }
}
