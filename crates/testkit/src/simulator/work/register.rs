//! Several clients read and write one value, and what they saw could have happened.

use std::sync::Mutex;

use dray_core::{Buf, BufMut, Fut, Write};

use super::{Work, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::Client;
use crate::simulator::history::{Event, Kind, linearizable, nothing_replaced_is_found};
use crate::simulator::machine::Machine;

/// Operations of each client.
const OPERATIONS: u64 = 12;

pub(super) struct Register {
    machine: Machine,
    /// The machine loses power, and some of what is written is synced.
    syncs: bool,
    state: Mutex<(u64, Vec<Event>)>,
}

impl Register {
    pub(super) fn new(machine: Machine, syncs: bool) -> Register {
        Register { machine, syncs, state: Mutex::default() }
    }

    fn tick(&self) -> u64 {
        let mut state = lock(&self.state);
        state.0 += 1;
        state.0
    }

    /// Notes a write that is asked for; until it is answered it may happen or not.
    fn begin(&self, value: u64) -> usize {
        let from = self.tick();
        let mut state = lock(&self.state);
        state.1.push(Event { from, to: u64::MAX, kind: Kind::Write(value), optional: true });
        state.1.len() - 1
    }

    fn end(&self, index: usize, twice: bool) {
        let to = self.tick();
        let events = &mut lock(&self.state).1;
        events[index].to = to;
        // A plain write that the server's death cut off from its answer is made again.
        if twice {
            let again = events[index];
            events.push(again);
        }
        events[index].optional = false;
    }
}

impl Work for Register {
    fn name(&self) -> &'static str {
        "register"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn prepare<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let file = client.open(client.root(), "value", libc::O_RDWR).await?;
            let zero = Buf::from(&[0u8; 8][..]);
            let written = file.write(&client.cx(), Write::at(0), zero).await;
            written.map_err(client.failed("write"))?;
            file.close(&client.cx()).await.map_err(client.failed("close"))
        })
    }

    fn run<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let file = client.open(client.root(), "value", libc::O_RDWR).await?;
            for number in 0..OPERATIONS {
                if pick(3) == 0 {
                    let value = (client.number as u64 + 1) << 32 | number;
                    let (index, deaths) = (self.begin(value), self.machine.deaths());
                    let bytes = Buf::from(&value.to_le_bytes()[..]);
                    let written = file.write(&client.cx(), Write::at(0), bytes).await;
                    written.map_err(client.failed("write"))?;
                    self.end(index, deaths != self.machine.deaths());
                    if self.syncs && pick(3) == 0 {
                        file.sync(&client.cx(), true).await.map_err(client.failed("sync"))?;
                    }
                } else {
                    let from = self.tick();
                    let read = file.read(&client.cx(), 0, BufMut::heap(8)).await;
                    let read = read.map_err(|(error, _)| client.failed("read")(error))?;
                    let mut bytes = [0; 8];
                    bytes[..read.len()].copy_from_slice(read.filled());
                    let (kind, to) = (Kind::Read(u64::from_le_bytes(bytes)), self.tick());
                    lock(&self.state).1.push(Event { from, to, kind, optional: false });
                }
                think().await;
            }
            file.close(&client.cx()).await.map_err(client.failed("close"))
        })
    }

    fn crashed(&self, _: usize) {}

    fn verify<'a>(&'a self, _: &'a Client) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let events = &lock(&self.state).1;
            let right = match self.syncs {
                true => nothing_replaced_is_found(events),
                false => linearizable(events),
            };
            if right {
                return Ok(());
            }
            Err(format!("no order of these reads and writes explains them: {events:#?}"))
        })
    }
}
