//! Calls by chance: every operation, with arguments that are well-formed and mostly wrong.

use dray_core::{
    Access, Allocate, CreateHow, FileId, Lock, LockFamily, LockKind, LockOwner, LockRange, Op,
    OpenHow, Pid, RemoveKind, RenameHow, Seek, SetAttr, TimeSet, Timestamp, Write, XattrSet,
};
use dray_rpc::wire::{Call, Change, Ticket};

use super::raw::Chance;

/// The parts of a call that it borrows.
pub struct Words {
    names: [Vec<u8>; 2],
}

impl Words {
    pub fn by_chance(chance: &mut Chance) -> Words {
        let mut name = || match chance.below(8) {
            0 => Vec::new(),
            1 => b"..".to_vec(),
            2 => vec![b'x'; 255 + chance.below(300)],
            3 => chance.bytes(5000),
            4 => b"user.note".to_vec(),
            number => format!("f{}", number % 3).into_bytes(),
        };
        Words { names: [name(), name()] }
    }
}

/// A call of operation `op` on files of the session, or on none.
pub fn call<'a>(op: Op, root: FileId, words: &'a Words, chance: &mut Chance) -> Call<'a> {
    let [name, other] = words.names.each_ref().map(|name| &name[..]);
    let dir = id(root, chance);
    let handle = chance.below(6) as u64;
    let at = chance.edge();
    match op {
        Op::Lookup => Call::Lookup { dir, name },
        Op::Parent => Call::Parent { dir },
        Op::Getattr => Call::Getattr { id: dir, handle: some(chance, handle) },
        Op::Setattr => {
            Call::Setattr { id: dir, handle: some(chance, handle), set: set_attr(chance) }
        }
        Op::Readlink => Call::Readlink { id: dir },
        Op::Make => {
            let (kind, mode) = (chance.below(4) as u8, chance.next() as u32);
            // No devices: root makes them for real.
            let mode = if kind == 1 { libc::S_IFIFO | mode & 0o7777 } else { mode };
            Call::Make { dir, name, kind, mode, rdev: 0, target: other }
        }
        Op::Remove => Call::Remove { dir, name, kind: RemoveKind::File },
        Op::Rename => {
            let to = id(root, chance);
            let how = [RenameHow::Replace, RenameHow::NoReplace, RenameHow::Exchange];
            let how = how[chance.below(3)];
            Call::Rename { from: dir, from_name: name, to, to_name: other, how }
        }
        Op::Link => Call::Link { id: id(root, chance), dir, name },
        Op::Open => {
            let again = chance.below(2) == 0;
            Call::Open { id: dir, how: open_how(chance), handle, again }
        }
        Op::LookupOpen => Call::LookupOpen { dir, name, how: open_how(chance), handle },
        Op::Create => Call::Create { dir, name, how: create_how(chance), handle },
        Op::Tmpfile => Call::Tmpfile { dir, how: create_how(chance), handle },
        Op::Access => Call::Access { id: dir, want: Access(chance.next() as u32) },
        Op::Statfs => Call::Statfs {},
        Op::Getxattr => Call::Getxattr { id: dir, name },
        Op::Setxattr => Call::Setxattr { id: dir, name, value: other, how: XattrSet::Any },
        Op::Listxattr => Call::Listxattr { id: dir },
        Op::Removexattr => Call::Removexattr { id: dir, name },
        Op::Read => Call::Read { handle, at, len_bytes: chance.edge() as u32 },
        Op::Write => Call::Write { handle, how: write_how(chance) },
        Op::Readdir => {
            let (cookie, max_bytes) = (chance.edge(), chance.edge() as u32);
            Call::Readdir { handle, cookie, max_bytes, plus: chance.below(2) == 0 }
        }
        Op::Flush => Call::Flush { handle, owner: LockOwner(chance.edge()) },
        Op::Sync => Call::Sync { handle, data_only: true },
        Op::Allocate => {
            let flags = chance.below(128) as i32;
            // Space that is really taken stays small.
            let len_bytes = if chance.below(2) == 0 { 4096 } else { u64::MAX - chance.edge() };
            let at = if len_bytes == 4096 { chance.below(1 << 20) as u64 } else { at };
            Call::Allocate { handle, what: Allocate { flags, at, len_bytes } }
        }
        Op::Seek => Call::Seek { handle, at, what: Seek::Hole },
        Op::CopyRange => {
            let (to, to_at) = (chance.below(6) as u64, chance.edge());
            Call::CopyRange { handle, at, to, to_at, len_bytes: chance.edge() }
        }
        Op::Lock => Call::Lock { handle, lock: lock(chance), wait: false, reclaim: at & 1 == 0 },
        Op::TestLock => Call::TestLock { handle, lock: lock(chance) },
        Op::GetFlags => Call::GetFlags { handle },
        Op::SetFlags => Call::SetFlags { handle, flags: 0 },
        Op::Close => Call::Close { handle },
        Op::Put => Call::Put { dir, name, mode: chance.next() as u32 },
        Op::SyncAll => Call::SyncAll {},
        Op::Recover => {
            let (instance, newest, floor) = (chance.edge(), chance.edge(), chance.edge());
            Call::Recover { instance, newest, floor, floors: name, step: chance.below(4) as u8 }
        }
        Op::Reopen => {
            let ticket = ticket(chance);
            Call::Reopen { id: dir, how: open_how(chance), handle, ticket }
        }
        Op::Declare => {
            let (instance, floor, ticket) = (chance.edge(), chance.edge(), ticket(chance));
            Call::Declare { instance, floor, ticket, floors: name, last: chance.below(2) == 0 }
        }
        Op::Redo => {
            let change = match chance.below(4) {
                0 => Change::Write { at },
                1 => Change::Size { size: at },
                2 => Change::Allocate { flags: 3, at, len_bytes: chance.edge() },
                _ => Change::Attr(set_attr(chance)),
            };
            Call::Redo { handle, stamp: chance.edge(), change }
        }
    }
}

