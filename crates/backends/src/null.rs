//! A file system that measures the layers above it: one large file of zeros under every name. Writes
//! are discarded. Every answer takes constant time.

use std::any::Any;
use std::sync::Arc;

use dray_core::{
    Access, Allocate, AtOpen, Attr, Buf, BufMut, Context, CreateHow, DirPage, Entry, Errno, Error,
    FileId, FileSystem, FileType, FsInfo, FsUuid, Fut, Io, LocalCopy, Lock, LockOwner, Make, Name,
    OpenFile, OpenHow, RemoveKind, RenameHow, Result, Seek, SetAttr, Statfs, Timestamp, Uid, Write,
    XattrSet, Xflags, open_named, put_in_steps,
};

const ROOT: FileId = FileId { ino: 1, generation: 1 };
const FILE: FileId = FileId { ino: 2, generation: 1 };

/// What listings show the file as.
const NAME: &[u8] = b"zeros";

/// What is done before each read, on the thread that reads.
pub type ReadHook = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// The file system.
pub struct NullFs {
    info: FsInfo,
    size: u64,
    before_read: Option<ReadHook>,
}

impl NullFs {
    /// A file system whose file has `size` bytes.
    pub fn new(uuid: FsUuid, size: u64) -> Arc<NullFs> {
        NullFs::with_hook(uuid, size, None)
    }

    /// The same, with something to do before each read. A read fails with its error.
    pub fn with_hook(uuid: FsUuid, size: u64, before_read: Option<ReadHook>) -> Arc<NullFs> {
        let info = FsInfo { uuid, root: ROOT, kind: "null".to_owned(), read_only: false };
        Arc::new(NullFs { info, size, before_read })
    }

    fn entry(&self, id: FileId) -> Result<Entry> {
        let mode = match id {
            ROOT => libc::S_IFDIR | 0o777,
            FILE => libc::S_IFREG | 0o666,
            _ => return Err(Errno::ESTALE.into()),
        };
        let size = if id == FILE { self.size } else { 0 };
        let attr = Attr { ino: id.ino, mode, nlink: 1, block_bytes: 4096, size, ..Attr::default() };
        Ok(Entry { id, attr })
    }

    fn open_entry(&self, id: FileId) -> Result<(Entry, Arc<dyn OpenFile>)> {
        let entry = self.entry(id)?;
        let listed = self.entry(FILE)?.attr;
        Ok((entry, Arc::new(NullFile { entry, listed, before_read: self.before_read.clone() })))
    }
}

fn ready<'a, T: Send + 'a>(value: T) -> Fut<'a, T> {
    Box::pin(std::future::ready(value))
}

fn unsupported<'a, T: Send + 'a>() -> Fut<'a, Result<T>> {
    ready(Err(Error::new(Errno::ENOTSUP)))
}

impl FileSystem for NullFs {
    fn info(&self) -> &FsInfo {
        &self.info
    }

    fn path(&self, _: FileId) -> Option<Vec<u8>> {
        None
    }

    fn clock(&self) -> Option<Timestamp> {
        None
    }

    fn user_of(&self, cx: &Context) -> Uid {
        cx.who.uid
    }

