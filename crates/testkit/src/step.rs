//! The language of generated sequences.
//!
//! A [`Step`] is one operation by somebody, through one of several clients. Names come
//! from a small pool, so that operations meet; open files are known by the number of a
//! slot. Steps are plain data: a failing sequence is printed with `{:?}` and pasted into
//! a test.

use std::sync::Arc;

use dray_core::{Gid, Identity, RenameHow, Uid, XattrSet};
use proptest::prelude::*;

/// Slots for open files.
pub const SLOTS: usize = 4;
/// Identities: see [`identity`].
pub const IDENTITIES: u8 = 3;
/// Clients that a sequence is spread over.
pub const CLIENTS: u8 = 3;
/// Text of the symbolic links that are made: it never leads to anything, so that
/// following one always ends in `ENOENT`.
pub const NOWHERE: &[&[u8]] = &[b"nowhere/x", b"nowhere/\xff/y"];

/// Root, and two users who share group 3000.
pub fn identity(who: u8) -> Arc<Identity> {
    let (uid, gid, groups): (u32, u32, &[u32]) = match who % IDENTITIES {
        0 => (0, 0, &[]),
        1 => (1001, 2001, &[3000]),
        _ => (1002, 2002, &[3000]),
    };
    let groups = groups.iter().map(|&gid| Gid(gid)).collect();
    Arc::new(Identity { uid: Uid(uid), gid: Gid(gid), groups, job: "".into() })
}

/// The names in use, by number.
pub fn name(number: u8) -> Vec<u8> {
    match number % 7 {
        0 => b"a".to_vec(),
        1 => b"b".to_vec(),
        2 => b"dir".to_vec(),
        3 => b"\xff\xfe\x80".to_vec(),
        4 => vec![b'x'; 255],
        5 => b"with space\n".to_vec(),
        _ => b"...".to_vec(),
    }
}

/// Names from the root, by number; 1 to 4 of them.
pub type Path = Vec<u8>;

/// One operation by some user at some client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Which of the clients carries it out (modulo their number).
    pub client: u8,
    /// The user that asks (see [`identity`]).
    pub who: u8,
    /// The action.
    pub action: Action,
}

/// What is done. Offsets and lengths are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The fields are the arguments of the system calls named.
pub enum Action {
    Mkdir {
        path: Path,
        mode: u32,
    },
    /// FIFO, socket or regular file.
    Mknod {
        path: Path,
        mode: u32,
    },
    Symlink {
        path: Path,
        target: u8,
    },
    Link {
        from: Path,
        to: Path,
    },
    Unlink {
        path: Path,
    },
    Rmdir {
        path: Path,
    },
    Rename {
        from: Path,
        to: Path,
        how: RenameHow,
    },
    /// open(2) without `O_CREAT`, into a slot; if it succeeds, what was there is closed.
    Open {
        path: Path,
        flags: i32,
        slot: u8,
    },
    /// open(2) with `O_CREAT`.
    Create {
        path: Path,
        flags: i32,
        mode: u32,
        exclusive: bool,
        slot: u8,
    },
    /// open(2) with `O_TMPFILE | O_RDWR`.
    Tmpfile {
        dir: Path,
        mode: u32,
        slot: u8,
    },
    /// linkat(2) of an open file: its first name or a further one.
    LinkSlot {
        slot: u8,
        to: Path,
    },
    Close {
        slot: u8,
    },
    Read {
        slot: u8,
        at: u64,
        len: u32,
    },
    /// Appends if the slot was opened with `O_APPEND`. Bytes are made from `fill`.
    Write {
        slot: u8,
        at: u64,
        len: u32,
        fill: u8,
    },
    Fsync {
        slot: u8,
    },
    Fstat {
        slot: u8,
    },
    Ftruncate {
        slot: u8,
        size: u64,
    },
    Fallocate {
        slot: u8,
        flags: i32,
        at: u64,
        len: u64,
    },
    /// lseek(2) for data, or for a hole.
    Seek {
        slot: u8,
        at: u64,
        hole: bool,
    },
    CopyRange {
        from: u8,
        at: u64,
        to: u8,
        to_at: u64,
        len: u64,
    },
    Lstat {
        path: Path,
    },
    Chmod {
        path: Path,
        mode: u32,
    },
    Lchown {
        path: Path,
        uid: Option<u32>,
        gid: Option<u32>,
    },
    Truncate {
        path: Path,
        size: u64,
    },
    /// utimensat(2): both times now, or access time left and modification time given.
    Utimens {
        path: Path,
        mtime_sec: Option<u32>,
    },
    Readlink {
        path: Path,
    },
    Access {
        path: Path,
        want: u32,
    },
    /// All names with their types; an empty path means the root.
    List {
        path: Path,
    },
    Setxattr {
        path: Path,
        name: u8,
        value: Vec<u8>,
        how: XattrSet,
    },
    Getxattr {
        path: Path,
        name: u8,
    },
    /// Names in `user.` only.
    Listxattr {
        path: Path,
    },
    Removexattr {
        path: Path,
        name: u8,
    },
}

