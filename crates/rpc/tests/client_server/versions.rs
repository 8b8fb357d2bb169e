//! Neighbouring versions: the next one is played by hand.

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use crate::common;
use crate::common::raw::{
    NO_PROOF, ask, frame, handshake_as, head, hello, identity, message, read_frame, unauthenticated,
};
use crate::common::{client_options, connect, memory, run, serve_sockets, server_of};
use dray_core::{
    Attr, Context, Entry, Errno, Error, FileId, FileSystem, Name, Op, OpenHow, Pid, Statfs,
};
use dray_fabric::{Address, Sockets};
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::{ClientOptions, ConnectError};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rpc::wire::{
    Auth, Call, CallHead, Challenge, FEATURE_JOBS, FEATURE_LOOKUP_OPEN, FEATURE_OPEN_NAMED,
    FEATURE_STAMPS, FEATURES, HandshakeError, Hello, Input, NotifyHead, Proof, Refused, ReplyHead,
    VERSION_MAX, VERSION_MIN, Welcome, Wire,
};

/// Serves while `test` runs on a thread of its own.
fn with_server(test: impl FnOnce(&Path) + Send + 'static) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    run(async {
        let server = server_of(memory(), ServerOptions::default());
        serve_sockets(&Address::Unix(socket.clone()), server).await;
        let test = std::thread::spawn(move || test(&socket));
        while !test.is_finished() {
            dray_rt::sleep(std::time::Duration::from_millis(5)).await;
        }
        test.join().unwrap();
    });
}

/// The bytes that a later version appends.
fn longer(mut message: Vec<u8>) -> Vec<u8> {
    message.extend_from_slice(b"of a later version");
    message
}

fn refusal(answer: &[u8]) -> Refused {
    match Challenge::from_message(answer) {
        Err(HandshakeError::Refused(refused)) => refused,
        other => panic!("not refused: {other:?}"),
    }
}

/// The number of an operation that is not known yet.
const LATER_OP: u8 = 200;

// proves: P136
#[test]
fn a_client_of_the_next_version_is_served() {
    with_server(|socket| {
        let mut stream = unauthenticated(socket);
        let next = Hello { version_max: VERSION_MAX + 1, features: 1 << 63, ..hello("data") };
        stream.write_all(&frame(&longer(next.message()), b"")).unwrap();
        let challenge = Challenge::from_message(&read_frame(&mut stream).unwrap().0).unwrap();
        assert_eq!((challenge.version, challenge.features), (VERSION_MAX, 0));
        // A sender that appends a field writes those before it, too.
        let of_no_definition = [NO_PROOF.message(), 0u64.to_le_bytes().to_vec()].concat();
        stream.write_all(&frame(&longer(of_no_definition), b"")).unwrap();
        Welcome::from_message(&read_frame(&mut stream).unwrap().0).unwrap();
        stream.write_all(&frame(&identity(0), b"")).unwrap();

        let mut advice = Vec::new();
        NotifyHead { what: 99, flags: 1, tag: 5 }.put_message(&mut advice);
        stream.write_all(&frame(&advice, b"")).unwrap();
        for data in [&b""[..], b"with data"] {
            let mut unknown = common::raw::message(&head(Op::Statfs, 3), &Call::Statfs {});
            unknown[1] = LATER_OP;
            stream.write_all(&frame(&longer(unknown), data)).unwrap();
            let (reply, _) = read_frame(&mut stream).unwrap();
            let reply = ReplyHead::get_message(&mut Input(&reply)).unwrap();
            assert_eq!((reply.tag, i32::from(reply.errno)), (3, Errno::ENOTSUP.raw()));
        }
        let reply = ask(&mut stream, &head(Op::Statfs, 4), &Call::Statfs {}).unwrap();
        assert_eq!((reply.tag, reply.errno), (4, 0));
    });
}

/// Of a hello that is too new only the versions may be readable.
// proves: P136
#[test]
fn versions_too_far_apart_are_refused_by_name() {
    with_server(|socket| {
        let far = Hello { version_min: 7, version_max: 9, ..hello("data") }.message();
        for message in [far.clone(), far[..6].to_vec()] {
            let mut stream = unauthenticated(socket);
            stream.write_all(&frame(&message, b"")).unwrap();
            let refused = refusal(&read_frame(&mut stream).unwrap().0);
            assert_eq!(i32::from(refused.errno), Errno::EPROTONOSUPPORT.raw());
            assert!(refused.message.contains("7 to 9"), "{}", refused.message);
        }
        let mut stream = unauthenticated(socket);
        let other = Hello { auth: Auth::Other(7), ..hello("data") };
        stream.write_all(&frame(&other.message(), b"")).unwrap();
        let refused = refusal(&read_frame(&mut stream).unwrap().0);
        assert_eq!(i32::from(refused.errno), Errno::EKEYREJECTED.raw());
    });
}

