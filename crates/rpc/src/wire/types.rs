//! The layout of core's types.

use dray_core::{
    Access, Allocate, AtOpen, Attr, CreateHow, DirPage, Entry, FileId, FileType, FsInfo, FsUuid,
    Gid, Identity, Lock, LockFamily, LockKind, LockOwner, LockRange, NodeId, OpenHow, PageValidity,
    Pid, RemoveKind, RenameHow, RequestId, Seek, SetAttr, Statfs, TimeSet, Timestamp, Ttl, Uid,
    Validity, Write, XattrSet, Xflags,
};

use crate::wire::codec::{Input, Malformed, Wire, wire_fields, wire_numbers};

macro_rules! newtypes {
    ($($name:ident),*) => {$(
        impl<'a> Wire<'a> for $name {
            fn put(&self, out: &mut Vec<u8>) {
                self.0.put(out);
            }
            fn get(input: &mut Input<'a>) -> Result<$name, Malformed> {
                input.get().map($name)
            }
        }
    )*};
}

newtypes!(Uid, Gid, Pid, NodeId, RequestId, FsUuid, Access);

/// The owner's node is that of the caller, which the identity of the call stands for.
impl<'a> Wire<'a> for LockOwner {
    fn put(&self, out: &mut Vec<u8>) {
        self.number.put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<LockOwner, Malformed> {
        input.get().map(LockOwner::own)
    }
}

wire_fields!(FileId { ino, generation });
wire_fields!(Timestamp { sec, nsec });
wire_fields!(Entry { id, attr });
wire_fields!(SetAttr { mode, uid, gid, size, atime, mtime, kill_set_id });
wire_fields!(Statfs {
    block_bytes,
    fragment_bytes,
    blocks,
    blocks_free,
    blocks_available,
    files,
    files_free,
    name_max_bytes
});
wire_fields!(OpenHow { flags, kill_set_id, with_attr });
wire_fields!(CreateHow { open, mode, exclusive });
wire_fields!(Write { at, append, sync, kill_set_id });
wire_fields!(Allocate { flags, at, len_bytes });
wire_fields!(Xflags { flags, extent_bytes, extents, project, cow_extent_bytes });
wire_fields!(LockRange { start, end });
wire_fields!(Lock { family, kind, range, owner, pid });
wire_fields!(FsInfo { uuid, root, kind, read_only });

wire_numbers!(RemoveKind { RemoveKind::File = 0, RemoveKind::Directory = 1 });
wire_numbers!(RenameHow {
    RenameHow::Replace = 0,
    RenameHow::NoReplace = 1,
    RenameHow::Exchange = 2,
});
wire_numbers!(XattrSet { XattrSet::Any = 0, XattrSet::Create = 1, XattrSet::Replace = 2 });
wire_numbers!(Seek { Seek::Data = 0, Seek::Hole = 1 });
wire_numbers!(LockKind { LockKind::Shared = 0, LockKind::Exclusive = 1, LockKind::Unlock = 2 });
wire_numbers!(LockFamily { LockFamily::Posix = 0, LockFamily::Flock = 1 });
wire_numbers!(PageValidity {
    PageValidity::Never = 0,
    PageValidity::UntilChanged = 1,
    PageValidity::UntilRevoked = 2,
});
wire_numbers!(FileType {
    FileType::Fifo = 1,
    FileType::CharDevice = 2,
    FileType::Directory = 4,
    FileType::BlockDevice = 6,
    FileType::Regular = 8,
    FileType::Symlink = 10,
    FileType::Socket = 12,
});

/// A bit in the mode on the wire: the attributes' [`Validity`] follows. Modes have 16 bits.
const SAYS_VALIDITY: u32 = 1 << 31;

/// The validity follows if there is any, which costs nothing where there is none.
impl<'a> Wire<'a> for Attr {
    fn put(&self, out: &mut Vec<u8>) {
        let says = self.validity != Validity::UNSAID;
        let mode = self.mode & !SAYS_VALIDITY | if says { SAYS_VALIDITY } else { 0 };
        ((self.ino, mode), (self.nlink, self.uid)).put(out);
        ((self.gid, self.rdev), (self.block_bytes, self.size)).put(out);
        ((self.blocks, self.atime), (self.mtime, self.ctime)).put(out);
        (self.btime, (self.attributes, self.attributes_mask)).put(out);
        if says {
            self.validity.put(out);
        }
    }
    fn get(input: &mut Input<'a>) -> Result<Attr, Malformed> {
        let (ino, mode): (u64, u32) = input.get()?;
        let (nlink, uid) = input.get()?;
        let ((gid, rdev), (block_bytes, size)) = input.get()?;
        let ((blocks, atime), (mtime, ctime)) = input.get()?;
        let (btime, (attributes, attributes_mask)) = input.get()?;
        let says = mode & SAYS_VALIDITY != 0;
        let validity = if says { input.get()? } else { Validity::UNSAID };
        if says && validity == Validity::UNSAID {
            return Err(Malformed("a validity that says nothing"));
        }
        let mode = mode & !SAYS_VALIDITY;
        Ok(Attr {
            ino,
            mode,
            nlink,
            uid,
            gid,
            rdev,
            block_bytes,
            size,
            blocks,
            atime,
            mtime,
            ctime,
            btime,
            attributes,
            attributes_mask,
            validity,
        })
    }
}

impl<'a> Wire<'a> for Validity {
    fn put(&self, out: &mut Vec<u8>) {
        (Ttl::to_number(self.name), Ttl::to_number(self.attributes)).put(out);
        self.pages.put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<Validity, Malformed> {
        let ((name, attributes), pages) = input.get()?;
        let [name, attributes] = [name, attributes].map(Ttl::from_number);
        Ok(Validity { name, attributes, pages })
    }
}

/// Whether its times are past stands in the reply's head:
/// [`ReplyHead::times_past`](super::ReplyHead).
impl<'a> Wire<'a> for AtOpen {
    fn put(&self, out: &mut Vec<u8>) {
        (self.attr, self.no_capability).put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<AtOpen, Malformed> {
        let (attr, no_capability) = input.get()?;
        Ok(AtOpen { attr, no_capability, times_past: None })
    }
}

impl<'a> Wire<'a> for TimeSet {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            TimeSet::Now => None,
            TimeSet::At(time) => Some(*time),
        }
        .put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<TimeSet, Malformed> {
        Ok(input.get::<Option<Timestamp>>()?.map_or(TimeSet::Now, TimeSet::At))
    }
}

/// Most supplementary groups that Linux gives a process (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65_536;

impl<'a> Wire<'a> for Identity {
    fn put(&self, out: &mut Vec<u8>) {
        self.uid.put(out);
        self.gid.put(out);
        (&*self.job).put(out);
        (self.groups.len() as u32).put(out);
        self.groups.iter().for_each(|group| group.put(out));
    }
    fn get(input: &mut Input<'a>) -> Result<Identity, Malformed> {
        let (uid, gid) = input.get()?;
        let job = input.get::<&str>()?.into();
        let count = input.get::<u32>()? as usize;
        if count > GROUPS_MAX || count > input.0.len() {
            return Err(Malformed("more groups than there can be"));
        }
        let groups = (0..count).map(|_| input.get()).collect::<Result<Box<[Gid]>, _>>()?;
        Ok(Identity { uid, gid, groups, job })
    }
}

impl<'a> Wire<'a> for DirPage {
    fn put(&self, out: &mut Vec<u8>) {
        self.end.put(out);
        (self.len() as u32).put(out);
        for (name, entry) in self.iter() {
            (entry.id, (entry.kind, entry.cookie)).put(out);
            entry.attr.put(out);
            name.put(out);
        }
    }
    fn get(input: &mut Input<'a>) -> Result<DirPage, Malformed> {
        let mut page = DirPage::default();
        page.end = input.get()?;
        for _ in 0..input.get::<u32>()? {
            let (id, (kind, cookie)) = input.get()?;
            let attr = input.get()?;
            let name = input.get::<&[u8]>()?;
            page.push(name, id, kind, cookie, attr);
        }
        Ok(page)
    }
}
