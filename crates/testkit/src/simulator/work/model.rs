//! Each client works in a directory of its own, where everything must be as in the model.

use std::sync::Arc;

use dray_core::{FileSystem, Fut, Make};
use dray_rt::random_bytes;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::Workload;
use crate::conformance::{FsTarget, run};
use crate::model::Quirks;
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, name};
use crate::step::{Step, sequences};

/// Steps of each client.
const STEPS: std::ops::Range<usize> = 20..60;

pub(super) struct Disjoint {
    clients: usize,
}

impl Disjoint {
    pub(super) fn new(clients: usize) -> Disjoint {
        Disjoint { clients }
    }
}

/// A sequence that the simulation's seed decides.
pub(in crate::simulator) fn draw(steps: std::ops::Range<usize>) -> Vec<Step> {
    let mut seed = [0; 32];
    random_bytes(&mut seed);
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    sequences(steps).new_tree(&mut runner).expect("every draw is a sequence").current()
}

impl Workload for Disjoint {
    fn name(&self) -> &'static str {
        "model"
    }

    fn bears_crashes(&self) -> bool {
        false
    }

    fn prepare<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            for number in 0..self.clients {
                let what = Make::Directory { mode: 0o777 };
                let of = name(&format!("of{number}"));
                let made = client.fs.make(&client.cx(), client.root(), &of, what).await;
                made.map_err(client.failed("prepare"))?;
            }
            Ok(())
        })
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let root = client.lookup(client.root(), &format!("of{}", client.number)).await;
            let root = root.map_err(client.failed("find a directory"))?.id;
            let mut target = FsTarget::at(root, vec![Arc::new(client.fs.clone())], Quirks::NONE);
            let result = run(&mut target, &draw(STEPS)).await;
            target.close_all().await;
            result.map_err(|divergence| format!("client {}:\n{divergence:?}", client.number))
        })
    }

    fn crashed(&self, _: usize) {}

    fn verify<'a>(&'a self, _: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async { Ok(()) })
    }
}
