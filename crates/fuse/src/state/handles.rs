//! The handle table: the kernel's file handles and the open files behind them.
//!
//! A handle is a slot of the table and the number of times that the slot was reused. What is needed
//! to open the file again is in [`State`]. The open file itself is beside it on the heap, and after
//! a restart is opened when it is first needed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use dray_core::{
    Context, Errno, Error, FileId, FileSystem, IdMap, LockOwner, OpenFile, OpenHow, RequestId,
    Result, SessionControl,
};

use crate::front::dirs::Listing;
use crate::state::passthrough::OpenMode;
use crate::state::{HANDLES_MAX, State, header};
use crate::worker::versions::PageDrop;

/// Offsets within a record.
const INO: usize = 0;
const GENERATION: usize = 8;
/// Flags of open(2), lower half; `USED`; above it the times that the slot was reused. One
/// word, so that a kill leaves the record either valid or free.
const STATE: usize = 16;
/// The kernel's number of the request that opened it.
const REQUEST: usize = 24;
const USED: u64 = 1 << 32;
/// Where the count of reuse begins in `STATE`.
const REUSE_SHIFT: u32 = 33;

/// An open file or directory of the kernel's.
pub(crate) struct OpenHandle {
    pub(crate) id: FileId,
    /// Flags of open(2), without those that create or cut.
    pub(crate) flags: i32,
    /// The request that opened it.
    request: RequestId,
    file: Mutex<Option<Arc<dyn OpenFile>>>,
    /// Which pages its opening has the kernel drop, until that is known to be done; 0: none.
    drops: AtomicU64,
    /// A page of a mapping has been written through it.
    mapped: AtomicBool,
    /// How the kernel has it open, where that matters.
    mode: OnceLock<OpenMode>,
    /// Whether the kernel may keep the listing of a directory that it reads through this. Of what a predecessor
    /// opened nobody knows.
    keeps_listing: OnceLock<bool>,
    /// What was read of a directory and not yet asked for.
    pub(crate) listing: Mutex<Listing>,
}

impl OpenHandle {
    /// The open file, opened again if this process has not done so.
    pub(crate) async fn file(
        &self,
        cx: &Context,
        fs: &dyn FileSystem,
        session: &dyn SessionControl,
    ) -> Result<Arc<dyn OpenFile>> {
        if let Some(file) = self.opened() {
            return Ok(file);
        }
        let how = OpenHow::new(self.flags);
        let file = match session.attach(self.id, how, self.request) {
            Some(file) => file,
            None => fs.open(cx, self.id, how).await?,
        };
        Ok(self.slot().get_or_insert(file).clone())
    }

    /// The open file if there is one in this process.
    pub(crate) fn opened(&self) -> Option<Arc<dyn OpenFile>> {
        self.slot().clone()
    }

    /// A page of a mapping was written through it; true for the first time.
    pub(crate) fn note_mapped(&self) -> bool {
        !self.mapped.load(Ordering::Relaxed) && !self.mapped.swap(true, Ordering::Relaxed)
    }

    /// Which pages the kernel was asked to drop when it opened this, once: of that a request
    /// through the open file is the proof.
    pub(crate) fn take_dropping(&self) -> Option<PageDrop> {
        if self.drops.load(Ordering::Relaxed) == 0 {
            return None; // as good as always
        }
        Some(PageDrop(self.drops.swap(0, Ordering::Relaxed))).filter(|dropping| dropping.0 != 0)
    }

    /// To be said before the kernel hears of the handle.
    pub(crate) fn is_open_as(&self, mode: OpenMode) {
        let _ = self.mode.set(mode); // it is said once
    }

    /// Whether the kernel may keep what it lists through this. To be said before the kernel hears of the handle.
    pub(crate) fn keeps_listing(&self, keeps: bool) {
        let _ = self.keeps_listing.set(keeps); // it is said once
    }

    pub(crate) fn may_keep_listing(&self) -> bool {
        self.keeps_listing.get().copied().unwrap_or(true)
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<dyn OpenFile>>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) struct Handles {
    state: State,
    live: Mutex<Live>,
}

#[derive(Default)]
struct Live {
    slots: Vec<Option<Arc<OpenHandle>>>,
    free: Vec<u64>,
    /// Slots that a predecessor took, by the request that opened them. If the kernel did
    /// not hear of the handle, it sends that request again.
    left: IdMap<RequestId, u64>,
}

/// Flags that must not be repeated when a file is opened again.
const ONCE: i32 =
    libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | (libc::O_TMPFILE & !libc::O_DIRECTORY);

impl Handles {
    /// The table of `state`, with whatever a predecessor left in it.
    pub(crate) fn new(state: State) -> Handles {
        let handles = Handles { state, live: Mutex::default() };
        handles.rebuild();
        handles
    }

