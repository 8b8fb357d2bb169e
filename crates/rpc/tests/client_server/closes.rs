//! Closing a file takes one message and no answer, and happens all the same.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{
    client_options, connect, memory, serve_simulated, server_of, server_with, simulate,
};
use dray_core::{
    Context, CreateHow, FileSystem, Name, Op, OpenFile, OpenHow, RequestId, SessionControl,
};
use dray_fabric::sim::{Network, Weather};
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::{ClientSession, RemoteFs, SessionMemory};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::{Scope, sleep};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: false };

async fn serve(network: &Network) -> (Server, Scope) {
    let (server, scope) = (server_of(memory(), ServerOptions::default()), Scope::new());
    serve_simulated(network, "s", &server, &scope);
    (server, scope)
}

async fn create(fs: &RemoteFs, name: &str) -> Arc<dyn OpenFile> {
    let name = Name::new(name.as_bytes()).unwrap();
    fs.create(&Context::system(), fs.info().root, name, NEW).await.unwrap().1
}

fn round_trips(fs: &RemoteFs) -> u64 {
    fs.session().status().channels.iter().map(|channel| channel.calls).sum()
}

/// Files that clients have open.
fn open_files(server: &Server) -> u64 {
    server.status().clients.iter().map(|client| client.files as u64).sum()
}

#[test]
fn a_close_is_no_round_trip() {
    simulate(1, async {
        let network = Network::new();
        let (server, _server_process) = serve(&network).await;
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let before = round_trips(&fs);
        for round in 0..1000 {
            let file = create(&fs, "f").await;
            match round % 2 {
                0 => file.close(&Context::system()).await.unwrap(),
                _ => drop(file),
            }
        }
        assert_eq!(round_trips(&fs) - before, 1000, "one for each create");
        sleep(Duration::from_secs(1)).await;
        assert_eq!(open_files(&server), 0);
    });
}

#[test]
fn closes_in_a_row_are_answered_now_and_then() {
    simulate(2, async {
        let network = Network::new();
        let (server, _server_process) = serve(&network).await;
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let mut files = Vec::new();
        for number in 0..1000 {
            files.push(create(&fs, &number.to_string()).await);
        }
        let before = round_trips(&fs);
        for file in files {
            file.close(&Context::system()).await.unwrap();
        }
        let made = round_trips(&fs) - before;
        // The limit is 64, but an answer may come while some are still being carried out.
        assert!((1000 / 65..=1000 / 4).contains(&made), "{made} round trips");
        sleep(Duration::from_secs(1)).await;
        assert_eq!(open_files(&server), 0);
    });
}

// proves: P71
#[test]
fn closes_arrive_over_broken_connections() {
    for seed in 0..60 {
        simulate(seed, async {
            let network = Network::new();
            let (server, _server_process) = serve(&network).await;
            let fs = connect(network.connector("s"), client_options()).await.unwrap();
            network.set_weather(Weather {
                break_one_in: Some(6),
                deliver_then_break_one_in: Some(2),
                ..Weather::default()
            });
            for _ in 0..50 {
                create(&fs, "f").await.close(&Context::system()).await.unwrap();
            }
            network.set_weather(Weather::default());
            assert!(fs.session().status().channels[0].connections > 1, "seed {seed}");
            sleep(Duration::from_secs(5)).await;
            assert_eq!(open_files(&server), 0, "seed {seed}");
        });
    }
}

/// A client that meets a new server opens its files again by itself. A close that overtook
/// such an opening at the server would leave the file open for ever.
// proves: P90
#[test]
fn what_is_closed_while_it_is_opened_again_stays_closed() {
    simulate(3, async {
        let network = Network::new();
        let (files, journal) = (memory(), MemoryJournal::default());
        let first = server_with(files.clone(), ServerOptions::default(), journal.clone());
        let server_process = Scope::new();
        serve_simulated(&network, "s", &first, &server_process);
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let mut open = Vec::new();
        for number in 0..50 {
            open.push(create(&fs, &number.to_string()).await);
        }
        server_process.kill();
        network.break_all("s");
        let delay = Duration::from_millis(50);
        let slow = Fault { op: Some(Op::Open), when: When::Always, delay, error: None };
        let faults = Arc::new(Faults::new(vec![slow]));
        let files = Arc::new(Observed::new(Arc::new(files), faults.clone()));
        let exports = vec![Export::new("data", files, Vec::new())];
        let server = Server::new(ServerOptions::default(), exports, Arc::new(journal));
        server.restore(StateLoss::Nothing).await;
        let server_process = Scope::new();
        serve_simulated(&network, "s", &server, &server_process);
        while faults.hits() == 0 {
            sleep(Duration::from_millis(1)).await;
        }
        for (number, file) in open.into_iter().enumerate() {
            match number % 2 {
                0 => file.close(&Context::system()).await.unwrap(),
                _ => drop(file),
            }
        }
        sleep(Duration::from_secs(5)).await;
        assert_eq!(open_files(&server), 0);
    });
}

/// The process that closed a file is killed before it knows whether the server heard of it.
// proves: P71
#[test]
fn a_successor_closes_again() {
    simulate(4, async {
        let network = Network::new();
        let (server, _server_process) = serve(&network).await;
        let memory = SessionMemory::create_memfd().unwrap();
        let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
        let process = Scope::new();
        process.spawn_on(&dray_rt::ExecutorHandle::current(), {
            let network = network.clone();
            async move {
                let first =
                    ClientSession::connect(network.connector("s"), client_options(), memory);
                let first = RemoteFs::new(first.await.unwrap());
                // A process that is killed drops nothing.
                std::mem::forget(create(&first, "kept").await);
                let closed = create(&first, "closed").await;
                network.partition("s", true);
                network.break_all("s");
                closed.close(&Context::system()).await.unwrap();
                std::future::pending::<()>().await;
            }
        });
        sleep(Duration::from_secs(1)).await;
        process.kill();
        network.partition("s", false);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(open_files(&server), 2);
        let memory = SessionMemory::from_fd(fd).unwrap();
        let next = ClientSession::connect(network.connector("s"), client_options(), memory).await;
        let next = RemoteFs::new(next.unwrap());
        next.statfs(&Context::system()).await.unwrap();
        assert_eq!(open_files(&server), 1);
    });
}

/// A call of a daemon that died comes again and answers with a file that its successor has attached
/// already. The first holder must not close it for the other.
#[test]
fn a_file_that_two_have_is_closed_when_both_have_left() {
    simulate(9, async {
        let network = Network::new();
        let (server, _server_process) = serve(&network).await;
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let mut cx = Context::system();
        (cx.origin.node, cx.origin.request) = (fs.session().node(), dray_core::RequestId(77));
        let name = Name::new(b"f").unwrap();
        let (entry, file) = fs.create(&cx, fs.info().root, name, NEW).await.unwrap();
        drop(fs.attach(entry.id, OpenHow::READ_WRITE, RequestId(77)).unwrap());
        sleep(Duration::from_secs(1)).await;
        assert_eq!(open_files(&server), 1, "the other is still open");
        let other = fs.attach(entry.id, OpenHow::READ_WRITE, RequestId(77)).unwrap();
        file.close(&cx).await.unwrap();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(open_files(&server), 1, "the other way round, too");
        other.close(&cx).await.unwrap();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(open_files(&server), 0);
    });
}
