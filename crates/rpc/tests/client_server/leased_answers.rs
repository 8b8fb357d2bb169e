//! Clients that have leases: what they answer without the server, and when no more.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::leased_site::{LeasedSite, TERM, YES};
use crate::common::{client_options, connect, simulate};
use dray_core::{
    Buf, Context, CreateHow, Errno, FileId, FileSystem, Name, OpenHow, Recall, RemoveKind,
    SessionControl, SetAttr, Ttl, Write,
};
use dray_fabric::sim::Weather;
use dray_rpc::client::{ClientOptions, LeaseWish, RemoteFs};
use dray_rt::{sleep, spawn_join};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

fn calls(fs: &RemoteFs) -> u64 {
    fs.session().status().channels.iter().map(|channel| channel.calls).sum()
}

/// The size of "f" and the calls that it took to find out, by its name and by its id.
async fn size_and_calls(fs: &RemoteFs, root: FileId) -> (Result<u64, Errno>, u64) {
    let (cx, before) = (Context::system(), calls(fs));
    let size = match fs.lookup(&cx, root, name("f")).await {
        Ok(entry) => {
            let attr = fs.getattr(&cx, entry.id).await.unwrap();
            assert_eq!(attr.size, entry.attr.size);
            Ok(attr.size)
        }
        Err(error) => Err(error.errno()),
    };
    (size, calls(fs) - before)
}

// proves: P218
#[test]
fn what_nobody_else_changes_is_asked_for_once_and_a_change_is_seen_at_once() {
    simulate(21, async {
        let site = LeasedSite::new();
        let (root, cx) = (site.root, Context::system());
        let (reader, writer) =
            (site.client("reader", YES).await, site.client("writer", LeaseWish::No).await);
        let heard = Arc::new(Mutex::new(0));
        let hears = heard.clone();
        reader.hear_recalls_by(Arc::new(move |recall, _done| {
            assert!(matches!(recall, Recall::Items(_)));
            *hears.lock().unwrap() += 1;
        }));
        let ask = || size_and_calls(&reader, root);
        assert_eq!(ask().await, (Err(Errno::ENOENT), 1));
        assert_eq!(ask().await, (Err(Errno::ENOENT), 0), "absence is remembered");
        let (entry, file) = writer.create(&cx, root, name("f"), NEW).await.unwrap();
        assert_eq!(ask().await.0, Ok(0));
        sleep(Duration::from_secs(1)).await; // what was fought over rests for a moment
        for (size, change) in [(1, "write"), (7, "truncate"), (0, "remove")] {
            ask().await.0.unwrap();
            let (asked, calls) = ask().await;
            assert_eq!((asked.is_ok(), calls), (true, 0), "before {change}");
            match change {
                "write" => {
                    file.write(&cx, Write::at(0), Buf::from(&b"x"[..])).await.unwrap();
                }
                "truncate" => {
                    let set = SetAttr { size: Some(size), ..SetAttr::default() };
                    writer.setattr(&cx, entry.id, set).await.unwrap();
                }
                _ => writer.remove(&cx, root, name("f"), RemoveKind::File).await.unwrap(),
            }
            let seen = ask().await.0;
            assert_eq!(seen, if change == "remove" { Err(Errno::ENOENT) } else { Ok(size) });
            sleep(Duration::from_secs(20)).await;
        }
        assert!(*heard.lock().unwrap() >= 4);
        let status = reader.session().status().leases.unwrap();
        assert!(status.hits >= 7 && status.recalled >= 4, "{status:?}");
        assert!(writer.session().status().leases.is_none());
    });
}

// proves: P218
#[test]
fn own_changes_are_seen_at_once_and_the_rest_stays_leased() {
    simulate(22, async {
        let site = LeasedSite::new();
        let (root, cx) = (site.root, Context::system());
        let fs = site.client("one", YES).await;
        let (_, file) = fs.create(&cx, root, name("f"), NEW).await.unwrap();
        let (other, _) = fs.create(&cx, root, name("other"), NEW).await.unwrap();
        fs.getattr(&cx, other.id).await.unwrap();
        for size in 1..5 {
            file.write(&cx, Write::at(size - 1), Buf::from(&b"x"[..])).await.unwrap();
            assert_eq!(file.getattr(&cx).await.unwrap().size, size);
            assert_eq!(size_and_calls(&fs, root).await.0, Ok(size));
            assert_eq!(size_and_calls(&fs, root).await, (Ok(size), 0));
        }
        let before = calls(&fs);
        fs.getattr(&cx, other.id).await.unwrap();
        assert_eq!(calls(&fs), before);
        fs.rename(&cx, (root, name("f")), (root, name("g")), dray_core::RenameHow::Replace)
            .await
            .unwrap();
        assert_eq!(size_and_calls(&fs, root).await.0, Err(Errno::ENOENT));
        assert_eq!(fs.lookup(&cx, root, name("g")).await.unwrap().attr.size, 4);
    });
}

