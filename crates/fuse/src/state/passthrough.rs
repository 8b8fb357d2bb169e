//! Files that the kernel reads by itself, from copies on a local disk (ADR 0055).
//!
//! As long as an inode has an open file that reads a copy, the kernel wants all its open files to be of that kind. They have
//! the same copy then. So each open file of a regular file is counted here, by node.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Attr, FileId, IdMap, LocalCopy, OpenFile, Pid, Timestamp};
use dray_rt::{Instant, now};

use crate::mount::device::{close_backing, open_backing};
use crate::proto::abi::fopen;

/// Files that are read so at a time. Each takes two open files of the kernel, which count for no process.
const FILES_MAX: usize = 1 << 16;
/// Callers that are expected to look a name up once more, and for how long: the kernel comes again at once.
const STALE_MAX: usize = 64;
const STALE_FOR: Duration = Duration::from_secs(1);
/// Errors after which it is not tried again: no right to it, a disk on a stacked file system, no such call.
const FOR_GOOD: [i32; 5] = [libc::EPERM, libc::ELOOP, libc::ENOTTY, libc::EOPNOTSUPP, libc::EINVAL];

/// What goes on with copies that the kernel reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassthroughStats {
    /// The kernel has agreed to read copies.
    pub agreed: bool,
    /// Files whose copies the kernel has now: as many numbers of copies are taken.
    pub files: usize,
    /// Files opened so that the kernel reads a copy.
    pub opens: u64,
    /// The last error of the kernel when it was given a copy.
    pub refused: Option<i32>,
    /// Copies that were to follow a change of their file, and could not.
    pub left_behind: u64,
}

/// A copy, and the open files that read it.
pub(crate) type ReadCopy = (Arc<dyn LocalCopy>, Vec<Arc<dyn OpenFile>>);

/// A version of a file, as its attributes at an opening name it.
pub(crate) type OpenedVersion = (u64, Timestamp, Timestamp);

pub(crate) fn version_of(attr: &Attr) -> OpenedVersion {
    (attr.size, attr.mtime, attr.ctime)
}

pub(crate) struct Passthrough {
    device: Arc<OwnedFd>,
    agreed: bool,
    nodes: Mutex<Table>,
    opens: AtomicU64,
    /// The last error; 0: none.
    refused: AtomicI32,
    left_behind: AtomicU64,
}

#[derive(Default)]
struct Table {
    nodes: IdMap<u64, NodeOpens>,
    /// Of these with a copy.
    through: usize,
    /// The number of the next reader.
    readers: u64,
    /// Callers that were answered with ESTALE for a node.
    stale: VecDeque<(Pid, u64, Instant)>,
}

#[derive(Default)]
struct NodeOpens {
    /// Open files that are served by requests.
    others: usize,
    /// A predecessor had the file open, and how is not known.
    unknown: bool,
    through: Option<Through>,
}

impl NodeOpens {
    fn is_empty(&self) -> bool {
        self.others == 0 && self.through.is_none() && !self.unknown
    }
}

/// A copy that the kernel has.
struct Through {
    id: FileId,
    backing: u32,
    copy: Arc<dyn LocalCopy>,
    version: OpenedVersion,
    /// The file has changed since.
    changed: bool,
    readers: Vec<(u64, Arc<dyn OpenFile>)>,
}

/// How a file is open in the kernel; counted until this is dropped.
pub(crate) struct OpenMode {
    table: Arc<Passthrough>,
    node: u64,
    through: Option<Reader>,
}

/// An open file of an inode of which the kernel has a copy.
#[derive(Clone, Copy)]
struct Reader {
    /// The kernel's number of the copy.
    backing: u32,
    /// The number of this one among the readers.
    number: u64,
    /// This one does not read the copy.
    beside: bool,
}

impl OpenMode {
    /// Flags for the kernel, and the number of the copy. None: those of any open file.
    pub(crate) fn kernel_flags(&self) -> Option<(u32, u32)> {
        self.through.map(|reader| match reader.beside {
            true => (fopen::PASSTHROUGH | fopen::DIRECT_IO, reader.backing),
            false => (fopen::PASSTHROUGH, reader.backing),
        })
    }
}

impl Drop for OpenMode {
    fn drop(&mut self) {
        self.table.closed(self.node, self.through.map(|reader| reader.number));
    }
}

/// The file is open in a way that the kernel does not mix with the one wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenConflict;

