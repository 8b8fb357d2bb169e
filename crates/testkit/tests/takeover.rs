//! Two servers of one slice, of which one dies all the time and the other one takes over.

use dray_rpc::server::Sabotage;
use dray_testkit::simulator::{PairKind, WorkloadKind, run_takeovers};

/// Seeds of each kind of work.
const SEEDS: u64 = 6;
/// Of so many seeds some must show what is broken.
const BROKEN_SEEDS: u64 = 20;

/// Work on names, rights and locks. The content of files is left out: docs/adr/0042-failover.md says
/// what is not right there yet.
#[test]
fn what_a_server_leaves_its_backup_goes_on_with() {
    let kinds =
        [WorkloadKind::Names, WorkloadKind::Deleted, WorkloadKind::Rights, WorkloadKind::Flocks];
    for kind in kinds {
        let mut takeovers = 0;
        for seed in 0..SEEDS {
            let ran = run_takeovers(PairKind::TwoMachines, kind, seed, None);
            takeovers += ran.unwrap_or_else(|failure| panic!("{kind:?}: {failure}")).takeovers;
        }
        assert!(takeovers >= SEEDS, "{kind:?}: only {takeovers} takeovers");
    }
}

#[test]
fn a_change_that_is_made_before_the_backup_has_its_intent_is_noticed() {
    // Of seeds that are well without it.
    let shows = |seed: &u64| {
        let broken = run_takeovers(
            PairKind::TwoMachines,
            WorkloadKind::Append,
            *seed,
            Some(Sabotage::Shipping),
        );
        broken.is_err()
            && run_takeovers(PairKind::TwoMachines, WorkloadKind::Append, *seed, None).is_ok()
    };
    assert!((0..BROKEN_SEEDS).any(|seed| shows(&seed)), "nobody shows it");
}
