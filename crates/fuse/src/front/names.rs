//! Operations on names: lookup, make, remove, rename, link, readlink.

use dray_core::{
    Access, Attr, Context, Entry, Errno, FileId, FileType, Make, Name, RemoveKind, RenameHow,
    Result, Ttl,
};

use crate::front::leased::Answered;
use crate::front::{Worker, invalid};
use crate::proto::NameOperation;
use crate::proto::reply;
use crate::proto::wire::Small;
use crate::state::changes::ChangeNumber;
use crate::state::moved::renames;
use crate::state::places::NameBinding;
use crate::transport::KernelAnswer;

impl Worker {
    pub(crate) async fn naming(
        &self,
        cx: &Context,
        node: u64,
        op: &NameOperation<'_>,
    ) -> Result<KernelAnswer> {
        let id = self.id(node)?;
        let asked = self.asked();
        match *op {
            NameOperation::Lookup { name } => self.lookup(cx, (node, id), name).await,
            NameOperation::Readlink => Ok(KernelAnswer::Bytes(self.fs.readlink(cx, id).await?)),
            NameOperation::Symlink { name, target } => {
                self.make(cx, (id, name), Make::Symlink { target }, asked).await
            }
            NameOperation::Mknod { name, mode, rdev, .. } => {
                self.make(cx, (id, name), Make::Node { mode, rdev }, asked).await
            }
            NameOperation::Mkdir { name, mode, .. } => {
                let entry = self.fs.make(cx, id, name, Make::Directory { mode }).await?;
                self.directory_answer(&entry, (node, id, name), asked, || false)
            }
            NameOperation::Unlink { name } => self.remove(cx, id, name, RemoveKind::File).await,
            NameOperation::Rmdir { name } => self.remove(cx, id, name, RemoveKind::Directory).await,
            NameOperation::Rename { name, to_dir, to_name, flags } => {
                let how = match flags {
                    0 => RenameHow::Replace,
                    libc::RENAME_NOREPLACE => RenameHow::NoReplace,
                    libc::RENAME_EXCHANGE => RenameHow::Exchange,
                    _ => return Err(invalid("a flag of renameat2 that is not served")),
                };
                let to_id = self.id(to_dir)?;
                self.fs.rename(cx, (id, name), (to_id, to_name), how).await?;
                self.shared.nodes.renamed((node, name), (to_dir, to_name), how);
                Ok(KernelAnswer::Empty)
            }
            NameOperation::Link { node, name } => {
                let entry = self.fs.link(cx, self.id(node)?, id, name).await?;
                self.entry_answer(&entry, (id, name), asked)
            }
        }
    }

    async fn lookup(
        &self,
        cx: &Context,
        (node, dir): (u64, FileId),
        name: &Name,
    ) -> Result<KernelAnswer> {
        let asked = self.asked();
        let found = self.fs.lookup(cx, dir, name).await;
        if let Some(caller) = self.retry_caller(cx.pid).await {
            self.shared.stale_retries.finds(caller, found.as_ref().ok().map(|entry| entry.id));
        }
        match found {
            Ok(entry) if entry.attr.file_type() == FileType::Directory => {
                self.directory_answer(&entry, (node, dir, name), asked, || renames(cx.pid))
            }
            Ok(entry) if !self.may_be_opened(cx, &entry).await? => self.barred_answer(entry, asked),
            Ok(entry) => self.entry_answer(&entry, (dir, name), asked),
            Err(error) => {
                let believed = self.absence_validity(&error, (dir, name), asked);
                if error.errno() == Errno::ENOENT && !believed.is_zero() {
                    return Ok(KernelAnswer::Small(reply::negative_entry(believed)));
                }
                Err(error)
            }
        }
    }

