//! Files of a server by path, for applications.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dray_core::{
    Attr, Buf, BufMut, Context, CreateHow, Entry, Errno, Error, FileId, FileSystem, FileType,
    IO_MAX_BYTES, Identity, LockOwner, Make, Name, OpenFile, OpenHow, Pid, RemoveKind, RenameHow,
    RequestId, Result, SetAttr, Statfs, Write,
};
use dray_rpc::client::{ClientSession, ConnectError, RemoteFs, SessionMemory};

use crate::connector::{ConnectOptions, connect_session};
use crate::identity::own_identity;
use crate::target::Target;

/// Symbolic links followed in one path, as Linux does.
const LINKS_MAX: usize = 40;
/// Bytes of names and records asked for with one page of a directory.
const PAGE_BYTES: usize = 128 << 10;

/// Connects to the export that `target` names, such as `dray://node1/home`. Errors: the
/// target is malformed (`Protocol`), nobody answers, or the server refuses.
pub async fn connect(
    target: &str,
    options: &ConnectOptions,
) -> std::result::Result<Client, ConnectError> {
    let target: Target = target.parse().map_err(ConnectError::Protocol)?;
    Client::connect(&target, options).await
}

/// A client of one export. Its calls are made in the name of this process. Cheap to clone.
///
/// To be used by tasks of the executor on which it was connected. Errors of its calls by path are
/// those of path_resolution(7) and of the file system at the server. A name of more than 255 bytes
/// is `ENAMETOOLONG`. `EHOSTDOWN` when the server has been away for longer than
/// [`ConnectOptions::timeout`].
#[derive(Clone)]
pub struct Client {
    fs: RemoteFs,
    who: Arc<Identity>,
    next_request: Arc<AtomicU64>,
}

impl Client {
    /// Connects to `target`, once. Errors: nobody answers, or the server refuses.
    pub async fn connect(
        target: &Target,
        options: &ConnectOptions,
    ) -> std::result::Result<Client, ConnectError> {
        let session = connect_session(target, options, SessionMemory::heap()).await?;
        Ok(Client::over(session))
    }

    /// A client of a session that is already there; with a server of the same process by
    /// [`session_over`](crate::session_over).
    pub fn over(session: Arc<ClientSession>) -> Client {
        let fs = RemoteFs::new(session);
        Client { fs, who: own_identity(), next_request: Arc::new(1.into()) }
    }

    /// The file system under it.
    pub fn fs(&self) -> &RemoteFs {
        &self.fs
    }

    /// The session under it.
    pub fn session(&self) -> &Arc<ClientSession> {
        self.fs.session()
    }

    /// Ends the session, so that the server gives back at once what it holds for it.
    pub fn goodbye(&self) {
        self.session().goodbye();
    }

    /// A context for one call of this process.
    pub fn context(&self) -> Context {
        let request = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        Context::new(self.session().node(), request, self.who.clone(), Pid(std::process::id()))
    }

    /// Attributes of what `path` leads to, symbolic links followed.
    pub async fn stat(&self, path: &str) -> Result<Attr> {
        Ok(self.find(path).await?.attr)
    }

    /// Opens a file for reading.
    pub async fn open(&self, path: &str) -> Result<File> {
        self.open_with(path, OpenHow::READ).await
    }

    /// Opens a file or directory.
    pub async fn open_with(&self, path: &str, how: OpenHow) -> Result<File> {
        let entry = self.find(path).await?;
        let file = self.fs().open(&self.context(), entry.id, how).await?;
        Ok(File { client: self.clone(), file })
    }

    /// Makes a file, or opens the one that is there and cuts it to nothing.
    pub async fn create(&self, path: &str, mode: u32) -> Result<File> {
        let how = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
        self.create_with(path, CreateHow { open: how, mode, exclusive: false }).await
    }

    /// Makes a file and opens it.
    pub async fn create_with(&self, path: &str, how: CreateHow) -> Result<File> {
        let (dir, name) = self.place(path).await?;
        let (_, file) = self.fs().create(&self.context(), dir, name, how).await?;
        Ok(File { client: self.clone(), file })
    }

    /// The whole content of a file.
    pub async fn get(&self, path: &str) -> Result<Vec<u8>> {
        let file = self.open(path).await?;
        let content = file.read_to_end().await;
        let closed = file.close().await;
        content.and_then(|content| closed.map(|()| content))
    }

