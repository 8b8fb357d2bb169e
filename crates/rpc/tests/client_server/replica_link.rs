//! Notes on their way between the two servers of a slice, and other peers that connect there.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use crate::common::raw::{Chance, NO_PROOF, hello};
use crate::common::{key, simulate};
use dray_core::{Buf, BufMut, Peer};
use dray_fabric::sim::{Network, Weather};
use dray_fabric::{Connection, Listener, Sink, local};
use dray_rpc::auth::{Role, Transcript};
use dray_rpc::server::{
    Journal, JournalReplica, MemoryJournal, PersistentRecord, ReplicaLink, ReplicaPort,
    ReplicaRefusal, ReplicaTerms, Server, ServerOptions, WireLink,
};
use dray_rpc::wire::{
    Auth, BatchHead, BatchOutcome, BatchReply, Challenge, Proof, Refused, ReplicaHello,
    ReplicaWelcome, VERSION_MAX, VERSION_MIN, Wire,
};
use dray_rt::timeout;

const SLICE: &str = "scratch/0.1";
const BACKUP: &str = "backup";
/// A copy of a journal without sessions.
const COPY: [u8; 1] = [0];

/// The note that this is kept as the key of tickets.
fn kept(bytes: &[u8]) -> Vec<u8> {
    let mut note = vec![6, 0];
    bytes.put(&mut note);
    note
}

fn terms(definition: u64, text: Option<&str>) -> ReplicaTerms {
    ReplicaTerms { key: text.and_then(key), definition, ..ReplicaTerms::default() }
}

/// A server that takes notes.
struct Backup {
    journal: MemoryJournal,
    /// How many there have been.
    connections: Arc<AtomicU32>,
}

fn backup(network: &Network, terms: ReplicaTerms) -> Backup {
    let (backup, serve) = backup_that_serves(terms);
    let mut incoming = network.listen(BACKUP);
    dray_rt::spawn(async move {
        while let Some(connection) = incoming.recv().await {
            serve(Arc::new(connection));
        }
    });
    backup
}

/// A backup, and what gives it a connection.
fn backup_that_serves(terms: ReplicaTerms) -> (Backup, impl Fn(Arc<dyn Connection>) + Send) {
    let (journal, connections) = (MemoryJournal::default(), Arc::<AtomicU32>::default());
    let replica = Arc::new(JournalReplica::new(Arc::new(journal.clone())));
    let port = Arc::new(ReplicaPort::new(SLICE, terms));
    let limits =
        Server::new(ServerOptions::default(), Vec::new(), Arc::new(MemoryJournal::default()));
    let count = connections.clone();
    let serve = move |connection| {
        count.fetch_add(1, Ordering::SeqCst);
        let Some(admission) = limits.admit(Peer::Local) else { return };
        let (port, replica) = (port.clone(), replica.clone());
        dray_rt::spawn(async move { port.serve(&*replica, connection, admission).await });
    };
    (Backup { journal, connections }, serve)
}

/// Both ends within the process, where the last words of a connection arrive before its end.
fn local_backup_and_link(ours: ReplicaTerms, theirs: ReplicaTerms) -> (Backup, WireLink) {
    let (backup, serve) = backup_that_serves(ours);
    let (listener, connector) = local::listen();
    dray_rt::spawn(async move {
        while let Ok(incoming) = listener.accept().await {
            serve(incoming.establish().unwrap());
        }
    });
    (backup, WireLink::new(SLICE, Arc::new(connector), theirs))
}

fn link(network: &Network, terms: ReplicaTerms) -> WireLink {
    WireLink::new(SLICE, network.connector_from("primary", BACKUP), terms)
}

fn ticket_key(backup: &Backup) -> Option<Vec<u8>> {
    backup.journal.kept(PersistentRecord::TicketKey).unwrap()
}

fn why(refused: Result<(), ReplicaRefusal>) -> String {
    refused.unwrap_err().to_string()
}

#[test]
fn batches_arrive_and_refusals_come_back() {
    simulate(1, async {
        let network = Network::new();
        let terms = terms(5, Some("the key of the site"));
        let (backup, link) = (backup(&network, terms.clone()), link(&network, terms));
        let refused = link.ship(3, 0, kept(b"a")).await;
        assert!(matches!(refused, Err(ReplicaRefusal::Incomplete)), "{refused:?}");
        link.ship(3, 1, COPY.to_vec()).await.unwrap();
        link.ship(3, 2, kept(b"b")).await.unwrap();
        assert_eq!(ticket_key(&backup).unwrap(), b"b");
        let refused = link.ship(3, 3, vec![99]).await;
        assert!(matches!(refused, Err(ReplicaRefusal::Malformed(_))), "{refused:?}");
        let refused = link.ship(2, 3, kept(b"c")).await;
        assert!(matches!(refused, Err(ReplicaRefusal::Deposed)), "{refused:?}");
        let refused = link.ship(3, 3, vec![0; 2 << 20]).await;
        assert!(matches!(refused, Err(ReplicaRefusal::Io(_))), "longer than a frame: {refused:?}");
        dray_rt::sleep(Duration::from_secs(1)).await;
        link.ship(3, 3, kept(&[7; 500_000])).await.unwrap();
        assert_eq!(ticket_key(&backup).unwrap(), [7; 500_000]);
        assert_eq!(backup.connections.load(Ordering::SeqCst), 2);
    });
}