impl Passthrough {
    pub(crate) fn new(device: Arc<OwnedFd>, agreed: bool) -> Passthrough {
        let (opens, left_behind) = (AtomicU64::new(0), AtomicU64::new(0));
        let (nodes, refused) = (Mutex::default(), AtomicI32::new(0));
        Passthrough { device, agreed, nodes, opens, refused, left_behind }
    }

    pub(crate) fn is_agreed(&self) -> bool {
        self.agreed
    }

    /// Whether a copy may be asked for.
    pub(crate) fn is_wanted(&self) -> bool {
        self.agreed && !FOR_GOOD.contains(&self.refused.load(Ordering::Relaxed))
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A predecessor has left an open file.
    pub(crate) fn inherited(&self, node: u64) {
        self.lock().nodes.entry(node).or_default().unknown = true;
    }

    /// Whether all open files of a node read a copy, or may.
    pub(crate) fn is_through(&self, node: u64) -> bool {
        let is_through = |opens: &NodeOpens| opens.unknown || opens.through.is_some();
        self.agreed && self.lock().nodes.get(&node).is_some_and(is_through)
    }

    /// A file has been opened, of which the kernel is to read this copy if it can be.
    pub(crate) fn opened(
        self: &Arc<Self>,
        node: u64,
        file: &Arc<dyn OpenFile>,
        copy: Option<(Arc<dyn LocalCopy>, OpenedVersion)>,
    ) -> Result<OpenMode, OpenConflict> {
        let mut table = self.lock();
        let Table { nodes, through: count, readers, .. } = &mut *table;
        let opens = nodes.entry(node).or_default();
        if opens.unknown {
            return Err(OpenConflict);
        }
        if let Some(through) = &mut opens.through {
            // The number of a node may be that of another file while a close is under way.
            let same = through.id == file.id() && !through.changed;
            return match same && copy.is_some_and(|(_, version)| version == through.version) {
                true => Ok(self.read_through(node, through, readers, (file, false))),
                false => Err(OpenConflict),
            };
        }
        let copy = copy.filter(|_| opens.others == 0 && *count < FILES_MAX);
        if let Some((copy, version)) = copy
            && let Some(backing) = self.backing(&*copy)
        {
            let (id, changed) = (file.id(), false);
            let mut through = Through { id, backing, copy, version, changed, readers: Vec::new() };
            let mode = self.read_through(node, &mut through, readers, (file, false));
            opens.through = Some(through);
            *count += 1;
            return Ok(mode);
        }
        opens.others += 1;
        Ok(OpenMode { table: self.clone(), node, through: None })
    }

    fn read_through(
        self: &Arc<Self>,
        node: u64,
        through: &mut Through,
        readers: &mut u64,
        (file, beside): (&Arc<dyn OpenFile>, bool),
    ) -> OpenMode {
        *readers += 1;
        through.readers.push((*readers, file.clone()));
        self.opens.fetch_add(u64::from(!beside), Ordering::Relaxed);
        let reader = Reader { backing: through.backing, number: *readers, beside };
        OpenMode { table: self.clone(), node, through: Some(reader) }
    }

    /// The same for a file that is not to read the copy, and cannot have another node. None: there is no copy by now.
    pub(crate) fn opened_beside(
        self: &Arc<Self>,
        node: u64,
        file: &Arc<dyn OpenFile>,
    ) -> Option<OpenMode> {
        let mut table = self.lock();
        let Table { nodes, readers, .. } = &mut *table;
        let through = nodes.get_mut(&node)?.through.as_mut()?;
        Some(self.read_through(node, through, readers, (file, true)))
    }

    fn backing(&self, copy: &dyn LocalCopy) -> Option<u32> {
        match open_backing(self.device.as_fd(), copy.file()) {
            Ok(backing) => Some(backing),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                self.refused.store(errno, Ordering::Relaxed);
                None
            }
        }
    }

    fn closed(&self, node: u64, reader: Option<u64>) {
        let mut table = self.lock();
        let Table { nodes, through: count, .. } = &mut *table;
        let Some(opens) = nodes.get_mut(&node) else { return };
        match (reader, &mut opens.through) {
            (None, _) => opens.others -= 1,
            (Some(reader), Some(through)) => {
                through.readers.retain(|(number, _)| *number != reader);
                if through.readers.is_empty() {
                    // The kernel ends the reading of the copy before it says that the file was closed.
                    let _ = close_backing(self.device.as_fd(), through.backing); // else the mount has ended
                    opens.through = None;
                    *count -= 1;
                }
            }
            (Some(_), None) => {}
        }
        if opens.is_empty() {
            nodes.remove(&node);
        }
    }

