//! Statements of a client to a server that has forgotten it. The server believes those that an
//! earlier server epoch sealed, and no others.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common;
use crate::common::raw::{
    NO_PROOF, ask, ask_whole, frame, handshake_as, head, hello, identity_of, message, read_frame,
};
use crate::common::{client_options, memory, run, serve_simulated, serve_sockets, simulate};
use dray_backends::memory::MemoryFs;
use dray_core::{
    Admit, Attr, Buf, BufMut, Context, CreateHow, Entry, Errno, FileId, FileSystem, Gid, Identity,
    Name, ObservedCall, Op, OpenHow, RequestId, SessionControl, SetAttr, Uid, Write,
};
use dray_fabric::Address;
use dray_fabric::sim::Network;
use dray_layers::{Observed, Observer, Outcome};
use dray_rpc::client::{ClientSession, RemoteFs, SessionMemory};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rpc::wire::{
    Call, CallHead, Change, FEATURES, FileDurableStamp, Hello, Input, Proof, ReplyHead, Ticket,
    Welcome, Wire, put_durable_stamp,
};
use dray_rt::{Scope, sleep};
use std::io::Write as _;
use std::time::Duration;

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

fn user() -> Context {
    let mut cx = Context::system();
    cx.who = Arc::new(Identity { uid: Uid(1000), gid: Gid(1000), ..Identity::default() });
    cx
}

/// Root's `secret` (0600), root's `public` (0644), and `tmp` for everybody.
async fn files() -> (MemoryFs, [FileId; 3]) {
    let (fs, cx) = (memory(), Context::system());
    let root = fs.info().root;
    let mut ids = Vec::new();
    for (called, mode) in [("secret", 0o600), ("public", 0o644)] {
        let (entry, file) =
            fs.create(&cx, root, name(called), CreateHow { mode, ..NEW }).await.unwrap();
        file.write(&cx, Write::at(0), Buf::from(called.as_bytes())).await.unwrap();
        file.close(&cx).await.unwrap();
        ids.push(entry.id);
    }
    let made = dray_core::Make::Directory { mode: 0o777 };
    let tmp = fs.make(&cx, root, name("tmp"), made).await.unwrap();
    let all = SetAttr { mode: Some(0o777), ..SetAttr::default() };
    fs.setattr(&cx, tmp.id, all).await.unwrap();
    (fs, [ids[0], ids[1], tmp.id])
}

/// Root is nobody here unless the server itself asks, as with `squash`.
struct Squash;

impl Observer for Squash {
    fn admits(&self) -> bool {
        true
    }

    fn admit<'a>(&'a self, cx: &'a Context, call: &'a ObservedCall<'a>) -> Admit<'a> {
        match call.op == Op::Open && cx.who.uid == Uid(0) && !cx.internal {
            true => Admit::Refuse(dray_core::Error::new(Errno::EACCES)),
            false => Admit::Now,
        }
    }

    fn done(&self, _: &Context, _: &ObservedCall<'_>, _: Outcome<'_>, _: Duration) {}
}

fn server_of(fs: &MemoryFs, journal: &MemoryJournal, options: ServerOptions) -> Server {
    let fs = Observed::new(Arc::new(fs.clone()), Arc::new(Squash));
    let export = Export::new("data", Arc::new(fs), Vec::new());
    Server::new(options, vec![export], Arc::new(journal.clone()))
}

/// Runs `test`, a client by hand, against one epoch of a server of [`files`] after the other, each
/// begun after such a loss. The result of each run is handed to the next.
fn by_hand<T: Send + 'static>(
    losses: &[StateLoss],
    test: impl FnMut(&Path, [FileId; 3], Option<T>) -> T + Send + Clone + 'static,
) {
    let dir = tempfile::tempdir().unwrap();
    let journal = MemoryJournal::default();
    let (mut handed_on, mut kept) = (None, None);
    for (epoch, loss) in losses.iter().enumerate() {
        let socket = dir.path().join(epoch.to_string());
        run(async {
            let (fs, ids) = match kept.take() {
                Some(kept) => kept,
                None => files().await,
            };
            let options = ServerOptions { boot: epoch as u128 + 1, ..ServerOptions::default() };
            let server = server_of(&fs, &journal, options);
            server.restore(*loss).await;
            serve_sockets(&Address::Unix(socket.clone()), server).await;
            let (mut test, before) = (test.clone(), handed_on.take());
            let thread = std::thread::spawn(move || test(&socket, ids, before));
            while !thread.is_finished() {
                sleep(Duration::from_millis(5)).await;
            }
            handed_on = Some(thread.join().unwrap());
            kept = Some((fs, ids));
        });
    }
}