    /// FIFOs, sockets and devices are opened by the client's kernel alone. It does not look at
    /// their modes unless it was asked to check permissions (`fuse_permission`, fs/fuse/dir.c). So
    /// it is asked here, where the path is walked, whether the caller may. Anything else is not
    /// barred: the server hears of its opening.
    pub(super) async fn may_be_opened(&self, cx: &Context, entry: &Entry) -> Result<bool> {
        if self.shared.options.kernel_checks_permissions() {
            return Ok(true);
        }
        let ways: &[i32] = match entry.attr.file_type() {
            FileType::Socket => &[libc::W_OK],
            // Readers and writers meet in one inode: a caller that is either must have it.
            FileType::Fifo => &[libc::R_OK, libc::W_OK],
            FileType::CharDevice | FileType::BlockDevice => &[libc::R_OK | libc::W_OK],
            _ => return Ok(true),
        };
        for way in ways {
            match self.fs.access(cx, entry.id, Access(*way as u32)).await {
                Ok(()) => return Ok(true),
                Err(error) if matches!(error.errno(), Errno::EACCES | Errno::EPERM) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// What the caller sees of a special file that it may not open. It sees the same attributes on
    /// an inode of its own, behind which is nothing: no device, no listener, nobody's FIFO.
    fn barred_answer(&self, mut entry: Entry, asked: ChangeNumber) -> Result<KernelAnswer> {
        entry.attr.rdev = 0;
        let node = self.shared.nodes.remember_apart(entry.id)?;
        let answered = Answered { place: None, id: entry.id, node, asked };
        Ok(KernelAnswer::Small(self.entry_reply(answered, &entry)))
    }

    async fn make(
        &self,
        cx: &Context,
        (dir, name): (FileId, &Name),
        what: Make<'_>,
        asked: ChangeNumber,
    ) -> Result<KernelAnswer> {
        let entry = self.fs.make(cx, dir, name, what).await?;
        self.entry_answer(&entry, (dir, name), asked)
    }

    async fn remove(
        &self,
        cx: &Context,
        dir: FileId,
        name: &Name,
        kind: RemoveKind,
    ) -> Result<KernelAnswer> {
        self.fs.remove(cx, dir, name, kind).await?;
        if self.shared.mode.names_may_change() {
            self.shared.nodes.removed((dir, name));
        }
        Ok(KernelAnswer::Empty)
    }

    /// As [`Worker::entry_answer`], of a directory; `apart` as with `Nodes::remember_directory`.
    fn directory_answer(
        &self,
        entry: &Entry,
        (parent, dir, name): (u64, FileId, &Name),
        asked: ChangeNumber,
        apart: impl FnOnce() -> bool,
    ) -> Result<KernelAnswer> {
        let nodes = &self.shared.nodes;
        let seen = self.binding(&entry.attr, (dir, name));
        let node = nodes.remember_directory(entry.id, seen, parent, apart)?;
        let answered = Answered { place: Some((dir, name)), id: entry.id, node, asked };
        Ok(KernelAnswer::Small(self.entry_reply(answered, entry)))
    }

    fn entry_answer(
        &self,
        entry: &Entry,
        place: (FileId, &Name),
        asked: ChangeNumber,
    ) -> Result<KernelAnswer> {
        self.entry(entry, Some(place), asked).map(KernelAnswer::Small)
    }

    /// Tells the kernel of a file that is no directory: from now on it counts until it is forgotten.
    pub(crate) fn entry(
        &self,
        entry: &Entry,
        place: Option<(FileId, &Name)>,
        asked: ChangeNumber,
    ) -> Result<Small> {
        let seen = place.map(|place| self.binding(&entry.attr, place));
        let node = self.shared.nodes.remember(entry.id, seen)?;
        let answered = Answered { place, id: entry.id, node, asked };
        Ok(self.entry_reply(answered, entry))
    }

    /// What tells the kernel of it.
    pub(super) fn entry_reply(&self, answered: Answered<'_>, entry: &Entry) -> Small {
        let node = answered.node;
        self.shared.nodes.note_type(node.node, entry.attr.file_type());
        reply::entry(node, entry, self.entry_validity(&entry.attr, answered))
    }

    /// A name that led to a file with these attributes.
    pub(super) fn binding<'n>(
        &self,
        attr: &Attr,
        (dir, name): (FileId, &'n Name),
    ) -> NameBinding<'n> {
        NameBinding { dir, name, ttl: Ttl::of(self.shared.mode.name(attr)) }
    }
}