/// The bytes that [`Action::Write`] writes.
pub fn pattern(fill: u8, len: u32) -> Vec<u8> {
    (0..len).map(|index| fill.wrapping_add((index % 251) as u8).max(1)).collect()
}

/// The names of extended attributes in use, by number.
pub fn xattr_name(number: u8) -> &'static [u8] {
    [&b"user.one"[..], b"user.two", b"user.\xff"][usize::from(number) % 3]
}

/// A sequence of `steps` steps, behind some that make directories and open files for them
/// to meet.
pub fn sequences(steps: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Step>> {
    let modes = || prop_oneof![4 => Just(0o777u32), 2 => Just(0o1777u32), 1 => Just(0o2777u32)];
    let all = || (0..GROUND_STEPS).collect::<Vec<usize>>();
    let kept = prop_oneof![
        4 => Just(all()),
        1 => proptest::sample::subsequence(all(), 0..=GROUND_STEPS),
    ];
    let ground = (modes(), modes(), kept).prop_map(|(outer, inner, kept)| {
        let ground = ground(outer, inner);
        kept.into_iter().map(|number| ground[number].clone()).collect::<Vec<Step>>()
    });
    (ground, proptest::collection::vec(step(), steps))
        .prop_map(|(ground, steps)| ground.into_iter().chain(steps).collect())
}

/// Steps of [`ground`].
const GROUND_STEPS: usize = 7;

/// Two directories, and an open file in every slot, for everybody to use.
fn ground(outer: u32, inner: u32) -> [Step; GROUND_STEPS] {
    let create = |path: &[u8], more, slot| Action::Create {
        path: path.to_vec(),
        flags: libc::O_RDWR | more,
        mode: 0o777,
        exclusive: false,
        slot,
    };
    let actions = [
        Action::Mkdir { path: vec![2], mode: outer & 0o1777 },
        Action::Chmod { path: vec![2], mode: outer },
        Action::Mkdir { path: vec![2, 2], mode: inner & 0o1777 },
        create(&[0], 0, 0),
        create(&[2, 0], 0, 1),
        create(&[1], libc::O_APPEND, 2),
        create(&[2, 1], 0, 3),
    ];
    let mut number = 0;
    actions.map(|action| {
        number += 1;
        Step { client: number, who: number / 2 % 2, action }
    })
}

/// One step.
pub fn step() -> impl Strategy<Value = Step> {
    let who = prop_oneof![2 => Just(0u8), 3 => Just(1u8), 3 => Just(2u8)];
    (0..CLIENTS, who, action()).prop_map(|(client, who, action)| Step { client, who, action })
}

// The strategies are boxed where they branch: the trees of all branches in one another do
// not fit on a test thread's stack.

/// Mostly shallow, and mostly the first few names, so that paths are met again. The name
/// that directories are made with is the likeliest on the way.
fn path() -> BoxedStrategy<Path> {
    let dir = || prop_oneof![8 => Just(2u8), 2 => 0..2u8, 1 => 3..7u8];
    let last = || prop_oneof![4 => Just(0u8), 3 => Just(1u8), 2 => Just(2u8), 2 => 3..7u8];
    prop_oneof![
        5 => last().prop_map(|last| vec![last]),
        5 => (dir(), last()).prop_map(|(dir, last)| vec![dir, last]),
        2 => (dir(), dir(), last()).prop_map(|(top, dir, last)| vec![top, dir, last]),
    ]
    .boxed()
}

fn dir_path() -> impl Strategy<Value = Path> {
    prop_oneof![Just(vec![]), Just(vec![2]), path()]
}

fn slot() -> impl Strategy<Value = u8> {
    0..SLOTS as u8
}

fn mode() -> impl Strategy<Value = u32> {
    prop_oneof![
        5 => Just(0o777u32),
        1 => Just(0o644u32),
        2 => prop::sample::select(vec![
            0o0, 0o400, 0o444, 0o070, 0o007, 0o770, 0o111, 0o4755, 0o2755, 0o2711, 0o2777, 0o6777,
            0o1777, 0o2644, 0o3770,
        ]),
    ]
}

fn flags() -> impl Strategy<Value = i32> {
    let access = prop_oneof![
        2 => Just(libc::O_RDONLY), 1 => Just(libc::O_WRONLY), 5 => Just(libc::O_RDWR)
    ];
    let more = prop_oneof![
        6 => Just(0),
        2 => Just(libc::O_APPEND),
        1 => Just(libc::O_TRUNC),
        1 => Just(libc::O_DIRECTORY),
        1 => Just(libc::O_NOFOLLOW),
    ];
    (access, more).prop_map(|(access, more)| access | more)
}

fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![3 => Just(0u64), 3 => 0..5000u64, 2 => 0..40_000u64, 1 => (0..9u64).prop_map(|n| n * 4096)]
}

