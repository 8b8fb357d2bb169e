//! What must survive the daemon's process: the outcome of INIT, the node table, the handle
//! table and the memory of the ring, in one memfd.

pub(crate) mod capabilities;
pub(crate) mod changes;
pub(crate) mod handles;
pub(crate) mod kernel_listings;
pub(crate) mod kernel_pages;
pub(crate) mod moved;
pub(crate) mod nodes;
pub(crate) mod passthrough;
pub(crate) mod places;
pub(crate) mod published;
pub(crate) mod region;
pub(crate) mod stale_retries;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::state::region::{Region, memfd};

/// "drayfuse", and the version of the layout below it.
const MAGIC: u64 = 0x6472_6179_6675_7365;
const VERSION: u64 = 5;
/// Of a mount whose files the kernel may read from copies. The layout is the same. A daemon that does not know of copies
/// would open such files in a way that the kernel refuses.
const VERSION_PASSTHROUGH: u64 = 6;
/// The oldest version whose layout is known here: without `RING_ROOM`, and with `EPOCH` 0, as before 5.
const VERSION_OLDEST: u64 = 3;

/// Bytes of the header page, which is followed by node records, handle
/// records and, once there is a ring, its memory.
const HEADER_BYTES: usize = 4096;
/// Most nodes that the kernel may know at a time; memory is taken for those that it does.
pub(crate) const NODES_MAX: u64 = 1 << 26;
/// Most files and directories open at a time.
pub(crate) const HANDLES_MAX: u64 = 1 << 22;
/// Bytes of a record of either kind.
pub(crate) const RECORD_BYTES: usize = 32;

/// Words of the header.
pub(crate) mod header {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const VERSION: usize = 8;
    /// Flags agreed on in INIT; 0 until then.
    pub(crate) const INIT_FLAGS: usize = 16;
    pub(crate) const INIT_MINOR: usize = 24;
    /// Node records ever used; those behind are zero.
    pub(crate) const NODES_USED: usize = 32;
    pub(crate) const HANDLES_USED: usize = 40;
    /// Where the memory of the ring is mapped, and for how many entries; 0 until it is.
    pub(crate) const RING_ADDRESS: usize = 48;
    pub(crate) const RING_SLOTS: usize = 56;
    /// Entries whose memory has been taken, those of dead daemons included.
    pub(crate) const RING_TAKEN: usize = 64;
    /// Why there is no ring ([`crate::mount::choice::NoRing`]); 0: there is, or none was wanted.
    pub(crate) const NO_RING: usize = 72;
    /// Not 0 once every queue of the ring has had an entry, from when on the kernel sends
    /// requests to it alone.
    pub(crate) const RING_READY: usize = 80;
    /// Bytes of memory for the payload of an entry; 0: as before there was this word.
    pub(crate) const RING_ROOM: usize = 88;
    /// Not 0 if flocks belong to handles ([`crate::state::handles::Handles::flock_owner`]).
    pub(crate) const FLOCKS: usize = 96;
    /// What the node numbers of this mount have that those of others do not
    /// ([`crate::state::nodes`]); 0: nothing, as before there was this word.
    pub(crate) const EPOCH: usize = 104;
    /// Records of callers that were answered with ESTALE ([`crate::state::stale_retries`]), to the end
    /// of the page or nearly so; zeros in memory that has none.
    pub(crate) const STALE_RETRIES: usize = 128;
}

/// Neither half is 0, nor has its highest bit set: the lower one is counted up.
fn new_epoch() -> u64 {
    dray_rt::random_u64() & 0x7fff_ffff_7fff_ffff | 1 << 32 | 1
}

fn refused(why: String) -> io::Error {
    let words = format!("the memory of the mount's nodes and open files is not usable: {why}");
    io::Error::new(io::ErrorKind::InvalidData, words)
}

/// The surviving state of one mount. A supervisor keeps its descriptor and hands it to
/// the next daemon.
#[derive(Clone)]
pub struct State {
    pub(crate) region: Arc<Region>,
}

impl State {
    /// State of a new mount. Errors: those of memfd_create(2) and mmap(2).
    pub fn create() -> io::Result<State> {
        let state = State::map(memfd(c"dray-fuse-state", Self::len_bytes())?)?;
        state.region.store(header::VERSION, VERSION);
        state.region.store(header::FLOCKS, 1);
        state.region.store(header::EPOCH, new_epoch());
        state.region.store(header::MAGIC, MAGIC);
        Ok(state)
    }

