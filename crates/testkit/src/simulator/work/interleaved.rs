//! One sequence of steps through all clients in turn. Every client sees what the model has.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_core::{FileSystem, Fut, Make};
use dray_rt::sleep;

use super::{Workload, lock, model};
use crate::conformance::{FsTarget, run};
use crate::model::Quirks;
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, name};

/// Steps of the sequence.
const STEPS: std::ops::Range<usize> = 30..90;

pub(in crate::simulator) struct Interleaved {
    clients: usize,
    ready: Mutex<Vec<Arc<dyn FileSystem>>>,
}

impl Interleaved {
    pub(in crate::simulator) fn new(clients: usize) -> Interleaved {
        Interleaved { clients, ready: Mutex::default() }
    }
}

impl Workload for Interleaved {
    fn name(&self) -> &'static str {
        "interleaved"
    }

    fn bears_crashes(&self) -> bool {
        false
    }

    fn prepare<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let (what, of) = (Make::Directory { mode: 0o777 }, name("shared"));
            let made = client.fs.make(&client.cx(), client.root(), &of, what).await;
            made.map(drop).map_err(client.failed("prepare"))
        })
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            lock(&self.ready).push(Arc::new(client.fs.clone()));
            if client.number > 0 {
                return Ok(()); // the first client's task speaks for all
            }
            while lock(&self.ready).len() < self.clients {
                sleep(Duration::from_millis(1)).await;
            }
            let root = client.lookup(client.root(), "shared").await;
            let root = root.map_err(client.failed("find a directory"))?.id;
            let clients = std::mem::take(&mut *lock(&self.ready));
            let mut target = FsTarget::at(root, clients, Quirks::NONE);
            let result = run(&mut target, &model::draw(STEPS)).await;
            target.close_all().await;
            result.map_err(|divergence| format!("{divergence:?}"))
        })
    }

    fn crashed(&self, _: usize) {}

    fn verify<'a>(&'a self, _: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async { Ok(()) })
    }
}
