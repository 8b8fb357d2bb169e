//! What is kept under write leases, for a process that follows this one: places, each with the log of one file.
//!
//! A place lies far behind the words of the session, in the same file of memory. A process may die between any two
//! instructions, so each step becomes true with one store: that of [`STATE`], [`USED`], [`CURRENT`] or [`SENT_TO`].
//!
//! ```text
//! word 0  1: in use             word 5  bytes of the caller's identity     words 16 to 22, or 24 to 30:
//! word 1, 2  the file           word 6  which of the two states counts       write lease; size, mtime, ctime of the
//! word 3  its open number       word 7  bytes of the log                     file; where what is kept begins in the log
//! word 4  flags of the opening  word 8  what is being sent ends there      from byte 512 on: the caller's identity
//! word 10 the caller's process  word 9  the request that sends it          from byte 4096 on: the log
//! ```
//! A record of the log is four words: where in the file, how long, what else, the request. The data follow, and bytes
//! up to the next word.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::{FileId, Gid, Identity, OpenHow, Pid, RequestId, Timestamp, Uid};

use super::SessionMemory;
use crate::wire::WriteBase;

/// Where the places begin in the file, bytes: behind all sessions, and before the definition of a projection.
const KEPT_AT_BYTES: usize = 2 << 40;
/// Files of which something may be kept at a time.
const PLACES: usize = 64;
const PLACE_BYTES: usize = 512 << 10;
const KEPT_BYTES: usize = PLACES * PLACE_BYTES;
const IDENTITY_AT_BYTES: usize = 512;
const LOG_AT_BYTES: usize = 4096;
const IDENTITY_MAX_BYTES: usize = LOG_AT_BYTES - IDENTITY_AT_BYTES;
const LOG_BYTES: usize = PLACE_BYTES - LOG_AT_BYTES;
const RECORD_HEAD_BYTES: usize = 32;
/// More memory than this goes back to the system when nothing of it is used.
const IDLE_MAX_BYTES: usize = 64 << 10;

const STATE: usize = 0;
const FILE: usize = 1;
const HANDLE: usize = 3;
const HOW: usize = 4;
const IDENTITY_LEN: usize = 5;
const CURRENT: usize = 6;
const USED: usize = 7;
const SENT_TO: usize = 8;
const SENT_BY: usize = 9;
const PROCESS: usize = 10;
/// Where the two states begin.
const BASES: [usize; 2] = [16, 24];
const IN_USE: u64 = 1;
/// What else there is about a record: the write takes away the set-user-id bit.
const KILL_SET_ID: u64 = 1;

/// The number of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeptPlace(usize);

/// The file of a place, and who writes it.
pub(crate) struct NotedFile<'a> {
    pub(crate) id: FileId,
    pub(crate) handle: u64,
    pub(crate) how: OpenHow,
    pub(crate) who: &'a Identity,
    pub(crate) pid: Pid,
    pub(crate) lease: u64,
    pub(crate) base: WriteBase,
}

/// One write, as it is noted.
pub(crate) struct KeptRecord<'a> {
    pub(crate) at: u64,
    pub(crate) kill_set_id: bool,
    /// 0: nobody will repeat it.
    pub(crate) request: RequestId,
    pub(crate) data: &'a [u8],
}

/// What a process before this one had kept of a file.
pub(crate) struct InheritedKept {
    pub(crate) place: KeptPlace,
    pub(crate) id: FileId,
    pub(crate) handle: u64,
    pub(crate) how: OpenHow,
    pub(crate) who: Identity,
    pub(crate) pid: Pid,
    pub(crate) lease: u64,
    pub(crate) base: WriteBase,
    /// The request that was sending the writes before this place of `writes`.
    pub(crate) under_way: Option<(RequestId, usize)>,
    /// Where each goes, whether it takes the set-user-id bit away, and its data.
    pub(crate) writes: Vec<(u64, bool, Vec<u8>)>,
}

/// The places of a session.
pub(crate) struct KeptPlaces {
    memory: PlaceMemory,
    /// Places that are free, the longest free first: what was kept there is known until it is used again.
    free: Mutex<VecDeque<usize>>,
}

enum PlaceMemory {
    /// The memory of the session ends with the process. So does what is kept.
    Ends,
    /// There is none: nothing is kept.
    Missing,
    Mapped(NonNull<u8>),
}

