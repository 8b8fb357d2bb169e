//! Leases end with changes outside dray.

use std::sync::Arc;
use std::time::Duration;

use crate::common::lessee::{Lessee, items, leased};
use crate::common::{memory, serve_simulated, simulate};
use dray_core::{
    Attr, Context, FileId, FileSystem, LeaseKinds, Make, Name, OnOutsideChanges, OutsideChange,
    RecallItem,
};
use dray_fabric::sim::Network;
use dray_rpc::server::{Export, MemoryJournal, OutsideStatus, Server, ServerOptions};
use dray_rpc::wire::{Call, Input, RecallMessage};
use dray_rt::{Scope, now, sleep};

/// A term and a tenth.
const WAIT: Duration = Duration::from_millis(5500);
const FILES: usize = 600;

struct Site {
    network: Network,
    server: Server,
    outside: Arc<dyn OnOutsideChanges>,
    root: FileId,
    files: Vec<FileId>,
    _scope: Scope,
}

impl Site {
    async fn new() -> Site {
        let (fs, cx) = (memory(), Context::system());
        let root = fs.info().root;
        let mut files = Vec::new();
        for number in 0..FILES {
            let node = Make::Node { mode: libc::S_IFREG | 0o644, rdev: 0 };
            let name = format!("f{number}");
            let name = Name::new(name.as_bytes()).unwrap();
            files.push(fs.make(&cx, root, name, node).await.unwrap().id);
        }
        let mut export = Export::new("data", Arc::new(fs), Vec::new());
        (export.insecure, export.leases) = (true, true);
        let outside = export.on_outside_changes();
        let everything = OutsideChange { id: root, kinds: LeaseKinds::ALL };
        outside.changed(&[everything]); // nobody is there yet
        outside.missed();
        let options =
            ServerOptions { lease_term: Duration::from_secs(5), ..ServerOptions::default() };
        let server = Server::new(options, vec![export], Arc::new(MemoryJournal::default()));
        let (network, scope) = (Network::new(), Scope::new());
        serve_simulated(&network, "s", &server, &scope);
        Site { network, server, outside, root, files, _scope: scope }
    }

    async fn client(&self) -> Lessee {
        Lessee::connect(&self.network, None).await
    }

    fn change(&self, number: usize) {
        let kinds = LeaseKinds::ATTRIBUTES;
        self.outside.changed(&[OutsideChange { id: self.files[number], kinds }]);
    }

    fn status(&self) -> OutsideStatus {
        self.server.status().outside[0].1
    }
}

fn item(id: FileId, kinds: LeaseKinds) -> RecallItem {
    RecallItem { id, kinds, name: None }
}

/// Whether the attributes of a file are leased with this answer.
async fn is_leased(client: &mut Lessee, id: FileId) -> bool {
    let asked = client.ask(&Call::Getattr { id, handle: None }).await;
    let attr: Attr = Input::whole(&asked.1).unwrap();
    leased(attr.validity).1
}

// proves: P277
#[test]
fn what_is_changed_outside_dray_is_asked_back_from_everybody() {
    simulate(1, async {
        let site = Site::new().await;
        let (mut one, mut other) = (site.client().await, site.client().await);
        for client in [&mut one, &mut other] {
            assert!(client.lookup(site.root, "f1").await.is_ok());
            assert!(is_leased(client, site.files[2]).await);
        }
        site.change(1);
        site.change(3); // of which nothing is leased
        for client in [&one, &other] {
            let recalls = client.recalls().await;
            assert_eq!(items(&recalls), [item(site.files[1], LeaseKinds::ATTRIBUTES)]);
            client.give_back(&recalls);
        }
        let names = OutsideChange { id: site.root, kinds: LeaseKinds::ALL };
        site.outside.changed(&[names]);
        let recalls = one.recalls().await;
        assert_eq!(
            items(&recalls),
            [item(site.root, LeaseKinds::NAMES)],
            "its attributes are not leased"
        );
        one.give_back(&recalls);
        assert_eq!(site.status(), OutsideStatus { changes: 2, missed: 0 });
        // It rests for a moment, as after each recall.
        assert!(!is_leased(&mut one, site.files[1]).await);
        sleep(Duration::from_millis(300)).await;
        assert!(is_leased(&mut one, site.files[1]).await);
    });
}

// proves: P277
#[test]
fn who_does_not_give_back_what_was_changed_outside_is_fenced() {
    simulate(3, async {
        let site = Site::new().await;
        let mut one = site.client().await;
        assert!(is_leased(&mut one, site.files[1]).await);
        site.change(1);
        sleep(WAIT * 2).await;
        let status = site.server.status().leases[0].1;
        assert_eq!((status.fences, status.held), (1, 0));
        let again = Lessee::connect(&site.network, Some(&one.welcome)).await;
        assert_ne!(again.welcome.lease_epoch, one.welcome.lease_epoch);
    });
}

// proves: P279
#[test]
fn missed_changes_end_all_leases_and_nothing_is_leased_for_a_while() {
    simulate(4, async {
        let site = Site::new().await;
        let (mut one, mut other) = (site.client().await, site.client().await);
        for file in &site.files {
            assert!(is_leased(&mut one, *file).await);
        }
        assert!(is_leased(&mut other, site.files[0]).await);
        let begun = now();
        site.outside.missed();
        site.outside.missed(); // which changes nothing but the rest
        let mut recalled = 0;
        loop {
            let recalls: Vec<RecallMessage> = one.recalls().await;
            if recalls.is_empty() {
                break;
            }
            assert_eq!(recalls.len(), 1, "a message after the other");
            recalled += recalls[0].items.len();
            one.give_back(&recalls);
        }
        assert_eq!(recalled, FILES);
        let recalls = other.recalls().await;
        assert_eq!(items(&recalls), [item(site.files[0], LeaseKinds::ATTRIBUTES)]);
        other.give_back(&recalls);
        sleep(Duration::from_millis(1)).await;
        assert_eq!(site.server.status().leases[0].1.held, 0);
        assert!(begun.elapsed() < Duration::from_millis(400), "{:?}", begun.elapsed());
        assert!(!is_leased(&mut one, site.files[5]).await);
        sleep(Duration::from_millis(500)).await;
        assert!(is_leased(&mut one, site.files[5]).await);
        assert_eq!(site.status(), OutsideStatus { changes: 0, missed: 2 });
    });
}
