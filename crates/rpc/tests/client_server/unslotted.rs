//! Changes without a replay slot. They would be made without range grants. Grants make a split read
//! one read, and let the next server epoch decide who made a file.

use std::sync::Arc;
use std::time::Duration;

use crate::common;
use crate::common::memory;
use crate::common::server_epochs::{Hand, ServerEpochs, held_up, wait_noted};
use dray_backends::memory::MemoryFs;
use dray_core::{
    Allocate, Buf, Context, CreateHow, Errno, FileId, FileSystem, Lock, LockFamily, LockKind,
    LockOwner, LockRange, Name, Op, OpenHow, Pid, RemoveKind, RenameHow, SetAttr, Write, XattrSet,
    Xflags,
};
use dray_layers::faults::Fault;
use dray_rpc::wire::{Call, CallHead, LockPurpose, WriteBase};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: true };
/// Time for two calls.
const LATE: Duration = Duration::from_secs(1);
/// Half of the file, the length of each part of the split read.
const HALF: usize = 1000;

/// With the files `f` and `g`, each of twice that length.
async fn files() -> (MemoryFs, [FileId; 2]) {
    let (fs, cx) = (memory(), Context::system());
    let mut ids = Vec::new();
    for name in [b"f", b"g"] {
        let name = Name::new(name).unwrap();
        let (entry, file) = fs.create(&cx, fs.info().root, name, NEW).await.unwrap();
        file.write(&cx, Write::at(0), Buf::from(vec![b'a'; 2 * HALF])).await.unwrap();
        fs.setxattr(&cx, entry.id, b"user.a", b"x", XattrSet::Any).await.unwrap();
        ids.push(entry.id);
    }
    (fs, [ids[0], ids[1]])
}

/// Changes of every kind.
fn changes(dir: FileId, [f, g]: [FileId; 2]) -> Vec<Call<'static>> {
    let set = SetAttr { mode: Some(0o600), size: Some(1), ..SetAttr::default() };
    let cut = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
    let (append, what) =
        (Write { append: true, ..Write::at(0) }, Allocate { flags: 0, at: 0, len_bytes: 9999 });
    let moved = |how| Call::Rename { from: dir, from_name: b"f", to: dir, to_name: b"g", how };
    vec![
        Call::Setattr { id: f, handle: None, set },
        Call::Setattr { id: f, handle: Some(1), set },
        Call::Make { dir, name: b"d", kind: 0, mode: 0o755, rdev: 0, target: b"" },
        Call::Remove { dir, name: b"f", kind: RemoveKind::File },
        moved(RenameHow::Replace),
        moved(RenameHow::Exchange),
        Call::Link { id: f, dir, name: b"h" },
        Call::Open { id: f, how: cut, handle: 3, again: false },
        Call::OpenNamed { dir, name: b"f", id: f, how: cut, handle: 3 },
        Call::Create { dir, name: b"new", how: NEW, handle: 3 },
        Call::Create {
            dir,
            name: b"f",
            how: CreateHow { open: cut, exclusive: false, ..NEW },
            handle: 3,
        },
        Call::Tmpfile { dir, how: NEW, handle: 3 },
        Call::Setxattr { id: g, name: b"user.b", value: b"y", how: XattrSet::Any },
        Call::Removexattr { id: g, name: b"user.a" },
        Call::Write { handle: 1, how: Write::at(0) },
        Call::Write { handle: 1, how: append },
        Call::WriteBack {
            handle: 1,
            lease: 0,
            base: WriteBase::default(),
            kill_set_id: false,
            ends: true,
            extents: &[0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0],
        },
        Call::Allocate { handle: 1, what },
        Call::CopyRange { handle: 1, at: 0, to: 2, to_at: 500, len_bytes: 100 },
        Call::SetFlags { handle: 1, flags: 0x40 },
        Call::SetXflags { handle: 1, set: Xflags::default() },
        Call::Put { dir, name: b"f", mode: 0o644 },
    ]
}