/// The same batch is sent until its answer has come, over as many connections as that takes.
#[test]
fn connections_break_and_no_batch_is_lost() {
    for seed in 0..20 {
        simulate(seed, async {
            let network = Network::new();
            let backup = backup(&network, terms(5, None));
            let link = link(&network, terms(5, None));
            network.set_weather(Weather {
                break_one_in: Some(10),
                deliver_then_break_one_in: Some(2),
                linger_one_in: Some(2),
                ..Weather::default()
            });
            for number in 0..50_u64 {
                let batch = if number == 0 { COPY.to_vec() } else { kept(&number.to_le_bytes()) };
                let shipped = async {
                    while let Err(error) = link.ship(1, number, batch.clone()).await {
                        assert!(matches!(error, ReplicaRefusal::Io(_)), "{error}");
                        dray_rt::sleep(Duration::from_millis(20)).await;
                    }
                };
                timeout(Duration::from_secs(60), shipped).await.expect("it does not come back");
            }
            assert!(network.breaks() > 3, "{}", network.breaks());
            assert_eq!(ticket_key(&backup).unwrap(), 49_u64.to_le_bytes());
        });
    }
}

#[test]
fn a_server_that_is_not_there_is_not_asked_all_the_time_and_found_when_it_is_back() {
    simulate(1, async {
        let network = Network::new();
        let link = link(&network, terms(5, None));
        let mut tried = 0;
        for _ in 0..1000 {
            let refused = link.ship(1, 0, COPY.to_vec()).await;
            let Err(ReplicaRefusal::Io(error)) = refused else { panic!("{refused:?}") };
            tried += u32::from(error.kind() != io::ErrorKind::NotConnected);
            dray_rt::sleep(Duration::from_millis(10)).await;
        }
        assert!((10..20).contains(&tried), "it was tried {tried} times in 10 s");
        let backup = backup(&network, terms(5, None));
        dray_rt::sleep(Duration::from_secs(1)).await;
        link.ship(1, 0, COPY.to_vec()).await.unwrap();
        // A machine that has gone answers nothing: the waiting server gives up, and tries another connection.
        network.set_weather(Weather { delay_min: Duration::from_secs(9), ..Weather::default() });
        let late = timeout(Duration::from_millis(500), link.ship(1, 1, COPY.to_vec())).await;
        assert!(late.is_err());
        network.set_weather(Weather::default());
        dray_rt::sleep(Duration::from_secs(20)).await;
        link.ship(1, 2, COPY.to_vec()).await.unwrap();
        assert_eq!(backup.connections.load(Ordering::SeqCst), 2);
    });
}

// proves: P147
#[test]
fn servers_with_another_key_or_definition_bring_no_notes() {
    let (right, wrong) = (Some("the key of the site"), Some("another key of this"));
    for (ours, theirs, words) in [
        (terms(5, right), terms(5, wrong), "does not know the key"),
        (terms(5, right), terms(5, None), "the same --auth"),
        (terms(5, None), terms(5, right), "the same --auth"),
        (terms(5, right), terms(6, right), "different definitions"),
        (terms(5, None), terms(0, None), "different definitions"),
    ] {
        simulate(1, async {
            let (backup, link) = local_backup_and_link(ours, theirs);
            for notes in [COPY.to_vec(), kept(b"secret")] {
                let refused = why(link.ship(1, 0, notes).await);
                assert!(refused.contains(words), "{refused}");
                dray_rt::sleep(Duration::from_secs(2)).await;
            }
            assert_eq!(ticket_key(&backup), None);
        });
    }
}

/// What another end of a connection hears.
#[derive(Default)]
struct Heard(std::sync::Arc<std::sync::Mutex<Vec<Vec<u8>>>>);

impl Sink for Heard {
    fn poll_place(
        &mut self,
        _: &mut TaskContext<'_>,
        _: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Ok(BufMut::heap(data_bytes)))
    }

    fn frame(&mut self, head: &[u8], _: Option<BufMut>) -> io::Result<()> {
        self.0.lock().unwrap().push(head.to_vec());
        Ok(())
    }
}

/// A connection by hand.
struct ByHand {
    connection: Arc<dyn Connection>,
    heard: Arc<std::sync::Mutex<Vec<Vec<u8>>>>,
}

impl ByHand {
    async fn new(network: &Network) -> ByHand {
        let connection = network.connector_from("other", BACKUP).connect().await.unwrap();
        let mut sink = Heard::default();
        let (heard, receiving) = (sink.0.clone(), connection.clone());
        dray_rt::spawn(async move { drop(receiving.run(&mut sink).await) });
        ByHand { connection, heard }
    }

