//! One thing goes wrong at a time: what a safeguard is for, and that nobody else waits for longer.

use std::sync::Arc;
use std::time::Duration;

use dray_backends::memory::{MemoryDisk, MemoryOptions};
use dray_core::{Attr, CreateHow, FileSystem, OpenHow, Validity};
use dray_rpc::client::LeaseWish;
use dray_rpc::server::Sabotage;
use dray_rt::sync::oneshot;
use dray_rt::{DriverKind, Executor, sleep, timeout};

use super::{Broken, CLIENTS, Client, NEW, Servers, TERM, Work, name, time};

/// Both servers, a client below that has looked at the first file, and one above. Nothing goes wrong by itself.
struct Scene {
    servers: Arc<Servers>,
    work: Work,
    below: Client,
    above: Client,
}

impl Scene {
    async fn new(broken: Broken) -> Scene {
        let options = MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() };
        let servers = Servers::new(MemoryDisk::new(options), broken);
        let work = Work::prepare(&servers.disk).await;
        servers.start_above();
        servers.start_between();
        let (mut clients, network) = (Vec::new(), &servers.network);
        for number in [0, CLIENTS - 1] {
            clients.push(Client::mount(network, number).await);
        }
        let [below, above] = clients.try_into().ok().unwrap();
        let scene = Scene { servers, work, below, above };
        assert_eq!(scene.seen(0).await, 0);
        scene
    }

    /// The time of a file, as the client below sees it.
    async fn seen(&self, file: usize) -> i64 {
        let (cx, id) = (self.below.cx(), self.work.files[file]);
        self.below.fs.getattr(&cx, id).await.unwrap().mtime.sec
    }

    async fn is_spared(&self) -> bool {
        let hits = || self.below.fs.session().status().leases.unwrap().hits;
        let before = hits();
        self.seen(0).await;
        hits() > before
    }

    /// A client above sets the time of the first file, which takes its time.
    fn change(&self) -> oneshot::Receiver<()> {
        let (above, id, (tell, changed)) =
            (self.above.clone(), self.work.files[0], oneshot::channel());
        dray_rt::spawn(async move {
            above.fs.setattr(&above.cx(), id, time(7)).await.unwrap();
            drop(tell);
        });
        changed
    }
}

fn play<T>(scene: impl AsyncFnOnce() -> T) -> T {
    Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(scene())
}

/// What the client below sees of the first file when the client above has heard that it was changed. It waits for
/// `host`, which is cut off, where it does not see it at once.
async fn seen_behind_the_change(scene: &Scene, host: &str) -> i64 {
    let looked = timeout(TERM, scene.seen(0)).await;
    scene.servers.network.partition(host, false);
    match looked {
        Ok(seen) => seen,
        Err(_) => scene.seen(0).await,
    }
}

/// With all safeguards the client below sees the change, and without this one it does not.
fn is_needed(safeguard: Sabotage, scene: impl AsyncFn(Broken) -> i64) {
    for (broken, seen) in [(None, 7), (Some(safeguard), 0)] {
        let broken = Broken { between: broken, ..Broken::default() };
        assert_eq!(play(async || scene(broken).await), seen, "{broken:?}");
    }
}

// proves: P329
#[test]
fn recalls_from_above_wait_for_those_below() {
    is_needed(Sabotage::UpperRecalls, async |broken| {
        let scene = Scene::new(broken).await;
        assert!(scene.is_spared().await);
        scene.servers.network.partition("client0", true);
        scene.change().await.ok();
        seen_behind_the_change(&scene, "client0").await
    });
}

// proves: P329
#[test]
fn what_is_not_leased_above_is_not_leased_below() {
    is_needed(Sabotage::UpperGrants, async |broken| {
        let scene = Scene::new(Broken { leases_nothing_above: true, ..broken }).await;
        assert_eq!(scene.is_spared().await, broken.between.is_some());
        scene.change().await.ok();
        scene.seen(0).await
    });
}

