//! Calls by chance: every operation, with arguments that are well-formed and mostly wrong.

use dray_core::{
    Access, Allocate, CreateHow, FileId, Lock, LockFamily, LockKind, LockOwner, LockRange, Op,
    OpenHow, Pid, RemoveKind, RenameHow, Seek, SetAttr, TimeSet, Timestamp, Write, XattrSet,
    Xflags,
};
use dray_rpc::wire::{Call, Change, LockPurpose, Ticket, WriteBase};

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
    let (dir, handle, at) = (id(root, chance), chance.below(6) as u64, chance.edge());
    match op {
        Op::Lookup => Call::Lookup { dir, name },
        Op::Parent => Call::Parent { dir },
        Op::Getattr => Call::Getattr { id: dir, handle: some(chance, handle) },
        Op::Setattr => {
            Call::Setattr { id: dir, handle: some(chance, handle), set: set_attr(chance) }
        }
        Op::Readlink => Call::Readlink { id: dir },
        Op::Make => make(dir, name, other, chance),
        Op::Remove => Call::Remove { dir, name, kind: RemoveKind::File },
        Op::Rename => rename((dir, name), (id(root, chance), other), chance),
        Op::Link => Call::Link { id: id(root, chance), dir, name },
        Op::Open => Call::Open { id: dir, how: open_how(chance), handle, again: odd(chance) },
        Op::LookupOpen => Call::LookupOpen { dir, name, how: open_how(chance), handle },
        Op::OpenNamed => {
            Call::OpenNamed { dir, name, id: id(root, chance), how: open_how(chance), handle }
        }
        Op::Learn => Call::Learn { dir, name, id: id(root, chance) },
        Op::Hold => Call::Hold { number: handle, id: dir, name: some(chance, name) },
        Op::Release => Call::Release { number: handle },
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
        Op::WriteBack => Call::WriteBack {
            handle,
            lease: chance.edge(),
            base: WriteBase::default(),
            kill_set_id: odd(chance),
            ends: odd(chance),
            extents: name,
        },
        Op::Readdir => {
            let (cookie, max_bytes) = (chance.edge(), chance.edge() as u32);
            Call::Readdir { handle, cookie, max_bytes, plus: odd(chance) }
        }
        Op::Flush => Call::Flush { handle, owner: LockOwner::own(chance.edge()) },
        Op::Sync => Call::Sync { handle, data_only: true },
        Op::Allocate => Call::Allocate { handle, what: allocate(at, chance) },
        Op::Seek => Call::Seek { handle, at, what: Seek::Hole },
        Op::CopyRange => {
            let (to, to_at) = (chance.below(6) as u64, chance.edge());
            Call::CopyRange { handle, at, to, to_at, len_bytes: chance.edge() }
        }
        Op::Lock => {
            let purpose = LOCK_PURPOSES[chance.below(LOCK_PURPOSES.len())];
            Call::Lock { handle, lock: lock(chance), wait: false, purpose }
        }
        Op::TestLock => Call::TestLock { handle, lock: lock(chance) },
        Op::GetFlags => Call::GetFlags { handle },
        Op::SetFlags => Call::SetFlags { handle, flags: 0 },
        Op::GetXflags => Call::GetXflags { handle },
        Op::SetXflags => Call::SetXflags { handle, set: Xflags::default() },
        Op::Close => Call::Close { handle },
        Op::Put => Call::Put { dir, name, mode: chance.next() as u32 },
        Op::SyncAll => Call::SyncAll {},
        Op::Recover => recover(name, chance),
        Op::Reopen => {
            Call::Reopen { id: dir, how: open_how(chance), handle, ticket: ticket(chance) }
        }
        Op::Declare => declare(name, chance),
        Op::Redo => Call::Redo { handle, stamp: chance.edge(), change: change(at, chance) },
    }
}

fn make<'a>(dir: FileId, name: &'a [u8], target: &'a [u8], chance: &mut Chance) -> Call<'a> {
    let (kind, mode) = (chance.below(4) as u8, chance.next() as u32);
    // No devices: root makes them for real.
    let mode = if kind == 1 { libc::S_IFIFO | mode & 0o7777 } else { mode };
    Call::Make { dir, name, kind, mode, rdev: 0, target }
}

fn rename<'a>(
    (from, from_name): (FileId, &'a [u8]),
    (to, to_name): (FileId, &'a [u8]),
    chance: &mut Chance,
) -> Call<'a> {
    let how = [RenameHow::Replace, RenameHow::NoReplace, RenameHow::Exchange];
    Call::Rename { from, from_name, to, to_name, how: how[chance.below(3)] }
}

fn allocate(at: u64, chance: &mut Chance) -> Allocate {
    let flags = chance.below(128) as i32;
    // Space that is really taken stays small.
    match odd(chance) {
        true => Allocate { flags, at: chance.below(1 << 20) as u64, len_bytes: 4096 },
        false => Allocate { flags, at, len_bytes: u64::MAX - chance.edge() },
    }
}

fn recover<'a>(durable_stamps: &'a [u8], chance: &mut Chance) -> Call<'a> {
    let (instance, newest, durable_stamp) = (chance.edge(), chance.edge(), chance.edge());
    Call::Recover { instance, newest, durable_stamp, durable_stamps, step: chance.below(4) as u8 }
}

fn declare<'a>(durable_stamps: &'a [u8], chance: &mut Chance) -> Call<'a> {
    let (instance, durable_stamp, ticket) = (chance.edge(), chance.edge(), ticket(chance));
    Call::Declare { instance, durable_stamp, ticket, durable_stamps, last: odd(chance) }
}

fn change(at: u64, chance: &mut Chance) -> Change {
    match chance.below(4) {
        0 => Change::Write { at },
        1 => Change::Size { size: at },
        2 => Change::Allocate { flags: 3, at, len_bytes: chance.edge() },
        _ => Change::Attr(set_attr(chance)),
    }
}

const LOCK_PURPOSES: [LockPurpose; 7] = [
    LockPurpose::Program,
    LockPurpose::Reclaim,
    LockPurpose::AskForLease,
    LockPurpose::GiveBackLocks,
    LockPurpose::GiveBackNone,
    LockPurpose::GivenBack,
    LockPurpose::LastGivenBack,
];

fn odd(chance: &mut Chance) -> bool {
    chance.below(2) == 0
}

fn some<T>(chance: &mut Chance, value: T) -> Option<T> {
    odd(chance).then_some(value)
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
    let flags = chance.next() as i32;
    OpenHow { flags, kill_set_id: odd(chance), with_attr: odd(chance) }
}

fn create_how(chance: &mut Chance) -> CreateHow {
    let open = match chance.below(2) {
        0 => OpenHow::READ_WRITE,
        _ => open_how(chance),
    };
    CreateHow { open, mode: chance.next() as u32, exclusive: odd(chance) }
}

fn write_how(chance: &mut Chance) -> Write {
    let append = chance.below(3) == 0;
    Write { append, kill_set_id: odd(chance), ..Write::at(chance.edge()) }
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
        owner: LockOwner::own(chance.edge()),
        pid: Pid(chance.next() as u32),
    }
}
