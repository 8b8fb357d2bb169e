//! Where the server's last writes of files ended, for file systems whose sizes lag behind.
//!
//! A mount of MooseFS can show the size from before the last write, for a moment while a file is flushed. The kernel
//! takes that size for its own, and places the next `O_APPEND` write by it (`generic_write_checks` in fs/read_write.c).
//! The append would overwrite what was written last. So the server of the file places appends itself, behind the
//! bytes that it has written.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{FileId, IdMap};
use dray_rt::Instant;

/// How long after a write, or a flush, the file system below may show a former size. A flush ends within
/// milliseconds. No other server takes a file over and gives it back within that time.
const LAG_MAX: Duration = Duration::from_secs(2);

/// Files that are remembered at once, some 64 bytes each. With more within [`LAG_MAX`] the oldest are forgotten.
const FILES_MAX: usize = 65_536;

/// The ends of the last writes, file by file.
#[derive(Default)]
pub(crate) struct WrittenEnds {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    by_id: IdMap<FileId, End>,
    /// The oldest first. One that is not the time of its file's end in `by_id` counts for nothing.
    order: VecDeque<(Instant, FileId)>,
}

struct End {
    offset: u64,
    at: Instant,
}

impl WrittenEnds {
    /// A write or a copy to the file ended at this offset.
    pub(crate) fn written(&self, id: FileId, offset: u64) {
        self.note(id, |before| Some(before.map_or(offset, |before| before.max(offset))));
    }

    /// The file is flushed: the file system below may show a former size once more.
    pub(crate) fn flushed(&self, id: FileId) {
        self.note(id, |before| before);
    }

    /// The size of the file was set.
    pub(crate) fn size_was_set(&self, id: FileId) {
        self.lock().by_id.remove(&id);
    }

    /// The size of a file, which the file system below shows as `shown`.
    pub(crate) fn size(&self, id: FileId, shown: u64) -> u64 {
        let now = dray_rt::now();
        let state = self.lock();
        let recent = state.by_id.get(&id).filter(|end| now - end.at <= LAG_MAX);
        recent.map_or(shown, |end| end.offset.max(shown))
    }

    fn note(&self, id: FileId, next: impl FnOnce(Option<u64>) -> Option<u64>) {
        let now = dray_rt::now();
        let mut state = self.lock();
        state.forget_old(now);
        let before = state.by_id.get(&id).map(|end| end.offset);
        let Some(offset) = next(before) else { return };
        state.by_id.insert(id, End { offset, at: now });
        state.order.push_back((now, id));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn forget_old(&mut self, now: Instant) {
        while let Some(&(at, id)) = self.order.front() {
            if now - at <= LAG_MAX && self.order.len() < FILES_MAX {
                break;
            }
            self.order.pop_front();
            if self.by_id.get(&id).is_some_and(|end| end.at == at) {
                self.by_id.remove(&id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use dray_core::{
        Buf, Context, CreateHow, FileSystem, FsUuid, Name, OpenFile, OpenHow, SetAttr, Write,
    };
    use dray_rt::{DriverKind, Executor};

    use super::super::root::Root;
    use super::super::{PosixFs, PosixOptions};
    use super::*;

    fn file(ino: u64) -> FileId {
        FileId { ino, generation: 0 }
    }

    // proves: P369
    #[test]
    fn a_size_from_before_the_last_write_is_not_believed() {
        let ends = WrittenEnds::default();
        assert_eq!(ends.size(file(1), 7), 7, "it has not been written");
        ends.written(file(1), 10);
        ends.written(file(1), 5);
        assert_eq!((ends.size(file(1), 7), ends.size(file(1), 12)), (10, 12));
        assert_eq!(ends.size(file(2), 7), 7, "another file");
        ends.size_was_set(file(1));
        ends.flushed(file(1));
        assert_eq!(ends.size(file(1), 0), 0, "it was cut since");
    }

    #[test]
    fn no_more_files_are_remembered_than_may_be() {
        let ends = WrittenEnds::default();
        let count = FILES_MAX as u64 + 100;
        (0..count).for_each(|ino| ends.written(file(ino), 1));
        let state = ends.lock();
        assert!(state.by_id.len() <= FILES_MAX && state.order.len() <= FILES_MAX);
        assert!(state.by_id.contains_key(&file(count - 1)), "the last one is remembered");
    }

    async fn append(file: &dyn OpenFile, line: &[u8]) {
        let how = Write { append: true, ..Write::at(0) };
        let written = file.write(&Context::system(), how, Buf::from(line)).await;
        assert_eq!(written.unwrap(), line.len());
    }

    /// A mount of MooseFS showed the size from before the last append, and the kernel placed the next one by it.
    // proves: P369
    #[test]
    fn an_append_overwrites_nothing_where_the_file_system_shows_a_former_size() {
        let name = format!("dray-ends-{:x}", dray_rt::random_u64());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir(&dir).unwrap();
        let mut root = Root::open(&dir).unwrap();
        root.below.sizes_lag = true;
        let fs = PosixFs::serve(root, FsUuid(1), PosixOptions::default()).unwrap();
        let (cx, top) = (Context::system(), fs.info().root);
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
        let below = dir.join("log");
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let (_, file) = fs.create(&cx, top, Name::new(b"log").unwrap(), how).await.unwrap();
            append(&*file, b"one\n").await;
            let shown = std::fs::File::options().write(true).open(&below).unwrap();
            shown.set_len(0).unwrap(); // as the kernel sees the former size
            append(&*file, b"two\n").await;
            assert_eq!(std::fs::read(&below).unwrap(), b"\0\0\0\0two\n");
            let cut = SetAttr { size: Some(0), ..SetAttr::default() };
            file.setattr(&cx, cut).await.unwrap();
            append(&*file, b"three\n").await;
            assert_eq!(std::fs::read(&below).unwrap(), b"three\n");
            file.close(&cx).await.unwrap();
        });
        std::fs::remove_dir_all(dir).unwrap();
    }
}
