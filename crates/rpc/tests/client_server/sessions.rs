//! Tests of which clients may go on with a session, and which may not any more.

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::common::raw::{
    NO_PROOF, ask, frame, handshake_as, head, hello, read_frame, unauthenticated,
};
use crate::common::{
    client_options, connect, key, memory, run, serve_simulated, serve_sockets, server_of,
    server_with, simulate,
};
use dray_core::{
    Context, CreateHow, Errno, FileSystem, GROUPS_MAX, Gid, Identity, Lock, LockFamily, LockKind,
    LockOwner, LockRange, Name, Op, OpenHow, Pid, SetAttr, XattrSet,
};
use dray_fabric::sim::{Network, Weather};
use dray_fabric::{Address, Sockets};
use dray_rpc::auth::{Key, Role, Transcript};
use dray_rpc::client::ClientOptions;
use dray_rpc::server::{Export, Journal, MemoryJournal, Server, ServerOptions};
use dray_rpc::wire::{
    Auth, Call, Challenge, FEATURE_STAMPS, Hello, Input, NotifyHead, Proof, Welcome,
};
use dray_rt::Scope;

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

/// Messages that were sent before a connection is closed arrive.
fn as_on_tcp() -> Weather {
    let linger_max = Duration::from_millis(1);
    Weather { linger_one_in: Some(1), linger_max, ..Weather::default() }
}

fn part_of(whole: &[u8], part: &[u8]) -> bool {
    whole.windows(part.len()).any(|window| window == part)
}

/// The server is asked for the session, so it knows its number. It sees a proof by the secret,
/// which is good for nothing else, and nothing of the key.
// proves: P119
#[test]
fn a_false_server_learns_nothing_that_it_could_use() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let secret = *b"never seen again";
    let challenge = Challenge { version: 1, features: 0, nonce: [1; 32], proof: [0; 32] };
    let (heard, hears) = std::sync::mpsc::channel();
    let server = std::thread::spawn(move || {
        let (mut first, _) = listener.accept().unwrap();
        read_frame(&mut first).unwrap();
        first.write_all(&frame(&challenge.message(), b"")).unwrap();
        read_frame(&mut first).unwrap();
        let info = memory().info().clone();
        let welcome = Welcome {
            session: 5,
            secret,
            resumed: false,
            connection: 1,
            instance: 1,
            boot: 1,
            calls_max: 4,
            slots: 4,
            lease_ms: 60_000,
            info,
            lease_term_ms: 0,
            lease_epoch: 0,
        };
        first.write_all(&frame(&welcome.message(), b"")).unwrap();
        drop(first); // and now somebody else answers there
        let (mut second, _) = listener.accept().unwrap();
        let (said, _) = read_frame(&mut second).unwrap();
        second.write_all(&frame(&challenge.message(), b"")).unwrap();
        let (proof, _) = read_frame(&mut second).unwrap();
        heard.send(()).unwrap();
        let (mut keyed, _) = listener.accept().unwrap();
        read_frame(&mut keyed).unwrap();
        keyed.write_all(&frame(&challenge.message(), b"")).unwrap();
        (said, proof, read_frame(&mut keyed).is_err())
    });
    let address = Address::Unix(socket);
    run(async {
        let fs = connect(Arc::new(Sockets(address.clone())), client_options()).await.unwrap();
        while hears.try_recv().is_err() {
            dray_rt::sleep(Duration::from_millis(5)).await;
        }
        fs.session().goodbye();
        drop(fs);
        let options = ClientOptions { key: key("the key of the site"), ..client_options() };
        assert!(connect(Arc::new(Sockets(address)), options).await.is_err());
    });
    let (said, proof, got_no_proof) = server.join().unwrap();
    assert!(!part_of(&said, &secret) && !part_of(&proof, &secret));
    assert_eq!(Proof::from_message(&proof).unwrap().session, 5);
    assert!(got_no_proof, "a server that does not know the key got a proof of it");
}

/// A handshake by hand that wants to go on with `session`.
fn go_on(socket: &Path, session: u64, prove: impl FnOnce(&Hello, &Challenge) -> Proof) -> Welcome {
    go_on_at("data", socket, session, prove)
}

fn go_on_at(
    export: &str,
    socket: &Path,
    session: u64,
    prove: impl FnOnce(&Hello, &Challenge) -> Proof,
) -> Welcome {
    let proves = |said: &Hello, challenge: &Challenge| {
        let proof = prove(said, challenge);
        assert_eq!(proof.session, session);
        proof
    };
    shaken(export, socket, proves).1
}

