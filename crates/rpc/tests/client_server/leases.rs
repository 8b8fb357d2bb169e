//! What a server leases, what it asks back before a change, and how long it waits.

use std::sync::Arc;
use std::time::Duration;

use crate::common::lessee::{Lessee, attributes, items, leased, one_name};
use crate::common::{memory, serve_simulated, simulate};
use dray_core::{Attr, Context, Errno, FileId, FileSystem, LeaseKinds, Make, Name, SetAttr};
use dray_fabric::sim::Network;
use dray_rpc::server::{Export, Journal, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rpc::wire::{Call, Input};
use dray_rt::{Scope, now, sleep};

const TERM: Duration = Duration::from_secs(5);
/// A tenth more: as long others wait.
const WAIT: Duration = Duration::from_millis(5500);

struct Site {
    network: Network,
    scope: Scope,
    journal: Arc<MemoryJournal>,
    fs: dray_backends::memory::MemoryFs,
    root: FileId,
    file: FileId,
}

impl Site {
    async fn new() -> Site {
        let (fs, cx) = (memory(), Context::system());
        let root = fs.info().root;
        let node = Make::Node { mode: libc::S_IFREG | 0o644, rdev: 0 };
        let name = Name::new(b"file").unwrap();
        let file = fs.make(&cx, root, name, node).await.unwrap().id;
        let (network, journal) = (Network::new(), Arc::new(MemoryJournal::default()));
        let site = Site { network, scope: Scope::new(), journal, fs, root, file };
        site.start().await;
        site
    }

    async fn start(&self) {
        self.start_after(StateLoss::Nothing).await;
    }

    async fn start_after(&self, loss: StateLoss) -> Server {
        let mut export = Export::new("data", Arc::new(self.fs.clone()), Vec::new());
        (export.insecure, export.leases) = (true, true);
        let options = ServerOptions { lease_term: TERM, ..ServerOptions::default() };
        let server = Server::new(options, vec![export], self.journal.clone());
        server.restore(loss).await;
        serve_simulated(&self.network, "s", &server, &self.scope);
        server
    }

    async fn client(&self) -> Lessee {
        Lessee::connect(&self.network, None).await
    }

    fn chmod(&self) -> Call<'static> {
        let set = SetAttr { mtime: Some(dray_core::TimeSet::Now), ..SetAttr::default() };
        Call::Setattr { id: self.file, handle: None, set }
    }

    fn make(&self, name: &'static str) -> Call<'static> {
        let (dir, name) = (self.root, name.as_bytes());
        Call::Make { dir, name, kind: 1, mode: 0o644, rdev: 0, target: b"" }
    }
}

fn attr_of(answer: &[u8]) -> Attr {
    Input::whole(answer).unwrap()
}

// proves: P214
#[test]
fn a_change_waits_until_others_have_given_back_what_it_breaks() {
    simulate(1, async {
        let site = Site::new().await;
        let (mut one, mut other) = (site.client().await, site.client().await);
        assert_eq!(one.welcome.lease_term_ms, 5000);
        let found = one.lookup(site.root, "file").await.unwrap();
        assert_eq!(leased(found.attr.validity), (true, true));
        other.begin(&site.chmod());
        let recalls = one.recalls().await;
        assert_eq!(items(&recalls), [attributes(site.file)]);
        sleep(Duration::from_millis(100)).await;
        assert!(other.answer().is_none(), "the lease holds");
        // Nobody gets a lease meanwhile.
        let mut third = site.client().await;
        let found = third.lookup(site.root, "file").await.unwrap();
        assert_eq!(leased(found.attr.validity), (true, false));
        one.give_back(&recalls);
        assert_eq!(one.recalls().await, []);
        assert!(other.answer().is_some());
        // What has been fought over is not leased for a while.
        for (wait, is_leased) in [(0, false), (300, true)] {
            sleep(Duration::from_millis(wait)).await;
            let asked = one.ask(&Call::Getattr { id: site.file, handle: None }).await;
            assert_eq!(leased(attr_of(&asked.1).validity).1, is_leased);
        }
    });
}

// proves: P214
#[test]
fn a_new_name_breaks_its_absence_and_nothing_else() {
    simulate(2, async {
        let site = Site::new().await;
        let (mut one, mut other) = (site.client().await, site.client().await);
        assert_eq!(one.lookup(site.root, "new").await, Err((Errno::ENOENT, true)));
        for name in ["new", "second", "third"] {
            other.begin(&site.make(name));
            let recalls = one.recalls().await;
            assert_eq!(items(&recalls), [one_name(site.root, name)]);
            assert!(other.answer().is_none(), "{name}");
            one.give_back(&recalls);
            sleep(Duration::from_millis(20)).await;
        }
        // The fourth within a second: all names are asked back.
        other.begin(&site.make("fourth"));
        let recalls = one.recalls().await;
        assert_eq!(
            (items(&recalls)[0].kinds, &items(&recalls)[0].name),
            (LeaseKinds::NAMES, &None)
        );
        one.give_back(&recalls);
        assert_eq!(one.lookup(site.root, "fifth").await, Err((Errno::ENOENT, false)));
        other.ask(&site.make("fifth")).await;
        assert_eq!(one.recalls().await, []);
        // Its own names are leased to who made them, once the directory is again.
        sleep(Duration::from_millis(300)).await;
        let made = other.ask(&site.make("sixth")).await;
        let entry: dray_core::Entry = Input::whole(&made.1).unwrap();
        assert_eq!(leased(entry.attr.validity), (true, true));
        assert_eq!(other.recalls().await, []);
    });
}

/// What a session changes itself, its client knows.
#[test]
fn a_session_keeps_its_leases_over_its_own_changes() {
    simulate(3, async {
        let site = Site::new().await;
        let mut one = site.client().await;
        one.lookup(site.root, "file").await.unwrap();
        let begun = now();
        let changed = one.ask(&site.chmod()).await;
        assert!(leased(attr_of(&changed.1).validity).1 && begun.elapsed() < TERM / 10);
        assert_eq!(one.recalls().await, []);
    });
}

// proves: P215
#[test]
fn who_does_not_answer_loses_its_leases_when_it_can_believe_them_no_more() {
    simulate(4, async {
        let site = Site::new().await;
        let (mut one, mut other) = (site.client().await, site.client().await);
        one.lookup(site.root, "file").await.unwrap();
        let heard = now();
        sleep(TERM / 5).await;
        let begun = now();
        other.ask(&site.chmod()).await;
        let waited = heard.elapsed();
        assert!(waited >= WAIT - Duration::from_millis(5) && waited < WAIT * 2, "{waited:?}");
        assert!(begun.elapsed() < WAIT && one.is_cut().await);
        let again = Lessee::connect(&site.network, Some(&one.welcome)).await;
        assert!(again.welcome.resumed);
        assert_eq!(again.welcome.lease_epoch, one.welcome.lease_epoch + 1);
        // It has no leases any more, and nobody waits for it.
        let begun = now();
        other.ask(&site.chmod()).await;
        assert!(begun.elapsed() < TERM / 10);
    });
}

/// Each mount command says hello and goodbye before it mounts. Changes waited for a term after that.
#[test]
fn nobody_waits_for_a_client_that_said_goodbye() {
    simulate(8, async {
        let site = Site::new().await;
        let (mut one, mut other) = (site.client().await, site.client().await);
        one.lookup(site.root, "file").await.unwrap();
        one.say_goodbye();
        sleep(Duration::from_millis(20)).await;
        let begun = now();
        other.ask(&site.chmod()).await;
        assert!(begun.elapsed() < TERM / 10, "{:?}", begun.elapsed());
    });
}

/// A client that makes calls and answers no recall was waited for as long as it made calls.
// proves: P215
#[test]
fn who_answers_no_recall_and_makes_calls_is_not_waited_for_for_ever() {
    simulate(5, async {
        let site = Site::new().await;
        let (mut one, mut other) = (site.client().await, site.client().await);
        one.lookup(site.root, "file").await.unwrap();
        let begun = now();
        other.begin(&site.chmod());
        while !one.is_cut().await {
            one.begin(&Call::Getattr { id: site.root, handle: None });
            sleep(Duration::from_millis(50)).await;
            assert!(begun.elapsed() < WAIT * 3);
        }
        assert!(other.answer().is_none(), "it may believe its lease since its last call");
        sleep(WAIT + Duration::from_millis(100)).await;
        assert!(other.answer().is_some() && begun.elapsed() < WAIT * 3);
    });
}

// proves: P215
#[test]
fn a_recall_is_sent_again_to_a_client_that_comes_back() {
    simulate(6, async {
        let site = Site::new().await;
        let (mut one, mut other) = (site.client().await, site.client().await);
        one.lookup(site.root, "file").await.unwrap();
        other.begin(&site.chmod());
        let first = one.recalls().await;
        let again = Lessee::connect(&site.network, Some(&one.welcome)).await;
        assert_eq!(again.welcome.lease_epoch, one.welcome.lease_epoch);
        let recalls = again.recalls().await;
        assert_eq!(recalls, first);
        again.give_back(&recalls);
        sleep(Duration::from_millis(50)).await;
        assert!(other.answer().is_some());
    });
}

// proves: P216
#[test]
fn a_server_that_follows_waits_for_what_the_one_before_has_leased() {
    simulate(7, async {
        let mut site = Site::new().await;
        site.client().await.lookup(site.root, "file").await.unwrap();
        let died = now();
        std::mem::take(&mut site.scope).kill();
        site.network.break_all("s");
        site.start().await;
        let mut other = site.client().await;
        assert!(other.lookup(site.root, "file").await.is_ok(), "who looks does not wait");
        other.ask(&site.chmod()).await;
        assert!(died.elapsed() >= WAIT, "{:?}", died.elapsed());
        let begun = now();
        other.ask(&site.chmod()).await;
        assert!(begun.elapsed() < TERM / 10);
    });
}

/// More of them than are asked one by one.
// proves: P296
#[test]
fn a_server_that_follows_waits_for_nobody_who_had_no_leases() {
    simulate(9, async {
        let mut site = Site::new().await;
        for _ in 0..70 {
            Lessee::without_leases(&site.network, None).await;
        }
        std::mem::take(&mut site.scope).kill();
        site.network.break_all("s");
        site.start().await;
        let mut other = site.client().await;
        let begun = now();
        other.ask(&site.chmod()).await;
        assert!(begun.elapsed() < TERM / 10, "{:?}", begun.elapsed());
    });
}

/// What was noted last may not be on media.
// proves: P296
#[test]
fn after_a_loss_of_power_anybody_may_have_had_leases() {
    for (loss, leased) in [(StateLoss::Nothing, None), (StateLoss::Unsynced, Some(0))] {
        simulate(10, async move {
            let mut site = Site::new().await;
            site.client().await;
            site.journal.load()[0].1.set_leases(false); // an older note is there
            std::mem::take(&mut site.scope).kill();
            site.network.break_all("s");
            let clients = site.start_after(loss).await.status().clients;
            assert_eq!(clients.len(), 1);
            assert_eq!(clients[0].leases.as_ref().map(|leases| leases.held), leased, "{loss:?}");
        });
    }
}

/// The client was mounted with other options, or is another version.
// proves: P296
#[test]
fn a_session_that_comes_back_for_leases_is_waited_for_again() {
    simulate(11, async {
        let mut site = Site::new().await;
        let without = Lessee::without_leases(&site.network, None).await;
        Lessee::connect(&site.network, Some(&without.welcome)).await;
        for waits in [true, false] {
            std::mem::take(&mut site.scope).kill();
            site.network.break_all("s");
            site.start().await;
            let mut other = site.client().await;
            let begun = now();
            other.ask(&site.chmod()).await;
            assert_eq!(begun.elapsed() > TERM / 10, waits, "{:?}", begun.elapsed());
            other.say_goodbye();
            Lessee::without_leases(&site.network, Some(&without.welcome)).await;
        }
    });
}

/// Else a server that is killed again and again would carry out no change.
// proves: P216
#[test]
fn a_client_that_comes_back_is_asked_for_what_the_server_before_has_leased() {
    simulate(8, async {
        let mut site = Site::new().await;
        let (one, without) =
            (site.client().await, Lessee::without_leases(&site.network, None).await);
        std::mem::take(&mut site.scope).kill();
        site.network.break_all("s");
        site.start().await;
        let begun = now();
        let one = Lessee::connect(&site.network, Some(&one.welcome)).await;
        Lessee::without_leases(&site.network, Some(&without.welcome)).await;
        let mut other = site.client().await;
        other.begin(&site.chmod());
        let recalls = one.recalls().await;
        assert_eq!(items(&recalls), [attributes(site.file)]);
        assert!(other.answer().is_none());
        one.give_back(&recalls);
        sleep(Duration::from_millis(50)).await;
        assert!(other.answer().is_some() && begun.elapsed() < TERM / 10);
        // Each change asks for what it breaks.
        other.begin(&site.make("name"));
        let recalls = one.recalls().await;
        assert_eq!(items(&recalls), [one_name(site.root, "name"), attributes(site.root)]);
        one.give_back(&recalls);
        sleep(Duration::from_millis(50)).await;
        assert!(other.answer().is_some());
        // What was leased before has ended by itself a term later.
        sleep(WAIT).await;
        other.ask(&site.chmod()).await;
        assert!(one.recalls().await.is_empty());
    });
}
