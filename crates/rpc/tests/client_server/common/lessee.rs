//! A client that has leases, by hand: the test decides when it gives them back.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use dray_core::{BufMut, Entry, Errno, FileId, LeaseKinds, NameBuf, Op, RecallItem, Validity};
use dray_fabric::sim::Network;
use dray_fabric::{Connection, Sink};
use dray_rpc::auth::{Key, Role, Transcript};
use dray_rpc::wire::{
    Call, CallHead, Challenge, FEATURE_LEASES, Input, NO_SLOT, NotifyHead, Proof, RecallMessage,
    ReplyHead, Welcome,
};

use super::raw::{NO_PROOF, head, hello, identity, message};

#[derive(Default)]
struct Inbox(Arc<Mutex<VecDeque<Vec<u8>>>>);

impl Sink for Inbox {
    fn poll_place(
        &mut self,
        _: &mut TaskContext<'_>,
        _: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Ok(BufMut::heap(data_bytes)))
    }

    fn frame(&mut self, head: &[u8], _: Option<BufMut>) -> io::Result<()> {
        self.0.lock().unwrap().push_back(head.to_vec());
        Ok(())
    }
}

/// A connection with a session.
pub struct Lessee {
    connection: Arc<dyn Connection>,
    inbox: Arc<Mutex<VecDeque<Vec<u8>>>>,
    pub welcome: Welcome,
    tag: u32,
    sequence: u32,
}

/// As long as a message takes, and more.
const SOON: Duration = Duration::from_millis(20);

impl Lessee {
    /// A new session, or the one of `before`.
    pub async fn connect(network: &Network, before: Option<&Welcome>) -> Lessee {
        Lessee::connect_with(network, before, FEATURE_LEASES).await
    }

    /// The same of a client that asks for no leases.
    pub async fn without_leases(network: &Network, before: Option<&Welcome>) -> Lessee {
        Lessee::connect_with(network, before, 0).await
    }

    /// The same of a client that knows these features.
    pub async fn connect_with(
        network: &Network,
        before: Option<&Welcome>,
        features: u64,
    ) -> Lessee {
        let connection = network.connector("s").connect().await.unwrap();
        let inbox = Inbox::default();
        let (run, frames) = (connection.clone(), inbox.0.clone());
        dray_rt::spawn(async move {
            let mut inbox = inbox;
            run.run(&mut inbox).await;
        });
        let mut said = hello("data");
        said.features = features;
        connection.send(&said.message(), None).unwrap();
        let challenge = Challenge::from_message(&next(&frames).await).unwrap();
        let mut proof = Proof { session: before.map_or(0, |one| one.session), ..NO_PROOF };
        if let Some(before) = before {
            let (hello, wish) = (said.message(), proof.wish());
            let seen = Transcript {
                hello: &hello,
                version: challenge.version,
                features: challenge.features,
                server_nonce: &challenge.nonce,
                wish: &wish,
            };
            proof.session_proof = Key::of_session(&before.secret).prove(Role::Session, seen);
        }
        connection.send(&proof.message(), None).unwrap();
        let welcome = Welcome::from_message(&next(&frames).await).unwrap();
        connection.send(&identity(0), None).unwrap();
        Lessee { connection, inbox: frames, welcome, tag: 0, sequence: 0 }
    }

    /// Sends a call; a change in slot 0.
    pub fn begin(&mut self, call: &Call<'_>) {
        self.tag += 1;
        let mut head = head(call.op(), self.tag);
        if !matches!(call.op(), Op::Lookup | Op::Getattr) {
            self.sequence += 1;
            head = CallHead { slot: 0, sequence: self.sequence, ..head };
        }
        assert!(head.slot == 0 || head.slot == NO_SLOT);
        self.connection.send(&message(&head, call), None).unwrap();
    }

    /// The answer to the last call, if it has come.
    pub fn answer(&self) -> Option<(ReplyHead, Vec<u8>)> {
        let mut inbox = self.inbox.lock().unwrap();
        let is_answer =
            |frame: &Vec<u8>| ReplyHead::split(frame).is_ok_and(|(head, _)| head.tag == self.tag);
        let at = inbox.iter().position(is_answer)?;
        let frame = inbox.remove(at)?;
        ReplyHead::split(&frame).ok().map(|(head, results)| (head, results.to_vec()))
    }

    /// Makes a call and waits for its answer.
    pub async fn ask(&mut self, call: &Call<'_>) -> (ReplyHead, Vec<u8>) {
        self.begin(call);
        loop {
            if let Some(answer) = self.answer() {
                return answer;
            }
            dray_rt::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Makes the last change again, as a client does that has not heard the answer.
    pub async fn ask_again(&mut self, call: &Call<'_>) -> (ReplyHead, Vec<u8>) {
        self.sequence -= 1;
        self.ask(call).await
    }

    /// The entry of a name, or the error and how long the name is absent.
    pub async fn lookup(&mut self, dir: FileId, name: &str) -> Result<Entry, (Errno, bool)> {
        let (head, results) = self.ask(&Call::Lookup { dir, name: name.as_bytes() }).await;
        match head.error() {
            Some(error) => Err((error.errno(), error.absence().is_some())),
            None => Ok(Input::whole(&results).unwrap()),
        }
    }

    /// Recalls that have come and were not looked at.
    pub async fn recalls(&self) -> Vec<RecallMessage> {
        dray_rt::sleep(SOON).await;
        let mut recalls = Vec::new();
        self.inbox.lock().unwrap().retain(|frame| {
            let mut input = Input(frame);
            match NotifyHead::get_message(&mut input) {
                Ok(head) if head.what == NotifyHead::RECALL => {
                    recalls.push(RecallMessage::get(head.tag, &mut input).unwrap());
                    false
                }
                _ => true,
            }
        });
        recalls
    }

    /// Answers recalls.
    pub fn give_back(&self, recalls: &[RecallMessage]) {
        for recall in recalls {
            let mut message = Vec::new();
            RecallMessage::put_answer(recall.number, &mut message);
            self.connection.send(&message, None).unwrap();
        }
    }

    /// Ends the session.
    pub fn say_goodbye(&self) {
        let mut message = Vec::new();
        NotifyHead { what: NotifyHead::GOODBYE, flags: 0, tag: 0 }.put_message(&mut message);
        self.connection.send(&message, None).unwrap();
    }

    /// Whether its connection has ended.
    pub async fn is_cut(&self) -> bool {
        dray_rt::sleep(SOON).await;
        self.connection.send(&identity(0), None).is_err()
    }
}

async fn next(frames: &Mutex<VecDeque<Vec<u8>>>) -> Vec<u8> {
    loop {
        if let Some(frame) = frames.lock().unwrap().pop_front() {
            return frame;
        }
        dray_rt::sleep(Duration::from_millis(1)).await;
    }
}

/// What is leased of a name and of attributes.
pub fn leased(validity: Validity) -> (bool, bool) {
    (validity.name.is_some(), validity.attributes.is_some())
}

/// Recalls of these items, whatever their numbers.
pub fn items(recalls: &[RecallMessage]) -> Vec<RecallItem> {
    recalls.iter().flat_map(|recall| recall.items.clone()).collect()
}

/// The recall of a file's attributes.
pub fn attributes(id: FileId) -> RecallItem {
    RecallItem { id, kinds: LeaseKinds::ATTRIBUTES, name: None }
}

/// The recall of one name in a directory.
pub fn one_name(id: FileId, name: &str) -> RecallItem {
    RecallItem { id, kinds: LeaseKinds::NAMES, name: NameBuf::new(name.as_bytes()).ok() }
}
