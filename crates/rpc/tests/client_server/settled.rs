//! How the next server epoch settles changes of names that were begun and not answered. The caller
//! gets the file that it made, and no file of another user.

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::sync::Arc;
use std::time::Duration;

use crate::common;
use crate::common::memory;
use crate::common::server_epochs::{
    ANN, Answer, BOB, Hand, ROOT, ServerEpochs, held_up, identity_of_user, wait_noted,
};
use dray_backends::memory::MemoryFs;
use dray_backends::posix::{PosixFs, PosixOptions, Squash};
use dray_core::{
    Buf, BufMut, Context, CreateHow, Errno, FileId, FileSystem, FsUuid, Make, Name, Op, OpenHow,
    RemoveKind, RenameHow, Write,
};
use dray_layers::faults::Fault;
use dray_rpc::server::StateLoss;
use dray_rpc::wire::{Call, CallHead};

/// The name that everybody uses.
const NAME: &[u8] = b"n";
/// After this time whatever is made has another time of birth.
const LATER: Duration = Duration::from_millis(250);

fn name(text: &[u8]) -> &Name {
    Name::new(text).unwrap()
}

fn of(user: u32) -> Context {
    let who = Arc::new(identity_of_user(user));
    Context { who, internal: false, ..Context::system() }
}

fn create(dir: FileId, mode: u32, exclusive: bool) -> Call<'static> {
    let how = CreateHow { open: OpenHow::READ_WRITE, mode, exclusive };
    Call::Create { dir, name: NAME, how, handle: 9 }
}

fn make(dir: FileId, kind: u8) -> Call<'static> {
    let (mode, target): (u32, &[u8]) = match kind {
        1 => (libc::S_IFIFO | 0o666, b""),
        _ => (0o777, b"target"),
    };
    Call::Make {
        dir,
        name: NAME,
        kind,
        mode,
        rdev: 0,
        target: if kind == 2 { target } else { b"" },
    }
}

/// A file system with a directory for everybody, and one that is root's.
async fn site() -> (MemoryFs, FileId, FileId) {
    let (fs, cx) = (memory(), of(ROOT));
    let root = fs.info().root;
    let mut made = Vec::new();
    for (dir, mode) in [(&b"common"[..], 0o777), (b"closed", 0o755)] {
        made.push(fs.make(&cx, root, name(dir), Make::Directory { mode }).await.unwrap().id);
    }
    (fs, made[0], made[1])
}

/// A file of `user`'s, with `secret` in it.
async fn secret(fs: &MemoryFs, user: u32, dir: FileId, mode: u32) {
    let how = CreateHow { open: OpenHow::READ_WRITE, mode, exclusive: true };
    let cx = of(user);
    let (_, file) = fs.create(&cx, dir, name(NAME), how).await.unwrap();
    file.write(&cx, Write::at(0), Buf::from(&b"secret"[..])).await.unwrap();
}

async fn content(fs: &MemoryFs, dir: FileId) -> Vec<u8> {
    let cx = of(ROOT);
    let id = fs.lookup(&cx, dir, name(NAME)).await.unwrap().id;
    let file = fs.open(&cx, id, OpenHow::READ).await.unwrap();
    file.read(&cx, 0, BufMut::heap(99)).await.unwrap().filled().to_vec()
}

/// The answer to `user` for repeating a change that was cut short in the epoch before, while
/// `others` did something. With the client, to continue.
fn asked_again(
    fs: Arc<dyn FileSystem>,
    fault: Option<Fault>,
    (user, call, data): (u32, Call<'static>, &'static [u8]),
    others: impl FnOnce(),
    after: impl FnOnce(&mut Hand, Answer) + Send + 'static,
) {
    let mut epochs = ServerEpochs::of(fs);
    let journal = epochs.journal.clone();
    let fault = fault.unwrap_or(held_up(first_op(&call), 1));
    let op = call.op();
    let begun = call.clone();
    let session = epochs.run(vec![fault], move |socket| {
        let mut hand = Hand::new(socket);
        let head = hand.next(user, op);
        hand.send(head, &begun, data);
        wait_noted(&journal, op);
        hand.session
    });
    others();
    epochs.run(Vec::new(), move |socket| {
        let mut hand = Hand::back(socket, session);
        let answer = hand.change(user, &call, data);
        after(&mut hand, answer);
    });
}

/// The first operation below of a call.
fn first_op(call: &Call<'_>) -> Op {
    match call.op() {
        Op::Put => Op::Create,
        op => op,
    }
}

fn read(hand: &mut Hand, user: u32) -> Answer {
    hand.ask(user, &Call::Read { handle: 9, at: 0, len_bytes: 99 }, b"")
}