/// A connection whose identity 1 is a user.
fn client(socket: &Path, proof: &Proof) -> (UnixStream, Welcome) {
    let hello = Hello { features: FEATURES, ..hello("data") };
    let (mut stream, welcome) = handshake_as(socket, &hello, proof).unwrap();
    stream.write_all(&frame(&identity_of(1, &user().who), b"")).unwrap();
    (stream, welcome)
}

/// In the name of the user.
fn users(op: Op, slot: Option<u32>) -> CallHead {
    let mut head = CallHead { identity: 1, ..head(op, 7) };
    if let Some(sequence) = slot {
        (head.slot, head.sequence) = (0, sequence);
    }
    head
}

fn errno_of(stream: &mut UnixStream, head: &CallHead, call: &Call<'_>) -> i32 {
    i32::from(ask(stream, head, call).unwrap().errno)
}

/// The ticket in the answer to a call that goes well.
fn ticket_of(stream: &mut UnixStream, head: &CallHead, call: &Call<'_>) -> Ticket {
    let reply = ask_whole(stream, head, call).unwrap();
    let (head, _) = ReplyHead::split(&reply).unwrap();
    assert_eq!(head.errno, 0);
    head.ticket.expect("a ticket")
}

fn write_to(stream: &mut UnixStream, handle: u64) -> i32 {
    static CHANGES: AtomicU32 = AtomicU32::new(1);
    let sequence = CHANGES.fetch_add(1, Ordering::Relaxed);
    let head = CallHead { slot: 1, sequence, ..users(Op::Write, None) };
    let call = Call::Write { handle, how: Write::at(0) };
    stream.write_all(&frame(&message(&head, &call), b"forged")).unwrap();
    let (reply, _) = read_frame(stream).unwrap();
    i32::from(ReplyHead::get_message(&mut Input(&reply)).unwrap().errno)
}

// proves: P123
#[test]
fn a_hostile_client_opens_nothing_again_that_it_had_not_open() {
    by_hand(&[StateLoss::Nothing], |socket, [secret, public, _], _: Option<()>| {
        let (mut stream, _) = client(socket, &NO_PROOF);
        let (read, both) = (OpenHow::READ, OpenHow::READ_WRITE);
        let denied = Errno::EACCES.raw();
        for how in [read, both, OpenHow::new(libc::O_WRONLY | libc::O_TRUNC)] {
            let again = Call::Open { id: secret, how, handle: 5, again: true };
            assert_eq!(errno_of(&mut stream, &users(Op::Open, None), &again), denied);
            let none = Ticket([Ticket::READ | Ticket::WRITE; 16]);
            let call = Call::Reopen { id: secret, how, handle: 5, ticket: none };
            assert_eq!(errno_of(&mut stream, &users(Op::Reopen, None), &call), denied);
        }
        // A file that may be read is not to be written, nor is its ticket good for another file.
        let open = Call::Open { id: public, how: read, handle: 6, again: false };
        let ticket = ticket_of(&mut stream, &users(Op::Open, None), &open);
        for (id, how) in [(public, both), (secret, read)] {
            let call = Call::Reopen { id, how, handle: 7, ticket };
            assert_eq!(errno_of(&mut stream, &users(Op::Reopen, None), &call), denied);
            // Nor does the number of an open file make it one for writing.
            let call = Call::Open { id, how, handle: 6, again: true };
            let again = ticket_of(&mut stream, &users(Op::Open, None), &call);
            assert_eq!(again, ticket);
        }
        let call = Call::Reopen { id: public, how: read, handle: 8, ticket };
        assert_eq!(errno_of(&mut stream, &users(Op::Reopen, None), &call), 0);
        assert_eq!(write_to(&mut stream, 8), Errno::EBADF.raw());
        let (mut other, _) = {
            let hello = Hello { features: FEATURES, node: dray_core::NodeId(100), ..hello("data") };
            handshake_as(socket, &hello, &NO_PROOF).unwrap()
        };
        other.write_all(&frame(&identity_of(1, &user().who), b"")).unwrap();
        assert_eq!(errno_of(&mut other, &users(Op::Reopen, None), &call), denied);
    });
}

