//! A call that its admission holds up, or refuses, at a server with observers.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, simulate};
use dray_core::{
    Admit, Buf, BufMut, Context, Counted, CreateHow, Errno, FileId, FileSystem, Make, Name,
    ObservedCall, Op, OpenHow, Peer, RemoveKind, Via, Write,
};
use dray_fabric::sim::Network;
use dray_layers::faults::{Fault, Faults, When};
use dray_layers::{ObservedExport, Observer, Outcome, observe_export};
use dray_rpc::client::RemoteFs;
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions, ServingLease};
use dray_rt::{Scope, now, sleep, spawn_join};

const DELAY: Duration = Duration::from_secs(20);
const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: true };
const DIRECTORY: Make<'_> = Make::Directory { mode: 0o755 };

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

/// The first call of `op` is held up.
fn slow(op: Op) -> Arc<Faults> {
    Arc::new(Faults::new(vec![Fault {
        op: Some(op),
        when: When::Nth(1),
        delay: DELAY,
        error: None,
    }]))
}

fn refusing(op: Op, error: Errno) -> Arc<Faults> {
    Arc::new(Faults::new(vec![Fault {
        op: Some(op),
        when: When::Nth(1),
        delay: Duration::ZERO,
        error: Some(error),
    }]))
}

/// Two clients of a server of a file system in memory with these observers.
async fn two_clients(observers: Vec<Arc<dyn Observer>>, server_process: &Scope) -> [RemoteFs; 2] {
    let network = Network::new();
    let ObservedExport { fs, admission } = observe_export(Arc::new(memory()), observers);
    let mut export = Export::new("data", fs, Vec::new());
    export.admission = admission;
    let journal = Arc::new(MemoryJournal::default());
    let server = Server::new(ServerOptions::default(), vec![export], journal);
    serve_simulated(&network, "s", &server, server_process);
    let one = connect(network.connector("s"), client_options()).await.unwrap();
    let other = connect(network.connector("s"), client_options()).await.unwrap();
    [one, other]
}

/// Begins `late`, and makes sure that `others`, which begin behind it, do not wait for it.
async fn not_delayed<T: Send + 'static>(
    late: impl Future<Output = T> + Send + 'static,
    others: impl Future<Output = ()>,
) {
    let begun = now();
    let late = spawn_join(late);
    sleep(Duration::from_millis(10)).await;
    others.await;
    assert!(begun.elapsed() < DELAY / 10, "{:?}", begun.elapsed());
    assert!(late.await.is_ok());
    assert!(begun.elapsed() >= DELAY, "{:?}", begun.elapsed());
}

#[test]
fn a_delayed_change_of_a_directory_delays_no_other_call_there() {
    simulate(1, async {
        let server_process = Scope::new();
        let [one, other] = two_clients(vec![slow(Op::Make)], &server_process).await;
        let (cx, root) = (Context::system(), one.info().root);
        let same = one.clone();
        let late = async move {
            one.make(&Context::system(), root, name("late"), DIRECTORY).await.unwrap();
        };
        not_delayed(late, async {
            other.make(&cx, root, name("dir"), DIRECTORY).await.unwrap();
            let (entry, file) = other.create(&cx, root, name("file"), NEW).await.unwrap();
            file.close(&cx).await.unwrap();
            assert_eq!(other.lookup(&cx, root, name("file")).await.unwrap().id, entry.id);
            same.remove(&cx, root, name("dir"), RemoveKind::Directory).await.unwrap();
            assert_eq!(
                other.lookup(&cx, root, name("late")).await.unwrap_err().errno(),
                Errno::ENOENT
            );
        })
        .await;
        other.lookup(&cx, root, name("late")).await.unwrap();
    });
}

