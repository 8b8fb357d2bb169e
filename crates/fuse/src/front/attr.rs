//! Attributes: getattr, statx, setattr, access.

use dray_core::{Access, Attr, Context, Errno, Result, SetAttr, TimeSet, Timestamp};

use crate::front::Worker;
use crate::proto::abi::fattr;
use crate::proto::{Operation, SetattrArgs, reply};
use crate::transport::Answer;

impl Worker {
    pub(crate) async fn attributes(
        &self,
        cx: &Context,
        node: u64,
        op: &Operation<'_>,
    ) -> Result<Answer> {
        let valid = self.shared.options.attr_validity();
        match *op {
            Operation::Getattr { fh } => {
                let attr = self.getattr(cx, node, fh).await?;
                Ok(Answer::Small(reply::attr(&attr, valid)))
            }
            Operation::Statx { fh, .. } => {
                let attr = self.getattr(cx, node, fh).await?;
                Ok(Answer::Small(reply::statx(&attr, valid)))
            }
            Operation::Setattr(ref args) if self.undoes_a_write(cx, node, args).await => {
                Err(Errno::EAGAIN.into())
            }
            Operation::Setattr(ref args) => {
                let set = changes(args);
                let attr = match args.valid & fattr::FH {
                    0 => self.fs.setattr(cx, self.id(node)?, set).await?,
                    _ => self.file(cx, args.fh).await?.setattr(cx, set).await?,
                };
                Ok(Answer::Small(reply::attr(&attr, valid)))
            }
            Operation::Access { mask } => {
                self.fs.access(cx, self.id(node)?, Access(mask & 7)).await?;
                Ok(Answer::Empty)
            }
            _ => Err(Errno::EIO.into()),
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
