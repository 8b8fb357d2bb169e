//! Exports of a projection: no client uses one that places files by another definition.

use std::io::Write as _;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use crate::common::raw::{NO_PROOF, frame, handshake_as, hello, read_frame, unauthenticated};
use crate::common::{
    client_options, connect, key, memory, run, serve_simulated, serve_sockets, serve_within,
    simulate,
};
use dray_backends::memory::MemoryFs;
use dray_core::{Context, Errno, FileSystem, OpenHow};
use dray_fabric::Address;
use dray_fabric::sim::{Network, Weather};
use dray_rpc::auth::{Role, Transcript};
use dray_rpc::client::{ClientOptions, ConnectError};
use dray_rpc::server::{
    ClientStatus, Export, ExportDefinition, MemoryJournal, Server, ServerOptions, StateLoss,
};
use dray_rpc::wire::{
    Auth, Challenge, HandshakeError, Hello, Proof, Refused, VERSION_MAX, Welcome,
};
use dray_rt::Scope;

const FIRST: u64 = 0x1122_3344_5566_7788;
const SECOND: u64 = 5;

fn export(fs: &MemoryFs, fingerprint: u64) -> Export {
    let text = format!("layout = \"cluster\" # {fingerprint}");
    let mut export = Export::new("data", Arc::new(fs.clone()), Vec::new());
    export.insecure = true; // tests may run without root
    export.definition =
        (fingerprint != 0).then(|| Arc::new(ExportDefinition { fingerprint, text }));
    export
}

fn server_of(fingerprint: u64, options: ServerOptions) -> Server {
    Server::new(options, vec![export(&memory(), fingerprint)], Arc::new(MemoryJournal::default()))
}

fn placing_by(definition: u64) -> ClientOptions {
    ClientOptions { definition, ..client_options() }
}

#[test]
fn a_client_is_given_the_definition_and_goes_on_by_no_other() {
    simulate(1, async {
        let server = server_of(FIRST, ServerOptions::default());
        let place = serve_within(server.clone());
        for other in [0, SECOND] {
            match connect(place.clone(), placing_by(other)).await.err().unwrap() {
                ConnectError::Definition { text } => assert!(text.ends_with(&FIRST.to_string())),
                error => panic!("{error:?}"),
            }
            assert!(server.status().clients.is_empty());
        }
        let fs = connect(place, placing_by(FIRST)).await.unwrap();
        fs.statfs(&Context::system()).await.unwrap();
    });
}

#[test]
fn what_is_no_projection_has_no_clients_that_place_by_one() {
    simulate(2, async {
        let place = serve_within(server_of(0, ServerOptions::default()));
        match connect(place.clone(), placing_by(FIRST)).await.err().unwrap() {
            ConnectError::Refused { errno: Errno::EREMCHG, message } => {
                assert!(message.contains("export `data` is no projection any more"), "{message}");
            }
            error => panic!("{error:?}"),
        }
        connect(place, placing_by(0)).await.unwrap();
    });
}

/// The refusal of a client without the field says what to do.
// proves: P136
#[test]
fn a_client_of_the_version_before_is_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    run(async {
        let server = server_of(FIRST, ServerOptions::default());
        serve_sockets(&Address::Unix(socket.clone()), server).await;
        let by_hand = std::thread::spawn(move || {
            let refused =
                handshake_as(&socket, &hello("data"), &NO_PROOF).err().unwrap().to_string();
            assert!(refused.contains("use a newer dray to mount it"), "{refused}");
        });
        while !by_hand.is_finished() {
            dray_rt::sleep(Duration::from_millis(10)).await;
        }
        by_hand.join().unwrap();
    });
}

/// An attacker who changes it on its way has no proof of what the client is then to have said.
// proves: P117
#[test]
fn proofs_cover_the_definition() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    run(async {
        let the_key = key("the key of the site").unwrap();
        let options = ServerOptions { key: Some(the_key.clone()), ..Default::default() };
        serve_sockets(&Address::Unix(socket.clone()), server_of(FIRST, options)).await;
        let by_hand = std::thread::spawn(move || {
            for (proven, said) in [(FIRST, FIRST), (SECOND, FIRST), (0, FIRST), (FIRST, 0)] {
                let mut stream = unauthenticated(&socket);
                let greeting = Hello { auth: Auth::Psk, ..hello("data") }.message();
                stream.write_all(&frame(&greeting, b"")).unwrap();
                let heard = read_frame(&mut stream).unwrap().0;
                let Challenge { version, features, nonce, .. } =
                    Challenge::from_message(&heard).unwrap();
                let wish = Proof { definition: proven, ..NO_PROOF }.wish();
                let proof = the_key.prove(
                    Role::Client,
                    Transcript {
                        hello: &greeting,
                        version,
                        features,
                        server_nonce: &nonce,
                        wish: &wish,
                    },
                );
                let proof = Proof { proof, definition: said, ..NO_PROOF };
                stream.write_all(&frame(&proof.message(), b"")).unwrap();
                match Welcome::from_message(&read_frame(&mut stream).unwrap().0) {
                    Ok(_) => assert_eq!(proven, said),
                    Err(HandshakeError::Refused(refused)) => {
                        assert_ne!(proven, said);
                        assert_eq!(i32::from(refused.errno), Errno::EKEYREJECTED.raw());
                        assert_eq!(refused.definition, "", "it is for clients that have the key");
                    }
                    Err(error) => panic!("{error:?}"),
                }
            }
        });
        while !by_hand.is_finished() {
            dray_rt::sleep(Duration::from_millis(10)).await;
        }
        by_hand.join().unwrap();
    });
}

