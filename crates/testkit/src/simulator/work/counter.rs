//! Several clients count in one file, under a lock. No two clients hold the lock at once, and no count
//! is lost. With flocks some clients only read, under a shared lock, and some release theirs by closing the
//! file.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_core::{
    Buf, BufMut, Cancel, Context, Errno, Fut, Lock, LockFamily, LockKind, LockOwner, LockRange,
    Pid, Write,
};
use dray_rt::sleep;

use super::{Workload, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, SimFile};

/// Counts of each client.
const COUNTS: u64 = 12;

pub(super) struct Counter {
    /// The two families of lock do not see each other: all take the same.
    family: LockFamily,
    /// Clients rest now and then, so that one of them decides on the locks alone for a while.
    leased: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    holder: Option<usize>,
    /// Who has a shared lock.
    readers: BTreeSet<usize>,
    acknowledged: u64,
    /// Counts of clients that crashed before they got an answer.
    uncertain: u64,
    /// Clients between the write of a count and its answer.
    writing: Vec<usize>,
}

fn locking(family: LockFamily, kind: LockKind, client: &SimClient) -> Lock {
    let range = match family {
        LockFamily::Flock => LockRange::ALL,
        LockFamily::Posix => LockRange { start: 0, end: 7 },
    };
    let pid = Pid(client.number as u32);
    Lock { family, kind, range, owner: LockOwner::own(client.number as u64 + 100), pid }
}

impl Counter {
    /// With locks of this family.
    pub(super) fn under(family: LockFamily) -> Counter {
        Counter { family, leased: false, state: Mutex::default() }
    }

    /// With fcntl locks on which clients decide by themselves.
    pub(super) fn under_leases() -> Counter {
        Counter { leased: true, ..Counter::under(LockFamily::Posix) }
    }

    /// Looks at the file under a shared lock.
    async fn look(&self, client: &SimClient, file: &SimFile) -> Outcome<()> {
        {
            let mut state = lock(&self.state);
            if let Some(other) = state.holder {
                return Err(format!("{other} and {} have the lock at once", client.number));
            }
            state.readers.insert(client.number);
        }
        let before = read(client, file).await?;
        think().await;
        let after = read(client, file).await?;
        lock(&self.state).readers.remove(&client.number);
        match before == after {
            true => Ok(()),
            false => Err(format!("{before} became {after} under a shared lock")),
        }
    }

    async fn count(&self, client: &SimClient, file: &SimFile) -> Outcome<()> {
        {
            let mut state = lock(&self.state);
            let reader = state.readers.first().copied();
            if let Some(other) = state.holder.replace(client.number).or(reader) {
                return Err(format!("{other} and {} have the lock at once", client.number));
            }
        }
        let next = read(client, file).await? + 1;
        think().await;
        lock(&self.state).writing.push(client.number);
        let bytes = Buf::from(&next.to_le_bytes()[..]);
        let written = file.write(&client.cx(), Write::at(0), bytes).await;
        written.map_err(client.failed("count"))?;
        let mut state = lock(&self.state);
        state.writing.retain(|number| *number != client.number);
        state.acknowledged += 1;
        state.holder = None;
        Ok(())
    }

    /// Takes the lock; false if the wait was given up.
    async fn take(&self, client: &SimClient, file: &SimFile, lock: Lock) -> Outcome<bool> {
        let cancel = Arc::new(Cancel::default());
        let cx = Context { cancel: Some(cancel.clone()), ..client.cx() };
        if pick(4) == 0 {
            let wait = Duration::from_micros(pick(30_000));
            dray_rt::spawn(async move {
                sleep(wait).await;
                cancel.set();
            });
        }
        match file.lock(&cx, lock, true).await {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Errno::EINTR => Ok(false),
            Err(error) => Err(client.failed("lock")(error)),
        }
    }
}

async fn read(client: &SimClient, file: &SimFile) -> Outcome<u64> {
    let read = file.read(&client.cx(), 0, BufMut::heap(8)).await;
    let read = read.map_err(|(error, _)| client.failed("read")(error))?;
    let mut bytes = [0; 8];
    bytes[..read.len()].copy_from_slice(read.filled());
    Ok(u64::from_le_bytes(bytes))
}

impl Workload for Counter {
    fn name(&self) -> &'static str {
        match self.family {
            LockFamily::Posix if self.leased => "locked",
            LockFamily::Posix => "counter",
            LockFamily::Flock => "flocks",
        }
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let mut file = client.open(client.root(), "counter", libc::O_RDWR).await?;
            let (mut counted, flocks) = (0, self.family == LockFamily::Flock);
            while counted < COUNTS {
                let shared = flocks && pick(3) == 0;
                let kind = if shared { LockKind::Shared } else { LockKind::Exclusive };
                let wanted = locking(self.family, kind, client);
                if self.take(client, &file, wanted).await? {
                    match shared {
                        true => self.look(client, &file).await?,
                        false => self.count(client, &file).await?,
                    }
                    counted += u64::from(!shared);
                    let failed = client.failed("unlock");
                    if pick(4) > 0 {
                        let unlock = Lock { kind: LockKind::Unlock, ..wanted };
                        file.lock(&client.cx(), unlock, false).await.map_err(failed)?;
                    } else if flocks {
                        file.close(&client.cx()).await.map_err(failed)?;
                        file = client.open(client.root(), "counter", libc::O_RDWR).await?;
                    } else {
                        file.flush(&client.cx(), wanted.owner).await.map_err(failed)?;
                    }
                }
                think().await;
                if self.leased && pick(3) == 0 {
                    sleep(Duration::from_millis(pick(5_000))).await;
                }
            }
            file.close(&client.cx()).await.map_err(client.failed("close"))
        })
    }

    fn crashed(&self, number: usize) {
        let mut state = lock(&self.state);
        if state.holder == Some(number) {
            state.holder = None;
        }
        state.readers.remove(&number);
        state.uncertain += state.writing.iter().filter(|other| **other == number).count() as u64;
    }

    fn verify<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let file = client.open(client.root(), "counter", libc::O_RDONLY).await?;
            let found = read(client, &file).await?;
            file.close(&client.cx()).await.map_err(client.failed("close"))?;
            let state = lock(&self.state);
            let most = state.acknowledged + state.uncertain;
            if (state.acknowledged..=most).contains(&found) {
                return Ok(());
            }
            Err(format!("counted to {found}, acknowledged {} to {most}", state.acknowledged))
        })
    }
}