/// The state that is not to change.
async fn seen(fs: &MemoryFs, ids: [FileId; 2]) -> String {
    let (cx, root) = (Context::system(), fs.info().root);
    let dir = fs.open(&cx, root, OpenHow::DIRECTORY).await.unwrap();
    let page = dir.readdir(&cx, 0, 10_000, true).await.unwrap();
    let mut seen = format!("{:?}", page.iter().map(|(name, _)| name.to_vec()).collect::<Vec<_>>());
    for id in [root, ids[0], ids[1]] {
        let attr = fs.getattr(&cx, id).await.unwrap();
        seen += &format!("{attr:?} {:?}", fs.listxattr(&cx, id).await.unwrap());
    }
    seen
}

fn open_both(hand: &mut Hand, ids: [FileId; 2]) {
    for (handle, id) in [(1, ids[0]), (2, ids[1])] {
        let open = Call::Open { id, how: OpenHow::READ_WRITE, handle, again: false };
        assert_eq!(hand.ask(0, &open, b"").errno(), 0);
    }
}

// proves: P82
#[test]
fn a_change_without_a_slot_is_refused_and_a_read_is_not() {
    let (fs, ids) = common::run(files());
    let (root, before) = (fs.info().root, common::run(seen(&fs, ids)));
    ServerEpochs::of(Arc::new(fs.clone())).run(Vec::new(), move |socket| {
        let mut hand = Hand::new(socket);
        open_both(&mut hand, ids);
        let all = changes(root, ids);
        let writing = Op::ALL.iter().filter(|op| op.writes());
        for op in writing.filter(|op| !matches!(op, Op::Lock | Op::Close | Op::Redo)) {
            assert!(all.iter().any(|call| call.op() == *op), "{op:?} is left out");
        }
        for call in &all {
            let data = if matches!(call.op(), Op::Write | Op::Put | Op::WriteBack) {
                &b"data"[..]
            } else {
                b""
            };
            assert_eq!(hand.ask(0, call, data).errno(), Errno::EPROTO.raw(), "{call:?}");
        }
        let (kind, range) = (LockKind::Exclusive, LockRange::ALL);
        let lock =
            Lock { family: LockFamily::Posix, kind, range, owner: LockOwner::own(1), pid: Pid(1) };
        for call in [
            Call::Lock { handle: 1, lock, wait: false, purpose: LockPurpose::Program },
            Call::Sync { handle: 1, data_only: false },
            Call::LookupOpen { dir: root, name: b"f", how: OpenHow::READ, handle: 4 },
            Call::Open { id: ids[0], how: OpenHow::READ_WRITE, handle: 5, again: false },
            Call::Flush { handle: 1, owner: LockOwner::own(1) },
            Call::Close { handle: 5 },
        ] {
            assert_eq!(hand.ask(0, &call, b"").errno(), 0, "{call:?}");
        }
        // A file that is opened again is not cut: the call is no change, which would have a stamp.
        let how = OpenHow::new(libc::O_TRUNC);
        let answer = hand.ask(0, &Call::Open { id: ids[0], how, handle: 6, again: true }, b"");
        assert_eq!((answer.errno(), answer.head.stamp), (0, None));
    });
    assert_eq!(common::run(seen(&fs, ids)), before);
}

/// Both parts bore the stamp of one version, and one of them was from before a write.
// proves: P82
#[test]
fn a_split_read_is_not_torn_by_a_change_without_a_range_grant() {
    let (fs, ids) = common::run(files());
    ServerEpochs::of(Arc::new(fs)).run(Vec::new(), move |socket| {
        let (mut reader, mut writer) = (Hand::new(socket), Hand::new(socket));
        open_both(&mut reader, ids);
        open_both(&mut writer, ids);
        let mut half = |at: usize| {
            let read = Call::Read { handle: 1, at: at as u64, len_bytes: HALF as u32 };
            let head = CallHead { flags: CallHead::SPLIT_READ, ..common::raw::head(Op::Read, 1) };
            reader.send(head, &read, b"");
            let answer = reader.answer();
            (answer.data, answer.head.stamp.map(|stamp| stamp.number))
        };
        let (first, first_of) = half(0);
        let write = Call::Write { handle: 1, how: Write::at(0) };
        writer.ask(0, &write, &[b'b'; 2 * HALF]);
        let (second, second_of) = half(HALF);
        assert!(first_of.is_some() && first_of == second_of, "nobody has changed it");
        assert!(first == second, "half of one, half of the other");
    });
}