#[test]
fn a_delayed_write_delays_no_other_access_to_the_same_bytes() {
    simulate(1, async {
        let server_process = Scope::new();
        let [one, other] = two_clients(vec![slow(Op::Write)], &server_process).await;
        let (cx, root) = (Context::system(), one.info().root);
        let (entry, late) = one.create(&cx, root, name("file"), NEW).await.unwrap();
        let file = other.open(&cx, entry.id, OpenHow::READ_WRITE).await.unwrap();
        let late = async move {
            let data = Buf::from(vec![1; 8192]);
            late.write(&Context::system(), Write::at(0), data).await.unwrap();
        };
        not_delayed(late, async {
            file.write(&cx, Write::at(4096), Buf::from(vec![2; 8192])).await.unwrap();
            let read = file.read(&cx, 0, BufMut::heap(8192)).await.unwrap().freeze();
            assert_eq!(read[4096..], [2; 4096], "the delayed one has not been made");
            assert_eq!(read[..4096], [0; 4096]);
        })
        .await;
        let read = file.read(&cx, 0, BufMut::heap(8192)).await.unwrap().freeze();
        assert_eq!(read[..], [1; 8192]);
    });
}

#[test]
fn a_refused_change_is_not_made_and_the_next_one_is() {
    simulate(1, async {
        let server_process = Scope::new();
        let [one, _] = two_clients(vec![refusing(Op::Make, Errno::ENOSPC)], &server_process).await;
        let (cx, root) = (Context::system(), one.info().root);
        let error = one.make(&cx, root, name("a"), DIRECTORY).await.unwrap_err();
        assert_eq!(error.errno(), Errno::ENOSPC);
        assert_eq!(one.lookup(&cx, root, name("a")).await.unwrap_err().errno(), Errno::ENOENT);
        one.make(&cx, root, name("a"), DIRECTORY).await.unwrap();
    });
}

/// Otherwise the client, for whom the file is closed, could not give it back.
#[test]
fn a_file_is_closed_though_its_close_is_refused() {
    simulate(1, async {
        let server_process = Scope::new();
        let seen = Arc::new(Log::default());
        let faults = refusing(Op::Close, Errno::EIO);
        let [one, _] = two_clients(vec![faults.clone(), seen.clone()], &server_process).await;
        let (cx, root) = (Context::system(), one.info().root);
        let (entry, file) = one.create(&cx, root, name("a"), NEW).await.unwrap();
        let _ = file.close(&cx).await; // the client decides whether it reports the error
        sleep(Duration::from_secs(1)).await;
        assert_eq!(faults.hits(), 1);
        let seen = seen.0.lock().unwrap();
        let closes: Vec<_> = seen.iter().filter(|one| one.op == Op::Close).collect();
        assert_eq!(closes.len(), 2, "it is refused, and made: {closes:?}");
        assert!(closes.iter().all(|one| one.id == entry.id));
    });
}

/// A call as an observer learned of it.
#[derive(Clone, Debug)]
struct CallRecord {
    op: Op,
    id: FileId,
    open: Option<OpenHow>,
    answer: Option<FileId>,
    error: Option<Errno>,
    via: Option<Via>,
}

#[derive(Default)]
struct Log(Mutex<Vec<CallRecord>>);

impl Observer for Log {
    fn admits(&self) -> bool {
        false
    }

    fn admit<'a>(&'a self, _: &'a Context, _: &'a ObservedCall<'a>) -> Admit<'a> {
        Admit::Now
    }

    fn done(&self, cx: &Context, call: &ObservedCall<'_>, outcome: Outcome<'_>, _: Duration) {
        if cx.counted == Counted::Nothing {
            return;
        }
        self.0.lock().unwrap().push(CallRecord {
            op: call.op,
            id: call.id,
            open: call.open,
            answer: outcome.id,
            error: outcome.error.map(|error| error.errno()),
            via: cx.via,
        });
    }
}

