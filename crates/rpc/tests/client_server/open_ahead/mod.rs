//! Opening at the lookup: a round trip fewer, and nothing else changes.

mod program;
mod rights;

use std::time::Duration;

use crate::common::{client_options, memory, serve_simulated, server_of, server_with, simulate};
use dray_core::{
    BufMut, Context, FileSystem, Identity, Name, OpenHow, Pid, RemoveKind, RequestId,
    SessionControl,
};
use dray_fabric::sim::{Network, Weather};
use dray_rpc::client::{ClientSession, RemoteFs, SessionMemory};
use dray_rpc::server::{MemoryJournal, ServerOptions, StateLoss};
use dray_rt::{Scope, sleep};

use program::{A_WHILE, FILE, Program, READ, learned, make, open_files};

// proves: P11
#[test]
fn opening_what_was_looked_up_is_one_round_trip_once_it_was_learned() {
    simulate(1, async {
        let network = Network::new();
        let (server, _server_process, program, _) = learned(&network, None).await;
        for how in [READ, OpenHow::READ_WRITE] {
            program.open_close(FILE, how).await;
            program.open_close(FILE, how).await;
            let before = program.round_trips();
            for _ in 0..100 {
                program.open_close(FILE, how).await;
            }
            // The simulation holds some up until what they opened must not be used any more.
            let made = program.round_trips() - before;
            assert!((100..115).contains(&made), "{how:?}: {made} round trips");
        }
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 0);
    });
}

#[test]
fn what_a_lookup_opened_is_read_like_any_other() {
    simulate(2, async {
        let network = Network::new();
        let (_server, _server_process, program, id) = learned(&network, None).await;
        assert_eq!(program.lookup(FILE).await.unwrap().id, id);
        let before = program.round_trips();
        let file = program.open(id, READ).await.unwrap();
        assert_eq!((file.id(), program.round_trips()), (id, before));
        let read = file.read(&program.cx(), 0, BufMut::heap(10)).await;
        assert!(read.is_ok_and(|read| read.is_empty()));
    });
}

// proves: P15
#[test]
fn a_lookup_without_an_open_opens_nothing() {
    simulate(3, async {
        let network = Network::new();
        let (server, _server_process, program, _) = learned(&network, None).await;
        let before = program.made();
        for _ in 0..100 {
            program.stat(FILE).await;
        }
        assert!(program.made() - before <= 3, "{} opened in vain", program.made() - before);
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 0);
    });
}

// proves: P15
#[test]
fn a_file_opened_ahead_and_not_used_is_closed() {
    simulate(4, async {
        let network = Network::new();
        let (server, _server_process, program, _) = learned(&network, None).await;
        program.lookup(FILE).await.unwrap();
        assert_eq!(open_files(&server), 1);
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 0);
        let stats = program.fs.session().status().open_ahead;
        assert_eq!((stats.made, stats.used, stats.given_up), (1, 0, 1));
    });
}

/// The file's space must be free when unlink(2) returns.
// proves: P15
#[test]
fn what_is_removed_is_not_kept_open_by_its_lookup() {
    simulate(5, async {
        let network = Network::new();
        let (server, _server_process, program, _) = learned(&network, None).await;
        program.lookup(FILE).await.unwrap();
        let name = Name::new(FILE).unwrap();
        program.fs.remove(&program.cx_of(0), program.root(), name, RemoveKind::File).await.unwrap();
        assert_eq!(open_files(&server), 0);
    });
}

#[test]
fn another_opening_than_was_expected_is_asked_for() {
    simulate(6, async {
        let network = Network::new();
        let (server, _server_process, program, id) = learned(&network, None).await;
        program.lookup(FILE).await.unwrap();
        let file = program.open(id, OpenHow::READ_WRITE).await.unwrap();
        file.write(&program.cx(), dray_core::Write::at(0), (&b"x"[..]).into()).await.unwrap();
        program.lookup(FILE).await.unwrap();
        let other = program.fs.open(&program.cx_of(1002), id, READ).await.unwrap();
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 2);
        drop((file, other));
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 0);
    });
}

#[test]
fn callers_without_a_thread_id_open_nothing_ahead() {
    simulate(13, async {
        let network = Network::new();
        let (_server, _server_process, program, _) = learned(&network, None).await;
        let contained = Program::on(program.fs.clone(), 0);
        for _ in 0..10 {
            contained.open_close(FILE, READ).await;
        }
        assert_eq!(program.made(), 0);
    });
}