    fn rebuild(&self) {
        let mut live = self.lock();
        let used = self.state.region.load(header::HANDLES_USED).min(HANDLES_MAX);
        for slot in 0..used {
            let state = self.get(slot, STATE);
            if state & USED == 0 {
                live.free.push(slot);
                live.slots.push(None);
                continue;
            }
            let id = FileId { ino: self.get(slot, INO), generation: self.get(slot, GENERATION) };
            let request = RequestId(self.get(slot, REQUEST));
            live.left.insert(request, slot);
            live.slots.push(Some(handle(id, state as i32, request, None)));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, slot: u64, field: usize) -> u64 {
        self.state.region.load(State::handle_at(slot) + field)
    }

    fn set(&self, slot: u64, field: usize, value: u64) {
        self.state.region.store(State::handle_at(slot) + field, value);
    }

    fn reuse(&self, slot: u64) -> u64 {
        self.get(slot, STATE) >> REUSE_SHIFT
    }

    /// Attaches what a predecessor had open, as far as `session` can.
    pub(crate) fn attach(&self, session: &dyn SessionControl) {
        let left: Vec<Arc<OpenHandle>> = self.lock().slots.iter().flatten().cloned().collect();
        for handle in left {
            let mut slot = handle.slot();
            if slot.is_none() {
                *slot = session.attach(handle.id, OpenHow::new(handle.flags), handle.request);
            }
        }
        session.attached();
        session.release_inherited();
    }

    /// A handle for a file just opened with `flags` by `request`, which has the kernel drop
    /// pages if `dropping`. If a predecessor made one for that request and died before it said
    /// so, it is that one. `ENFILE` when the table is full.
    pub(crate) fn add(
        &self,
        file: Arc<dyn OpenFile>,
        flags: i32,
        request: RequestId,
        dropping: Option<PageDrop>,
    ) -> Result<u64> {
        let id = file.id();
        let flags = flags & !ONCE;
        let mut live = self.lock();
        if let Some(slot) = live.left.remove(&request) {
            live.slots[slot as usize] = Some(handle(id, flags, request, Some((file, dropping))));
            return Ok(self.reuse(slot) << 32 | slot);
        }
        let slot = match live.free.pop() {
            Some(slot) => slot,
            None if (live.slots.len() as u64) < HANDLES_MAX => {
                live.slots.push(None);
                self.state.region.store(header::HANDLES_USED, live.slots.len() as u64);
                live.slots.len() as u64 - 1
            }
            None => return Err(Error::new(Errno::ENFILE).because("too many files are open")),
        };
        let reuse = (self.reuse(slot) + 1) & (u64::MAX >> REUSE_SHIFT);
        self.set(slot, INO, id.ino);
        self.set(slot, GENERATION, id.generation);
        self.set(slot, REQUEST, request.0);
        // Last: makes it valid.
        self.set(slot, STATE, reuse << REUSE_SHIFT | USED | u64::from(flags as u32));
        live.slots[slot as usize] = Some(handle(id, flags, request, Some((file, dropping))));
        Ok(reuse << 32 | slot)
    }

    /// The handle that a predecessor made for `request` and died before the kernel heard of it, and its
    /// number. Only for a request that the kernel sends again.
    pub(crate) fn left_by(&self, request: RequestId) -> Option<(u64, Arc<OpenHandle>)> {
        let live = self.lock();
        let slot = *live.left.get(&request)?;
        let handle = live.slots.get(slot as usize)?.clone()?;
        Some((self.reuse(slot) << 32 | slot, handle))
    }

    /// The handle of that number; `EBADF` if it was never given out or is closed.
    pub(crate) fn find(&self, fh: u64) -> Result<Arc<OpenHandle>> {
        let slot = fh & 0xffff_ffff;
        let live = self.lock();
        match live.slots.get(slot as usize) {
            Some(Some(handle)) if self.reuse(slot) == fh >> 32 => Ok(handle.clone()),
            _ => Err(Error::new(Errno::EBADF).because("the kernel names an unknown handle")),
        }
    }

    /// Takes a handle out of the table.
    pub(crate) fn remove(&self, fh: u64) -> Result<Arc<OpenHandle>> {
        let handle = self.find(fh)?;
        let slot = fh & 0xffff_ffff;
        let mut live = self.lock();
        self.set(slot, STATE, self.reuse(slot) << REUSE_SHIFT);
        live.left.remove(&handle.request);
        if live.slots[slot as usize].take().is_some() {
            live.free.push(slot);
        }
        Ok(handle)
    }

    /// The owner of a flock(2) lock that the kernel asks for through `fh` in the name of `owner`.
    /// It is the open file. The kernel's name is the address of that, which the next open file may
    /// have before the close of this one has come. That close would end the other's lock. Where a
    /// predecessor took locks by that name, it stays so, since some of them may be held.
    pub(crate) fn flock_owner(&self, fh: u64, owner: u64) -> LockOwner {
        let by_handle = self.state.region.load(header::FLOCKS) != 0;
        LockOwner::own(if by_handle { fh } else { owner })
    }

    /// What is open, each as often as it is.
    pub(crate) fn ids(&self) -> Vec<FileId> {
        self.lock().slots.iter().flatten().map(|handle| handle.id).collect()
    }

    /// Open files and directories.
    pub(crate) fn count(&self) -> usize {
        let live = self.lock();
        live.slots.len() - live.free.len()
    }
}

fn handle(
    id: FileId,
    flags: i32,
    request: RequestId,
    opened: Option<(Arc<dyn OpenFile>, Option<PageDrop>)>,
) -> Arc<OpenHandle> {
    let (file, dropping) = opened.unzip();
    let drops = AtomicU64::new(dropping.flatten().map_or(0, |dropping| dropping.0));
    let (file, listing) = (Mutex::new(file), Mutex::default());
    Arc::new(OpenHandle {
        id,
        flags,
        request,
        file,
        drops,
        mapped: AtomicBool::new(false),
        mode: OnceLock::new(),
        keeps_listing: OnceLock::new(),
        listing,
    })
}

#[cfg(test)]
mod tests {
    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_core::{CreateHow, Name, OpenHow};