fn has_nothing_open(hand: &mut Hand) {
    let answer = read(hand, ANN);
    assert!(answer.head.unknown_handle);
    assert_eq!(answer.data, b"");
}

/// The file that somebody made meanwhile was taken for what the call had made, and was open for
/// reading and writing.
// proves: P81
#[test]
fn a_create_that_was_never_made_opens_only_what_its_caller_may_open() {
    let (exists, denied) = (Errno::EEXIST.raw(), Errno::EACCES.raw());
    for (mode, exclusive, errno) in
        [(0o600, true, exists), (0o600, false, denied), (0o666, true, exists), (0o666, false, 0)]
    {
        let (fs, dir, _) = common::run(site());
        let beside = fs.clone();
        let others = || common::run(secret(&beside, BOB, dir, mode));
        let call = (ANN, create(dir, 0o644, exclusive), &b""[..]);
        asked_again(Arc::new(fs), None, call, others, move |hand, answer| {
            assert_eq!(answer.errno(), errno, "{mode:o} {exclusive}");
            match errno {
                // The outcome is the same as if the call had come now.
                0 => assert_eq!(read(hand, ANN).data, b"secret"),
                _ => has_nothing_open(hand),
            }
        });
    }
}

/// The same of one that the file system had refused, just before the server died.
// proves: P81
#[test]
fn a_create_that_was_refused_opens_no_file_of_another_user() {
    for exclusive in [true, false] {
        let (fs, _, closed) = common::run(site());
        let beside = fs.clone();
        let others = || common::run(secret(&beside, ROOT, closed, 0o600));
        let refused = Fault { error: Some(Errno::EACCES), ..held_up(Op::Create, 1) };
        let call = (ANN, create(closed, 0o644, exclusive), &b""[..]);
        asked_again(Arc::new(fs), Some(refused), call, others, move |hand, answer| {
            let errno = if exclusive { Errno::EEXIST } else { Errno::EACCES };
            assert_eq!(answer.errno(), errno.raw());
            has_nothing_open(hand);
        });
    }
}

/// The answer to another user of the same host is no answer to the first.
// proves: P81
#[test]
fn a_created_file_is_for_its_user_and_no_other_user_of_the_host() {
    for (again, exclusive, errno) in
        [(ANN, true, 0), (BOB, true, Errno::EEXIST.raw()), (BOB, false, Errno::EACCES.raw())]
    {
        let (fs, dir, _) = common::run(site());
        let mut epochs = ServerEpochs::of(Arc::new(fs.clone()));
        let (journal, call) = (epochs.journal.clone(), create(dir, 0o600, exclusive));
        let session = epochs.run(vec![held_up(call.op(), 1)], move |socket| {
            let mut hand = Hand::new(socket);
            let head = hand.next(ANN, call.op());
            hand.send(head, &call, b"");
            wait_noted(&journal, call.op());
            hand.session
        });
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
        common::run(async { fs.create(&of(ANN), dir, name(NAME), how).await.map(drop) }).unwrap();
        epochs.run(Vec::new(), move |socket| {
            let answer =
                Hand::back(socket, session).change(again, &create(dir, 0o600, exclusive), b"");
            assert_eq!(answer.errno(), errno, "{again} {exclusive}");
        });
    }
}

/// Made before the death, and what it was made for can be done, whatever its mode.
// proves: P81
#[test]
fn what_was_made_before_a_death_is_its_callers() {
    for exclusive in [true, false] {
        let (fs, dir, _) = common::run(site());
        let beside = fs.clone();
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o400, exclusive: true };
        let others = || {
            common::run(async { beside.create(&of(ANN), dir, name(NAME), how).await.map(drop) })
                .unwrap();
        };
        let call = (ANN, create(dir, 0o400, exclusive), &b""[..]);
        asked_again(Arc::new(fs.clone()), None, call, others, |hand, answer| {
            assert_eq!(answer.entry().attr.mode & 0o777, 0o400);
            let write = Call::Write { handle: 9, how: Write::at(0) };
            assert_eq!(hand.change(ANN, &write, b"own").errno(), 0);
        });
        assert_eq!(common::run(content(&fs, dir)), b"own");
    }
}