#[test]
fn a_definition_is_taken_from_a_server_that_has_proven_itself() {
    for proves_first in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            read_frame(&mut stream).unwrap();
            if proves_first {
                let challenge = Challenge {
                    version: VERSION_MAX,
                    features: 0,
                    nonce: [1; 32],
                    proof: [0; 32], // nobody has a key
                };
                stream.write_all(&frame(&challenge.message(), b"")).unwrap();
                read_frame(&mut stream).unwrap();
            }
            let errno = Errno::EREMCHG.raw() as u16;
            let refused = Refused { errno, message: "why".into(), definition: "text".into() };
            stream.write_all(&frame(&refused.refusal(), b"")).unwrap();
            let _ = read_frame(&mut stream); // until the client has gone
        });
        run(async {
            let address = Address::Unix(dir.path().join("socket"));
            let place = Arc::new(dray_fabric::Sockets(address));
            match connect(place, client_options()).await.err().unwrap() {
                ConnectError::Definition { text } => assert!(proves_first && text == "text"),
                ConnectError::Refused { errno: Errno::EREMCHG, .. } => assert!(!proves_first),
                error => panic!("{error:?}"),
            }
        });
        server.join().unwrap();
    }
}

/// Messages that were sent before a connection is closed arrive.
fn as_on_tcp() -> Weather {
    let linger_max = Duration::from_millis(1);
    Weather { linger_one_in: Some(1), linger_max, ..Weather::default() }
}

/// Serves the same files and sessions by this definition, until the scope ends.
async fn begin_epoch(
    network: &Network,
    (fs, journal): (&MemoryFs, &MemoryJournal),
    by: u64,
) -> (Server, Scope) {
    let (exports, server_process) = (vec![export(fs, by)], Scope::new());
    let server = Server::new(ServerOptions::default(), exports, Arc::new(journal.clone()));
    server.restore(StateLoss::Nothing).await;
    serve_simulated(network, "s", &server, &server_process);
    (server, server_process)
}

/// The client would place by the former definition while others place by the new one.
#[test]
fn a_session_ends_with_its_definition() {
    for next in [SECOND, 0] {
        simulate(3, async {
            let (network, files) = (Network::new(), (memory(), MemoryJournal::default()));
            network.set_weather(as_on_tcp());
            let files = (&files.0, &files.1);
            let (_, server_process) = begin_epoch(&network, files, FIRST).await;
            let fs = connect(network.connector("s"), placing_by(FIRST)).await.unwrap();
            let cx = Context::system();
            let file = fs.open(&cx, fs.info().root, OpenHow::DIRECTORY).await.unwrap();
            server_process.kill();
            network.break_all("s");
            let (server, server_process) = begin_epoch(&network, files, next).await;
            assert_eq!(server.status().clients.len(), 1, "it is waited for");
            for _ in 0..2 {
                let errors = [fs.statfs(&cx).await.err(), file.getattr(&cx).await.err()];
                assert_eq!(errors.map(|error| error.unwrap().errno()), [Errno::ESHUTDOWN; 2]);
            }
            assert!(fs.session().status().redefined);
            dray_rt::sleep(Duration::from_secs(1)).await;
            assert!(server.status().clients.is_empty(), "others need not wait for it");
            connect(network.connector("s"), placing_by(next)).await.unwrap();
            // Nor does it go on when the former definition is back: it does not know what happened.
            server_process.kill();
            network.break_all("s");
            let (server, _server_process) = begin_epoch(&network, files, FIRST).await;
            dray_rt::sleep(Duration::from_secs(5)).await;
            assert_eq!(fs.statfs(&cx).await.unwrap_err().errno(), Errno::ESHUTDOWN);
            let connected =
                |client: &ClientStatus| client.host == "node1" && client.connections > 0;
            assert!(!server.status().clients.iter().any(connected));
        });
    }
}
