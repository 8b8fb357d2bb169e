//! Several clients read and write one value. Some order of their operations must explain all they saw.

use std::sync::Mutex;

use dray_core::{Buf, BufMut, Fut, Write};

use super::{Workload, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::SimClient;
use crate::simulator::history::{
    HistoryEvent, RegisterOp, judge, linearizable, nothing_replaced_is_found,
};
use crate::simulator::machine::ServerMachine;

/// Operations of each client.
const OPERATIONS: u64 = 24;

#[derive(Default)]
pub(super) struct Register {
    /// The server's machine, if it loses power; some of what is written is synced then.
    power: Option<ServerMachine>,
    state: Mutex<(u64, Vec<HistoryEvent>)>,
}

impl Register {
    /// While `machine` loses power.
    pub(super) fn without_power(machine: ServerMachine) -> Register {
        Register { power: Some(machine), ..Register::default() }
    }

    /// Times that the machine has lost power.
    fn losses(&self) -> u64 {
        self.power.as_ref().map_or(0, ServerMachine::deaths)
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
        state.1.push(HistoryEvent {
            from,
            to: u64::MAX,
            kind: RegisterOp::Write(value),
            optional: true,
        });
        state.1.len() - 1
    }

    fn end(&self, index: usize, twice: bool) {
        let to = self.tick();
        let events = &mut lock(&self.state).1;
        events[index].to = to;
        // One that a loss of power cut off from its answer may be seen, undone, and made again.
        if twice {
            let again = events[index];
            events.push(again);
        }
        events[index].optional = false;
    }
}

impl Workload for Register {
    fn name(&self) -> &'static str {
        "register"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn prepare<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let file = client.open(client.root(), "value", libc::O_RDWR).await?;
            let zero = Buf::from(&[0u8; 8][..]);
            let written = file.write(&client.cx(), Write::at(0), zero).await;
            written.map_err(client.failed("write"))?;
            file.close(&client.cx()).await.map_err(client.failed("close"))
        })
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let file = client.open(client.root(), "value", libc::O_RDWR).await?;
            for number in 0..OPERATIONS {
                if pick(3) == 0 {
                    let value = (client.number as u64 + 1) << 32 | number;
                    let (index, losses) = (self.begin(value), self.losses());
                    let bytes = Buf::from(&value.to_le_bytes()[..]);
                    let written = file.write(&client.cx(), Write::at(0), bytes).await;
                    written.map_err(client.failed("write"))?;
                    self.end(index, losses != self.losses());
                    if self.power.is_some() && pick(3) == 0 {
                        file.sync(&client.cx(), true).await.map_err(client.failed("sync"))?;
                    }
                } else {
                    let from = self.tick();
                    let read = file.read(&client.cx(), 0, BufMut::heap(8)).await;
                    let read = read.map_err(|(error, _)| client.failed("read")(error))?;
                    let mut bytes = [0; 8];
                    bytes[..read.len()].copy_from_slice(read.filled());
                    let (kind, to) = (RegisterOp::Read(u64::from_le_bytes(bytes)), self.tick());
                    lock(&self.state).1.push(HistoryEvent { from, to, kind, optional: false });
                }
                think().await;
            }
            file.close(&client.cx()).await.map_err(client.failed("close"))
        })
    }

    fn crashed(&self, _: usize) {}

    fn verify<'a>(&'a self, _: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let events = &lock(&self.state).1;
            let right = match self.power.is_some() {
                true => Some(nothing_replaced_is_found(events)),
                false => linearizable(events),
            };
            judge(right, events)
        })
    }
}