    /// Makes or replaces a file with this content: create, write, close. Costs a round trip
    /// a component of the path, and one; see [`Dir::put_all`] for many files in one directory.
    pub async fn put(&self, path: &str, data: &[u8]) -> Result<()> {
        let (dir, name) = self.place(path).await?;
        self.put_at(dir, name, data).await
    }

    /// A directory to put files in.
    pub async fn dir(&self, path: &str) -> Result<Dir> {
        Ok(Dir { client: self.clone(), id: self.find_id(path).await? })
    }

    async fn put_at(&self, dir: FileId, name: &Name, data: &[u8]) -> Result<()> {
        const MODE: u32 = 0o666;
        let cx = self.context();
        if data.len() <= IO_MAX_BYTES {
            return self.fs().put(&cx, dir, name, MODE, Buf::from(data)).await;
        }
        let open = OpenHow::new(libc::O_WRONLY | libc::O_TRUNC);
        let how = CreateHow { open, mode: MODE, exclusive: false };
        let (_, file) = self.fs().create(&cx, dir, name, how).await?;
        let file = File { client: self.clone(), file };
        let written = file.write_all(0, data).await;
        let closed = file.close().await;
        written.and(closed)
    }

    /// Makes a directory.
    pub async fn mkdir(&self, path: &str, mode: u32) -> Result<()> {
        let (dir, name) = self.place(path).await?;
        self.fs().make(&self.context(), dir, name, Make::Directory { mode }).await.map(drop)
    }

    /// Removes a file.
    pub async fn unlink(&self, path: &str) -> Result<()> {
        let (dir, name) = self.place(path).await?;
        self.fs().remove(&self.context(), dir, name, RemoveKind::File).await
    }

    /// Removes an empty directory.
    pub async fn rmdir(&self, path: &str) -> Result<()> {
        let (dir, name) = self.place(path).await?;
        self.fs().remove(&self.context(), dir, name, RemoveKind::Directory).await
    }

    /// Renames; replaces what has the new name.
    pub async fn rename(&self, from: &str, to: &str) -> Result<()> {
        let (from, to) = (self.place(from).await?, self.place(to).await?);
        self.fs().rename(&self.context(), from, to, RenameHow::Replace).await
    }

    /// Cuts or extends a file to `size` bytes.
    pub async fn truncate(&self, path: &str, size: u64) -> Result<()> {
        let entry = self.find(path).await?;
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        self.fs().setattr(&self.context(), entry.id, set).await.map(drop)
    }

    /// Names in a directory, `.` and `..` left out.
    pub async fn list(&self, path: &str) -> Result<Vec<Vec<u8>>> {
        let directory = self.open_with(path, OpenHow::DIRECTORY).await?;
        let names = self.list_open(&directory).await;
        let closed = directory.close().await;
        names.and_then(|names| closed.map(|()| names))
    }

    async fn list_open(&self, directory: &File) -> Result<Vec<Vec<u8>>> {
        let (mut names, mut cookie) = (Vec::new(), 0);
        loop {
            let page = directory.file.readdir(&self.context(), cookie, PAGE_BYTES, false).await?;
            names.extend(page.iter().map(|(name, _)| name.to_vec()));
            match page.get(page.len().wrapping_sub(1)) {
                Some((_, last)) if !page.end => cookie = last.cookie,
                _ => return Ok(names),
            }
        }
    }

    /// Space and inodes.
    pub async fn statfs(&self) -> Result<Statfs> {
        self.fs().statfs(&self.context()).await
    }

    /// The directory of a path's last component, and that component.
    async fn place<'p>(&self, path: &'p str) -> Result<(FileId, &'p Name)> {
        let path = path.trim_end_matches('/');
        let (parent, last) = path.rsplit_once('/').unwrap_or(("", path));
        let name = Name::new(last.as_bytes())?;
        Ok((self.find_id(parent).await?, name))
    }

    /// As [`Client::find`], where the attributes do not matter: the root is known.
    async fn find_id(&self, path: &str) -> Result<FileId> {
        match components(path.as_bytes()).is_empty() {
            true => Ok(self.fs().info().root),
            false => Ok(self.find(path).await?.id),
        }
    }

    /// What `path` leads to, from the export's root.
    async fn find(&self, path: &str) -> Result<Entry> {
        let root = self.fs().info().root;
        let attr = self.fs().getattr(&self.context(), root).await?;
        let mut trail = vec![Entry { id: root, attr }];
        let mut rest: Vec<Vec<u8>> = components(path.as_bytes());
        let mut links = 0;
        while let Some(component) = rest.pop() {
            if matches!(&component[..], b"." | b"..") {
                must_be_directory(&trail[trail.len() - 1])?;
            }
            match &component[..] {
                b"." => continue,
                b".." => {
                    trail.truncate(trail.len().max(2) - 1); // the root is its own parent
                    continue;
                }
                _ => {}
            }
            let here = trail[trail.len() - 1].id;
            let entry = self.fs().lookup(&self.context(), here, Name::new(&component)?).await?;
            if entry.attr.file_type() != FileType::Symlink {
                trail.push(entry);
                continue;
            }
            links += 1;
            if links > LINKS_MAX {
                return Err(Error::new(Errno::ELOOP));
            }
            let target = self.fs().readlink(&self.context(), entry.id).await?;
            if target.starts_with(b"/") {
                trail.truncate(1);
            }
            rest.extend(components(&target));
        }
        let found = trail[trail.len() - 1];
        if path.ends_with('/') {
            must_be_directory(&found)?;
        }
        Ok(found)
    }
}