/// The server epoch that found the file notes its id for the next one. Without the note, the next
/// one would take the file with the name by then, or make another.
// proves: P81
#[test]
fn what_was_found_after_one_death_is_what_is_answered_after_the_next() {
    let (fs, dir, _) = common::run(site());
    let mut epochs = ServerEpochs::of(Arc::new(fs.clone()));
    let journal = epochs.journal.clone();
    let session = epochs.run(vec![held_up(Op::Create, 1)], move |socket| {
        let mut hand = Hand::new(socket);
        let head = hand.next(ANN, Op::Create);
        hand.send(head, &create(dir, 0o400, true), b"");
        wait_noted(&journal, Op::Create);
        hand.session
    });
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o400, exclusive: true };
    let made = common::run(async { fs.create(&of(ANN), dir, name(NAME), how).await.unwrap().0.id });
    epochs.run(Vec::new(), |_| ());
    common::run(async {
        let to = (dir, name(b"moved"));
        fs.rename(&of(ANN), (dir, name(NAME)), to, RenameHow::NoReplace).await.unwrap();
        secret(&fs, ANN, dir, 0o666).await;
    });
    epochs.run(Vec::new(), move |socket| {
        let mut hand = Hand::back(socket, session);
        let answer = hand.change(ANN, &create(dir, 0o400, true), b"");
        assert_eq!(answer.entry().id, made);
        let write = Call::Write { handle: 9, how: Write::at(0) };
        assert_eq!(hand.change(ANN, &write, b"own").errno(), 0);
    });
    assert_eq!(common::run(content(&fs, dir)), b"secret");
}

/// After a loss of power an answer is no proof: what was made may be gone, and the name somebody
/// else's.
// proves: P81
#[test]
fn what_was_answered_before_a_loss_of_power_is_found_by_what_the_answer_says() {
    for (replaced, exclusive, errno) in [
        (false, true, 0),
        (false, false, 0),
        (true, true, Errno::EEXIST.raw()),
        (true, false, Errno::EACCES.raw()),
    ] {
        let (fs, dir, _) = common::run(site());
        let mut epochs = ServerEpochs::of(Arc::new(fs.clone()));
        let call = move || create(dir, 0o644, exclusive);
        let session = epochs.run(Vec::new(), move |socket| {
            let mut hand = Hand::new(socket);
            let head = CallHead { slot: 1, ..hand.next(ANN, Op::Create) };
            hand.send(head, &call(), b"");
            assert_eq!(hand.answer().errno(), 0);
            let write = Call::Write { handle: 9, how: Write::at(0) };
            assert_eq!(hand.change(ANN, &write, b"own").errno(), 0);
            hand.session
        });
        if replaced {
            common::run(async {
                let (cx, kind) = (of(ANN), RemoveKind::File);
                fs.remove(&cx, dir, name(NAME), kind).await.unwrap();
                secret(&fs, BOB, dir, 0o600).await;
            });
        }
        epochs.run_after(StateLoss::Unsynced, Vec::new(), move |socket| {
            let mut hand = Hand::back(socket, session);
            let again = CallHead { slot: 1, ..hand.next(ANN, Op::Create) };
            hand.send(CallHead { flags: CallHead::RECOVERY, ..again }, &call(), b"");
            assert_eq!(hand.answer().errno(), errno, "{replaced} {exclusive}");
        });
    }
}

/// A file of one's own is not what one has made if it was there before, under another name.
// proves: P81
#[test]
fn an_older_file_of_the_caller_does_not_count_as_created() {
    for exclusive in [true, false] {
        let (fs, dir, _) = common::run(site());
        let beside = fs.clone();
        common::run(secret(&beside, ANN, dir, 0o600));
        let (old, cx) = (name(b"old"), of(ANN));
        let moves =
            async |from, to| beside.rename(&cx, (dir, from), (dir, to), RenameHow::NoReplace).await;
        common::run(async { moves(name(NAME), old).await }).unwrap();
        std::thread::sleep(LATER);
        let others = || common::run(async { moves(old, name(NAME)).await }).unwrap();
        let call = (ANN, create(dir, 0o600, exclusive), &b""[..]);
        asked_again(
            Arc::new(fs.clone()),
            None,
            call,
            others,
            move |hand, answer| match exclusive {
                true => assert_eq!(answer.errno(), Errno::EEXIST.raw()),
                false => assert_eq!(read(hand, ANN).data, b"secret"),
            },
        );
    }
}