/// A connection that has shaken hands.
fn shaken(
    export: &str,
    socket: &Path,
    prove: impl FnOnce(&Hello, &Challenge) -> Proof,
) -> (UnixStream, Welcome) {
    let mut stream = unauthenticated(socket);
    let said = hello(export);
    stream.write_all(&frame(&said.message(), b"")).unwrap();
    let challenge = Challenge::from_message(&read_frame(&mut stream).unwrap().0).unwrap();
    let proof = prove(&said, &challenge);
    stream.write_all(&frame(&proof.message(), b"")).unwrap();
    let welcome = Welcome::from_message(&read_frame(&mut stream).unwrap().0).unwrap();
    (stream, welcome)
}

fn prove(secret: &[u8; 16], said: &Hello, challenge: &Challenge, session: u64) -> Proof {
    let mut proof = Proof { session, ..NO_PROOF };
    let (hello, wish) = (said.message(), proof.wish());
    let seen = seen(&hello, challenge, &wish);
    proof.session_proof = Key::of_session(secret).prove(Role::Session, seen);
    proof
}

fn seen<'a>(hello: &'a [u8], challenge: &'a Challenge, wish: &'a [u8]) -> Transcript<'a> {
    Transcript {
        hello,
        version: challenge.version,
        features: challenge.features,
        server_nonce: &challenge.nonce,
        wish,
    }
}

/// Runs a client of sockets that block, while the server of the same thread serves.
async fn by_hand(client: impl FnOnce() + Send + 'static) {
    let client = std::thread::spawn(client);
    while !client.is_finished() {
        dray_rt::sleep(Duration::from_millis(5)).await;
    }
    client.join().unwrap();
}

// proves: P119
#[test]
fn only_a_client_with_the_secret_resumes_a_session() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    run(async {
        let server = server_of(memory(), ServerOptions::default());
        serve_sockets(&Address::Unix(socket.clone()), server).await;
        by_hand(move || {
            let mine = go_on(&socket, 0, |_, _| NO_PROOF);
            let mut seen = None;
            let again = go_on(&socket, mine.session, |said, challenge| {
                let proof = prove(&mine.secret, said, challenge, mine.session);
                seen = Some(proof.clone());
                proof
            });
            assert!(again.resumed && again.session == mine.session);
            let replayed = go_on(&socket, mine.session, |_, _| seen.unwrap());
            assert!(!replayed.resumed && replayed.session != mine.session);
            let wrong = go_on(&socket, mine.session, |said, challenge| {
                prove(&[0; 16], said, challenge, mine.session)
            });
            assert!(!wrong.resumed);
        })
        .await;
    });
}

#[test]
fn the_oldest_of_more_connections_than_a_session_may_have_is_ended() {
    const CONNECTIONS_MAX: usize = 16;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    run(async {
        let server = server_of(memory(), ServerOptions::default());
        serve_sockets(&Address::Unix(socket.clone()), server.clone()).await;
        by_hand(move || {
            let mut known = (0, [0; 16]);
            let mut streams: Vec<UnixStream> = Vec::new();
            for _ in 0..=CONNECTIONS_MAX {
                let (stream, welcome) = shaken("data", &socket, |said, challenge| match known.0 {
                    0 => NO_PROOF,
                    session => prove(&known.1, said, challenge, session),
                });
                known = (welcome.session, welcome.secret);
                streams.push(stream);
            }
            let error = read_frame(&mut streams[0]).unwrap_err();
            assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "it is served on");
            streams[1].set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let error = read_frame(&mut streams[1]).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}");
        })
        .await;
    });
}

/// The secret of a session of one export opens no session of another.
// proves: P119
#[test]
fn a_session_of_one_export_is_none_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    run(async {
        let export = |name: &str| Export::new(name, Arc::new(memory()), Vec::new());
        let exports = vec![export("data"), export("other")];
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), exports, journal);
        serve_sockets(&Address::Unix(socket.clone()), server).await;
        by_hand(move || {
            let mine = go_on(&socket, 0, |_, _| NO_PROOF);
            let other = go_on_at("other", &socket, mine.session, |said, challenge| {
                prove(&mine.secret, said, challenge, mine.session)
            });
            assert!(!other.resumed && other.session != mine.session);
        })
        .await;
    });
}

/// The proof of a client that is to show that it knows the key.
type Proves<'a> = dyn Fn(Transcript<'_>, &Challenge) -> [u8; 32] + 'a;

