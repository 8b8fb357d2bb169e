//! Attributes: getattr, statx, setattr, access.

use std::time::Duration;

use dray_core::{
    Access, Attr, Context, Errno, Error, FileType, Result, SetAttr, TimeSet, Timestamp,
};

use crate::front::Worker;
use crate::front::kept_listings::another_time;
use crate::proto::abi::fattr;
use crate::proto::{AttributeOperation, SetattrArgs, reply};
use crate::state::changes::ChangeNumber;
use crate::transport::KernelAnswer;

impl Worker {
    pub(crate) async fn attributes(
        &self,
        cx: &Context,
        node: u64,
        op: &AttributeOperation,
    ) -> Result<KernelAnswer> {
        let asked = self.asked();
        match *op {
            AttributeOperation::Getattr { fh } => {
                let in_doubt = self.drops_listing(node).await;
                let mut attr = self.believable(node, self.getattr(cx, node, fh).await?)?;
                if in_doubt {
                    attr.mtime = another_time(attr.mtime);
                }
                let believed = self.attributes_validity(&attr, node, asked);
                // Only read(2) and lseek(2) name the file (`fuse_update_attributes` in fs/fuse/dir.c).
                let believed = match fh.is_some() && self.drops_pages(node, &mut attr) {
                    true => Duration::ZERO,
                    false => believed,
                };
                Ok(KernelAnswer::Small(reply::attr(&attr, believed)))
            }
            AttributeOperation::Statx { fh, .. } => {
                let attr = self.believable(node, self.getattr(cx, node, fh).await?)?;
                let believed = self.attributes_validity(&attr, node, asked);
                Ok(KernelAnswer::Small(reply::statx(&attr, believed)))
            }
            AttributeOperation::Setattr(ref args) if self.undoes_a_write(cx, node, args).await => {
                Err(Errno::EAGAIN.into())
            }
            AttributeOperation::Setattr(ref args) => {
                let set = changes(args);
                let attr = match args.valid & fattr::FH {
                    0 => self.fs.setattr(cx, self.id(node)?, set).await?,
                    _ => self.file(cx, args.fh).await?.setattr(cx, set).await?,
                };
                Ok(self.attr_answer(&self.believable(node, attr)?, node, asked))
            }
            AttributeOperation::Access { mask } => {
                self.fs.access(cx, self.id(node)?, Access(mask & 7)).await?;
                Ok(KernelAnswer::Empty)
            }
        }
    }

    fn attr_answer(&self, attr: &Attr, node: u64, asked: ChangeNumber) -> KernelAnswer {
        KernelAnswer::Small(reply::attr(attr, self.attributes_validity(attr, node, asked)))
    }

    /// What the kernel takes for attributes of `node`. Others would have it take the inode for bad,
    /// for as long as it knows it (`fuse_make_bad` in fs/fuse/dir.c). That is the whole mount, if
    /// the inode is the root. A file of another type is another file, where numbers are used again;
    /// or the server is broken.
    pub(super) fn believable(&self, node: u64, attr: Attr) -> Result<Attr> {
        let kind = FileType::from_mode(attr.mode);
        if kind.is_none() || i64::try_from(attr.size).is_err() {
            return Err(Error::new(Errno::EPROTO).because("attributes that no file has"));
        }
        match self.shared.nodes.type_of(node) {
            known if known.is_none() || known == kind => Ok(attr),
            _ => Err(Error::new(Errno::ESTALE).because("it is a file of another type by now")),
        }
    }

    async fn getattr(&self, cx: &Context, node: u64, fh: Option<u64>) -> Result<Attr> {
        match fh {
            Some(fh) => self.file(cx, fh).await?.getattr(cx).await,
            None => self.fs.getattr(cx, self.id(node)?).await,
        }
    }
}

fn changes(args: &SetattrArgs) -> SetAttr {
    let given = |flag: u32| args.valid & flag != 0;
    let time = |flag: u32, now: u32, time: Timestamp| {
        given(flag).then_some(if given(now) { TimeSet::Now } else { TimeSet::At(time) })
    };
    SetAttr {
        mode: given(fattr::MODE).then_some(args.mode & 0o7777),
        uid: given(fattr::UID).then_some(args.uid),
        gid: given(fattr::GID).then_some(args.gid),
        size: given(fattr::SIZE).then_some(args.size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, args.atime),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, args.mtime),
        kill_set_id: given(fattr::KILL_SUIDGID),
    }
}