/// The maker of a directory gets success, and trusts the directory that it made.
// proves: P81
#[test]
fn a_name_that_another_user_made_first_answers_eexist() {
    for kind in 0..3 {
        for (maker, errno) in [(BOB, Errno::EEXIST.raw()), (ANN, 0)] {
            let (fs, dir, _) = common::run(site());
            let beside = fs.clone();
            let others = || {
                let what = match kind {
                    0 => Make::Directory { mode: 0o700 },
                    1 => Make::Node { mode: libc::S_IFIFO | 0o600, rdev: 0 },
                    _ => Make::Symlink { target: b"elsewhere" },
                };
                common::run(async { beside.make(&of(maker), dir, name(NAME), what).await })
                    .unwrap();
            };
            let call = (ANN, make(dir, kind), &b""[..]);
            asked_again(Arc::new(fs), None, call, others, move |_, answer| {
                assert_eq!(answer.errno(), errno, "{kind} of {maker}'s");
            });
        }
        // The file is one's own, but not the file that was asked for.
        let (fs, dir, _) = common::run(site());
        let beside = fs.clone();
        let others = || common::run(secret(&beside, ANN, dir, 0o644));
        asked_again(Arc::new(fs), None, (ANN, make(dir, kind), b""), others, |_, answer| {
            assert_eq!(answer.errno(), Errno::EEXIST.raw());
        });
    }
}

// proves: P81
#[test]
fn a_link_is_made_if_it_is_one_of_the_file_that_was_asked_for() {
    for same in [true, false] {
        let (fs, dir, closed) = common::run(site());
        common::run(secret(&fs, ANN, closed_to_nobody(&fs, closed), 0o644));
        let linked =
            common::run(async { fs.lookup(&of(ROOT), closed, name(NAME)).await }).unwrap().id;
        let beside = fs.clone();
        let others = || match same {
            true => {
                let linked = async { beside.link(&of(ANN), linked, dir, name(NAME)).await };
                _ = common::run(linked).unwrap();
            }
            false => common::run(secret(&beside, ANN, dir, 0o644)),
        };
        let call = (ANN, Call::Link { id: linked, dir, name: NAME }, &b""[..]);
        asked_again(Arc::new(fs), None, call, others, move |_, answer| match same {
            true => assert_eq!(answer.entry().id, linked),
            false => assert_eq!(answer.errno(), Errno::EEXIST.raw()),
        });
    }
}

/// Has everybody make files there.
fn closed_to_nobody(fs: &MemoryFs, dir: FileId) -> FileId {
    let set = dray_core::SetAttr { mode: Some(0o777), ..Default::default() };
    common::run(async { fs.setattr(&of(ROOT), dir, set).await }).unwrap();
    dir
}

/// A repeated put overwrote the file of another user that had the name by then.
// proves: P81
#[test]
fn a_repeated_put_needs_the_right_to_write_the_file() {
    for (maker, mode, errno, then) in [
        (BOB, 0o600, Errno::EACCES.raw(), &b"secret"[..]),
        (BOB, 0o666, 0, b"put"),
        (ANN, 0o600, 0, b"put"),
    ] {
        let (fs, dir, _) = common::run(site());
        let beside = fs.clone();
        let others = || common::run(secret(&beside, maker, dir, mode));
        let call = (ANN, Call::Put { dir, name: NAME, mode: 0o644 }, &b"put"[..]);
        asked_again(Arc::new(fs.clone()), None, call, others, move |_, answer| {
            assert_eq!(answer.errno(), errno);
        });
        assert_eq!(common::run(content(&fs, dir)), then, "{maker} {mode:o}");
    }
}

/// The caller is the user that the export takes it for: root is nobody here.
// proves: P81
#[test]
fn under_squash_a_file_of_the_squashed_user_is_the_callers() {
    const NOBODY: u32 = 65_534;
    // SAFETY: geteuid cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: not root");
        return;
    }
    let nobodys = Squash::NOBODY.0.0;
    assert_eq!(nobodys, NOBODY);
    for (owner, exclusive, errno) in [
        (NOBODY, true, 0),
        (NOBODY, false, 0),
        (0, true, Errno::EEXIST.raw()),
        (0, false, Errno::EACCES.raw()),
    ] {
        let export = tempfile::tempdir().unwrap();
        std::fs::set_permissions(export.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let fs = PosixFs::open(export.path(), FsUuid(1), PosixOptions::default()).unwrap();
        let (root, file) = (fs.info().root, export.path().join("n"));
        let others = || {
            std::fs::write(&file, "").unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(0o400)).unwrap();
            chown(&file, Some(owner), Some(owner)).unwrap();
        };
        asked_again(
            fs,
            None,
            (ROOT, create(root, 0o400, exclusive), b""),
            others,
            move |hand, answer| {
                assert_eq!(answer.errno(), errno, "{owner} {exclusive}");
                let write = Call::Write { handle: 9, how: Write::at(0) };
                assert_eq!(hand.change(ROOT, &write, b"own").errno() == 0, errno == 0);
            },
        );
        let written = if errno == 0 { 3 } else { 0 };
        assert_eq!(std::fs::metadata(&file).unwrap().size(), written);
    }
}