fn len() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 1..100u32, 2 => 1..9000u32, 1 => Just(4096u32), 1 => Just(0u32)]
}

fn range_len() -> impl Strategy<Value = u64> {
    prop_oneof![Just(4096u64), 1..20_000u64]
}

fn how() -> impl Strategy<Value = RenameHow> {
    prop_oneof![
        4 => Just(RenameHow::Replace), 1 => Just(RenameHow::NoReplace), 1 => Just(RenameHow::Exchange)
    ]
}

fn xattr_how() -> impl Strategy<Value = XattrSet> {
    prop_oneof![2 => Just(XattrSet::Any), 1 => Just(XattrSet::Create), 1 => Just(XattrSet::Replace)]
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        10 => naming(),
        5 => opening(),
        10 => data(),
        6 => attributes(),
        2 => xattrs(),
    ]
}

fn naming() -> BoxedStrategy<Action> {
    let kind = prop::sample::select(vec![libc::S_IFREG, libc::S_IFIFO, libc::S_IFSOCK]);
    prop_oneof![
        6 => (path(), mode()).prop_map(|(path, mode)| Action::Mkdir { path, mode }),
        2 => (path(), kind, mode())
            .prop_map(|(path, kind, mode)| Action::Mknod { path, mode: kind | mode }),
        2 => (path(), 0..2u8).prop_map(|(path, target)| Action::Symlink { path, target }),
        3 => (path(), path()).prop_map(|(from, to)| Action::Link { from, to }),
        3 => path().prop_map(|path| Action::Unlink { path }),
        2 => path().prop_map(|path| Action::Rmdir { path }),
        6 => (path(), path(), how()).prop_map(|(from, to, how)| Action::Rename { from, to, how }),
        2 => path().prop_map(|path| Action::Readlink { path }),
        2 => dir_path().prop_map(|path| Action::List { path }),
    ]
    .boxed()
}