/// A change waited for its grant, and changed the file that its client had opened under the same
/// number meanwhile.
// proves: P82
#[test]
fn a_change_is_made_to_the_file_that_its_range_grant_is_for() {
    let (fs, ids) = common::run(files());
    let (after, cx) = (fs.clone(), Context::system());
    let late = Fault { error: None, delay: LATE, ..held_up(Op::Getattr, 1) };
    ServerEpochs::of(Arc::new(fs)).run(vec![late], move |socket| {
        let mut hand = Hand::new(socket);
        open_both(&mut hand, ids);
        // The call learns the end of the file late, while it has its grant.
        let append = Call::Write { handle: 1, how: Write { append: true, ..Write::at(0) } };
        let head = CallHead { tag: 1, ..hand.next(0, Op::Write) };
        hand.send(head, &append, b"data");
        assert_eq!(hand.ask(0, &Call::Close { handle: 1 }, b"").errno(), 0);
        let open = Call::Open { id: ids[1], how: OpenHow::READ_WRITE, handle: 1, again: false };
        assert_eq!(hand.ask(0, &open, b"").errno(), 0);
        assert_eq!(hand.answer().head.tag, 1);
    });
    let attr = common::run(async { after.getattr(&cx, ids[1]).await.unwrap() });
    assert_eq!(attr.size, 2 * HALF as u64);
}

/// A change that was cut short had the grant of one file, and was made to another. That other file
/// had the same number when the client repeated the change.
// proves: P82
#[test]
fn a_change_that_comes_again_for_another_file_is_a_new_one() {
    let (fs, ids) = common::run(files());
    let (after, cx) = (fs.clone(), Context::system());
    let mut epochs = ServerEpochs::of(Arc::new(fs));
    let journal = epochs.journal.clone();
    let append = || Call::Write { handle: 1, how: Write { append: true, ..Write::at(0) } };
    let session = epochs.run(vec![held_up(Op::Write, 1)], move |socket| {
        let mut hand = Hand::new(socket);
        open_both(&mut hand, ids);
        let head = hand.next(0, Op::Write);
        hand.send(head, &append(), b"data");
        wait_noted(&journal, Op::Write);
        hand.session
    });
    common::run(async {
        let open = async |id| after.open(&cx, id, OpenHow::READ_WRITE).await.unwrap();
        let begun = Buf::from(&b"da"[..]);
        open(ids[0]).await.write(&cx, Write::at(2 * HALF as u64), begun).await.unwrap();
        let cut = SetAttr { size: Some(3), ..SetAttr::default() };
        open(ids[1]).await.setattr(&cx, cut).await.unwrap();
    });
    epochs.run(Vec::new(), move |socket| {
        let mut hand = Hand::back(socket, session);
        open_both(&mut hand, [ids[1], ids[0]]);
        assert_eq!(hand.change(0, &append(), b"data").errno(), 0);
    });
    let attr = common::run(async { after.getattr(&cx, ids[1]).await.unwrap() });
    assert_eq!(attr.size, 7);
}

/// One client got success from the server that had made the file for it. The other got success from
/// the next server, which found the file under the name.
// proves: P82
#[test]
fn one_of_two_exclusive_creates_wins_over_a_server_restart() {
    let fs = memory();
    let root = fs.info().root;
    let create = move |handle| Call::Create { dir: root, name: b"lock", how: NEW, handle };
    let mut epochs = ServerEpochs::of(Arc::new(fs));
    let journal = epochs.journal.clone();
    let (session, other) = epochs.run(vec![held_up(Op::Create, 1)], move |socket| {
        let (mut hand, mut other) = (Hand::new(socket), Hand::new(socket));
        let head = hand.next(0, Op::Create);
        hand.send(head, &create(1), b"");
        wait_noted(&journal, Op::Create);
        (hand.session, other.ask(0, &create(1), b"").errno())
    });
    let again = epochs.run(Vec::new(), move |socket| {
        Hand::back(socket, session).change(0, &create(1), b"").errno()
    });
    assert_eq!([again, other].iter().filter(|errno| **errno == 0).count(), 1);
}
