//! Generated sequences, held against the model.

use std::path::Path;
use std::sync::Arc;

use dray_core::FileSystem;
use dray_testkit::conformance::{FsTarget, run};
use dray_testkit::fixture::{self, TempDir};
use dray_testkit::model::Quirks;
use dray_testkit::step::{Step, sequences};
use proptest::prelude::any;

use super::posix;

/// Steps of one sequence.
const STEPS: std::ops::Range<usize> = 1..120;

/// Runs a case for each of some generated sequences; the shortest that fails is reported.
pub fn generated(default_cases: u32, case: impl Fn(&[Step]) -> Result<(), String>) {
    generated_with_seeds(default_cases, |_, steps| case(steps));
}

/// `case` is given a seed for its simulation, too.
pub fn generated_with_seeds(default_cases: u32, case: impl Fn(u64, &[Step]) -> Result<(), String>) {
    let inputs = (any::<u64>(), sequences(STEPS));
    fixture::generated(&inputs, default_cases, 5_000, |(seed, steps)| {
        case(seed, &steps).map_err(|why| format!("seed {seed}:\n{why}"))
    });
}

/// Carries the steps out through these clients, and on the model.
pub async fn agree(
    clients: Vec<Arc<dyn FileSystem>>,
    quirks: Quirks,
    steps: &[Step],
) -> Result<(), String> {
    let mut target = FsTarget::new(clients, quirks);
    let result = run(&mut target, steps).await.map_err(|divergence| format!("{divergence:?}"));
    target.close_all().await;
    result
}

/// Each case in a directory of its own, which is served; it also gets one for sockets.
pub fn on_posix(
    root: &Path,
    default_cases: u32,
    case: impl Fn(Arc<dyn FileSystem>, &Path, &[Step]) -> Result<(), String>,
) {
    let sockets = TempDir::new("stacks").unwrap();
    generated(default_cases, |steps| {
        let words = |error: std::io::Error| error.to_string();
        let (dir, socket) = (root.join("case"), sockets.path().join("case"));
        std::fs::create_dir(&dir).map_err(words)?;
        std::fs::create_dir(&socket).map_err(words)?;
        let result = case(posix(&dir), &socket, steps);
        dray_backends::posix::release().map_err(|error| error.to_string())?;
        std::fs::remove_dir_all(&dir).map_err(words)?;
        std::fs::remove_dir_all(&socket).map_err(words)?;
        result
    });
}