fn some<T>(chance: &mut Chance, value: T) -> Option<T> {
    (chance.below(2) == 0).then_some(value)
}

fn id(root: FileId, chance: &mut Chance) -> FileId {
    match chance.below(4) {
        0 => FileId { ino: chance.edge(), generation: chance.edge() },
        _ => root,
    }
}

fn ticket(chance: &mut Chance) -> Ticket {
    Ticket(std::array::from_fn(|_| chance.next() as u8))
}

fn open_how(chance: &mut Chance) -> OpenHow {
    let (flags, mut odd) = (chance.next() as i32, || chance.below(2) == 0);
    OpenHow { flags, kill_set_id: odd(), with_attr: odd() }
}

fn create_how(chance: &mut Chance) -> CreateHow {
    let open = match chance.below(2) {
        0 => OpenHow::READ_WRITE,
        _ => open_how(chance),
    };
    CreateHow { open, mode: chance.next() as u32, exclusive: chance.below(2) == 0 }
}

fn write_how(chance: &mut Chance) -> Write {
    let append = chance.below(3) == 0;
    Write { append, kill_set_id: chance.below(2) == 0, ..Write::at(chance.edge()) }
}

fn set_attr(chance: &mut Chance) -> SetAttr {
    let time = TimeSet::At(Timestamp { sec: chance.edge() as i64, nsec: chance.next() as u32 });
    SetAttr {
        mode: some(chance, 0o4777),
        size: Some(chance.edge()),
        atime: some(chance, time),
        mtime: some(chance, TimeSet::Now),
        ..SetAttr::default()
    }
}

fn lock(chance: &mut Chance) -> Lock {
    Lock {
        family: [LockFamily::Posix, LockFamily::Flock][chance.below(2)],
        kind: [LockKind::Shared, LockKind::Exclusive, LockKind::Unlock][chance.below(3)],
        range: LockRange { start: chance.edge(), end: chance.edge() },
        owner: LockOwner(chance.edge()),
        pid: Pid(chance.next() as u32),
    }
}
