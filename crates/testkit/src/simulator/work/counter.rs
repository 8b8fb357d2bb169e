//! Several clients count in one file, under a lock. No two clients hold the lock at once, and no count
//! is lost. With flocks some clients only read, under a shared lock, and some release theirs by closing the
//! file.
//!
//! Clients that decide on locks by themselves have two counters there, each with its own range. The server may still know
//! a lock that its holder has given back. It knows nothing of those on the other range.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_core::{
    Buf, BufMut, Cancel, Context, Errno, Fut, Lock, LockFamily, LockKind, LockOwner, LockRange,
    Pid, Write,
};
use dray_rt::sync::watch;
use dray_rt::{sleep, timeout};

use super::{Workload, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, SimFile};

/// Counts of each client.
const COUNTS: u64 = 12;
/// Where clients decide on the locks alone, so many counts follow each other, and the clients rest behind them.
const BURST: u64 = 4;
/// Longer than the first two rests of a file that was fought over, and as much again by chance, ms.
const REST_MS: u64 = 1500;
/// So much later than the first client the others begin at most, us: it decides alone by then, or is about to.
const FOLLOW_US: u64 = 40_000;
/// How long a count under such a lock takes at most, us: most of a burst.
const HOLD_US: u64 = 20_000;

pub(super) struct Counter {
    /// The two families of lock do not see each other: all take the same.
    family: LockFamily,
    /// Clients rest now and then. One of them begins again and decides on the locks alone, and then the others come.
    leased: bool,
    /// Bursts that were begun.
    bursts: watch::Sender<u64>,
    states: [Mutex<State>; 2],
}

/// Of one counter.
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

/// Where a counter is in the file.
fn offset(counter: usize) -> u64 {
    8 * counter as u64
}

fn locking(family: LockFamily, kind: LockKind, (client, counter): (&SimClient, usize)) -> Lock {
    let range = match family {
        LockFamily::Flock => LockRange::ALL,
        LockFamily::Posix => LockRange { start: offset(counter), end: offset(counter) + 7 },
    };
    let pid = Pid(client.number as u32);
    Lock { family, kind, range, owner: LockOwner::own(client.number as u64 + 100), pid }
}

impl Counter {
    /// With locks of this family.
    pub(super) fn under(family: LockFamily) -> Counter {
        let (bursts, _) = watch::channel(0);
        Counter { family, leased: false, bursts, states: Default::default() }
    }

    /// With fcntl locks on which clients decide by themselves.
    pub(super) fn under_leases() -> Counter {
        Counter { leased: true, ..Counter::under(LockFamily::Posix) }
    }

    /// Waits for the next burst, or begins it. Answers whether it has begun it.
    async fn rest(&self) -> bool {
        let mut bursts = self.bursts.subscribe();
        let before = *bursts.borrow();
        let rest = Duration::from_millis(REST_MS + pick(REST_MS));
        let follows = timeout(rest, bursts.wait_for(|begun| *begun != before)).await.is_ok();
        match follows {
            true => sleep(Duration::from_micros(pick(FOLLOW_US))).await,
            false => _ = self.bursts.send_replace(before + 1),
        }
        !follows
    }

    /// Looks at the file under a shared lock.
    async fn look(&self, client: &SimClient, file: &SimFile) -> Outcome<()> {
        let state = &self.states[0];
        {
            let mut state = lock(state);
            if let Some(other) = state.holder {
                return Err(format!("{other} and {} have the lock at once", client.number));
            }
            state.readers.insert(client.number);
        }
        let before = read(client, file, 0).await?;
        think().await;
        let after = read(client, file, 0).await?;
        lock(state).readers.remove(&client.number);
        match before == after {
            true => Ok(()),
            false => Err(format!("{before} became {after} under a shared lock")),
        }
    }

    async fn count(&self, client: &SimClient, file: &SimFile, counter: usize) -> Outcome<()> {
        let state = &self.states[counter];
        {
            let mut state = lock(state);
            let reader = state.readers.first().copied();
            if let Some(other) = state.holder.replace(client.number).or(reader) {
                return Err(format!("{other} and {} have the lock at once", client.number));
            }
        }
        let next = read(client, file, counter).await? + 1;
        match self.leased {
            true => sleep(Duration::from_micros(pick(HOLD_US))).await,
            false => think().await,
        }
        lock(state).writing.push(client.number);
        let bytes = Buf::from(&next.to_le_bytes()[..]);
        let written = file.write(&client.cx(), Write::at(offset(counter)), bytes).await;
        written.map_err(client.failed("count"))?;
        let mut state = lock(state);
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

async fn read(client: &SimClient, file: &SimFile, counter: usize) -> Outcome<u64> {
    let read = file.read(&client.cx(), offset(counter), BufMut::heap(8)).await;
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
                let begins = self.leased && counted.is_multiple_of(BURST) && self.rest().await;
                let shared = flocks && pick(3) == 0;
                let kind = if shared { LockKind::Shared } else { LockKind::Exclusive };
                // The server knows the first lock of a burst, and mostly not those on which clients meet.
                let counter = usize::from(self.leased && !begins && pick(4) > 0);
                let wanted = locking(self.family, kind, (client, counter));
                if self.take(client, &file, wanted).await? {
                    match shared {
                        true => self.look(client, &file).await?,
                        false => self.count(client, &file, counter).await?,
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
            }
            file.close(&client.cx()).await.map_err(client.failed("close"))
        })
    }

    fn crashed(&self, number: usize) {
        for state in &self.states {
            let mut state = lock(state);
            if state.holder == Some(number) {
                state.holder = None;
            }
            state.readers.remove(&number);
            let writing = state.writing.iter().filter(|other| **other == number).count();
            state.uncertain += writing as u64;
        }
    }

    fn verify<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let file = client.open(client.root(), "counter", libc::O_RDONLY).await?;
            let mut found = [0; 2];
            for (counter, found) in found.iter_mut().enumerate() {
                *found = read(client, &file, counter).await?;
            }
            file.close(&client.cx()).await.map_err(client.failed("close"))?;
            for (found, state) in found.into_iter().zip(&self.states) {
                let state = lock(state);
                let most = state.acknowledged + state.uncertain;
                if !(state.acknowledged..=most).contains(&found) {
                    let acknowledged = state.acknowledged;
                    return Err(format!(
                        "counted to {found}, acknowledged {acknowledged} to {most}"
                    ));
                }
            }
            Ok(())
        })
    }
}
