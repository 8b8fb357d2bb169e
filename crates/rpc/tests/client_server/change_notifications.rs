//! Questions and notifications of a server to its clients.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, server_of, simulate};
use dray_core::{
    Buf, Context, CreateHow, FileSystem, Make, Name, Op, OpenHow, Pid, SessionControl, Write,
};
use dray_fabric::sim::{Network, Weather};
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::ClientOptions;
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::{Scope, spawn_join};

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

/// A server that takes `delay` to make a name, so that a status can be requested meanwhile.
fn slow_server(delay: Duration) -> Server {
    let slow = Fault { op: Some(Op::Make), when: When::Always, delay, error: None };
    let below = Observed::new(Arc::new(memory()), Arc::new(Faults::new(vec![slow])));
    let export = Export::new("data", Arc::new(below), Vec::new());
    Server::new(ServerOptions::default(), vec![export], Arc::new(MemoryJournal::default()))
}

/// With each call jobs would cost every caller a look at its environment: they were to be switched
/// on, and nobody knew.
#[test]
fn clients_tell_the_jobs_of_callers_when_their_server_is_looked_at() {
    simulate(11, async {
        let (network, scope) = (Network::new(), Scope::new());
        let server = slow_server(Duration::from_secs(60));
        serve_simulated(&network, "s", &server, &scope);
        let asked = Arc::new(Mutex::new(Vec::new()));
        for (pid, name_of_dir) in [(77, "notified"), (78, "never notified"), (79, "unknown")] {
            let fs = connect(network.connector("s"), client_options()).await.unwrap();
            let asked = asked.clone();
            let find: dray_core::FindJobs = Box::new(move |callers, tell| {
                asked.lock().unwrap().extend(callers.clone());
                match callers[..] {
                    [Pid(77)] => tell(vec![(Pid(77), "4711".into()), (Pid(78), "forged".into())]),
                    _ => std::mem::forget(tell),
                }
            });
            if pid != 79 {
                fs.find_jobs_by(find);
            }
            let cx = Context { pid: Pid(pid), ..Context::system() };
            dray_rt::spawn(async move {
                let what = Make::Directory { mode: 0o755 };
                fs.make(&cx, fs.info().root, name(name_of_dir), what).await.unwrap();
            });
        }
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(*asked.lock().unwrap(), [], "nobody had looked");
        let begin = dray_rt::now();
        let status = server.status_with_paths().await;
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        let mut jobs: Vec<_> =
            status.operations.iter().map(|one| (one.pid, one.job.as_deref())).collect();
        jobs.sort_unstable();
        assert_eq!(jobs, [(Pid(77), Some("4711")), (Pid(78), None), (Pid(79), None)]);
        asked.lock().unwrap().sort_unstable();
        assert_eq!(*asked.lock().unwrap(), [Pid(77), Pid(78)]);
    });
}

/// A server above knows a caller by its number alone.
// proves: P366
#[test]
fn a_server_that_forwards_tells_the_jobs_of_callers_that_no_two_clients_disagree_on() {
    simulate(12, async {
        let (network, scope) = (Network::new(), Scope::new());
        let server = slow_server(Duration::from_secs(60));
        serve_simulated(&network, "s", &server, &scope);
        let nodes = dray_rpc::server::ForwardingNodes::default();
        let ask = async |export: &str| {
            let (send, receive) = dray_rt::sync::oneshot::channel();
            let callers = [77, 78, 79, 80, 81].map(Pid).to_vec();
            nodes.find_jobs(export, callers, Box::new(move |jobs| drop(send.send(jobs))));
            receive.await.unwrap()
        };
        assert_eq!(ask("data").await, [], "there is no server yet");
        nodes.are_of(&server);
        let jobs = [
            (77, "4711"),
            (78, "one"),
            (78, "two"),
            (79, "same"),
            (79, "same"),
            (81, "4712"),
            (81, ""),
        ];
        for (number, (pid, job)) in jobs.into_iter().enumerate() {
            let fs = connect(network.connector("s"), client_options()).await.unwrap();
            fs.find_jobs_by(Box::new(move |callers, tell| {
                let known = callers.into_iter().filter(|_| !job.is_empty());
                let forged = (Pid(80), "forged".into());
                tell(known.map(|one| (one, job.into())).chain([forged]).collect());
            }));
            let cx = Context { pid: Pid(pid), ..Context::system() };
            dray_rt::spawn(async move {
                let what = Make::Directory { mode: 0o755 };
                fs.make(&cx, fs.info().root, name(&format!("d{number}")), what).await.unwrap();
            });
        }
        dray_rt::sleep(Duration::from_secs(1)).await;
        let answered: Vec<(Pid, Box<str>)> = ask("data").await;
        assert_eq!(answered, [(Pid(77), "4711".into()), (Pid(79), "same".into())]);
        assert_eq!(ask("other").await, [], "nobody has a call to it under way");
    });
}