fn welcome(instance: u64, slots: u32) -> Welcome {
    Welcome {
        session: 5,
        secret: [3; 16],
        resumed: false,
        connection: 1,
        instance,
        boot: 1,
        calls_max: 4,
        slots,
        lease_ms: 60_000,
        info: memory().info().clone(),
        lease_term_ms: 0,
        lease_epoch: 0,
    }
}

/// Serves one client by hand as a server of another version does; answers what it said.
fn serve_by_hand(listener: &UnixListener, version: u16, statfs: &Statfs) -> (Hello, Proof) {
    let (mut stream, _) = listener.accept().unwrap();
    let said = Hello::from_message(&read_frame(&mut stream).unwrap().0).unwrap();
    let challenge = Challenge { version, features: 0, nonce: [1; 32], proof: [0; 32] };
    stream.write_all(&frame(&longer(challenge.message()), b"")).unwrap();
    let Ok((proof, _)) = read_frame(&mut stream) else { return (said, NO_PROOF) };
    let proof = Proof::from_message(&proof).unwrap();
    stream.write_all(&frame(&longer(welcome(1, 4).message()), b"")).unwrap();
    let mut advice = Vec::new();
    NotifyHead { what: 99, flags: 1, tag: 5 }.put_message(&mut advice);
    stream.write_all(&frame(&advice, b"")).unwrap();
    while let Ok((asked, _)) = read_frame(&mut stream) {
        if asked[1] == Op::Statfs as u8 && asked[0] == 1 {
            let tag = u32::from_le_bytes(asked[4..8].try_into().unwrap());
            let mut reply = Vec::new();
            ReplyHead::success(tag).put_message(&mut reply);
            statfs.put(&mut reply);
            stream.write_all(&frame(&reply, b"")).unwrap();
        }
    }
    (said, proof)
}

// proves: P136
#[test]
fn a_server_of_the_next_version_is_understood() {
    let dir = tempfile::tempdir().unwrap();
    let address = Address::Unix(dir.path().join("socket"));
    let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
    let expected = Statfs { blocks: 77, ..Statfs::default() };
    let answer = expected;
    let server = std::thread::spawn(move || {
        let good = serve_by_hand(&listener, VERSION_MAX, &answer);
        let wrong = serve_by_hand(&listener, VERSION_MAX + 1, &answer);
        (good, wrong)
    });
    run(async {
        let fs = connect(Arc::new(Sockets(address.clone())), client_options()).await.unwrap();
        assert_eq!(fs.statfs(&Context::system()).await.unwrap(), expected);
        fs.session().goodbye();
        drop(fs);
    });
    run(async {
        let error = connect(Arc::new(Sockets(address)), client_options()).await.err().unwrap();
        assert!(matches!(&error, ConnectError::Protocol(_)), "{error:?}");
        assert!(error.to_string().contains("not offered"), "{error}");
    });
    let ((hello, _), (_, unproven)) = server.join().unwrap();
    assert_eq!((hello.version_min, hello.version_max), (VERSION_MIN, VERSION_MAX));
    assert_eq!(unproven, NO_PROOF, "nothing is said to a server that is not understood");
}

/// A server of an earlier version, with the features that it knew. Answers each call that is as
/// old as they are, and says what it was sent.
fn serve_as_before(listener: &UnixListener, features: u64) -> Vec<CallHead> {
    let (mut stream, _) = listener.accept().unwrap();
    read_frame(&mut stream).unwrap();
    let challenge = Challenge { version: VERSION_MAX, features, nonce: [1; 32], proof: [0; 32] };
    stream.write_all(&frame(&challenge.message(), b"")).unwrap();
    read_frame(&mut stream).unwrap();
    stream.write_all(&frame(&welcome(1, 4).message(), b"")).unwrap();
    let mut sent = Vec::new();
    while let Ok((asked, _)) = read_frame(&mut stream) {
        let mut input = Input(&asked);
        let Ok(head) = CallHead::get_message(&mut input) else { continue };
        let mut reply = Vec::new();
        ReplyHead::success(head.tag).put_message(&mut reply);
        match head.op {
            Op::Open => None::<u8>.put(&mut reply),
            Op::Lookup => a_file().put(&mut reply),
            Op::LookupOpen | Op::OpenNamed => {
                reply.clear();
                let error = Error::new(Errno::ENOTSUP);
                ReplyHead::failure(head.tag, &error).put_message(&mut reply);
            }
            _ => {}
        }
        let one_way = head.flags & CallHead::ONE_WAY != 0;
        sent.push(head);
        if !one_way {
            stream.write_all(&frame(&reply, b"")).unwrap();
        }
    }
    sent
}