/// Where answers take longer than what they opened may be used, they open rarely.
#[test]
fn over_a_slow_network_little_is_opened_in_vain() {
    simulate(14, async {
        let network = Network::new();
        let (server, _server_process, program, _) = learned(&network, None).await;
        let delay = Duration::from_millis(3);
        network.set_weather(Weather { delay_min: delay, delay_max: delay, ..Weather::default() });
        for _ in 0..1000 {
            program.open_close(FILE, READ).await;
        }
        assert!(program.made() < 30, "{} opened in vain", program.made());
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 0);
    });
}

// proves: P15
#[test]
fn nothing_stays_open_over_broken_connections_and_deaths_of_the_server() {
    for seed in 0..60 {
        simulate(seed, async {
            let network = Network::new();
            let (files, journal) = (memory(), MemoryJournal::default());
            let start = async |server_process: &Scope| {
                let (options, journal) = (ServerOptions::default(), journal.clone());
                let server = server_with(files.clone(), options, journal);
                server.restore(StateLoss::Nothing).await;
                serve_simulated(&network, "s", &server, server_process);
                server
            };
            let mut server_process = Scope::new();
            let mut server = start(&server_process).await;
            let program = Program::mount(&network, 7).await;
            make(&program.fs, FILE).await;
            network.set_weather(Weather {
                break_one_in: Some(9),
                deliver_then_break_one_in: Some(2),
                ..Weather::default()
            });
            for round in 0..60 {
                match round % 4 {
                    3 => drop(program.lookup(FILE).await.unwrap()),
                    _ => program.open_close(FILE, READ).await,
                }
                if round % 20 == 19 {
                    program.lookup(FILE).await.unwrap();
                    server_process.kill();
                    network.break_all("s");
                    server_process = Scope::new();
                    server = start(&server_process).await;
                }
            }
            network.set_weather(Weather::default());
            sleep(Duration::from_secs(5)).await;
            assert_eq!(open_files(&server), 0, "seed {seed}");
            assert!(program.made() > 5, "seed {seed}: {}", program.made());
        });
    }
}

/// The daemon dies with one file in use that a lookup opened, and one that nobody used.
// proves: P15
#[test]
fn a_successor_goes_on_with_what_was_used_and_closes_the_rest() {
    simulate(16, async {
        let network = Network::new();
        let (server, scope) = (server_of(memory(), ServerOptions::default()), Scope::new());
        serve_simulated(&network, "s", &server, &scope);
        let memory = SessionMemory::create_memfd().unwrap();
        let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
        let process = Scope::new();
        let (tell, receiver) = dray_rt::sync::oneshot::channel();
        process.spawn_on(&dray_rt::ExecutorHandle::current(), {
            let network = network.clone();
            async move {
                let first =
                    ClientSession::connect(network.connector("s"), client_options(), memory);
                let fs = RemoteFs::new(first.await.unwrap());
                let id = make(&fs, FILE).await;
                let cx = |request| {
                    let who = Identity::system();
                    Context::new(fs.session().node(), RequestId(request), who, Pid(7))
                };
                let name = Name::new(FILE).unwrap();
                for request in [100, 200] {
                    fs.lookup(&cx(request), fs.info().root, name).await.unwrap();
                    let file = fs.open(&cx(request + 2), id, READ).await.unwrap();
                    // A process that is killed drops nothing.
                    std::mem::forget(file);
                }
                assert_eq!(fs.session().status().open_ahead.used, 1);
                fs.lookup(&cx(300), fs.info().root, name).await.unwrap();
                let _ = tell.send(id);
                std::future::pending::<()>().await;
            }
        });
        let id = receiver.await.unwrap();
        process.kill();
        network.break_all("s");
        assert_eq!(open_files(&server), 3);
        let memory = SessionMemory::from_fd(fd).unwrap();
        let next = ClientSession::connect(network.connector("s"), client_options(), memory).await;
        let next = RemoteFs::new(next.unwrap());
        let files = [102, 202].map(|request| next.attach(id, READ, RequestId(request)).unwrap());
        next.attached();
        let before: u64 = next.session().status().channels.iter().map(|one| one.calls).sum();
        for file in &files {
            file.read(&Context::system(), 0, BufMut::heap(10)).await.map_err(|one| one.0).unwrap();
        }
        let after: u64 = next.session().status().channels.iter().map(|one| one.calls).sum();
        // A third may ask for a sync.
        assert!(after - before <= 3, "opened again: {} round trips", after - before);
        assert_eq!(open_files(&server), 2);
        // The kernel did not hear of the last opening, and asks again.
        let mut cx = Context::system();
        (cx.origin.node, cx.origin.request) = (next.session().node(), RequestId(202));
        let again = next.open(&cx, id, READ).await.unwrap();
        assert_eq!(open_files(&server), 2);
        drop((files, again));
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 0);
    });
}
