//! The two central traits.

use std::any::Any;
use std::future::Future;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;

use crate::{
    Access, Allocate, AtOpen, Attr, Buf, BufMut, Context, CreateHow, DirPage, Entry, FileId,
    FsInfo, Io, Lock, LockOwner, Make, Name, OpenHow, RemoveKind, RenameHow, Result, Seek, SetAttr,
    Statfs, Timestamp, Uid, Write, XattrSet, Xflags,
};

/// A boxed future: stacks are put together at run time. The future is `Send`, so that a task may
/// outlive the thread it began on. The ADR on the reactor gives the cost.
pub type Fut<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Anything that serves files: backends, the remote end of a wire, and the
/// layers between.
///
/// - Operations run with the credentials in the [`Context`]; the file system
///   below decides permissions.
/// - Each call is atomic with respect to every other call on the same file system. A backend need
///   not order reads and changes of the same bytes. The server end of a session keeps them apart,
///   and every front end goes through it.
/// - There are no default bodies: a new operation forces a decision everywhere.
/// - An operation on a [`FileId`] whose file is gone answers `ESTALE`. An exception is a caller
///   that has just looked the file up: for a moment, the operation may go on for that caller. An
///   operation that the file system below does not have answers `EOPNOTSUPP`.
/// - A future must be polled to its end: give up by [`Context::cancel`], not by dropping.
pub trait FileSystem: Send + Sync + 'static {
    /// Identity and root. They never change for one object.
    fn info(&self) -> &FsInfo;

    /// The path of `id` now, from the root on and beginning with a slash, to be shown to people.
    /// None if it is not known here. It may wait for the file system below.
    fn path(&self, id: FileId) -> Option<Vec<u8>>;

    /// The time of the clock that files' times are taken from, or a little less. None if that is
    /// not known here.
    fn clock(&self) -> Option<Timestamp>;

    /// The user that the caller is here, which may differ from the user that the client names. New
    /// files of the caller belong to this user.
    fn user_of(&self, cx: &Context) -> Uid;

    /// Finds `name` in `dir`. Errors: `ENOENT`, which may say how long it holds
    /// ([`Error::absent_for`](crate::Error::absent_for)), `ENOTDIR`, `EACCES` and those of the file
    /// system below.
    fn lookup<'a>(&'a self, cx: &'a Context, dir: FileId, name: &'a Name)
    -> Fut<'a, Result<Entry>>;

    /// The directory that `dir` is in; the root's parent is the root itself.
    fn parent<'a>(&'a self, cx: &'a Context, dir: FileId) -> Fut<'a, Result<Entry>>;

    /// Attributes of `id`.
    fn getattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>>;

    /// Changes attributes of `id` and answers what they are then. Through an open file
    /// (ftruncate(2) of a file opened for writing) use [`OpenFile::setattr`].
    fn setattr<'a>(&'a self, cx: &'a Context, id: FileId, set: SetAttr) -> Fut<'a, Result<Attr>>;

    /// The target of the symbolic link `id`.
    fn readlink<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>>;

    /// Makes a directory, node or symbolic link called `name` in `dir`.
    fn make<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        what: Make<'a>,
    ) -> Fut<'a, Result<Entry>>;

    /// Removes `name` from `dir`.
    fn remove<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>>;

    /// renameat2(2).
    fn rename<'a>(
        &'a self,
        cx: &'a Context,
        from: (FileId, &'a Name),
        to: (FileId, &'a Name),
        how: RenameHow,
    ) -> Fut<'a, Result<()>>;

    /// Gives `id` the further name `name` in `dir`. For a file from [`FileSystem::tmpfile`]
    /// this is its first name.
    fn link<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>>;

    /// Opens a file or a directory.
    fn open<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>>;

    /// As [`FileSystem::open`], if `name` in `dir` is `id` now. Errors: `ESTALE` if the name is
    /// another file's, or the caller does not find it. For front ends that remember names.
    /// [`open_named`](crate::open_named) does it in two steps.
    fn open_named<'a>(
        &'a self,
        cx: &'a Context,
        place: (FileId, &'a Name),
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>>;

    /// Takes the word of the caller that `name` in `dir` is `id`, after a look at the name. From then on
    /// the id is known here. The caller needs no rights for it, since the id was given out to a caller who had
    /// them. Errors: `ESTALE` if the name is another file's or nobody's, unmet if it is `dir` that was
    /// not met here; `ENOTSUP` where ids are not learned.
    fn learn<'a>(
        &'a self,
        cx: &'a Context,
        place: (FileId, &'a Name),
        id: FileId,
    ) -> Fut<'a, Result<()>>;

    /// Makes a regular file and opens it. Opens an existing file unless `how.exclusive`. The mode
    /// that a new file gets does not limit this first open.
    fn create<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>>;

    /// As [`create`](FileSystem::create), for a caller that has no use for attributes. A file system that asks for them
    /// in a call of its own leaves that call out.
    fn create_without_attr<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        how: CreateHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move { self.create(cx, dir, name, how).await.map(|(_, file)| file) })
    }

    /// Makes a regular file without a name and opens it (`O_TMPFILE`).
    fn tmpfile<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>>;

    /// Makes or replaces the file `name` in `dir` with `data`, at most
    /// [`IO_MAX_BYTES`](crate::IO_MAX_BYTES). `mode` are permission bits, before the caller's
    /// umask. Others may see the file before all data are in it. File systems that have no single
    /// call for it use [`put_in_steps`](crate::put_in_steps). Errors: `EINVAL` for more data, and
    /// those of creating, writing and closing. After an error of writing the file may be there with
    /// less in it.
    fn put<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        mode: u32,
        data: Buf,
    ) -> Fut<'a, Result<()>>;

    /// Whether the caller has these rights on `id`; `EACCES` if not.
    fn access<'a>(&'a self, cx: &'a Context, id: FileId, want: Access) -> Fut<'a, Result<()>>;

    /// Space and inodes.
    fn statfs<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Statfs>>;

    /// Brings to media whatever any caller changed before the call (syncfs(2)).
    /// Errors: those of writing it, `EIO` above all.
    fn sync_all<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>>;

    /// The value of an extended attribute; `ENODATA` if there is none.
    fn getxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<Vec<u8>>>;

    /// Sets an extended attribute.
    fn setxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
        value: &'a [u8],
        how: XattrSet,
    ) -> Fut<'a, Result<()>>;

    /// Names of all extended attributes, each followed by a NUL byte.
    fn listxattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>>;

    /// Removes an extended attribute; `ENODATA` if there is none.
    fn removexattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<()>>;
}