/// The server goes on without a client that is cut off, and only when that client has stopped to
/// believe what it had.
// proves: P219
#[test]
fn a_client_that_is_cut_off_stops_believing_before_the_others_go_on() {
    simulate(23, async {
        let site = LeasedSite::new();
        let (root, cx) = (site.root, Context::system());
        let options = ClientOptions {
            leases: YES,
            timeout: Some(Duration::from_secs(1)),
            ..client_options()
        };
        let cut = connect(site.network.connector_from("cut", "s"), options).await.unwrap();
        let writer = site.client("writer", YES).await;
        let (entry, _) = writer.create(&cx, root, name("f"), NEW).await.unwrap();
        assert_eq!(size_and_calls(&cut, root).await.0, Ok(0));
        site.network.partition("cut", true);
        let changing = writer.clone();
        let change = spawn_join(async move {
            let set = SetAttr { size: Some(9), ..SetAttr::default() };
            changing.setattr(&Context::system(), entry.id, set).await.unwrap();
        });
        let done = Arc::new(Mutex::new(false));
        let says = done.clone();
        dray_rt::spawn(async move {
            change.await.unwrap();
            *says.lock().unwrap() = true;
        });
        let mut believed = 0;
        while !*done.lock().unwrap() {
            sleep(Duration::from_millis(100)).await;
            let Ok(attr) = cut.getattr(&cx, entry.id).await else { continue };
            assert!(attr.size == 0 && !*done.lock().unwrap(), "a stale answer");
            assert!(attr.validity.attributes <= Some(Ttl::of(TERM)));
            believed += 1;
        }
        assert!(believed > 30, "it believed what it had for about a term: {believed}");
        site.network.partition("cut", false);
        let attr = loop {
            match cut.getattr(&cx, entry.id).await {
                Ok(attr) => break attr,
                Err(_) => sleep(Duration::from_millis(100)).await,
            }
        };
        assert_eq!(attr.size, 9);
    });
}

/// The server recalls nothing of the session that changes. A thread of that session could be shown
/// what it remembered, while another client had seen the change already.
// proves: P218
#[test]
fn nobody_sees_an_older_state_than_anybody_has_seen() {
    for seed in 100..140_u64 {
        let break_one_in = (seed % 2 == 0).then_some(100);
        simulate(seed, async move {
            let site = LeasedSite::new();
            let root = site.root;
            let changer = site.client("changer", YES).await;
            let other = site.client("other", YES).await;
            let new = changer.create(&Context::system(), root, name("f"), NEW).await.unwrap();
            let (id, seen) = (new.0.id, Arc::new(Mutex::new(0_u64)));
            site.network.set_weather(Weather {
                delay_max: Duration::from_millis(3),
                break_one_in,
                ..Weather::default()
            });
            let mut readers = Vec::new();
            for fs in [&changer, &changer, &other] {
                let (fs, seen) = (fs.clone(), seen.clone());
                readers.push(spawn_join(async move {
                    for step in 0..60 {
                        let before = *seen.lock().unwrap();
                        let size = fs.getattr(&Context::system(), id).await.unwrap().size;
                        assert!(size >= before, "{size} after {before}");
                        let raise = |seen: &mut u64| *seen = size.max(*seen);
                        raise(&mut seen.lock().unwrap());
                        sleep(Duration::from_micros(100 + 300 * (step % 7))).await;
                    }
                }));
            }
            for size in 1..20 {
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                changer.setattr(&Context::system(), id, set).await.unwrap();
                sleep(Duration::from_millis(size % 4)).await;
            }
            for reader in readers {
                reader.await.unwrap();
            }
        });
    }
}