// proves: P136
#[test]
fn a_server_that_knows_no_one_way_closes_is_called() {
    let dir = tempfile::tempdir().unwrap();
    let address = Address::Unix(dir.path().join("socket"));
    let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
    let server = std::thread::spawn(move || serve_as_before(&listener, FEATURE_STAMPS));
    run(async {
        let fs = connect(Arc::new(Sockets(address.clone())), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), fs.info().root);
        let file = fs.open(&cx, root, OpenHow::DIRECTORY).await.unwrap();
        file.close(&cx).await.unwrap();
        drop(fs.open(&cx, root, OpenHow::DIRECTORY).await.unwrap());
        dray_rt::sleep(std::time::Duration::from_millis(200)).await;
        fs.session().goodbye();
        drop(fs);
    });
    let heads = server.join().unwrap();
    let ops: Vec<_> = heads.iter().map(|head| (head.op, head.flags)).collect();
    let expected = [Op::Open, Op::Close, Op::Open, Op::Close].map(|op| (op, 0));
    assert_eq!(ops, expected);
}

/// The file that every name leads to.
fn a_file() -> Entry {
    let id = FileId { ino: 5, generation: 1 };
    Entry { id, attr: Attr { ino: 5, mode: libc::S_IFREG | 0o644, ..Attr::default() } }
}

/// The calls of a client that opens a file three times by its name, at a server with these
/// features.
fn opened_by_name(features: u64) -> Vec<Op> {
    let dir = tempfile::tempdir().unwrap();
    let address = Address::Unix(dir.path().join("socket"));
    let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
    let server = std::thread::spawn(move || serve_as_before(&listener, features));
    run(async {
        let fs = connect(Arc::new(Sockets(address)), client_options()).await.unwrap();
        let cx = Context { pid: Pid(7), ..Context::system() };
        for _ in 0..3 {
            let entry = fs.lookup(&cx, fs.info().root, Name::new(b"f").unwrap()).await.unwrap();
            let file = fs.open(&cx, entry.id, OpenHow::READ).await.unwrap();
            file.close(&cx).await.unwrap();
        }
        fs.session().goodbye();
        drop(fs);
    });
    let heads = server.join().unwrap();
    heads.iter().map(|head| head.op).filter(|op| *op != Op::Close).collect()
}

// proves: P136
#[test]
fn a_server_that_opens_nothing_at_a_lookup_is_not_asked_to() {
    let features = FEATURES & !FEATURE_LOOKUP_OPEN;
    assert_eq!(opened_by_name(features), [Op::Lookup, Op::Open].repeat(3));
    // The server took the place of one that knew the operation, on a connection that did not
    // notice.
    let refused = [Op::LookupOpen, Op::Lookup, Op::Open].repeat(2);
    assert_eq!(opened_by_name(FEATURES)[..2], [Op::Lookup, Op::Open]);
    assert_eq!(opened_by_name(FEATURES)[2..], refused);
}

/// The calls of a client that opens a file by the name that it remembers, at a server with these
/// features.
fn opened_as_named(features: u64, flags: i32) -> Vec<Op> {
    let dir = tempfile::tempdir().unwrap();
    let address = Address::Unix(dir.path().join("socket"));
    let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
    let server = std::thread::spawn(move || serve_as_before(&listener, features));
    run(async {
        let fs = connect(Arc::new(Sockets(address)), client_options()).await.unwrap();
        let (cx, place) = (Context::system(), (fs.info().root, Name::new(b"f").unwrap()));
        let other = FileId { ino: 6, generation: 1 };
        for (id, errno) in [(a_file().id, None), (other, Some(Errno::ESTALE))] {
            let opened = fs.open_named(&cx, place, id, OpenHow::new(flags)).await;
            assert_eq!(opened.err().map(|error| error.errno()), errno);
        }
        fs.session().goodbye();
        drop(fs);
    });
    let heads = server.join().unwrap();
    heads.iter().map(|head| head.op).filter(|op| *op != Op::Close).collect()
}

