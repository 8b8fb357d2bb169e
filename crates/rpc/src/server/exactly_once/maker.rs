//! The maker of a file under a name, as noted before the file is made. The next server epoch
//! compares it with the file that has the name, and decides whether this caller or another user
//! made it.

use dray_core::{Attr, Context, FileSystem, FileType, Timestamp};

use crate::wire::{Input, Malformed, Wire};

/// Owner and attributes that the new file will have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Maker {
    /// The owner of the file: the user for whom the export takes the caller.
    uid: u32,
    /// The file's type, `S_IFMT` bits.
    kind: u32,
    /// The most that there can be in it, bytes.
    size_max: u64,
    /// The file system's clock before it is made, where that is known.
    since: Option<Timestamp>,
}

impl Maker {
    /// Of a change that may make a file of this type (`S_IFMT` bits), with so many bytes in it. The
    /// size of directories and symbolic links is known to the file system alone.
    pub(crate) fn of(
        fs: &dyn FileSystem,
        cx: &Context,
        file_type: u32,
        data_bytes: usize,
    ) -> Maker {
        let has_own_size = matches!(file_type, libc::S_IFDIR | libc::S_IFLNK);
        let size_max = if has_own_size { u64::MAX } else { data_bytes as u64 };
        Maker { uid: fs.user_of(cx).0, kind: file_type, size_max, since: fs.clock() }
    }

    pub(crate) fn owns(&self, attr: &Attr) -> bool {
        attr.uid.0 == self.uid
    }

    /// Whether this is what it has made, and nobody has touched it since. No other file of the same
    /// owner is so young, has only this name, and nothing in it.
    pub(crate) fn has_made(&self, attr: &Attr) -> bool {
        let is_directory = attr.file_type() == FileType::Directory;
        self.owns(attr)
            && attr.file_type().mode_bits() == self.kind
            && attr.size <= self.size_max
            && (is_directory || attr.nlink == 1)
            && self.since.is_none_or(|since| attr.is_born_since(since))
    }
}

impl<'a> Wire<'a> for Maker {
    fn put(&self, out: &mut Vec<u8>) {
        ((self.uid, self.kind), (self.size_max, self.since)).put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<Maker, Malformed> {
        let ((uid, kind), (size_max, since)) = input.get()?;
        Ok(Maker { uid, kind, size_max, since })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::Uid;

    #[test]
    fn what_it_has_made_is_its_own_and_young_and_untouched() {
        let since = Timestamp { sec: 100, nsec: 500_000_000 };
        let maker = Maker { uid: 5, kind: libc::S_IFREG, size_max: 3, since: Some(since) };
        let later = Timestamp { sec: 100, nsec: 500_000_001 };
        let (mode, nlink) = (libc::S_IFREG | 0o644, 1);
        let made = Attr { mode, nlink, uid: Uid(5), ctime: later, btime: later, ..Attr::default() };
        assert!(maker.has_made(&made) && maker.has_made(&Attr { size: 3, ..made }));
        let old = Timestamp { sec: 99, nsec: 1 };
        for other in [
            Attr { uid: Uid(0), ..made },
            Attr { mode: libc::S_IFIFO | 0o644, ..made },
            Attr { nlink: 2, ..made },
            Attr { size: 4, ..made },
            Attr { btime: old, ..made },
            // The attributes of a file system that keeps no time of birth.
            Attr { btime: Timestamp::default(), mtime: old, ..made },
        ] {
            assert!(!maker.has_made(&other), "{other:?}");
        }
        // FAT has seconds, two at a time.
        let coarse = Timestamp { sec: 98, nsec: 0 };
        assert!(maker.has_made(&Attr { btime: coarse, ctime: coarse, ..made }));
        assert!(Maker { since: None, ..maker }.has_made(&Attr { btime: old, ..made }));
    }
}
