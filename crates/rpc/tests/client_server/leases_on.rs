//! What a server recalls from a session whose client leases on to others what it has (ADR 0061).

use crate::common::leased_site::LeasedSite;
use crate::common::lessee::{Lessee, attributes, items, leased};
use crate::common::simulate;
use dray_core::{Context, FileSystem, Make, Name, RemoveKind};
use dray_rpc::wire::{Call, FEATURE_LEASES, FEATURE_LEASES_ON};
use dray_rt::sleep;
use std::time::Duration;

fn remove(site: &LeasedSite) -> Call<'static> {
    Call::Remove { dir: site.root, name: b"file", kind: RemoveKind::File }
}

/// The file may be another one than the client has taken it for, and has recalled from others.
// proves: P333
#[test]
fn what_is_named_by_a_name_alone_is_recalled_from_who_changes_it_and_leases_on() {
    for (features, is_asked) in
        [(FEATURE_LEASES, false), (FEATURE_LEASES | FEATURE_LEASES_ON, true)]
    {
        simulate(1, async {
            let site = LeasedSite::new();
            let (cx, node) =
                (Context::system(), Make::Node { mode: libc::S_IFREG | 0o644, rdev: 0 });
            let name = Name::new(b"file").unwrap();
            let file = site.below.make(&cx, site.root, name, node).await.unwrap().id;
            let mut one = Lessee::connect_with(&site.network, None, features).await;
            let found = one.lookup(site.root, "file").await.unwrap();
            assert_eq!(leased(found.attr.validity), (true, true));
            one.begin(&remove(&site));
            let recalls = one.recalls().await;
            match is_asked {
                false => assert_eq!(recalls, []),
                true => {
                    assert_eq!(items(&recalls), [attributes(file)]);
                    sleep(Duration::from_millis(100)).await;
                    assert!(one.answer().is_none(), "others may believe it");
                    one.give_back(&recalls);
                }
            }
            sleep(Duration::from_millis(20)).await;
            assert!(one.answer().is_some_and(|(head, _)| head.errno == 0));
        });
    }
}
