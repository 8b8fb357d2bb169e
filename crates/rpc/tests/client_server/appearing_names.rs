//! Another server of the same files gives a name to a file, or takes it away, while a change looks for it. Then the
//! server of the change dies.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, simulate};
use dray_backends::memory::MemoryFs;
use dray_core::{
    Admit, Context, CreateHow, Errno, FileId, FileSystem, Make, Name, ObservedCall, Op, OpenHow,
    RemoveKind, RenameHow, Result,
};
use dray_fabric::sim::Network;
use dray_layers::{Observed, Observer, Outcome};
use dray_rpc::client::{ClientOptions, RemoteFs};
use dray_rpc::server::{Export, ExportDefinition, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::sync::Notify;
use dray_rt::{Scope, timeout};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
/// A change is made within this time.
const MADE_WITHIN: Duration = Duration::from_secs(5);

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

/// What takes the name "n" away, or gives it to a file.
#[derive(Clone, Copy, Debug)]
enum Change {
    Remove,
    Rename,
    /// With "a".
    Exchange,
    /// Of "a".
    Link,
    Make,
    /// Exclusively.
    Create,
}

impl Change {
    async fn ask(self, fs: &RemoteFs) -> Result<()> {
        let (cx, dir) = (Context::system(), fs.info().root);
        let n = (dir, name("n"));
        match self {
            Change::Remove => fs.remove(&cx, dir, name("n"), RemoveKind::File).await,
            Change::Rename => fs.rename(&cx, n, (dir, name("m")), RenameHow::Replace).await,
            Change::Exchange => fs.rename(&cx, (dir, name("a")), n, RenameHow::Exchange).await,
            Change::Link => {
                let a = fs.lookup(&cx, dir, name("a")).await?.id;
                fs.link(&cx, a, dir, name("n")).await.map(drop)
            }
            Change::Make => {
                let what = Make::Directory { mode: 0o755 };
                fs.make(&cx, dir, name("n"), what).await.map(drop)
            }
            Change::Create => fs.create(&cx, dir, name("n"), NEW).await.map(drop),
        }
    }

    /// Whether the name must be absent before it.
    fn gives(self) -> bool {
        match self {
            Change::Link | Change::Make | Change::Create => true,
            Change::Remove | Change::Rename | Change::Exchange => false,
        }
    }

    /// Whether it has been made, if "a" was the file `first`, and the other server has changed "n".
    async fn is_made(self, fs: &MemoryFs, first: FileId) -> bool {
        match self {
            Change::Remove => file_of(fs, "n").await.is_none(),
            Change::Rename => file_of(fs, "m").await.is_some(),
            Change::Exchange => file_of(fs, "n").await == Some(first),
            Change::Link | Change::Make | Change::Create => file_of(fs, "n").await.is_some(),
        }
    }
}

async fn file_of(fs: &MemoryFs, text: &str) -> Option<FileId> {
    let found = fs.lookup(&Context::system(), fs.info().root, name(text)).await;
    found.ok().map(|entry| entry.id)
}

/// Gives "n" to a new file when it has been looked for in vain so many times, before the next call begins. Or takes it
/// away when it has been found so many times.
struct OtherServer {
    fs: MemoryFs,
    takes: bool,
    lookups: AtomicUsize,
    acts_behind: usize,
    /// A change has been made.
    made: Arc<Notify>,
}

impl OtherServer {
    fn has_acted(&self) -> bool {
        self.lookups.load(Ordering::Relaxed) == usize::MAX
    }

    async fn act(&self) {
        let (cx, dir) = (Context::system(), self.fs.info().root);
        match self.takes {
            true => self.fs.remove(&cx, dir, name("n"), RemoveKind::File).await.unwrap(),
            false => drop(self.fs.create(&cx, dir, name("n"), NEW).await.unwrap()),
        }
    }
}

impl Observer for OtherServer {
    fn admits(&self) -> bool {
        true
    }

    fn admit<'a>(&'a self, _: &'a Context, _: &'a ObservedCall<'a>) -> Admit<'a> {
        if self.lookups.load(Ordering::Relaxed) != self.acts_behind {
            return Admit::Now;
        }
        self.lookups.store(usize::MAX, Ordering::Relaxed);
        Admit::After(Box::pin(async {
            self.act().await;
            Ok(())
        }))
    }

    fn done(&self, _: &Context, call: &ObservedCall<'_>, outcome: Outcome<'_>, _: Duration) {
        let lookups = self.lookups.load(Ordering::Relaxed);
        match call.op {
            Op::Lookup
                if call.name == Some(name("n"))
                    && outcome.error.is_none() == self.takes
                    && lookups < self.acts_behind =>
            {
                self.lookups.store(lookups + 1, Ordering::Relaxed);
            }
            Op::Remove | Op::Rename | Op::Link | Op::Make | Op::Create => self.made.notify_one(),
            _ => {}
        }
    }
}

/// The answer to a change whose server dies when it may have been made, and whether it has been made.
async fn answered(change: Change, acts_behind: usize) -> (Result<()>, bool) {
    let (network, fs, journal) = (Network::new(), memory(), MemoryJournal::default());
    let (cx, root) = (Context::system(), fs.info().root);
    let first = fs.create(&cx, root, name("a"), NEW).await.unwrap().0.id;
    if change.gives() {
        fs.create(&cx, root, name("n"), NEW).await.unwrap();
    }
    let made = Arc::new(Notify::default());
    let other = Arc::new(OtherServer {
        fs: fs.clone(),
        takes: change.gives(),
        lookups: AtomicUsize::new(0),
        acts_behind,
        made: made.clone(),
    });
    let fs_of_both: Arc<dyn FileSystem> =
        Arc::new(Observed::new(Arc::new(fs.clone()), other.clone()));
    let start = async || {
        let mut export = Export::new("data", fs_of_both.clone(), Vec::new());
        let definition = ExportDefinition { fingerprint: 1, text: String::new() };
        export.definition = Some(Arc::new(definition));
        let server = Server::new(ServerOptions::default(), vec![export], Arc::new(journal.clone()));
        server.restore(StateLoss::Nothing).await;
        let process = Scope::new();
        serve_simulated(&network, "s", &server, &process);
        process
    };
    let process = start().await;
    let options = ClientOptions { definition: 1, ..client_options() };
    let client = connect(network.connector("s"), options).await.unwrap();
    let asked = dray_rt::spawn_join(async move { change.ask(&client).await });
    let _ = timeout(MADE_WITHIN, made.notified()).await; // what finds nothing is not made
    process.kill();
    network.break_all("s");
    let _serving = start().await;
    let answer = asked.await.unwrap();
    (answer, other.has_acted() && change.is_made(&fs, first).await)
}

/// The intent said that there was no such name, or that there was one. So the next server took the change for one that
/// had not been made, and answered ENOENT or EEXIST. An exchange was made once more, and so undone.
// proves: P80, P323
#[test]
fn what_fails_by_a_name_that_another_server_changes_has_not_been_made() {
    let taking = [Change::Remove, Change::Rename, Change::Exchange];
    let giving = [Change::Link, Change::Make, Change::Create];
    for change in taking.into_iter().chain(giving) {
        for acts_behind in 1..=2 {
            for seed in 0..10 {
                let (answer, made) = simulate(seed, answered(change, acts_behind));
                let errno = answer.map_err(|error| error.errno());
                let what = format!("{change:?}, other behind {acts_behind}, seed {seed}");
                let fails = if change.gives() { Errno::EEXIST } else { Errno::ENOENT };
                assert_eq!(errno, if made { Ok(()) } else { Err(fails) }, "{what}");
            }
        }
    }
}