    fn lookup<'a>(&'a self, _: &'a Context, dir: FileId, _: &'a Name) -> Fut<'a, Result<Entry>> {
        ready(if dir == ROOT { self.entry(FILE) } else { Err(Errno::ENOTDIR.into()) })
    }

    fn parent<'a>(&'a self, _: &'a Context, dir: FileId) -> Fut<'a, Result<Entry>> {
        ready(if dir == ROOT { self.entry(ROOT) } else { Err(Errno::ENOTDIR.into()) })
    }

    fn getattr<'a>(&'a self, _: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        ready(self.entry(id).map(|entry| entry.attr))
    }

    fn setattr<'a>(&'a self, cx: &'a Context, id: FileId, _: SetAttr) -> Fut<'a, Result<Attr>> {
        self.getattr(cx, id)
    }

    fn readlink<'a>(&'a self, _: &'a Context, _: FileId) -> Fut<'a, Result<Vec<u8>>> {
        ready(Err(Errno::EINVAL.into()))
    }

    fn make<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        what: Make<'a>,
    ) -> Fut<'a, Result<Entry>> {
        match what {
            Make::Node { mode, .. } if FileType::from_mode(mode) == Some(FileType::Regular) => {
                self.lookup(cx, dir, name)
            }
            _ => unsupported(),
        }
    }

    fn remove<'a>(
        &'a self,
        _: &'a Context,
        dir: FileId,
        _: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>> {
        ready(match kind {
            RemoveKind::File if dir == ROOT => Ok(()),
            _ => Err(Errno::ENOTDIR.into()),
        })
    }

    fn rename<'a>(
        &'a self,
        _: &'a Context,
        _: (FileId, &'a Name),
        _: (FileId, &'a Name),
        _: RenameHow,
    ) -> Fut<'a, Result<()>> {
        ready(Ok(()))
    }

    fn link<'a>(
        &'a self,
        cx: &'a Context,
        _: FileId,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        self.lookup(cx, dir, name)
    }

    fn open<'a>(
        &'a self,
        _: &'a Context,
        id: FileId,
        _: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        ready(self.open_entry(id).map(|(_, file)| file))
    }

    fn open_named<'a>(
        &'a self,
        cx: &'a Context,
        place: (FileId, &'a Name),
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(open_named(self, cx, place, id, how))
    }

    fn learn<'a>(
        &'a self,
        _: &'a Context,
        _: (FileId, &'a Name),
        _: FileId,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async { Err(Errno::ENOTSUP.into()) })
    }

    fn create<'a>(
        &'a self,
        _: &'a Context,
        _: FileId,
        _: &'a Name,
        _: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        ready(self.open_entry(FILE))
    }

    fn put<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        mode: u32,
        data: Buf,
    ) -> Fut<'a, Result<()>> {
        Box::pin(put_in_steps(self, cx, (dir, name), mode, data))
    }

    fn tmpfile<'a>(
        &'a self,
        _: &'a Context,
        _: FileId,
        _: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        ready(self.open_entry(FILE))
    }

    fn access<'a>(&'a self, _: &'a Context, id: FileId, _: Access) -> Fut<'a, Result<()>> {
        ready(self.entry(id).map(drop))
    }

    fn statfs<'a>(&'a self, _: &'a Context) -> Fut<'a, Result<Statfs>> {
        ready(Ok(Statfs {
            block_bytes: 4096,
            fragment_bytes: 4096,
            name_max_bytes: dray_core::NAME_MAX_BYTES as u32,
            ..Statfs::default()
        }))
    }

    fn sync_all<'a>(&'a self, _: &'a Context) -> Fut<'a, Result<()>> {
        ready(Ok(()))
    }

    fn getxattr<'a>(&'a self, _: &'a Context, _: FileId, _: &'a [u8]) -> Fut<'a, Result<Vec<u8>>> {
        unsupported()
    }

    fn setxattr<'a>(
        &'a self,
        _: &'a Context,
        _: FileId,
        _: &'a [u8],
        _: &'a [u8],
        _: XattrSet,
    ) -> Fut<'a, Result<()>> {
        unsupported()
    }

    fn listxattr<'a>(&'a self, _: &'a Context, _: FileId) -> Fut<'a, Result<Vec<u8>>> {
        ready(Ok(Vec::new()))
    }

    fn removexattr<'a>(&'a self, _: &'a Context, _: FileId, _: &'a [u8]) -> Fut<'a, Result<()>> {
        unsupported()
    }
}

/// The root or the file, open.
struct NullFile {
    entry: Entry,
    /// Attributes of the file, for listings.
    listed: Attr,
    before_read: Option<ReadHook>,
}

impl OpenFile for NullFile {
    fn id(&self) -> FileId {
        self.entry.id
    }

    fn at_open(&self) -> Option<AtOpen> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn local_copy<'a>(&'a self, _: &'a Context) -> Fut<'a, Option<Arc<dyn LocalCopy>>> {
        Box::pin(async { None })
    }

    fn read<'a>(&'a self, _: &'a Context, at: u64, mut into: BufMut) -> Fut<'a, Io<BufMut>> {
        if self.entry.id != FILE {
            return ready(Err((Errno::EISDIR.into(), into)));
        }
        if let Some(Err(error)) = self.before_read.as_ref().map(|before| before()) {
            return ready(Err((error, into)));
        }
        let left = self.entry.attr.size.saturating_sub(at);
        into.put_zeros(usize::try_from(left).unwrap_or(usize::MAX));
        ready(Ok(into))
    }