    /// A file has changed: no further opens read its copies. Answers these, each with the open files that read it.
    pub(crate) fn changed(&self, id: FileId) -> Vec<ReadCopy> {
        if !self.agreed {
            return Vec::new();
        }
        let mut table = self.lock();
        if table.through == 0 {
            return Vec::new();
        }
        let copies = table.nodes.values_mut().filter_map(|opens| opens.through.as_mut());
        let copies = copies.filter(|through| through.id == id);
        copies
            .map(|through| {
                through.changed = true;
                let readers = through.readers.iter().map(|(_, file)| file.clone());
                (through.copy.clone(), readers.collect())
            })
            .collect()
    }

    /// A copy could not follow a change.
    pub(crate) fn note_left_behind(&self) {
        self.left_behind.fetch_add(1, Ordering::Relaxed);
    }

    /// The caller is answered with ESTALE for this node.
    pub(crate) fn expect_again(&self, caller: Pid, node: u64) {
        let mut table = self.lock();
        if table.stale.len() >= STALE_MAX {
            table.stale.pop_front();
        }
        table.stale.push_back((caller, node, now()));
    }

    /// Whether the caller was answered so, and has come to the same node again: it names no path.
    pub(crate) fn came_back(&self, caller: Pid, node: u64) -> bool {
        let mut table = self.lock();
        table.stale.retain(|(_, _, since)| since.elapsed() < STALE_FOR);
        let found = table.stale.iter().position(|one| (one.0, one.1) == (caller, node));
        found.is_some_and(|index| table.stale.remove(index).is_some())
    }

    /// The kernel has forgotten the node. Its last closes may be under way, and count until they are done.
    pub(crate) fn forget(&self, node: u64) {
        if !self.agreed {
            return;
        }
        let mut table = self.lock();
        if let Some(opens) = table.nodes.get_mut(&node) {
            opens.unknown = false;
            if opens.is_empty() {
                table.nodes.remove(&node);
            }
        }
    }

    pub(crate) fn stats(&self) -> PassthroughStats {
        let refused = self.refused.load(Ordering::Relaxed);
        PassthroughStats {
            agreed: self.agreed,
            files: self.lock().through,
            opens: self.opens.load(Ordering::Relaxed),
            refused: (refused != 0).then_some(refused),
            left_behind: self.left_behind.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_core::{Context, CreateHow, FileSystem, Name, OpenHow};

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

    fn table() -> Arc<Passthrough> {
        let device = std::fs::File::open("/dev/null").unwrap();
        Arc::new(Passthrough::new(Arc::new(device.into()), true))
    }

    /// FORGET overtakes a RELEASE that waits for the server. Then the close of the former file was counted for
    /// the next one, which has its number. The number of a copy was never given back.
    // proves: P267
    #[test]
    fn a_file_is_open_until_its_close_is_done_whatever_the_kernel_has_forgotten() {
        let (table, file) = (table(), opened());
        let open = || table.opened(7, &file, None).unwrap();
        let others = || table.lock().nodes.get(&7).map_or(0, |opens| opens.others);
        let former = open();
        table.forget(7);
        let next = open();
        assert_eq!(others(), 2);
        drop(former);
        assert_eq!(others(), 1, "the next file is open");
        drop(next);
        assert!(table.lock().nodes.is_empty());
    }

    /// How an open file of a predecessor is open in the kernel nobody knows.
    // proves: P268
    #[test]
    fn an_inherited_file_takes_no_further_opens_until_the_kernel_has_forgotten_it() {
        let (table, file) = (table(), opened());
        table.inherited(7);
        assert!(table.is_through(7));
        assert_eq!(table.opened(7, &file, None).err(), Some(OpenConflict));
        table.forget(7);
        assert!(!table.is_through(7) && table.opened(7, &file, None).is_ok());
    }

    #[test]
    fn a_caller_comes_back_once() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let table = table();
            table.expect_again(Pid(1), 7);
            assert!(!table.came_back(Pid(1), 8) && !table.came_back(Pid(2), 7));
            assert!(table.came_back(Pid(1), 7) && !table.came_back(Pid(1), 7));
            table.expect_again(Pid(1), 7);
            dray_rt::sleep(STALE_FOR * 2).await;
            assert!(!table.came_back(Pid(1), 7), "that is another call");
        });
    }
}