/// What stands before a slash, `.` or `..` in a path.
fn must_be_directory(entry: &Entry) -> Result<()> {
    match entry.attr.file_type() {
        FileType::Directory => Ok(()),
        _ => Err(Error::new(Errno::ENOTDIR)),
    }
}

/// The components of a path, last first.
fn components(path: &[u8]) -> Vec<Vec<u8>> {
    let parts = path.split(|&byte| byte == b'/').filter(|part| !part.is_empty());
    parts.rev().map(<[u8]>::to_vec).collect()
}

/// A directory that was found once. It stays the same one if it is renamed.
#[derive(Clone)]
pub struct Dir {
    client: Client,
    id: FileId,
}

impl Dir {
    /// Makes or replaces the file `name` with this content. Up to
    /// [`IO_MAX_BYTES`] this is one round trip. It is done once, whatever happens to the
    /// server meanwhile; others may see the file before all data are in it.
    pub async fn put(&self, name: &str, data: &[u8]) -> Result<()> {
        self.client.put_at(self.id, Name::new(name.as_bytes())?, data).await
    }
}

/// An open file. Close it to learn of errors; dropping it closes it too.
pub struct File {
    client: Client,
    file: Arc<dyn OpenFile>,
}

impl File {
    /// The file of the stack below.
    pub fn file(&self) -> &Arc<dyn OpenFile> {
        &self.file
    }

    /// Attributes.
    pub async fn stat(&self) -> Result<Attr> {
        self.file.getattr(&self.client.context()).await
    }

    /// Reads up to `into.len()` bytes from offset `at`; fewer only at the end of the file.
    pub async fn read(&self, at: u64, into: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < into.len() {
            let want = (into.len() - done).min(IO_MAX_BYTES);
            let cx = self.client.context();
            let read = self.file.read(&cx, at + done as u64, BufMut::heap(want)).await;
            let buffer = read.map_err(|(error, _)| error)?;
            let count = buffer.len().min(want);
            into[done..done + count].copy_from_slice(&buffer.filled()[..count]);
            done += count;
            if count < want {
                break;
            }
        }
        Ok(done)
    }

    /// Everything from the beginning to the end.
    pub async fn read_to_end(&self) -> Result<Vec<u8>> {
        let mut content = Vec::new();
        loop {
            let at = content.len() as u64;
            let cx = self.client.context();
            let read = self.file.read(&cx, at, BufMut::heap(IO_MAX_BYTES)).await;
            let buffer = read.map_err(|(error, _)| error)?;
            if buffer.is_empty() {
                return Ok(content);
            }
            content.extend_from_slice(buffer.filled());
        }
    }

    /// Writes all of `data` at offset `at`.
    pub async fn write_all(&self, at: u64, data: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < data.len() {
            let part = &data[done..data.len().min(done + IO_MAX_BYTES)];
            let how = Write::at(at + done as u64);
            let written = self.file.write(&self.client.context(), how, Buf::from(part)).await?;
            if written == 0 {
                return Err(Error::new(Errno::EIO).because("a write of nothing"));
            }
            done += written;
        }
        Ok(())
    }

    /// Data and attributes on media.
    pub async fn sync(&self) -> Result<()> {
        self.file.sync(&self.client.context(), false).await
    }

    /// Closes it; reports write errors that were not reported before.
    pub async fn close(self) -> Result<()> {
        let cx = self.client.context();
        let flushed = self.file.flush(&cx, LockOwner::own(0)).await;
        let closed = self.file.close(&cx).await;
        flushed.and(closed)
    }
}