/// The grant and the stamp were those of the named file, and another file was changed, possibly
/// beside another change of it.
#[test]
fn a_call_that_names_two_files_changes_neither() {
    by_hand(&[StateLoss::Nothing], |socket, [_, public, tmp], _: Option<()>| {
        let (mut stream, _) = client(socket, &NO_PROOF);
        let open = Call::Open { id: public, how: OpenHow::READ, handle: 6, again: false };
        assert_eq!(errno_of(&mut stream, &users(Op::Open, Some(1)), &open), 0);
        let root = CallHead { identity: 0, ..users(Op::Setattr, Some(2)) };
        let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        let two = Call::Setattr { id: tmp, handle: Some(6), set };
        assert_eq!(errno_of(&mut stream, &root, &two), Errno::EPROTO.raw());
        let getattr = Call::Getattr { id: public, handle: None };
        let reply = ask_whole(&mut stream, &users(Op::Getattr, None), &getattr).unwrap();
        let (_, results) = ReplyHead::split(&reply).unwrap();
        let attr = Input(results).get::<Attr>().unwrap();
        assert_eq!(attr.mode & 0o777, 0o644);
        let one = Call::Setattr { id: public, handle: Some(6), set };
        assert_eq!(errno_of(&mut stream, &root, &one), 0);
    });
}

/// A client that did not get the answer to an open gets it once more. A server that has forgotten
/// the open opens the file for that. The file must be that of the first answer.
// proves: P123
#[test]
fn an_answer_given_once_more_opens_what_was_answered_only() {
    let create = |dir, handle| Call::Create {
        dir,
        name: b"mine",
        how: CreateHow { mode: 0, ..NEW },
        handle,
    };
    by_hand(&[StateLoss::Nothing, StateLoss::Nothing], move |socket, [secret, _, tmp], before| {
        let again = users(Op::Create, Some(1));
        let Some(before) = before else {
            let (mut stream, welcome) = client(socket, &NO_PROOF);
            assert_eq!(errno_of(&mut stream, &again, &create(tmp, 1)), 0);
            return (welcome.session, welcome.secret);
        };
        let (mut stream, welcome) = resume(socket, before);
        for (how, again) in [(OpenHow::READ_WRITE, false), (OpenHow::READ, true)] {
            let call = Call::Open { id: secret, how, handle: 2, again };
            let _ = errno_of(&mut stream, &users(Op::Open, Some(1)), &call);
            let read = Call::Read { handle: 2, at: 0, len_bytes: 10 };
            let reply = ask(&mut stream, &users(Op::Read, None), &read).unwrap();
            assert!(reply.unknown_handle);
        }
        // The caller gets the file again that it created, though the file's mode allows nothing.
        assert_eq!(errno_of(&mut stream, &again, &create(tmp, 3)), 0);
        assert_eq!(write_to(&mut stream, 3), 0);
        (welcome.session, welcome.secret)
    });
}