fn opening() -> BoxedStrategy<Action> {
    prop_oneof![
        4 => (path(), flags(), slot())
            .prop_map(|(path, flags, slot)| Action::Open { path, flags, slot }),
        6 => (path(), flags(), mode(), any::<bool>(), slot()).prop_map(
            |(path, flags, mode, exclusive, slot)| {
                // O_CREAT goes with no O_DIRECTORY; and O_NOFOLLOW on a link in a sticky
                // directory is refused in more than one way, by settings.
                let flags = flags & !(libc::O_DIRECTORY | libc::O_NOFOLLOW);
                Action::Create { path, flags, mode, exclusive, slot }
            }
        ),
        1 => (dir_path(), mode(), slot())
            .prop_map(|(dir, mode, slot)| Action::Tmpfile { dir, mode, slot }),
        1 => (slot(), path()).prop_map(|(slot, to)| Action::LinkSlot { slot, to }),
        1 => slot().prop_map(|slot| Action::Close { slot }),
    ]
    .boxed()
}

fn data() -> BoxedStrategy<Action> {
    let flags = prop::sample::select(vec![
        0,
        libc::FALLOC_FL_KEEP_SIZE,
        libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
    ]);
    prop_oneof![
        5 => (slot(), offset(), len(), any::<u8>())
            .prop_map(|(slot, at, len, fill)| Action::Write { slot, at, len, fill }),
        5 => (slot(), offset(), len()).prop_map(|(slot, at, len)| Action::Read { slot, at, len }),
        1 => slot().prop_map(|slot| Action::Fsync { slot }),
        1 => slot().prop_map(|slot| Action::Fstat { slot }),
        2 => (slot(), offset()).prop_map(|(slot, size)| Action::Ftruncate { slot, size }),
        2 => (slot(), flags, offset(), range_len())
            .prop_map(|(slot, flags, at, len)| Action::Fallocate { slot, flags, at, len }),
        2 => (slot(), offset(), any::<bool>())
            .prop_map(|(slot, at, hole)| Action::Seek { slot, at, hole }),
        2 => (slot(), offset(), slot(), offset(), range_len()).prop_map(
            |(from, at, to, to_at, len)| Action::CopyRange { from, at, to, to_at, len }
        ),
    ]
    .boxed()
}

fn attributes() -> BoxedStrategy<Action> {
    let owner = || prop_oneof![2 => Just(None), 3 => prop::sample::select(vec![0u32, 1001, 1002]).prop_map(Some)];
    let group = || prop_oneof![1 => Just(None), 3 => prop::sample::select(vec![0u32, 2001, 2002, 3000]).prop_map(Some)];
    prop_oneof![
        4 => path().prop_map(|path| Action::Lstat { path }),
        3 => (path(), mode()).prop_map(|(path, mode)| Action::Chmod { path, mode }),
        3 => (path(), owner(), group())
            .prop_filter("something is to change", |(_, uid, gid)| uid.is_some() || gid.is_some())
            .prop_map(|(path, uid, gid)| Action::Lchown { path, uid, gid }),
        2 => (path(), offset()).prop_map(|(path, size)| Action::Truncate { path, size }),
        1 => (path(), proptest::option::of(1..2_000_000_000u32))
            .prop_map(|(path, mtime_sec)| Action::Utimens { path, mtime_sec }),
        1 => (path(), 0..8u32).prop_map(|(path, want)| Action::Access { path, want }),
    ]
    .boxed()
}

fn xattrs() -> BoxedStrategy<Action> {
    prop_oneof![
        3 => (path(), 0..3u8, proptest::collection::vec(any::<u8>(), 0..60), xattr_how())
            .prop_map(|(path, name, value, how)| Action::Setxattr { path, name, value, how }),
        2 => (path(), 0..3u8).prop_map(|(path, name)| Action::Getxattr { path, name }),
        1 => path().prop_map(|path| Action::Listxattr { path }),
        1 => (path(), 0..3u8).prop_map(|(path, name)| Action::Removexattr { path, name }),
    ]
    .boxed()
}