// proves: P6
#[test]
fn a_server_that_opens_nothing_by_its_name_is_asked_for_the_name_first() {
    for flags in [libc::O_RDONLY, libc::O_RDWR | libc::O_TRUNC] {
        let asked = opened_as_named(FEATURES & !FEATURE_OPEN_NAMED, flags);
        assert_eq!(asked, [Op::Lookup, Op::Open, Op::Lookup]);
        // The server took the place of one that knew the operation, on a connection that did not
        // notice.
        let asked = opened_as_named(FEATURES, flags);
        assert_eq!(asked, [Op::OpenNamed, Op::Lookup, Op::Open, Op::OpenNamed, Op::Lookup]);
    }
}

/// A client of the version before is given no tickets, and its closes are taken without
/// having been agreed on.
// proves: P136
#[test]
fn a_client_of_the_version_before_is_served() {
    with_server(|socket| {
        let before = Hello { features: FEATURE_STAMPS, ..hello("data") };
        let (mut stream, welcome) = handshake_as(socket, &before, &NO_PROOF).unwrap();
        let (id, how) = (welcome.info.root, OpenHow::DIRECTORY);
        for again in [false, true] {
            let open = Call::Open { id, how, handle: 1 + u64::from(again), again };
            let reply = ask(&mut stream, &head(Op::Open, 3), &open).unwrap();
            assert_eq!((reply.errno, reply.ticket), (0, None));
        }
        let close = CallHead { flags: CallHead::ONE_WAY, ..head(Op::Close, 0) };
        stream.write_all(&frame(&message(&close, &Call::Close { handle: 1 }), b"")).unwrap();
        let stat = Call::Getattr { id, handle: Some(1) };
        let reply = ask(&mut stream, &head(Op::Getattr, 4), &stat).unwrap();
        assert!(reply.unknown_handle);
    });
}

/// The client would skip the question, and a status request would wait for it.
// proves: P136
#[test]
fn a_client_that_knows_nothing_of_jobs_is_not_asked() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    run(async {
        let delay = std::time::Duration::from_secs(2);
        let slow = Fault { op: Some(Op::Statfs), when: When::Always, delay, error: None };
        let below = Observed::new(Arc::new(memory()), Arc::new(Faults::new(vec![slow])));
        let export = Export::new("data", Arc::new(below), Vec::new());
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        serve_sockets(&Address::Unix(socket.clone()), server.clone()).await;
        let test = std::thread::spawn(move || {
            let features = FEATURES & !FEATURE_JOBS;
            let (mut stream, _) =
                handshake_as(&socket, &Hello { features, ..hello("data") }, &NO_PROOF).unwrap();
            ask(&mut stream, &head(Op::Statfs, 3), &Call::Statfs {}).unwrap().tag
        });
        let mut looked = 0;
        while !test.is_finished() {
            looked += server.status_with_paths().await.operations.len();
            dray_rt::sleep(std::time::Duration::from_millis(20)).await;
        }
        assert_eq!(test.join().unwrap(), 3, "a question came before the answer");
        assert!(looked > 0);
    });
}

/// A client must know of it if its kernel does not check its callers. Servers of former versions do
/// not say that all users are one: a client that depends on it does not continue with them.
#[test]
fn a_server_says_whether_all_users_are_one_there() {
    for one_user in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let address = Address::Unix(dir.path().join("socket"));
        run(async {
            let mut export = Export::new("data", Arc::new(memory()), Vec::new());
            export.one_user = one_user;
            let journal = Arc::new(MemoryJournal::default());
            let server = Server::new(ServerOptions::default(), vec![export], journal);
            serve_sockets(&address, server).await;
            let connector = Arc::new(Sockets(address.clone()));
            let options = ClientOptions { counts_on_one_user: true, ..client_options() };
            match connect(connector.clone(), options).await {
                Ok(fs) => assert!(one_user && fs.session().one_user()),
                Err(ConnectError::Refused { errno: Errno::EACCES, message }) => {
                    assert!(!one_user && message.contains("squash=all"), "{message}");
                }
                Err(error) => panic!("{error}"),
            }
            let fs = connect(connector, client_options()).await.unwrap();
            assert_eq!(fs.session().one_user(), one_user);
        });
    }
}