    /// Says it, and answers what is heard then.
    async fn say(&self, head: &[u8], data: Option<&[u8]>) -> Option<Vec<u8>> {
        let _ = self.connection.send(head, data.map(Buf::from)); // it may have been ended
        dray_rt::sleep(Duration::from_millis(1)).await;
        self.heard.lock().unwrap().pop()
    }
}

fn greeting(auth: Auth) -> ReplicaHello {
    ReplicaHello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        features: 0,
        auth,
        nonce: [7; 32],
        slice: SLICE.into(),
        software: String::new(),
    }
}

fn batch(number: u64) -> Vec<u8> {
    let mut head = Vec::new();
    BatchHead { epoch: 1, number }.put_message(&mut head);
    head
}

/// A client has the same key, and is no server.
// proves: P147
#[test]
fn nothing_is_taken_before_a_proof_that_is_a_servers() {
    simulate(1, async {
        let network = Network::new();
        let the_key = key("the key of the site").unwrap();
        let backup = backup(&network, terms(5, Some("the key of the site")));
        let copy = [&COPY[..], &kept(b"false")].concat();
        // No handshake, half of one, and that of a client.
        for heads in [vec![], vec![greeting(Auth::Psk).message()], vec![hello(SLICE).message()]] {
            let other = ByHand::new(&network).await;
            for head in heads {
                other.say(&head, None).await;
            }
            let heard = other.say(&batch(0), Some(&copy)).await;
            assert!(heard.is_none_or(|heard| BatchReply::get_message(&heard).is_err()));
        }
        let greeting = greeting(Auth::Psk).message();
        let proven = [hello(SLICE).message(), greeting.clone()];
        for (index, hello) in proven.iter().enumerate() {
            let other = ByHand::new(&network).await;
            let heard = other.say(&greeting, None).await.unwrap();
            let Challenge { version, features, nonce, .. } =
                Challenge::from_message(&heard).unwrap();
            let mut proof = Proof { definition: 5, ..NO_PROOF };
            let wish = proof.wish();
            let seen = Transcript { hello, version, features, server_nonce: &nonce, wish: &wish };
            proof.proof = the_key.prove(Role::Client, seen);
            let heard = other.say(&proof.message(), None).await;
            let welcome = heard.map(|heard| ReplicaWelcome::from_message(&heard));
            assert_eq!(matches!(welcome, Some(Ok(_))), index == 1, "{welcome:?}");
            let heard = other.say(&batch(0), Some(&copy)).await;
            let outcome = heard.map(|heard| BatchReply::get_message(&heard).unwrap().outcome);
            assert_eq!(outcome, (index == 1).then_some(BatchOutcome::Taken));
            let expected = if index == 1 { Some(b"false".to_vec()) } else { None };
            assert_eq!(ticket_key(&backup), expected);
        }
    });
}

/// Whatever a peer sends that was let in; the next one is served.
#[test]
fn hostile_servers_are_answered_or_cut_off_and_others_served() {
    for seed in 0..200 {
        simulate(seed, async {
            let network = Network::new();
            let backup = backup(&network, terms(5, None));
            let other = ByHand::new(&network).await;
            let mut chance = Chance::new(seed);
            if chance.below(4) != 0 {
                other.say(&greeting(Auth::None).message(), None).await;
                other.say(&Proof { definition: 5, ..NO_PROOF }.message(), None).await;
            }
            for _ in 0..20 {
                let head = match chance.below(4) {
                    0 => chance.bytes(40),
                    1 => greeting(Auth::Other(9)).message(),
                    2 => Refused { errno: 1, message: "no".into(), definition: String::new() }
                        .refusal(),
                    _ => batch(chance.edge()),
                };
                let data = chance.bytes(300);
                if !head.is_empty() {
                    other.say(&head, (!data.is_empty()).then_some(&data)).await;
                }
            }
            let link = link(&network, terms(5, None));
            link.ship(u64::MAX, 0, COPY.to_vec()).await.unwrap();
            link.ship(u64::MAX, 1, kept(b"sound")).await.unwrap();
            assert_eq!(ticket_key(&backup).unwrap(), b"sound");
        });
    }
}

/// The newest connection of the other server counts: the memory for batches is that of one.
#[test]
fn a_connection_takes_the_place_of_the_one_before_it() {
    simulate(1, async {
        let network = Network::new();
        let backup = backup(&network, terms(5, None));
        let (first, second) = (link(&network, terms(5, None)), link(&network, terms(5, None)));
        first.ship(1, 0, COPY.to_vec()).await.unwrap();
        second.ship(1, 1, COPY.to_vec()).await.unwrap();
        dray_rt::sleep(Duration::from_millis(10)).await;
        first.ship(1, 2, COPY.to_vec()).await.unwrap();
        assert_eq!(backup.connections.load(Ordering::SeqCst), 3);
    });
}