// SAFETY: a place belongs to one file, whose lock its users hold. Head words are atomics.
unsafe impl Send for KeptPlaces {}
// SAFETY: as above.
unsafe impl Sync for KeptPlaces {}

impl SessionMemory {
    /// The places for what is kept. Without memory for them nothing is kept.
    pub(crate) fn kept_places(&self) -> KeptPlaces {
        let memory = match &self.fd {
            None => PlaceMemory::Ends,
            Some(fd) => map(fd).map_or_else(
                |error| {
                    log::warn!(
                        "there is no memory for kept writes, which go to the server: {error}"
                    );
                    PlaceMemory::Missing
                },
                PlaceMemory::Mapped,
            ),
        };
        let places = KeptPlaces { memory, free: Mutex::default() };
        let is_free = |place: &usize| places.word(*place, STATE).load(Ordering::Acquire) != IN_USE;
        let free = match places.memory {
            PlaceMemory::Mapped(_) => (0..PLACES).filter(is_free).collect(),
            PlaceMemory::Ends | PlaceMemory::Missing => VecDeque::new(),
        };
        *places.lock() = free;
        places
    }
}

fn map(fd: &impl AsRawFd) -> io::Result<NonNull<u8>> {
    let end_bytes = (KEPT_AT_BYTES + KEPT_BYTES) as libc::off_t;
    // SAFETY: an all-zero stat is valid, and the kernel writes to it during the call.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above, and no memory is passed to ftruncate(2).
    let sized = unsafe {
        libc::fstat(fd.as_raw_fd(), &mut stat) == 0
            && (stat.st_size >= end_bytes || libc::ftruncate(fd.as_raw_fd(), end_bytes) == 0)
    };
    if !sized {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh mapping of a part of the file that is there, and that nobody cuts.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            KEPT_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd.as_raw_fd(),
            KEPT_AT_BYTES as libc::off_t,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at 0"))
}

impl KeptPlaces {
    /// The places of a session that keeps nothing.
    pub(crate) fn none() -> KeptPlaces {
        KeptPlaces { memory: PlaceMemory::Missing, free: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn byte(&self, place: usize, at_bytes: usize) -> *mut u8 {
        let PlaceMemory::Mapped(start) = self.memory else { unreachable!("there are no places") };
        assert!(place < PLACES && at_bytes <= PLACE_BYTES);
        // SAFETY: within the mapping.
        unsafe { start.add(place * PLACE_BYTES + at_bytes).as_ptr() }
    }

    fn word(&self, place: usize, index: usize) -> &AtomicU64 {
        assert!(index < IDENTITY_AT_BYTES / 8);
        // SAFETY: a word within the mapping, which lives as long as we do.
        unsafe { &*self.byte(place, index * 8).cast::<AtomicU64>() }
    }

    fn get(&self, place: usize, index: usize) -> u64 {
        self.word(place, index).load(Ordering::Acquire)
    }

    fn set(&self, place: usize, index: usize, value: u64) {
        self.word(place, index).store(value, Ordering::Release);
    }

    fn put_bytes(&self, place: usize, at_bytes: usize, bytes: &[u8]) {
        assert!(at_bytes + bytes.len() <= PLACE_BYTES);
        let to = self.byte(place, at_bytes);
        // SAFETY: within the place, which its user has alone.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    fn bytes(&self, place: usize, at_bytes: usize, len_bytes: usize) -> Vec<u8> {
        assert!(at_bytes + len_bytes <= PLACE_BYTES);
        let from = self.byte(place, at_bytes);
        // SAFETY: within the place, which its user has alone.
        unsafe { std::slice::from_raw_parts(from, len_bytes) }.to_vec()
    }

    /// Whether what is kept has to be noted here first.
    pub(crate) fn are_needed(&self) -> bool {
        !matches!(self.memory, PlaceMemory::Ends)
    }

    /// A place for this file. None: all are taken, or the caller has more groups than there is room for.
    pub(crate) fn begin(&self, file: &NotedFile<'_>) -> Option<KeptPlace> {
        let identity = put_identity(file.who);
        if identity.len() > IDENTITY_MAX_BYTES {
            return None;
        }
        let place = self.lock().pop_front()?;
        self.put_bytes(place, IDENTITY_AT_BYTES, &identity);
        let words = [file.id.ino, file.id.generation, file.handle, file.how.flags as u32 as u64];
        words.iter().enumerate().for_each(|(index, word)| self.set(place, FILE + index, *word));
        self.set(place, IDENTITY_LEN, identity.len() as u64);
        self.set(place, PROCESS, u64::from(file.pid.0));
        self.set(place, SENT_TO, 0);
        self.set(place, USED, 0);
        self.put_base(place, 0, (file.lease, file.base, 0));
        self.set(place, CURRENT, 0);
        self.set(place, STATE, IN_USE);
        Some(KeptPlace(place))
    }

    fn put_base(&self, place: usize, which: usize, (lease, base, begin): (u64, WriteBase, u64)) {
        let WriteBase { size, mtime, ctime } = base;
        let nsec = |time: Timestamp| u64::from(time.nsec);
        let words =
            [lease, size, mtime.sec as u64, nsec(mtime), ctime.sec as u64, nsec(ctime), begin];
        let at = BASES[which];
        words.iter().enumerate().for_each(|(index, word)| self.set(place, at + index, *word));
    }

    fn base(&self, place: usize) -> (u64, WriteBase, u64) {
        let at = BASES[(self.get(place, CURRENT) & 1) as usize];
        let word = |index: usize| self.get(place, at + index);
        let time = |index| Timestamp { sec: word(index) as i64, nsec: word(index + 1) as u32 };
        (word(0), WriteBase { size: word(1), mtime: time(2), ctime: time(4) }, word(6))
    }

    /// Notes a write. False: there is no room for it.
    pub(crate) fn note(&self, KeptPlace(place): KeptPlace, record: &KeptRecord<'_>) -> bool {
        let used = self.get(place, USED) as usize;
        let len_bytes = record_bytes(record.data.len());
        if used + len_bytes > LOG_BYTES {
            return false;
        }
        let at_bytes = LOG_AT_BYTES + used;
        let what = if record.kill_set_id { KILL_SET_ID } else { 0 };
        let head = [record.at, record.data.len() as u64, what, record.request.0];
        for (index, word) in head.iter().enumerate() {
            self.put_bytes(place, at_bytes + 8 * index, &word.to_le_bytes());
        }
        self.put_bytes(place, at_bytes + RECORD_HEAD_BYTES, record.data);
        self.set(place, USED, (used + len_bytes) as u64);
        true
    }

    /// All that is noted is being sent by this request.
    pub(crate) fn is_sending(&self, KeptPlace(place): KeptPlace, RequestId(request): RequestId) {
        self.set(place, SENT_BY, request);
        self.set(place, SENT_TO, self.get(place, USED));
    }

    /// What was being sent was not written, and is sent again with what is noted since.
    pub(crate) fn is_not_sent(&self, KeptPlace(place): KeptPlace) {
        self.set(place, SENT_TO, 0);
    }

    /// What was being sent is written. The file is like that behind it. True: nothing more is noted, and the place
    /// is free.
    pub(crate) fn is_sent(&self, place: KeptPlace, (lease, base): (u64, WriteBase)) -> bool {
        let KeptPlace(number) = place;
        let sent_to = self.get(number, SENT_TO);
        if sent_to == self.get(number, USED) {
            self.clear(place);
            return true;
        }
        let next = 1 - (self.get(number, CURRENT) & 1);
        self.put_base(number, next as usize, (lease, base, sent_to));
        self.set(number, CURRENT, next);
        self.set(number, SENT_TO, 0);
        false
    }

    /// Nothing of the file is kept any more.
    pub(crate) fn clear(&self, KeptPlace(place): KeptPlace) {
        self.set(place, STATE, 0);
        if self.get(place, USED) as usize > IDLE_MAX_BYTES {
            self.set(place, USED, 0);
            let start = self.byte(place, LOG_AT_BYTES);
            // SAFETY: whole pages of the log of a place that nobody uses; they read as zeros from then on.
            let _ = unsafe { libc::madvise(start.cast(), LOG_BYTES, libc::MADV_REMOVE) };
        }
        self.lock().push_back(place);
    }

    /// What a process before this one had kept, and the requests whose writes it had noted: they may have been
    /// answered or not.
    pub(crate) fn inherited(&self) -> (Vec<InheritedKept>, HashSet<u64>) {
        let (mut kept, mut requests) = (Vec::new(), HashSet::new());
        if !matches!(self.memory, PlaceMemory::Mapped(_)) {
            return (kept, requests);
        }
        for place in 0..PLACES {
            let (lease, base, begin) = self.base(place);
            let sent_to = self.get(place, SENT_TO);
            let (mut writes, mut under_way) = (Vec::new(), None);
            for (at_bytes, what) in self.records(place) {
                let [at, _, kind, request] = what;
                if request != 0 {
                    requests.insert(request);
                }
                if (at_bytes as u64) < begin {
                    continue;
                }
                let data_at = LOG_AT_BYTES + at_bytes + RECORD_HEAD_BYTES;
                writes.push((
                    at,
                    kind & KILL_SET_ID != 0,
                    self.bytes(place, data_at, what[1] as usize),
                ));
                if (at_bytes as u64) < sent_to {
                    under_way = Some((RequestId(self.get(place, SENT_BY)), writes.len()));
                }
            }
            if self.get(place, STATE) != IN_USE {
                continue;
            }
            let identity = self.get(place, IDENTITY_LEN) as usize;
            let identity = self.bytes(place, IDENTITY_AT_BYTES, identity.min(IDENTITY_MAX_BYTES));
            let Some(who) = get_identity(&identity).filter(|_| !writes.is_empty()) else {
                self.clear(KeptPlace(place)); // the process died before anything was noted
                continue;
            };
            kept.push(InheritedKept {
                place: KeptPlace(place),
                id: FileId { ino: self.get(place, FILE), generation: self.get(place, FILE + 1) },
                handle: self.get(place, HANDLE),
                how: OpenHow::new(self.get(place, HOW) as u32 as i32),
                who,
                pid: Pid(self.get(place, PROCESS) as u32),
                lease,
                base,
                under_way,
                writes,
            });
        }
        (kept, requests)
    }

    /// Where the records of a place begin in its log, and their heads.
    fn records(&self, place: usize) -> Vec<(usize, [u64; 4])> {
        let (mut records, mut at_bytes) = (Vec::new(), 0);
        let used = (self.get(place, USED) as usize).min(LOG_BYTES);
        while at_bytes + RECORD_HEAD_BYTES <= used {
            let head = self.bytes(place, LOG_AT_BYTES + at_bytes, RECORD_HEAD_BYTES);
            let word = |index: usize| {
                u64::from_le_bytes(std::array::from_fn(|byte| head[8 * index + byte]))
            };
            let head = std::array::from_fn(word);
            let [_, len_bytes, ..]: [u64; 4] = head;
            let len_bytes = record_bytes((len_bytes as usize).min(LOG_BYTES));
            if at_bytes + len_bytes > used {
                break;
            }
            records.push((at_bytes, head));
            at_bytes += len_bytes;
        }
        records
    }
}

impl Drop for KeptPlaces {
    fn drop(&mut self) {
        if let PlaceMemory::Mapped(start) = self.memory {
            // SAFETY: mapped by us with this length; nobody can refer to it any more.
            unsafe { libc::munmap(start.as_ptr().cast(), KEPT_BYTES) };
        }
    }
}

/// Bytes of a record in the log.
fn record_bytes(data_bytes: usize) -> usize {
    RECORD_HEAD_BYTES + data_bytes.next_multiple_of(8)
}

fn put_identity(who: &Identity) -> Vec<u8> {
    let numbers = [who.uid.0, who.gid.0, who.groups.len() as u32];
    let numbers = numbers.into_iter().chain(who.groups.iter().map(|group| group.0));
    let mut bytes: Vec<u8> = numbers.flat_map(u32::to_le_bytes).collect();
    bytes.extend_from_slice(who.job.as_bytes());
    bytes
}

fn get_identity(bytes: &[u8]) -> Option<Identity> {
    let number = |index: usize| {
        let bytes = bytes.get(4 * index..4 * index + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    let count = number(2)? as usize;
    let groups =
        (0..count).map(|index| number(3 + index).map(Gid)).collect::<Option<Box<[Gid]>>>()?;
    let job = std::str::from_utf8(bytes.get(4 * (3 + count)..)?).ok()?.into();
    Some(Identity { uid: Uid(number(0)?), gid: Gid(number(1)?), groups, job })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who() -> Identity {
        let groups = [Gid(4), Gid(27)].into();
        Identity { uid: Uid(1000), gid: Gid(100), groups, job: "job-7".into() }
    }

    fn file(who: &Identity) -> NotedFile<'_> {
        let time = |sec| Timestamp { sec, nsec: 5 };
        NotedFile {
            id: FileId { ino: 7, generation: 8 },
            handle: 9,
            how: OpenHow::READ_WRITE,
            who,
            pid: Pid(3),
            lease: 77,
            base: WriteBase { size: 10, mtime: time(-1), ctime: time(2) },
        }
    }

    fn record(at: u64, request: u64, data: &[u8]) -> KeptRecord<'_> {
        KeptRecord { at, kill_set_id: at == 0, request: RequestId(request), data }
    }

    /// The memory as the next process maps it.
    fn next(memory: &SessionMemory) -> KeptPlaces {
        let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
        SessionMemory::from_fd(fd).unwrap().kept_places()
    }

    // proves: P281
    #[test]
    fn the_next_process_finds_what_was_kept_and_what_of_it_was_being_sent() {
        let (memory, who) = (SessionMemory::create_memfd().unwrap(), who());
        let places = memory.kept_places();
        places.begin(&file(&who)).unwrap();
        assert!(next(&memory).inherited().0.is_empty(), "nothing was noted");
        let place = places.begin(&file(&who)).unwrap();
        assert!(
            places.note(place, &record(0, 50, b"one"))
                && places.note(place, &record(8, 51, b"two"))
        );
        places.is_sending(place, RequestId(1 << 63));
        assert!(places.note(place, &record(100, 0, &[7; 5000])));
        let (kept, requests) = next(&memory).inherited();
        assert_eq!(requests, HashSet::from([50, 51]));
        let [found] = &kept[..] else { panic!("{} files", kept.len()) };
        let expected = file(&who);
        assert_eq!((found.id, found.handle, found.how.flags), (expected.id, 9, expected.how.flags));
        assert_eq!(
            (&found.who, found.pid, found.lease, found.base),
            (&who, Pid(3), 77, expected.base)
        );
        assert_eq!(found.under_way, Some((RequestId(1 << 63), 2)));
        let writes =
            [(0, true, b"one".to_vec()), (8, false, b"two".to_vec()), (100, false, vec![7; 5000])];
        assert_eq!(found.writes, writes);
        let base = WriteBase { size: 99, ..expected.base };
        assert!(!places.is_sent(place, (78, base)), "there is more");
        let (kept, _) = next(&memory).inherited();
        assert_eq!((kept[0].lease, kept[0].base, kept[0].under_way), (78, base, None));
        assert_eq!(kept[0].writes, writes[2..]);
        places.is_sending(place, RequestId(5));
        assert!(places.is_sent(place, (78, base)));
        let (kept, requests) = next(&memory).inherited();
        assert_eq!((kept.len(), requests.contains(&50)), (0, true), "the kernel may ask once more");
    }

    // proves: P258
    #[test]
    fn places_and_their_logs_have_bounds() {
        let (memory, who) = (SessionMemory::create_memfd().unwrap(), who());
        let places = memory.kept_places();
        let all: Vec<_> = std::iter::from_fn(|| places.begin(&file(&who))).collect();
        assert_eq!(all.len(), PLACES);
        let data = vec![1; 64 << 10];
        let noted = (0..9).filter(|at| places.note(all[0], &record(at << 16, 0, &data))).count();
        assert_eq!(noted, 7, "a batch that is being sent, and nearly another one");
        places.clear(all[0]);
        assert!(places.begin(&file(&who)).is_some());
        let many = Identity { groups: (0..1000).map(Gid).collect(), ..who.clone() };
        places.clear(all[1]);
        assert!(places.begin(&file(&many)).is_none());
        assert!(places.begin(&file(&who)).is_some());
    }

    #[test]
    fn memory_that_ends_with_the_process_needs_no_places() {
        let places = SessionMemory::heap().kept_places();
        assert!(!places.are_needed() && places.inherited().0.is_empty());
    }
}