    fn write<'a>(&'a self, _: &'a Context, _: Write, from: Buf) -> Fut<'a, Result<usize>> {
        ready(Ok(from.len()))
    }

    fn readdir<'a>(
        &'a self,
        _: &'a Context,
        cookie: u64,
        _: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        if self.entry.id != ROOT {
            return ready(Err(Errno::ENOTDIR.into()));
        }
        let mut page = DirPage::default();
        page.end = true;
        if cookie == 0 {
            page.push(NAME, FILE, Some(FileType::Regular), 1, plus.then_some(self.listed));
        }
        ready(Ok(page))
    }

    fn getattr<'a>(&'a self, _: &'a Context) -> Fut<'a, Result<Attr>> {
        ready(Ok(self.entry.attr))
    }

    fn setattr<'a>(&'a self, _: &'a Context, _: SetAttr) -> Fut<'a, Result<Attr>> {
        ready(Ok(self.entry.attr))
    }

    fn flush<'a>(&'a self, _: &'a Context, _: LockOwner) -> Fut<'a, Result<()>> {
        ready(Ok(()))
    }

    fn sync<'a>(&'a self, _: &'a Context, _: bool) -> Fut<'a, Result<()>> {
        ready(Ok(()))
    }

    fn allocate<'a>(&'a self, _: &'a Context, _: Allocate) -> Fut<'a, Result<()>> {
        ready(Ok(()))
    }

    fn seek<'a>(&'a self, _: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        ready(match what {
            _ if at >= self.entry.attr.size => Err(Errno::ENXIO.into()),
            Seek::Data => Ok(at),
            Seek::Hole => Ok(self.entry.attr.size),
        })
    }

    fn copy_range<'a>(
        &'a self,
        _: &'a Context,
        _: u64,
        to: &'a dyn OpenFile,
        _: u64,
        len_bytes: u64,
    ) -> Fut<'a, Result<u64>> {
        ready(match to.as_any().is::<NullFile>() {
            true => Ok(len_bytes),
            false => Err(Errno::EXDEV.into()),
        })
    }

    fn lock<'a>(&'a self, _: &'a Context, _: Lock, _: bool) -> Fut<'a, Result<()>> {
        unsupported()
    }

    fn test_lock<'a>(&'a self, _: &'a Context, _: Lock) -> Fut<'a, Result<Option<Lock>>> {
        unsupported()
    }

    fn get_flags<'a>(&'a self, _: &'a Context) -> Fut<'a, Result<u32>> {
        ready(Err(Errno::ENOTTY.into()))
    }

    fn set_flags<'a>(&'a self, _: &'a Context, _: u32) -> Fut<'a, Result<()>> {
        ready(Err(Errno::ENOTTY.into()))
    }

    fn get_xflags<'a>(&'a self, _: &'a Context) -> Fut<'a, Result<Xflags>> {
        ready(Err(Errno::ENOTTY.into()))
    }

    fn set_xflags<'a>(&'a self, _: &'a Context, _: Xflags) -> Fut<'a, Result<()>> {
        ready(Err(Errno::ENOTTY.into()))
    }

    fn close<'a>(&'a self, _: &'a Context) -> Fut<'a, Result<()>> {
        ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_rt::{DriverKind, Executor};

    #[test]
    fn it_reads_zeros_up_to_its_size_and_swallows_writes() {
        let fs = NullFs::new(FsUuid(1), 10);
        let cx = Context::system();
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let name = Name::new(b"anything").unwrap();
            let entry = fs.lookup(&cx, ROOT, name).await.unwrap();
            let file = fs.open(&cx, entry.id, OpenHow::READ_WRITE).await.unwrap();
            assert_eq!(file.write(&cx, Write::at(3), Buf::from(&b"abc"[..])).await.unwrap(), 3);
            let read = file.read(&cx, 4, BufMut::heap(100)).await.unwrap();
            assert_eq!(read.filled(), [0; 6]);
            assert!(file.read(&cx, 10, BufMut::heap(1)).await.unwrap().is_empty());
        });
    }
}