#[test]
fn observers_learn_the_answers_file_the_open_flags_the_peer_and_the_session() {
    simulate(1, async {
        let server_process = Scope::new();
        let seen = Arc::new(Log::default());
        let faults = refusing(Op::Link, Errno::EPERM);
        let clients = two_clients(vec![faults, seen.clone()], &server_process).await;
        let (cx, root) = (Context::system(), clients[0].info().root);
        let (made, file) = clients[0].create(&cx, root, name("a"), NEW).await.unwrap();
        file.close(&cx).await.unwrap();
        let file = clients[1].open(&cx, made.id, OpenHow::READ).await.unwrap();
        let dir = clients[1].make(&cx, root, name("d"), DIRECTORY).await.unwrap();
        let error = clients[1].link(&cx, made.id, root, name("b")).await.unwrap_err();
        assert_eq!(error.errno(), Errno::EPERM);
        clients[1].link(&cx, made.id, root, name("b")).await.unwrap();
        drop(file);
        let seen = seen.0.lock().unwrap().clone();
        let of = |op| seen.iter().filter(move |one| one.op == op).cloned().collect::<Vec<_>>();
        let [create, open, make] = [Op::Create, Op::Open, Op::Make].map(|op| of(op)[0].clone());
        assert_eq!((create.answer, create.id), (Some(made.id), root));
        assert!(create.open.unwrap().writes());
        assert_eq!(open.answer, Some(made.id));
        assert!(open.open.unwrap().reads() && !open.open.unwrap().writes());
        assert_eq!((make.answer, make.open), (Some(dir.id), None));
        let links = of(Op::Link);
        let ends: Vec<_> = links.iter().map(|one| (one.error, one.answer)).collect();
        assert_eq!(ends, [(Some(Errno::EPERM), None), (None, Some(made.id))]);
        let [one, other] = [&create, &make].map(|record| record.via.unwrap());
        assert_ne!(one.session, other.session);
        assert!(links.iter().all(|record| record.via == Some(other)));
        assert!(matches!(one.peer, Peer::Ip(_) | Peer::Local));
    });
}

/// Says which calls of clients reach the backend without the right that a server may lose.
#[derive(Default)]
struct Unfenced(Mutex<Vec<Op>>);

impl Observer for Unfenced {
    fn admits(&self) -> bool {
        false
    }

    fn admit<'a>(&'a self, _: &'a Context, _: &'a ObservedCall<'a>) -> Admit<'a> {
        Admit::Now
    }

    fn done(&self, cx: &Context, call: &ObservedCall<'_>, _: Outcome<'_>, _: Duration) {
        if cx.fence.is_none() {
            self.0.lock().unwrap().push(call.op);
        }
    }
}

/// The backend can look at the lease itself, as the last thing before it calls the file system below.
// proves: P147
#[test]
fn changes_carry_the_lease_of_their_server_to_the_backend() {
    for is_leased in [true, false] {
        simulate(1, async move {
            let (network, server_process) = (Network::new(), Scope::new());
            let seen = Arc::new(Unfenced::default());
            let observed = observe_export(Arc::new(memory()), vec![seen.clone()]);
            let mut export = Export::new("data", observed.fs, Vec::new());
            if is_leased {
                let lease = Arc::new(ServingLease::within(Duration::from_secs(1000)));
                lease.prolong(now());
                export = export.that_is_leased(lease);
            }
            let journal = Arc::new(MemoryJournal::default());
            let server = Server::new(ServerOptions::default(), vec![export], journal);
            serve_simulated(&network, "s", &server, &server_process);
            let client = connect(network.connector("s"), client_options()).await.unwrap();
            let (cx, root) = (Context::system(), client.info().root);
            let (_, file) = client.create(&cx, root, name("a"), NEW).await.unwrap();
            let how = Write { append: true, ..Write::default() };
            file.write(&cx, how, Buf::from(&b"data"[..])).await.unwrap();
            client.remove(&cx, root, name("a"), RemoveKind::File).await.unwrap();
            let unfenced = seen.0.lock().unwrap();
            let changes = [Op::Create, Op::Write, Op::Remove];
            assert!(changes.iter().all(|op| unfenced.contains(op) != is_leased), "{unfenced:?}");
        });
    }
}