/// A message that no client of ours sends: it would see first that the server has another key.
// proves: P117
#[test]
fn without_a_proof_of_the_key_there_is_no_session() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    run(async {
        let the_key = key("the key of the site").unwrap();
        let options = ServerOptions { key: Some(the_key.clone()), ..Default::default() };
        let server = server_of(memory(), options);
        serve_sockets(&Address::Unix(socket.clone()), server.clone()).await;
        by_hand(move || {
            let said = Hello { auth: Auth::Psk, ..hello("data") };
            // The answer to a greeting, and to a proof made of that.
            let answered = |proves: &Proves<'_>| {
                let mut stream = unauthenticated(&socket);
                stream.write_all(&frame(&said.message(), b"")).unwrap();
                let heard = read_frame(&mut stream).unwrap().0;
                let challenge = Challenge::from_message(&heard).unwrap();
                let (hello, wish) = (said.message(), NO_PROOF.wish());
                let proof = proves(seen(&hello, &challenge, &wish), &challenge);
                let proof = Proof { proof, ..NO_PROOF };
                stream.write_all(&frame(&proof.message(), b"")).unwrap();
                read_frame(&mut stream).unwrap().0
            };
            let another = key("another key, wrong").unwrap();
            let wrong: [&Proves<'_>; 5] = [
                &|_, _| [0; 32],
                &|seen, _| another.prove(Role::Client, seen),
                &|seen, _| the_key.prove(Role::Session, seen),
                &|_, challenge| challenge.proof, // returned to its sender
                &|seen, _| {
                    the_key.prove(Role::Client, Transcript { server_nonce: &[1; 32], ..seen })
                },
            ];
            for (number, wrong) in wrong.into_iter().enumerate() {
                assert!(Welcome::from_message(&answered(wrong)).is_err(), "proof {number}");
            }
            let right = answered(&|seen, _| the_key.prove(Role::Client, seen));
            Welcome::from_message(&right).unwrap();
        })
        .await;
        assert!(server.status().clients.len() <= 1);
    });
}

// proves: P126
#[test]
fn the_sessions_of_one_address_are_bounded_and_the_refusal_says_so() {
    simulate(10, async {
        let network = Network::new();
        network.set_weather(as_on_tcp());
        let options = ServerOptions { sessions_of_one_max: 3, ..ServerOptions::default() };
        let server = server_of(memory(), options);
        serve_simulated(&network, "s", &server, &Scope::new());
        let mut mounts = Vec::new();
        for _ in 0..3 {
            mounts.push(connect(network.connector("s"), client_options()).await.unwrap());
        }
        let error = connect(network.connector("s"), client_options()).await.err().unwrap();
        assert!(error.to_string().contains("has 3 mounts, all that it may"), "{error}");
        assert!(error.to_string().contains("clients_of_one_address_max"), "{error}");
        mounts[0].statfs(&Context::system()).await.unwrap();
        mounts.remove(0).session().goodbye();
        dray_rt::sleep(Duration::from_secs(1)).await;
        connect(network.connector("s"), client_options()).await.unwrap();
    });
}

/// Becoming somebody in 19,900 groups took the thread that served others 13 ms, each time.
// proves: P44
#[test]
fn a_caller_in_too_many_groups_is_refused_and_other_callers_are_not() {
    simulate(9, async {
        let network = Network::new();
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &Scope::new());
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let in_groups = |count: usize| {
            let groups = (1..=count as u32).map(Gid).collect();
            Context {
                who: Arc::new(Identity { groups, ..Identity::default() }),
                ..Context::system()
            }
        };
        let (most, more) = (in_groups(GROUPS_MAX), in_groups(GROUPS_MAX + 1));
        let root = fs.info().root;
        let [f, g] = [b"f", b"g"].map(|name| Name::new(name).unwrap());
        let (_, file) = fs.create(&most, root, f, NEW).await.unwrap();
        for _ in 0..3 {
            assert_eq!(fs.create(&more, root, g, NEW).await.err().unwrap().errno(), Errno::E2BIG);
            assert_eq!(fs.getattr(&more, root).await.unwrap_err().errno(), Errno::E2BIG);
            assert_eq!(fs.lookup(&most, root, g).await.unwrap_err().errno(), Errno::ENOENT);
        }
        fs.create(&most, root, g, NEW).await.unwrap();
        // The client can give back what it had before it came into so many groups.
        file.flush(&more, LockOwner::own(1)).await.unwrap();
        file.close(&more).await.unwrap();
        assert_eq!(server.status().clients[0].files, 1);
        assert_eq!(fs.session().status().channels[0].connections, 1);
    });
}