    use super::*;

    fn opened() -> Arc<dyn OpenFile> {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let (fs, cx) = (MemoryFs::new(MemoryOptions::default()), Context::system());
            let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
            let (root, name) = (fs.info().root, Name::new(b"f").unwrap());
            fs.create(&cx, root, name, how).await.unwrap().1
        })
    }

    #[test]
    fn a_handle_that_was_closed_is_not_the_next_one_of_its_slot() {
        let handles = Handles::new(State::create().unwrap());
        let add = |request| handles.add(opened(), libc::O_RDWR, RequestId(request), None);
        let first = add(1).unwrap();
        handles.remove(first).unwrap();
        let second = add(2).unwrap();
        assert_eq!((first as u32, handles.count()), (second as u32, 1), "the slot is used again");
        let unknown = |fh| handles.find(fh).err().map(|error| error.errno());
        assert_eq!((unknown(first), unknown(second)), (Some(Errno::EBADF), None));
        assert!(handles.remove(first).is_err() && handles.find(second).is_ok());
    }

    #[test]
    fn flocks_belong_to_handles_unless_a_predecessor_saw_it_otherwise() {
        let state = State::create().unwrap();
        assert_eq!(Handles::new(state.clone()).flock_owner(7, 9), LockOwner::own(7));
        assert_eq!(Handles::new(state.clone()).flock_owner(7, 9), LockOwner::own(7));
        state.region.store(header::FLOCKS, 0);
        assert_eq!(Handles::new(state).flock_owner(7, 9), LockOwner::own(9));
    }

    #[test]
    fn a_successor_gives_the_same_handle_to_the_same_request_until_it_is_closed() {
        let state = State::create().unwrap();
        let before = Handles::new(state.clone());
        let left = before.add(opened(), libc::O_RDWR, RequestId(7), None).unwrap();
        let add = |handles: &Handles, request| {
            handles.add(opened(), libc::O_RDWR, RequestId(request), None).unwrap()
        };
        assert_eq!(add(&Handles::new(state.clone()), 7), left);
        let handles = Handles::new(state);
        assert!(handles.left_by(RequestId(8)).is_none());
        assert_eq!(handles.left_by(RequestId(7)).unwrap().0, left);
        handles.remove(left).unwrap();
        assert!(handles.left_by(RequestId(7)).is_none());
        let other = add(&handles, 8);
        assert_eq!(left as u32, other as u32, "the slot is used again");
        assert_ne!(add(&handles, 7) as u32, other as u32, "that slot is another's by now");
    }
}