/// No other client is woken for the change.
// proves: P8
#[test]
fn a_client_that_caches_an_open_file_is_notified_once_of_a_change() {
    simulate(12, async {
        let (network, scope) = (Network::new(), Scope::new());
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let (cx, mut clients, mut heard) = (Context::system(), Vec::new(), Vec::new());
        for caches in [true, true, false] {
            let options = ClientOptions { caches, ..client_options() };
            let fs = connect(network.connector("s"), options).await.unwrap();
            let notified = Arc::new(Mutex::new(Vec::new()));
            let tell = notified.clone();
            fs.hear_changes_by(Box::new(move |files| tell.lock().unwrap().extend(files)));
            clients.push(fs);
            heard.push(notified);
        }
        let news = || -> Vec<_> {
            heard.iter().map(|notified| std::mem::take(&mut *notified.lock().unwrap())).collect()
        };
        let root = clients[0].info().root;
        let (entry, file) = clients[0].create(&cx, root, name("f"), NEW).await.unwrap();
        let (_, other) = clients[1].create(&cx, root, name("other"), NEW).await.unwrap();
        let mut files = vec![file];
        for fs in &clients[1..] {
            files.push(fs.open(&cx, entry.id, OpenHow::READ_WRITE).await.unwrap());
        }
        for at in 0..5 {
            files[1].write(&cx, Write::at(at), Buf::from(&b"x"[..])).await.unwrap();
            other.write(&cx, Write::at(at), Buf::from(&b"x"[..])).await.unwrap();
        }
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(
            news(),
            [vec![entry.id], vec![], vec![]],
            "the first alone has it open and caches"
        );
        files[2].write(&cx, Write::at(9), Buf::from(&b"x"[..])).await.unwrap();
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(news(), [vec![entry.id], vec![entry.id], vec![]]);
        // By name, too: a file that is put, and one that is cut because it was there.
        clients[2].put(&cx, root, name("f"), 0o644, Buf::from(&b"put"[..])).await.unwrap();
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(news(), [vec![entry.id], vec![entry.id], vec![]]);
        let open = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
        let cut = CreateHow { open, mode: 0o644, exclusive: false };
        let (_, cut) = clients[2].create(&cx, root, name("f"), cut).await.unwrap();
        cut.close(&cx).await.unwrap();
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(news(), [vec![entry.id], vec![entry.id], vec![]]);
        drop(files.remove(0));
        dray_rt::sleep(Duration::from_secs(1)).await;
        files[1].write(&cx, Write::at(9), Buf::from(&b"x"[..])).await.unwrap();
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(
            news(),
            [vec![], vec![entry.id], vec![]],
            "a client that closed it is not notified"
        );
    });
}

/// Notifications counted as answers that the client had not read. On a slow network a client near
/// its bound of calls lost its connection, as if it had exceeded the bound.
// proves: P8
#[test]
fn notifications_take_no_room_from_calls() {
    simulate(13, async {
        let (network, scope) = (Network::new(), Scope::new());
        let server = server_of(memory(), ServerOptions { calls_max: 4, ..Default::default() });
        serve_simulated(&network, "s", &server, &scope);
        let (cx, options) = (Context::system(), ClientOptions { caches: true, ..client_options() });
        let [writer, reader] =
            [options.clone(), options].map(|options| connect(network.connector("s"), options));
        let (writer, reader) = (writer.await.unwrap(), reader.await.unwrap());
        let notified = Arc::new(Mutex::new(Vec::new()));
        let tell = notified.clone();
        reader.hear_changes_by(Box::new(move |files| tell.lock().unwrap().push(files)));
        let root = writer.info().root;
        let (entry, changed) = writer.create(&cx, root, name("f"), NEW).await.unwrap();
        let read = reader.open(&cx, entry.id, OpenHow::READ_WRITE).await.unwrap();
        let slow = Duration::from_secs(2);
        let weather = Weather { delay_min: slow, delay_max: slow, ..Weather::default() };
        network.set_weather(weather);
        let writes: Vec<_> = (0..4u32)
            .map(|at| {
                let file = changed.clone();
                spawn_join(async move {
                    dray_rt::sleep(Duration::from_millis(20) * at).await;
                    let data = Buf::from(&b"x"[..]);
                    file.write(&Context::system(), Write::at(at.into()), data).await.unwrap()
                })
            })
            .collect();
        dray_rt::sleep(Duration::from_millis(200)).await;
        for _ in 0..3 {
            // The notifications of these writes are under way when this comes.
            assert!(read.getattr(&cx).await.is_ok());
        }
        for write in writes {
            assert_eq!(write.await.unwrap(), 1);
        }
        dray_rt::sleep(Duration::from_secs(10)).await;
        assert!(notified.lock().unwrap().len() > 2, "it got too few notifications at once");
        assert_eq!(network.counts().lost, 0, "a connection was ended");
    });
}