/// Calls that fit no message were sent again and again, and never answered.
// proves: P135
#[test]
fn what_fits_no_message_is_an_error_of_that_call() {
    simulate(8, async {
        let network = Network::new();
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &Scope::new());
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), fs.info().root);
        let long = vec![b'v'; 100 << 10];
        let set = fs.setxattr(&cx, root, b"user.x", &long, XattrSet::Any).await;
        assert_eq!(set.unwrap_err().errno(), Errno::E2BIG);
        let groups = (1..30_000).map(Gid).collect();
        let who = Identity { groups, ..Identity::default() };
        let crowded = Context { who: Arc::new(who), ..Context::system() };
        for _ in 0..2 {
            assert_eq!(fs.statfs(&crowded).await.unwrap_err().errno(), Errno::E2BIG);
        }
        fs.statfs(&cx).await.unwrap();
        assert_eq!(fs.session().status().channels[0].connections, 1);
    });
}

/// Otherwise every later server would wait a lease for a client with nothing to reclaim.
// proves: P91
#[test]
fn the_journal_knows_when_the_last_lock_has_gone() {
    simulate(9, async {
        let network = Network::new();
        let journal = MemoryJournal::default();
        let server = server_with(memory(), ServerOptions::default(), journal.clone());
        serve_simulated(&network, "s", &server, &Scope::new());
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let cx = Context::system();
        let name = Name::new(b"f").unwrap();
        let (_, file) = fs.create(&cx, fs.info().root, name, NEW).await.unwrap();
        let noted = || journal.load()[0].1.had_locks();
        assert!(!noted());
        let lock = |family| Lock {
            family,
            kind: LockKind::Exclusive,
            range: LockRange::ALL,
            owner: LockOwner::own(3),
            pid: Pid(1),
        };
        file.lock(&cx, lock(LockFamily::Posix), false).await.unwrap();
        assert!(noted());
        file.flush(&cx, LockOwner::own(3)).await.unwrap();
        assert!(!noted());
        file.lock(&cx, lock(LockFamily::Flock), false).await.unwrap();
        assert!(noted());
        file.close(&cx).await.unwrap();
        assert!(!noted());
    });
}

/// The client hears of syncs of others as long as it has changed something that the syncs may have
/// brought to media. Then nothing wakes it any more.
#[test]
fn a_client_without_changes_is_not_woken_by_the_syncs_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let address = Address::Unix(socket.clone());
    let clients = std::thread::spawn(move || {
        let knows = Hello { features: FEATURE_STAMPS, ..hello("data") };
        let arrive = || loop {
            match handshake_as(&socket, &knows, &NO_PROOF) {
                Ok(client) => return client,
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        // A socket that is there and not yet listened at refuses.
        while UnixStream::connect(&socket).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let ((mut rests, welcome), (mut syncs, _)) = (arrive(), arrive());
        let sync_all = |stream: &mut _, tag| {
            let reply = ask(stream, &head(Op::SyncAll, tag), &Call::SyncAll {}).unwrap();
            assert_eq!(reply.errno, 0);
        };
        for round in 0..2u32 {
            let (id, mode) = (welcome.info.root, Some(0o700 + round));
            let set = SetAttr { mode, ..SetAttr::default() };
            let change = Call::Setattr { id, handle: None, set };
            let mut slotted = head(Op::Setattr, 1);
            (slotted.slot, slotted.sequence) = (0, round + 1);
            assert_eq!(ask(&mut rests, &slotted, &change).unwrap().errno, 0);
            (0..3).for_each(|tag| sync_all(&mut syncs, tag));
            let (heard, _) = read_frame(&mut rests).unwrap();
            let notified = NotifyHead::get_message(&mut Input(&heard)).unwrap();
            assert_eq!(notified.what, NotifyHead::STABLE);
            // The next that it gets is the answer to what it asks.
            let root = Call::Getattr { id: welcome.info.root, handle: None };
            assert_eq!(ask(&mut rests, &head(Op::Getattr, 2), &root).unwrap().errno, 0);
        }
    });
    run(async {
        let server = server_of(memory(), ServerOptions::default());
        serve_sockets(&address, server).await;
        while !clients.is_finished() {
            dray_rt::sleep(Duration::from_millis(5)).await;
        }
    });
    clients.join().unwrap();
}
