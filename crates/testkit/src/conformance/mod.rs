//! Anything that serves files, held against the model and against its own promises.
//!
//! - [`run`] carries out a sequence of [`Step`]s on a [`StepTarget`] and on the model side by side.
//!   It compares every answer, and compares the whole trees at the end.
//! - [`FsTarget`] is one or more `FileSystem` objects over one store: one or several
//!   clients whose steps come interleaved.
//! - [`PathTarget`] is one or more directories over one store, used by system calls: a
//!   bare file system, or mounts.
//! - [`FrontEnds`] is several of these over one store, each a client of it.
//! - [`suite()`] are directed tests, one a promise of the traits' documentation.
//!
//! `tests/model_checks/file_systems.rs` shows how they are used.

mod front_ends;
mod fs_target;
mod path_target;
mod suite;

use std::fmt;

use dray_core::{FileType, Fut};

use crate::model::{Model, Quirks, StepOutcome};
use crate::step::{Action, Step};

pub use front_ends::FrontEnds;
pub use fs_target::FsTarget;
pub use path_target::PathTarget;
pub use suite::{OptionalFeatures, suite, suite_without};

/// Bytes read of a file when trees are compared: more than any sequence writes.
const WHOLE_FILE_BYTES: u32 = 1 << 17;

/// Something that steps can be carried out on.
pub trait StepTarget: Send {
    /// What the model has to know about it.
    fn quirks(&self) -> Quirks;

    /// Whether the step makes no sense here; it is then left out on both sides.
    fn skips(&self, step: &Step) -> bool;

    /// Makes the root fit for the sequences: open to all, mode 0777. The root must be
    /// empty. Answers an error in words.
    fn prepare(&mut self) -> Fut<'_, Result<(), String>>;

    /// Carries out one step.
    fn apply<'a>(&'a mut self, step: &'a Step) -> Fut<'a, StepOutcome>;
}

/// Target and model disagree.
pub struct Divergence {
    /// Number of the step in the sequence; behind its end: when the trees were compared.
    pub at: usize,
    /// The step.
    pub step: Step,
    /// What the model answers.
    pub expected: StepOutcome,
    /// What the target answered.
    pub actual: StepOutcome,
    /// Every step up to this one, to be pasted into a test.
    pub steps: Vec<Step>,
}

impl fmt::Debug for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, step) in self.steps.iter().enumerate() {
            writeln!(f, "  {index}: {step:?}")?;
        }
        writeln!(f, "step {} {:?}", self.at, self.step)?;
        write!(f, "  expected {:?}\n  actual   {:?}", self.expected, self.actual)
    }
}

/// Carries out `steps` on an empty `target` and on the model, then compares the whole
/// trees. The first disagreement ends it.
///
/// # Panics
/// If the target cannot be prepared.
pub async fn run(target: &mut dyn StepTarget, steps: &[Step]) -> Result<(), Box<Divergence>> {
    if let Err(why) = target.prepare().await {
        panic!("the target is not fit for use: {why}");
    }
    let mut model = Model::new(target.quirks());
    for (at, step) in steps.iter().enumerate() {
        check(target, &mut model, step, at, steps).await?;
    }
    for (path, kind) in model.paths() {
        let mut looks = vec![Action::Lstat { path: path.clone() }];
        looks.push(Action::Listxattr { path: path.clone() });
        match kind {
            FileType::Directory => looks.push(Action::List { path }),
            FileType::Symlink => looks.push(Action::Readlink { path }),
            FileType::Regular => {
                looks.push(Action::Open { path, flags: libc::O_RDONLY, slot: 0 });
                looks.push(Action::Read { slot: 0, at: 0, len: WHOLE_FILE_BYTES });
            }
            _ => {}
        }
        for action in looks {
            // Every client must see the same tree.
            for client in 0..crate::step::CLIENTS {
                let step = Step { client, who: 0, action: action.clone() };
                check(target, &mut model, &step, steps.len(), steps).await?;
            }
        }
    }
    Ok(())
}

async fn check(
    target: &mut dyn StepTarget,
    model: &mut Model,
    step: &Step,
    at: usize,
    steps: &[Step],
) -> Result<(), Box<Divergence>> {
    if target.skips(step) || model.leaves_out(&step.action) {
        return Ok(());
    }
    let expected = model.apply(step);
    let actual = target.apply(step).await;
    if agree(model, step, &expected, &actual) {
        return Ok(());
    }
    let steps = steps.iter().take(at + 1).cloned().collect();
    Err(Box::new(Divergence { at, step: step.clone(), expected, actual, steps }))
}

fn agree(model: &Model, step: &Step, expected: &StepOutcome, actual: &StepOutcome) -> bool {
    match (&step.action, expected, actual) {
        (&Action::Seek { slot, at, hole }, StepOutcome::Done, _) => {
            model.seek_allowed(slot, at, hole, actual)
        }
        (_, StepOutcome::Failed(expected), StepOutcome::Failed(actual)) => {
            model.failure_allowed(&step.action, *expected, *actual)
        }
        (_, StepOutcome::Stat(expected), StepOutcome::Stat(actual)) => {
            let mut expected = *expected;
            if expected.mtime_sec.is_none() {
                expected.mtime_sec = actual.mtime_sec;
            }
            expected == *actual
        }
        _ => expected == actual,
    }
}
