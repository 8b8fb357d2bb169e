//! Thousands of processes wait for locks of one file and then give up, as those of a killed job do. The cost
//! for other clients of the server is measured.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dray_core::{
    Cancel, Context, FileSystem, Lock, LockFamily, LockKind, LockOwner, LockRange, Name, OpenFile,
    OpenHow, Pid,
};
use dray_fabric::Address;
use dray_rpc::client::RemoteFs;
use dray_rt::{DriverKind, Executor, sleep, spawn_join};

use crate::sessions::client;
use crate::{CommandResult, context};

/// Calls of one session that wait: fewer than a server allows at once, so that giving up gets through.
const WAITERS_EACH: usize = 100;
/// Each wants so many bytes, and begins one byte behind the one before: every range meets those of many
/// others.
const RANGE_BYTES: u64 = 500;
/// Until all of them wait.
const SETTLE_TIME: Duration = Duration::from_secs(2);

fn lock(owner: u64, kind: LockKind, range: LockRange) -> Lock {
    let (family, pid) = (LockFamily::Posix, Pid(1));
    Lock { family, kind, range, owner: LockOwner::own(owner), pid }
}

/// A client that has the file `name` open.
async fn opened(
    address: &Address,
    export: &str,
    name: &str,
) -> CommandResult<(RemoteFs, Arc<dyn OpenFile>)> {
    let fs = client(address, export).await?;
    let cx = Context::system();
    let name_of = Name::new(name.as_bytes()).map_err(context(name))?;
    let entry = fs.lookup(&cx, fs.info().root, name_of).await.map_err(context(name))?;
    let file = fs.open(&cx, entry.id, OpenHow::READ_WRITE).await.map_err(context(name))?;
    Ok((fs, file))
}

/// `count` requests wait for ranges of the file `name` behind a lock on all of it. Then all are
/// given up at once; so many times. Answers how long the slowest round's end took, until the last
/// got its answer. Errors: there is no such server, or no such file.
pub fn give_up(
    address: &Address,
    export: &str,
    name: &str,
    (count, rounds): (usize, usize),
) -> CommandResult<Duration> {
    let mut executor = Executor::new(DriverKind::Epoll).map_err(context("executor"))?;
    executor.block_on(async {
        let (holder, held) = opened(address, export, name).await?;
        let all = LockRange { start: 0, end: u64::MAX };
        let take = lock(0, LockKind::Exclusive, all);
        held.lock(&Context::system(), take, false).await.map_err(context("lock"))?;
        let mut clients = Vec::new();
        for _ in 0..count.div_ceil(WAITERS_EACH) {
            clients.push(opened(address, export, name).await?);
        }
        let mut slowest = Duration::ZERO;
        for _ in 0..rounds {
            slowest = slowest.max(round(&clients, count).await);
        }
        clients.iter().for_each(|(fs, _)| fs.session().goodbye());
        holder.session().goodbye();
        sleep(Duration::from_millis(200)).await; // the goodbyes are sent
        Ok(slowest)
    })
}

async fn round(clients: &[(RemoteFs, Arc<dyn OpenFile>)], count: usize) -> Duration {
    let cancel = Arc::new(Cancel::default());
    let waiting: Vec<_> = (0..count)
        .map(|number| {
            let file = clients[number / WAITERS_EACH].1.clone();
            let cx = Context { cancel: Some(cancel.clone()), ..Context::system() };
            let start = number as u64;
            let range = LockRange { start, end: start + RANGE_BYTES };
            let wish = lock(start + 1, LockKind::Exclusive, range);
            spawn_join(async move { file.lock(&cx, wish, true).await })
        })
        .collect();
    sleep(SETTLE_TIME).await;
    let begin = Instant::now();
    cancel.set();
    for one in waiting {
        let _given_up = one.await; // an error, which is what was asked for
    }
    begin.elapsed()
}