/// The content of a file in a file of this machine, which a kernel may read in its place.
pub trait LocalCopy: Send + Sync + 'static {
    /// The file that has the content.
    fn file(&self) -> BorrowedFd<'_>;

    /// Makes the content that of `from`, which is the file itself, where it has changed. The place does not change: who
    /// reads it meanwhile sees parts of both. Errors: those of `from`, and `EIO` for those of the local disk.
    fn refresh<'a>(&'a self, cx: &'a Context, from: &'a dyn OpenFile) -> Fut<'a, Result<()>>;
}

/// An opened file or directory. Rights were checked at the open and stay as they
/// were, whatever happens to the file's mode later. Close it with [`OpenFile::close`];
/// dropping it releases it too, but cannot report an error.
pub trait OpenFile: Send + Sync + 'static {
    /// The file that is open.
    fn id(&self) -> FileId;

    /// The attributes that came with the answer to [`OpenHow::with_attr`]. They also come unasked
    /// from a file system that says itself how long the file's pages may be kept
    /// ([`Validity`](crate::Validity)). None: ask.
    fn at_open(&self) -> Option<AtOpen>;

    /// For implementations that must recognise their own ([`OpenFile::copy_range`]).
    fn as_any(&self) -> &dyn Any;

    /// The whole content of the file as it was at its opening, on a local disk. None: it is not there, or may have
    /// changed since. It may wait for that disk.
    fn local_copy<'a>(&'a self, cx: &'a Context) -> Fut<'a, Option<Arc<dyn LocalCopy>>>;

    /// Reads up to `into.room()` bytes from offset `at` (bytes) and appends them to
    /// `into`. Fewer only at the end of the file.
    fn read<'a>(&'a self, cx: &'a Context, at: u64, into: BufMut) -> Fut<'a, Io<BufMut>>;

    /// Writes all of `from`. Answers how many bytes were written, fewer only if the
    /// file system below ran out of space or hit a limit half way.
    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>>;

    /// Entries from position `cookie` on (0: the beginning), about `max_bytes` of names
    /// and records, with attributes if `plus`.
    fn readdir<'a>(
        &'a self,
        cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>>;

    /// Attributes of the open file, also of one deleted since.
    fn getattr<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Attr>>;

    /// Changes attributes through the open file: its rights decide about the size.
    fn setattr<'a>(&'a self, cx: &'a Context, set: SetAttr) -> Fut<'a, Result<Attr>>;

    /// The process of `owner` has closed one of the descriptors of this open file. The process's
    /// fcntl locks on the file end with that. Errors: also a write error that was not reported yet.
    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>>;

    /// Data on media; with `data_only` not attributes that reading does not need.
    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>>;

    /// fallocate(2).
    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>>;

    /// The next data or hole at or behind `at`; `ENXIO` past the end.
    fn seek<'a>(&'a self, cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>>;

    /// Copies up to `len_bytes` from `at` in this file to `to_at` in `to`. `to` is a file of the
    /// same file system. The data do not move through the caller. Answers the bytes copied. `EXDEV`
    /// if `to` is another's.
    fn copy_range<'a>(
        &'a self,
        cx: &'a Context,
        at: u64,
        to: &'a dyn OpenFile,
        to_at: u64,
        len_bytes: u64,
    ) -> Fut<'a, Result<u64>>;

    /// Takes, changes or gives back a lock. With `wait` it answers when the lock is granted.
    /// Errors: `EINTR` once the context is cancelled; `EAGAIN` without `wait` if another lock
    /// conflicts.
    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>>;

    /// The first lock that stands in the way of `lock` (`F_GETLK`).
    fn test_lock<'a>(&'a self, cx: &'a Context, lock: Lock) -> Fut<'a, Result<Option<Lock>>>;

    /// `FS_IOC_GETFLAGS`: the `FS_*_FL` bits.
    fn get_flags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<u32>>;

    /// `FS_IOC_SETFLAGS`.
    fn set_flags<'a>(&'a self, cx: &'a Context, flags: u32) -> Fut<'a, Result<()>>;

    /// `FS_IOC_FSGETXATTR`; `ENOTTY` where the file system below has none of that.
    fn get_xflags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Xflags>>;

    /// `FS_IOC_FSSETXATTR`.
    fn set_xflags<'a>(&'a self, cx: &'a Context, set: Xflags) -> Fut<'a, Result<()>>;

    /// The last descriptor was closed: gives everything back, flock locks included.
    fn close<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>>;
}