    /// State that a predecessor left. Errors: `InvalidData` for anything else, or for a layout
    /// that this version does not know, with words that say which; those of mmap(2).
    pub fn adopt(fd: OwnedFd) -> io::Result<State> {
        let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
        // SAFETY: the kernel fills `stat`, which is read only if it did.
        let size = unsafe {
            match libc::fstat(std::os::fd::AsRawFd::as_raw_fd(&fd), stat.as_mut_ptr()) {
                0 => stat.assume_init().st_size,
                _ => return Err(io::Error::last_os_error()),
            }
        };
        if (size as usize) < Self::len_bytes() {
            return Err(refused(format!("it has {size} bytes of {}", Self::len_bytes())));
        }
        let state = State::map(fd)?;
        if state.region.load(header::MAGIC) != MAGIC {
            return Err(refused("it is something else".into()));
        }
        match state.region.load(header::VERSION) {
            VERSION_OLDEST..=VERSION_PASSTHROUGH => Ok(state),
            version => Err(refused(format!(
                "its layout is version {version}, this dray knows {VERSION_OLDEST} to \
                 {VERSION_PASSTHROUGH}"
            ))),
        }
    }

    /// The memfd, for a supervisor to keep.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.fd()
    }

    /// The kernel has agreed to read copies of files.
    pub(crate) fn mark_passthrough(&self) {
        self.region.store(header::VERSION, VERSION_PASSTHROUGH);
    }

    /// Whether INIT was done by a predecessor: the kernel never repeats it.
    pub fn initialised(&self) -> bool {
        self.region.load(header::INIT_FLAGS) != 0
    }

    fn len_bytes() -> usize {
        HEADER_BYTES + (NODES_MAX + HANDLES_MAX) as usize * RECORD_BYTES
    }

    fn map(fd: OwnedFd) -> io::Result<State> {
        Ok(State { region: Arc::new(Region::map(fd, Self::len_bytes())?) })
    }

    /// Where the memory of the ring begins: behind the tables.
    pub(crate) fn ring_at() -> usize {
        Self::len_bytes()
    }

    /// Where the record of node slot `slot` begins.
    pub(crate) fn node_at(slot: u64) -> usize {
        HEADER_BYTES + slot as usize * RECORD_BYTES
    }

    /// Where the record of handle slot `slot` begins.
    pub(crate) fn handle_at(slot: u64) -> usize {
        HEADER_BYTES + (NODES_MAX + slot) as usize * RECORD_BYTES
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    /// What a successor says of memory that was left to it, changed in between.
    fn adopted(change: impl FnOnce(&File)) -> Result<(), String> {
        let file = File::from(State::create().unwrap().fd().try_clone_to_owned().unwrap());
        change(&file);
        State::adopt(file.into()).map(|_| ()).map_err(|error| error.to_string())
    }

    fn with_word(at: usize, word: u64) -> Result<(), String> {
        adopted(|file| file.write_all_at(&word.to_ne_bytes(), at as u64).unwrap())
    }

    /// Programs of both sides of an upgrade have the same memory.
    // proves: P137
    #[test]
    fn memory_of_a_neighbouring_version_is_taken_over_and_no_other() {
        for known in VERSION_OLDEST..=VERSION_PASSTHROUGH {
            assert_eq!(with_word(header::VERSION, known), Ok(()));
        }
        for other in [VERSION_OLDEST - 1, VERSION_PASSTHROUGH + 1, 99] {
            let said = with_word(header::VERSION, other).unwrap_err();
            assert!(said.contains(&format!("version {other}, this dray knows 3 to 6")), "{said}");
        }
        assert!(with_word(header::MAGIC, 1).unwrap_err().contains("something else"));
        let short = adopted(|file| file.set_len(8192).unwrap()).unwrap_err();
        assert!(short.contains("it has 8192 bytes of"), "{short}");
    }

    /// A layout that changes is another version, which knows this one, too.
    // proves: P137
    #[test]
    fn everything_stands_where_it_stood() {
        use header::*;
        let words = [
            header::MAGIC,
            header::VERSION,
            INIT_FLAGS,
            INIT_MINOR,
            NODES_USED,
            HANDLES_USED,
            RING_ADDRESS,
            RING_SLOTS,
            RING_TAKEN,
            NO_RING,
            RING_READY,
            RING_ROOM,
            FLOCKS,
            EPOCH,
        ];
        assert_eq!(words, std::array::from_fn(|index| 8 * index));
        assert_eq!((STALE_RETRIES, stale_retries::RECORDS), (128, 120));
        assert_eq!((State::node_at(1), State::handle_at(0)), (4128, 2_147_487_744));
        assert_eq!((State::handle_at(1), State::ring_at()), (2_147_487_776, 2_281_705_472));
        assert_eq!((super::MAGIC, super::VERSION), (0x6472_6179_6675_7365, 5));
    }
}