/// A client that could suppress another one's changes could make its own prevail.
// proves: P124
#[test]
fn what_is_on_media_is_believed_with_the_servers_seal_only() {
    by_hand(&[StateLoss::Nothing, StateLoss::Unsynced], |socket, [_, _, tmp], before| {
        let shared = CreateHow { mode: 0o666, ..NEW };
        let Some((hostile, honest, id, stamp, ticket, sealed)) = before else {
            let (mut stream, hostile) = client(socket, &NO_PROOF);
            let create = Call::Create { dir: tmp, name: b"shared", how: shared, handle: 1 };
            let reply = ask_whole(&mut stream, &users(Op::Create, Some(1)), &create).unwrap();
            let (head, results) = ReplyHead::split(&reply).unwrap();
            let id = Input(results).get::<Entry>().unwrap().id;
            let ticket = head.ticket.unwrap();
            let sync = Call::Sync { handle: 1, data_only: true };
            let reply = ask_whole(&mut stream, &users(Op::Sync, None), &sync).unwrap();
            let sealed = ReplyHead::split(&reply).unwrap().0.ticket.unwrap();
            let synced = stamp_of(&reply);
            let (_, honest) = client(socket, &NO_PROOF);
            let of = |welcome: Welcome| (welcome.session, welcome.secret);
            return (of(hostile), of(honest), id, synced, ticket, sealed);
        };
        let (mut bad, welcome) = resume(socket, hostile);
        let (mut good, _) = resume(socket, honest);
        let instance = welcome.instance;
        let mut durable_stamps = Vec::new();
        let forged = Ticket(std::array::from_fn(|index| if index == 0 { 0x80 } else { 7 }));
        for (stamp, ticket) in [(u64::MAX, forged), (stamp + 5, sealed), (stamp, sealed)] {
            put_durable_stamp(&FileDurableStamp { file: id, stamp, ticket }, &mut durable_stamps);
        }
        let mut plain = Vec::new();
        (id, u64::MAX).put(&mut plain);
        let recovery = |op| CallHead { flags: CallHead::RECOVERY, ..users(op, None) };
        let max = u64::MAX;
        let recover = Call::Recover {
            instance,
            newest: max,
            durable_stamp: max,
            durable_stamps: &plain,
            step: 0,
        };
        assert_eq!(errno_of(&mut bad, &recovery(Op::Recover), &recover), 0);
        let declare = |durable_stamps, last| Call::Declare {
            instance,
            durable_stamp: u64::MAX,
            ticket: forged,
            durable_stamps,
            last,
        };
        assert_eq!(errno_of(&mut bad, &recovery(Op::Declare), &declare(&durable_stamps, false)), 0);
        // The last of both is answered when both have come.
        for stream in [&mut bad, &mut good] {
            let last = message(&recovery(Op::Declare), &declare(&[], true));
            stream.write_all(&frame(&last, b"")).unwrap();
        }
        for stream in [&mut bad, &mut good] {
            read_frame(stream).unwrap();
        }
        let how = OpenHow::READ_WRITE;
        let open = Call::Reopen { id, how, handle: 4, ticket };
        assert_eq!(errno_of(&mut good, &recovery(Op::Reopen), &open), 0);
        let redo = |stream: &mut UnixStream, stamp, data: &[u8]| {
            let call = Call::Redo { handle: 4, stamp, change: Change::Write { at: 0 } };
            stream.write_all(&frame(&message(&recovery(Op::Redo), &call), data)).unwrap();
            let (reply, _) = read_frame(stream).unwrap();
            i32::from(ReplyHead::get_message(&mut Input(&reply)).unwrap().errno)
        };
        assert_eq!(redo(&mut good, u64::MAX - 1, b"never"), Errno::EINVAL.raw());
        assert_eq!(redo(&mut good, stamp, b"on media"), 0, "skipped, for it was sealed");
        assert_eq!(redo(&mut good, stamp + 1, b"kept"), 0);
        let done =
            Call::Recover { instance, newest: 0, durable_stamp: 0, durable_stamps: &[], step: 2 };
        for stream in [&mut bad, &mut good] {
            assert_eq!(errno_of(stream, &recovery(Op::Recover), &done), 0);
        }
        let read = Call::Read { handle: 4, at: 0, len_bytes: 20 };
        let asked = message(&users(Op::Read, None), &read);
        good.write_all(&frame(&asked, b"")).unwrap();
        assert_eq!(read_frame(&mut good).unwrap().1, b"kept");
        (hostile, honest, id, stamp, ticket, sealed)
    });
}

fn stamp_of(reply: &[u8]) -> u64 {
    ReplyHead::split(reply).unwrap().0.stamp.expect("a stamp").number
}

