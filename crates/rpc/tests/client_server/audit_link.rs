//! Readers of audits at a server, and other peers that connect there.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use crate::common::{key, simulate};
use dray_core::{BufMut, Peer};
use dray_fabric::{Connect, Connection, Listener, Sink, local};
use dray_rpc::client::{AuditError, AuditLink};
use dray_rpc::server::{AuditExport, AuditPort, AuditReader, MemoryJournal, Server, ServerOptions};
use dray_rpc::wire::{
    AuditCall, AuditHello, AuditPart, AuditReply, AuditWanted, AuditWelcome, Auth, Proof,
    VERSION_MAX, VERSION_MIN,
};

/// A log of records that are their numbers. It has as many as the test sets.
struct Numbers(Arc<AtomicU64>);

impl AuditReader for Numbers {
    fn answer(&mut self, call: &AuditCall) -> (AuditReply, Vec<u8>) {
        let AuditCall::Read { from, .. } = call else {
            let (errno, message) = (22, "only reads".to_owned());
            return (AuditReply::Failed { errno, message }, Vec::new());
        };
        let end = self.0.load(Ordering::SeqCst);
        let records = (*from..end).map(|number| number as u8).collect();
        let part = AuditPart {
            next_index: end.max(*from),
            log: Some(1),
            more: false,
            complete_us: 0,
            read_bytes: 0,
        };
        (AuditReply::Part(part), records)
    }
}

/// A server with such a log of the export `home`. Both ends are within the process, where the last words
/// of a connection arrive before its end.
fn served(text: Option<&str>) -> (Arc<AtomicU64>, Arc<dyn Connect>) {
    let end = Arc::new(AtomicU64::new(1));
    let log = end.clone();
    let export = AuditExport {
        allow: Vec::new(),
        trusts_root: false,
        readers: Vec::new(),
        open: Box::new(move || Box::new(Numbers(log.clone()))),
    };
    let exports = BTreeMap::from([("home".to_owned(), export)]);
    let port = Arc::new(AuditPort::new(text.and_then(key), exports));
    let limits =
        Server::new(ServerOptions::default(), Vec::new(), Arc::new(MemoryJournal::default()));
    let (listener, connector) = local::listen();
    dray_rt::spawn(async move {
        while let Ok(incoming) = listener.accept().await {
            let connection = incoming.establish().unwrap();
            let Some(admission) = limits.admit(Peer::Local) else { continue };
            dray_rt::spawn(port.clone().serve(connection, admission));
        }
    });
    (end, Arc::new(connector))
}

fn read(from: u64, wait_ms: u32) -> AuditCall {
    let wanted = AuditWanted {
        kinds: String::new(),
        uid: None,
        job: None,
        path: None,
        from_us: None,
        to_us: None,
        denied: false,
    };
    AuditCall::Read { from, wanted, wait_ms }
}

const KEY: &str = "the key of the site";

#[test]
fn records_come_once_there_are_some() {
    simulate(1, async {
        let (end, connector) = served(Some(KEY));
        let mut link = AuditLink::connect(&*connector, "home", key(KEY)).await.unwrap();
        let begun = dray_rt::now();
        let (_, records) = link.ask(&read(1, 500)).await.unwrap();
        assert!(records.is_empty() && begun.elapsed() >= Duration::from_millis(500));
        dray_rt::spawn(async move {
            dray_rt::sleep(Duration::from_millis(200)).await;
            end.store(4, Ordering::SeqCst);
        });
        let begun = dray_rt::now();
        let (reply, records) = link.ask(&read(1, 5000)).await.unwrap();
        assert!(matches!(reply, AuditReply::Part(part) if part.next_index == 4));
        assert_eq!(records, [1, 2, 3]);
        assert!(begun.elapsed() < Duration::from_millis(300));
        let (reply, _) = link.ask(&AuditCall::Summary).await.unwrap();
        assert!(matches!(reply, AuditReply::Failed { message, .. } if message == "only reads"));
    });
}

// proves: P207
#[test]
fn a_reader_with_another_key_or_none_reads_nothing() {
    simulate(1, async {
        let (_, connector) = served(Some(KEY));
        for (theirs, words) in
            [(None, "wants a shared key"), (Some("another one, also long"), "key")]
        {
            let link = AuditLink::connect(&*connector, "home", theirs.and_then(key)).await;
            let error = link.err().expect("the key is wrong");
            assert!(matches!(&error, AuditError::Refused(why) if why.contains(words)), "{error}");
        }
        let link = AuditLink::connect(&*connector, "work", key(KEY)).await;
        let error = link.err().expect("there is no such audit");
        assert!(error.to_string().contains("no export `work`"), "{error}");
    });
}

/// Says what a reader of ours would not: a proof that is none, and two questions at once.
struct UnauthenticatedPeer {
    connection: Arc<dyn Connection>,
    answers: Arc<AtomicU64>,
    welcomed: Arc<AtomicBool>,
}

impl Sink for UnauthenticatedPeer {
    fn poll_place(
        &mut self,
        _: &mut TaskContext<'_>,
        _: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Ok(BufMut::heap(data_bytes)))
    }

    fn frame(&mut self, head: &[u8], _: Option<BufMut>) -> io::Result<()> {
        if AuditWelcome::from_message(head).is_ok() {
            self.welcomed.store(true, Ordering::SeqCst);
        }
        if self.answers.fetch_add(1, Ordering::SeqCst) > 0 {
            return Ok(());
        }
        let proof = Proof {
            proof: [0; 32],
            session: 0,
            session_proof: [0; 32],
            replaces: 0,
            definition: 0,
        };
        self.connection.send(&proof.message(), None)?;
        for _ in 0..2 {
            let mut head = Vec::new();
            read(1, 10_000).put_message(&mut head);
            self.connection.send(&head, None)?;
        }
        Ok(())
    }
}

/// Answers that such a peer gets, and whether a welcome is among these. The server ends the connection.
async fn turned_away(text: Option<&str>) -> (u64, bool) {
    let (_, connector) = served(text);
    let connection = connector.connect().await.unwrap();
    let (answers, welcomed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let mut sink = UnauthenticatedPeer {
        connection: connection.clone(),
        answers: answers.clone(),
        welcomed: welcomed.clone(),
    };
    let hello = AuditHello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        features: 0,
        auth: if text.is_some() { Auth::Psk } else { Auth::None },
        nonce: [7; 32],
        export: "home".into(),
        software: String::new(),
    };
    connection.send(&hello.message(), None).unwrap();
    let begun = dray_rt::now();
    connection.run(&mut sink).await;
    assert!(begun.elapsed() < Duration::from_secs(5), "the first question waits for longer");
    (answers.load(Ordering::SeqCst), welcomed.load(Ordering::SeqCst))
}

#[test]
fn a_second_question_before_the_answer_ends_the_connection() {
    let (answers, welcomed) = simulate(1, turned_away(None));
    assert!(welcomed && answers == 2, "{answers}: challenge and welcome");
}

// proves: P207
#[test]
fn a_reader_that_has_not_proved_the_key_is_not_welcomed_and_its_questions_have_no_answers() {
    let (answers, welcomed) = simulate(1, turned_away(Some(KEY)));
    assert!(!welcomed && answers == 2, "{answers}: challenge and refusal");
}
