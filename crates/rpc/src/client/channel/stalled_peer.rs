//! For tests: a connection to a peer that reads nothing.

use std::io;
use std::sync::Mutex;

use dray_core::{Buf, Fut, Op};
use dray_fabric::{Connection, Peer, Sink, Unfinished};

use crate::wire::{CallHead, Input};

/// Notes which calls are sent, holds what goes with them, and answers nothing.
#[derive(Default)]
pub(crate) struct StalledPeer {
    calls: Mutex<Vec<(Op, Option<u32>)>>,
    held: Mutex<Vec<Buf>>,
}

impl StalledPeer {
    pub(crate) fn sent(&self) -> Vec<Op> {
        self.calls.lock().unwrap().iter().map(|(op, _)| *op).collect()
    }

    /// Of those that are to be answered.
    pub(crate) fn tags(&self) -> Vec<u32> {
        self.calls.lock().unwrap().iter().filter_map(|(_, tag)| *tag).collect()
    }

    pub(crate) fn held(&self) -> usize {
        self.held.lock().unwrap().len()
    }
}

impl Connection for StalledPeer {
    fn send(&self, head: &[u8], data: Option<Buf>) -> io::Result<()> {
        if let Ok(call) = CallHead::get_message(&mut Input(head)) {
            let answered = call.flags & CallHead::ONE_WAY == 0;
            self.calls.lock().unwrap().push((call.op, answered.then_some(call.tag)));
        }
        self.held.lock().unwrap().extend(data);
        Ok(())
    }
    fn notify(&self, head: &[u8]) -> io::Result<()> {
        self.send(head, None)
    }
    fn let_go(&self, data: &Buf) {
        self.held.lock().unwrap().retain(|held| held.as_ptr() != data.as_ptr());
    }
    fn run<'a>(&'a self, _: &'a mut dyn Sink) -> Fut<'a, io::Error> {
        Box::pin(std::future::pending())
    }
    fn close(&self) {}
    fn queued_frames(&self) -> usize {
        0
    }
    fn unfinished(&self) -> Unfinished {
        Unfinished::default()
    }
    fn peer(&self) -> Peer {
        Peer::Local
    }
}