/// The file is open with a mode that allows it no longer, by a user whom nobody takes for root. It
/// stays open over restarts of the server, and of the client's process too.
// proves: P123
#[test]
fn what_was_open_is_open_again_whatever_its_mode() {
    for successor in [false, true] {
        simulate(3, async {
            let network = Network::new();
            let ((fs, [_, _, tmp]), journal) = (files().await, MemoryJournal::default());
            let mut server_process = Scope::new();
            let server = server_of(&fs, &journal, ServerOptions::default());
            serve_simulated(&network, "s", &server, &server_process);
            let memory = SessionMemory::create_memfd().unwrap();
            let heir = memory.fd().unwrap().try_clone_to_owned().unwrap();
            let session = ClientSession::connect(network.connector("s"), client_options(), memory);
            let client = RemoteFs::new(session.await.unwrap());
            let mut cx = user();
            (cx.origin.node, cx.origin.request) =
                (client.session().node(), dray_core::RequestId(77));
            let how = CreateHow { mode: 0o400, ..NEW };
            let (entry, mut file) = client.create(&cx, tmp, name("locked"), how).await.unwrap();
            server_process.kill();
            network.break_all("s");
            let mut now = client.clone();
            if successor {
                std::mem::forget(client); // a process that dies says nothing
                let memory = SessionMemory::from_fd(heir).unwrap();
                let session =
                    ClientSession::connect(network.connector("s"), client_options(), memory);
                let heir = dray_rt::spawn_join(session);
                server_process = Scope::new();
                let server = server_of(&fs, &journal, ServerOptions::default());
                server.restore(StateLoss::Nothing).await;
                serve_simulated(&network, "s", &server, &server_process);
                now = RemoteFs::new(heir.await.unwrap().unwrap());
                std::mem::forget(std::mem::replace(
                    &mut file,
                    now.attach(entry.id, OpenHow::READ_WRITE, RequestId(77)).unwrap(),
                ));
                now.attached();
            } else {
                server_process = Scope::new();
                let server = server_of(&fs, &journal, ServerOptions::default());
                server.restore(StateLoss::Nothing).await;
                serve_simulated(&network, "s", &server, &server_process);
            }
            (cx.origin.node, cx.origin.request) = (now.session().node(), dray_core::RequestId(78));
            file.write(&cx, Write::at(0), Buf::from(&b"goes on"[..])).await.unwrap();
            let read = file.read(&cx, 0, BufMut::heap(10)).await.unwrap();
            assert_eq!(read.filled(), b"goes on");
            assert_eq!(
                now.open(&cx, entry.id, OpenHow::READ_WRITE).await.err().unwrap().errno(),
                Errno::EACCES
            );
        });
    }
}

/// A connection that goes on with a session, by its secret.
fn resume(socket: &Path, (session, secret): (u64, [u8; 16])) -> (UnixStream, Welcome) {
    use dray_rpc::auth::{Key, Role, Transcript};
    use dray_rpc::wire::Challenge;
    let mut stream = common::raw::unauthenticated(socket);
    let hello = Hello { features: FEATURES, ..hello("data") }.message();
    stream.write_all(&frame(&hello, b"")).unwrap();
    let challenge = Challenge::from_message(&read_frame(&mut stream).unwrap().0).unwrap();
    let mut proof = Proof { session, ..NO_PROOF };
    let seen = Transcript {
        hello: &hello,
        version: challenge.version,
        features: challenge.features,
        server_nonce: &challenge.nonce,
        wish: &proof.wish(),
    };
    proof.session_proof = Key::of_session(&secret).prove(Role::Session, seen);
    stream.write_all(&frame(&proof.message(), b"")).unwrap();
    let welcome = Welcome::from_message(&read_frame(&mut stream).unwrap().0).unwrap();
    assert!(welcome.resumed);
    stream.write_all(&frame(&identity_of(1, &user().who), b"")).unwrap();
    (stream, welcome)
}

/// A ticket runs out with the second key after its own. A file that stays open is opened again at
/// each start, and has a ticket of the new key from there.
// proves: P123
#[test]
fn what_stays_open_outlives_any_number_of_keys() {
    const DAY: Duration = Duration::from_secs(25 * 3600);
    simulate(6, async {
        let ((fs, [_, _, tmp]), journal) = (files().await, MemoryJournal::default());
        let network = Network::new();
        let mut scope = Scope::new();
        let server = server_of(&fs, &journal, ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let connector = network.connector("s");
        let session =
            ClientSession::connect(connector, client_options(), SessionMemory::heap()).await;
        let client = RemoteFs::new(session.unwrap());
        let (_, file) = client.create(&user(), tmp, name("f"), NEW).await.unwrap();
        // From now on only its having been open gives the right.
        let closed =
            SetAttr { mode: Some(0), uid: Some(Uid(0)), gid: Some(Gid(0)), ..SetAttr::default() };
        fs.setattr(&Context::system(), file.id(), closed).await.unwrap();
        for epoch in 0..4u64 {
            sleep(DAY).await;
            scope.kill();
            network.break_all("s");
            scope = Scope::new();
            let server = server_of(&fs, &journal, ServerOptions::default());
            server.restore(StateLoss::Nothing).await;
            serve_simulated(&network, "s", &server, &scope);
            sleep(Duration::from_secs(5)).await;
            let written = file.write(&user(), Write::at(epoch), Buf::from(&b"x"[..])).await;
            assert_eq!(written.unwrap(), 1, "epoch {epoch}");
        }
    });
}
