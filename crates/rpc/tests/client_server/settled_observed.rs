//! A server dies after a change was made and before its observers heard of it. The next one tells its own.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, simulate};
use dray_core::{
    Admit, CallDetail, Context, CreateHow, FileSystem, Make, Name, ObservedCall, Op, OpenHow,
    RemoveKind, RenameHow, XattrSet,
};
use dray_fabric::sim::Network;
use dray_layers::{ObservedExport, Observer, Outcome, observe_export};
use dray_rpc::client::RemoteFs;
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::{Scope, random_u64, sleep};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
const ROUNDS: u32 = 20;

/// A change by its operation and its name.
type Change = (Op, Vec<u8>);

/// What observers have heard, over all servers.
#[derive(Default)]
struct Heard {
    done: Mutex<BTreeSet<Change>>,
    settled: Mutex<BTreeSet<Change>>,
    acknowledged: Mutex<BTreeSet<Change>>,
}

fn change(call: &ObservedCall<'_>) -> Option<Change> {
    let name = match (call.op, call.detail) {
        (Op::Setxattr, CallDetail::Xattr(name)) => name.to_vec(),
        (Op::Link, _) => call.to?.1.as_bytes().to_vec(),
        _ => call.name?.as_bytes().to_vec(),
    };
    Some((call.op, name))
}

impl Observer for Heard {
    fn admits(&self) -> bool {
        true
    }

    fn admit<'a>(&'a self, _: &'a Context, _: &'a ObservedCall<'a>) -> Admit<'a> {
        Admit::Now
    }

    fn settled(&self, _: &Context, call: &ObservedCall<'_>, outcome: Outcome<'_>) {
        if outcome.error.is_none() {
            self.settled.lock().unwrap().extend(change(call));
        }
    }

    fn done(&self, _: &Context, call: &ObservedCall<'_>, outcome: Outcome<'_>, _: Duration) {
        if outcome.error.is_none() && call.op.writes() {
            self.done.lock().unwrap().extend(change(call));
        }
    }
}

impl Heard {
    /// The server dies: of what its client has no answer yet, it did not get to tell anybody.
    fn die(&self) {
        let acknowledged = self.acknowledged.lock().unwrap();
        self.done.lock().unwrap().retain(|one| acknowledged.contains(one));
    }
}

async fn torment(network: Network, heard: Arc<Heard>, end: Arc<AtomicBool>) {
    let (fs, journal) = (memory(), MemoryJournal::default());
    loop {
        let observers: Vec<Arc<dyn Observer>> = vec![heard.clone()];
        let ObservedExport { fs, admission } = observe_export(Arc::new(fs.clone()), observers);
        let mut export = Export::new("data", fs, Vec::new());
        export.admission = admission;
        let journal = Arc::new(journal.clone());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        server.restore(StateLoss::Nothing).await;
        let process = Scope::new();
        serve_simulated(&network, "s", &server, &process);
        sleep(Duration::from_micros(random_u64() % 10_000)).await;
        while end.load(Ordering::Relaxed) {
            sleep(Duration::from_secs(1)).await;
        }
        process.kill();
        network.break_all("s");
        heard.die();
        sleep(Duration::from_micros(random_u64() % 20_000)).await;
    }
}

async fn work(fs: &RemoteFs, heard: &Heard) {
    let (cx, root) = (Context::system(), fs.info().root);
    let acknowledge = |op: Op, name: &str| {
        heard.acknowledged.lock().unwrap().insert((op, name.as_bytes().to_vec()));
    };
    for round in 0..ROUNDS {
        let names = ["d", "f", "g", "h"].map(|name| format!("{name}{round}"));
        let [dir, file, moved, link] =
            names.each_ref().map(|name| Name::new(name.as_bytes()).unwrap());
        fs.make(&cx, root, dir, Make::Directory { mode: 0o700 }).await.unwrap();
        acknowledge(Op::Make, &names[0]);
        let (entry, open) = fs.create(&cx, root, file, NEW).await.unwrap();
        acknowledge(Op::Create, &names[1]);
        drop(open);
        fs.rename(&cx, (root, file), (root, moved), RenameHow::Replace).await.unwrap();
        acknowledge(Op::Rename, &names[1]);
        fs.link(&cx, entry.id, root, link).await.unwrap();
        acknowledge(Op::Link, &names[3]);
        let xattr = format!("user.x{round}");
        fs.setxattr(&cx, entry.id, xattr.as_bytes(), b"1", XattrSet::Any).await.unwrap();
        acknowledge(Op::Setxattr, &xattr);
        fs.remove(&cx, root, moved, RemoveKind::File).await.unwrap();
        acknowledge(Op::Remove, &names[2]);
        fs.remove(&cx, root, dir, RemoveKind::Directory).await.unwrap();
        acknowledge(Op::Remove, &names[0]);
    }
}

// proves: P178
#[test]
fn observers_hear_of_changes_that_a_server_made_before_it_died() {
    let mut settled = 0;
    for seed in 0..60 {
        settled += simulate(seed, async {
            let (network, heard) = (Network::new(), Arc::new(Heard::default()));
            let end = Arc::new(AtomicBool::new(false));
            dray_rt::spawn(torment(network.clone(), heard.clone(), end.clone()));
            sleep(Duration::from_micros(1)).await;
            let fs = loop {
                match connect(network.connector("s"), client_options()).await {
                    Ok(fs) => break fs,
                    Err(_) => sleep(Duration::from_millis(1)).await,
                }
            };
            let worked = dray_rt::timeout(Duration::from_secs(600), work(&fs, &heard)).await;
            assert!(worked.is_ok(), "seed {seed}: no progress");
            end.store(true, Ordering::Relaxed);
            let heard_of = &*heard.done.lock().unwrap() | &*heard.settled.lock().unwrap();
            let missing: Vec<_> =
                heard.acknowledged.lock().unwrap().difference(&heard_of).cloned().collect();
            assert!(missing.is_empty(), "seed {seed}: {missing:?}");
            heard.settled.lock().unwrap().len()
        });
    }
    assert!(settled > 50, "only {settled}: the test tests nothing");
}