/// Nobody would recall what the answer says.
// proves: P329
#[test]
fn a_client_without_leases_hears_nothing_of_those_of_its_server() {
    play(async || {
        let scene = Scene::new(Broken::default()).await;
        assert!(scene.is_spared().await);
        let plain = Client::mount_with(&scene.servers.network, 1, LeaseWish::No).await;
        let (fs, cx, root) = (&plain.fs, plain.cx(), scene.work.root);
        let unsaid = |attr: Attr| assert_eq!(attr.validity, Validity::UNSAID);
        unsaid(fs.getattr(&cx, scene.work.files[0]).await.unwrap());
        for text in ["one", "made"] {
            let (own, how) = (plain.cx(), CreateHow { exclusive: false, ..NEW });
            let made = fs.create(&own, root, name(text), how);
            let (entry, file) = made.await.unwrap();
            unsaid(entry.attr);
            file.close(&plain.cx()).await.unwrap();
            unsaid(fs.lookup(&cx, root, name(text)).await.unwrap().attr);
        }
        assert_eq!(fs.lookup(&cx, root, name("absent")).await.unwrap_err().absence(), None);
        let dir = fs.open(&plain.cx(), root, OpenHow::DIRECTORY).await.unwrap();
        let page = dir.readdir(&plain.cx(), 0, 64 << 10, true).await.unwrap();
        let attrs: Vec<Attr> = page.iter().filter_map(|(_, entry)| entry.attr).collect();
        assert!(attrs.len() >= 3);
        attrs.into_iter().for_each(unsaid);
    });
}

/// The server between answers from its memory while it is cut off from the one above.
// proves: P330
#[test]
fn a_server_that_is_cut_off_from_above_answers_nobody_who_would_believe_for_longer() {
    is_needed(Sabotage::UpperContact, async |broken| {
        let scene = Scene::new(broken).await;
        let other = Client::mount(&scene.servers.network, 1).await;
        other.fs.getattr(&other.cx(), scene.work.files[1]).await.unwrap();
        assert!(scene.is_spared().await);
        scene.servers.network.partition("upward", true);
        let changed = scene.change();
        sleep(TERM - TERM / 8).await;
        let asked = timeout(TERM / 16, scene.seen(1)).await.is_ok();
        assert_eq!(asked, broken.between.is_some());
        changed.await.ok();
        seen_behind_the_change(&scene, "upward").await
    });
}

/// The server above has ended all leases of the one between, which comes back.
// proves: P330
#[test]
fn leases_below_end_with_those_above() {
    is_needed(Sabotage::UpperEnd, async |broken| {
        let scene = Scene::new(broken).await;
        assert!(scene.is_spared().await);
        scene.servers.network.partition("upward", true);
        scene.change().await.ok();
        scene.servers.network.partition("upward", false);
        scene.seen(1).await; // a contact with the server between
        scene.seen(0).await
    });
}

/// A client below is away while its server is killed.
// proves: P331
#[test]
fn a_server_that_was_started_anew_asks_clients_of_before_for_what_is_recalled_from_above() {
    is_needed(Sabotage::UpperRestart, async |broken| {
        let scene = Scene::new(broken).await;
        assert!(scene.is_spared().await);
        scene.servers.network.partition("client0", true);
        scene.servers.restart(true, Duration::from_millis(1)).await;
        scene.change().await.ok();
        seen_behind_the_change(&scene, "client0").await
    });
}

/// Nobody waits for longer because a client below is away: the server between keeps its own leases.
// proves: P332
#[test]
fn a_client_below_that_does_not_answer_costs_its_server_no_leases() {
    play(async || {
        let scene = Scene::new(Broken::default()).await;
        assert!(scene.is_spared().await);
        scene.servers.network.partition("client0", true);
        let begun = dray_rt::now();
        scene.change().await.ok();
        assert!(begun.elapsed() < TERM * 6 / 10, "{:?}", begun.elapsed());
        assert_eq!(scene.servers.fences(), 0);
        assert_eq!(seen_behind_the_change(&scene, "client0").await, 7);
    });
}
