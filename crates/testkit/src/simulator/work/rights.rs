//! One client gives and takes the right to a file; the others open it. Who begins to open it
//! after the right was taken, and before it is given again, must not succeed, whatever it has
//! looked up before.

use std::sync::Mutex;

use dray_core::{Context, CreateHow, Errno, FileSystem, Fut, OpenHow, SetAttr};

use super::{Workload, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, name};
use crate::step::identity;

/// Changes of the right, and openings of each client.
const TIMES: u64 = 60;
const FILE: &str = "guarded";

/// What the clients can know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RightState {
    /// The right was taken, and is not being given.
    taken: bool,
    /// Changes so far.
    changes: u64,
}

#[derive(Default)]
pub(super) struct Rights {
    right: Mutex<RightState>,
}

impl Rights {
    fn record(&self, taken: bool) {
        let mut right = lock(&self.right);
        *right = RightState { taken, changes: right.changes + 1 };
    }

    async fn change(&self, client: &SimClient) -> Outcome<()> {
        let found = client.lookup(client.root(), FILE).await;
        let id = found.map_err(client.failed("look up"))?.id;
        for _ in 0..TIMES {
            for mode in [0o600, 0o644] {
                self.record(false);
                let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
                let changed = client.fs.setattr(&client.cx(), id, set).await;
                changed.map_err(client.failed("chmod"))?;
                self.record(mode == 0o600);
                think().await;
            }
        }
        Ok(())
    }

    async fn open(&self, client: &SimClient) -> Outcome<()> {
        let user = || Context { who: identity(1), ..client.cx() };
        for _ in 0..TIMES {
            let found = client.fs.lookup(&user(), client.root(), &name(FILE)).await;
            let id = found.map_err(client.failed("look up"))?.id;
            if pick(2) == 0 {
                think().await;
            }
            let before = *lock(&self.right);
            match client.fs.open(&user(), id, OpenHow::READ).await {
                Ok(file) => {
                    let after = *lock(&self.right);
                    if before.taken && before == after {
                        return Err(format!("client {} opened without right", client.number));
                    }
                    let closed = file.close(&user()).await;
                    closed.map_err(client.failed("close"))?;
                }
                Err(error) if error.errno() == Errno::EACCES => {}
                Err(error) => return Err(client.failed("open")(error)),
            }
        }
        Ok(())
    }
}

impl Workload for Rights {
    fn name(&self) -> &'static str {
        "rights"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn prepare<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let how = CreateHow { open: OpenHow::READ, mode: 0o644, exclusive: true };
            let (cx, name) = (client.cx(), name(FILE));
            let made = client.fs.create(&cx, client.root(), &name, how).await;
            let (_, file) = made.map_err(client.failed("create"))?;
            file.close(&cx).await.map_err(client.failed("close"))
        })
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            match client.number {
                0 => self.change(client).await,
                _ => self.open(client).await,
            }
        })
    }

    fn crashed(&self, number: usize) {
        if number == 0 {
            self.record(false); // nobody knows
        }
    }

    fn verify<'a>(&'a self, _: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async { Ok(()) })
    }
}
