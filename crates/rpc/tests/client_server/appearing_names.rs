//! Another server of the same files gives a name away while a change looks for it, and the server of the change dies.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, simulate};
use dray_backends::memory::MemoryFs;
use dray_core::{
    Admit, Context, CreateHow, Errno, FileId, FileSystem, Name, ObservedCall, Op, OpenHow,
    RemoveKind, RenameHow, Result,
};
use dray_fabric::sim::Network;
use dray_layers::{Observed, Observer, Outcome};
use dray_rpc::client::RemoteFs;
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::sync::Notify;
use dray_rt::{Scope, timeout};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
/// A change is made within this time.
const MADE_WITHIN: Duration = Duration::from_secs(5);

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

/// What takes away the name "n".
#[derive(Clone, Copy, Debug)]
enum Taking {
    Remove,
    Rename,
    /// With "a".
    Exchange,
}

impl Taking {
    async fn ask(self, fs: &RemoteFs) -> Result<()> {
        let (cx, dir) = (Context::system(), fs.info().root);
        let n = (dir, name("n"));
        match self {
            Taking::Remove => fs.remove(&cx, dir, name("n"), RemoveKind::File).await,
            Taking::Rename => fs.rename(&cx, n, (dir, name("m")), RenameHow::Replace).await,
            Taking::Exchange => fs.rename(&cx, (dir, name("a")), n, RenameHow::Exchange).await,
        }
    }

    /// Whether it has been made, if "a" was the file `first`, and "n" was given to a file.
    async fn is_made(self, fs: &MemoryFs, first: FileId) -> bool {
        match self {
            Taking::Remove => file_of(fs, "n").await.is_none(),
            Taking::Rename => file_of(fs, "m").await.is_some(),
            Taking::Exchange => file_of(fs, "n").await == Some(first),
        }
    }
}

async fn file_of(fs: &MemoryFs, text: &str) -> Option<FileId> {
    let found = fs.lookup(&Context::system(), fs.info().root, name(text)).await;
    found.ok().map(|entry| entry.id)
}

/// Gives "n" to a new file when it has been looked for in vain so many times, before the next call begins.
struct OtherServer {
    fs: MemoryFs,
    lookups: AtomicUsize,
    gives_behind: usize,
    /// A change has been made.
    made: Arc<Notify>,
}

impl OtherServer {
    fn has_given(&self) -> bool {
        self.lookups.load(Ordering::Relaxed) == usize::MAX
    }

    async fn give(&self) {
        let (cx, dir) = (Context::system(), self.fs.info().root);
        self.fs.create(&cx, dir, name("n"), NEW).await.unwrap();
    }
}

impl Observer for OtherServer {
    fn admits(&self) -> bool {
        true
    }

    fn admit<'a>(&'a self, _: &'a Context, _: &'a ObservedCall<'a>) -> Admit<'a> {
        if self.lookups.load(Ordering::Relaxed) != self.gives_behind {
            return Admit::Now;
        }
        self.lookups.store(usize::MAX, Ordering::Relaxed);
        Admit::After(Box::pin(async {
            self.give().await;
            Ok(())
        }))
    }

    fn done(&self, _: &Context, call: &ObservedCall<'_>, outcome: Outcome<'_>, _: Duration) {
        let lookups = self.lookups.load(Ordering::Relaxed);
        match call.op {
            Op::Lookup if outcome.error.is_some() && lookups < self.gives_behind => {
                self.lookups.store(lookups + 1, Ordering::Relaxed);
            }
            Op::Remove | Op::Rename => self.made.notify_one(),
            _ => {}
        }
    }
}

/// The answer to a change whose server dies when it may have been made, and whether it has been made.
async fn answered(taking: Taking, gives_behind: usize) -> (Result<()>, bool) {
    let (network, fs, journal) = (Network::new(), memory(), MemoryJournal::default());
    let (cx, root) = (Context::system(), fs.info().root);
    let first = fs.create(&cx, root, name("a"), NEW).await.unwrap().0.id;
    let made = Arc::new(Notify::default());
    let other = Arc::new(OtherServer {
        fs: fs.clone(),
        lookups: AtomicUsize::new(0),
        gives_behind,
        made: made.clone(),
    });
    let fs_of_both: Arc<dyn FileSystem> =
        Arc::new(Observed::new(Arc::new(fs.clone()), other.clone()));
    let start = async || {
        let exports = vec![Export::new("data", fs_of_both.clone(), Vec::new())];
        let server = Server::new(ServerOptions::default(), exports, Arc::new(journal.clone()));
        server.restore(StateLoss::Nothing).await;
        let process = Scope::new();
        serve_simulated(&network, "s", &server, &process);
        process
    };
    let process = start().await;
    let client = connect(network.connector("s"), client_options()).await.unwrap();
    let asked = dray_rt::spawn_join(async move { taking.ask(&client).await });
    let _ = timeout(MADE_WITHIN, made.notified()).await; // what finds nothing is not made
    process.kill();
    network.break_all("s");
    let _serving = start().await;
    let answer = asked.await.unwrap();
    (answer, other.has_given() && taking.is_made(&fs, first).await)
}

/// The intent said that there was no such name. So the next server took the change for one that had not been made,
/// and answered ENOENT. An exchange was made once more, and so undone.
// proves: P80, P323
#[test]
fn what_is_answered_as_absent_has_not_been_taken_away() {
    for taking in [Taking::Remove, Taking::Rename, Taking::Exchange] {
        for gives_behind in 1..=2 {
            for seed in 0..10 {
                let (answer, made) = simulate(seed, answered(taking, gives_behind));
                let errno = answer.map_err(|error| error.errno());
                let what = format!("{taking:?}, given behind {gives_behind}, seed {seed}");
                assert_eq!(errno, if made { Ok(()) } else { Err(Errno::ENOENT) }, "{what}");
            }
        }
    }
}
