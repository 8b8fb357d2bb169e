//! Which project (of a quota) a file is of. An ioctl(2) on an open file tells it, which may wait for a disk, and a
//! call is admitted before it waits for anything. So projects are learned while files are opened, and remembered.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::{Context, FileId, FileSystem, OpenFile, OpenHow};

use super::bucket::Nanos;
use super::gate::nanos;

/// Parts of the table, each with a lock of its own.
const SHARDS: usize = 64;
/// Files of one part. All parts together take 16 MiB at most.
const FILES_MAX: usize = 4096;
/// A file is asked again when it is opened later than that after the last time. Others may change its project.
const FRESH: Nanos = 10_000_000_000;

/// The projects of files that were opened of late.
pub struct ProjectTable {
    is_on: AtomicBool,
    shards: [Mutex<ProjectShard>; SHARDS],
}

#[derive(Default)]
struct ProjectShard {
    known: HashMap<FileId, KnownProject>,
    /// In the order in which they were learned first. The oldest makes room.
    order: VecDeque<FileId>,
}

#[derive(Clone, Copy)]
struct KnownProject {
    project: u32,
    learned_at: Nanos,
}

impl Default for ProjectTable {
    fn default() -> ProjectTable {
        let shards = std::array::from_fn(|_| Mutex::default());
        ProjectTable { is_on: AtomicBool::new(false), shards }
    }
}

impl ProjectTable {
    /// Whether projects count now. Where they do not, an open costs one look at a flag.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Begins, or ends and forgets all.
    pub(super) fn switch(&self, is_on: bool) {
        if self.is_on.swap(is_on, Ordering::Relaxed) && !is_on {
            self.shards.iter().for_each(|shard| *lock(shard) = ProjectShard::default());
        }
    }

    fn shard(&self, id: FileId) -> MutexGuard<'_, ProjectShard> {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15; // 2^64 over the golden ratio
        let mixed = (id.ino ^ id.generation.rotate_left(32)).wrapping_mul(ODD);
        lock(&self.shards[(mixed >> 58) as usize % SHARDS])
    }

    /// The project of a file; 0: it has none, or is not known.
    pub fn get(&self, id: FileId) -> u32 {
        self.shard(id).known.get(&id).map_or(0, |known| known.project)
    }

    fn is_fresh(&self, id: FileId) -> bool {
        let learned = self.shard(id).known.get(&id).map(|known| known.learned_at);
        learned.is_some_and(|at| nanos().saturating_sub(at) < FRESH)
    }

    pub(crate) fn learn(&self, id: FileId, project: u32) {
        let known = KnownProject { project, learned_at: nanos() };
        let mut shard = self.shard(id);
        if shard.known.insert(id, known).is_some() {
            return;
        }
        shard.order.push_back(id);
        if shard.order.len() > FILES_MAX
            && let Some(oldest) = shard.order.pop_front()
        {
            shard.known.remove(&oldest);
        }
    }

    /// Learns the project of a file that has just been opened. Where the file system tells none, it is 0.
    pub(crate) async fn learn_opened(&self, cx: &Context, file: &dyn OpenFile) {
        if !self.is_fresh(file.id()) {
            let project = file.get_xflags(&cx.uncounted()).await.map_or(0, |all| all.project);
            self.learn(file.id(), project);
        }
    }

    /// Learns the project of a directory, before something is looked for in it or made in it. It is opened with
    /// the rights of the caller. A caller who may not read it leaves its project unknown.
    pub(crate) async fn learn_dir(&self, cx: &Context, fs: &dyn FileSystem, dir: FileId) {
        if self.is_fresh(dir) {
            return;
        }
        let cx = cx.uncounted();
        match fs.open(&cx, dir, OpenHow::new(libc::O_RDONLY | libc::O_DIRECTORY)).await {
            Ok(opened) => {
                let project = opened.get_xflags(&cx).await.map_or(0, |all| all.project);
                self.learn(dir, project);
                let _ = opened.close(&cx).await; // nothing was written
            }
            Err(_) => self.learn(dir, self.get(dir)), // asked again when that is old
        }
    }
}

fn lock(shard: &Mutex<ProjectShard>) -> MutexGuard<'_, ProjectShard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(ino: u64) -> FileId {
        FileId { ino, generation: 1 }
    }

    #[test]
    fn the_table_is_bounded_and_forgets_the_oldest() {
        let table = ProjectTable::default();
        table.switch(true);
        let all = (SHARDS * FILES_MAX / 4 * 5) as u64;
        (1..=all).for_each(|ino| table.learn(file(ino), ino as u32));
        let known = (1..=all).filter(|ino| table.get(file(*ino)) != 0).count();
        assert!(known <= SHARDS * FILES_MAX && known > SHARDS * FILES_MAX / 2, "{known}");
        assert_eq!((table.get(file(1)), table.get(file(all))), (0, all as u32));
        table.learn(file(all), 7);
        assert_eq!(table.get(file(all)), 7);
        table.switch(false);
        assert_eq!(table.get(file(all)), 0);
    }
}
